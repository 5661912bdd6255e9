"""``trtdet tune`` and the build of a point, as commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models import CONVOLUTIONS
from standin.machine import Machine

from trtdet.quantization import PrecisionPlan

CALIBRATION = ["--num-images", 6, "--calib", "minmax", "--correct", "none", "--rank-images", 2]
ONNX = ["--backend", "onnxruntime"]


@pytest.fixture
def tune(run: Any, model: Path, calibration_images: Path, validation: Any, tmp_path: Path) -> Any:
    def tune(*more: object) -> Any:
        command = ["tune", model, "--config", "shapes", "--images", calibration_images, *CALIBRATION, "--points", 3]
        labelled = ["--val-images", validation.images, "--annotations", validation.annotations]
        return run(*command, *labelled, "-o", tmp_path / "t", *more)

    return tune


def test_tune_prints_its_table_and_a_point_is_built(tune: Any, run: Any, model: Path, tmp_path: Path) -> None:
    done = tune(*ONNX)
    assert done.code == 0, done.err
    assert "all INT8" in done.out and "all FP16" in done.out
    assert "6 calibration images chose, mAP is of 16 others" in done.out
    assert "--point N -o BUNDLE" in done.out
    found = tune(*ONNX, "--json").json
    assert found == json.loads((tmp_path / "t" / "front.json").read_text())
    assert "<svg" in (tmp_path / "t" / "front.html").read_text()
    point = next(one for one in found["points"] if one["titles"] == ["program"])
    command = ["build", model, "--config", "shapes", "--tuned", tmp_path / "t", "--no-measure", "--json"]
    built = run(*command, "--point", point["number"], "-o", tmp_path / "b")
    assert built.code == 0, built.err
    assert PrecisionPlan.load(tmp_path / "b" / "plan.json").names("fp16") == tuple(point["kept"])
    assert built.json["manifest"]["precision"] == point["counts"]
    wrong = (
        (["--point", 99], "--point 99"),
        ([], "--tuned DIR and --point N belong together"),
        (["--point", 1, "--images", tmp_path], "--tuned: leave --images out"),
        (["--point", 1, "--int8-all"], "--tuned: leave --int8-all out"),
        (["--point", 1, "--fp16"], "--tuned: leave --fp16 out"),
        (["--point", 1, "--keep-fp16", "depthwise"], "--tuned: leave --keep-fp16 out"),
    )
    for more, said in wrong:
        refused = run(*command, *more, "-o", tmp_path / "w")
        assert refused.code == 1
        assert said in refused.message
    assert not (tmp_path / "w").exists()


@pytest.mark.slow
@pytest.mark.tensorrt
def test_estimates_and_engines_of_a_library_that_builds_without_a_gpu(
    tune: Any, run: Any, model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'trtdet[rtx]'")
    found = tune("--backend", "tensorrt-rtx", "--sm", 86, "--gpu", "RTX 3090", "--json")
    assert found.code == 0, found.err
    front = found.json
    assert (front["gpu"], front["device"], front["unit"]) == ("RTX 3090", None, "ms (estimate, RTX 3090, batch 1)")
    by = {title: point for point in front["points"] for title in point["titles"]}
    assert all(point["engine"] > 0 and point["cost"] == point["estimated"] > 0 for point in front["points"])
    assert (by["all INT8"]["counts"]["int8"], by["all FP16"]["counts"]["fp16"]) == (CONVOLUTIONS, CONVOLUTIONS)
    # The GPU of the estimates changes no measurement.
    rows = (tmp_path / "t" / "rows.jsonl").read_text()
    other = tune("--backend", "tensorrt-rtx", "--sm", 86, "--gpu", "L4", "--json").json
    assert other["gpu"] == "L4"
    assert (tmp_path / "t" / "rows.jsonl").read_text().startswith(rows)
    half = next(point for point in other["points"] if "all FP16" in point["titles"])
    built = run(
        *("build", model, "--config", "shapes", "--tuned", tmp_path / "t", "--point", half["number"]),
        *("--no-measure", "-o", tmp_path / "b", "--json"),
    )
    assert built.code == 0, built.err
    assert built.json["manifest"]["audit"]["int8"] == half["counts"]["int8"] == 0
    default = next(point for point in other["points"] if "default" in point["titles"])
    built = run(
        *("build", model, "--config", "shapes", "--tuned", tmp_path / "t", "--point", default["number"]),
        *("--no-measure", "-o", tmp_path / "d"),
    )
    assert built.code == 0, built.err
    assert "--int8-all" not in built.out + built.err  # which a point's build refuses


def test_the_best_plan_by_flags(
    run: Any, model: Path, calibration_images: Path, validation: Any, tmp_path: Path
) -> None:
    command = ["build", model, "--config", "shapes", "--images", calibration_images, *CALIBRATION, *ONNX]
    labelled = ["--val-images", validation.images, "--annotations", validation.annotations]
    done = run(
        *command, *labelled, "--best", "--max-map-drop", 100, "--objective", "size", "-o", tmp_path / "b", "--json"
    )
    assert done.code == 0, done.err
    assert done.json["trade_off"]["unit"] == "bytes of weights"
    assert done.json["manifest"]["precision"]["int8"] == CONVOLUTIONS
    assert done.json["within"] is None
    alone = run(*command, "--best", "-o", tmp_path / "n")
    assert "--best is the best plan within a bound" in alone.message
    without = run(*command, "--best", "--max-map-drop", 0.3, "-o", tmp_path / "n")
    assert "--max-map-drop measures mAP: give annotated images" in without.message


# where a GPU runs engines


@pytest.mark.slow
def test_a_tune_measures_where_engines_run(
    machine: Machine, model: Path, calibration_images: Path, validation: Any, tmp_path: Path
) -> None:
    arguments = ["tune", model, "--config", "shapes", "--images", calibration_images, *CALIBRATION, "--points", 2]
    arguments += ["--val-images", validation.images, "--annotations", validation.annotations]
    done = machine.trtdet(*arguments, "--backend", "tensorrt", "-o", tmp_path / "t", "--json")
    assert done.code == 0, done.err
    front = done.json
    assert front["device"] == front["gpu"] == "Stand-in GPU"
    assert all(point["estimated"] > 0 for point in front["points"])
    assert front["unit"] == "ms (measured on Stand-in GPU, batch 1)"
    assert all(point["cost"] == point["measured"] > 0 for point in front["points"])
    assert [point["cost"] for point in front["points"]] == sorted(point["cost"] for point in front["points"])


@pytest.mark.slow
def test_a_time_is_kept_as_measured_where_engines_run(
    machine: Machine, model: Path, calibration_images: Path, validation: Any, tmp_path: Path
) -> None:
    arguments = ["build", model, "--config", "shapes", "--images", calibration_images, *CALIBRATION, "--no-measure"]
    arguments += ["--backend", "tensorrt", "--best", "--json"]
    done = machine.trtdet(*arguments, "--max-latency", 10_000, "-o", tmp_path / "b")
    assert done.code == 0, done.err
    assert 0 < done.json["within"]["measured"] <= 10_000
    assert "the least error within 10000 ms" in done.err and "ms measured" in done.err
    never = machine.trtdet(*arguments, "--max-latency", 1e-6, "-o", tmp_path / "n")
    assert "the cheapest plan takes" in never.message and "ms measured" in never.message
    assert not (tmp_path / "n").exists()
