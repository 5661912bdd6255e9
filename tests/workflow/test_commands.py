"""Every command: what it writes, what it prints, what its JSON holds."""

import importlib
import json
import shutil

import cv2
import numpy as np
import onnx
import pytest
from models import CONVOLUTIONS, for_onnxruntime, judged_by
from standin.machine import Finished

from trtdet import build
from trtdet.backends import choose
from trtdet.building.bundle import BUILD_LOG
from trtdet.bundle import Bundle
from trtdet.calibration import Ranges
from trtdet.config import load_config
from trtdet.data import ImageStream, find_images
from trtdet.options import BuildOptions, CalibrationOptions, PlanOptions
from trtdet.options.fields import EFFORTS
from trtdet.passes import Options, load_model, rewrite
from trtdet.quantization import PrecisionPlan, insert_qdq, lint, place, quantized_joins
from trtdet.runtime.detector import Detector


def error_at_head(corrections) -> tuple[float, float]:
    """The error without and with the corrections, as the last sentence about them says."""
    before, after = corrections[-1].removeprefix("error at the head ").split(" -> ")
    return float(before), float(after.split()[0])


@pytest.fixture(scope="module")
def built(model, calibration_images, tmp_path_factory):
    """An INT8 bundle with an engine and every correction that holds."""
    calibration = CalibrationOptions(images=calibration_images, num_images=8)
    options = BuildOptions(sms=(86,), guard="off", calibration=calibration, plan=PlanOptions(int8_all=True))
    return build(model, load_config("shapes"), tmp_path_factory.mktemp("built") / "bundle", options)


@pytest.mark.tensorrt
def test_build_leaves_a_bundle_with_an_int8_engine(built):
    bundle = Bundle(built.bundle.path)
    manifest = bundle.manifest
    files = "model.engine int8.onnx portable.onnx plan.json audit.json build.log ranges.json calibration.cache"
    assert set(manifest.files) == {*files.split(), "histograms.npz"}
    assert bundle.engine.read_bytes()[:4] == b"vtrt"
    assert manifest.backend.name == "tensorrt-rtx"
    assert manifest.backend.sms == (86,)
    # Suppression in the graph would need a loop there, and an engine with a loop cannot be launched as a CUDA graph.
    assert manifest.nms.mode == "host"
    assert manifest.nms.reason.startswith("with --nms native the engine could not be launched as a CUDA graph (")
    convs = manifest.precision.int8
    assert convs == CONVOLUTIONS
    assert (manifest.audit.int8, manifest.audit.fp32, manifest.audit.float_by_backend) == (convs, 0, ())
    assert manifest.quantization.calibrator == "percentile"
    assert manifest.quantization.images.count == 8
    assert error_at_head(manifest.quantization.corrections)[1] < error_at_head(manifest.quantization.corrections)[0]
    assert manifest.input.preprocess.resize == "letterbox-topleft"
    assert lint(onnx.load(str(bundle.file("int8.onnx")))) == ()
    plan = PrecisionPlan.load(bundle.file("plan.json"))
    assert plan.counts()["int8"] == convs
    steps = [step for entry in plan.entries.values() for step in entry.corrections]
    assert {part for step in steps for part in step.name.split(", ")} == {"smooth", "round", "bias"}
    assert all(step.without >= 0 and step.error >= 0 for step in steps)
    cache = bundle.file("calibration.cache").read_text().splitlines()
    assert cache[0].startswith("TRT-")
    assert len(cache) == 1 + len(Ranges.load(bundle.file("ranges.json")).tensors)


@pytest.mark.tensorrt
def test_building_twice_gives_the_same_engine(built, run, model, calibration_images, tmp_path):
    common = ["--config", "shapes", "--images", calibration_images, "--num-images", 8, "--sm", 86, "--guard", "off"]
    done = run("build", model, *common, "--int8-all", "-o", tmp_path / "again", "--json").ok
    # The builder's log has times in it.
    again, before = (
        {name: digest for name, digest in files.items() if name != BUILD_LOG}
        for files in (done.json["manifest"]["files"], built.bundle.manifest.files)
    )
    assert again == before
    assert (tmp_path / "again" / "int8.onnx").read_bytes() == built.bundle.file("int8.onnx").read_bytes()
    assert done.json["manifest"]["content_hash"] == built.bundle.manifest.content_hash


