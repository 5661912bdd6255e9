"""The cheapest plan within an accuracy limit, and the most accurate plan within a latency limit.

The optimiser predicts the cost and the error of a plan; only measurements show what an error costs in detections. So
the Pareto-optimal plans are searched by bisection on half of the images. The other half verifies the plan, and before
it more accurate plans, up to the first plan that fails. This order is fixed before anything is scored there. Each test
may then use the full confidence level, and the chance of a wrong acceptance is no larger than for a single test
(Maurer, Hothorn and Lehmacher 1995, "Multiple comparisons in drug clinical trials and preclinical assays: a-priori
ordered hypotheses").
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, Protocol

from trtdet.errors import ConfigError
from trtdet.evaluation.comparison import PartScore, decisive, interval_text, spread_text
from trtdet.evaluation.confidence import images_needed
from trtdet.evaluation.parts import Of
from trtdet.options import PlanOptions, spelled
from trtdet.plans.optimiser import Plan, Problem, cheapest, front, most_accurate
from trtdet.tables import Column, Table

TRIES = 4  # measurements of a bisection over the front
FRONT = 2**TRIES - 1  # plans of the front that are bisected
_VERIFIED_BEFORE = (0.0, 0.25, 0.5)  # plans with at most these shares of the chosen plan's error are verified before it
_PLACES = (" against FP32", " on other images")  # titles of the parts' differences
_CLEAR = 0.5  # if the cheapest plan loses at most this share of the limit, only it is verified and nothing is ranked


@dataclass(frozen=True)
class LossLimit:
    """A limited measure."""

    name: str  # in files
    option: str
    unit: str
    column: str  # title in tables


MAP = LossLimit("map", option=spelled(PlanOptions, "plan.max_map_drop"), unit="mAP points", column="mAP")
"""COCO mAP 0.50:0.95 on annotated images."""

AGREEMENT = LossLimit(
    "agreement", option=spelled(PlanOptions, "plan.max_disagreement"), unit="points of agreement", column="agreement"
)
"""Average precision 0.50:0.95 against the float model's detections, see :func:`trtdet.evaluation.agreement.agree`."""


def limit_of(options: PlanOptions) -> tuple[LossLimit, float] | None:
    """The measure that the options limit, and its limit in points; None without a limit."""
    limits = ((MAP, options.max_map_drop), (AGREEMENT, options.max_disagreement))
    return next(((figure, limit) for figure, limit in limits if limit is not None), None)


@dataclass(frozen=True)
class Score:
    """A measured score of a plan: of its boxes, and of the parts; a limit holds for each of them."""

    map: float | None  # COCO mAP 0.50:0.95, 0..1; None without annotations
    difference: float  # ``map`` minus the float model's mAP, or ``agreement - 1``
    low: float  # of the 90 % interval of ``difference``
    high: float
    images: int = 0
    agreement: float | None = None  # AP against the float model's detections, 0..1; None if mAP is limited
    parts: Mapping[Of, PartScore] = field(default_factory=dict)

    @property
    def value(self) -> float | None:
        """The limited measure, 0..1."""
        return self.map if self.agreement is None else self.agreement

    @property
    def loss(self) -> float:
        """Loss of boxes or of the part that may have lost most, in points (hundredths)."""
        return -100 * decisive(self)[1]["difference"]

    @property
    def worst(self) -> float:
        """Upper end of the 90 % interval of ``loss``, in points (hundredths)."""
        return -100 * (decisive(self)[1]["low"] or 0.0)

    @property
    def loss_text(self) -> str:
        """``loss`` and ``worst`` in words."""
        what = f" of {decisive(self)[0].replace('_', ' ')}" if self.parts else ""
        return f"loses {self.loss:.2f}{what} (up to {self.worst:.2f} at 90 %)"

    @property
    def interval(self) -> str:
        """Interval of the boxes' difference, in points."""
        return interval_text(self.low, self.high)


@dataclass(frozen=True)
class ScoredPlan:
    """A plan that was scored."""

    kept: str  # number of convolutions in FP16, in words
    names: tuple[str, ...]  # the convolutions in FP16, in network order
    share: float  # of all multiply-adds in FP16, 0..1
    score: Score  # on the images that choose
    error: float = 0.0  # predicted error power at the output: the sum over its INT8 convolutions, each measured alone
    cost: float = 0.0  # by the optimiser, in the unit of the trade-off
    reported: Score | None = None  # score on the images that verify; None if the plan was not verified


