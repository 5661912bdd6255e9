"""The search for the cheapest plan whose measured loss is within a bound, on images that did not choose it.

The integer program knows what a plan costs and what its errors add up to; how much mAP an error costs only
measurements say. So plans are measured, few of them, and after each the bound on the error follows what was measured.
Then the plan, and before it more accurate ones, are measured on images that chose nothing, until one does not keep the
bound there. In such a fixed order each may be tried at the whole confidence of the interval (Maurer,
Hothorn and Lehmacher 1995, "Multiple comparisons in drug clinical trials and preclinical assays: a-priori ordered
hypotheses"), so that what is reported is not the luckiest of several.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from trtdet.errors import ConfigError
from trtdet.evaluation.confidence import images_needed
from trtdet.evaluation.scoring import Evaluation
from trtdet.mixed_precision.planning import check_bound
from trtdet.mixed_precision.program import Plan, Problem, cheapest, least_error
from trtdet.tables import Column, Table

EVALUATIONS = 6
"""At most so many scores over the images that choose until a plan is found, that of the float model included."""

MORE = 2
"""So many more accurate plans are scored with it then."""

REPORTED = 5
"""At most so many scores over the images that report, that of the float model included."""

_NEAR = 1.05
"""Bounds on the error that are nearer to each other than by this factor are not told apart."""

_LEAST = 1e-4
"""The share of an error that is too large that is tried where no error at all would do."""


@dataclass(frozen=True)
class Score:
    """A measured score of a variant.

    Attributes:
        map: COCO mAP 0.50:0.95, 0..1.
        difference: to the float model's.
        low, high: the 90 % interval of the difference.
        images: that it was measured on.
    """

    map: float
    difference: float
    low: float
    high: float
    images: int = 0

    @property
    def loss(self) -> float:
        """In mAP points (hundredths)."""
        return -100 * self.difference

    @property
    def worst(self) -> float:
        """The upper end of the interval of the loss, in mAP points (hundredths)."""
        return -100 * self.low


@dataclass(frozen=True)
class Candidate:
    """A plan that was tried.

    Attributes:
        kept: in words.
        names: of the convolutions in FP16, in the order of the network.
        share: of all multiply-adds, 0..1.
        score: as measured on the images that choose.
        error: the sum of its errors at the head, as the program knows them.
        cost: by the program; milliseconds where an engine's layers are known.
        reported: as measured on the images that report; None where that was not asked.
    """

    kept: str
    names: tuple[str, ...]
    share: float
    score: Score
    error: float = 0.0
    cost: float = 0.0
    reported: Score | None = None


@dataclass(frozen=True)
class TradeOff:
    """What was tried for a bound on the loss.

    Attributes:
        bound: the largest loss allowed, in mAP points (hundredths): the upper end of its 90 % interval is within it.
        reference: mAP of the float model on the images that choose, 0..1.
        candidates: the cheapest first.
        chosen: the cheapest of which the images that report show that it keeps the bound.
        evaluations: scores that it took, the float model's two included.
        unit: of the costs.
        needed: how many images that report would show the bound of the cheapest plan that keeps it on the images that
            choose, if that was not shown; None where it was, or where no number would do.
    """

    bound: float
    reference: float
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    evaluations: int
    unit: str = "ms"
    needed: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps({"schema": 1, **asdict(self)}, indent=1) + "\n"

    def table(self) -> str:
        """Lines of text; mAP in points."""
        columns = (
            *(Column("kept in FP16", align="left"), "convs", Column("multiply-adds", ".1%"), Column(self.unit, ".4g")),
            *(Column("mAP", ".2f"), Column("against FP32", "+.2f"), Column("90 % interval", align="right")),
            *(Column("on other images", "+.2f"), Column("90 % interval", align="right"), ""),
        )
        rows = [
            [
                *(tried.kept, len(tried.names), tried.share, tried.cost, 100 * tried.score.map),
                *(100 * tried.score.difference, _interval(tried.score)),
                *(None if tried.reported is None else 100 * tried.reported.difference, _interval(tried.reported)),
                "<- chosen" if tried is self.chosen else "",
            ]
            for tried in self.candidates
        ]
        return Table(columns, rows).text()


def _interval(score: Score | None) -> str:
    return "" if score is None else f"{100 * score.low:+.2f} .. {100 * score.high:+.2f}"


class Scorer(Protocol):
    """Scores plans on images, against the float model on the same images."""

    @property
    def reference(self) -> Evaluation:
        """Of the float model."""

    def __call__(self, names: tuple[str, ...]) -> Score:
        """Of the plan with these convolutions in FP16."""


@dataclass(frozen=True)
class Search:
    """What a search is made with.

    Attributes:
        start: the choices and their costs, without errors.
        ranked: gives the same with the errors; not asked where the cheapest plan of all keeps the bound.
        macs: multiply-adds of every convolution for one image, by name.
        unit: of the problem's costs.
        measure: scores plans on the images that choose.
        report: scores plans on the images that report.
    """

    start: Problem
    ranked: Callable[[], Problem]
    macs: dict[str, int]
    unit: str
    measure: Scorer
    report: Scorer


def cheapest_within(search: Search, bound: float, evaluations: int = EVALUATIONS) -> TradeOff:
    """The cheapest plan whose loss is within a bound at the upper end of its interval, on images that chose nothing.

    Args:
        search: choices and measurements.
        bound: the largest loss allowed, in mAP points (hundredths).
        evaluations: at most so many scores on the images that choose, the float model's included; at least 4.

    Raises:
        ConfigError: a bound below 0; or no plan keeps it on the images that choose, or none is shown to on the others,
            with the number of images that would do.
    """
    check_bound(bound)
    tried = _tried(search, bound, evaluations)
    held = [found for found in tried if found.score.worst <= bound]
    if not held:
        best = min(tried, key=lambda found: found.score.worst)
        whole = 100 * search.measure.reference.result.map
        raise ConfigError(
            f"--max-map-drop {bound:g}: no plan keeps the loss within {bound:g} mAP points of {whole:.2f}; the best of "
            f"{len(tried)}, {best.kept}, loses {best.score.loss:.2f} ({_worst(best.score)})"
        )
    shown, failed = _shown(search, min(held, key=lambda found: found.cost), bound)
    candidates = {found.names: found for found in (*tried, *shown, *failed)}
    needed = _needed(failed, bound)
    if not shown:
        last = failed[-1]
        assert last.reported is not None
        more = f"; {needed} annotated images to report on would show it" if needed else ""
        raise ConfigError(
            f"--max-map-drop {bound:g}: {last.kept} keeps it on the images that chose it and is not shown to on the "
            f"{last.reported.images} others, where it loses {last.reported.loss:.2f} ({_worst(last.reported)}){more}"
        )
    ordered = tuple(sorted(candidates.values(), key=lambda found: (found.cost, len(found.names))))
    # The images that choose have scored the float model too, and so have those that report.
    evaluated = len(candidates) + 1 + len(shown) + len(failed) + 1
    return TradeOff(bound, search.measure.reference.result.map, ordered, shown[-1], evaluated, search.unit, needed)


def _worst(score: Score) -> str:
    return f"up to {score.worst:.2f} at 90 %"


def _needed(failed: list[Candidate], bound: float) -> int | None:
    for found in failed:
        assert found.reported is not None
        return images_needed(found.reported.loss, found.reported.worst, found.reported.images, bound)
    return None


def _shown(search: Search, chosen: Candidate, bound: float) -> tuple[list[Candidate], list[Candidate]]:
    """Plans that keep the bound on the images that report, and plans that do not, in the order of asking.

    The order is given before anything is measured there: the least error, a quarter of the chosen plan's, the chosen
    plan; it ends with the first that fails. The cheapest plan of all, which nothing had to be ranked for, is asked
    first and alone.
    """
    failed: list[Candidate] = []
    if chosen.names == cheapest(search.start, math.inf).half:
        first = _reported(search, chosen)
        if _keeps(first, bound):
            return [first], []
        failed.append(first)
    problem = search.ranked()
    error = math.fsum(
        min(choice.error for choice in choices if choice.half == (name in chosen.names))
        for name, choices in problem.choices.items()
    )
    least = least_error(problem)
    plans = (cheapest(problem, allowed) for allowed in (least, max(least, error / 4)))
    accurate = {plan.half: plan for plan in plans if plan.half != chosen.names}
    order = [_candidate(search, plan) for plan in accurate.values()]
    shown: list[Candidate] = []
    for found in order if failed else [*order, chosen]:
        reported = _reported(search, found)
        if not _keeps(reported, bound):
            failed.append(reported)
            break
        shown.append(reported)
    return shown, failed


def _reported(search: Search, found: Candidate) -> Candidate:
    return replace(found, reported=search.report(found.names))


def _keeps(found: Candidate, bound: float) -> bool:
    return found.reported is not None and found.reported.worst <= bound


def _tried(search: Search, bound: float, evaluations: int) -> list[Candidate]:
    """Plans, measured, until nothing lies between the largest error that keeps the bound and the least that does not.

    The loss is taken to fall as the error does, from what was measured last; between a plan that keeps the bound and a
    plan that does not the error is halved by its logarithm. The last evaluation is that of the least error.
    """
    first = cheapest(search.start, math.inf)
    tried = [_candidate(search, first)]
    if tried[0].score.worst <= bound:
        return tried
    problem = search.ranked()
    high, low = problem.plan(first.picks).error, -1.0
    tried[0] = replace(tried[0], error=high)
    least, worst = least_error(problem), tried[0].score.worst
    while high > least and len(tried) + 1 < evaluations and high > _NEAR * low:
        if low >= 0:
            allowed = math.sqrt(max(low, _LEAST * high) * high)
        else:
            last = len(tried) + 2 == evaluations
            allowed = least if last else max(least, high * min(0.9, 0.9 * bound / worst))
        plan = cheapest(problem, allowed)
        known = [found for found in tried if found.names == plan.half]
        if not known:
            tried.append(_candidate(search, plan))
        found = (known or tried)[-1]
        if found.score.worst <= bound:
            low = allowed
        else:
            high, worst = plan.error, found.score.worst
    return tried


def _candidate(search: Search, plan: Plan) -> Candidate:
    count, total = len(plan.half), len(plan.picks)
    kept = "none" if not count else "all" if count == total else f"{count} of {total}"
    share = sum(search.macs[name] for name in plan.half) / max(sum(search.macs.values()), 1)
    return Candidate(kept, plan.half, share, search.measure(plan.half), plan.error, plan.cost)
