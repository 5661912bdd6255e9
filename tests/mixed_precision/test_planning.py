from __future__ import annotations

from collections.abc import Callable

import pytest

from trtdet.errors import ConfigError
from trtdet.mixed_precision.planning import keeping, most_sensitive, named, reasons, within_budget
from trtdet.mixed_precision.scores import LayerScore, Sensitivity
from trtdet.mixed_precision.search import EVALUATIONS, Score, smallest
from trtdet.quantization import Cause, Entry, PrecisionPlan

POWERS = [0.5, 0.2, 0.1, 0.05, 0.05, 0.04, 0.03, 0.02, 0.005, 0.005]


def ranking(powers: list[float], depthwise: tuple[int, ...] = (), macs: list[int] | None = None) -> Sensitivity:
    layers = tuple(
        LayerScore(f"c{index}", power, index + 1, 0.0, (macs or [10] * len(powers))[index], 1, index in depthwise)
        for index, power in enumerate(powers)
    )
    return Sensitivity(layers, (), sum(layer.macs for layer in layers), "fp32", 0.0, None, 4, "key", 1.0, 10)


def loss_left(made: Sensitivity, whole: float) -> Callable[[tuple[str, ...]], Score]:
    """mAP falls with the error that is left."""

    def measure(names: tuple[str, ...]) -> Score:
        lost = whole * sum(layer.score for layer in made.layers if layer.name not in names)
        return Score(0.3 - lost, -lost, -lost - 0.01, -lost + 0.01)

    return measure


def test_the_most_sensitive_come_first() -> None:
    made = ranking(POWERS)
    assert most_sensitive(made, 0) == ()
    assert most_sensitive(made, 3) == ("c0", "c1", "c2")
    assert len(most_sensitive(made, 10)) == 10
    with pytest.raises(ConfigError, match="--keep-fp16 11: the model has 10 convolutions"):
        most_sensitive(made, 11)


def test_a_budget_takes_what_gives_most_for_its_work() -> None:
    made = ranking([0.5, 0.3, 0.1, 0.1], macs=[90, 5, 2, 3])
    assert within_budget(made, 0.05) == ("c1",)
    assert within_budget(made, 0.1) == ("c1", "c2", "c3")
    assert within_budget(made, 1) == ("c0", "c1", "c2", "c3")
    assert within_budget(made, 0) == ()
    with pytest.raises(ConfigError, match="0 to 1, got 7"):
        within_budget(made, 7)


def test_a_budget_goes_by_error_per_multiply_add_and_not_by_error() -> None:
    made = ranking([0.5, 0.3, 0.2, 0.19], macs=[100, 20, 30, 19])
    # By error alone the first would take all of it; by error per multiply-add the fourth comes before the third.
    assert within_budget(made, 100 / 169) == ("c1", "c2", "c3")
    assert within_budget(made, 40 / 169) == ("c1", "c3")
    # What still fits is taken though something before it did not.
    assert within_budget(made, 31 / 169) == ("c1",)
    assert within_budget(made, 20 / 169) == ("c1",)
    assert within_budget(made, 19 / 169) == ("c3",)


def test_a_budget_is_filled_as_well_as_it_can_be() -> None:
    # By error per multiply-add the first comes first, and then neither of the others fits.
    assert within_budget(ranking([0.61, 0.5, 0.49], macs=[60, 51, 49]), 100 / 160) == ("c1", "c2")


def test_what_gains_nothing_is_not_kept_for_a_budget() -> None:
    assert within_budget(ranking([0.5, -0.1, 0.0]), 1) == ("c0",)


@pytest.mark.parametrize("bound", [0.1, 0.3, 0.5, 1.0, 2.0, 4.0, 7.0])
def test_the_smallest_set_within_a_bound_is_found(bound: float) -> None:
    made = ranking(POWERS)
    measure = loss_left(made, 0.10)
    done = smallest(lambda: made, bound, 0.3, measure)
    least = next(count for count in range(11) if -100 * measure(most_sensitive(made, count)).difference <= bound)
    assert len(done.chosen.names) == least
    assert -100 * done.chosen.score.difference <= bound
    assert done.evaluations <= EVALUATIONS
    assert done.evaluations == len(done.candidates) + 1
    assert "<- chosen" in done.table()


