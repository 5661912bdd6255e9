"""What a user gets for what can be wrong: one clear line, exit code 1, and nothing lost of what was there before."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from trtdet.passes.base import Writer
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.provenance import Origin

CONFIG = ["--config", "shapes"]


@pytest.fixture
def bundle(run, model, images, tmp_path):
    """A bundle that must survive what goes wrong."""
    place = tmp_path / "bundle"
    assert build(run, model, images, place).code == 0
    return place


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def leftovers(folder: Path) -> list[str]:
    """Temporary files and folders of trtdet's."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def build(run, model, images, place, *more):
    command = ["build", model, *CONFIG, "--images", images, "--backend", "onnxruntime", "-o", place]
    every = [] if {"--fp16", "--fp32"} & set(more) else ["--int8-all"]
    return run(*command, "--correct", "none", *every, *more)


# images


def test_an_empty_folder(run, model, tmp_path):
    (tmp_path / "empty").mkdir()
    done = build(run, model, tmp_path / "empty", tmp_path / "b")
    assert done.code == 1
    assert "empty" in done.message
    assert not (tmp_path / "b").exists()


def test_a_folder_of_other_files(run, model, tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.txt").write_text("no image")
    (folder / "b.csv").write_text("1,2")
    done = build(run, model, folder, tmp_path / "b")
    assert done.code == 1
    assert ".txt" in done.message
    assert ".csv" in done.message


def test_a_missing_folder(run, model, tmp_path):
    done = build(run, model, tmp_path / "nowhere", tmp_path / "b")
    assert done.code == 1
    assert "nowhere" in done.message


def test_no_images_at_all(run, model, tmp_path):
    done = run("build", model, *CONFIG, "--backend", "onnxruntime", "-o", tmp_path / "b")
    assert done.code == 1
    assert "--images" in done.message


def truncate(path: Path) -> None:
    with Image.open(path) as image:
        image.convert("RGB").save(path.with_suffix(".jpg"), quality=95)
    path.unlink()
    whole = path.with_suffix(".jpg").read_bytes()
    path.with_suffix(".jpg").write_bytes(whole[: len(whole) // 2])


def test_one_truncated_jpeg_is_named_skipped_and_counted(run, model, images, tmp_path):
    victim = sorted(images.iterdir())[3]
    truncate(victim)
    done = build(run, model, images, tmp_path / "b", "--json")
    assert done.code == 0, done.err
    warned = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert any(victim.with_suffix(".jpg").name in line for line in warned)
    used = done.json["manifest"]["quantization"]["images"]
    assert used["count"] == 19
    assert used["skipped"] == [victim.with_suffix(".jpg").name]


def test_more_than_a_tenth_truncated_is_an_error(run, model, images, tmp_path):
    for victim in sorted(images.iterdir())[:3]:
        truncate(victim)
    done = build(run, model, images, tmp_path / "b")
    assert done.code == 1
    assert "3 of" in done.message
    assert "allowed are 10%" in done.message
    assert not (tmp_path / "b").exists()


def test_every_kind_of_pixel_is_taken(run, model, images, tmp_path):
    first = sorted(images.iterdir())
    for path, mode, suffix in (
        (first[0], "L", ".jpg"),
        (first[1], "CMYK", ".jpg"),
        (first[2], "RGBA", ".png"),
        (first[3], "P", ".png"),
    ):
        with Image.open(path) as image:
            converted = image.convert(mode)
        path.unlink()
        converted.save(path.with_suffix(suffix))
    grey = np.asarray(Image.open(first[4]).convert("L"), np.uint16) * 257
    Image.fromarray(grey).save(first[4])
    done = build(run, model, images, tmp_path / "b", "--json")
    assert done.code == 0, done.err
    assert done.json["manifest"]["quantization"]["images"]["count"] == 20
    assert "warning" not in done.err


def test_images_of_zeros_and_ones_are_refused(run, model, images, tmp_path):
    for path in images.iterdir():
        pixels = np.asarray(Image.open(path)) // 200
        Image.fromarray(pixels).save(path)
    done = build(run, model, images, tmp_path / "b")
    assert done.code == 1
    assert "0..255" in done.message


def test_images_of_one_colour_are_refused(run, model, images, tmp_path):
    for path in images.iterdir():
        Image.new("RGB", (64, 64), (10, 200, 30)).save(path)
    done = build(run, model, images, tmp_path / "b")
    assert done.code == 1
    assert "single colour" in done.message


def test_a_list_whose_files_are_elsewhere(run, model, tmp_path):
    (tmp_path / "list.txt").write_text("one.jpg\ntwo.jpg\n")
    done = build(run, model, tmp_path / "list.txt", tmp_path / "b")
    assert done.code == 1
    assert "one.jpg" in done.message


def test_more_images_asked_for_than_there_are(run, model, images, tmp_path):
    done = build(run, model, images, tmp_path / "b", "--num-images", 64)
    assert done.code == 0
    assert "--num-images 64" in done.err
    assert "has 20" in done.err


# activations


def spoiled(model: Path, path: Path, conv: str, value: float) -> Path:
    """The model with one weight of a convolution replaced."""
    loaded = onnx.load(str(model))
    (weight,) = [tensor for tensor in loaded.graph.initializer if tensor.name == f"{conv}.weight"]
    values = onnx.numpy_helper.to_array(weight).copy()
    values.flat[0] = value
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(loaded, str(path))
    return path


@pytest.mark.parametrize("precision", ["--int8", "--fp16", "--fp32"])
def test_a_weight_that_is_not_a_number_is_refused_in_every_precision(run, model, images, tmp_path, precision):
    bad = spoiled(model, tmp_path / "bad.onnx", "/head0/boxes/Conv", np.nan)
    done = build(run, bad, images, tmp_path / "b", precision)
    assert done.code == 1
    assert "has a weight that is not finite" in done.message
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("value", [3e38, -3e38])
def test_activations_that_are_not_finite_name_tensor_and_image(run, model, images, tmp_path, value):
    done = build(run, spoiled(model, tmp_path / "bad.onnx", "/stem/Conv", value), images, tmp_path / "b")
    assert done.code == 1
    assert "activation '" in done.message
    assert sorted(images.iterdir())[0].name in done.message
    assert "NaN" in done.message or "infinite" in done.message


# models


def test_a_model_whose_input_is_of_another_size(run, model, images, tmp_path):
    (tmp_path / "c.yaml").write_text("extends: shapes\ninput:\n  size: [320, 320]\n")
    done = run("build", model, "--config", tmp_path / "c.yaml", "--images", images, "-o", tmp_path / "b")
    assert done.code == 1
    assert "256x256" in done.message
    assert "320x320" in done.message
    assert "input.size" in done.message


def test_a_wrong_class_count(run, model, images, tmp_path):
    (tmp_path / "c.yaml").write_text("extends: shapes\nclasses: [circle, square]\n")
    done = run("build", model, "--config", tmp_path / "c.yaml", "--images", images, "-o", tmp_path / "b")
    assert done.code == 1
    assert "15 channels" in done.message
    assert "classes" in done.message


def test_a_batch_that_the_model_cannot_have(run, model, images, tmp_path):
    mixing = onnx.load(str(model))
    (first,) = [value.name for value in mixing.graph.input]
    for node in mixing.graph.node:
        node.input[:] = [f"{name}/shared" if name == first else name for name in node.input]
    mean = onnx.helper.make_node("ReduceMean", [first], ["mean"], axes=[0], keepdims=1)
    mixing.graph.node.insert(0, mean)
    mixing.graph.node.insert(1, onnx.helper.make_node("Add", [first, "mean"], [f"{first}/shared"]))
    onnx.save(mixing, str(tmp_path / "m.onnx"))
    done = build(run, tmp_path / "m.onnx", images, tmp_path / "b", "--batch", "1:4:8")
    assert done.code == 1
    assert "fixed to 1 and cannot be changed: an image's outputs depend on the others" in done.message
    assert "--dynamic-batch" in done.message


def test_a_truncated_model(run, model, images, tmp_path):
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(model.read_bytes()[: model.stat().st_size // 2])
    done = build(run, cut, images, tmp_path / "b")
    assert done.code == 1
    assert "truncated" in done.message


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 a torch checkpoint", b"\x00\x01\x02 junk" * 50])
def test_a_file_that_is_not_onnx(run, images, tmp_path, data):
    (tmp_path / "m.onnx").write_bytes(data)
    done = build(run, tmp_path / "m.onnx", images, tmp_path / "b")
    assert done.code == 1
    assert "not ONNX" in done.message


def test_external_data_that_is_missing(run, model, images, tmp_path):
    loaded = onnx.load(str(model))
    place = tmp_path / "moved" / "m.onnx"
    place.parent.mkdir()
    onnx.save(loaded, str(place), save_as_external_data=True, location="weights.bin", size_threshold=0)
    (place.parent / "weights.bin").unlink()
    done = build(run, place, images, tmp_path / "b")
    assert done.code == 1
    assert "separate files" in done.message


def test_a_model_that_is_quantised_already(run, bundle, images, tmp_path):
    done = build(run, bundle / "int8.onnx", images, tmp_path / "b")
    assert done.code == 1
    assert "quantised already" in done.message
    assert "QuantizeLinear" in done.message


def test_an_unknown_operator_is_named(run, model, images, tmp_path):
    loaded = onnx.load(str(model))
    next(node for node in loaded.graph.node if node.op_type == "Sigmoid").op_type = "Sigmoidal"
    onnx.save(loaded, str(tmp_path / "m.onnx"))
    done = build(run, tmp_path / "m.onnx", images, tmp_path / "b")
    assert done.code == 1
    assert "Sigmoidal" in done.message
    assert "does not define" in done.message


@pytest.mark.tensorrt
def test_an_operator_that_the_backend_lacks_is_named(run, model, images, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'trtdet[rtx]'")
    graph = to_graph(onnx.shape_inference.infer_shapes(onnx.load(str(model))))
    write = Writer(graph, "extra", Origin.LOWERING)
    (output,) = graph.outputs
    places = write("Cast", write("NonZero", output), to=1)
    none = write("Mul", write("ReduceMax", places, keepdims=0), write.const(0, np.float32))
    changed = write("Add", output, none)
    changed.name, changed.dtype, changed.shape = "changed", np.float32, output.shape
    graph.outputs = [changed]
    onnx.save(to_model(graph), str(tmp_path / "m.onnx"))
    command = [*CONFIG, "--images", images, "--backend", "tensorrt-rtx", "-o", tmp_path / "b"]
    done = run("build", tmp_path / "m.onnx", *command)
    assert done.code == 1
    assert "NonZero" in done.message
    assert "tensorrt-rtx" in done.message


@pytest.mark.tensorrt
def test_sm75_together_with_int8_is_refused(run, model, images, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'trtdet[rtx]'")
    command = ["build", model, *CONFIG, "--images", images, "--correct", "none", "--int8-all", "-o", tmp_path / "b"]
    command += ["--sm", 75, 86]
    done = run(*command)
    assert done.code == 1
    assert "7.5" in done.message
    assert "float" in done.message
    assert run(*command[:-3], "--sm", 90).code == 1


def test_a_backend_that_is_missing_has_its_pip_line(run, model, images, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    command = ["build", model, *CONFIG, "--images", images, "-o", tmp_path / "b", "--backend", "tensorrt-rtx"]
    assert "pip install 'trtdet[rtx]'" in run(*command).message


def test_without_any_tensorrt_nothing_is_built_unasked(run, model, images, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = run("build", model, *CONFIG, "--images", images, "-o", tmp_path / "b")
    assert done.code == 1
    assert "pip install 'trtdet[rtx]'" in done.message
    assert "--backend onnxruntime" in done.message
    assert not (tmp_path / "b").exists()


# configuration and annotations


def test_a_misspelt_key(run, model, images, tmp_path):
    (tmp_path / "c.yaml").write_text("extends: shapes\ninput:\n  padvalue: 3\n")
    done = run("build", model, "--config", tmp_path / "c.yaml", "--images", images, "-o", tmp_path / "b")
    assert done.code == 1
    assert "input.padvalue" in done.message
    assert "did you mean 'pad_value'" in done.message


def test_a_value_of_the_wrong_type(run, model, images, tmp_path):
    (tmp_path / "c.yaml").write_text("extends: shapes\nnms:\n  iou_threshold: high\n")
    done = run("build", model, "--config", tmp_path / "c.yaml", "--images", images, "-o", tmp_path / "b")
    assert done.code == 1
    assert "nms.iou_threshold" in done.message
    assert "'high'" in done.message


def test_an_option_out_of_range(run, model, images, tmp_path):
    done = build(run, model, images, tmp_path / "b", "--iou-threshold", 1.5)
    assert done.code == 1
    assert "nms.iou_threshold" in done.message


def test_annotations_that_do_not_match(run, model, validation, tmp_path):
    data = json.loads(validation.annotations.read_text())

    def message(change) -> str:
        document = json.loads(json.dumps(data))
        change(document)
        (tmp_path / "a.json").write_text(json.dumps(document))
        command = ["--images", validation.images, "--annotations", tmp_path / "a.json"]
        done = run("eval", model, *CONFIG, *command)
        assert done.code == 1
        return done.message

    def unknown_image(document):
        document["annotations"][0]["image_id"] = 987654

    def other_categories(document):
        document["categories"][0]["name"] = "unicorn"

    def missing_file(document):
        document["images"][0]["file_name"] = "gone.png"

    assert "987654" in message(unknown_image)
    assert "1 of the 10 classes are no category (circle)" in message(other_categories)
    assert "gone.png" in message(missing_file)
    (tmp_path / "a.json").write_text(validation.annotations.read_text()[:1000])
    done = run("eval", model, *CONFIG, "--images", validation.images, "--annotations", tmp_path / "a.json")
    assert done.code == 1
    assert "a.json" in done.message


# comparisons


def test_what_a_bundle_cannot_be_compared_with(run, model, bundle, validation, tmp_path):
    data = ["--images", validation.images, "--annotations", validation.annotations]
    assert "'nowhere' does not exist" in run("eval", bundle, "--against", "nowhere", *data).message
    (tmp_path / "empty").mkdir()
    assert "not a bundle" in run("eval", bundle, "--against", tmp_path / "empty", *data).message
    assert "at least 100" in run("eval", bundle, "--against", model, "--resamples", 9, *data).message
    # A configuration that the bundle carries already is not given again for the model it is compared with.
    assert "leave --config out" in run("eval", bundle, *CONFIG, "--against", model, *data).message
    assert "needs --config" in run("eval", model, "--against", bundle, *data).message


def test_a_reference_of_other_classes(run, model, images, bundle, validation, tmp_path):
    (tmp_path / "c.yaml").write_text(
        "extends: shapes\nclasses: [circle, square, triangle, diamond, pentagon, hexagon, star, cross, ring, unicorn]\n"
    )
    command = ["--config", tmp_path / "c.yaml", "--fp32", "--backend", "onnxruntime"]
    assert run("build", model, *command, "-o", tmp_path / "other").code == 0
    data = ["--images", validation.images, "--annotations", validation.annotations]
    done = run("eval", bundle, "--against", tmp_path / "other", *data)
    assert done.code == 1
    assert "unicorn" in done.message
    assert "detectors of the same classes" in done.message


# places


def test_a_folder_that_is_not_a_bundle_is_not_replaced(run, model, images, tmp_path):
    place = tmp_path / "thesis"
    place.mkdir()
    (place / "chapter1.tex").write_text("years of work")
    done = build(run, model, images, place)
    assert done.code == 1
    assert "not a bundle" in done.message
    assert contents(place) == {"chapter1.tex": b"years of work"}


def test_a_place_that_cannot_be_written(run, model, images, tmp_path):
    (tmp_path / "file").write_text("")
    done = build(run, model, images, tmp_path / "file" / "b")
    assert done.code == 1
    assert "cannot be written" in done.message


def test_ranges_that_cannot_be_written_are_refused_before_the_work(run, model, images, tmp_path):
    (tmp_path / "file").write_text("")
    command = ["calibrate", model, *CONFIG, "--images", images, "-o"]
    assert "cannot be written" in run(*command, tmp_path / "file" / "ranges.json").message
    assert "names the ranges" in run(*command, tmp_path / "ranges.npz").message
    assert not (tmp_path / "ranges.npz").exists()


def test_a_full_disk_keeps_the_old_bundle(bundle, model, images, tmp_path):
    """A file size limit makes the kernel refuse the write half way, as a full disk does."""
    before = contents(bundle)
    command = [sys.executable, "-m", "trtdet", "build", str(model), *CONFIG, "--images", str(images)]
    command += ["--backend", "onnxruntime", "-o", str(bundle), "--calib", "minmax", "--correct", "none", "--int8-all"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert done.returncode == 1, done.stderr
    assert "cannot be written" in done.stderr
    assert "the old content is untouched" in done.stderr
    assert contents(bundle) == before
    assert leftovers(tmp_path) == []


def test_a_bundle_altered_by_one_byte_is_refused(run, bundle, validation):
    file = bundle / "int8.onnx"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    command = ["--images", validation.images, "--annotations", validation.annotations]
    done = run("eval", bundle, *command)
    assert done.code == 1
    assert "altered" in done.message
    (bundle / "plan.json").unlink()
    assert "plan.json" in run("eval", bundle, *command).message or "altered" in run("eval", bundle, *command).message


def test_histograms_of_another_model(run, model, images, bundle, tmp_path):
    done = build(run, model, images, tmp_path / "b", "--histograms", bundle / "manifest.json")
    assert done.code == 1
    assert "not a collection" in done.message
    shutil.rmtree(images)
    images.mkdir()
    Image.effect_noise((64, 64), 50).save(images / "other.png")
    done = build(run, model, images, tmp_path / "b", "--histograms", bundle / "histograms.npz")
    assert done.code == 1
    assert "other images" in done.message


# corrections


def test_corrections_without_images(run, model, bundle, tmp_path):
    command = ["build", model, *CONFIG, "--backend", "onnxruntime", "--histograms", bundle / "histograms.npz", "--json"]
    command += ["--int8-all"]
    done = run(*command, "-o", tmp_path / "b")
    assert (done.code, done.json["error"]["type"]) == (1, "ConfigError")
    assert "give --images, or build with --correct none" in done.message
    done = run(*command, "-o", tmp_path / "b", "--correct", "none", "--calib", "auto")
    assert (done.code, done.json["error"]["type"]) == (1, "ConfigError")
    assert "--calib auto compares the rules on images" in done.message
    assert not (tmp_path / "b").exists()
    done = run(*command, "-o", tmp_path / "b", "--correct", "none")
    assert done.code == 0, done.err
    assert done.json["manifest"]["quantization"]["corrections"] == []
    assert (tmp_path / "b" / "int8.onnx").read_bytes() == (bundle / "int8.onnx").read_bytes()


def test_corrections_from_one_image(run, model, images, tmp_path):
    done = build(run, model, images, tmp_path / "b", "--num-images", 1, "--correct", "auto")
    assert done.code == 1
    assert "at least 2 calibration images" in done.message
    assert "got 1" in done.message
    assert not (tmp_path / "b").exists()
    assert leftovers(tmp_path) == []
    assert build(run, model, images, tmp_path / "b", "--num-images", 1).code == 0


@pytest.mark.parametrize("asked", ["foo", "smooth,foo", "auto,foo", ""])
def test_an_unknown_correction(capsys, asked):
    from trtdet.cli import main

    with pytest.raises(SystemExit) as stop:
        main(["build", "model.onnx", "--config", "shapes", "-o", "b", "--correct", asked])
    assert stop.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    wrong = "auto" if asked == "auto,foo" else asked.split(",")[-1]
    assert f"no correction '{wrong}'; allowed: auto, none, or some of range,smooth,shift,round,bias" in said


@pytest.mark.slow
def test_ctrl_c_at_any_moment_leaves_the_old_bundle_or_the_new_one(bundle, model, images, tmp_path):
    before = contents(bundle)
    command = [sys.executable, "-m", "trtdet", "build", str(model), *CONFIG, "--images", str(images)]
    command += ["--num-images", "4", "--correct", "bias", "--int8-all"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    whole = 0.0
    codes = []
    for step in range(6):
        rule = ("minmax", "entropy")[step % 2]
        started = time.monotonic()
        process = subprocess.Popen(
            [*command, "-o", str(bundle), "--calib", rule],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            # A test run started in the background ignores the signal, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        if step == 0:
            process.communicate()
            whole = time.monotonic() - started
            before = contents(bundle)
            continue
        time.sleep(whole * step / 5)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        codes.append(process.returncode)
        assert process.returncode in (0, 130, -signal.SIGINT), said
        assert "Traceback" not in said or process.returncode == -signal.SIGINT, said
        after = contents(bundle)
        if process.returncode == 0:
            before = after
        manifest = json.loads(after["manifest.json"])
        assert set(manifest["files"]) | {"manifest.json"} == set(after)
        assert after == before or process.returncode != 0
        assert leftovers(tmp_path) == []
        before = after
    assert codes.count(0) < len(codes)
