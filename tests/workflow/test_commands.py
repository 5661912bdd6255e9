"""Every command: what it writes, what it prints, what its JSON holds."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil

import cv2
import numpy as np
import onnx
import pytest
from models import CONVOLUTIONS, judged_by

from trtdet.backends import choose
from trtdet.bundle import Bundle
from trtdet.calibration import Ranges
from trtdet.config import load_config
from trtdet.passes import Options, load_model, rewrite
from trtdet.pipeline.stages.bundles import BUILD_LOG
from trtdet.quantization import PrecisionPlan, insert_qdq, lint, place, quantized_joins

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed: pip install 'trtdet[rtx]'"
)


def error_at_head(corrections) -> tuple[float, float]:
    """The error without and with the corrections, as the last sentence about them says."""
    before, after = corrections[-1].removeprefix("error at the head ").split(" -> ")
    return float(before), float(after.split()[0])


@pytest.fixture(scope="module")
def built(model, calibration_images, tmp_path_factory):
    """An INT8 bundle with an engine and every correction that holds."""
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed: pip install 'trtdet[rtx]'")
    from trtdet import BuildOptions, CalibrationOptions, build

    calibration = CalibrationOptions(images=calibration_images, num_images=8)
    options = BuildOptions(calibration=calibration, sms=(86,), measure=False, int8_all=True)
    return build(model, load_config("shapes"), tmp_path_factory.mktemp("built") / "bundle", options)


@pytest.mark.tensorrt
def test_build_leaves_a_bundle_with_an_int8_engine(built):
    bundle = Bundle(built.bundle.path)
    manifest = bundle.manifest
    assert set(manifest.files) == {
        "model.engine",
        "int8.onnx",
        "portable.onnx",
        "plan.json",
        "audit.json",
        "build.log",
        "ranges.json",
        "calibration.cache",
        "histograms.npz",
    }
    assert bundle.engine is not None
    assert bundle.engine.read_bytes()[:4] == b"vtrt"
    assert manifest.backend.name == "tensorrt-rtx"
    assert manifest.backend.sms == (86,)
    # Suppression in the graph would need a loop there, and an engine with a loop cannot be launched as a CUDA graph.
    assert manifest.nms.mode == "host"
    assert manifest.nms.reason.startswith("with --nms native the engine could not be launched as a CUDA graph (")
    convs = manifest.precision.int8
    assert convs == CONVOLUTIONS
    assert manifest.audit is not None
    assert (manifest.audit.int8, manifest.audit.fp32, manifest.audit.float_by_backend) == (convs, 0, ())
    assert manifest.quantization.calibrator == "percentile"
    assert manifest.quantization.images is not None
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
    common = ["--config", "shapes", "--images", calibration_images, "--num-images", 8, "--sm", 86, "--no-measure"]
    common += ["--int8-all"]
    done = run("build", model, *common, "-o", tmp_path / "again", "--json")
    assert done.code == 0, done.err
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
    command += ["--correct", "none", "--no-measure", "--int8-all"]
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


@pytest.mark.tensorrt
@pytest.mark.parametrize("name", ["list", "GTX 1080"])
def test_an_unknown_gpu_is_refused_with_the_known(built, run, name):
    done = run("audit", built.bundle.path, "--gpu", name)
    assert done.code == 1
    assert f"no figures are known of GPU '{name}'; known are T4, L4, A10, " in done.err


@pytest.mark.tensorrt
def test_audit_takes_the_engine_file_apart(built, run):
    done = run("audit", built.bundle.path, "--file", "--json")
    found = done.json["engine_file"]
    assert found["bytes"] == built.bundle.engine.stat().st_size
    assert found["kernels"] > 0 and 0 < found["source"] + found["records"] + found["zeros"] < found["bytes"]
    assert f"CUDA source of {found['kernels']} generated kernels" in done.err


@pytest.mark.tensorrt
def test_batches_of_an_estimate_need_a_gpu(built, run):
    assert "--batch is of the estimate; give --gpu as well" in run("audit", built.bundle.path, "--batch", "8").err


@pytest.mark.tensorrt
def test_audit_lists_every_convolution_as_built(built, run):
    done = run("audit", built.bundle.path, "--json")
    assert done.code == 0
    found = done.json
    assert found["int8"] == built.bundle.manifest.precision.int8
    convs = [layer for layer in found["layers"] if layer["input"] == "Int8" and layer["weights"] == "Int8"]
    assert len(convs) == found["int8"]
    assert found["departures"] == []
    assert {"name", "type", "input", "weights", "output", "onnx"} <= set(found["layers"][0])


@pytest.mark.tensorrt
def test_the_last_line_says_what_was_asked_and_what_was_done(run, model, tmp_path):
    done = run("build", model, "--config", "shapes", "--fp32", "--nms", "host", "-o", tmp_path / "b")
    last = done.out.splitlines()[-1]
    assert "tensorrt-rtx" in last
    assert "NMS host" in last
    assert "0 convs INT8" in last
    assert "asked --backend auto --nms host --silu auto --fp32" in last


def test_eval_of_model_and_bundle_agree_where_both_are_float(run, trained, drawn, tmp_path):
    model = trained
    data = ["--images", drawn.images, "--annotations", drawn.annotations, "--json"]
    host = run("eval", model, "--config", "shapes", *data).json
    native = run("eval", model, "--config", "shapes", "--nms", "native", *data).json
    assert (host["nms"], native["nms"]) == ("host", "native")
    assert host["map"] > 0.3
    build = run(
        "build", model, "--config", "shapes", "--fp32", "--backend", "onnxruntime", "-o", tmp_path / "b", "--json"
    )
    bundle = run("eval", tmp_path / "b", *data).json
    assert build.code == 0
    for key in ("map", "map50", "map75"):
        assert native[key] == pytest.approx(host[key], abs=5e-4)
        assert bundle[key] == pytest.approx(native[key], abs=1e-9)
    assert {"map_small", "map_medium", "map_large", "images", "detections", "ms_per_image"} <= set(host)


@pytest.fixture(scope="module")
def bundles(trained, calibration_images, tmp_path_factory):
    """An INT8 bundle of the shipped detector and an FP32 one."""
    from trtdet import BuildOptions, CalibrationOptions, build
    from trtdet.quantization import EFFORTS

    folder, config = tmp_path_factory.mktemp("bundles"), load_config("shapes")
    calibration = CalibrationOptions(images=calibration_images, num_images=6)
    int8 = BuildOptions(calibration=calibration, backend="onnxruntime", correct=EFFORTS["quick"])
    build(trained, config, folder / "int8", int8)
    build(trained, config, folder / "fp32", BuildOptions("fp32", backend="onnxruntime"))
    return folder / "int8", folder / "fp32"


def test_int8_costs_little_on_the_shipped_detector(bundles, run, trained, drawn):
    int8, _ = bundles
    manifest = Bundle(int8).manifest
    assert manifest.audit is None
    assert "trained.engine" not in manifest.files
    data = ["--images", drawn.images, "--annotations", drawn.annotations, "--json"]
    fp32 = run("eval", trained, "--config", "shapes", *data).json
    corrected = run("eval", int8, *data).json
    assert fp32["map"] - corrected["map"] < 0.05
    assert corrected["map"] != fp32["map"]


def test_without_corrections_the_textbook_form_is_written(run, model, calibration_images, tmp_path):
    command = ["build", model, "--config", "shapes", "--images", calibration_images, "--num-images", 4, "--int8-all"]
    command += ["--backend", "onnxruntime", "--json", "-o", tmp_path / "b"]
    plain = run(*command, "--correct", "none")
    assert plain.code == 0, plain.err
    assert "corrected:" not in plain.err
    manifest = plain.json["manifest"]
    assert manifest["quantization"]["corrections"] == []
    bundle = Bundle(tmp_path / "b")
    plan = PrecisionPlan.load(bundle.file("plan.json"))
    assert [entry.corrections for entry in plan.entries.values()] == [()] * len(plan.entries)
    # The textbook, step by step: the rewritten model, the rule's thresholds, a pair for each.
    most = choose("onnxruntime").capabilities.max_topk
    options = Options(load_config("shapes"), bundle.manifest.nms.mode, None, most)
    rewritten = rewrite(load_model(model), options).model
    int8 = quantized_joins(insert_qdq(rewritten, place(rewritten), Ranges.load(bundle.file("ranges.json"))))
    assert bundle.file("int8.onnx").read_bytes() == int8.SerializeToString(deterministic=True)


def test_some_corrections_and_what_is_up_to_date(run, model, calibration_images, tmp_path):
    command = ["build", model, "--config", "shapes", "--images", calibration_images, "--num-images", 4, "--int8-all"]
    command += ["--backend", "onnxruntime", "-o", tmp_path / "b", "--json", "--correct"]
    some = run(*command, "smooth,bias")
    assert some.code == 0, some.err
    said = some.json["manifest"]["quantization"]["corrections"]
    assert [one.split(":")[0] for one in said[:2]] == ["smooth", "bias"]
    before, after = error_at_head(said)
    assert after <= before
    assert f"corrected: {'; '.join(said)}" in some.err
    plan = PrecisionPlan.load(tmp_path / "b" / "plan.json")
    assert {step.name for entry in plan.entries.values() for step in entry.corrections} == {"smooth", "bias"}
    assert plan.counts()["int8"] == len(plan.entries)
    # The order in which they are named says nothing.
    assert run(*command, "bias,smooth").json["up_to_date"] is True
    other = run(*command, "none")
    assert other.json["up_to_date"] is False
    assert "calibrating" not in other.err
    assert other.json["manifest"]["content_hash"] != some.json["manifest"]["content_hash"]
    assert other.json["manifest"]["files"]["int8.onnx"] != some.json["manifest"]["files"]["int8.onnx"]
    assert run(*command, "none").json["up_to_date"] is True


def test_corrections_that_do_not_hold_are_not_written(run, model, calibration_images, tmp_path, monkeypatch):
    module = importlib.import_module("trtdet.quantization.corrections.gate")
    monkeypatch.setattr(module, "head_errors", judged_by(0.1, 0.2, 0.3, 0.4, images=1))
    command = ["build", model, "--config", "shapes", "--images", calibration_images, "--num-images", 2, "--int8-all"]
    command += ["--backend", "onnxruntime", "--json", "--correct"]
    done = run(*command, "bias", "-o", tmp_path / "b")
    assert done.code == 0, done.err
    few, warning = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert "on 1 of the 1 images that corrections are judged on: too few" in few
    assert "0.1000 -> 0.2000 on 1 images held back, higher on 1 of 1" in warning
    assert "50 % sure; detections agree by 88.9 % before, 77.8 % after: the plain rule 'percentile' stands" in warning
    (said,) = done.json["manifest"]["quantization"]["corrections"]
    assert said.startswith("none kept: error at the head 0.1000 -> 0.2000")
    plain = run(*command, "none", "-o", tmp_path / "plain").json["manifest"]["files"]
    assert done.json["manifest"]["files"] == plain


def test_the_best_rule_of_each_tensor(run, model, calibration_images, tmp_path):
    common = ["--config", "shapes", "--images", calibration_images, "--num-images", 4, "--calib", "auto", "--json"]
    found = run("calibrate", model, *common, "-o", tmp_path / "ranges.json")
    assert found.code == 0, found.err
    ranges = Ranges.load(tmp_path / "ranges.json")
    assert found.json["rule"] == ranges.rule
    assert ranges.rule == ("percentile" if "the plain rule 'percentile' stands" in found.err else "auto")
    more = ["--backend", "onnxruntime", "--correct", "none", "--int8-all", "-o", tmp_path / "b"]
    done = run("build", model, *common, *more)
    assert done.code == 0, done.err
    quantization = done.json["manifest"]["quantization"]
    if ranges.rule == "auto":
        assert quantization["calibrator"] == "auto"
        assert quantization["percentile"] is None
        assert quantization["corrections"][0].startswith("rules: ")
    else:
        assert quantization["calibrator"] == "percentile"
        assert quantization["corrections"][0].startswith("none kept: ")
    assert Ranges.load(tmp_path / "b" / "ranges.json") == ranges


def test_eval_against_a_model_and_against_its_bundle_say_the_same(bundles, run, trained, drawn):
    int8, fp32 = bundles
    data = ["--images", drawn.images, "--annotations", drawn.annotations, "--resamples", 200]
    done = run("eval", int8, "--against", trained, *data, "--json")
    assert done.code == 0, done.err
    assert "warning" not in done.err
    against = done.json["against"]
    assert against["difference"] == pytest.approx(done.json["map"] - against["map"], abs=1e-12)
    assert against["low"] < against["difference"] < against["high"]
    assert (against["images"], against["resamples"], against["confidence"]) == (16, 200, 0.9)
    assert against["nms"] == done.json["nms"] == "onnx"
    bundle = run("eval", int8, "--against", fp32, *data, "--json").json["against"]
    for key in ("map", "difference", "low", "high"):
        assert bundle[key] == pytest.approx(against[key], abs=1e-9)
    said = run("eval", int8, "--against", fp32, *data).out.splitlines()
    assert said[-1].startswith(f"against {fp32}/fp32.onnx (mAP {100 * against['map']:.2f}): mAP ")
    assert "paired bootstrap over 16 images, 200 resamples): " + against["verdict"] in said[-1]
    assert said[-2].startswith(f"agreement: AP {100 * against['agreement']['ap']:.2f} (90 % interval ")
    (at,) = [number for number, line in enumerate(said) if line.startswith("16 images")]
    assert said[at + 2].startswith("thresholds with the reference's precision (against the annotations, IoU 0.50)")


def test_eval_against_a_reference_needs_no_annotations(bundles, run, drawn, trained, tmp_path):
    int8, fp32 = bundles
    data = ["--images", drawn.images, "--resamples", 200]
    annotated = run("eval", int8, "--against", fp32, *data, "--annotations", drawn.annotations, "--json").json
    done = run("eval", int8, "--against", trained, *data, "--json")
    assert done.code == 0, done.err
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


def test_eval_says_how_far_the_evaluator_itself_spreads(bundles, run, drawn):
    int8, fp32 = bundles
    data = ["--images", drawn.images, "--against", fp32, "--resamples", 100, "--evaluator-spread"]
    done = run("eval", int8, *data, "--annotations", drawn.annotations, "--json").json
    spread = done["against"]["evaluator_spread"]
    assert abs(spread["difference"]) < 0.1
    assert 0.8 < spread["agreement"]["ap"] <= 1
    plain = run("eval", int8, *data)
    assert plain.code == 0, plain.err
    (line,) = [line for line in plain.out.splitlines() if line.startswith("evaluator's spread")]
    assert f"optimisations: agreement: AP {100 * spread['agreement']['ap']:.2f}" in line, "without annotations, no mAP"
    alone = run("eval", int8, "--images", drawn.images, "--annotations", drawn.annotations, "--evaluator-spread")
    assert (alone.code, "give --against as well" in alone.err) == (1, True)


def test_eval_without_annotations_leaves_out_what_cannot_be_read(run, model, drawn, tmp_path):
    folder = tmp_path / "images"
    shutil.copytree(drawn.images, folder)
    (folder / "broken.png").write_bytes(b"no picture")
    command = ["eval", model, "--config", "shapes", "--against", model, "--images", folder, "--json"]
    done = run(*command)
    assert done.code == 0, done.err
    assert (done.json["images"], done.json["against"]["agreement"]["ap"]) == (16, pytest.approx(1))
    (warning,) = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert "broken.png" in warning


def test_eval_says_why_nothing_can_be_compared(run, model, trained, drawn, tmp_path):
    shapes = ["--config", "shapes", "--images", drawn.images]
    alone = run("eval", trained, *shapes)
    assert (alone.code, "needs --annotations to score with, or --against" in alone.err) == (1, True)
    blank = tmp_path / "blank"
    blank.mkdir()
    cv2.imwrite(str(blank / "a.png"), np.full((64, 64, 3), 114, np.uint8))
    nothing = run("eval", trained, "--config", "shapes", "--images", blank, "--against", trained)
    assert nothing.code == 1
    assert (
        "cannot be compared without --annotations: the reference finds nothing with a score of at least" in nothing.err
    )
    (tmp_path / "empty").mkdir()
    empty = run("eval", trained, "--config", "shapes", "--images", tmp_path / "empty", "--against", trained)
    assert (empty.code, "has no images" in empty.err) == (1, True)
    # With annotations mAP stands, and the reason beside it.
    data = [*shapes, "--annotations", drawn.annotations, "--against", trained, "--agreement-threshold", 0.999]
    scored = run("eval", trained, *data, "--json").json["against"]
    assert scored["difference"] == 0
    assert scored["agreement"]["ap"] is None
    assert "nothing with a score of at least 0.999" in scored["agreement"]["problem"]


def test_eval_of_a_model_against_itself_shows_no_loss(run, model, validation):
    data = ["--images", validation.images, "--annotations", validation.annotations, "--json"]
    done = run("eval", model, "--config", "shapes", "--against", model, "--score-threshold", 0.01, *data).json
    assert done["against"]["map"] == done["map"]
    assert [done["against"][key] for key in ("difference", "low", "high")] == [0, 0, 0]
    assert done["against"]["verdict"] == "no loss shown"
    assert "against" not in run("eval", model, "--config", "shapes", *data).json


def test_eval_reads_a_model_as_the_bundle_that_it_is_compared_with(run, model, validation, tmp_path):
    command = ["--config", "shapes", "--fp32", "--backend", "onnxruntime", "--nms", "host", "--iou-threshold", 0.5]
    assert run("build", model, *command, "-o", tmp_path / "b").code == 0
    data = ["--images", validation.images, "--annotations", validation.annotations, "--json"]
    done = run("eval", tmp_path / "b", "--against", model, *data)
    assert "warning" not in done.err
    assert (done.json["against"]["nms"], done.json["against"]["difference"]) == ("host", 0)


def test_eval_warns_of_thresholds_that_differ(bundles, run, trained, drawn):
    data = ["--images", drawn.images, "--annotations", drawn.annotations, "--json"]
    done = run("eval", trained, "--config", "shapes", "--iou-threshold", 0.5, "--against", bundles[1], *data)
    assert done.code == 0, done.err
    (warning,) = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert warning.endswith("iou_threshold 0.5 against 0.65")


def test_calibrate_writes_ranges_histograms_and_cache(run, model, images, tmp_path):
    done = run("calibrate", model, "--config", "shapes", "--images", images, "-o", tmp_path / "ranges.json", "--json")
    assert done.code == 0, done.err
    result = done.json
    assert result["images"] == 20
    assert result["seconds"] > 0
    assert result["peak_rss_mb"] > 0
    assert result["tensors"] == len(Ranges.load(tmp_path / "ranges.json").tensors)
    again = ["--histograms", tmp_path / "ranges.npz", "-o", tmp_path / "kl.json", "--calib", "entropy", "--json"]
    other = run("calibrate", model, "--config", "shapes", *again)
    assert other.json["reused"] is True
    assert Ranges.load(tmp_path / "kl.json").rule == "entropy"


def test_a_list_of_names_selects_from_its_root(run, model, calibration_images, tmp_path):
    names = sorted(path.name for path in calibration_images.iterdir())[:8]
    listing = tmp_path / "list.txt"
    listing.write_text("# eight of them\n" + "\n".join(names) + "\n")
    command = ["calibrate", model, "--config", "shapes", "--images", listing, "-o", tmp_path / "r.json", "--json"]
    assert run(*command, "--images-root", calibration_images).json["images"] == 8


def test_infer_writes_pictures_and_json(run, model, validation, tmp_path):
    pictures = sorted(validation.images.iterdir())[:2]
    done = run("infer", model, *pictures, "--config", "shapes", "-o", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".jpg", ".json"}
    rows = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert [row["image"] for row in rows] == [path.name for path in pictures]
    found = [one for row in rows for one in row["detections"]]
    assert found
    assert all(one["score"] >= 0.3 and len(one["box"]) == 4 for one in found)


def test_doctor_names_the_pip_line_of_what_is_missing(run):
    done = run("doctor", "--json")
    assert done.code == 0
    assert {check["name"] for check in done.json["backends"]} == {"tensorrt", "tensorrt-rtx", "onnxruntime"}
    for check in [*done.json["backends"], *done.json["extras"]]:
        assert check["ok"] or "pip install" in check["fix"] or "build on one that has" in check["fix"], check
    assert "onnxruntime" in run("doctor").out


def test_json_is_one_object_on_standard_output_and_errors_too(run, tmp_path):
    done = run("audit", tmp_path / "nothing", "--json")
    assert done.code == 1
    assert done.json["error"]["type"] == "BundleError"
    assert done.json["error"]["message"] == done.message


def test_wrong_usage_exits_with_2(capsys):
    from trtdet.cli import main

    with pytest.raises(SystemExit) as stop:
        main(["build", "model.onnx", "--calib", "average"])
    assert stop.value.code == 2
    assert "minmax" in capsys.readouterr().err


@needs_rtx
@pytest.mark.tensorrt
def test_a_dynamic_batch_is_frozen_unless_a_profile_is_given(run, dynamic, images, tmp_path):
    command = ["build", dynamic, "--config", "shapes", "--images", images, "--num-images", 4, "--sm", 86, "--json"]
    command += ["--int8-all"]
    frozen = run(*command, "--correct", "none", "--no-measure", "-o", tmp_path / "one").json["manifest"]["input"][
        "shape"
    ]
    assert frozen == {"min": [1, 3, 256, 256], "opt": [1, 3, 256, 256], "max": [1, 3, 256, 256]}
    opened = run(*command, "--correct", "shift,bias", "-o", tmp_path / "many", "--batch", "1:4:8")
    assert opened.code == 0, opened.err
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
    from trtdet.data import ImageStream, find_images
    from trtdet.runtime.detector import Detector

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
