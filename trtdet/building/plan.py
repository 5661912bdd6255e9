"""Fourth step of a build: ranges and corrections -> a precision for each convolution.

A limit on accuracy loss or latency chooses one of the optimiser's Pareto-optimal plans, see :mod:`trtdet.plans.front`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import onnx

from trtdet.audit.neighbours import Costs
from trtdet.backends import Backend
from trtdet.building.corrections import Prepared
from trtdet.building.costs import plan_stopwatch, plan_times, size_costs
from trtdet.building.graph import PlacedGraph
from trtdet.bundle import Bundle
from trtdet.data import CocoDataset, ImageCache
from trtdet.errors import ConfigError, DataError, TrtdetError, TrtdetWarning
from trtdet.evaluation.agreement import agree, part_agreements
from trtdet.evaluation.comparison import compare, part_scores
from trtdet.evaluation.confidence import halves
from trtdet.evaluation.scoring import Evaluation, evaluate
from trtdet.options import BuildOptions, PlanOptions, spelled
from trtdet.plans.front import (
    MAP,
    LatencyPlan,
    LossLimit,
    Score,
    Search,
    TradeOff,
    cheapest_within,
    check_reachable,
    limit_of,
    most_accurate_within,
)
from trtdet.plans.measuring import Method, subject_key
from trtdet.plans.optimiser import PrecisionChoice, Problem
from trtdet.plans.planning import check_count, keeping, most_sensitive, named, reasons, within_budget
from trtdet.plans.ranking import rank
from trtdet.plans.scores import Sensitivity
from trtdet.progress import Progress, silent
from trtdet.quantization import Cause, PrecisionPlan, QdqPlacement
from trtdet.quantization.macs import DEPTHWISE, multiply_adds
from trtdet.runtime.detector import Detector

RANKING = "sensitivity.json"
"""File of a bundle with the sensitivity ranking."""


def check_placement(plan: PlanOptions, graph: PlacedGraph) -> None:
    """Refuses unknown layer names, more FP16 layers than the model has, and a plan of another model."""
    if isinstance(plan.keep_fp16, tuple):
        named(graph.plan, [name for name in plan.keep_fp16 if name != DEPTHWISE])
    elif isinstance(plan.keep_fp16, int):
        check_count(plan.keep_fp16, len(graph.plan.names("int8")))
    if not starting_plan(graph, plan).names("int8"):
        warn_of_nothing(graph)


def warn_of_nothing(graph: PlacedGraph) -> None:
    """Warns if all convolutions stay in FP16 by default."""
    left = graph.plan.names("fp16")
    if left and not graph.plan.names("int8"):
        example = graph.plan.entries[left[0]].reason
        warnings.warn(
            f"INT8 has nothing to do: all {len(left)} convolutions that can be in INT8 stay in FP16 by default, the "
            f"first '{left[0]}' ({example}); {spelled(BuildOptions, 'plan.int8_all')} puts them into INT8",
            TrtdetWarning,
            stacklevel=3,
        )


def edited_plan(path: Path, placement: QdqPlacement) -> PrecisionPlan:
    """Loads a plan that a user edited. Raises ConfigError if it cannot be read, belongs to another model, or has INT8
    where the model cannot run it."""
    plan = PrecisionPlan.load(path)
    try:
        placement.following(plan)
    except ConfigError as error:
        raise ConfigError(f"plan '{path}': {error.problem}", error.hint) from None
    return plan


def starting_plan(graph: PlacedGraph, options: PlanOptions) -> PrecisionPlan:
    """The plan that corrections are computed for: the graph's default, with INT8 also where an edited plan has it."""
    entries = dict(graph.plan.entries)
    if isinstance(options.keep_fp16, Path):
        for name in edited_plan(options.keep_fp16, graph.placement).names("int8"):
            entries[name] = graph.placement.plan.entries[name]
    return PrecisionPlan(entries)


def keeping_named(plan: PrecisionPlan, options: PlanOptions, model: onnx.ModelProto) -> PrecisionPlan:
    """The plan with the convolutions that ``keep_fp16`` names in FP16; ConfigError if the model lacks one."""
    if not isinstance(options.keep_fp16, tuple):
        return plan
    macs = multiply_adds(model)
    depthwise = [name for name in plan.names("int8") if macs[name].depthwise]
    names = [name for item in options.keep_fp16 for name in (depthwise if item == DEPTHWISE else (item,))]
    return keeping(plan, dict.fromkeys(named(plan, names), "kept: named"), Cause.KEPT_NAMED)


def check_latency(plain: Prepared, backend: Backend, options: BuildOptions, progress: Progress = silent) -> None:
    """Refuses an unreachable latency limit before corrections are computed, as they make no plan faster."""
    limit = options.plan.max_latency
    if limit is None or plan_stopwatch(plain, backend, options, progress=progress) is not None:
        return  # the plan itself is measured later
    costs = plan_times(plain, backend, options, progress=progress)
    if costs is not None:
        check_reachable(costs.unit, plan_problem(plain, costs), limit)


