"""The points of a tune: which plans there are, and what is measured of each. What several need is made once."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from typing_extensions import NotRequired, TypedDict

from trtdet.audit.neighbours import Costs
from trtdet.backends import EngineFacts, open_engine
from trtdet.config import Config, NmsMode
from trtdet.data import CocoDataset, evenly, find_images
from trtdet.errors import DataError, TrtdetError, TrtdetWarning
from trtdet.evaluation.agreement import agree
from trtdet.evaluation.comparison import Finite, MaskScore, compare, mask_score
from trtdet.evaluation.images_apart import apart_from
from trtdet.evaluation.scoring import Evaluation, evaluate
from trtdet.mixed_precision.program import Problem, front
from trtdet.mixed_precision.ranking import rank
from trtdet.mixed_precision.scores import Sensitivity
from trtdet.pipeline.assembly import Job, Validated, prepared_of, validated
from trtdet.pipeline.fingerprint import Stage
from trtdet.pipeline.options import DEFAULT_IMAGES, KeepOptions, TuneOptions
from trtdet.pipeline.stages.bounds import plan_problem
from trtdet.pipeline.stages.correcting import Prepared
from trtdet.pipeline.stages.costs import batch_of, plan_times, run_ms
from trtdet.pipeline.stages.engines import Engine, best_engine, runs_on, target_of
from trtdet.pipeline.stages.networks import Network, explicit_networks, float_network
from trtdet.pipeline.stages.planning import Planned, without_overflow
from trtdet.pipeline.stages.rewriting import Graph
from trtdet.pipeline.stages.sizes import size_costs, weight_bytes
from trtdet.pipeline.tuned import CORRECTED, RANKING_ROWS, load_prepared, save_prepared
from trtdet.progress import Progress, silent
from trtdet.quantization import Cause, Entry, PrecisionPlan, default_plan
from trtdet.quantization.macs import multiply_adds
from trtdet.runtime.detector import Detector

TIMINGS = "timing-cache"

MEASURING_FLOAT = "measuring the float model"
"""A stage of a tune."""


def measuring(number: int) -> str:
    """The stage in which a plan is measured, by its place among those that are."""
    return f"measuring plan {number}"


class Row(TypedDict):
    """What was measured of a plan, as ``rows.jsonl`` holds it; mAP and differences as fractions, 0..1.

    ``map`` and ``reference`` are None without annotations; ``engine``, bytes of its file, where none was built;
    ``measured``, milliseconds of a run, and ``device`` where none was run.
    """

    plan: str
    kept: list[str]
    counts: dict[str, int]
    map: Finite | None
    reference: Finite | None
    difference: Finite
    low: Finite
    high: Finite
    engine: int | None
    measured: Finite | None
    device: str | None
    seconds: Finite
    masks: NotRequired[MaskScore]
    """Where the detector and the annotations have masks."""


@dataclass(frozen=True)
class Tuning:
    """One tune, as a worker of a cluster is given it; the key stands for the rest."""

    key: str
    model: Path = field(compare=False)
    config: Config = field(compare=False)
    folder: Path = field(compare=False)
    options: TuneOptions = field(compare=False)

    @property
    def job(self) -> Job:
        """The build that every point is a variant of: all in INT8 that can be."""
        return Job(self.model, self.config, self.folder, replace(self.options.build, keep=KeepOptions()))


@dataclass(frozen=True)
class Candidate:
    """A plan before it is measured; fields as of :class:`trtdet.pipeline.points.Point`, and the plan itself."""

    titles: tuple[str, ...]
    kept: tuple[str, ...]
    plan: PrecisionPlan
    error: float
    estimated: float | None
    multiply_adds: float
    weights: int

    @property
    def name(self) -> str:
        """What tells plans of a model apart."""
        return hashlib.sha256("\n".join(self.kept).encode()).hexdigest()[:16]


def reporting(options: TuneOptions, known: Validated) -> tuple[CocoDataset, int]:
    """The images that accuracy is measured on, none of which calibrates, and how many were left out for that.

    Raises:
        DataError: there are none, or they and their annotations do not fit.
    """
    classes = known.graph.config.classes
    if options.images is None:
        calibration = options.build.calibration
        assert calibration.images is not None, "validation asks for calibration images"
        known_paths = set(known.selected.paths)
        found = find_images(calibration.images, calibration.root)
        rest = [path for path in sorted(found) if path not in known_paths]
        if not rest:
            raise DataError(
                f"all {len(found)} images of '{calibration.images}' calibrate, so that none can report on what they "
                "choose; give others with --val-images, or let fewer calibrate with --num-images"
            )
        given = CocoDataset.of_files(evenly(rest, DEFAULT_IMAGES), classes, calibration.images)
    elif options.annotations is None:
        given = CocoDataset.unannotated(options.images, classes)
    else:
        given = CocoDataset.load(options.annotations, options.images, classes)
    apart = apart_from(given, known.selected.paths)
    return apart, len(given.images) - len(apart.images)


def titled_plans(names: Sequence[str], graph: Graph, default: PrecisionPlan) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The plans that every tune measures: their titles by the convolutions that they have in FP16.

    Args:
        names: of the convolutions that can be in INT8.
        graph: the model.
        default: its default plan.
    """
    macs = multiply_adds(graph.model)
    titled: dict[str, tuple[str, ...]] = {
        "all INT8": (),
        "default": tuple(name for name in names if default.entries[name].precision != "int8"),
        "depthwise in FP16": tuple(name for name in names if macs[name].depthwise),
        "all FP16": tuple(names),
    }
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for title, kept in titled.items():
        if kept or not title.startswith("depthwise"):
            found[kept] = (*found.get(kept, ()), title)
    return found