@pytest.mark.parametrize("count", [20, 60, 113, 300])
def test_long_models_take_no_more_evaluations(count: int) -> None:
    made = ranking([0.9**index for index in range(count)], depthwise=(3, 5))
    done = smallest(lambda: made, 0.5, 0.3, loss_left(made, 0.02))
    assert done.evaluations <= EVALUATIONS
    assert -100 * done.chosen.score.difference <= 0.5


def test_nothing_is_kept_where_nothing_is_lost() -> None:
    made = ranking(POWERS, depthwise=(0,))
    done = smallest(lambda: made, 0.3, 0.3, loss_left(made, 0.001))
    assert (done.chosen.names, done.evaluations) == ((), 2)


def test_a_loss_of_exactly_the_bound_is_within_it() -> None:
    made, exact = ranking([0.1] * 10), 2**-7

    def measure(names: tuple[str, ...]) -> Score:
        lost = exact if names else 2 * exact
        return Score(0.3 - lost, -lost, -lost, -lost)

    none = smallest(lambda: made, 200 * exact, 0.3, measure)
    assert (none.chosen.names, none.evaluations) == ((), 2)
    # The first guess is half of them; it holds, so that fewer are tried.
    assert smallest(lambda: made, 100 * exact, 0.3, measure).chosen.names == ("c0",)


def test_depthwise_convolutions_are_a_candidate_of_their_own() -> None:
    made = ranking([0.3, 0.2, 0.2, 0.1, 0.1, 0.1], depthwise=(1, 2))

    def measure(names: tuple[str, ...]) -> Score:
        lost = 0.0 if {"c1", "c2"} <= set(names) else 0.05
        return Score(0.3 - lost, -lost, -lost, -lost)

    done = smallest(lambda: made, 0.3, 0.3, measure)
    assert (done.chosen.kept, done.chosen.names) == ("depthwise", ("c1", "c2"))


def test_a_bound_that_nothing_keeps_is_an_error_that_names_the_best() -> None:
    made = ranking(POWERS)
    with pytest.raises(ConfigError, match=r"no set .* within 0.3 mAP points of 30.00; the best of \d, .* loses 5.00"):
        smallest(lambda: made, 0.3, 0.3, lambda names: Score(0.25, -0.05, -0.06, -0.04))
    with pytest.raises(ConfigError, match=r"the best of \d+, all, loses 6.00"):
        smallest(
            lambda: made, 0.3, 0.3, lambda names: Score(0.2 + 0.004 * len(names), 0.004 * len(names) - 0.1, -0.2, 0.0)
        )
    with pytest.raises(ConfigError, match="at least 0 mAP points, got -1"):
        smallest(lambda: made, -1, 0.3, loss_left(made, 0.1))


def test_the_last_evaluation_tries_all_of_them() -> None:
    made = ranking([1.0, *[1e-9] * 99])

    def measure(names: tuple[str, ...]) -> Score:
        lost = 0.0 if len(names) == 100 else 0.05
        return Score(0.3 - lost, -lost, -lost, -lost)

    done = smallest(lambda: made, 0.3, 0.3, measure)
    assert done.chosen.kept == "all"
    assert done.evaluations <= EVALUATIONS
    assert smallest(lambda: made, 0.3, 0.3, measure, evaluations=4).chosen.kept == "all"


def test_a_plan_says_why() -> None:
    plan = PrecisionPlan(
        {"c0": Entry("int8", "convolution"), "c1": Entry("int8", "convolution"), "d": Entry("fp32", "no")}
    )
    made = ranking([0.3, 0.1])
    kept = keeping(plan, reasons(made, ("c0",)), Cause.KEPT_SENSITIVE)
    assert kept.entries["c0"] == Entry("fp16", "kept: rank 1 of 2, 75.0% of the error", Cause.KEPT_SENSITIVE)
    assert kept.entries["c1"] == plan.entries["c1"]
    assert named(plan, ("c0", "d")) == ("c0", "d")
    with pytest.raises(ConfigError, match="no convolution 'C'; did you mean c0, c1"):
        named(plan, ("C",))
    with pytest.raises(ConfigError, match=r"no convolution 'nothing'; plan.json of a bundle lists them"):
        named(plan, ("nothing",))
