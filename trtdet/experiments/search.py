"""A search over plans (`tune`): the Pareto front of a model; each plan is measured, and can be built by its number.

Only calibration images choose: ranges, corrections, and the ranking, which gives the optimiser each convolution's
error. Other images measure. The folder keeps what plans share, so a search resumes and a build uses the measured
inputs.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from trtdet.audit.neighbours import Costs
from trtdet.backends import Capabilities, EngineTarget
from trtdet.building import forecasts, variants
from trtdet.building.assembly import prepared_of
from trtdet.building.corrections import Prepared
from trtdet.building.costs import batch_of, plan_times, run_ms, size_costs, weight_bytes, weighted_macs
from trtdet.building.default_plan import decided_by_time, fastest_plan
from trtdet.building.engine import BuildNetwork, Engine, best_engine, explicit_networks, float_network, runs_on
from trtdet.building.graph import PlacedGraph
from trtdet.building.job import CheckedBuild, Job, checked_build
from trtdet.building.plan import RANKING, plan_problem, ranking, score_against, scored
from trtdet.building.ranges import HISTOGRAMS, check_detections
from trtdet.building.selection import calibration_images
from trtdet.building.validation import check_tune, scored_images
from trtdet.config import Config
from trtdet.data import CocoDataset, content_hash, evenly
from trtdet.errors import DataError, TrtdetError, TrtdetWarning
from trtdet.evaluation.confidence import apart_from
from trtdet.evaluation.scoring import Evaluation
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
)
from trtdet.files import sha256_file, writing
from trtdet.options import DEFAULT_IMAGES, PlanOptions, Stage, TuneOptions, changed
from trtdet.plans.optimiser import front
from trtdet.plans.ranking import check_rankable
from trtdet.plans.scores import Sensitivity
from trtdet.progress import Expect, Progress, silent, unheard
from trtdet.quantization import Cause, Entry, PrecisionPlan
from trtdet.quantization.macs import multiply_adds

_FLOAT = "measuring the float model"


@dataclass(frozen=True)
class Tuning:
    """A tune, as workers of a cluster get it; ``key`` identifies all other fields."""

    key: str
    model: Path = field(compare=False)
    config: Config = field(compare=False)
    folder: Path = field(compare=False)
    options: TuneOptions = field(compare=False)

    @property
    def job(self) -> Job:
        """The build that every plan varies: INT8 wherever possible."""
        options = replace(self.options.build, plan=self.options.build.plan.formats_alone())
        return Job(self.model, config=self.config, output=self.folder, options=options)

    def runs_on(self, caps: Capabilities) -> Literal["engine", "onnxruntime"]:
        """Runtime of the plans."""
        return runs_on(self.options.on, caps, EngineTarget.of(self.options.build))


@dataclass(frozen=True)
class CandidatePlan:
    """A plan before it is measured; for its fields see :class:`Variant`. ``name`` identifies a plan of a model."""

    name: str
    titles: tuple[str, ...]
    kept: tuple[str, ...]
    plan: PrecisionPlan
    error: float
    estimated: float | None


def tune(
    model: Path | str,
    config: Config,
    output: Path | str,
    options: TuneOptions,
    progress: Progress = silent,
    expect: Expect = unheard,
) -> Experiment:
    """Finds the Pareto front of a float ONNX model and measures its plans; ``output`` is the folder of the results.

    A stopped tune resumes. A tune that is repeated with more points, another objective or another GPU measures only the
    new plans. ``expect`` gets the stages once the tune is checked.

    Raises:
        TrtdetError: the subclass says what is wrong; finished rows stay.
    """
    model, output = Path(model), Path(output)
    tuning, build, dataset, left_out = _checked(model, config, output=output, options=options, progress=progress)
    with opened_rows(output, tuning.key) as rows:
        expect(_foresee(tuning, build, len(dataset.images), measured=frozenset(rows.found)).steps)
        requested, options = options, tuning.options
        variants.save_options(output, sha256_file(model), build.keys[Stage.CORRECTIONS], options=options.build)
        run = CommandRun.now(build.backend.capabilities, EngineTarget.of(options.build), requested)
        provenance = Provenance.of(
            run, model, config, graph=build.graph, selected=build.selected, histograms=HISTOGRAMS
        )
        provenance.save(output, None)
        check_detections(build.graph, options.build.calibration, build.selected, progress=progress)
        work = _Measuring(tuning, build, dataset, progress=progress)
        plans = work.candidates()
        waiting = [plan for plan in plans if plan.name not in rows.found]
        missing: Iterator[Variant] = (work.variant(plan, number) for number, plan in enumerate(waiting, 1))
        missing = on_ray(options.build.plan, variant_of_plan, tuning, waiting=waiting) or missing
        measured = completed(rows, [plan.name for plan in plans], missing, stage="tune", progress=progress)
    work.ranking.save(output / RANKING)
    experiment = Experiment(
        kind="tune",
        name=model.stem,
        folder=output,
        # A row of an earlier tune gets the titles and predictions of this one.
        variants=tuple(
            replace(row, titles=plan.titles, error=plan.error, estimated=plan.estimated)
            for row, plan in zip(measured, plans, strict=True)
        ),
        objective=options.build.plan.objective,
        gpu=None if work.times is None else work.times.gpu,
        batch=batch_of(options.build, work.prepared.model),
        device=measured[0].device,
        reference=measured[0].reference,
        calibration=len(build.selected.paths),
        reported=len(dataset.images),
        left_out=left_out,
        formats=requested.build.plan.formats,
    ).numbered()
    by_kept = {plan.kept: plan.plan.to_json().encode() for plan in plans}
    numbered = {f"{variants.PLANS}/{variant.number}.json": by_kept[variant.kept] for variant in experiment.variants}
    experiment.save(numbered)
    with writing(output):
        for path in {*(output / variants.PLANS).glob("*.json")} - {output / name for name in numbered}:
            path.unlink()
    return experiment


def foresee_tune(model: Path, config: Config, output: Path, options: TuneOptions) -> forecasts.Forecast:
    """The stages of :func:`tune`. Raises the TrtdetError that the tune raises before it decodes an image."""
    tuning, build, dataset, _ = _checked(model, config, output=output, options=options, progress=silent)
    return _foresee(tuning, build, len(dataset.images), measured=row_names(output, tuning.key))


def _foresee(tuning: Tuning, build: CheckedBuild, images: int, measured: frozenset[str]) -> forecasts.Forecast:
    options, folder, graph, backend = tuning.options, tuning.folder, build.graph, build.backend
    run, count, caps = forecasts.run_seconds(graph), len(build.selected.paths), backend.capabilities
    engine = tuning.runs_on(caps) == "engine"
    corrected_file = variants.corrected_file(folder, build.keys[Stage.CORRECTIONS])
    parts = [*forecasts.looked_parts(build, run), forecasts.calibrated_part(count, run, corrected_file)]
    ranked = forecasts.ranked_part(graph, options.build.plan, count, run=run)
    if corrected_file:
        parts.append(forecasts.Part("correcting", what="kept in the folder", seconds=0.0, there=corrected_file))
        rows = folder / variants.RANKING_ROWS
        # One line more for the header, and one for the group of depthwise convolutions.
        if rows.exists() and rows.read_bytes().count(b"\n") > len(graph.plan.names("int8")):
            ranked = replace(ranked, seconds=0.0, there=str(rows))
    else:
        parts += forecasts.corrected_parts(options.build.corrections, count, run)
    parts.append(ranked)
    built = [forecasts.engine_part(graph, backend, len(caps.data_flow.weights))] if caps.makes_engine else []
    if measured:
        parts.append(
            forecasts.Part("measuring plans", f"{len(measured)} plans", seconds=0.0, there=str(folder / variants.ROWS))
        )
    # The optimiser may find fewer plans, or some of those that have a title.
    plans = len(titled_plans(graph, graph.plan.names("int8"), graph.faster))
    plans += options.points
    plan_parts: list[forecasts.Part] = []
    for number in range(1, max(0, plans - len(measured)) + 1):
        plan_parts += [
            *built,
            forecasts.scored_part(f"measuring plan {number}", images, run, engine=engine, quantized=True),
        ]
        if number == 1:
            plan_parts += built if engine else []
            plan_parts.append(forecasts.scored_part(_FLOAT, images, run, engine=engine, quantized=False))
    return forecasts.Forecast((*parts, *ray_parts(options.build.plan, "tune", "plans", parts=plan_parts)))


def _checked(
    model: Path, config: Config, output: Path, options: TuneOptions, progress: Progress
) -> tuple[Tuning, CheckedBuild, CocoDataset, int]:
    """Resolves every ``auto`` and checks the tune, without decoding an image.

    Returns the tune, its build, the images that measure, and how many images were left out of these.
    """
    options = replace(options, build=changed(options.build, int8_all=True))
    check_tune(options)
    tuning = Tuning("", model=model, config=config, folder=output, options=options)
    build = checked_build(tuning.job, progress)
    check_rankable(build.graph.plan)
    dataset, left_out = measuring_images(options.build.plan, build)
    if left_out:
        warnings.warn(
            f"{left_out} of the {left_out + len(dataset.images)} images of --val-images are calibration images too and "
            "are left out: images that chose a setting must not score it",
            TrtdetWarning,
            stacklevel=3,
        )
    target, run = EngineTarget.of(options.build), tuning.runs_on(build.backend.capabilities)
    engine = repr(replace(target.options, gpu=None, timing_cache=None))
    facts = {
        "corrections": build.keys[Stage.CORRECTIONS],
        "engine": [target.sms, target.batch, engine, [part.sha256 for part in build.plugins]],
        # Times refer to a run or an image; accuracy depends on the runtime.
        "run": [run, run == "engine" and options.build.plan.objective == "throughput"],
        "images": content_hash([image.path for image in dataset.images]),
        "annotations": sha256_file(dataset.annotations) if dataset.annotated else None,
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return replace(tuning, key=key), build, dataset, left_out


def measuring_images(plan: PlanOptions, build: CheckedBuild) -> tuple[CocoDataset, int]:
    """The images that measure accuracy, none of which calibrates, and how many were left out for that.

    Raises DataError if no image remains, or the images do not fit their annotations.
    """
    dataset = scored_images(plan, build.graph.config)
    if dataset is None:
        calibration = build.options.calibration
        assert calibration.images is not None, "validation asks for calibration images"
        paths = calibration_images(calibration)
        rest = sorted(set(paths).difference(build.selected.paths))
        if not rest:
            raise DataError(
                f"all {len(paths)} images of '{calibration.images}' calibrate, so that none can report on what they "
                "choose; give others with --val-images, or let fewer calibrate with --num-images"
            )
        classes = build.graph.config.classes
        dataset = CocoDataset.of_files(evenly(rest, DEFAULT_IMAGES), classes, calibration.images)
    apart = apart_from(dataset, build.selected.paths)
    return apart, len(dataset.images) - len(apart.images)


def titled_plans(
    graph: PlacedGraph, names: Sequence[str], default: PrecisionPlan
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Titles of the plans that every tune measures, by their FP16 convolutions; ``names`` may be in INT8."""
    macs = multiply_adds(graph.model)
    titled: dict[str, tuple[str, ...]] = {
        "all INT8": (),
        "default": tuple(name for name in names if default.entries[name].precision != "int8"),
        "depthwise in FP16": tuple(name for name in names if macs[name].depthwise),
        "all FP16": tuple(names),
    }
    plans: dict[tuple[str, ...], tuple[str, ...]] = {}
    for title, kept in titled.items():
        if kept or not title.startswith("depthwise"):
            plans[kept] = (*plans.get(kept, ()), title)
    return plans


