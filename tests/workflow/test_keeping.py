"""What stays in FP16: by number, by name, by an edited plan, by a budget, by a bound on the loss."""

from __future__ import annotations

import json
import re
from functools import partial

import numpy as np
import onnx
import pytest
from models import CONVOLUTIONS

from trtdet.bundle import Bundle
from trtdet.mixed_precision.scores import Sensitivity
from trtdet.quantization import PrecisionPlan

CALIBRATION = ["--num-images", 4, "--calib", "minmax", "--correct", "none", "--rank-images", 2, "--int8-all"]
ONNX = ["--backend", "onnxruntime"]


@pytest.fixture
def build(run, model, calibration_images, tmp_path):
    def build(*more, name="b", detector=model):
        command = ["build", detector, "--config", "shapes", "--images", calibration_images, *CALIBRATION]
        return run(*command, "--no-measure", "-o", tmp_path / name, "--json", *more)

    return build


def kept(bundle):
    plan = PrecisionPlan.load(bundle / "plan.json")
    return {name: plan.entries[name].reason for name in plan.names("fp16")}


@pytest.mark.tensorrt
def test_the_engine_has_exactly_the_planned_convolutions_in_half(build, tmp_path, run):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'trtdet[rtx]'")
    done = build("--keep-fp16", 5, "--sm", 86)
    assert done.code == 0, done.err
    assert {key: done.json["manifest"]["audit"][key] for key in ("int8", "fp16", "fp32")} == {
        "int8": CONVOLUTIONS - 5,
        "fp16": 5,
        "fp32": 0,
    }
    assert done.json["manifest"]["precision"] == {"int8": CONVOLUTIONS - 5, "fp16": 5, "fp32": 0}
    audit = run("audit", tmp_path / "b", "--json").json
    assert audit["departures"] == []
    names = kept(tmp_path / "b")
    halves = {
        node for layer in audit["layers"] if layer["input"] == layer["weights"] == "Half" for node in layer["onnx"]
    }
    assert set(names) <= halves
    # Why each is kept stands in the plan, and the ranking beside it.
    ranking = Sensitivity.load(tmp_path / "b" / "sensitivity.json")
    assert set(names) == {layer.name for layer in ranking.layers[:5]}
    assert names[ranking.layers[0].name].startswith(f"kept: rank 1 of {CONVOLUTIONS}, ")
    # Another number takes the ranking that is there.
    again = build("--keep-fp16", 6, "--sm", 86)
    assert "ranking" not in again.err
    assert again.json["manifest"]["audit"]["fp16"] == 6


def test_names_and_the_depthwise_group(build, tmp_path):
    done = build(*ONNX, "--keep-fp16", "depthwise")
    assert done.code == 0, done.err
    group = kept(tmp_path / "b")
    assert list(group) == ["/depthwise0/Conv", "/depthwise1/Conv"]
    first, second = "/stem/Conv", "/down1/Conv"
    assert build(*ONNX, "--keep-fp16", f"{first},{second}", name="n").code == 0
    assert kept(tmp_path / "n") == {first: "kept: named", second: "kept: named"}
    wrong = build(*ONNX, "--keep-fp16", "nothing", name="w")
    assert wrong.code == 1
    assert "no convolution 'nothing'" in wrong.message
    assert not (tmp_path / "w").exists()


def test_an_edited_plan_goes_in_again(build, tmp_path):
    assert build(*ONNX).code == 0
    plan = json.loads((tmp_path / "b" / "plan.json").read_text())
    name = list(plan["entries"])[3]
    plan["entries"][name] = {"precision": "fp16", "reason": "I say so"}
    edited = tmp_path / "mine.json"
    edited.write_text(json.dumps(plan))
    done = build(*ONNX, "--keep-fp16", edited, name="e")
    assert done.code == 0, done.err
    assert kept(tmp_path / "e") == {name: "I say so"}
    assert build(*ONNX, "--keep-fp16", edited, name="e").json["up_to_date"] is True
    plan["entries"][name]["precision"] = "fp32"
    edited.write_text(json.dumps(plan))
    other = build(*ONNX, "--keep-fp16", edited, name="e")
    assert other.json["up_to_date"] is False
    assert other.json["manifest"]["precision"] == {"int8": CONVOLUTIONS - 1, "fp16": 0, "fp32": 1}
    del plan["entries"][name]
    edited.write_text(json.dumps(plan))
    wrong = build(*ONNX, "--keep-fp16", edited, name="e")
    assert wrong.code == 1
    assert "the plan is of another model" in wrong.message
    missing = build(*ONNX, "--keep-fp16", tmp_path / "no.json", name="e")
    assert "does not exist" in missing.message


