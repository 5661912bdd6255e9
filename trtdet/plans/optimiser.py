"""The choice of a precision for every convolution as an integer program: the cheapest plan within a bound on the error.

Each choice of each convolution is a binary variable; the errors add up and their sum is bounded, after HAWQ-V3 (Yao et
al. 2021, arXiv:2011.10680, section 3.4). The cost is no sum over layers, as a change of precision has a price: it is a
sum of tables over the precisions of neighbours, see :mod:`trtdet.audit.neighbours`. Each table enters by its convex
hull: a share for every state, of which those with a convolution in FP16 sum to that convolution's variable (the local
polytope of a graphical model; Wainwright and Jordan 2008, "Graphical Models, Exponential Families, and Variational
Inference", section 4.1). Binary variables make the shares 0 or 1, so the program is exact for costs of any sign.

Solved by HiGHS (Huangfu and Hall 2018, "Parallelizing the dual revised simplex method"), in scipy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from trtdet.audit.neighbours import Joint
from trtdet.errors import ConfigError
from trtdet.files.native_output import without_native_output

_SECONDS = 10.0
"""The best plan that was found until then is taken, with the gap that is left."""

_EXACT = 200
"""Up to so many convolutions the best plan is proven to be that."""

_GAP = 1e-4
"""Beyond, a plan is good enough where none is better by a larger share."""

_TIE = 1e-5
"""What the other figure counts beside the one that is least, as shares of their largest: it decides between equals."""

_NOTHING = 1e-9
"""A share that is the last digits of a sum."""


@dataclass(frozen=True)
class PrecisionChoice:
    """A way to run a convolution.

    Attributes:
        name: such as ``int8`` or ``fp16``; no two of a convolution have the same.
        error: that it adds to the plan's, at least 0.
        half: whether it is FP16 to the tables over neighbours.
        cost: of its own, beside the tables.
    """

    name: str
    error: float
    half: bool = False
    cost: float = 0.0


@dataclass(frozen=True)
class Problem:
    """What is to be chosen.

    Attributes:
        choices: of each convolution, at least one.
        joints: costs by the precisions of neighbours; every convolution in them has choices.
        fixed: cost that depends on no choice.

    Raises:
        ValueError: a convolution has no choices, or choices of the same name.
    """

    choices: Mapping[str, tuple[PrecisionChoice, ...]]
    joints: tuple[Joint, ...] = ()
    fixed: float = 0.0

    def __post_init__(self) -> None:
        joined = {name for joint in self.joints for name in joint.convs}
        for name in (*self.choices, *joined):
            names = [choice.name for choice in self.choices.get(name, ())]
            if not names or len(set(names)) < len(names):
                raise ValueError(f"'{name}' must have choices with names of their own, got {names}")

    def plan(self, picks: Mapping[str, str]) -> Plan:
        """What a choice for each convolution, by name, costs."""
        chosen = {
            name: next(choice for choice in choices if choice.name == picks[name])
            for name, choices in self.choices.items()
        }
        half = tuple(name for name, choice in chosen.items() if choice.half)
        error = math.fsum(choice.error for choice in chosen.values())
        joint_costs = [joint.of(frozenset(half)) for joint in self.joints]
        cost = math.fsum([self.fixed, *(choice.cost for choice in chosen.values()), *joint_costs])
        return Plan(dict(picks), half=half, error=error, cost=cost)


@dataclass(frozen=True)
class Plan:
    """A choice for every convolution.

    Attributes:
        picks: name of the choice by convolution.
        half: the convolutions in FP16, in the order of the problem.
        error: the sum of the choices'.
        cost: of all.
        gap: how much better, as a share, another plan could be at most; over 1e-4 where the time was not enough,
            and 0 up to 200 convolutions.
    """

    picks: Mapping[str, str]
    half: tuple[str, ...]
    error: float
    cost: float
    gap: float = 0.0


def cheapest(problem: Problem, error: float) -> Plan:
    """The plan of least cost; of those that cost the same, the most accurate.

    Args:
        error: largest allowed, to a millionth.

    Raises:
        ConfigError: every plan has a larger error.
    """
    program = _Program(problem)
    plan = program.solve(program.cost, program.error, error)
    if plan is None:
        raise ConfigError(f"no plan has an error of at most {error:g}; the least is {least_error(problem):g}")
    return plan


def most_accurate(problem: Problem, cost: float) -> Plan:
    """The plan of least error; of those with the same, the cheapest.

    Args:
        cost: largest allowed, to a millionth of the largest cost.

    Raises:
        ConfigError: every plan costs more.
    """
    program = _Program(problem)
    plan = program.solve(program.error, program.cost, cost - problem.fixed)
    if plan is None:
        least = cheapest(problem, math.inf).cost
        raise ConfigError(f"no plan costs at most {cost:g}; the cheapest costs {least:g}")
    return plan


def front(problem: Problem, count: int) -> tuple[Plan, ...]:
    """Plans that no other beats in cost without a larger error, the most accurate first.

    The bound on the error is swept from the error of the cheapest plan of all down to the least that there is, evenly
    by its logarithm.

    Args:
        count: of plans at most, at least 2; both ends are among them.
    """
    program = _Program(problem)
    last = program.solve(program.cost, program.error, math.inf)
    first = program.solve(program.cost, program.error, least_error(problem))
    assert first is not None and last is not None, "without a bound every plan will do"
    plans = {first.half: first, last.half: last}
    low = first.error or min((e for e in program.error if e > 0), default=0.0)
    if last.error > low > 0:
        for bound in np.geomspace(last.error, low, count)[1:-1]:
            plan = program.solve(program.cost, program.error, float(bound))
            if plan is not None:
                plans.setdefault(plan.half, plan)
    kept: list[Plan] = []
    for plan in sorted(plans.values(), key=lambda plan: (plan.cost, plan.error)):
        if not kept or plan.error < kept[-1].error:
            kept.append(plan)
    return tuple(reversed(kept))


def least_error(problem: Problem) -> float:
    """The least error that a plan can have."""
    return math.fsum(min(choice.error for choice in choices) for choices in problem.choices.values())


def _undominated(choices: tuple[PrecisionChoice, ...]) -> tuple[PrecisionChoice, ...]:
    """Without those to which another of the same precision is equal or better in both figures."""
    kept: list[PrecisionChoice] = []
    for choice in sorted(choices, key=lambda choice: (choice.error, choice.cost)):
        if not any(other.half == choice.half and other.cost <= choice.cost for other in kept):
            kept.append(choice)
    return tuple(kept)


class _Program:
    """The arrays of the program: first a variable for each choice, then a share for each state of each table."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._choices = {name: _undominated(choices) for name, choices in problem.choices.items()}
        named = [(name, choice.name) for name, choices in self._choices.items() for choice in choices]
        self._places = {key: place for place, key in enumerate(named)}
        listed = [choice for choices in self._choices.values() for choice in choices]
        shares = sum(joint.cost.size for joint in problem.joints)
        tables = [joint.cost.reshape(-1) for joint in problem.joints]
        self.cost: NDArray[np.float64] = np.concatenate([np.array([choice.cost for choice in listed]), *tables])
        self.error: NDArray[np.float64] = np.concatenate([[choice.error for choice in listed], np.zeros(shares)])
        self._whole = np.concatenate([np.ones(len(listed)), np.zeros(shares)])
        # One choice for each convolution; a table's shares sum to 1, those along an axis to its convolution's FP16.
        rows: list[tuple[int, int, float]] = []
        right: list[float] = []
        for name, choices in self._choices.items():
            rows += [(len(right), self._places[name, choice.name], 1.0) for choice in choices]
            right.append(1.0)
        start = len(self._places)
        for joint in problem.joints:
            states = np.array(list(np.ndindex(joint.cost.shape)))
            rows += [(len(right), start + place, 1.0) for place in range(len(states))]
            right.append(1.0)
            for axis, name in enumerate(joint.convs):
                rows += [(len(right), start + int(place), 1.0) for place in np.flatnonzero(states[:, axis])]
                half = (choice for choice in self._choices[name] if choice.half)
                rows += [(len(right), self._places[name, choice.name], -1.0) for choice in half]
                right.append(0.0)
            start += len(states)
        at, column, value = zip(*rows, strict=True) if rows else ((), (), ())
        matrix = csr_array((value, (at, column)), shape=(len(right), start))
        self._equal = LinearConstraint(matrix, right, right)

    def solve(self, least: NDArray[np.float64], bounded: NDArray[np.float64], bound: float) -> Plan | None:
        """The plan of the least sum of one figure with that of the other within a bound; None where there is none."""
        constraints = [self._equal]
        # A choice that is over the bound by itself is none. Without those the bound and the figures are of one size,
        # which the solver's tolerance of 1e-6 wants.
        open_ = np.ones(len(bounded))
        if bounded.min(initial=0.0) >= 0:
            open_[bounded > bound * (1 + _NOTHING)] = 0
        if bound < math.inf:
            limit = _scale(bounded * open_)
            constraints.append(LinearConstraint(csr_array(bounded[None] * open_ / limit), -np.inf, bound / limit))
        with without_native_output():  # HiGHS prints lines of debugging now and then
            result = milp(
                1e3 * (least / _scale(least) + _TIE * bounded / _scale(bounded)),
                integrality=self._whole,
                bounds=Bounds(0, open_),
                constraints=constraints,
                options={"mip_rel_gap": 0.0 if len(self._choices) <= _EXACT else _GAP, "time_limit": _SECONDS},
            )
        if result.x is None:
            return None
        plan = self._problem.plan(dict(key for key, place in self._places.items() if result.x[place] > 0.5))
        return replace(plan, gap=float(result.mip_gap or 0.0))


def _scale(figures: NDArray[np.float64]) -> float:
    return float(np.abs(figures).max(initial=0.0)) or 1.0