@dataclass(frozen=True)
class Planned:
    """The chosen plan, with the ranking and search results behind it."""

    plan: PrecisionPlan
    ranking: Sensitivity | None = None
    trade_off: TradeOff | None = None
    within: LatencyPlan | None = None


def choose_plan(
    prepared: Prepared,
    options: BuildOptions,
    ranked: Callable[[], Sensitivity],
    backend: Backend | None = None,
    dataset: CocoDataset | None = None,
    progress: Progress = silent,
) -> Planned:
    """Chooses the plan by the options, with FP32 where values exceed FP16.

    ``ranked`` returns the ranking, and is called only if needed. Limits on latency and accuracy loss need a
    ``backend``; those on loss also need a ``dataset``. Raises ConfigError: the options do not fit the model, or no plan
    meets the limit.
    """
    plan_options, plan, trade_off, latency = options.plan, prepared.plan, None, None
    ranked = cache(ranked)
    chosen: tuple[str, ...] = ()
    if isinstance(plan_options.keep_fp16, Path):
        edited, entries = edited_plan(plan_options.keep_fp16, prepared.graph.placement), {}
        for name, entry in prepared.graph.plan.entries.items():
            own = replace(entry, corrections=plan.entries[name].corrections)
            entries[name] = edited.entries[name].edited_from(own)
        plan = PrecisionPlan(entries)
    elif isinstance(plan_options.keep_fp16, tuple):
        plan = keeping_named(plan, plan_options, prepared.model)
    elif plan_options.max_latency is not None:
        assert backend is not None
        costs = plan_times(prepared, backend, options, progress=progress)
        stopwatch = plan_stopwatch(prepared, backend, options, progress=progress)
        assert costs is not None, "validation refuses a backend without layers"
        if stopwatch is None:
            check_reachable(costs.unit, plan_problem(prepared, costs), plan_options.max_latency)
        latency = most_accurate_within(
            costs.unit, plan_problem(prepared, costs, ranked()), limit=plan_options.max_latency, measure=stopwatch
        )
        chosen, cause = latency.kept, Cause.KEPT_LATENCY
    elif (accuracy_limit := limit_of(plan_options)) is not None:
        assert dataset is not None and backend is not None, "validation gives the images"
        figure, limit = accuracy_limit
        if plan_options.objective == "size":
            costs = size_costs(prepared)
        else:
            costs = plan_times(prepared, backend, options, progress=progress)
        search = search_within(prepared, ranked, costs, dataset=dataset, figure=figure, progress=progress)
        trade_off = cheapest_within(search, limit)
        chosen, cause = trade_off.chosen.names, Cause.KEPT_BOUND
    elif plan_options.keep_fp16:
        chosen, cause = most_sensitive(ranked(), plan_options.keep_fp16), Cause.KEPT_SENSITIVE
    elif plan_options.fp16_budget is not None:
        chosen, cause = within_budget(ranked(), plan_options.fp16_budget), Cause.KEPT_BUDGET
    ranking = ranked() if ranked.cache_info().currsize else None
    if chosen:
        faster = dict.fromkeys(chosen, "kept: FP16 is estimated to be as fast here")
        plan = keeping(plan, faster if ranking is None else reasons(ranking, chosen), cause)
    return Planned(prepared.without_overflow(plan, progress), ranking, trade_off, within=latency)


def ranking(
    prepared: Prepared,
    options: PlanOptions,
    method: Method = Method(),
    previous: Bundle | None = None,
    rows: Path | None = None,
    progress: Progress = silent,
) -> Sensitivity:
    """Ranks the convolutions on calibration images, or on the method's annotated images.

    A ranking in ``previous`` with the same key is reused. Each finished row is appended to ``rows``; an existing
    file is resumed.
    """
    dataset = None if method.dataset is None else method.dataset.first(options.rank_images)
    subject, method = prepared.subject(options.rank_images, dataset), replace(method, dataset=dataset)
    if previous is not None and RANKING in previous.manifest.files:
        kept = Sensitivity.load(previous.file(RANKING))
        if kept.key == subject_key(subject, method):
            return kept
    return rank(subject, method, rows, ray=options.ray, progress=progress)


_UNSEEN = 1e-6
"""Smallest error of an INT8 convolution, as a share of the largest error."""


def plan_problem(prepared: Prepared, costs: Costs | None, ranked: Sensitivity | None = None) -> Problem:
    """Optimisation problem: INT8 or FP16 for each convolution that is in INT8 by default.

    Without ``costs`` million multiply-adds count, FP16 twice. ``ranked`` has the INT8 errors; None sets them to 0.
    Otherwise each is at least a millionth of the largest: a layer without an error of its own can still lose detections
    together with others.
    """
    macs = multiply_adds(prepared.model)
    errors = {layer.name: layer.score for layer in ranked.layers} if ranked is not None else {}
    least = 0.0 if ranked is None else _UNSEEN * max(errors.values(), default=0.0) or _UNSEEN
    choices = {}
    for name in prepared.plan.names("int8"):
        cost = macs[name].count / 1e6 if costs is None else 0.0
        int8 = PrecisionChoice("int8", max(errors.get(name, 0.0), least), cost=cost)
        choices[name] = (int8, PrecisionChoice("fp16", error=0.0, half=True, cost=2 * cost))
    joints, fixed = ((), 0.0) if costs is None else (costs.joints, costs.fixed)
    return Problem(choices, joints, fixed)


