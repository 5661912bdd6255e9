"""What a user gets for what can be wrong: one clear line, exit code 1, and nothing lost of what was there before."""

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
from standin.machine import Finished

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
    return run(*command, "--effort", "none", *every, *more)


def test_a_source_without_images_is_refused(run, model, tmp_path):
    (tmp_path / "list.txt").write_text("one.jpg\ntwo.jpg\n")
    for source, word in {"nowhere": "nowhere", "list.txt": "one.jpg"}.items():
        build(run, model, tmp_path / source, tmp_path / "b").refused(word)
    run("build", model, *CONFIG, "--backend", "onnxruntime", "-o", tmp_path / "b").refused("--images")
    # A missing model is told before missing images.
    run("build", tmp_path / "no.onnx", *CONFIG, "-o", tmp_path / "b").refused(
        "no.onnx' does not exist; give the path of an ONNX file"
    )
    assert not (tmp_path / "b").exists()


def truncate(path: Path) -> None:
    with Image.open(path) as image:
        image.convert("RGB").save(path.with_suffix(".jpg"), quality=95)
    path.unlink()
    whole = path.with_suffix(".jpg").read_bytes()
    path.with_suffix(".jpg").write_bytes(whole[: len(whole) // 2])


def test_one_truncated_jpeg_is_named_skipped_and_counted(run, model, images, tmp_path):
    victim = sorted(images.iterdir())[3]
    truncate(victim)
    done = build(run, model, images, tmp_path / "b", "--json").ok
    warned = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert any(victim.with_suffix(".jpg").name in line for line in warned)
    used = done.json["manifest"]["quantization"]["images"]
    assert used["count"] == 19
    assert used["skipped"] == [victim.with_suffix(".jpg").name]


def test_every_kind_of_pixel_is_taken(run, model, images, tmp_path):
    """More images are asked for than there are, which is a warning."""
    paths = sorted(images.iterdir())
    for path, mode, suffix in zip(paths, ("L", "CMYK", "RGBA", "P"), (".jpg", ".jpg", ".png", ".png"), strict=False):
        with Image.open(path) as image:
            converted = image.convert(mode)
        path.unlink()
        converted.save(path.with_suffix(suffix))
    grey = np.asarray(Image.open(paths[4]).convert("L"), np.uint16) * 257
    Image.fromarray(grey).save(paths[4])
    done = build(run, model, images, tmp_path / "b", "--num-images", 64, "--json").ok
    assert done.json["manifest"]["quantization"]["images"]["count"] == 20
    (warning,) = [line for line in done.err.splitlines() if "warning" in line]
    assert "--num-images 64" in warning and "has 20" in warning


def test_images_that_tell_no_ranges_are_refused(run, model, images, tmp_path):
    for path in images.iterdir():
        Image.fromarray(np.asarray(Image.open(path)) // 200).save(path)
    build(run, model, images, tmp_path / "b").refused("0..255")
    for path in images.iterdir():
        Image.new("RGB", (64, 64), (10, 200, 30)).save(path)
    build(run, model, images, tmp_path / "b").refused("single colour")


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
    build(run, bad, images, tmp_path / "b", precision).refused("has a weight that is not finite")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("value", [3e38, -3e38])
def test_activations_that_are_not_finite_name_tensor_and_image(run, model, images, tmp_path, value):
    done = build(run, spoiled(model, tmp_path / "bad.onnx", "/stem/Conv", value), images, tmp_path / "b")
    assert done.code == 1
    assert "activation '" in done.message
    assert sorted(images.iterdir())[0].name in done.message
    assert "NaN" in done.message or "infinite" in done.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("input:\n  size: [320, 320]\n", ["256x256", "320x320", "input.size"]),
        ("classes: [circle, square]\n", ["15 channels", "classes"]),
        ("input:\n  padvalue: 3\n", ["input.padvalue", "did you mean 'pad_value'"]),
    ],
)
def test_a_configuration_that_is_wrong_or_does_not_fit(run, model, images, tmp_path, text, words):
    (tmp_path / "c.yaml").write_text(f"extends: shapes\n{text}")
    command = ["build", model, "--config", tmp_path / "c.yaml", "--images", images, "-o", tmp_path / "b"]
    run(*command).refused(*words)


def test_a_batch_that_the_model_cannot_have(run, model, images, tmp_path):
    mixing = onnx.load(str(model))
    (first,) = [value.name for value in mixing.graph.input]
    for node in mixing.graph.node:
        node.input[:] = [f"{name}/shared" if name == first else name for name in node.input]
    mean = onnx.helper.make_node("ReduceMean", [first], ["mean"], axes=[0], keepdims=1)
    mixing.graph.node.insert(0, mean)
    mixing.graph.node.insert(1, onnx.helper.make_node("Add", [first, "mean"], [f"{first}/shared"]))
    onnx.save(mixing, str(tmp_path / "m.onnx"))
    build(run, tmp_path / "m.onnx", images, tmp_path / "b", "--batch", "1:4:8").refused(
        "fixed to 1 and cannot be changed: an image's outputs depend on the others", "--dynamic-batch"
    )


def test_a_model_that_cannot_be_used_is_told_why(run, model, bundle, images, tmp_path):
    build(run, bundle / "int8.onnx", images, tmp_path / "b").refused("quantised already", "leave --int8-all out")
    file = tmp_path / "m.onnx"
    file.write_bytes(model.read_bytes()[: model.stat().st_size // 2])
    build(run, file, images, tmp_path / "b").refused("truncated")
    onnx.save(onnx.load(model), file, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    build(run, file, images, tmp_path / "b").refused("separate files")
    loaded = onnx.load(model)
    next(node for node in loaded.graph.node if node.op_type == "Sigmoid").op_type = "Sigmoidal"
    onnx.save(loaded, file)
    build(run, file, images, tmp_path / "b").refused("Sigmoidal", "does not define")


@pytest.mark.tensorrt
def test_an_operator_that_the_backend_lacks_is_named(run, model, images, tmp_path):
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
    run("build", tmp_path / "m.onnx", *command).refused("NonZero", "tensorrt-rtx")


@pytest.mark.tensorrt
def test_sm75_together_with_int8_is_refused(run, model, images, tmp_path):
    command = ["build", model, *CONFIG, "--images", images, "--effort", "none", "--int8-all", "-o", tmp_path / "b"]
    command += ["--sm", 75, 86]
    run(*command).refused("7.5", "float")
    assert run(*command[:-3], "--sm", 90).code == 1


def test_a_backend_that_is_missing_has_its_pip_line(run, model, images, tmp_path, monkeypatch):
    command = ["build", model, *CONFIG, "--images", images, "-o", tmp_path / "b"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt_rtx", None)
        assert "pip install 'trtdet[rtx]'" in run(*command, "--backend", "tensorrt-rtx").message
    # Without any TensorRT nothing is built unasked.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run(*command).refused("pip install 'trtdet[rtx]'", "--backend onnxruntime")
    assert not (tmp_path / "b").exists()


def test_what_a_bundle_cannot_be_compared_with(run, model, bundle, labelled, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "c.yaml").write_text(
        "extends: shapes\nclasses: [circle, square, triangle, diamond, pentagon, hexagon, star, cross, ring, unicorn]\n"
    )
    command = ["--config", tmp_path / "c.yaml", "--fp32", "--backend", "onnxruntime"]
    assert run("build", model, *command, "-o", tmp_path / "other").code == 0
    for arguments, words in (
        ([bundle, "--against", "nowhere"], ["'nowhere' does not exist"]),
        ([bundle, "--against", tmp_path / "empty"], ["not a bundle"]),
        ([bundle, "--against", model, "--resamples", 9], ["at least 100"]),
        # A configuration that the bundle carries already is not given again for the model it is compared with.
        ([bundle, *CONFIG, "--against", model], ["leave --config out"]),
        ([model, "--against", bundle], ["needs --config"]),
        ([bundle, "--against", tmp_path / "other"], ["unicorn", "detectors of the same classes"]),
    ):
        run("eval", *arguments, *labelled).refused(*words)


def test_a_place_that_must_not_or_cannot_be_written(run, model, images, tmp_path):
    place = tmp_path / "thesis"
    place.mkdir()
    (place / "chapter1.tex").write_text("years of work")
    build(run, model, images, place).refused("not a bundle")
    assert contents(place) == {"chapter1.tex": b"years of work"}
    (tmp_path / "file").write_text("")
    build(run, model, images, tmp_path / "file" / "b").refused("cannot be written")
    command = ["calibrate", model, *CONFIG, "--images", images, "-o"]
    run(*command, tmp_path / "file" / "ranges.json").refused("cannot be written")
    run(*command, tmp_path / "ranges.npz").refused("names the ranges")
    assert not (tmp_path / "ranges.npz").exists()


def test_a_full_disk_keeps_the_old_bundle(bundle, model, images, tmp_path):
    """A file size limit makes the kernel refuse the write half way, as a full disk does."""
    before = contents(bundle)
    command = [sys.executable, "-m", "trtdet", "build", str(model), *CONFIG, "--images", str(images)]
    command += ["--backend", "onnxruntime", "-o", str(bundle), "--calib", "minmax", "--effort", "none", "--int8-all"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert done.returncode == 1, done.stderr
    assert "cannot be written" in done.stderr
    assert "the old content is untouched" in done.stderr
    assert contents(bundle) == before
    assert leftovers(tmp_path) == []


def test_histograms_of_another_model(run, model, images, bundle, tmp_path):
    def refusal(file: str) -> Finished:
        return build(run, model, images, tmp_path / "b", "--set", f"calibration.histograms={bundle / file}")

    refusal("manifest.json").refused("not a collection")
    shutil.rmtree(images)
    images.mkdir()
    Image.effect_noise((64, 64), 50).save(images / "other.png")
    refusal("histograms.npz").refused("other images")


def test_corrections_need_images(run, model, images, bundle, tmp_path):
    place = tmp_path / "b"
    command = ["build", model, *CONFIG, "--backend", "onnxruntime", "--json", "--int8-all", "-o", place]
    command += ["--set", f"calibration.histograms={bundle / 'histograms.npz'}"]
    done = run(*command)
    assert (done.code, done.json["error"]["type"]) == (1, "ConfigError")
    assert "give --images, or build with --effort none" in done.message
    one = [run, model, images, place, "--num-images", 1]
    build(*one, "--effort", "default").refused("at least 2 calibration images", "got 1")
    assert not place.exists()
    assert leftovers(tmp_path) == []
    done = run(*command, "--effort", "none").ok
    assert done.json["manifest"]["quantization"]["corrections"] == []
    assert (place / "int8.onnx").read_bytes() == (bundle / "int8.onnx").read_bytes()
    assert build(*one).code == 0


@pytest.mark.slow
def test_ctrl_c_at_any_moment_leaves_the_old_bundle_or_the_new_one(bundle, model, images, tmp_path):
    before = contents(bundle)
    command = [sys.executable, "-m", "trtdet", "build", str(model), *CONFIG, "--images", str(images)]
    command += ["--num-images", "4", "--effort", "bias", "--int8-all"]
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
