"""A grid of settings (`sweep`): SiLU, calibration rules, corrections, kept layers and NMS thresholds.

Variants share work. The calibration images run through the float model once. Ranges, corrections and ranking are
computed once per SiLU form, rule and set of corrections. Engines have no NMS, so one engine and one pass over the
annotated images serve all NMS thresholds. If engines can run, they are scored and timed, the float model in FP16 too.
Otherwise the ONNX models are scored on the CPU.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from trtdet.backends import Backend, EngineTarget, Runner, choose
from trtdet.building import forecasts
from trtdet.building.corrections import Prepared, prepared, prepared_beside
from trtdet.building.costs import weight_bytes, weighted_macs
from trtdet.building.engine import BuildNetwork, best_engine, explicit_network, float_network, runs_on
from trtdet.building.graph import FORMS, PlacedGraph, host_graph, model_bytes, silu_form, warn_of_left
from trtdet.building.plan import choose_plan, ranking, warn_of_nothing
from trtdet.building.ranges import HISTOGRAMS, Selection, calibrated, select_images
from trtdet.building.validation import (
    check_calibration,
    check_sweep,
    check_targets,
    plugin_parts,
    scored_images,
    warn_of_percentile,
)
from trtdet.building.variants import Overrides, with_absolute_paths
from trtdet.config import Config, NmsConfig, SiluForm
from trtdet.data import CocoDataset, content_hash
from trtdet.errors import CalibrationError, ConfigError, TrtdetWarning
from trtdet.evaluation.comparison import compare, part_scores
from trtdet.evaluation.scoring import Evaluation, evaluate_each, proposal_recall
from trtdet.experiments.experiment import Experiment, Variant
from trtdet.experiments.folder import (
    TIMINGS,
    CommandRun,
    Provenance,
    completed,
    on_ray,
    opened_rows,
    ray_parts,
    row_names,
    variant_of,
)
from trtdet.files import sha256_file
from trtdet.options import BuildOptions, CalibrationOptions, EngineOptions, Keep, PlanOptions, SweepOptions, spelled
from trtdet.performance import BenchOptions, measure
from trtdet.performance import Target as Timed
from trtdet.plans.planning import check_count
from trtdet.progress import Expect, Progress, silent, unheard
from trtdet.quantization import Precision
from trtdet.runtime.detector import Detector

Limits = tuple[int | None, int | None]
"""``head.rpn_pre_nms_topk`` and ``head.rpn_post_nms_topk`` of a variant; None means the configuration's value."""

_LIMITS = ("rpn_pre_nms_topk", "rpn_post_nms_topk")


@dataclass(frozen=True)
class Group:
    """Variants that share ranges, corrections and ranking; each precision of the float model is its own group."""

    rule: str | None = None
    corrections: tuple[str, ...] = ()
    silu: SiluForm = "keep"
    precision: Precision = "int8"
    limits: Limits = (None, None)

    def title(self, keep: Keep | None = None) -> str:
        """Title without NMS thresholds."""
        named = zip(self.limits, ("anchors a level", "proposals"), strict=True)
        proposals = "".join(f", {limit} {name}" for limit, name in named if limit is not None)
        if self.rule is None:
            return f"{self.precision.upper()}{proposals}"
        corrections = f", {', '.join(self.corrections)}" if self.corrections else ""
        return f"{self.rule}{corrections}, {keep} in FP16, SiLU {self.silu}{proposals}"

    def stage(self, keep: Keep | None = None) -> str:
        """Progress stage that scores a variant."""
        plain = replace(self, corrections=()).title(keep)
        return f"scoring {plain.replace(f', SiLU {self.silu}', '')}"


