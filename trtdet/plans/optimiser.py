"""Chooses a precision for every convolution by an integer program: the cheapest plan within a limit on the error.

Each choice of each convolution is a binary variable; the sum of the errors is limited, after HAWQ-V3 (Yao et al. 2021,
arXiv:2011.10680, section 3.4). The cost is no sum over layers, because a change of precision costs time. It is a sum of
tables over the precisions of neighbours, see :mod:`trtdet.audit.neighbours`. Each table enters by its convex hull:
every state has a share, and the shares of the states with a convolution in FP16 sum to that convolution's variable (the
local polytope of a graphical model; Wainwright and Jordan 2008, "Graphical Models, Exponential Families, and
Variational Inference", section 4.1). Binary variables make the shares 0 or 1, so the program is exact for costs of any
sign.

scipy solves it with HiGHS (Huangfu and Hall 2018, "Parallelizing the dual revised simplex method").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trtdet.audit.neighbours import Joint
from trtdet.errors import ConfigError
from trtdet.files.native_output import without_native_output

_SECONDS = 10.0  # time limit of the solver; the best plan so far is then taken, with its gap
_EXACT = 200  # up to this number of convolutions the solver proves the optimum
_GAP = 1e-4  # with more convolutions, another plan may be better by at most this share
_TIE = 1e-5  # weight of the other figure in the objective, each scaled by its largest value; it decides between equals
_NOTHING = 1e-9  # share that counts as rounding of a sum


@dataclass(frozen=True)
class PrecisionChoice:
    """A way to run a convolution."""

    name: str  # such as ``int8`` or ``fp16``; unique for a convolution
    error: float  # its part of the plan's error, at least 0
    half: bool = False  # whether the tables over neighbours count it as FP16
    cost: float = 0.0  # its own cost, in addition to the tables


@dataclass(frozen=True)
class Problem:
    """Inputs of the optimiser.

    Raises:
        ValueError: a convolution has no choices, or choices of the same name.
    """

    choices: Mapping[str, tuple[PrecisionChoice, ...]]  # of each convolution, at least one
    joints: tuple[Joint, ...] = ()  # costs by the precisions of neighbours; every convolution in them has choices
    fixed: float = 0.0  # cost that depends on no choice

    def __post_init__(self) -> None:
        joined = {name for joint in self.joints for name in joint.convs}
        for name in (*self.choices, *joined):
            names = [choice.name for choice in self.choices.get(name, ())]
            if not names or len(set(names)) < len(names):
                raise ValueError(f"'{name}' must have choices with names of their own, got {names}")

    def plan(self, picks: Mapping[str, str]) -> Plan:
        """The plan of one choice for each convolution, by name."""
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
    """A choice for every convolution, with the error and the cost of the whole plan."""

    picks: Mapping[str, str]  # name of the choice by convolution
    half: tuple[str, ...]  # the convolutions in FP16, in the order of the problem
    error: float
    cost: float
    # Another plan is better by at most this share; 0 up to 200 convolutions, over 1e-4 if the time ran out.
    gap: float = 0.0


def cheapest(problem: Problem, error: float) -> Plan:
    """The plan of least cost with an error of at most ``error``, to a millionth; of equals, the most accurate.

    Raises ConfigError if every plan has a larger error.
    """
    program = _Program(problem)
    plan = program.solve(program.cost, program.error, error)
    if plan is None:
        raise ConfigError(f"no plan has an error of at most {error:g}; the least is {least_error(problem):g}")
    return plan


def most_accurate(problem: Problem, cost: float) -> Plan:
    """The plan of least error that costs at most ``cost``, to a millionth of the largest cost; of equals, the cheapest.

    Raises ConfigError if every plan costs more.
    """
    program = _Program(problem)
    plan = program.solve(program.error, program.cost, cost - problem.fixed)
    if plan is None:
        least = cheapest(problem, math.inf).cost
        raise ConfigError(f"no plan costs at most {cost:g}; the cheapest costs {least:g}")
    return plan


def front(problem: Problem, count: int) -> tuple[Plan, ...]:
    """At most ``count`` (2 or more) Pareto-optimal plans, the most accurate first; both ends are among them.

    The limit on the error goes from the error of the cheapest plan to the least possible error, in even logarithmic
    steps.
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
    """The least error of any plan."""
    return math.fsum(min(choice.error for choice in choices) for choices in problem.choices.values())


class _Program:
    """Arrays of the program: a variable for each choice, then a share for each state of each table."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._choices: dict[str, list[PrecisionChoice]] = {name: [] for name in problem.choices}
        for name, kept in self._choices.items():
            # Choices that another of the same precision equals or beats in both error and cost are left out.
            for choice in sorted(problem.choices[name], key=lambda choice: (choice.error, choice.cost)):
                if not any(other.half == choice.half and other.cost <= choice.cost for other in kept):
                    kept.append(choice)
        named = [(name, choice.name) for name, choices in self._choices.items() for choice in choices]
        self._places = {key: place for place, key in enumerate(named)}
        listed = [choice for choices in self._choices.values() for choice in choices]
        shares = sum(joint.cost.size for joint in problem.joints)
        tables = [joint.cost.reshape(-1) for joint in problem.joints]
        self.cost: NDArray[np.float64] = np.concatenate([np.array([choice.cost for choice in listed]), *tables])
        self.error: NDArray[np.float64] = np.concatenate([[choice.error for choice in listed], np.zeros(shares)])
        self._whole = np.concatenate([np.ones(len(listed)), np.zeros(shares)])
        # One choice per convolution; a table's shares sum to 1, those with a convolution in FP16 to its FP16 variable.
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
        from scipy.optimize import LinearConstraint  # slow to import
        from scipy.sparse import csr_matrix  # its indices are int32, as milp of SciPy 1.14 and before needs

        at, column, value = zip(*rows, strict=True) if rows else ((), (), ())
        matrix = csr_matrix((value, (at, column)), shape=(len(right), start))
        self._equal = LinearConstraint(matrix, right, right)

    def solve(self, least: NDArray[np.float64], bounded: NDArray[np.float64], bound: float) -> Plan | None:
        """Minimises ``least`` with ``bounded`` at most ``bound``, both summed over a plan; None if no plan fits."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        constraints = [self._equal]
        # Choices over the bound by themselves are excluded: the solver's tolerance of 1e-6 needs figures of one size.
        open_ = np.ones(len(bounded))
        if bounded.min(initial=0.0) >= 0:
            open_[bounded > bound * (1 + _NOTHING)] = 0
        if bound < math.inf:
            limit = _scale(bounded * open_)
            constraints.append(LinearConstraint(csr_matrix(bounded[None] * open_ / limit), -np.inf, bound / limit))
        with without_native_output():  # HiGHS sometimes prints debug lines
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
