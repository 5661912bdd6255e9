"""The integer program gives the optimum of a brute-force search, at any limit and with costs of neighbours."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trtdet.audit.neighbours import Joint
from trtdet.errors import ConfigError
from trtdet.plans.optimiser import Plan, PrecisionChoice, Problem, cheapest, front, most_accurate

LAYERS = 12


def every_plan(problem: Problem) -> list[Plan]:
    names = list(problem.choices)
    options = [[choice.name for choice in choices] for choices in problem.choices.values()]
    return [problem.plan(dict(zip(names, picks, strict=True))) for picks in itertools.product(*options)]


@st.composite
def problems(draw: st.DrawFn, layers: int = LAYERS, forms: int = 1) -> Problem:
    """Whole numbers, so that no bound is met by a last digit: ``forms`` of INT8 and FP16 for each convolution."""
    names = [f"c{index}" for index in range(layers)]
    small = st.integers(0, 40)
    choices = {
        name: (
            *(PrecisionChoice(f"int8-{form}", draw(small), False, draw(st.integers(0, 3))) for form in range(forms)),
            PrecisionChoice("fp16", 0, True, draw(st.integers(-20, 20))),
        )
        for name in names
    }
    joints = []
    for _ in range(draw(st.integers(0, 2 * layers))):
        count = draw(st.integers(1, min(3, layers)))
        convs = tuple(draw(st.permutations(names))[:count])
        table = draw(st.lists(st.integers(-15, 15), min_size=2**count, max_size=2**count))
        joints.append(Joint(convs, np.array(table, float).reshape((2,) * count)))
    return Problem(choices, tuple(joints), draw(st.integers(0, 50)))


def figures(problem: Problem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cost and error of every plan of a problem whose convolutions have one form of INT8 and FP16."""
    names = list(problem.choices)
    half = np.array(list(np.ndindex((2,) * len(names))))
    own = np.array([[(choice.cost, choice.error) for choice in choices] for choices in problem.choices.values()])
    taken = own[np.arange(len(names)), half].sum(axis=1)
    joint = sum(table.cost[tuple(half[:, names.index(name)] for name in table.convs)] for table in problem.joints)
    return taken[:, 0] + joint + problem.fixed, taken[:, 1]


@given(problems(), st.integers(0, 400))
@settings(max_examples=12, deadline=None)
def test_the_cheapest_plan_of_twelve_convolutions_is_found(problem, error):
    found = cheapest(problem, error)
    costs, errors = figures(problem)
    least = costs[errors <= error].min()
    assert found.cost == least and found.gap <= 1e-9
    # Of the plans that cost no more, none is more accurate.
    assert found.error == errors[costs == least].min() <= error
    assert replace(found, gap=0.0) == problem.plan(found.picks)


@given(problems(layers=7, forms=2), st.integers(-100, 200))
@settings(max_examples=12, deadline=None)
def test_the_other_way_round_the_most_accurate_is_found(problem, cost):
    plans = [plan for plan in every_plan(problem) if plan.cost <= cost]
    if not plans:
        with pytest.raises(ConfigError, match=f"no plan costs at most {cost}; the cheapest costs"):
            most_accurate(problem, cost)
        return
    found = most_accurate(problem, cost)
    least = min(plan.error for plan in plans)
    assert (found.error, found.cost) == (least, min(plan.cost for plan in plans if plan.error == least))


@given(problems(layers=6))
@settings(max_examples=8, deadline=None)
def test_no_plan_beats_the_front(problem):
    found = front(problem, 9)
    plans = every_plan(problem)
    assert [plan.error for plan in found] == sorted(plan.error for plan in found)
    assert [plan.cost for plan in found] == sorted((plan.cost for plan in found), reverse=True)
    for plan in found:
        better = (other for other in plans if other.cost <= plan.cost and other.error <= plan.error)
        assert {(other.cost, other.error) for other in better} == {(plan.cost, plan.error)}
    assert found[-1].cost == min(plan.cost for plan in plans)
    assert found[0].error == min(plan.error for plan in plans)


