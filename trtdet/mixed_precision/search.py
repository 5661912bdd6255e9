"""The search for the cheapest plan whose measured loss is within a bound, on images that did not choose it.

The integer program knows what a plan costs and what its errors add up to; what an error costs in detections only
measurements say. So plans are measured, few of them, and after each the errors and the bound on them follow what was
measured. Then the plan, and before it more accurate ones, are measured on images that chose nothing, in an order that
was given before, until one does not keep the bound there. In such a fixed sequence each may be tried at the whole
confidence of the interval, and the chance that any is shown to keep a bound that it does not keep is no larger than for
one alone (Maurer, Hothorn and Lehmacher 1995, "Multiple comparisons in drug clinical trials and preclinical assays:
a-priori ordered hypotheses"). Nothing is asked after the first failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from trtdet.errors import ConfigError
from trtdet.evaluation.confidence import images_needed
from trtdet.mixed_precision.additivity import Additivity, corrected, how_additive
from trtdet.mixed_precision.planning import check_bound
from trtdet.mixed_precision.program import Plan, Problem, cheapest, least_error
from trtdet.mixed_precision.trade_off import MAP, Candidate, Figure, Score, TradeOff

EVALUATIONS = 6
"""At most so many scores over the images that choose until a plan is found, that of the float model included."""

_BEFORE = (0.0, 0.25, 0.5)
"""Plans with at most these shares of the chosen plan's error are asked before it on the images that report."""

MORE = len(_BEFORE)
"""So many more accurate plans are scored with it then."""

REPORTED = 2 + len(_BEFORE)
"""At most so many scores over the images that report, that of the float model included."""

_NEAR = 1.05
"""Bounds on the error that are nearer to each other than by this factor are not told apart."""

_LEAST = 1e-4
"""The share of an error that is too large that is tried where no error at all would do."""

_CLEAR = 0.5
"""A plan that keeps this share of the bound on the images that choose is asked alone on the others: it will hold."""

_AIM = 0.98
"""The share of the bound that plans are looked for at, so that not each second is a little over it."""


class Scorer(Protocol):
    """Scores plans on images, against the float model on the same images."""

    @property
    def reference(self) -> float:
        """The float model's own score, 0..1."""

    def __call__(self, names: tuple[str, ...]) -> Score:
        """Of the plan with these convolutions in FP16."""


@dataclass(frozen=True)
class Search:
    """What a search is made with.

    Attributes:
        start: the choices and their costs, without errors.
        ranked: gives the same with the errors; not asked where the cheapest plan of all keeps the bound clearly.
        head: the power of the error at the head with these convolutions in FP16, measured; asked with the errors.
        macs: multiply-adds of every convolution for one image, by name.
        unit: of the problem's costs.
        measure: scores plans on the images that choose.
        report: scores plans on the images that report.
        figure: what is bounded.
        others: plans by their convolutions in FP16 that are scored too where they are cheaper than what was found.
    """

    start: Problem
    ranked: Callable[[], Problem]
    head: Callable[[tuple[str, ...]], float]
    macs: dict[str, int]
    unit: str
    measure: Scorer
    report: Scorer
    figure: Figure = MAP
    others: tuple[tuple[str, ...], ...] = ()


def cheapest_within(search: Search, bound: float, evaluations: int = EVALUATIONS) -> TradeOff:
    """The cheapest plan whose loss is within a bound at the upper end of its interval, on images that chose nothing.

    Args:
        search: choices and measurements.
        bound: the largest loss allowed, in points (hundredths).
        evaluations: at most so many scores on the images that choose, the float model's included; at least 4.

    Raises:
        ConfigError: a bound below 0; or no plan keeps it on the images that choose, or none is shown to on the others,
            with the number of images that would do.
    """
    check_bound(bound, search.figure)
    run = _Run(search, bound)
    tried = run.tried(evaluations)
    held = [found for found in tried if found.score.worst <= bound]
    if not held:
        best = min(tried, key=lambda found: found.score.worst)
        needed = images_needed(best.score.loss, best.score.worst, best.score.images, bound)
        raise ConfigError(
            f"{search.figure.option} {bound:g}: no plan keeps the loss within {bound:g} {search.figure.unit} of "
            f"{100 * search.measure.reference:.2f}; the best of {len(tried)}, {best.kept}, loses {best.score.loss:.2f} "
            f"({_worst(best.score)}){_would_show(needed)}"
        )
    shown, failed = run.shown(min(held, key=lambda found: found.cost))
    if not shown:
        raise _not_shown(search.figure, bound, failed[-1])
    # Shown or not, the same plans with what the other images say.
    candidates = {found.names: found for found in (*tried, *shown, *failed)}
    ordered = tuple(sorted(candidates.values(), key=lambda found: (found.cost, len(found.names))))
    return TradeOff(
        bound,
        search.measure.reference,
        ordered,
        shown[-1],
        # The images that choose have scored the float model too, and so have those that report.
        len(candidates) + 1 + len(shown) + len(failed) + 1,
        search.unit,
        _needed(ordered, shown[-1], bound),
        search.figure.name,
        _additivity(ordered, shown[-1]),
    )