def test_a_budget_of_multiply_adds(build, tmp_path):
    assert build(*ONNX, "--fp16-budget", 0.1).code == 0
    ranking = Sensitivity.load(tmp_path / "b" / "sensitivity.json")
    names = kept(tmp_path / "b")
    spent = sum(layer.macs for layer in ranking.layers if layer.name in names)
    assert 0 < spent <= 0.1 * ranking.macs
    wrong = build(*ONNX, "--fp16-budget", 3)
    assert "--fp16-budget must be a share of the multiply-adds, 0 to 1, got 3" in wrong.message


CLIPPED = ["--calib", "percentile", "--percentile", 98]
"""So that INT8 costs the shipped detector points on every processor, whatever its arithmetic, and FP16 nothing."""


@pytest.mark.slow
def test_the_cheapest_plan_within_a_bound(build, tmp_path, trained, drawn):
    build = partial(build, *CLIPPED, detector=trained)
    labelled = ["--val-images", drawn.images, "--annotations", drawn.annotations]
    anything = build(*ONNX, "--max-map-drop", 100, *labelled)
    assert anything.code == 0, anything.err
    whole = anything.json["trade_off"]["chosen"]
    assert whole["names"] == []
    loss = -100 * whole["score"]["difference"]
    assert loss > 5
    bound = loss / 2
    done = build(*ONNX, "--max-map-drop", bound, *labelled)
    assert done.code == 0, done.err
    found = done.json["trade_off"]
    scores = sum(1 + (one["reported"] is not None) for one in found["candidates"])
    assert found["evaluations"] == scores + 2 <= 15
    shown = found["chosen"]["reported"]
    assert -100 * shown["low"] <= bound
    # As many images choose as report, and none does both.
    assert abs(shown["images"] - found["chosen"]["score"]["images"]) <= 1
    assert len(kept(tmp_path / "b")) == len(found["chosen"]["names"]) > 0
    cheaper = [one for one in found["candidates"] if one["cost"] < found["chosen"]["cost"]]
    assert cheaper
    assert all(
        -100 * one["score"]["low"] > bound or one["reported"] is None or -100 * one["reported"]["low"] > bound
        for one in cheaper
    )
    assert "<- chosen" in done.err
    assert json.loads((tmp_path / "b" / "tradeoff.json").read_text())["chosen"]["names"] == found["chosen"]["names"]
    # What was measured is what was built.
    assert build(*ONNX, "--max-map-drop", bound, *labelled).json["up_to_date"] is True
    alone = build(*ONNX, "--max-map-drop", bound, name="n")
    assert "--max-map-drop measures mAP: give annotated images" in alone.message
    half = build(*ONNX, "--max-map-drop", bound, *labelled[:2], name="n")
    assert "--val-images and --annotations belong together" in half.message


def test_a_bound_on_the_disagreement_needs_no_annotations(build, drawn):
    anything = build(*ONNX, "--max-disagreement", 100, "--val-images", drawn.images)
    assert anything.code == 0, anything.err
    assert build(*ONNX, "--max-disagreement", 100, "--val-images", drawn.images).json["up_to_date"] is True
    assert anything.json["trade_off"]["figure"] == "agreement"
    whole = anything.json["trade_off"]["chosen"]["score"]
    assert whole["map"] is None and whole["agreement"] == pytest.approx(1 + whole["difference"])
    assert "agreement" in anything.err and "<- chosen" in anything.err


