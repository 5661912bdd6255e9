"""The most accurate plan within a time: estimated, or measured where a GPU here runs engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from trtdet.audit.neighbours import Costs
from trtdet.errors import ConfigError
from trtdet.mixed_precision.program import Problem, cheapest, most_accurate

TRIES = 4
"""At most so many plans are measured after the cheapest."""

_AIM = 0.98
"""The share of the limit that is aimed at after a plan took longer than was expected of it."""

Measure = Callable[[tuple[str, ...]], float]
"""Milliseconds of the plan with these convolutions in FP16."""


@dataclass(frozen=True)
class Within:
    """A plan within a time.

    Attributes:
        limit: milliseconds.
        kept: its convolutions in FP16, in the order of the network.
        error: predicted at the head: the sum of its INT8 convolutions' powers.
        estimated: milliseconds, by the program.
        measured: milliseconds; None where no engine ran.
        unit: of the estimate.
    """

    limit: float
    kept: tuple[str, ...]
    error: float
    estimated: float
    measured: float | None
    unit: str

    def __str__(self) -> str:
        """One sentence without a full stop."""
        took = f"{self.estimated:.4g} {self.unit}"
        if self.measured is not None:
            took = f"{self.measured:.4g} ms measured"
        return f"the least error within {self.limit:g} ms: {took}, {len(self.kept)} convolutions in FP16"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def check_reachable(costs: Costs, problem: Problem, limit: float) -> None:
    """Refuses a limit that no plan keeps.

    Args:
        costs: of the problem.
        problem: with or without errors.
        limit: milliseconds.

    Raises:
        ConfigError: with what the cheapest plan costs.
    """
    least = cheapest(problem, math.inf)
    if least.cost > limit:
        raise _out_of_reach(limit, f"{least.cost:.4g} {costs.unit}")


def most_accurate_within(costs: Costs, problem: Problem, limit: float, measure: Measure | None = None) -> Within:
    """The plan of least error within a time.

    Where plans are measured, the estimates are multiplied by what the cheapest plan takes beside its own, and then by
    what the plan itself takes, until a plan keeps the limit; after four plans that do not it is the cheapest.

    Args:
        costs: of the problem.
        problem: with errors.
        limit: milliseconds.
        measure: measures a plan; None where estimates have to do.

    Raises:
        ConfigError: the cheapest plan takes longer.
    """
    if measure is None:
        check_reachable(costs, problem, limit)
        plan = most_accurate(problem, limit)
        return Within(limit, plan.half, plan.error, plan.cost, None, costs.unit)
    first = cheapest(problem, math.inf)
    took = measure(first.half)
    if took > limit:
        raise _out_of_reach(limit, f"{took:.4g} ms measured")
    known = Within(limit, first.half, first.error, first.cost, took, costs.unit)
    allowed = first.cost * limit / took
    for _ in range(TRIES):
        plan = most_accurate(problem, max(allowed, first.cost))
        if plan.half == first.half:
            break
        took = measure(plan.half)
        if took <= limit:
            return Within(limit, plan.half, plan.error, plan.cost, took, costs.unit)
        allowed = _AIM * min(allowed, plan.cost * limit / took)
    return known


def _out_of_reach(limit: float, least: str) -> ConfigError:
    return ConfigError(
        f"--max-latency {limit:g}: the cheapest plan takes {least}", "ask for at least that, or for another --gpu"
    )
