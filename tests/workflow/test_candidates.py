"""Candidate networks: prepared without a GPU, finished on a stand-in for a machine with one."""

import json
import shutil
from pathlib import Path

import onnx
import pytest
from models import own_labels, small_detector

from trtdet.bundle import Bundle
from trtdet.candidates import PreparedFolder, finish
from trtdet.demo.shapes import ShapesSplit
from trtdet.errors import BackendError, BundleError
from trtdet.options import FinishOptions

VERSION = "10.9.0"
QUICK = ["--config", "shapes", "--num-images", 6, "--effort", "none", "--set", "plan.rank_images=2"]

FINISH = ["finish", "--seconds", 0.05]


def quantised(path: Path) -> int:
    """Number of tensors that a network dequantises, by which the stand-in tells networks apart."""
    return sum(node.op_type == "DequantizeLinear" for node in onnx.load(path, load_external_data=False).graph.node)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A detector of which some convolutions get INT8 and some stay in FP16."""
    place = tmp_path_factory.mktemp("wide") / "wide.onnx"
    onnx.save(small_detector(width=32), place)
    return place


@pytest.fixture(scope="module")
def found(wide, drawn, tmp_path_factory):
    """Images labelled by that detector, of which it scores 100 in float."""
    return ShapesSplit(drawn.images, own_labels(drawn, tmp_path_factory.mktemp("found") / "labels.json", wide))


@pytest.fixture(scope="module")
def prepared(machine, wide, calibration_images, found, tmp_path_factory):
    """Prepared on a machine without a GPU; every candidate may ship."""
    place = tmp_path_factory.mktemp("prepared") / "p"
    command = ["prepare", wide, *QUICK, "--images", calibration_images, "--for", "tensorrt-10.3", "-o", place]
    scored = ["--val-images", found.images, "--annotations", found.annotations, "--max-map-drop", 100]
    done = machine.trtdet(*command, *scored, driver=False)
    assert done.code == 0, done.err
    return place


def test_candidates_share_their_weights_and_have_their_accuracy(prepared):
    folder = PreparedFolder(prepared)
    candidates = {one.name: one for one in folder.content.candidates}
    assert {"fp16", "default", "int8-all", "implicit", "front-1"} <= set(candidates)
    assert candidates["fp16"].int8_share == 0 and candidates["int8-all"].int8_share == 1
    assert all(one.accuracy.figure == "map" and one.accuracy.images == 16 for one in candidates.values())
    assert all(one.accuracy.low <= one.accuracy.difference <= one.accuracy.high for one in candidates.values())
    whole = sum(folder.model(one).ByteSize() for one in candidates.values())
    stored = sum((prepared / one.model).stat().st_size for one in candidates.values())
    stored += (prepared / "weights.bin").stat().st_size
    assert stored < 0.6 * whole
    for one in candidates.values():
        onnx.checker.check_model(folder.model(one))


def test_the_readme_names_each_network_with_its_command(prepared):
    text = (prepared / "README.md").read_text()
    for candidate in PreparedFolder(prepared).content.candidates:
        (command,) = [line for line in text.splitlines() if line.startswith(f"trtexec --onnx={candidate.model} ")]
        assert ("--calib=" in command) == candidate.implicit
        assert ("--stronglyTyped" in command) != candidate.implicit


@pytest.mark.slow
def test_the_fastest_ships_though_an_estimate_would_choose_another(machine, prepared, found, tmp_path):
    name = "int8-all"
    fast = quantised(prepared / f"{name}.onnx")
    done = machine.trtdet(*FINISH, prepared, "-o", tmp_path / "b", "--json", version=VERSION, fast=fast).ok.json
    parts = {part["name"]: part for part in done["manifest"]["candidates"]}
    (shipped,) = [part for part in parts.values() if part["shipped"]]
    # FP16 and the implicit network are both without Q/DQ nodes, so the stand-in runs both fast.
    equals = {key for key in parts if quantised(prepared / f"{key}.onnx") == fast}
    assert name in equals and shipped["name"] in equals
    slower = parts.keys() - equals
    assert slower and all(parts[key]["ms"] > shipped["ms"] + 3 for key in slower)
    assert all(part["how"] == "measured" and not part["problem"] for part in parts.values())
    bundle = Bundle(tmp_path / "b")
    assert bundle.manifest.backend.version == VERSION
    assert quantised(bundle.model) == fast
    scored = ["--images", found.images, "--annotations", found.annotations]
    result = machine.trtdet("eval", tmp_path / "b", *scored, "--json", version=VERSION).ok.json
    candidate = next(one for one in PreparedFolder(prepared).content.candidates if one.name == shipped["name"])
    assert result["map"] == pytest.approx(candidate.accuracy.value, abs=0.02)


@pytest.mark.slow
def test_a_candidate_that_the_builder_refuses_costs_only_itself(machine, prepared, tmp_path):
    refused = quantised(prepared / "default.onnx")
    done = machine.trtdet(*FINISH, prepared, "-o", tmp_path / "b", "--json", version=VERSION, refuses=refused).ok.json
    problems = {part["name"]: part["problem"] for part in done["manifest"]["candidates"] if part["problem"]}
    assert "default" in problems and "Could not find any implementation" in problems["default"]
    assert not [name for name in problems if quantised(prepared / f"{name}.onnx") != refused]


def test_what_loses_too_much_is_not_built(machine, prepared, tmp_path):
    copy = shutil.copytree(prepared, tmp_path / "p")
    document = json.loads((copy / "prepared.json").read_text())
    for candidate in document["candidates"]:
        candidate["refused"] = "" if candidate["name"] in ("fp16", "default") else "loses 3.00 points, over 0.5"
    (copy / "prepared.json").write_text(json.dumps(document))
    fast = quantised(prepared / "int8-all.onnx")
    done = machine.trtdet(*FINISH, copy, "-o", tmp_path / "b", "--json", version=VERSION, fast=fast).ok.json
    parts = {part["name"]: part for part in done["manifest"]["candidates"]}
    assert parts["int8-all"]["problem"] == "loses 3.00 points, over 0.5" and parts["int8-all"]["ms"] is None
    assert parts["fp16"]["shipped"] or parts["default"]["shipped"]


def test_the_budget_stops_after_the_first_candidate(machine, prepared, tmp_path):
    done = machine.trtdet(*FINISH, prepared, "-o", tmp_path / "b", "--budget", 1e-6, "--json", version=VERSION).ok.json
    timed = [part["name"] for part in done["manifest"]["candidates"] if part["ms"] is not None]
    assert timed == ["fp16"]
    assert "minutes were over" in done["manifest"]["candidates"][1]["problem"]


def test_another_major_version_is_refused(machine, prepared, tmp_path):
    done = machine.trtdet(*FINISH, prepared, "-o", tmp_path / "b", version="11.0.0")
    done.refused("was prepared for tensorrt 10.3", "11.0.0 is installed", "--for tensorrt-11.0.0")
    machine.trtdet(*FINISH, prepared, "-o", tmp_path / "b", version="10.0.0").refused("10.0.0 is installed")
    assert not (tmp_path / "b").exists()


def test_a_damaged_folder_is_refused(prepared, tmp_path):
    copy = shutil.copytree(prepared, tmp_path / "p")
    (copy / "weights.bin").write_bytes(b"\0" + (copy / "weights.bin").read_bytes()[1:] + b"\0")
    with pytest.raises(BundleError, match="'weights.bin' was altered"):
        finish(copy, tmp_path / "b")
    (copy / "weights.bin").unlink()
    with pytest.raises(BundleError, match=r"lacks 'weights.bin'; copy the whole folder"):
        finish(copy, tmp_path / "b")
    prepared_json = copy / "prepared.json"
    prepared_json.write_text(prepared_json.read_text().replace("weights.bin", "w" * 5000))
    with pytest.raises(BundleError, match="lacks 'w+") as caught:
        finish(copy, tmp_path / "b")
    assert len(str(caught.value)) < 1500
    with pytest.raises(BundleError, match="give the folder that 'trtdet prepare' wrote"):
        finish(tmp_path, tmp_path / "b")


def test_finishing_needs_the_library(prepared, tmp_path):
    with pytest.raises(BackendError, match="TensorRT"):
        finish(prepared, tmp_path / "b", FinishOptions())


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (None, "say what will build the engine"),
        ("tensorrt", "is no library with a version"),
        ("onnxruntime-1.20", "is no library with a version"),
        ("tensorrt-8.5", "8.5 is not supported; allowed: 8.6 to 11"),
        ("tensorrt-12.0", "12.0 is not supported"),
    ],
)
def test_a_target_that_is_none_is_refused_before_any_work(run, wide, calibration_images, tmp_path, target, words):
    command = ["prepare", wide, *QUICK, "--images", calibration_images, "-o", tmp_path / "p"]
    done = run(*command, *(["--for", target] if target else []))
    done.refused(words)
    assert not (tmp_path / "p").exists()


def test_annotations_without_their_images_are_refused(run, wide, calibration_images, tmp_path):
    command = ["prepare", wide, *QUICK, "--images", calibration_images, "--for", "tensorrt-10.3"]
    run(*command, "--annotations", tmp_path / "a.json", "-o", tmp_path / "p").refused("--val-images", "give both")
    assert not (tmp_path / "p").exists()


@pytest.mark.slow
def test_without_annotations_agreement_decides(run, wide, calibration_images, tmp_path):
    command = ["prepare", wide, *QUICK, "--images", calibration_images, "--for", "tensorrt-rtx-1.7"]
    done = run(*command, "--points", 0, "-o", tmp_path / "p", "--json").ok.json
    assert done["bound"] == "an agreement at most 0.5 points below that of the default plan"
    default = next(one for one in done["candidates"] if one["name"] == "default")
    for one in done["candidates"]:
        assert one["accuracy"]["figure"] == "agreement"
        below = 100 * (default["accuracy"]["value"] - one["accuracy"]["value"])
        assert bool(one["refused"]) == (below > 0.5 and one["name"] != "fp16")


@pytest.fixture(scope="module")
def built(machine, trained, calibration_images, drawn, tmp_path_factory):
    """Built where the GPU is, which runs every network with INT8 in it faster than the others."""
    place = tmp_path_factory.mktemp("built") / "b"
    command = ["build", trained, *QUICK, "--backend", "tensorrt", "--images", calibration_images]
    command += ["--val-images", drawn.images, "--annotations", drawn.annotations, "-o", place]
    settings = {"version": VERSION, "fast": "int8"}
    return command, settings, machine.trtdet(*command, "--json", **settings).ok.json


@pytest.mark.slow
def test_a_build_on_a_gpu_ships_the_fastest_candidate(built, machine):
    command, settings, done = built
    parts = {part["name"]: part for part in done["manifest"]["candidates"]}
    (shipped,) = [part for part in parts.values() if part["shipped"]]
    # Ratios of runs side by side decide: networks that take the same time have medians that differ by more.
    ratios = [part["ratio"] for part in parts.values() if part["ms"] is not None]
    assert len(ratios) > 2 and shipped["ratio"] <= 1.02 * min(ratios) < parts["fp16"]["ratio"] == 1
    assert {part["how"] for part in parts.values() if part["ms"] is not None} == {"measured"}
    guard = done["manifest"]["guard"]
    assert guard["how"] == "measured" and f"'{shipped['name']}' ships" in guard["reason"]
    bundle = Bundle(Path(command[-1]))
    assert quantised(bundle.model) > 0
    assert bundle.manifest.candidates and "histograms.npz" in bundle.manifest.files
    again = machine.trtdet(*command, **settings).ok
    assert "up to date" in again.out and shipped["name"] in again.out


@pytest.mark.slow
def test_a_demanded_speedup_ships_fp16_though_candidates_are_faster(built, machine, tmp_path):
    command, settings, _ = built
    command = [*command[:-1], tmp_path / "b", "--guard", 100, "--json"]
    done = machine.trtdet(*command, **settings).ok.json
    assert [part["name"] for part in done["manifest"]["candidates"] if part["shipped"]] == ["fp16"]
    assert done["manifest"]["guard"]["shipped"] == "fp16"
    assert "100 times as fast is asked for" in done["manifest"]["guard"]["reason"]


@pytest.mark.slow
def test_without_images_to_score_the_default_plan_is_built_and_compared(machine, wide, calibration_images, tmp_path):
    command = ["build", wide, *QUICK[:2], "--effort", "none", "--backend", "tensorrt", "-o", tmp_path / "b"]
    done = machine.trtdet(*command, "--images", calibration_images, "--json", version=VERSION).ok
    assert "every image calibrates, so that none can score candidates" in done.err
    assert not done.json["manifest"]["candidates"] and done.json["worth"]["latency"] is not None
