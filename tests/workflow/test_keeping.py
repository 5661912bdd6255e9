"""What stays in FP16: by number, by name, by an edited plan, by a budget, by a bound on the loss."""

import json
import re
from functools import partial

import numpy as np
import onnx
import pytest
from models import CONVOLUTIONS

from trtdet.bundle import Bundle
from trtdet.plans.scores import Sensitivity
from trtdet.quantization import PrecisionPlan

CALIBRATION = ["--num-images", 4, "--calib", "minmax", "--effort", "none", "--set", "plan.rank_images=2", "--int8-all"]
ONNX = ["--backend", "onnxruntime"]


@pytest.fixture
def build(run, model, calibration_images, tmp_path):
    def build(*more, name="b", detector=model):
        command = ["build", detector, "--config", "shapes", "--images", calibration_images, *CALIBRATION]
        return run(*command, "--guard", "off", "-o", tmp_path / name, "--json", *more)

    return build


def kept(bundle):
    plan = PrecisionPlan.load(bundle / "plan.json")
    return {name: plan.entries[name].reason for name in plan.names("fp16")}


@pytest.mark.tensorrt
def test_the_engine_has_exactly_the_planned_convolutions_in_half(build, tmp_path, run):
    manifest = build("--keep-fp16", 5, "--sm", 86).ok.json["manifest"]
    assert manifest["precision"] == {"int8": CONVOLUTIONS - 5, "fp16": 5, "fp32": 0}
    assert {key: manifest["audit"][key] for key in manifest["precision"]} == manifest["precision"]
    audit = run("audit", tmp_path / "b", "--json").json
    assert audit["departures"] == []
    names = kept(tmp_path / "b")
    halves = [layer["onnx"] for layer in audit["layers"] if layer["input"] == layer["weights"] == "Half"]
    assert set(names) <= set().union(*halves)
    # Why each is kept stands in the plan, and the ranking beside it.
    ranking = Sensitivity.load(tmp_path / "b" / "sensitivity.json")
    assert set(names) == {layer.name for layer in ranking.layers[:5]}
    assert names[ranking.layers[0].name].startswith(f"kept: rank 1 of {CONVOLUTIONS}, ")
    # Another number takes the ranking that is there.
    again = build("--keep-fp16", 6, "--sm", 86)
    assert "ranking" not in again.err
    assert again.json["manifest"]["audit"]["fp16"] == 6


def test_names_and_the_depthwise_group(build, tmp_path):
    assert build(*ONNX, "--keep-fp16", "depthwise").ok
    group = kept(tmp_path / "b")
    assert list(group) == ["/depthwise0/Conv", "/depthwise1/Conv"]
    first, second = "/stem/Conv", "/down1/Conv"
    assert build(*ONNX, "--keep-fp16", f"{first},{second}", name="n").code == 0
    assert kept(tmp_path / "n") == {first: "kept: named", second: "kept: named"}
    build(*ONNX, "--keep-fp16", "nothing", name="w").refused("no convolution 'nothing'")
    assert not (tmp_path / "w").exists()


def test_an_edited_plan_goes_in_again(build, tmp_path):
    assert build(*ONNX).code == 0
    plan = json.loads((tmp_path / "b" / "plan.json").read_text())
    name = list(plan["entries"])[3]
    plan["entries"][name] = {"precision": "fp16", "reason": "I say so"}
    edited = tmp_path / "mine.json"
    edited.write_text(json.dumps(plan))
    assert build(*ONNX, "--keep-fp16", edited, name="e").ok
    assert kept(tmp_path / "e") == {name: "I say so"}
    assert build(*ONNX, "--keep-fp16", edited, name="e").json["up_to_date"] is True
    plan["entries"][name]["precision"] = "fp32"
    edited.write_text(json.dumps(plan))
    other = build(*ONNX, "--keep-fp16", edited, name="e")
    assert other.json["up_to_date"] is False
    assert other.json["manifest"]["precision"] == {"int8": CONVOLUTIONS - 1, "fp16": 0, "fp32": 1}


CLIPPED = ["--calib", "percentile:98"]
"""So that INT8 costs the shipped detector points on every processor, whatever its arithmetic, and FP16 nothing."""


