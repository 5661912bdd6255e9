"""The rows of a sweep: each variant built, scored and timed. What several rows need is made once."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from trtdet.backends import Backend, Built, EngineFacts, Runner, choose, open_engine
from trtdet.backends.requests import Target
from trtdet.config import NmsConfig, SiluForm
from trtdet.errors import CalibrationError, TrtdetWarning
from trtdet.evaluation.comparison import compare, mask_score
from trtdet.evaluation.proposals import proposal_recall
from trtdet.evaluation.scoring import Evaluation, evaluate_each
from trtdet.mixed_precision.ranking import rank
from trtdet.mixed_precision.scores import Sensitivity
from trtdet.performance import BenchOptions, measure
from trtdet.performance import Target as Timed
from trtdet.pipeline.matrix import Group, Keep, Limits, Matrix
from trtdet.pipeline.options import RANKED_IMAGES, CalibrationOptions, KeepOptions
from trtdet.pipeline.stages.bundles import model_bytes
from trtdet.pipeline.stages.calibrating import calibrated
from trtdet.pipeline.stages.correcting import Prepared, prepared, prepared_beside
from trtdet.pipeline.stages.engines import built_engine
from trtdet.pipeline.stages.networks import Network, explicit_networks, float_network
from trtdet.pipeline.stages.planning import choose_plan
from trtdet.pipeline.stages.rewriting import Graph, host_graph, warn_of_left
from trtdet.progress import Progress, silent
from trtdet.runtime.detector import Detector

TIMINGS = "timing-cache"

_NO_ENGINE: dict[str, Any] = {"build_seconds": None, "engine_mb": None, "latency_ms": None}


def save_histograms(matrix: Matrix, progress: Progress) -> None:
    """Runs the calibration images, unless an earlier sweep in the folder ran them through the same graph.

    Warns:
        TrtdetWarning: a part of a two-stage model, such as its masks, is left out of the engines.
    """
    for limits in matrix.options.limits:
        graph = limited_graph(matrix, limits)
        if limits == matrix.most:
            warn_of_left(graph)
        _save_histograms(matrix, graph, matrix.histograms(limits), progress)


def _save_histograms(matrix: Matrix, graph: Graph, place: Path, progress: Progress) -> None:
    calibration = replace(matrix.options.calibration, rule=CalibrationOptions.rule, histograms=None)
    if place.exists():
        try:
            calibrated(graph, replace(calibration, histograms=place), matrix.selected)
        except CalibrationError as error:
            warnings.warn(f"{error.problem}: they are collected again", TrtdetWarning, stacklevel=2)
        else:
            return
    calibrated(graph, calibration, matrix.selected, progress=progress).collection.save(place)


def limited_graph(matrix: Matrix, limits: Limits, silu: SiluForm = "keep") -> Graph:
    """The float model of a sweep for its backend, with other numbers of proposals.

    Raises:
        ModelError, ConfigError: as of :func:`host_graph`.
    """
    options, config = matrix.options, matrix.config_of(limits)
    caps = choose(options.backend).capabilities
    graph = host_graph(matrix.model, config, silu, caps, options.int8_attention, options.fp8)
    return replace(graph, int8_all=options.int8_all)


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
        self._graphs: dict[tuple[SiluForm, Limits], Graph] = {}
        self._networks: dict[str, tuple[str, tuple[list[Evaluation], dict[str, Any]]]] = {}
        """By the hash of a network: the variant that had it first, its scores and its facts."""
        self._corrected: dict[tuple[SiluForm, tuple[str, ...], Limits], Prepared] = {}

    def rows(self, group: Group, found: frozenset[str]) -> Iterator[dict[str, Any]]:
        """The rows of a group whose names are not among ``found``."""
        if group.rule is not None:
            yield from self._quantized(group, group.rule, found)
            return
        evaluations, facts = self._references if group == self._reference else self._float(group)
        suppressions = self._matrix.options.suppressions
        for nms, got, reference in zip(suppressions, evaluations, self._references[0], strict=True):
            name = self._matrix.name(group, None, nms)
            if name not in found:
                scores = _scores(nms, got, None if got is reference else reference)
                start = {"variant": name, "precision": group.precision.upper(), **self._origin(group)}
                yield {**start, **scores, "kept": None, "kept_names": [], **facts}

    @cached_property
    def _backend(self) -> Backend:
        return choose(self._matrix.options.backend)

    @property
    def _reference(self) -> Group:
        """The float model that differences are taken from."""
        return Group(precision="fp32", limits=self._matrix.most)

    @cached_property
    def _references(self) -> tuple[list[Evaluation], dict[str, Any]]:
        return self._float(self._reference)

    def _graph(self, group: Group, silu: SiluForm = "keep") -> Graph:
        key = (silu, group.limits)
        if key not in self._graphs:
            self._graphs[key] = limited_graph(self._matrix, group.limits, silu)
        return self._graphs[key]

    def _float(self, group: Group) -> tuple[list[Evaluation], dict[str, Any]]:
        network = float_network(self._graph(group), group.precision)
        stage = scoring(group)
        if not self._matrix.options.limited:
            return self._scored(network, stage)
        return self._scored_once(network, f"{group.precision.upper()}{_limited(group)}", stage)

    def _prepared(self, group: Group, rule: str) -> Prepared:
        matrix = self._matrix
        calibration = replace(matrix.options.calibration, rule=rule, histograms=matrix.histograms(group.limits))
        ranged = calibrated(self._graph(group, group.silu), calibration, matrix.selected, progress=self._progress)
        # Beside another rule corrections may be the same, and are only compared.
        key = (group.silu, group.corrections, group.limits)
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
            limited = "".join(f"-{one or 'all'}" for one in group.limits) if options.limited else ""
            rows = matrix.folder / f"ranking-{group.silu}-{rule}-{corrections}{formats}{limited}.jsonl"
            return rank(ready.subject(RANKED_IMAGES), rows=rows, progress=self._progress)

        for keep in options.keeps:
            names = [matrix.name(group, keep, nms) for nms in options.suppressions]
            if all(name in found for name in names):
                continue
            asked = KeepOptions(keep if isinstance(keep, int) else (keep,))
            planned = choose_plan(ready, asked, ranked, progress=self._progress)
            network = explicit_networks(ready, planned, self._backend.capabilities)[0]
            evaluations, built = self._scored_once(network, _title(group, keep), scoring(group, keep))
            made = {"options": list(options.formats)} if options.formats else {}
            facts = {"kept": keep, "kept_names": list(planned.plan.names("fp16")), **built}
            for name, nms, got, reference in zip(
                names, options.suppressions, evaluations, self._references[0], strict=True
            ):
                if name not in found:
                    scores = _scores(nms, got, reference)
                    yield {"variant": name, "precision": "INT8", **self._origin(group), **scores, **facts, **made}

    def _scored_once(self, network: Network, title: str, stage: str) -> tuple[list[Evaluation], dict[str, Any]]:
        """As :meth:`_scored`; a network that an earlier variant had too is not built and scored again, and says so."""
        key = f"{network.precision} {hashlib.sha256(model_bytes(network.model)).hexdigest()}"
        if key in self._networks:
            first, (evaluations, facts) = self._networks[key]
            return evaluations, {**facts, "same_as": first}
        scored = self._scored(network, stage)
        self._networks[key] = title, scored
        return scored

    def _scored(self, network: Network, stage: str) -> tuple[list[Evaluation], dict[str, Any]]:
        """With each suppression, and what is known of the engine; the model where no engine is run."""
        options, config = self._matrix.options, self._graph(self._reference).config
        if options.on == "onnxruntime":
            # No engine of a float model is asked for where none can be run.
            floating = network.precision != "int8"
            facts = {**network.plan.counts(), **_NO_ENGINE} if floating else self._built(network)[1]
            detector = Detector.running(network.model, config, "host")
            return self._evaluated(detector, stage), {**facts, **self._proposals(network, detector.runner, stage)}
        built, facts = self._built(network)
        engine = EngineFacts.built(self._backend.capabilities, built.sms, options.plugins)
        with open_engine(built.engine, engine) as run:
            facts = {**facts, "latency_ms": self._latency(run), **self._proposals(network, run, stage)}
            return self._evaluated(Detector.running(run, config, "host"), stage), facts

    def _latency(self, run: Runner) -> float:
        timed = [Timed("engine", run, self._matrix.config.input, "engine", "host")]
        measured = measure(timed, BenchOptions(seconds=1.0), progress=self._progress)
        return measured.targets[0].points[0].latency_ms.p50

    def _proposals(self, network: Network, run: Runner, stage: str) -> dict[str, Any]:
        """The time and the recall of the first stage, where the number of proposals is an axis."""
        matrix = self._matrix
        if not matrix.options.limited:
            return {}
        found = proposal_recall(
            network.model,
            matrix.config.input,
            matrix.dataset,
            lambda done, total: self._progress(f"{stage}: proposals", done, total),
            matrix.selected.cache,
        )
        return {"latency_ms": self._latency(run), "timed_on": str(run.run_info), **asdict(found)}

    def _origin(self, group: Group) -> dict[str, Any]:
        corrections = list(group.corrections) if group.rule else None
        before, after = group.limits
        limits = {"rpn_pre_nms_topk": before, "rpn_post_nms_topk": after} if self._matrix.options.limited else {}
        return {"silu": group.silu, "calibration": group.rule, "corrections": corrections, **limits}

    def _built(self, network: Network) -> tuple[Built, dict[str, Any]]:
        """Counts of convolutions as built, or as planned where no layers are listed; time and size of the engine."""
        options = self._matrix.options
        target = Target(options.sms, plugins=options.plugins)
        engine = built_engine(network, self._backend, target, self._matrix.folder / TIMINGS, self._progress)
        counts = network.plan.counts()
        if engine.audit is not None:
            counts = engine.audit.counts()
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


def scoring(group: Group, keep: Keep | None = None) -> str:
    """The stage in which a variant is scored."""
    what = group.precision.upper() if group.rule is None else f"{group.rule}, {keep} in FP16"
    return f"scoring {what}{_limited(group)}"


def _title(group: Group, keep: Keep) -> str:
    """An INT8 variant for people, whatever its suppression."""
    corrected = f", {', '.join(group.corrections)}" if group.corrections else ""
    return f"{group.rule}{corrected}, {keep} in FP16, SiLU {group.silu}{_limited(group)}"


def _limited(group: Group) -> str:
    """The numbers of proposals for people; empty where they are those of the configuration."""
    names = ("anchors a level", "proposals")
    told = [f"{one} {name}" for one, name in zip(group.limits, names, strict=True) if one is not None]
    return "".join(f", {one}" for one in told)


def _scores(nms: NmsConfig, got: Evaluation, reference: Evaluation | None) -> dict[str, Any]:
    found = compare(got, reference) if reference is not None else None
    masks = mask_score(got, reference)
    return {
        "nms": nms.model_dump(mode="json"),
        "map": got.result.map,
        "map50": got.result.map50,
        "difference": found.difference if found else 0.0,
        "low": found.low if found else None,
        "high": found.high if found else None,
        **({} if masks is None else {"masks": masks}),
    }