@dataclass(frozen=True)
class TradeOff:
    """The plans scored for an accuracy limit."""

    bound: float  # largest loss allowed, in points (hundredths), at the upper end of its 90 % interval
    reference: float  # the float model's score on the images that choose, 0..1; 1 for agreement
    candidates: tuple[ScoredPlan, ...]  # the scored plans, cheapest first
    chosen: ScoredPlan  # the cheapest plan within the limit on the images that verify
    evaluations: int  # number of scores, including two of the float model
    unit: str = "ms"  # of the costs
    # Images in each half that would verify a cheaper plan with its measured loss; None if no number would.
    needed: int | None = None
    figure: str = MAP.name  # name of the limited measure, see :class:`LossLimit`

    @property
    def summary(self) -> str:
        """One sentence: the number of scores, and how many images would verify a cheaper plan."""
        reference = f"; FP32 mAP {100 * self.reference:.2f}" if self.figure == MAP.name else ""
        more = f"; {self.needed} images on each side would show it of a cheaper plan" if self.needed else ""
        return f"{self.evaluations} scores{reference}{more}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps({"schema": 1, **asdict(self)}, indent=1) + "\n"

    def table(self) -> Table:
        """The scored plans; scores in points."""
        column = AGREEMENT.column if self.figure == AGREEMENT.name else MAP.column
        parts = self.chosen.score.parts
        columns: tuple[Column | str, ...] = (
            *(Column("kept in FP16", align="left"), "convs", Column("multiply-adds", ".1%"), Column(self.unit, ".4g")),
            *(Column(column, ".2f"), Column("against FP32", "+.2f"), Column("90 % interval", align="right")),
            *(Column("on other images", "+.2f"), Column("90 % interval", align="right")),
            *(Column(f"{of.replace('_', ' ')}{images}", align="right") for images in _PLACES for of in parts),
            "",
        )
        rows = []
        for plan in self.candidates:
            score, reported = plan.score, plan.reported
            others = (None, "") if reported is None else (100 * reported.difference, reported.interval)
            cells = (plan.kept, len(plan.names), plan.share, plan.cost, 100 * (score.value or 0.0))
            chosen = "<- chosen" if plan is self.chosen else ""
            of_parts = [
                None if each is None else spread_text(each.parts[of]) for each in (score, reported) for of in parts
            ]
            rows.append([*cells, 100 * score.difference, score.interval, *others, *of_parts, chosen])
        return Table(columns, rows)


class Scorer(Protocol):
    """Scores plans on images, against the float model on the same images."""

    @property
    def reference(self) -> float:
        """The float model's own score, 0..1."""

    def __call__(self, names: tuple[str, ...]) -> Score:
        """Score of the plan with these convolutions in FP16."""


@dataclass(frozen=True)
class Search:
    """Inputs of a search within an accuracy limit."""

    start: Problem  # the choices and their costs, without errors
    # Returns the problem with errors; not called if the cheapest plan is clearly within the limit.
    ranked: Callable[[], Problem]
    macs: dict[str, int]  # multiply-adds of each convolution per image, by name
    unit: str  # of the costs
    measure: Scorer  # scores plans on the images that choose
    report: Scorer  # scores plans on the images that verify
    figure: LossLimit = MAP
    # FP16 convolutions of further plans, scored if they are cheaper than the plan of the bisection.
    others: tuple[tuple[str, ...], ...] = ()


def cheapest_within(search: Search, bound: float) -> TradeOff:
    """The cheapest plan within an accuracy limit, verified on images that did not choose it.

    ``bound`` is the largest loss allowed, in points (hundredths), at the upper end of the 90 % interval. Raises
    ConfigError if no plan is within the limit on the images that choose; or none is on the images that verify.
    """
    scored: dict[tuple[str, ...], ScoredPlan] = {}

    def score(plan: Plan) -> ScoredPlan:
        if plan.half not in scored:
            count, total = len(plan.half), len(plan.picks)
            scored[plan.half] = ScoredPlan(
                "none" if not count else "all" if count == total else f"{count} of {total}",
                names=plan.half,
                share=sum(search.macs[name] for name in plan.half) / max(sum(search.macs.values()), 1),
                score=search.measure(plan.half),
                cost=plan.cost,
            )
        scored[plan.half] = replace(scored[plan.half], error=plan.error)
        return scored[plan.half]

    first = cheapest(search.start, math.inf)
    keeps = score(first).score.worst <= bound
    alone = keeps and (len(first.half) == len(first.picks) or score(first).score.worst <= _CLEAR * bound)
    order = [score(first)] if alone else []
    if not alone:
        problem = search.ranked()
        plans = front(problem, FRONT)
        score(problem.plan(first.picks))
        if not keeps:
            place = _last_within(plans, lambda plan: score(plan).score.worst <= bound)
            others = (_named(problem, names) for names in search.others)
            limit = plans[place].cost if place >= 0 else math.inf
            for plan in (plan for plan in others if plan is not None and plan.cost < limit):
                score(plan)
        chosen = _cheapest_of(scored, search, bound)
        limits = [share * chosen.error for share in _VERIFIED_BEFORE]
        before = {max((plan.error, plan.half) for plan in plans if plan.error <= limit)[1] for limit in limits}
        accurate = [score(plan) for plan in plans if plan.half in before - {chosen.names}]
        order = [candidate for candidate in accurate if candidate.score.worst <= bound] + [chosen]
    verified: ScoredPlan | None = None
    reports = 0
    for candidate in order:
        report, reports = search.report(candidate.names), reports + 1
        scored[candidate.names] = replace(candidate, reported=report)
        if report.worst > bound:
            break
        verified = scored[candidate.names]
    if verified is None:
        raise ConfigError(
            f"{search.figure.option} {bound:g}: {candidate.kept} keeps it on the images that chose it and is not shown "
            f"to on the {report.images} others, where it {report.loss_text}{_would_show(report, bound)}"
        )
    candidates = tuple(sorted(scored.values(), key=lambda each: (each.cost, len(each.names))))
    return TradeOff(
        bound=bound,
        reference=search.measure.reference,
        candidates=candidates,
        chosen=verified,
        evaluations=len(candidates) + 1 + reports + 1,
        unit=search.unit,
        needed=_needed(candidates, verified, bound),
        figure=search.figure.name,
    )


