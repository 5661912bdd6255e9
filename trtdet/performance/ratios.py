"""The ratio of two targets' figures that were measured in turns, with an interval."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]

CONFIDENCE = 0.9
"""How sure an interval is to hold the true ratio."""


@dataclass(frozen=True)
class Ratio:
    """A figure as a multiple of the baseline's, and its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} .. {self.high:.3f})"


def paired_ratio(first: Times, second: Times) -> Ratio:
    """The ratio of two targets' figures that were measured in the same rounds, with a 90 % interval.

    Each round gives a ratio, from which a disturbance that hit both targets in that round cancels out. Over the rounds
    it is the Hodges-Lehmann estimate of the logarithms, the median of all means of two, with Tukey's interval from the
    signed ranks (Hollander and Wolfe 1999, Nonparametric Statistical Methods, chapter 3): a round in which a neighbour
    hit one of the two targets moves neither far, and no shape of the scatter is assumed but symmetry.

    Args:
        first: (R,), a median time or a rate by round, above 0; at least 5 rounds.
        second: (R,), the baseline's.
    """
    logs = np.log(first / second)
    rows, columns = np.triu_indices(len(logs))
    means = np.sort((logs[rows] + logs[columns]) / 2)
    # How many of the 2^R choices of signs give each sum of positive ranks: the product of all (1 + x^rank).
    choices = np.ones(1)
    for rank in range(1, len(logs) + 1):
        choices = np.pad(choices, (0, rank)) + np.pad(choices, (rank, 0))
    beyond = int(np.searchsorted(np.cumsum(choices) / choices.sum(), (1 - CONFIDENCE) / 2, side="right"))
    value, low, high = np.exp([np.median(means), means[beyond - 1], means[-beyond]])
    return Ratio(float(value), float(low), float(high))