@pytest.mark.tensorrt
def test_a_bundle_that_is_up_to_date_is_left_alone(run, model, calibration_images, tmp_path):
    command = ["build", model, "--config", "shapes", "--images", calibration_images, "--sm", 86, "-o", tmp_path / "b"]
    command += ["--effort", "none", "--guard", "off", "--int8-all"]
    assert run(*command).code == 0
    before = (tmp_path / "b" / "manifest.json").stat()
    again = run(*command, "--json")
    assert again.json["up_to_date"] is True
    after = (tmp_path / "b" / "manifest.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert "up to date" in run(*command).out
    # Another rule starts from the histograms of the bundle it replaces.
    other = run(*command, "--calib", "minmax", "--json")
    assert other.json["up_to_date"] is False
    assert "calibrating" not in other.err
    assert other.json["manifest"]["quantization"]["calibrator"] == "minmax"


@pytest.mark.tensorrt
def test_audit_estimates_the_time_on_a_gpu_that_is_not_here(built, run):
    done = run("audit", built.bundle.path, "--gpu", "rtx-4090", "--batch", "1", "8", "--json")
    assert "estimated, not measured: RTX 4090 at its published rates" in done.err
    once, often = done.json["estimate"]
    assert (once["gpu"], once["batch"], often["batch"], once["measured"]) == ("RTX 4090", 1, 8, False)
    assert once["kernels"] == sum(layer["bytes"] > 0 for layer in often["layers"])
    assert once["ms"] < often["ms"] < 8 * once["ms"]
    convs = [name for layer in once["layers"] if layer["operations"] for name in layer["about"]]
    assert len(set(convs)) == CONVOLUTIONS
    for name in ("list", "GTX 1080"):
        run("audit", built.bundle.path, "--gpu", name).refused(
            f"no figures are known of GPU '{name}'; known are T4, L4, A10, "
        )
    run("audit", built.bundle.path, "--batch", 8).refused("--batch is of the estimate; give --gpu as well")


@pytest.mark.tensorrt
def test_audit_lists_every_convolution(built, run):
    found = run("audit", built.bundle.path, "--json").json
    assert found["int8"] == built.bundle.manifest.precision.int8
    convs = [layer for layer in found["layers"] if layer["input"] == "Int8" and layer["weights"] == "Int8"]
    assert (len(convs), found["departures"]) == (found["int8"], [])
    assert {"name", "type", "input", "weights", "output", "onnx"} <= set(found["layers"][0])


@pytest.mark.tensorrt
def test_the_last_lines_say_what_was_asked_what_was_done_and_what_is_next(run, model, tmp_path):
    done = run("build", model, "--config", "shapes", "--fp32", "--nms", "host", "-o", tmp_path / "b")
    asked, wrote, layers, cost, following = done.out.splitlines()[-5:]
    assert asked == "asked   --fp32 --nms host"
    assert (
        wrote.startswith(f"done    wrote {tmp_path / 'b'}: engine ") and "tensorrt-rtx" in wrote and "NMS host" in wrote
    )
    assert layers.startswith("layers  0 convs INT8")
    assert cost == "cost    not compared with FP16"
    assert following.startswith(f"next    trtdet eval {tmp_path / 'b'} --images DIR --annotations JSON --against ")


def test_eval_of_model_and_bundle_agree_where_both_are_float(bundles, run, trained, scored):
    host = run("eval", trained, "--config", "shapes", *scored, "--json").json
    native = run("eval", trained, "--config", "shapes", "--nms", "native", *scored, "--json").json
    assert (host["nms"], native["nms"]) == ("host", "native")
    assert host["map"] > 0.3
    int8, fp32 = (run("eval", bundle, *scored, "--json").json for bundle in bundles)
    for key in ("map", "map50", "map75"):
        assert native[key] == pytest.approx(host[key], abs=5e-4)
        assert fp32[key] == pytest.approx(native[key], abs=1e-9)
    assert {"map_small", "map_medium", "map_large", "images", "detections", "ms_per_image"} <= set(host)
    # INT8 costs little.
    assert host["map"] - int8["map"] < 0.05
    assert int8["map"] != host["map"]
    manifest = Bundle(bundles[0]).manifest
    assert (manifest.audit, "model.engine" in manifest.files) == (None, False)


@pytest.fixture(scope="module")
def bundles(trained, calibration_images, tmp_path_factory):
    """An INT8 bundle of the shipped detector and an FP32 one."""
    folder, config = tmp_path_factory.mktemp("bundles"), load_config("shapes")
    int8 = for_onnxruntime(effort=",".join(EFFORTS["quick"]) or "none", images=calibration_images, num_images=6)
    build(trained, config, folder / "int8", int8)
    build(trained, config, folder / "fp32", BuildOptions(precision="fp32", backend="onnxruntime"))
    return folder / "int8", folder / "fp32"


@pytest.fixture
def correct(run, model, calibration_images, tmp_path):
    """Builds for onnxruntime with an effort."""

    def call(effort: str, place: str = "b", images: int = 4) -> Finished:
        command = ["build", model, "--config", "shapes", "--images", calibration_images, "--num-images", images]
        command += ["--int8-all", "--backend", "onnxruntime", "--json", "-o", tmp_path / place]
        return run(*command, "--effort", effort).ok

    return call


def test_without_corrections_the_textbook_form_is_written(correct, model, tmp_path):
    plain = correct("none")
    assert "corrected:" not in plain.err
    assert plain.json["manifest"]["quantization"]["corrections"] == []
    bundle = Bundle(tmp_path / "b")
    plan = PrecisionPlan.load(bundle.file("plan.json"))
    assert [entry.corrections for entry in plan.entries.values()] == [()] * len(plan.entries)
    # The textbook, step by step: the rewritten model, the rule's thresholds, a pair for each.
    most = choose("onnxruntime").capabilities.max_topk
    options = Options(load_config("shapes"), bundle.manifest.nms.mode, None, most)
    rewritten = rewrite(load_model(model), options).model
    int8 = quantized_joins(insert_qdq(rewritten, place(rewritten), Ranges.load(bundle.file("ranges.json"))))
    assert bundle.file("int8.onnx").read_bytes() == int8.SerializeToString(deterministic=True)


def test_some_corrections_and_what_is_up_to_date(correct, tmp_path):
    some = correct("smooth,bias")
    manifest = some.json["manifest"]
    lines = manifest["quantization"]["corrections"]
    assert [line.split(":")[0] for line in lines[:2]] == ["smooth", "bias"]
    before, after = error_at_head(lines)
    assert after <= before
    assert f"corrected: {'; '.join(lines)}" in some.err
    plan = PrecisionPlan.load(tmp_path / "b" / "plan.json")
    assert {step.name for entry in plan.entries.values() for step in entry.corrections} == {"smooth", "bias"}
    assert plan.counts()["int8"] == len(plan.entries)
    # The order in which they are named says nothing.
    assert correct("bias,smooth").json["up_to_date"] is True
    other = correct("none")
    assert other.json["up_to_date"] is False
    assert "calibrating" not in other.err
    assert other.json["manifest"]["content_hash"] != manifest["content_hash"]
    assert other.json["manifest"]["files"]["int8.onnx"] != manifest["files"]["int8.onnx"]
    assert correct("none").json["up_to_date"] is True


def test_corrections_that_do_not_hold_are_not_written(correct, monkeypatch):
    module = importlib.import_module("trtdet.quantization.corrections.gate")
    monkeypatch.setattr(module, "head_errors", judged_by(0.1, 0.2, 0.3, 0.4, images=1))
    done = correct("bias", images=2)
    few, warning = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert "on 1 of the 1 images that corrections are judged on: too few" in few
    assert "0.1000 -> 0.2000 on 1 images held back, higher on 1 of 1" in warning
    assert "50 % sure; detections agree by 88.9 % before, 77.8 % after: the plain rule 'percentile' stands" in warning
    manifest = done.json["manifest"]
    (line,) = manifest["quantization"]["corrections"]
    assert line.startswith("none kept: error at the head 0.1000 -> 0.2000")
    assert correct("none", "plain", images=2).json["manifest"]["files"] == manifest["files"]


def test_eval_against_a_model_and_against_its_bundle_say_the_same(bundles, run, trained, scored):
    int8, fp32 = bundles
    data = [*scored, "--resamples", 200]
    done = run("eval", int8, "--against", trained, *data, "--json").ok
    assert "warning" not in done.err
    against = done.json["against"]
    assert against["difference"] == pytest.approx(done.json["map"] - against["map"], abs=1e-12)
    assert against["low"] < against["difference"] < against["high"]
    assert (against["images"], against["resamples"], against["confidence"]) == (16, 200, 0.9)
    assert against["nms"] == done.json["nms"] == "onnx"
    bundle = run("eval", int8, "--against", fp32, *data, "--json").json["against"]
    for key in ("map", "difference", "low", "high"):
        assert bundle[key] == pytest.approx(against[key], abs=1e-9)
    lines = run("eval", int8, "--against", fp32, *data).out.splitlines()
    assert lines[-1].startswith(f"against {fp32}/fp32.onnx (mAP {100 * against['map']:.2f}): mAP ")
    assert "paired bootstrap over 16 images, 200 resamples): " + against["verdict"] in lines[-1]
    assert lines[-2].startswith(f"agreement: AP {100 * against['agreement']['ap']:.2f} (90 % interval ")
    (at,) = [number for number, line in enumerate(lines) if line.startswith("16 images")]
    assert lines[at + 2].startswith("thresholds with the reference's precision (against the annotations, IoU 0.50)")


def test_eval_against_a_reference_needs_no_annotations(bundles, run, drawn, trained, tmp_path):
    int8, fp32 = bundles
    data = ["--images", drawn.images, "--resamples", 200]
    annotated = run("eval", int8, "--against", fp32, *data, "--annotations", drawn.annotations, "--json").json
    done = run("eval", int8, "--against", trained, *data, "--json").ok
    result, against = done.json, done.json["against"]
    assert (result["map"], result["images"], result["detections"]) == (None, 16, annotated["detections"])
    # The images are the same and so are the draws.
    for key in ("ap", "low", "high", "map", "boxes", "per_class"):
        assert against["agreement"][key] == pytest.approx(annotated["against"]["agreement"][key], abs=1e-9)
    assert 0.5 < against["agreement"]["low"] < against["agreement"]["ap"] < against["agreement"]["high"] <= 1
    assert "difference" not in against
    shifts = [found["against"]["score_shift"] for found in (result, annotated)]
    assert [shift["basis"] for shift in shifts] == ["detections", "precision"]
    assert shifts[0]["overall"][0]["threshold"] == pytest.approx(0.25, abs=0.1)
    assert shifts[0]["score_ratio"] == pytest.approx(shifts[1]["score_ratio"])
    said = run("eval", int8, "--against", fp32, *data, "--agreement-threshold", 0.4).out.splitlines()
    assert said[0].startswith("16 images")
    assert said[-1].startswith(f"against {fp32}/fp32.onnx: agreement: AP ")
    assert said[-1].endswith("detections with a score of at least 0.4")
    assert said[2].startswith("thresholds with the reference's number of detections (precision needs annotations)")


def test_eval_without_annotations_leaves_out_what_cannot_be_read(run, model, drawn, tmp_path):
    folder = tmp_path / "images"
    shutil.copytree(drawn.images, folder)
    (folder / "broken.png").write_bytes(b"no picture")
    command = ["eval", model, "--config", "shapes", "--against", model, "--images", folder, "--json"]
    done = run(*command).ok
    assert (done.json["images"], done.json["against"]["agreement"]["ap"]) == (16, pytest.approx(1))
    (warning,) = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert "broken.png" in warning


def test_eval_says_why_nothing_can_be_compared(run, trained, drawn, scored, tmp_path):
    command = ["eval", trained, "--config", "shapes"]
    run(*command, "--images", drawn.images).refused("needs --annotations to score with, or --against")
    blank, empty = tmp_path / "blank", tmp_path / "empty"
    blank.mkdir()
    empty.mkdir()
    cv2.imwrite(str(blank / "a.png"), np.full((64, 64, 3), 114, np.uint8))
    for folder, words in (
        (blank, "cannot be compared without --annotations: the reference finds nothing with a score of at least"),
        (empty, "has no images"),
    ):
        run(*command, "--images", folder, "--against", trained).refused(words)
    # With annotations mAP stands, and the reason beside it.
    options = ["--against", trained, "--agreement-threshold", 0.999, "--json"]
    against = run(*command, *scored, *options).json["against"]
    assert against["difference"] == 0
    assert against["agreement"]["ap"] is None
    assert "nothing with a score of at least 0.999" in against["agreement"]["problem"]


def test_eval_of_a_model_against_itself_shows_no_loss(run, model, labelled):
    data = [*labelled, "--json"]
    done = run("eval", model, "--config", "shapes", "--against", model, "--set", "nms.score_threshold=0.01", *data).json
    assert done["against"]["map"] == done["map"]
    assert [done["against"][key] for key in ("difference", "low", "high")] == [0, 0, 0]
    assert done["against"]["verdict"] == "no loss shown"
    assert "against" not in run("eval", model, "--config", "shapes", *data).json


def test_eval_reads_a_model_as_the_bundle_that_it_is_compared_with(run, model, labelled, tmp_path):
    command = ["--config", "shapes", "--fp32", "--backend", "onnxruntime", "--nms", "host"]
    command += ["--set", "nms.iou_threshold=0.5"]
    assert run("build", model, *command, "-o", tmp_path / "b").code == 0
    done = run("eval", tmp_path / "b", "--against", model, *labelled, "--json")
    assert "warning" not in done.err
    assert (done.json["against"]["nms"], done.json["against"]["difference"]) == ("host", 0)


def test_eval_warns_of_thresholds_that_differ(bundles, run, trained, scored):
    options = ["--config", "shapes", "--set", "nms.iou_threshold=0.5", "--against", bundles[1], "--json"]
    done = run("eval", trained, *options, *scored).ok
    (warning,) = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert warning.endswith("iou_threshold 0.5 against 0.65")


def test_calibrate_writes_ranges_histograms_and_cache(run, model, images, tmp_path):
    command = ["calibrate", model, "--config", "shapes", "--json", "-o"]
    result = run(*command, tmp_path / "ranges.json", "--images", images).ok.json
    assert result["images"] == 20
    assert result["seconds"] > 0
    assert result["peak_rss_mb"] > 0
    assert result["tensors"] == len(Ranges.load(tmp_path / "ranges.json").tensors)
    histograms = f"calibration.histograms={tmp_path / 'ranges.npz'}"
    other = run(*command, tmp_path / "kl.json", "--set", histograms, "--calib", "entropy")
    assert other.json["reused"] is True
    assert Ranges.load(tmp_path / "kl.json").rule == "entropy"


def test_a_list_of_names_selects_from_its_root(run, model, calibration_images, tmp_path):
    names = sorted(path.name for path in calibration_images.iterdir())[:8]
    listing = tmp_path / "list.txt"
    listing.write_text("# eight of them\n" + "\n".join(names) + "\n")
    command = ["calibrate", model, "--config", "shapes", "--images", listing, "-o", tmp_path / "r.json", "--json"]
    assert run(*command, "--set", f"calibration.root={calibration_images}").json["images"] == 8


def test_predict_writes_pictures_and_json(run, model, validation, tmp_path):
    pictures = sorted(validation.images.iterdir())[:2]
    done = run("predict", model, *pictures, "--config", "shapes", "-o", tmp_path / "out", "--json").ok
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".jpg", ".jsonl"}
    assert (tmp_path / "out" / "detections.jsonl").read_text() == done.out
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [row["image"] for row in rows] == [str(path) for path in pictures]
    detections = [detection for row in rows for detection in row["detections"]]
    assert detections
    assert all(detection["score"] >= 0.25 and len(detection["box"]) == 4 for detection in detections)