def _needed(candidates: Sequence[ScoredPlan], chosen: ScoredPlan, bound: float) -> int | None:
    """The fewest images that would verify a plan cheaper than the chosen one."""
    cheaper = [plan.reported or plan.score for plan in candidates if plan.cost < chosen.cost]
    missed = [score for score in cheaper if score.worst > bound]
    counts = [images_needed(score.loss, score.worst, score.images, bound=bound) for score in missed]
    return min((count for count in counts if count is not None), default=None)


def _last_within(plans: Sequence[Plan], holds: Callable[[Plan], bool]) -> int:
    """Index of the last plan that holds, by bisection; -1 if none does. Plans that hold come first."""
    low, high = -1, len(plans)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(plans[middle]) else (low, middle)
    return low


def _named(problem: Problem, names: tuple[str, ...]) -> Plan | None:
    """The plan with exactly these convolutions in FP16; None if a convolution has no such choice."""
    picks = {
        name: next((choice.name for choice in choices if choice.half == (name in names)), choices[0].name)
        for name, choices in problem.choices.items()
    }
    plan = problem.plan(picks)
    return plan if plan.half == names else None


def _cheapest_of(scored: dict[tuple[str, ...], ScoredPlan], search: Search, bound: float) -> ScoredPlan:
    """The cheapest plan within the limit on the images that choose."""
    within = [plan for plan in scored.values() if plan.score.worst <= bound]
    if within:
        return min(within, key=lambda plan: plan.cost)
    best = min(scored.values(), key=lambda plan: plan.score.worst)
    raise ConfigError(
        f"{search.figure.option} {bound:g}: no plan keeps the loss within {bound:g} {search.figure.unit} of "
        f"{100 * search.measure.reference:.2f}; the best of {len(scored)}, {best.kept}, {best.score.loss_text}"
        f"{_would_show(best.score, bound)}"
    )


def _would_show(score: Score, bound: float) -> str:
    needed = images_needed(score.loss, score.worst, score.images, bound=bound)
    return f"; {needed} images on each side would show it" if needed is not None else ""


Measure = Callable[[tuple[str, ...]], float]  # milliseconds of the plan with these convolutions in FP16

_LONGER = "ask for at least that, or name another GPU"


@dataclass(frozen=True)
class LatencyPlan:
    """The most accurate plan within a latency limit."""

    limit: float  # milliseconds
    kept: tuple[str, ...]  # the convolutions in FP16, in network order
    error: float  # predicted error power at the output: the sum over its INT8 convolutions
    estimated: float  # milliseconds by the optimiser
    measured: float | None  # milliseconds; None if no engine ran
    unit: str  # of ``estimated``, in words

    def __str__(self) -> str:
        """One sentence without a full stop."""
        time = f"{self.estimated:.4g} {self.unit}"
        if self.measured is not None:
            time = f"{self.measured:.4g} ms measured"
        return f"the least error within {self.limit:g} ms: {time}, {len(self.kept)} convolutions in FP16"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_reachable(unit: str, problem: Problem, limit: float) -> None:
    """Raises ConfigError if the cheapest plan exceeds ``limit`` milliseconds; the problem needs no errors."""
    least = cheapest(problem, math.inf).cost
    if least > limit:
        raise ConfigError(f"no plan runs in {limit:g} ms: the cheapest plan takes {least:.4g} {unit}", _LONGER)


def most_accurate_within(unit: str, problem: Problem, limit: float, measure: Measure | None = None) -> LatencyPlan:
    """The plan of least error within a latency limit in milliseconds.

    ``measure`` times plans of the front, by bisection; None takes the estimates. Raises ConfigError if the cheapest
    plan takes longer.
    """
    times: dict[tuple[str, ...], float] = {}
    if measure is None:
        check_reachable(unit, problem, limit)
        plan = most_accurate(problem, limit)
    else:
        timed = cache(measure)

        def fits(plan: Plan) -> bool:
            times[plan.half] = timed(plan.half)
            return times[plan.half] <= limit

        first = cheapest(problem, math.inf)
        if not fits(first):
            least = f"{times[first.half]:.4g} ms measured"
            raise ConfigError(f"no plan runs in {limit:g} ms: the cheapest plan takes {least}", _LONGER)
        plans = [plan for plan in reversed(front(problem, FRONT)) if plan.half != first.half]
        place = _last_within(plans, fits)
        plan = plans[place] if place >= 0 else first
    return LatencyPlan(
        limit, kept=plan.half, error=plan.error, estimated=plan.cost, measured=times.get(plan.half), unit=unit
    )