PLAIN_UNIT = "million multiply-adds, FP16 twice"
"""Unit of :func:`plan_problem` without costs."""


def search_within(
    prepared: Prepared,
    ranked: Callable[[], Sensitivity],
    costs: Costs | None,
    dataset: CocoDataset,
    figure: LossLimit = MAP,
    progress: Progress = silent,
) -> Search:
    """Search for a plan: one half of the images chooses it, the other half verifies it.

    ``ranked`` is called only if needed; for ``costs`` see :func:`plan_problem`. A limit on mAP needs annotated images.
    """
    macs = multiply_adds(prepared.model)
    depthwise = tuple(name for name in prepared.plan.names("int8") if macs[name].depthwise)
    choosing, verifying = (
        PlanScorer(prepared, figure=figure, dataset=half, progress=progress) for half in halves(dataset)
    )
    return Search(
        start=plan_problem(prepared, costs),
        ranked=lambda: plan_problem(prepared, costs, ranked()),
        macs={name: work.count for name, work in macs.items() if name in prepared.plan.entries},
        unit=PLAIN_UNIT if costs is None else costs.unit,
        measure=choosing,
        report=verifying,
        figure=figure,
        others=(depthwise,) if depthwise else (),
    )


def scored(
    model: Any, graph: PlacedGraph, dataset: CocoDataset, stage: str, cache: ImageCache, progress: Progress
) -> Evaluation:
    """Scores an ONNX model, or a runner of it, that has the outputs of ``graph``; ``stage`` is for ``progress``."""
    detector = Detector.running(model, graph.config, graph.nms_mode, for_scores=True)
    return evaluate(detector, dataset, lambda done, total: progress(stage, done, total), cache=cache)


def score_against(
    evaluation: Evaluation,
    reference: Evaluation,
    by_map: bool,
    error: type[TrtdetError] = DataError,
    subject: str = "accuracy cannot be measured by agreement",
) -> Score:
    """A network's score against the float model's on the same images, of boxes and parts: mAP, or else the agreement.

    Raises ``error``, which names the ``subject``, if the float model detects too little for an agreement.
    """
    if by_map:
        gap = compare(evaluation, reference)
        return Score(
            evaluation.result.map,
            difference=gap.difference,
            low=gap.low,
            high=gap.high,
            images=gap.images,
            parts=part_scores(evaluation, reference),
        )
    agreement = agree(evaluation, reference)
    if agreement.ap is None or agreement.low is None or agreement.high is None:
        raise error(f"{subject}: {agreement.problem}")
    return Score(
        None,
        difference=agreement.ap - 1,
        low=agreement.low - 1,
        high=agreement.high - 1,
        images=agreement.images,
        agreement=agreement.ap,
        parts=part_agreements(evaluation, reference),
    )


class PlanScorer:
    """Scores plans against the float model on the same images; mAP needs annotated images."""

    def __init__(self, prepared: Prepared, figure: LossLimit, dataset: CocoDataset, progress: Progress) -> None:
        self._prepared, self._figure, self._dataset, self._progress = prepared, figure, dataset, progress
        self._count = 0
        self._scores: dict[tuple[str, ...], Score] = {}

    @cached_property
    def _float(self) -> Evaluation:
        return self._scored(self._prepared.model)

    @property
    def reference(self) -> float:
        """The float model's score, 0..1."""
        return self._float.result.map if self._figure is MAP else 1.0

    def __call__(self, names: tuple[str, ...]) -> Score:
        """Score of the plan with these convolutions in FP16; each plan is measured once."""
        if names in self._scores:
            return self._scores[names]
        prepared, reference, figure = self._prepared, self._float, self._figure
        plan = keeping(prepared.plan, dict.fromkeys(names, "tried"), Cause.KEPT_BOUND)
        evaluation = self._scored(prepared.explicit(prepared.without_overflow(plan, self._progress)).model)
        score = score_against(evaluation, reference, figure is MAP, error=ConfigError, subject=figure.option)
        self._scores[names] = score
        return score

    def _scored(self, model: onnx.ModelProto) -> Evaluation:
        self._count += 1
        prepared, dataset = self._prepared, self._dataset
        stage = f"{self._figure.column} on {len(dataset.images)} images, evaluation {self._count}"
        cache = prepared.calibrated.cache
        return scored(model, prepared.graph, dataset, stage=stage, cache=cache, progress=self._progress)