def plan_with(
    prepared: Prepared, kept: Sequence[str], default: PrecisionPlan, progress: Progress = silent
) -> PrecisionPlan:
    """The plan of a model prepared for INT8 wherever possible, with the convolutions ``kept`` in FP16.

    Their reasons are those of ``default`` if it has them in FP16 too.
    """
    entries = dict(prepared.plan.entries)
    for name in kept:
        entries[name] = default.entries[name]
        if entries[name].precision != "fp16":
            entries[name] = Entry("fp16", "kept: in FP16 in this plan of the front", Cause.KEPT_TUNED)
    return prepared.without_overflow(PrecisionPlan(entries), progress)


class _Measuring:
    """Measures the plans of a tune."""

    def __init__(self, tuning: Tuning, build: CheckedBuild, dataset: CocoDataset, progress: Progress) -> None:
        self._folder, self._points, self._checked = tuning.folder, tuning.options.points, build
        self._options, self._backend = tuning.options.build, build.backend
        self._dataset, self._progress = dataset, progress
        self._on = tuning.runs_on(build.backend.capabilities)

    def candidates(self) -> list[CandidatePlan]:
        """All plans to measure: those with a title, then those of the optimiser."""
        prepared, graph, options = self.prepared, self._checked.graph, changed(self._options, int8_all=False)
        costs = size_costs(prepared) if options.plan.objective == "size" else self.times
        problem = plan_problem(prepared, costs, self.ranking)
        chosen = None  # by a build without options of its plan
        if decided_by_time(options, self._backend.capabilities, graph.flow):
            chosen = fastest_plan(graph, self._backend, options, progress=self._progress)
        default = graph.faster if chosen is None else chosen.plan
        titles = titled_plans(graph, prepared.plan.names("int8"), default)
        plans = front(problem, self._points)
        for plan in plans:
            titles.setdefault(plan.half, ("optimiser",))
        # If the cheapest plan is also the most accurate, other plans gain only bytes.
        if len(plans) < self._points:
            by_size = plan_problem(prepared, size_costs(prepared), self.ranking)
            for plan in front(by_size, self._points - len(plans) + 2):
                titles.setdefault(plan.half, ("optimiser, by size",))
        candidates = []
        for kept, title in titles.items():
            picks = {name: "fp16" if name in kept else "int8" for name in problem.choices}
            candidates.append(
                CandidatePlan(
                    hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16],
                    titles=title,
                    kept=kept,
                    plan=plan_with(prepared, kept, default, progress=self._progress),
                    error=problem.plan(picks).error,
                    estimated=None if self.times is None else self.times.of(kept),
                )
            )
        return candidates

    def variant(self, plan: CandidatePlan, number: int = 1) -> Variant:
        """Builds a plan if the backend makes engines, runs it, and compares it with the float model."""
        prepared, caps, stage = self.prepared, self._backend.capabilities, f"measuring plan {number}"
        networks = explicit_networks(prepared, plan.plan, caps)
        network = networks[0]
        facts: dict[str, Any] = {"counts": plan.plan.counts()}
        evaluation = None
        if caps.makes_engine:
            engine = self._built(networks)
            network, facts["engine"] = engine.network, len(engine.built.engine)
            if engine.audit is not None:
                facts["counts"] = engine.audit.counts()
            if self._on == "engine":
                evaluation, timed = self._run(engine, stage)
                facts.update(timed)
        if evaluation is None:
            evaluation = self._scored(network.model, stage)
        reference = self._reference
        score = score_against(evaluation, reference, self._dataset.annotated)
        facts.update(difference=score.difference, low=score.low, high=score.high, parts=dict(score.parts))
        if self._dataset.annotated:
            facts.update(map50=evaluation.result.map50)
        return Variant(
            name=plan.name,
            titles=plan.titles,
            kept=plan.kept,
            weights=weight_bytes(prepared.model, plan.plan),
            multiply_adds=weighted_macs(prepared.model, plan.plan),
            map=evaluation.result.map if self._dataset.annotated else None,
            reference=reference.result.map if self._dataset.annotated else None,
            **facts,
        )

    @cached_property
    def prepared(self) -> Prepared:
        """The corrected model, from the folder if it is there."""
        build, folder = self._checked, self._folder
        key = build.keys[Stage.CORRECTIONS]
        if (folder / variants.CORRECTED).exists():
            try:
                return variants.load_prepared(
                    folder, key, build.graph, options=self._options, selected=build.selected, progress=self._progress
                )
            except TrtdetError as error:
                warnings.warn(f"{error.problem}: it is made again", TrtdetWarning, stacklevel=2)
        prepared = prepared_of(build, self._progress)
        variants.save_prepared(folder, key, prepared)
        return prepared

    @cached_property
    def ranking(self) -> Sensitivity:
        rows = self._folder / variants.RANKING_ROWS
        return ranking(self.prepared, self._options.plan, rows=rows, progress=self._progress)

    @cached_property
    def times(self) -> Costs | None:
        """Estimated milliseconds of every plan; None if no engine lists its layers."""
        return plan_times(self.prepared, self._backend, self._options, progress=self._progress)

    @cached_property
    def _reference(self) -> Evaluation:
        """The float model's score, on the runtime of the plans."""
        if self._on == "engine":
            return self._run(self._built((float_network(self.prepared.graph, "fp32"),)), _FLOAT)[0]
        return self._scored(self.prepared.model, _FLOAT)

    def _built(self, networks: tuple[BuildNetwork, ...]) -> Engine:
        timings = self._folder / TIMINGS
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrtdetWarning)  # shown when a variant is built
            return best_engine(networks, self._backend, self._checked.target, timings=timings, progress=self._progress)

    def _run(self, engine: Engine, stage: str) -> tuple[Evaluation, dict[str, Any]]:
        with engine.opened(self._backend.capabilities, self._checked.target.plugins) as run:
            ms, device = run_ms(run, self.prepared, self._options, progress=self._progress)
            evaluation = self._scored(run, stage)
        return evaluation, {"latency_ms": ms, "device": device}

    def _scored(self, model: Any, stage: str) -> Evaluation:
        """Scores an ONNX model or a runner."""
        cache, progress = self._checked.selected.cache, self._progress
        return scored(model, self.prepared.graph, self._dataset, stage=stage, cache=cache, progress=progress)


def variant_of_plan(tuning: Tuning, plan: CandidatePlan) -> Variant:
    """Measures a plan on a worker of a cluster."""
    return _measuring_of(tuning).variant(plan)


@lru_cache(maxsize=1)
def _measuring_of(tuning: Tuning) -> _Measuring:
    """Cached, so that the rows of a worker share the float model's score."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # shown by the driver
        build = checked_build(tuning.job)
    return _Measuring(tuning, build, dataset=measuring_images(tuning.options.build.plan, build)[0], progress=silent)