def chain(layers: int, rng: np.random.Generator) -> Problem:
    """Convolutions of a network: FP16 saves where a neighbour is in FP16 as well, and costs arithmetic alone."""
    names = [f"c{index}" for index in range(layers)]
    errors = np.exp(rng.normal(-8, 2, layers))
    choices = {
        name: (
            PrecisionChoice("int8", float(error)),
            PrecisionChoice("corrected", float(error) / 3, False, 1e-5),
            PrecisionChoice("fp16", 0, True),
        )
        for name, error in zip(names, errors, strict=True)
    }
    joints = [Joint((name,), np.array([0.0, float(rng.uniform(0.001, 0.02))])) for name in names]
    for index in range(layers - 1):
        count = int(rng.integers(2, 6))
        convs = tuple(names[index : index + count])
        table = rng.uniform(0.005, 0.01, (2,) * len(convs))
        table[(1,) * len(convs)] = 0.0
        joints.append(Joint(convs, table))
    return Problem(choices, tuple(joints))


@pytest.mark.parametrize("count", [80, pytest.param(400, marks=pytest.mark.slow)])
def test_a_whole_network_is_solved(count):
    """The gap says that nothing much better was missed."""
    problem = chain(count, np.random.default_rng(0))
    errors = {name: choices[0].error for name, choices in problem.choices.items()}
    bound = 0.1 * math.fsum(errors.values())
    found = cheapest(problem, bound)
    assert found.gap <= 1e-3 and found.error <= bound and 0 < len(found.half) < count
    # What a list by error takes until the bound is kept, with corrections or without, costs more.
    for form in ("int8", "corrected"):
        ranked = sorted(errors, key=lambda name: -errors[name])
        tried = (
            problem.plan({name: "fp16" if place < kept else form for place, name in enumerate(ranked)})
            for kept in range(count + 1)
        )
        assert found.cost < next(plan.cost for plan in tried if plan.error <= bound)


def test_of_equal_costs_the_least_error_is_taken():
    choices = {"a": (PrecisionChoice("plain", 4), PrecisionChoice("corrected", 1), PrecisionChoice("fp16", 0, True, 1))}
    assert cheapest(Problem(choices), 10).picks == {"a": "corrected"}
    assert most_accurate(Problem({"a": (PrecisionChoice("slow", 1, cost=2), PrecisionChoice("fast", 1))}), 9).picks == {
        "a": "fast"
    }


def test_a_bound_that_nothing_keeps_is_refused_with_the_least():
    problem = Problem({"a": (PrecisionChoice("int8", 3), PrecisionChoice("better", 2, cost=1))})
    with pytest.raises(ConfigError, match="no plan has an error of at most 1; the least is 2"):
        cheapest(problem, 1)
    assert cheapest(problem, 2).picks == {"a": "better"}


def test_neighbours_in_fp16_are_worth_more_than_each_alone():
    """Each alone is dearer in FP16, both are cheaper: a list by error per cost would not find that."""
    choices = {name: (PrecisionChoice("int8", 1), PrecisionChoice("fp16", 0, True)) for name in "ab"}
    boundary = Joint(("a", "b"), np.array([[4.0, 6.0], [6.0, 3.0]]))
    assert cheapest(Problem(choices, (boundary,)), 2).half == ("a", "b")
    apart = Joint(("a", "b"), np.array([[4.0, 6.0], [5.0, 7.0]]))
    assert cheapest(Problem(choices, (apart,)), 1).half == ("a",)


def test_choices_need_names_of_their_own():
    with pytest.raises(ValueError, match="'a' must have choices with names of their own"):
        Problem({"a": (PrecisionChoice("int8", 1), PrecisionChoice("int8", 2))})
    with pytest.raises(ValueError, match="'b' must have choices"):
        Problem({"a": (PrecisionChoice("int8", 1),)}, (Joint(("b",), np.zeros(2)),))
