"""``trtdet tune`` and the build of a point, as commands."""

import json
from typing import Any

import pytest
from models import CONVOLUTIONS

from trtdet.quantization import PrecisionPlan

CALIBRATION = ["--num-images", 6, "--calib", "minmax", "--effort", "none", "--set", "plan.rank_images=2"]
ONNX = ["--backend", "onnxruntime"]


@pytest.fixture
def tune(run, model, calibration_images, val_labelled, tmp_path):
    def tune(*more: object) -> Any:
        command = ["tune", model, "--config", "shapes", "--images", calibration_images, *CALIBRATION, "--points", 3]
        return run(*command, *val_labelled, "-o", tmp_path / "t", *more)

    return tune


def test_tune_prints_its_table_and_a_point_is_built(tune, run, model, tmp_path):
    done = tune(*ONNX).ok
    assert "all INT8" in done.out and "all FP16" in done.out
    assert "6 calibration images chose, mAP is of 16 others" in done.out
    assert ":N -o BUNDLE" in done.out
    found = tune(*ONNX, "--json").json
    assert found == json.loads((tmp_path / "t" / "experiment.json").read_text())
    assert "<svg" in (tmp_path / "t" / "experiment.html").read_text()
    point = next(one for one in found["variants"] if one["titles"] == ["optimiser"])
    command = ["build", model, "--config", "shapes", "--guard", "off", "--json", "--from"]
    built = run(*command, f"{tmp_path / 't'}:{point['number']}", "-o", tmp_path / "b").ok
    assert PrecisionPlan.load(tmp_path / "b" / "plan.json").names("fp16") == tuple(point["kept"])
    assert built.json["manifest"]["precision"] == point["counts"]
    for option, *value in (("--images", tmp_path), ("--int8-all",), ("--fp16",), ("--keep-fp16", "depthwise")):
        refused = run(*command, f"{tmp_path / 't'}:1", option, *value, "-o", tmp_path / "w")
        refused.refused(f"--from: leave {option} out")
    assert not (tmp_path / "w").exists()


@pytest.mark.slow
@pytest.mark.tensorrt
def test_estimates_and_engines_of_a_library_that_builds_without_a_gpu(tune, run, model, tmp_path):
    rtx = ["--backend", "tensorrt-rtx", "--sm", 86, "--json", "--set"]
    front = tune(*rtx, "engine.gpu=RTX 3090").ok.json
    assert (front["gpu"], front["device"], front["unit"]) == (
        "RTX 3090",
        None,
        "ms (estimate within 1.3x, RTX 3090, batch 1)",
    )
    by = {title: point for point in front["variants"] for title in point["titles"]}
    assert all(point["engine"] > 0 and point["cost"] == point["estimated"] > 0 for point in front["variants"])
    assert (by["all INT8"]["counts"]["int8"], by["all FP16"]["counts"]["fp16"]) == (CONVOLUTIONS, CONVOLUTIONS)
    # The GPU of the estimates changes no measurement.
    rows = (tmp_path / "t" / "rows.jsonl").read_text()
    other = tune(*rtx, "engine.gpu=L4").json
    assert other["gpu"] == "L4"
    assert (tmp_path / "t" / "rows.jsonl").read_text().startswith(rows)
    by = {title: point for point in other["variants"] for title in point["titles"]}
    half, default = by["all FP16"], by["default"]
    command = ["build", model, "--config", "shapes", "--guard", "off", "--from"]
    built = run(*command, f"{tmp_path / 't'}:{half['number']}", "-o", tmp_path / "b", "--json").ok
    assert built.json["manifest"]["audit"]["int8"] == half["counts"]["int8"] == 0
    built = run(*command, f"{tmp_path / 't'}:{default['number']}", "-o", tmp_path / "d").ok
    assert "--int8-all" not in built.out + built.err  # which a point's build refuses


def test_the_best_plan_by_flags(run, model, calibration_images, val_labelled, tmp_path):
    command = ["build", model, "--config", "shapes", "--images", calibration_images, *CALIBRATION, *ONNX]
    command += ["--int8-all", "--max-map-drop"]
    done = run(*command, 100, *val_labelled, "--set", "plan.objective=size", "-o", tmp_path / "b", "--json").ok
    assert done.json["trade_off"]["unit"] == "bytes of weights"
    assert done.json["manifest"]["precision"]["int8"] == CONVOLUTIONS
    assert done.json["within"] is None


@pytest.mark.slow
def test_a_tune_measures_where_engines_run(machine, model, calibration_images, val_labelled, tmp_path):
    arguments = ["tune", model, "--config", "shapes", "--images", calibration_images, *CALIBRATION, "--points", 2]
    done = machine.trtdet(*arguments, *val_labelled, "--backend", "tensorrt", "-o", tmp_path / "t", "--json").ok
    front = done.json
    assert front["device"] == front["gpu"] == "Stand-in GPU"
    assert all(point["estimated"] > 0 for point in front["variants"])
    assert front["unit"] == "ms (measured on Stand-in GPU, batch 1)"
    assert all(point["cost"] == point["latency_ms"] > 0 for point in front["variants"])
    assert [point["cost"] for point in front["variants"]] == sorted(point["cost"] for point in front["variants"])


@pytest.mark.slow
def test_a_time_is_kept_as_measured_where_engines_run(machine, model, calibration_images, tmp_path):
    arguments = ["build", model, "--config", "shapes", "--images", calibration_images, *CALIBRATION, "--guard", "off"]
    arguments += ["--backend", "tensorrt", "--int8-all", "--json"]
    done = machine.trtdet(*arguments, "--set", "plan.max_latency=10000", "-o", tmp_path / "b").ok
    assert 0 < done.json["within"]["measured"] <= 10_000
    assert "the least error within 10000 ms" in done.err and "ms measured" in done.err
    never = machine.trtdet(*arguments, "--set", "plan.max_latency=1e-6", "-o", tmp_path / "n")
    never.refused("the cheapest plan takes", "ms measured")
    assert not (tmp_path / "n").exists()