@pytest.mark.slow
def test_the_cheapest_plan_within_a_bound_on_the_disagreement(build, tmp_path, trained, drawn):
    build = partial(build, *CLIPPED, detector=trained)
    anything = build(*ONNX, "--max-disagreement", 100, "--val-images", drawn.images)
    bound = -100 * anything.json["trade_off"]["chosen"]["score"]["low"] / 2
    done = build(*ONNX, "--max-disagreement", bound, "--val-images", drawn.images)
    assert done.code == 0, done.err
    found = done.json["trade_off"]
    assert 0 < -100 * found["chosen"]["score"]["low"] <= bound
    assert 0 < len(kept(tmp_path / "b")) == len(found["chosen"]["names"])
    assert -100 * found["chosen"]["reported"]["low"] <= bound


def test_all_of_it_in_half(build, run, trained, tmp_path, drawn):
    command = ["build", trained, "--config", "shapes", "--fp16", *ONNX, "--json", "-o", tmp_path / "h"]
    done = run(*command)
    assert done.code == 0, done.err
    assert done.json["manifest"]["precision"] == {"int8": 0, "fp16": 95, "fp32": 0}
    bundle = Bundle(tmp_path / "h")
    weights = [one for one in onnx.load(bundle.model).graph.initializer if len(one.dims) == 4 and one.dims[0] > 1]
    assert all(onnx.numpy_helper.to_array(one).dtype == np.float16 for one in weights)
    data = ["--images", drawn.images, "--annotations", drawn.annotations, "--json"]
    got = run("eval", bundle.path, *data).json["map"]
    assert got == pytest.approx(run("eval", trained, "--config", "shapes", *data).json["map"], abs=0.01)
    wrong = run(*command, "--keep-fp16", 3)
    assert wrong.code == 1
    assert "--fp16 leaves nothing in INT8" in wrong.message


def test_only_one_way_to_say_it(build, capfd):
    with pytest.raises(SystemExit) as stop:
        build("--keep-fp16", 3, "--fp16-budget", 0.1)
    assert stop.value.code == 2
    assert "not allowed with" in capfd.readouterr().err


def test_sensitivity_writes_rows_and_goes_on(run, model, calibration_images, tmp_path):
    command = ["sensitivity", model, "--config", "shapes", "--images", calibration_images, *CALIBRATION, "--json"]
    done = run(*command, "-o", tmp_path / "s.json")
    assert done.code == 0, done.err
    assert {"layers", "seconds", "inferences"} <= set(done.json)
    assert {"name", "score", "rank"} <= set(done.json["layers"][0])
    rows = (tmp_path / "s.jsonl").read_text().splitlines()
    assert len(rows) == 1 + CONVOLUTIONS + 1
    assert Sensitivity.load(tmp_path / "s.json").layers[0].name == done.json["layers"][0]["name"]
    again = run(*command, "-o", tmp_path / "s.json")
    assert again.json == done.json
    other = run(*command, "--all-but-one", "-o", tmp_path / "s.json")
    assert other.code == 1
    assert "give another -o" in other.message
    wrong = run(*command, "-o", tmp_path / "s.txt")
    assert "must end in .json" in wrong.message


def test_sweep_prints_its_table(run, model, calibration_images, validation, tmp_path):
    command = ["sweep", model, "--config", "shapes", "--images", calibration_images, "--num-images", 4, *ONNX]
    command += ["--int8-all"]
    command += ["--val-images", validation.images, "--annotations", validation.annotations, "-o", tmp_path / "s"]
    done = run(*command, "--calib", "minmax", "mse", "--correct", "none")
    assert done.code == 0, done.err
    assert len(re.findall(r"^INT8 +keep", done.out, re.MULTILINE)) == 2
    assert (tmp_path / "s" / "sweep.md").read_text().count("| INT8 |") == 2
    assert run(*command, "--calib", "minmax", "--correct", "none", "--json").json["rows"][1]["calibration"] == "minmax"