@pytest.mark.slow
def test_the_cheapest_plan_within_a_bound(build, tmp_path, trained, drawn):
    build = partial(build, *CLIPPED, detector=trained)
    labelled = ["--val-images", drawn.images, "--annotations", drawn.annotations]
    anything = build(*ONNX, "--max-map-drop", 100, *labelled).ok
    whole = anything.json["trade_off"]["chosen"]
    assert whole["names"] == []
    loss = -100 * whole["score"]["difference"]
    assert loss > 5
    bound = loss / 2
    done = build(*ONNX, "--max-map-drop", bound, *labelled).ok
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


def test_a_bound_on_the_disagreement_needs_no_annotations(build, drawn):
    arguments = [*ONNX, "--set", "plan.max_disagreement=100", "--val-images", drawn.images]
    done = build(*arguments).ok
    assert build(*arguments).json["up_to_date"] is True
    assert done.json["trade_off"]["figure"] == "agreement"
    score = done.json["trade_off"]["chosen"]["score"]
    assert score["map"] is None and score["agreement"] == pytest.approx(1 + score["difference"])
    assert "agreement" in done.err and "<- chosen" in done.err


@pytest.mark.slow
def test_the_cheapest_plan_within_a_bound_on_the_disagreement(build, tmp_path, trained, drawn):
    build = partial(build, *CLIPPED, *ONNX, "--val-images", drawn.images, detector=trained)
    anything = build("--set", "plan.max_disagreement=100")
    bound = -100 * anything.json["trade_off"]["chosen"]["score"]["low"] / 2
    found = build("--set", f"plan.max_disagreement={bound}").ok.json["trade_off"]
    assert 0 < -100 * found["chosen"]["score"]["low"] <= bound
    assert 0 < len(kept(tmp_path / "b")) == len(found["chosen"]["names"])
    assert -100 * found["chosen"]["reported"]["low"] <= bound


def test_all_of_it_in_half(run, trained, tmp_path, scored):
    command = ["build", trained, "--config", "shapes", "--fp16", *ONNX, "--json", "-o", tmp_path / "h"]
    done = run(*command).ok
    assert done.json["manifest"]["precision"] == {"int8": 0, "fp16": 95, "fp32": 0}
    bundle = Bundle(tmp_path / "h")
    weights = [one for one in onnx.load(bundle.model).graph.initializer if len(one.dims) == 4 and one.dims[0] > 1]
    assert all(onnx.numpy_helper.to_array(one).dtype == np.float16 for one in weights)
    half = run("eval", bundle.path, *scored, "--json").json["map"]
    full = run("eval", trained, "--config", "shapes", *scored, "--json").json["map"]
    assert half == pytest.approx(full, abs=0.01)


def test_sensitivity_writes_rows_and_goes_on(run, model, calibration_images, tmp_path):
    command = ["sensitivity", model, "--config", "shapes", "--images", calibration_images, *CALIBRATION, "--json"]
    done = run(*command, "-o", tmp_path / "s.json").ok
    assert {"layers", "seconds", "inferences"} <= set(done.json)
    assert {"name", "score", "rank"} <= set(done.json["layers"][0])
    rows = (tmp_path / "s.jsonl").read_text().splitlines()
    assert len(rows) == 1 + CONVOLUTIONS + 1
    assert Sensitivity.load(tmp_path / "s.json").layers[0].name == done.json["layers"][0]["name"]
    again = run(*command, "-o", tmp_path / "s.json")
    assert again.json == done.json
    run(*command, "--all-but-one", "-o", tmp_path / "s.json").refused("give another -o")
    run(*command, "-o", tmp_path / "s.txt").refused("must end in .json")


def test_sweep_prints_its_table(run, model, calibration_images, val_labelled, tmp_path):
    command = ["sweep", model, "--config", "shapes", "--images", calibration_images, "--num-images", 4, *ONNX]
    command += [*val_labelled, "-o", tmp_path / "s", "--int8-all", "--effort", "none"]
    done = run(*command, "--calib", "minmax", "mse").ok
    assert len(re.findall(r"^ +\d +INT8 +keep", done.out, re.MULTILINE)) == 2
    assert (tmp_path / "s" / "experiment.md").read_text().count("| INT8 |") == 2
    variants = run(*command, "--calib", "minmax", "--json").json["variants"]
    assert variants[1]["axes"]["calibration"] == "minmax"


def test_a_comparison_names_no_temporary_folder(build, tmp_path, val_labelled):
    """Else the same build would give another file each time."""
    assert build(*ONNX, "--guard", "warn", *val_labelled).ok
    assert json.loads((tmp_path / "b" / "worth.json").read_text())["comparison"]["file"] == "fp32.onnx"
