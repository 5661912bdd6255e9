"""How far the errors of single convolutions add up, and an error model that is corrected by what whole plans showed.

The program adds up errors that were measured with one convolution in INT8 at a time. Errors that meet add up in power
only where they are independent, so the error at the head is measured with whole plans too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trtdet.mixed_precision.program import Plan, Problem

_ROUNDS = 1000
"""Of the iterative scaling, at most: a few plans that do not contradict each other need less."""

_MOST = 100.0
"""No error is corrected by a larger factor: plans that contradict each other would make some convolutions free."""

_AGREED = 1e-4
"""Sums that differ from what was measured by a smaller share agree with it."""


@dataclass(frozen=True)
class Additivity:
    """The measured errors of plans against the sums of the errors of their convolutions.

    Attributes:
        plans: that were measured, with anything in INT8.
        chosen: measured error over the sum, of the plan that was chosen; None where that has nothing in INT8.
        lowest, highest: of all.
        correlation: Spearman's rank correlation of sums and measured errors, -1..1; None for fewer than three plans.
    """

    plans: int
    chosen: float | None
    lowest: float
    highest: float
    correlation: float | None

    def __str__(self) -> str:
        ranked = "" if self.correlation is None else f", rank correlation {self.correlation:.2f}"
        own = "" if self.chosen is None else f", that of the chosen plan {self.chosen:.2f}"
        return (
            f"the errors at the head of {self.plans} plans were {self.lowest:.2f} to {self.highest:.2f} times the sum "
            f"of those of their convolutions alone{own}{ranked}"
        )


def how_additive(errors: Sequence[tuple[float, float]], chosen: tuple[float, float] | None) -> Additivity | None:
    """How additive errors were.

    Args:
        errors: of each plan the sum of its convolutions' errors and the measured error, as powers.
        chosen: those of the plan that was chosen.

    Returns:
        None where no plan has an error.
    """
    known = [(predicted, measured) for predicted, measured in errors if predicted > 0]
    if not known:
        return None
    ratios = [measured / predicted for predicted, measured in known]
    own = chosen[1] / chosen[0] if chosen is not None and chosen[0] > 0 else None
    return Additivity(len(known), own, min(ratios), max(ratios), _rank_correlation(known))


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    from scipy.stats import spearmanr  # takes a while to load

    columns = np.array(pairs).T
    if len(pairs) < 3 or not all(np.ptp(column) > 0 for column in columns):
        return None
    return float(spearmanr(*columns).statistic)


def corrected(problem: Problem, measured: Sequence[tuple[Plan, float]]) -> Problem:
    """The problem with errors that add up to what was measured.

    The errors of a plan's choices are multiplied by the ratio of its measured error to their sum, plan after plan,
    until all agree, so that what only the worse plans have in INT8 takes the rest of their error: the multiplicative
    algebraic reconstruction technique (Gordon, Bender and Herman 1970, "Algebraic reconstruction techniques (ART) for
    three-dimensional electron microscopy and X-ray photography"). Where plans contradict each other, as a larger set
    with a smaller error does, the last of them is right.

    Args:
        problem: with the errors of single convolutions.
        measured: plans and their errors at the head; those of 0 say nothing about ratios and are left out.
    """
    names = list(problem.choices)
    errors = {(name, choice.name): choice.error for name in names for choice in problem.choices[name]}
    rows = [(np.array([errors[name, plan.picks[name]] for name in names]), error) for plan, error in measured]
    factors = np.ones(len(names))
    for _ in range(_ROUNDS):
        worst = 0.0
        for row, error in rows:
            total = float(row @ factors)
            if total > 0 and error > 0:
                factors[row > 0] = np.clip(factors[row > 0] * (error / total), 1 / _MOST, _MOST)
                worst = max(worst, abs(error / total - 1))
        if worst < _AGREED:
            break
    choices = {
        name: tuple(replace(choice, error=choice.error * float(factor)) for choice in problem.choices[name])
        for name, factor in zip(names, factors, strict=True)
    }
    return replace(problem, choices=choices)
