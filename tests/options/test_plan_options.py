"""When a plan's options need a ranking, and when estimates may choose the plan."""

from pathlib import Path

import pytest

from trtdet.options import BuildOptions, CalibrationOptions, PlanOptions, SensitivityOptions


@pytest.mark.parametrize(
    ("options", "ranked"),
    [
        (PlanOptions(), False),
        (PlanOptions(keep_fp16=0), False),
        (PlanOptions(keep_fp16=1), True),
        (PlanOptions(keep_fp16=("a",)), False),
        (PlanOptions(keep_fp16=Path("plan.json")), False),
        (PlanOptions(fp16_budget=0.5), True),
        (PlanOptions(max_map_drop=0.1), True),
        (PlanOptions(max_disagreement=0.1), True),
        (PlanOptions(max_latency=1.0), True),
    ],
)
def test_a_ranking_is_needed_to_choose_among_layers(options, ranked):
    assert options.ranked == ranked


@pytest.mark.parametrize(
    ("options", "estimated"),
    [
        (PlanOptions(), True),
        (PlanOptions(fastest=False), False),
        (PlanOptions(int8_all=True), False),
        (PlanOptions(max_map_drop=0.1), False),
        (PlanOptions(keep_fp16=("a",)), True),
        (PlanOptions(keep_fp16=Path("plan.json")), False),
    ],
)
def test_estimates_choose_where_nothing_else_does(options, estimated):
    assert options.estimated == estimated


@pytest.mark.parametrize(
    ("options", "planless", "plan_open"),
    [
        (BuildOptions(), True, True),
        (BuildOptions(precision="fp16"), False, False),
        (BuildOptions(quantization="implicit"), False, False),
        (BuildOptions(calibration=CalibrationOptions(cache=Path("calibration.cache"))), False, False),
        (BuildOptions(plan=PlanOptions(int8_all=True)), False, False),
        (BuildOptions(plan=PlanOptions(keep_fp16=("a",))), True, False),
        (BuildOptions(plan=PlanOptions(fp16_budget=0.5)), True, False),
        (BuildOptions(silu="plugin"), True, False),
    ],
)
def test_a_build_of_its_own_plan_is_of_explicit_int8_from_images(options, planless, plan_open):
    assert (options.planless, options.plan_open) == (planless, plan_open)


def test_a_ranking_may_use_the_corrections_of_its_effort():
    assert SensitivityOptions(effort="none").corrections == ()
    assert SensitivityOptions(effort="bias,smooth").corrections == ("smooth", "bias")
