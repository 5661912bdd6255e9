"""The rows of a sweep: each variant built, scored and timed. What several rows need is made once."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

from trtdet.backends import Backend, Built, EngineFacts, choose, open_engine
from trtdet.backends.requests import Target
from trtdet.config import NmsConfig, SiluForm
from trtdet.errors import CalibrationError, TrtdetWarning
from trtdet.evaluation.comparison import compare
from trtdet.evaluation.scoring import Evaluation, evaluate_each
from trtdet.mixed_precision.ranking import rank
from trtdet.mixed_precision.scores import Sensitivity
from trtdet.performance import BenchOptions, measure
from trtdet.performance import Target as Timed
from trtdet.pipeline.matrix import Group, Keep, Matrix
from trtdet.pipeline.options import RANKED_IMAGES, CalibrationOptions, KeepOptions
from trtdet.pipeline.stages.bundles import model_bytes
from trtdet.pipeline.stages.calibrating import HISTOGRAMS, calibrated
from trtdet.pipeline.stages.correcting import Prepared, prepared, prepared_beside
from trtdet.pipeline.stages.engines import built_engine
from trtdet.pipeline.stages.networks import Network, explicit_networks, float_network
from trtdet.pipeline.stages.planning import choose_plan
from trtdet.pipeline.stages.rewriting import Graph, host_graph
from trtdet.progress import Progress, silent
from trtdet.runtime.detector import Detector

TIMINGS = "timing-cache"

_NO_ENGINE: dict[str, Any] = {"build_seconds": None, "engine_mb": None, "latency_ms": None}


def save_histograms(matrix: Matrix, progress: Progress) -> None:
    """Runs the calibration images, unless an earlier sweep in the folder ran them through the same graph."""
    place = matrix.folder / HISTOGRAMS
    calibration = replace(matrix.options.calibration, rule=CalibrationOptions.rule, histograms=None)
    options = matrix.options
    caps = choose(options.backend).capabilities
    graph = host_graph(matrix.model, matrix.config, caps=caps, attention=options.int8_attention, fp8=options.fp8)
    if place.exists():
        try:
            calibrated(graph, replace(calibration, histograms=place), matrix.selected)
        except CalibrationError as error:
            warnings.warn(f"{error.problem}: they are collected again", TrtdetWarning, stacklevel=2)
        else:
            return
    calibrated(graph, calibration, matrix.selected, progress=progress).collection.save(place)


def rows_of_group(matrix: Matrix, group: Group) -> list[dict[str, Any]]:
    """All rows of a group, as a worker of a cluster makes them."""
    return list(RowMaker(matrix, silent).rows(group, frozenset()))


class RowMaker:
    """Makes the rows of a sweep.

    Args:
        matrix: the sweep.
        progress: told of images and builds.
    """

    def __init__(self, matrix: Matrix, progress: Progress) -> None:
        self._matrix = matrix
        self._progress = progress
        self._graphs: dict[SiluForm, Graph] = {}
        self._networks: dict[str, tuple[str, tuple[list[Evaluation], dict[str, Any]]]] = {}
        """By the hash of an INT8 network: the variant that had it first, its scores and its facts."""
        self._corrected: dict[tuple[SiluForm, tuple[str, ...]], Prepared] = {}

    def rows(self, group: Group, found: frozenset[str]) -> Iterator[dict[str, Any]]:
        """The rows of a group whose names are not among ``found``."""
        if group.rule is not None:
            yield from self._quantized(group, group.rule, found)
            return
        evaluations, facts = self._references if group.precision == "fp32" else self._float(group)
        suppressions = self._matrix.options.suppressions
        for nms, got, reference in zip(suppressions, evaluations, self._references[0], strict=True):
            name = self._matrix.name(group, None, nms)
            if name not in found:
                scores = _scores(nms, got, None if got is reference else reference)
                start = {"variant": name, "precision": group.precision.upper(), **_origin(group)}
                yield {**start, **scores, "kept": None, "kept_names": [], **facts}

    @cached_property
    def _backend(self) -> Backend:
        return choose(self._matrix.options.backend)

    @cached_property
    def _references(self) -> tuple[list[Evaluation], dict[str, Any]]:
        return self._float(Group(precision="fp32"))

    def _graph(self, silu: SiluForm) -> Graph:
        if silu not in self._graphs:
            caps = self._backend.capabilities
            matrix, options = self._matrix, self._matrix.options
            graph = host_graph(matrix.model, matrix.config, silu, caps, options.int8_attention, options.fp8)
            self._graphs[silu] = replace(graph, int8_all=options.int8_all)
        return self._graphs[silu]

    def _float(self, group: Group) -> tuple[list[Evaluation], dict[str, Any]]:
        network = float_network(self._graph("keep"), group.precision)
        return self._scored(network, f"scoring {group.precision.upper()}")

    def _prepared(self, group: Group, rule: str) -> Prepared:
        matrix = self._matrix
        calibration = replace(matrix.options.calibration, rule=rule, histograms=matrix.folder / HISTOGRAMS)
        ranged = calibrated(self._graph(group.silu), calibration, matrix.selected, progress=self._progress)
        # Beside another rule corrections may be the same, and are only compared.
        key = (group.silu, group.corrections)
        known = self._corrected.get(key)
        beside = None if known is None else prepared_beside(known, ranged, calibration, self._progress)
        if beside is not None:
            return beside
        ready = prepared(ranged, calibration, group.corrections, self._progress)
        self._corrected.setdefault(key, ready)
        return ready

    def _quantized(self, group: Group, rule: str, found: frozenset[str]) -> Iterator[dict[str, Any]]:
        matrix, options = self._matrix, self._matrix.options
        ready = self._prepared(group, rule)

        @cache
        def ranked() -> Sensitivity:
            corrections = "-".join(group.corrections) or "none"
            formats = "".join(name[1:] for name in options.formats)
            rows = matrix.folder / f"ranking-{group.silu}-{rule}-{corrections}{formats}.jsonl"
            return rank(ready.subject(RANKED_IMAGES), rows=rows, progress=self._progress)

        for keep in options.keeps:
            names = [matrix.name(group, keep, nms) for nms in options.suppressions]
            if all(name in found for name in names):
                continue
            asked = KeepOptions(keep if isinstance(keep, int) else (keep,))
            planned = choose_plan(ready, asked, ranked, progress=self._progress)
            network = explicit_networks(ready, planned, self._backend.capabilities)[0]
            evaluations, built = self._scored_once(network, _title(group, keep), f"scoring {rule}, {keep} in FP16")
            made = {"options": list(options.formats)} if options.formats else {}
            facts = {"kept": keep, "kept_names": list(planned.plan.names("fp16")), **built}
            for name, nms, got, reference in zip(
                names, options.suppressions, evaluations, self._references[0], strict=True
            ):
                if name not in found:
                    scores = _scores(nms, got, reference)
                    yield {"variant": name, "precision": "INT8", **_origin(group), **scores, **facts, **made}

    def _scored_once(self, network: Network, title: str, stage: str) -> tuple[list[Evaluation], dict[str, Any]]:
        """As :meth:`_scored`; a network that an earlier variant had too is not built and scored again, and says so."""
        key = hashlib.sha256(model_bytes(network.model)).hexdigest()
        if key in self._networks:
            first, (evaluations, facts) = self._networks[key]
            return evaluations, {**facts, "same_as": first}
        scored = self._scored(network, stage)
        self._networks[key] = title, scored
        return scored

    def _scored(self, network: Network, stage: str) -> tuple[list[Evaluation], dict[str, Any]]:
        """With each suppression, and what is known of the engine; the model where no engine is run."""
        options, config = self._matrix.options, self._graph("keep").config
        if options.on == "onnxruntime":
            # No engine of a float model is asked for where none can be run.
            floating = network.precision != "int8"
            facts = {**network.plan.counts(), **_NO_ENGINE} if floating else self._built(network)[1]
            return self._evaluated(Detector.running(network.model, config, "host"), stage), facts
        built, facts = self._built(network)
        engine = EngineFacts.built(self._backend.capabilities, built.sms, options.plugins)
        with open_engine(built.engine, engine) as run:
            timed = measure(
                [Timed("engine", run, config.input, "engine", "host")],
                BenchOptions(seconds=1.0),
                progress=self._progress,
            )
            latency = timed.targets[0].points[0].latency_ms.p50
            detector = Detector.running(run, config, "host")
            return self._evaluated(detector, stage), {**facts, "latency_ms": latency}

    def _built(self, network: Network) -> tuple[Built, dict[str, Any]]:
        """Counts of convolutions as built, or as planned where no layers are listed; time and size of the engine."""
        options = self._matrix.options
        target = Target(options.sms, plugins=options.plugins)
        engine = built_engine(network, self._backend, target, self._matrix.folder / TIMINGS, self._progress)
        counts = network.plan.counts()
        if engine.audit is not None:
            counts = {"int8": engine.audit.int8, "fp16": engine.audit.fp16, "fp32": engine.audit.fp32}
        built = engine.built
        facts: dict[str, Any] = {**counts, **_NO_ENGINE}
        if built.engine:
            facts.update(build_seconds=round(built.seconds, 2), engine_mb=len(built.engine) / 1e6)
            facts["tf32"] = self._backend.capabilities.tf32 and counts["fp32"] > 0
        return built, facts

    def _evaluated(self, detector: Detector, stage: str) -> list[Evaluation]:
        return evaluate_each(
            detector,
            self._matrix.dataset,
            self._matrix.options.suppressions,
            lambda done, total: self._progress(stage, done, total),
            self._matrix.selected.cache,
        )


def _title(group: Group, keep: Keep) -> str:
    """An INT8 variant for people, whatever its suppression."""
    corrected = f", {', '.join(group.corrections)}" if group.corrections else ""
    return f"{group.rule}{corrected}, {keep} in FP16, SiLU {group.silu}"


def _origin(group: Group) -> dict[str, Any]:
    corrections = list(group.corrections) if group.rule else None
    return {"silu": group.silu, "calibration": group.rule, "corrections": corrections}


def _scores(nms: NmsConfig, got: Evaluation, reference: Evaluation | None) -> dict[str, Any]:
    found = compare(got, reference) if reference is not None else None
    return {
        "nms": nms.model_dump(mode="json"),
        "map": got.result.map,
        "map50": got.result.map50,
        "difference": found.difference if found else 0.0,
        "low": found.low if found else None,
        "high": found.high if found else None,
    }