class Points:
    """The plans of a tune and their measurements.

    Args:
        tuning: the tune.
        known: its build, validated.
        dataset: images that report.
        progress: told of images and builds.
    """

    def __init__(self, tuning: Tuning, known: Validated, dataset: CocoDataset, progress: Progress) -> None:
        self.tuning, self._known, self._dataset, self._progress = tuning, known, dataset, progress
        self._build = tuning.options.build
        self._backend = known.backend
        self._on = runs_on(tuning.options.on, self._backend.capabilities, self._build.sms, self._build.plugins)

    @property
    def gpu(self) -> str | None:
        """The GPU of the estimates; None where there are none."""
        return None if self.times is None else self.times.gpu

    @property
    def batch(self) -> int:
        """Images at once, that times are of."""
        return batch_of(self._build, self.prepared.model)

    def candidates(self) -> list[Candidate]:
        """Every plan that is to be measured: those with a title of their own, and those of the integer program."""
        prepared = self.prepared
        names = prepared.plan.names("int8")
        default = default_plan(prepared.model, prepared.placement, prepared.flow)
        found = titled_plans(names, prepared.graph, default)
        asked = self.tuning.options.points
        plans = front(self._problem, asked)
        for plan in plans:
            found.setdefault(plan.half, ("program",))
        # The cheapest plan of all may be the most accurate; then what lies between is worth its bytes alone.
        if len(plans) < asked:
            smaller = plan_problem(prepared, size_costs(prepared), self.ranking)
            for plan in front(smaller, asked - len(plans) + 2):
                found.setdefault(plan.half, ("program, by size",))
        return [self._candidate(titles, kept, default) for kept, titles in found.items()]

    def _candidate(self, titles: tuple[str, ...], kept: tuple[str, ...], default: PrecisionPlan) -> Candidate:
        prepared = self.prepared
        entries = dict(prepared.plan.entries)
        for name in kept:
            own = default.entries[name]
            chosen = Entry("fp16", "kept: in FP16 at this point of the front", Cause.KEPT_TUNED)
            entries[name] = own if own.precision == "fp16" else chosen
        plan = without_overflow(prepared, PrecisionPlan(entries), self._progress)
        picks = {name: "fp16" if name in kept else "int8" for name in self._problem.choices}
        return Candidate(
            titles,
            kept,
            plan,
            self._problem.plan(picks).error,
            None if self.times is None else self.times.of(kept),
            plan_problem(prepared, None, None).plan(picks).cost,
            weight_bytes(prepared.model, plan),
        )

    def row(self, candidate: Candidate, number: int = 1) -> Row:
        """Builds a plan where the backend makes engines, runs it, and compares it with the float model.

        Args:
            candidate: the plan.
            number: its place among those that are measured, as progress is told it.
        """
        started = time.monotonic()
        networks = explicit_networks(self.prepared, Planned(candidate.plan), self._backend.capabilities)
        network, counts = networks[0], candidate.plan.counts()
        facts: dict[str, Any] = {"engine": None, "measured": None, "device": None}
        stage = measuring(number)
        if self._backend.capabilities.makes_engine:
            engine = self._built(networks)
            network, facts["engine"] = engine.network, len(engine.built.engine)
            if engine.audit is not None:
                counts = engine.audit.counts()
            if self._on == "engine":
                evaluation, timed = self._run(engine, stage)
                return self._row(candidate, counts, evaluation, {**facts, **timed}, started)
        evaluation = self._scored(Detector.running(network.model, self.prepared.config, self._mode), stage)
        return self._row(candidate, counts, evaluation, facts, started)

    def _row(
        self, candidate: Candidate, counts: dict[str, int], got: Evaluation, facts: dict[str, Any], started: float
    ) -> Row:
        reference = self._reference
        points: tuple[float | None, ...] = (None, None)
        masks = None
        if self._dataset.annotated:
            found = compare(got, reference)
            points, difference = (got.result.map, reference.result.map), found.difference
            low, high = found.low, found.high
            masks = mask_score(got, reference)
        else:
            agreed = agree(got, reference)
            if agreed.ap is None or agreed.low is None or agreed.high is None:
                raise DataError(f"accuracy cannot be measured by agreement: {agreed.problem}")
            difference, low, high = agreed.ap - 1, agreed.low - 1, agreed.high - 1
        row: Row = {
            "plan": candidate.name,
            "kept": list(candidate.kept),
            "counts": counts,
            "map": points[0],
            "reference": points[1],
            "difference": difference,
            "low": low,
            "high": high,
            "engine": facts["engine"],
            "measured": facts["measured"],
            "device": facts["device"],
            "seconds": round(time.monotonic() - started, 2),
        }
        return row if masks is None else {**row, "masks": masks}

    @cached_property
    def prepared(self) -> Prepared:
        """The corrected model; taken from the folder where it is there."""
        key, folder = self._known.keys[Stage.CORRECTIONS], self.tuning.folder
        if (folder / CORRECTED).exists():
            try:
                return load_prepared(folder, key, self._known.graph, self._build, self._known.selected, self._progress)
            except TrtdetError as error:
                warnings.warn(f"{error.problem}: it is made again", TrtdetWarning, stacklevel=2)
        made = prepared_of(self._known, self._progress)
        save_prepared(folder, key, made)
        return made

    @cached_property
    def ranking(self) -> Sensitivity:
        """The error of each convolution."""
        options = self.tuning.options
        subject = self.prepared.subject(options.rank_images)
        rows = self.tuning.folder / RANKING_ROWS
        return rank(subject, rows=rows, ray=options.ray, progress=self._progress)

    @cached_property
    def times(self) -> Costs | None:
        """Estimated milliseconds of every plan; None where no engine lists its layers."""
        return plan_times(self.prepared, self._backend, self._build, self._progress)

    @cached_property
    def _problem(self) -> Problem:
        sizes = self._build.keep.objective == "size"
        return plan_problem(self.prepared, size_costs(self.prepared) if sizes else self.times, self.ranking)

    @property
    def _mode(self) -> NmsMode:
        return self.prepared.graph.nms_mode

    @cached_property
    def _reference(self) -> Evaluation:
        """Of the float model, on what the points are run on."""
        stage = MEASURING_FLOAT
        if self._on == "engine":
            return self._run(self._built((float_network(self.prepared.graph, "fp32"),)), stage)[0]
        return self._scored(Detector.running(self.prepared.model, self.prepared.config, self._mode), stage)

    def _built(self, networks: tuple[Network, ...]) -> Engine:
        timings = self._build.timing_cache or self.tuning.folder / TIMINGS
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrtdetWarning)  # the build of a point says it
            return best_engine(networks, self._backend, target_of(self._build), timings, self._progress)

    def _run(self, engine: Engine, stage: str) -> tuple[Evaluation, dict[str, Any]]:
        facts = EngineFacts.built(self._backend.capabilities, engine.built.sms, self._build.plugins)
        with open_engine(engine.built.engine, facts) as run:
            ms, device = run_ms(run, self.prepared, self._build, self._progress)
            evaluation = self._scored(Detector.running(run, self.prepared.config, self._mode), stage)
        return evaluation, {"measured": ms, "device": device}

    def _scored(self, detector: Detector, stage: str) -> Evaluation:
        def told(done: int, total: int) -> None:
            self._progress(stage, done, total)

        return evaluate(detector, self._dataset, told, self._known.selected.cache)


def row_of_plan(tuning: Tuning, candidate: Candidate) -> Row:
    """A row as a worker of a cluster makes it."""
    return _points_of(tuning).row(candidate)


@lru_cache(maxsize=1)
def _points_of(tuning: Tuning) -> Points:
    """Several rows of a worker share the float model's score."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # said by the driver
        known = validated(tuning.job)
    return Points(tuning, known, reporting(tuning.options, known)[0], silent)