def test_doctor_names_the_pip_line_of_what_is_missing(run):
    done = run("doctor", "--json").ok
    assert {check["name"] for check in done.json["backends"]} == {"tensorrt", "tensorrt-rtx", "onnxruntime"}
    for check in [*done.json["backends"], *done.json["extras"]]:
        assert check["ok"] or "pip install" in check["fix"] or "build on one that has" in check["fix"], check
    assert "onnxruntime" in run("doctor").out


@pytest.mark.tensorrt
def test_a_dynamic_batch_is_frozen_unless_a_profile_is_given(run, dynamic, images, tmp_path):
    command = ["build", dynamic, "--config", "shapes", "--images", images, "--num-images", 4, "--sm", 86, "--json"]
    command += ["--int8-all"]
    frozen = run(*command, "--effort", "none", "--guard", "off", "-o", tmp_path / "one").json["manifest"]
    assert frozen["input"]["shape"] == {"min": [1, 3, 256, 256], "opt": [1, 3, 256, 256], "max": [1, 3, 256, 256]}
    opened = run(*command, "--effort", "smooth,bias", "-o", tmp_path / "many", "--batch", "1:4:8").ok
    manifest = opened.json["manifest"]
    assert manifest["quantization"]["corrections"]
    assert [manifest["input"]["shape"][key][0] for key in ("min", "opt", "max")] == [1, 4, 8]
    assert manifest["audit"]["int8"] == manifest["precision"]["int8"]
    estimate = opened.json["worth"]["estimate"]
    assert (estimate["batch"], estimate["gpu"]) == (4, "A10")
    # Four images move more than one does, which is what the layers of an open batch are listed for.
    moved = run("audit", tmp_path / "many", "--gpu", "A10", "--batch", 1, 4, "--json").json["estimate"]
    assert moved[0]["bytes"] < moved[1]["bytes"] == estimate["int8"]["bytes"]


def test_a_batch_computes_what_its_images_compute_alone(dynamic, images):
    paths = find_images(images)[:3]
    config = load_config("shapes")
    (batch,) = ImageStream(paths, config.input, batch_size=3)
    detector = Detector.open(dynamic, config, "native")
    together = detector(batch.images)
    for row in range(3):
        alone = detector(batch.images[row : row + 1])
        assert together.num_dets[row] == alone.num_dets[0]
        np.testing.assert_allclose(together.scores[row], alone.scores[0], atol=1e-5)
        np.testing.assert_array_equal(together.classes[row], alone.classes[0])