def _not_shown(figure: Figure, bound: float, last: Candidate) -> ConfigError:
    assert last.reported is not None
    reported = last.reported
    needed = images_needed(reported.loss, reported.worst, reported.images, bound)
    return ConfigError(
        f"{figure.option} {bound:g}: {last.kept} keeps it on the images that chose it and is not shown to on the "
        f"{reported.images} others, where it loses {reported.loss:.2f} ({_worst(reported)}){_would_show(needed)}"
    )


def _worst(score: Score) -> str:
    return f"up to {score.worst:.2f} at 90 %"


def _would_show(needed: int | None) -> str:
    return f"; {needed} images on each side would show it" if needed is not None else ""


def _needed(tried: tuple[Candidate, ...], chosen: Candidate, bound: float) -> int | None:
    """The fewest images that would show the bound of a plan that is cheaper than the chosen one."""
    scores = [found.reported or found.score for found in tried if found.cost < chosen.cost]
    counts = [images_needed(score.loss, score.worst, score.images, bound) for score in scores if score.worst > bound]
    return min((count for count in counts if count is not None), default=None)


def _additivity(tried: tuple[Candidate, ...], chosen: Candidate) -> Additivity | None:
    errors = [(found.error, found.head) for found in tried if found.head is not None]
    return how_additive(errors, None if chosen.head is None else (chosen.error, chosen.head))