@dataclass(frozen=True)
class SweepGrid:
    """Inputs of a sweep; ``folder`` is the folder of the results."""

    model: Path
    config: Config
    folder: Path
    options: SweepOptions
    selected: Selection
    dataset: CocoDataset

    @property
    def limits(self) -> tuple[Limits, ...]:
        """Every combination of the two proposal limits."""
        options = self.options
        return tuple(itertools.product(options.rpn_pre_nms_topk or (None,), options.rpn_post_nms_topk or (None,)))

    @property
    def limited(self) -> bool:
        """Whether a proposal limit is an axis."""
        return self.limits != ((None, None),)

    @property
    def suppressions(self) -> tuple[NmsConfig, ...]:
        """Every combination of NMS values; a value that is no axis is the configuration's."""
        axes = {
            "score_threshold": self.options.score_thresholds,
            "iou_threshold": self.options.iou_thresholds,
            "max_detections": self.options.max_detections,
        }
        varied = {key: dict.fromkeys(values) for key, values in axes.items() if values}
        combinations = (dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values()))
        return tuple(self.config.with_nms(**values).nms for values in combinations)

    def groups(self) -> list[Group]:
        """In axis order, the float model first."""
        precisions: tuple[Precision, ...] = ("fp32", "fp16") if self.options.on == "engine" else ("fp32",)
        axes = list(itertools.product(FORMS, self.options.rules, self.options.corrections))
        groups = []
        for limits in self.limits:
            groups += [Group(precision=precision, limits=limits) for precision in precisions]
            groups += [
                Group(rule, names, silu, limits=limits) for silu, rule, names in axes if silu in self.options.silus
            ]
        return groups

    @property
    def reference(self) -> Group:
        """The float model that differences refer to: the one with the most proposals."""
        most = max(self.limits, key=lambda limits: [2**31 if limit is None else limit for limit in limits])
        return Group(precision="fp32", limits=most)

    def overrides(self, limits: Limits) -> dict[str, int]:
        """Proposal limits of a variant, as keys of ``head``."""
        return {name: limit for name, limit in zip(_LIMITS, limits, strict=True) if limit is not None}

    def histograms(self, limits: Limits) -> Path:
        """File of the histograms, which depend on the proposals that the second stage gets."""
        numbers = "-".join("all" if limit is None else str(limit) for limit in limits)
        return self.folder / (f"histograms-{numbers}.npz" if self.limited else HISTOGRAMS)

    def name(self, group: Group, keep: Keep | None, nms: NmsConfig) -> str:
        """Identifies a row."""
        target = EngineTarget.of(self.options)
        settings = [nms.model_dump(mode="json"), self.options.backend, target.sms, self.options.on]
        settings += [list(group.limits)] if self.limited else []
        if group.rule is None:
            return json.dumps([group.precision, *settings])
        libraries = [sha256_file(path) for path in target.plugins] if group.silu == "plugin" else []
        calibration = [
            group.rule,
            self.options.calibration.percentile,
            group.corrections,
            keep,
            self.options.plan.formats,
        ]
        return json.dumps([*calibration, group.silu, *libraries, *settings])

    def names(self, group: Group) -> list[str]:
        keeps = (None,) if group.rule is None else self.options.keeps
        return [self.name(group, keep, nms) for keep in keeps for nms in self.suppressions]

    def waiting(self, names: frozenset[str]) -> list[Group]:
        """Groups with a row that is missing in ``names``."""
        return [group for group in self.groups() if not names.issuperset(self.names(group))]

    def key(self) -> str:
        """Hash of the inputs that all rows share."""
        facts = {
            "config": self.config.with_nms().model_dump(mode="json", exclude={"nms"}),
            "images": self.selected.sha256,
            "annotations": sha256_file(self.dataset.annotations),
            "validation": content_hash([image.path for image in self.dataset.images]),
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        digest.update(self.model.read_bytes())
        return digest.hexdigest()

    def graph(self, limits: Limits, silu: SiluForm = "keep") -> PlacedGraph:
        """The float model for the backend, with these proposal limits. Raises the errors of :func:`host_graph`."""
        options, head = self.options, self.config.head.model_copy(update=self.overrides(limits))
        config, caps = self.config.model_copy(update={"head": head}), choose(options.backend).capabilities
        return host_graph(self.model, config, silu, caps=caps, plan=options.plan)

    def calibration(self, group: Group) -> CalibrationOptions:
        """Calibration options of a group, with the folder's histograms."""
        rule = group.rule or CalibrationOptions.rule
        return replace(self.options.calibration, rule=rule, histograms=self.histograms(group.limits))


def sweep(
    model: Path | str,
    config: Config,
    output: Path | str,
    options: SweepOptions,
    progress: Progress = silent,
    expect: Expect = unheard,
) -> Experiment:
    """Builds and scores every variant of a grid over a float ONNX model; ``output`` is the folder of the results.

    A stopped sweep resumes. A sweep that is repeated with more values on an axis measures only the new variants; the
    experiment lists the older ones after the new. ``expect`` gets the stages once the sweep is checked.

    Raises:
        TrtdetError: the subclass says what is wrong; finished rows stay.
    """
    model, output = Path(model), Path(output)
    grid = _checked(model, config, output, options=options)
    names = [name for group in grid.groups() for name in grid.names(group)]
    with opened_rows(output, grid.key()) as rows:
        measured = frozenset(rows.found)
        expect(_foresee(grid, measured).steps)
        most = grid.reference.limits
        run = CommandRun.now(choose(options.backend).capabilities, EngineTarget.of(options), options)
        provenance = Provenance.of(
            run, model, config, graph=grid.graph(most), selected=grid.selected, histograms=grid.histograms(most).name
        )
        provenance.save(output, Provenance.load(output) if measured else None)
        waiting = grid.waiting(measured)
        if waiting:
            save_histograms(grid, progress)
        results: Iterable[Iterable[Variant]] | None = on_ray(grid.options.plan, rows_of_group, grid, waiting=waiting)
        if results is None:
            measuring = _Measuring(grid, progress)
            results = (measuring.variants(group, measured) for group in waiting)
        missing = itertools.chain.from_iterable(results)
        variants = completed(rows, names, missing, stage="sweep", progress=progress)
        older = tuple(variant_of(row) for name, row in rows.found.items() if name not in names)
    experiment = Experiment(
        kind="sweep",
        name=model.stem,
        folder=output,
        variants=(*variants, *older),
        objective="latency",
        gpu=None,
        batch=1,
        device=variants[0].device,
        reference=variants[0].reference,
        calibration=len(grid.selected.paths),
        reported=len(grid.dataset.images),
        formats=options.plan.formats,
        older=len(older),
    ).numbered()
    experiment.save()
    return experiment


def foresee_sweep(model: Path, config: Config, output: Path, options: SweepOptions) -> forecasts.Forecast:
    """The stages of :func:`sweep`. Raises the TrtdetError that the sweep raises before it decodes an image."""
    grid = _checked(model, config, output, options=options)
    return _foresee(grid, row_names(output, grid.key()))


def _foresee(grid: SweepGrid, measured: frozenset[str]) -> forecasts.Forecast:
    waiting, options = grid.waiting(measured), grid.options
    if not waiting:
        return forecasts.Forecast(())
    graph, backend, images = grid.graph(grid.reference.limits), choose(options.backend), len(grid.selected.paths)
    run, engine = forecasts.run_seconds(graph), options.on == "engine"
    files = [grid.histograms(limits) for limits in grid.limits]
    parts = [forecasts.calibrated_part(images, run, str(path) if path.exists() else "") for path in files]
    rows: list[forecasts.Part] = []
    for group in waiting:
        keeps = [
            keep
            for keep in ((None,) if group.rule is None else options.keeps)
            if not measured.issuperset(grid.name(group, keep, nms) for nms in grid.suppressions)
        ]
        rows += forecasts.corrected_parts(group.corrections, images, run)
        first_ranked = next((keep for keep in keeps if isinstance(keep, int) and keep), math.nan)
        for keep in keeps:
            if keep == first_ranked:
                rows.append(forecasts.ranked_part(graph, PlanOptions(), images, run=run))
            rows += [forecasts.engine_part(graph, backend)] if engine or group.rule else []
            rows.append(
                forecasts.scored_part(
                    group.stage(keep), len(grid.dataset.images), run, engine=engine, quantized=bool(group.rule)
                )
            )
    count = sum(name not in measured for group in waiting for name in grid.names(group))
    return forecasts.Forecast((*parts, *ray_parts(options.plan, "sweep", f"{count} rows", parts=rows)))


def _checked(model: Path, config: Config, output: Path, options: SweepOptions) -> SweepGrid:
    """Resolves every ``auto`` and checks the sweep, without decoding an image."""
    caps, target, plan = choose(options.backend).capabilities, EngineTarget.of(options), options.plan
    check_targets(options, caps)
    plugin_parts(target.plugins, caps)
    silus = tuple(dict.fromkeys(silu_form(silu, target.plugins, caps) for silu in options.silus))
    options = replace(options, silus=silus, on=runs_on(options.on, caps, target))
    check_sweep(options)
    for rule, corrections in itertools.product(options.rules, options.corrections):
        check_calibration(replace(options.calibration, rule=rule), corrections)
    warn_of_percentile(*options.rules)
    graph = host_graph(model, config, plan=plan)
    for name in _LIMITS:
        values, option = getattr(options, name), spelled(SweepOptions, f"head.{name}")
        if not values:
            continue
        fewest = config.model_copy(update={"head": config.head.model_copy(update={name: min(values)})})
        result = host_graph(model, fewest).done.results.get(name)
        if result is None:
            raise ConfigError(f"{option} is for two-stage detectors, and '{model}' aligns no regions (RoiAlign)")
        if result.skipped:
            raise ConfigError(f"{option} cannot be set in '{model}': {'; '.join(result.skipped)}")
    warn_of_nothing(graph)
    for keep in options.keeps:
        if isinstance(keep, int):
            check_count(keep, len(graph.plan.names("int8")))
    dataset, selected = scored_images(plan, config), select_images(options.calibration)
    assert dataset is not None
    return SweepGrid(model, config=config, folder=output, options=options, selected=selected, dataset=dataset)


def save_histograms(grid: SweepGrid, progress: Progress) -> None:
    """Runs the calibration images, unless the folder has histograms of the same graph.

    Warns:
        TrtdetWarning: a part of a two-stage model, such as its masks, is left out of the engines.
    """
    calibration = replace(grid.options.calibration, rule=CalibrationOptions.rule, histograms=None)
    for limits in grid.limits:
        graph, path = grid.graph(limits), grid.histograms(limits)
        if limits == grid.reference.limits:
            warn_of_left(graph)
        if path.exists():
            try:
                calibrated(graph, replace(calibration, histograms=path), grid.selected)
                continue
            except CalibrationError as error:
                warnings.warn(f"{error.problem}: they are collected again", TrtdetWarning, stacklevel=2)
        calibrated(graph, calibration, grid.selected, progress=progress).collection.save(path)


def rows_of_group(grid: SweepGrid, group: Group) -> list[Variant]:
    """Measures all variants of a group on a worker of a cluster."""
    return list(_Measuring(grid, silent).variants(group, frozenset()))


_Scored = tuple[str, list[Evaluation], dict[str, Any]]
"""Title of a network, its score for each NMS setting, and engine facts as fields of ``Variant``."""


class _Measuring:
    """Measures the variants of a grid; results that several variants share are computed once."""

    def __init__(self, grid: SweepGrid, progress: Progress) -> None:
        self._grid, self._options, self._progress = grid, grid.options, progress
        self._backend: Backend = choose(grid.options.backend)
        self._graph = cache(grid.graph)
        self._networks: dict[str, _Scored] = {}
        """By the hash of a network."""
        self._corrected: dict[tuple[SiluForm, tuple[str, ...], Limits], Prepared] = {}

    def variants(self, group: Group, measured: frozenset[str]) -> Iterator[Variant]:
        """The variants of a group that are missing in ``measured``."""
        if group.rule is None:
            network = float_network(self._graph(group.limits), group.precision)
            scored = self._reference if group == self._grid.reference else self._score(network, group)
            yield from self._rows(group, None, network, scored=scored, measured=measured)
            return
        corrected = self._prepared(group)
        words = [group.silu, str(group.rule), "-".join(group.corrections) or "none"]
        words += [name.removeprefix("--") for name in self._options.plan.formats]
        words += [str(limit or "all") for limit in group.limits] if self._grid.limited else []
        rows = self._grid.folder / f"ranking-{'-'.join(words)}.jsonl"
        ranked = cache(lambda: ranking(corrected, PlanOptions(), rows=rows, progress=self._progress))
        for keep in self._options.keeps:
            names = [self._grid.name(group, keep, nms) for nms in self._grid.suppressions]
            if not measured.issuperset(names):
                plan = PlanOptions(keep_fp16=keep if isinstance(keep, int) else (keep,))
                planned = choose_plan(corrected, BuildOptions(plan=plan), ranked, progress=self._progress)
                network = explicit_network(corrected, planned.plan, self._backend.capabilities)
                yield from self._rows(group, keep, network, scored=self._score(network, group, keep), measured=measured)

    def _rows(
        self, group: Group, keep: Keep | None, network: BuildNetwork, scored: _Scored, measured: frozenset[str]
    ) -> Iterator[Variant]:
        """A variant for each NMS setting."""
        grid, quantized, is_reference = self._grid, group.rule is not None, group == self._grid.reference
        graph, references = self._graph(group.limits, group.silu), self._reference[1]
        _, evaluations, facts = scored
        if "proposals" in facts:
            before, after = group.limits
            facts = {**facts, "proposals": {**facts["proposals"], "before": before, "after": after}}
        formats = self._options.plan.formats if quantized else ()
        title = f"{'INT8 ' * quantized}{group.title(keep)}{''.join(f', {name}' for name in formats)}"
        limits = zip(("anchors a level", "proposals at most"), group.limits, strict=True) if grid.limited else ()
        axes = {
            **{name: "" if limit is None else str(limit) for name, limit in limits},
            "precision": group.precision.upper(),
            "SiLU": group.silu,
            "calibration": group.rule or "",
            "corrected": ", ".join(group.corrections),
            "kept in FP16": str(keep) if quantized else "",
            "options": " ".join(formats),
        }
        for nms, evaluation, reference in zip(grid.suppressions, evaluations, references, strict=True):
            name = grid.name(group, keep, nms)
            if name in measured:
                continue
            thresholds = f"{nms.score_threshold:g} / {nms.iou_threshold:g} / {nms.max_detections}"
            difference = None if is_reference else compare(evaluation, reference)
            yield Variant(
                name=name,
                # Thresholds are in the title only where they are an axis.
                titles=(f"{title}, NMS {thresholds}" if len(grid.suppressions) > 1 else title,),
                axes={**axes, "NMS": thresholds},
                kept=network.plan.names("fp16") if quantized else (),
                weights=weight_bytes(graph.model, network.plan),
                multiply_adds=weighted_macs(graph.model, network.plan),
                map=evaluation.result.map,
                map50=evaluation.result.map50,
                reference=reference.result.map,
                difference=difference.difference if difference else 0.0,
                low=difference.low if difference else None,
                high=difference.high if difference else None,
                parts=part_scores(evaluation, None if is_reference else reference),
                build=self._build(group, network),
                config=Overrides(nms=nms.model_dump(mode="json"), head=dict(grid.overrides(group.limits))),
                **facts,
            )

    def _build(self, group: Group, network: BuildNetwork) -> BuildOptions:
        """The options that build a variant; they name the convolutions in FP16."""
        options, plan = self._options, PlanOptions()
        if network.prepared is not None:
            able = network.prepared.plan.names("int8")
            kept = tuple(name for name in network.plan.names("fp16") if name in able)
            plan = replace(options.plan.formats_alone(), keep_fp16=kept or None, fastest=False)
        return with_absolute_paths(
            BuildOptions(
                precision=group.precision,
                calibration=self._grid.calibration(group),
                effort=",".join(group.corrections) or "none",
                backend=options.backend,
                sms=options.sms,
                plan=plan,
                silu=group.silu,
                engine=options.engine if group.silu == "plugin" else EngineOptions(),
            )
        )

    @cached_property
    def _reference(self) -> _Scored:
        group = self._grid.reference
        return self._score(float_network(self._graph(group.limits), group.precision), group)

    def _prepared(self, group: Group) -> Prepared:
        calibration = self._grid.calibration(group)
        graph = self._graph(group.limits, group.silu)
        ranged = calibrated(graph, calibration, self._grid.selected, progress=self._progress)
        # Corrections of another rule may be the same; then they are compared, not computed again.
        key = (group.silu, group.corrections, group.limits)
        earlier = self._corrected.get(key)
        beside = None if earlier is None else prepared_beside(earlier, ranged, calibration, progress=self._progress)
        if beside is not None:
            return beside
        corrected = prepared(ranged, calibration, group.corrections, progress=self._progress)
        self._corrected.setdefault(key, corrected)
        return corrected

    def _score(self, network: BuildNetwork, group: Group, keep: Keep | None = None) -> _Scored:
        """Scores a network for each NMS setting; reuses the score of an earlier variant's equal network."""
        key = f"{network.precision} {hashlib.sha256(model_bytes(network.model)).hexdigest()}"
        if key in self._networks:
            title, evaluations, facts = self._networks[key]
            return title, evaluations, {**facts, "same_as": title}
        grid, caps = self._grid, self._backend.capabilities
        target, on_engine = EngineTarget.of(self._options), self._options.on == "engine"
        facts = {"counts": network.plan.counts()}
        with ExitStack() as stack:
            run: Any = network.model
            # A float model needs an engine only to run it.
            if on_engine or network.precision == "int8":
                timings = grid.folder / TIMINGS
                engine = best_engine((network,), self._backend, target, timings=timings, progress=self._progress)
                built = engine.built
                facts["counts"] = counts = network.plan.counts() if engine.audit is None else engine.audit.counts()
                if built.engine:
                    tf32 = caps.tf32 and counts["fp32"] > 0
                    facts.update(seconds=round(built.seconds, 2), engine=len(built.engine), tf32=tf32)
                if on_engine:
                    run = stack.enter_context(engine.opened(caps, target.plugins))
                    facts.update(latency_ms=self._latency(run), device=run.run_info.device)
            config = self._graph(grid.reference.limits).config
            detector = Detector.running(run, config, "host", for_scores=True)
            if grid.limited:
                facts.update(self._proposals(network, detector.runner, group))
            stage = group.stage(keep)
            evaluations = evaluate_each(
                detector,
                grid.dataset,
                grid.suppressions,
                progress=lambda done, total: self._progress(stage, done, total),
                cache=grid.selected.cache,
            )
        self._networks[key] = group.title(keep), evaluations, facts
        return self._networks[key]

    def _latency(self, run: Runner) -> float:
        timed = [Timed("engine", runner=run, input=self._grid.config.input, file="engine", nms="host")]
        measured = measure(timed, BenchOptions(seconds=1.0), progress=self._progress)
        return measured.targets[0].points[0].latency_ms.p50

    def _proposals(self, network: BuildNetwork, run: Runner, group: Group) -> dict[str, Any]:
        """Latency and recall of the first stage, if a proposal limit is an axis."""
        stage = f"{group.stage()}: proposals"
        recall = proposal_recall(
            network.model,
            self._grid.config.input,
            self._grid.dataset,
            progress=lambda done, total: self._progress(stage, done, total),
            cache=self._grid.selected.cache,
        )
        return {"latency_ms": self._latency(run), "device": str(run.run_info), "proposals": asdict(recall)}
