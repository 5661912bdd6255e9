"""Every option declares how it enters the keys of a build, and changes them from its stage on."""

from dataclasses import replace
from typing import Any

import pytest

from trtdet.building import validation
from trtdet.building.job import Job, checked_build
from trtdet.config import load_config
from trtdet.demo import shapes
from trtdet.options import (
    BuildOptions,
    CalibrationOptions,
    PlanOptions,
    Row,
    Stage,
    rows_of,
    stage_keys,
    value_of,
    with_values,
)

ROWS = {row.name: row for row in rows_of(BuildOptions)}
FACTS = {row.fact: "fact" for row in ROWS.values() if row.fact}


def test_every_option_enters_a_key_or_says_why_not():
    assert [row.name for row in ROWS.values() if not row.key] == []


def test_what_stays_out_and_what_counts_for_int8_alone():
    assert {name for name, row in ROWS.items() if isinstance(row.key, str)} == {
        *("plan.ray", "engine.timing_cache", "force", "from", "calibration.check_input", "calibration.unfinished"),
        "quantized",
        *(f"nms.{name}" for name in ("score_threshold", "iou_threshold", "max_detections", "pre_nms_topk")),
    }
    always = {name for name, row in ROWS.items() if isinstance(row.key, Stage) and not row.int8_only and not row.fact}
    assert always == {
        *("precision", "sms", "batch", "silu", "input.size"),
        *(f"engine.{name}" for name in ("workspace", "version_compatible", "hardware_compatible", "embed_plugins")),
        *("engine.tactic_sources", "engine.tf32", "engine.dla"),
    }


OTHERS: dict[str, Any] = {
    "precision": "fp16",
    "plan.keep_fp16": 3,
    "batch": (2, 2, 2),
    "input.size": (64, 64),
    "effort": "none",
    "calibration.rule": "mse",
    "guard": 1.5,
    "sms": (86,),
    "engine.dla": 1,
}


def another(row: Row) -> Any:
    """A value that is not the default."""
    if row.name in OTHERS:
        value = OTHERS[row.name]
        return (value,) if row.many and not isinstance(value, tuple) else value
    if isinstance(row.default, bool):
        return not row.default
    if row.values:
        return next(value for value in row.values if value != row.default)
    value = {int: 7, float: 0.5}.get(row.kind, "another")
    return (value,) if row.many else value


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_an_option_changes_the_keys_from_its_stage_on(row):
    before = stage_keys(BuildOptions(), FACTS, int8=True)
    options, facts = with_values(BuildOptions(), {row.path: another(row)}), FACTS
    assert value_of(options, row) != row.default
    if row.fact:
        assert stage_keys(options, FACTS, int8=True) == before, "the fact stands for the option"
        facts = {**FACTS, row.fact: "another"}
    after = stage_keys(options, facts, int8=True)
    if isinstance(row.key, str):
        assert after == before
        return
    first = list(Stage).index(row.key)
    assert [after[stage] == before[stage] for stage in Stage] == [place < first for place in range(len(Stage))]
    floating = stage_keys(options, facts, int8=False) == stage_keys(BuildOptions(), FACTS, int8=False)
    assert floating == row.int8_only


def test_a_fact_that_nobody_gives_is_an_error():
    with pytest.raises(KeyError):
        stage_keys(BuildOptions(), {}, int8=True)


def test_facts_of_no_option_count_from_the_first_stage_on():
    before = stage_keys(BuildOptions(), FACTS, int8=True)
    after = stage_keys(BuildOptions(), {**FACTS, "model": "another"}, int8=True)
    assert not set(before.values()) & set(after.values())


def test_a_build_gives_every_fact_and_its_key_tells_plans_apart(small_model, tmp_path, monkeypatch):
    images = shapes.generate(tmp_path, "calibration", 8).images
    options = BuildOptions(
        backend="onnxruntime", calibration=CalibrationOptions(images=images), plan=PlanOptions(int8_all=True)
    )

    def keys(**changes: Any) -> dict[Stage, str]:
        job = Job(small_model, config=load_config("shapes"), output=tmp_path / "b", options=replace(options, **changes))
        return dict(checked_build(job).keys)

    plain = keys()
    named = keys(plan=PlanOptions(int8_all=True, keep_fp16=2))
    assert plain[Stage.RANGES] == named[Stage.RANGES]
    assert plain[Stage.CORRECTIONS] != named[Stage.CORRECTIONS]
    monkeypatch.setattr(validation, "check_ray", lambda plan: None)  # whether it is installed is not asked here
    assert keys(plan=PlanOptions(int8_all=True, keep_fp16=2, ray="local")) == named
    fewer = keys(calibration=CalibrationOptions(images=images, num_images=6))
    assert (fewer[Stage.GRAPH], fewer[Stage.RANGES] == plain[Stage.RANGES]) == (plain[Stage.GRAPH], False)
