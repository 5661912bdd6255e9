"""Fourth stage: all that INT8 needs -> what precision each convolution runs in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from trtdet.audit.neighbours import Costs
from trtdet.bundle import Bundle
from trtdet.data import CocoDataset
from trtdet.errors import ConfigError
from trtdet.mixed_precision.planning import keeping, most_sensitive, named, reasons, within_budget
from trtdet.mixed_precision.ranking import rank
from trtdet.mixed_precision.scores import Sensitivity
from trtdet.mixed_precision.search import cheapest_within
from trtdet.mixed_precision.subject import Method, subject_key
from trtdet.mixed_precision.trade_off import TradeOff
from trtdet.pipeline.options import KeepOptions
from trtdet.pipeline.stages.bounds import Images, plan_problem, search_within
from trtdet.pipeline.stages.correcting import Prepared
from trtdet.pipeline.stages.half_range import within_half
from trtdet.pipeline.stages.rewriting import Graph
from trtdet.pipeline.stages.within_time import Measure, Within, check_reachable, most_accurate_within
from trtdet.progress import Progress, silent
from trtdet.quantization import Cause, Entry, Precision, PrecisionPlan, QdqPlacement
from trtdet.quantization.macs import DEPTHWISE, multiply_adds

RANKING = "sensitivity.json"
"""The file of a bundle that keeps the ranking."""


@dataclass(frozen=True)
class Planned:
    """What each convolution runs in, and what that was found by."""

    plan: PrecisionPlan
    ranking: Sensitivity | None = None
    trade_off: TradeOff | None = None
    within: Within | None = None


@dataclass(frozen=True)
class Prices:
    """What plans cost.

    Attributes:
        estimated: of any plan, worked out when it is asked for; None counts multiply-adds.
        stopwatch: gives what measures a plan; None where none can be run.
    """

    estimated: Callable[[], Costs | None] = lambda: None
    stopwatch: Callable[[], Measure | None] = lambda: None


def choose_plan(
    prepared: Prepared,
    keep: KeepOptions,
    ranked: Callable[[], Sensitivity],
    prices: Prices = Prices(),
    dataset: CocoDataset | None = None,
    progress: Progress = silent,
) -> Planned:
    """The plan that the options ask for.

    Args:
        prepared: the model.
        keep: what stays in FP16.
        ranked: gives the ranking, where one is needed.
        prices: what plans cost.
        dataset: the images for a bound on the loss.
        progress: told of every image that is scored.

    Raises:
        ConfigError: the options do not fit the model, or no plan keeps the bound.
    """
    planned = _chosen(prepared, keep, ranked, prices, dataset, progress)
    return replace(planned, plan=without_overflow(prepared, planned.plan, progress))


def _chosen(
    prepared: Prepared,
    keep: KeepOptions,
    ranked: Callable[[], Sensitivity],
    prices: Prices,
    dataset: CocoDataset | None,
    progress: Progress,
) -> Planned:
    """The plan before it is known what FP16 holds."""
    plan = prepared.plan
    if isinstance(keep.keep, Path):
        return Planned(_edited(prepared, keep.keep))
    if isinstance(keep.keep, tuple):
        macs = multiply_adds(prepared.model)
        group = [name for name in plan.names("int8") if macs[name].depthwise]
        names = [name for given in keep.keep for name in (group if given == DEPTHWISE else (given,))]
        listed = dict.fromkeys(named(plan, names), "kept: named")
        return Planned(keeping(plan, listed, Cause.KEPT_NAMED))
    if not keep.ranked or keep.keep == 0:
        return Planned(plan)
    ranked = cache(ranked)
    trade_off = None
    if keep.max_latency is not None:
        return _within(prepared, ranked, prices, keep.max_latency)
    if keep.bound is not None:
        assert dataset is not None, "validation gives the images"
        figure, limit = keep.bound
        images = Images(dataset, keep.num_images, figure)
        trade_off = cheapest_within(search_within(prepared, ranked, prices.estimated(), images, progress), limit)
        chosen, cause = trade_off.chosen.names, Cause.KEPT_BOUND
        if not ranked.cache_info().currsize:  # the cheapest plan of all will do
            cheap = dict.fromkeys(chosen, "kept: FP16 is estimated to be as fast here")
            return Planned(keeping(plan, cheap, cause), trade_off=trade_off)
    elif isinstance(keep.keep, int):
        chosen, cause = most_sensitive(ranked(), keep.keep), Cause.KEPT_SENSITIVE
    else:
        chosen, cause = within_budget(ranked(), keep.budget or 0.0), Cause.KEPT_BUDGET
    return Planned(keeping(plan, reasons(ranked(), chosen), cause), ranked(), trade_off)


def _within(prepared: Prepared, ranked: Callable[[], Sensitivity], prices: Prices, limit: float) -> Planned:
    """The most accurate plan within a time; nothing is ranked where none is."""
    costs = prices.estimated()
    assert costs is not None, "validation refuses a backend without layers"
    stopwatch = prices.stopwatch()
    if stopwatch is None:
        check_reachable(costs, plan_problem(prepared, costs), limit)
    found = most_accurate_within(costs, plan_problem(prepared, costs, ranked()), limit, stopwatch)
    plan = keeping(prepared.plan, reasons(ranked(), found.kept), Cause.KEPT_LATENCY)
    return Planned(plan, ranked(), within=found)


def ranking(prepared: Prepared, keep: KeepOptions, previous: Bundle | None, progress: Progress) -> Sensitivity:
    """The ranking of a bundle that was made from the same, or a new measurement."""
    subject = prepared.subject(keep.num_images)
    if previous is not None and RANKING in previous.manifest.files:
        found = Sensitivity.load(previous.file(RANKING))
        if found.key == subject_key(subject, Method()):
            return found
    return rank(subject, ray=keep.ray, progress=progress)


def float_plan(plan: PrecisionPlan, precision: Precision) -> PrecisionPlan:
    """Everything in one precision; what decodes boxes stays in FP32."""
    entries = {}
    for name, entry in plan.entries.items():
        stays = precision == "fp16" and entry.cause is Cause.DECODES_BOXES
        entries[name] = entry if stays else Entry(precision, f"--{precision}", Cause.REQUESTED)
    return PrecisionPlan(entries)


def edited_plan(path: Path, placement: QdqPlacement) -> PrecisionPlan:
    """A plan from a file.

    Raises:
        ConfigError: it cannot be read, is of another model, or asks for INT8 where that is impossible.
    """
    plan = PrecisionPlan.load(path)
    try:
        placement.following(plan)
    except ConfigError as error:
        raise ConfigError(f"plan '{path}': {error.problem}", error.hint) from None
    return plan


def starting_plan(graph: Graph, keep: KeepOptions) -> PrecisionPlan:
    """What corrections are made for: the graph's plan, with INT8 where an edited plan asks for it.

    Raises:
        ConfigError: as of :func:`edited_plan`.
    """
    entries = dict(graph.plan.entries)
    if isinstance(keep.keep, Path):
        for name in edited_plan(keep.keep, graph.placement).names("int8"):
            entries[name] = graph.placement.plan.entries[name]
    return PrecisionPlan(entries)


def _edited(prepared: Prepared, path: Path) -> PrecisionPlan:
    """A plan from a file, with what was done to the convolutions that are in INT8."""
    plan = edited_plan(path, prepared.placement)
    entries = {}
    for name, own in prepared.graph.plan.entries.items():
        known = replace(own, corrections=prepared.plan.entries[name].corrections)
        entries[name] = plan.entries[name].edited_from(known)
    return PrecisionPlan(entries)


def without_overflow(prepared: Prepared, plan: PrecisionPlan, progress: Progress = silent) -> PrecisionPlan:
    """A plan for the model with FP32 for what FP16 does not hold, see :func:`within_half`."""
    return within_half(prepared.model, plan, prepared.flow, prepared.magnitudes, progress)
