"""How far errors add up, and errors that are corrected by what plans showed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtdet.mixed_precision.additivity import corrected, how_additive
from trtdet.mixed_precision.program import Choice, Plan, Problem

NAMES = tuple("abcdef")


def problem(errors: list[float]) -> Problem:
    return Problem(
        {
            name: (Choice("int8", error), Choice("corrected", error / 4), Choice("fp16", 0.0, True))
            for name, error in zip(NAMES, errors, strict=True)
        }
    )


def plan(known: Problem, *fp16: str) -> Plan:
    return known.plan({name: "fp16" if name in fp16 else "int8" for name in NAMES})


@given(st.lists(st.floats(0.1, 10), min_size=6, max_size=6), st.lists(st.floats(0.2, 5), min_size=6, max_size=6))
@settings(max_examples=25, deadline=None)
def test_corrected_errors_add_up_to_what_was_measured(errors: list[float], factors: list[float]) -> None:
    said, true = problem(errors), problem([error * more for error, more in zip(errors, factors, strict=True)])
    sets = ((), ("a", "b"), ("a", "b", "c", "d"))
    measured = [(plan(said, *fp16), plan(true, *fp16).error) for fp16 in sets]
    found = corrected(said, measured)
    for fp16, (_, error) in zip(sets, measured, strict=True):
        assert plan(found, *fp16).error == pytest.approx(error, rel=0.02)
    # What no plan tells apart keeps its relation, and so do the forms of a convolution.
    for first, second in ("ab", "cd", "ef"):
        now = [found.choices[name][0].error / said.choices[name][0].error for name in (first, second)]
        assert now[0] == pytest.approx(now[1])
    assert found.choices["a"][1].error == pytest.approx(found.choices["a"][0].error / 4)


def test_plans_that_contradict_each_other_leave_the_last_right() -> None:
    said = problem([1.0] * 6)
    whole, less = plan(said), plan(said, "a")
    found = corrected(said, [(whole, 3.0), (less, 4.0)])
    assert plan(found, "a").error == pytest.approx(4.0)
    assert all(choice.error >= 0.002 for choices in found.choices.values() for choice in choices if not choice.half)
    assert corrected(said, [(plan(said, *NAMES), 0.0)]) == said
    assert corrected(said, []) == said


def test_additivity_is_told() -> None:
    found = how_additive([(2.0, 1.0), (1.0, 0.8), (0.5, 0.6), (0.0, 0.0)], (0.5, 0.6))
    assert found is not None
    assert (found.plans, found.chosen, found.lowest, found.highest) == (3, 1.2, 0.5, 1.2)
    assert found.correlation == pytest.approx(1.0)
    assert str(found) == (
        "the errors at the head of 3 plans were 0.50 to 1.20 times the sum of those of their convolutions alone, that "
        "of the chosen plan 1.20, rank correlation 1.00"
    )
    wrong = how_additive([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)], (0.0, 0.0))
    assert wrong is not None and wrong.correlation == pytest.approx(-1.0) and wrong.chosen is None
    few = how_additive([(1.0, 3.0), (2.0, 2.0)], None)
    assert few is not None and few.correlation is None
    assert how_additive([(0.0, 0.0)], (0.0, 0.0)) is None