class _Run:
    """A search as far as it has come."""

    def __init__(self, search: Search, bound: float) -> None:
        self._search, self._bound = search, bound
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._found: dict[tuple[str, ...], Candidate] = {}

    def tried(self, evaluations: int) -> list[Candidate]:
        """Plans, measured, until nothing lies between the largest error that keeps the bound and the least that fails.

        Between a plan that keeps the bound and a plan that does not, and below plans that do not, the loss is taken for
        a power of the error. The last evaluation is that of the least error.
        """
        first = self._candidate(cheapest(self._search.start, math.inf))
        if first.score.worst <= self._bound:
            return [first]
        bracket = _Bracket(self._bound, _error(self._with_errors(first)), first.score.worst)
        least = least_error(self._problem)
        while bracket.open and bracket.high > least and len(self._found) + 1 < evaluations:
            last = bracket.low is None and len(self._found) + 2 == evaluations
            allowed = least if last else max(least, bracket.aim())
            plan = cheapest(self._problem, allowed)
            known = plan.half in self._found
            bracket.narrow(self._with_errors(self._candidate(plan)), allowed, known=known)
        self._try_others()
        return list(self._found.values())

    def _try_others(self) -> None:
        """So that no well-known plan is better than what is found."""
        for names in self._search.others:
            held = [found.cost for found in self._found.values() if found.score.worst <= self._bound]
            picks = {
                name: next((choice.name for choice in choices if choice.half == (name in names)), choices[0].name)
                for name, choices in self._ranked.choices.items()
            }
            plan = self._ranked.plan(picks)
            if plan.half == names and plan.cost < min(held, default=math.inf):
                self._with_errors(self._candidate(plan))

    def shown(self, chosen: Candidate) -> tuple[list[Candidate], list[Candidate]]:
        """Plans that keep the bound on the images that report, and the first that does not, in the order of asking.

        The order is given before anything is measured there: the least error, a quarter and half of the chosen plan's,
        the chosen plan. A plan that keeps the bound clearly on the images that choose is asked alone, and so is a plan
        with nothing in INT8, which has none before it.
        """
        shown: list[Candidate] = []
        for found in self._order(chosen):
            score = self._search.report(found.names)
            reported = replace(found, reported=score)
            if score.worst > self._bound:
                return shown, [reported]
            shown.append(reported)
        return shown, []

    def _order(self, chosen: Candidate) -> list[Candidate]:
        """The plans that are asked on the images that report, the most accurate first."""
        if len(chosen.names) == len(self._search.start.choices):
            return [chosen]
        if chosen.head is None:
            if chosen.score.worst <= _CLEAR * self._bound:
                return [chosen]
            chosen = self._with_errors(chosen)
        problem, least = self._problem, least_error(self._problem)
        plans = [cheapest(problem, max(least, share * _error(chosen))) for share in _BEFORE]
        before = {plan.half: plan for plan in plans if plan.half != chosen.names}
        return [*(self._with_errors(self._candidate(plan)) for plan in before.values()), chosen]

    @property
    def _problem(self) -> Problem:
        """With the errors, corrected by what was measured."""
        known = [(self._plans[names], found.head) for names, found in self._found.items() if found.head is not None]
        return corrected(self._ranked, known)

    @cached_property
    def _ranked(self) -> Problem:
        return self._search.ranked()

    def _with_errors(self, found: Candidate) -> Candidate:
        """With its errors, by which those of single convolutions are corrected from now on."""
        if found.head is None:
            error = self._ranked.plan(self._plans[found.names].picks).error
            found = replace(found, error=error, head=self._search.head(found.names))
            self._found[found.names] = found
        return found

    def _candidate(self, plan: Plan) -> Candidate:
        """Scored on the images that choose, now or before."""
        if plan.half not in self._found:
            search, count, total = self._search, len(plan.half), len(plan.picks)
            kept = "none" if not count else "all" if count == total else f"{count} of {total}"
            share = sum(search.macs[name] for name in plan.half) / max(sum(search.macs.values()), 1)
            score = search.measure(plan.half)
            self._plans[plan.half] = plan
            self._found[plan.half] = Candidate(kept, plan.half, share, score, cost=plan.cost)
        return self._found[plan.half]


def _error(found: Candidate) -> float:
    assert found.head is not None, "with the errors every plan's is measured"
    return found.head


class _Bracket:
    """Between which errors at the head the largest lies that keeps the bound.

    Attributes:
        low: the largest known to keep it; None where none is known.
        high: the least known not to.
    """

    def __init__(self, bound: float, high: float, worst: float) -> None:
        self._bound = bound
        self.low: float | None = None
        self.high = high
        self._kept = 0.0  # the upper end of the loss at ``low``
        self._lost = [(high, worst)]  # errors that do not keep the bound, and the upper ends of their losses

    @property
    def open(self) -> bool:
        """Whether another error lies between."""
        return self.low is None or self.high > _NEAR * max(self.low, _LEAST * self.high)

    def aim(self) -> float:
        """The error that is to be tried next, between both."""
        if self.low is None:
            return float(self.high * min(0.9, (self._bound * 0.9 / self._lost[-1][1]) ** (1 / self._power())))
        low, lost = max(self.low, _LEAST * self.high), self._lost[-1][1]
        aim, share = _AIM * self._bound, 0.5
        if 0 < self._kept < lost:
            share = math.log(max(aim / self._kept, 1.0)) / math.log(lost / self._kept)
        return float(low * (self.high / low) ** min(max(share, 0.1), 0.9))

    def _power(self) -> float:
        """Of the error, by which the loss rises: 1, or as the last two plans say."""
        if len(self._lost) < 2:
            return 1.0
        (before, more), (after, less) = self._lost[-2:]
        if not (before > after > 0 and more > less > 0):
            return 1.0
        return min(max(math.log(more / less) / math.log(before / after), 0.25), 2.0)

    def narrow(self, found: Candidate, allowed: float, *, known: bool) -> None:
        """By a plan that was measured, now or before, for an error."""
        error, worst = (allowed if known else _error(found)), found.score.worst
        if worst <= self._bound:
            self.low, self._kept = max(self.low or 0.0, error), worst
        else:
            self.high = min(self.high, error if error < self.high else allowed)
            self._lost.append((self.high, worst))
