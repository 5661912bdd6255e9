import pytest

from trtdet.errors import ConfigError
from trtdet.plans.planning import keeping, most_sensitive, named, reasons, within_budget
from trtdet.plans.scores import LayerScore, Sensitivity
from trtdet.quantization import Cause, Entry, PrecisionPlan

POWERS = [0.5, 0.2, 0.1, 0.05, 0.05, 0.04, 0.03, 0.02, 0.005, 0.005]


def ranking(powers: list[float], depthwise: tuple[int, ...] = (), macs: list[int] | None = None) -> Sensitivity:
    layers = tuple(
        LayerScore(f"c{index}", power, index + 1, 0.0, (macs or [10] * len(powers))[index], 1, index in depthwise)
        for index, power in enumerate(powers)
    )
    return Sensitivity(layers, (), sum(layer.macs for layer in layers), "fp32", 0.0, None, 4, "key", 1.0, 10)


def test_the_most_sensitive_come_first():
    made = ranking(POWERS)
    assert most_sensitive(made, 0) == ()
    assert most_sensitive(made, 3) == ("c0", "c1", "c2")
    assert len(most_sensitive(made, 10)) == 10
    with pytest.raises(ConfigError, match="--keep-fp16 11: the model has 10 convolutions"):
        most_sensitive(made, 11)


def test_a_budget_takes_what_gives_most_for_its_work():
    made = ranking([0.5, 0.3, 0.1, 0.1], macs=[90, 5, 2, 3])
    assert within_budget(made, 0.05) == ("c1",)
    assert within_budget(made, 0.1) == ("c1", "c2", "c3")
    assert within_budget(made, 1) == ("c0", "c1", "c2", "c3")
    assert within_budget(made, 0) == ()


def test_a_budget_goes_by_error_per_multiply_add_and_not_by_error():
    made = ranking([0.5, 0.3, 0.2, 0.19], macs=[100, 20, 30, 19])
    # By error alone the first would take all of it; by error per multiply-add the fourth comes before the third.
    assert within_budget(made, 100 / 169) == ("c1", "c2", "c3")
    assert within_budget(made, 40 / 169) == ("c1", "c3")
    # What still fits is taken though something before it did not.
    assert within_budget(made, 31 / 169) == ("c1",)
    assert within_budget(made, 20 / 169) == ("c1",)
    assert within_budget(made, 19 / 169) == ("c3",)


def test_a_budget_is_filled_as_well_as_it_can_be():
    # By error per multiply-add the first comes first, and then neither of the others fits.
    assert within_budget(ranking([0.61, 0.5, 0.49], macs=[60, 51, 49]), 100 / 160) == ("c1", "c2")


def test_what_gains_nothing_is_not_kept_for_a_budget():
    assert within_budget(ranking([0.5, -0.1, 0.0]), 1) == ("c0",)


def test_a_plan_says_why():
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
