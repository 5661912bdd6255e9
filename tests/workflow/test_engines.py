"""Whole commands on a machine with a GPU and TensorRT, as far as there is one without: see tests/standin."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from standin.machine import plugin_library

from trtdet.bundle import Bundle

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-python is not installed: pip install 'trtdet[cuda]'"
)

CPU = "onnxruntime (CPU)"


def build(machine, model, images, place, *more, **settings):
    """An INT8 bundle with an engine."""
    command = ["build", model, "--config", "shapes", "--backend", "tensorrt", "--images", images, "--num-images", 4]
    command += ["--int8-all"]
    done = machine.trtdet(*command, "--correct", "none", "--no-measure", "-o", place, *more, **settings)
    assert done.code == 0, done.err
    return place


@pytest.fixture(scope="module")
def bundle(machine, model, calibration_images, tmp_path_factory):
    """Of TensorRT 10.9."""
    return build(machine, model, calibration_images, tmp_path_factory.mktemp("engine") / "bundle")


@pytest.fixture(scope="module")
def on_cpu(machine, bundle, validation):
    """The evaluation of the bundle's model."""
    return evaluated(machine, bundle, validation, "--runtime", "onnxruntime")


def evaluated(machine, target, validation, *more, **settings):
    """What ``eval --json`` says."""
    given = ["--images", validation.images, "--annotations", validation.annotations]
    done = machine.trtdet("eval", target, *given, "--json", *more, **settings)
    assert done.code in (0, 1), done.err
    return done.json


def score(found):
    """All of it but where and how fast it ran."""
    assert "error" not in found, found
    return {key: value for key, value in found.items() if key not in ("ms_per_image", "file", "ran_on")}


def test_an_engine_scores_what_its_model_does(machine, trained, calibration_images, drawn, tmp_path):
    """The stand-in runs the model that it was given: what is seen here is the way there and back, not a GPU."""
    place = build(machine, trained, calibration_images, tmp_path / "bundle")
    found, on_cpu = (evaluated(machine, place, drawn, *more) for more in ((), ("--runtime", "onnxruntime")))
    assert score(found) == score(on_cpu)
    assert found["map"] > 0.3
    assert (found["ran_on"], on_cpu["ran_on"]) == ("TensorRT 10.9.0 (Stand-in GPU)", CPU)
    assert (Path(found["file"]).name, Path(on_cpu["file"]).name) == ("model.engine", "int8.onnx")


@pytest.mark.parametrize("version", ["8.6.0", "11.1.0"])
def test_engines_of_other_versions_score_the_same(machine, model, calibration_images, validation, tmp_path, version):
    place = build(machine, model, calibration_images, tmp_path / "bundle", version=version)
    found = evaluated(machine, place, validation, "--runtime", "engine", version=version)
    assert found["ran_on"] == f"TensorRT {version} (Stand-in GPU)"
    assert score(found) == score(evaluated(machine, place, validation, "--runtime", "onnxruntime", version=version))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"driver": False}, "this machine has no CUDA driver"),
        ({"devices": 0}, "this machine's CUDA driver shows no device"),
        (
            {"sm": 86},
            "the engine was built for compute capability 8.9, and this machine has Stand-in GPU with 8.6; build it "
            "again here",
        ),
        (
            {"version": "10.8.0"},
            "the engine was built with TensorRT 10.9.0, and 10.8.0 is installed here; build it again, or install that "
            "version",
        ),
    ],
)
def test_the_model_runs_where_the_engine_cannot_and_the_reason_is_said(
    machine, bundle, validation, on_cpu, settings, reason
):
    found = evaluated(machine, bundle, validation, **settings)
    assert found["ran_on"] == f"{CPU}, as {reason}"
    assert Path(found["file"]).name == "int8.onnx"
    assert score(found) == score(on_cpu)
    refused = evaluated(machine, bundle, validation, "--runtime", "engine", **settings)
    assert refused["error"]["message"] == f"the engine of bundle '{bundle}' cannot be run here, as {reason}"


def test_what_has_no_engine_is_refused_as_one(machine, model, calibration_images, validation, tmp_path):
    place = build(machine, model, calibration_images, tmp_path / "bundle", "--backend", "onnxruntime")
    found = evaluated(machine, place, validation, "--runtime", "engine")
    assert found["error"]["message"].startswith(f"bundle '{place}' has no engine; build it with --backend")
    assert evaluated(machine, place, validation)["ran_on"] == CPU
    found = evaluated(machine, model, validation, "--config", "shapes", "--runtime", "engine")
    assert (
        found["error"]["message"] == f"'{model}' is a model, which has no engine; give a bundle, or leave --runtime out"
    )


def test_an_engine_is_compared_with_a_model(machine, bundle, model, validation):
    found = evaluated(machine, bundle, validation, "--against", model)
    assert found["ran_on"].startswith("TensorRT")
    assert found["against"]["ran_on"] == CPU
    assert found["against"]["difference"] < 0


def test_two_engines_are_compared_on_one_device(machine, bundle, validation):
    found = evaluated(machine, bundle, validation, "--against", bundle)
    assert found["ran_on"].startswith("TensorRT")
    assert found["against"]["difference"] == 0.0


def test_infer_draws_what_the_engine_finds(machine, bundle, calibration_images, tmp_path):
    pictures = sorted(calibration_images.iterdir())[:3]
    found = {}
    for on in ("engine", "onnxruntime"):
        done = machine.trtdet("infer", bundle, *pictures, "-o", tmp_path / on, "--runtime", on)
        assert done.code == 0, done.err
        found[on] = json.loads((tmp_path / on / "detections.json").read_text())
        assert ("on TensorRT 10.9.0 (Stand-in GPU);" if on == "engine" else f"on {CPU};") in done.out
    assert found["engine"] == found["onnxruntime"]
    assert any(row["detections"] for row in found["engine"])


def test_a_dynamic_batch_is_evaluated_at_its_best_size(machine, dynamic, calibration_images, validation, tmp_path):
    place = build(machine, dynamic, calibration_images, tmp_path / "bundle", "--batch", "2:3:4")
    # 16 images in batches of 3 leave one, which the engine takes only with another.
    engine = evaluated(machine, place, validation, "--runtime", "engine")
    assert score(engine) == score(evaluated(machine, place, validation, "--runtime", "onnxruntime"))


@pytest.mark.parametrize(("version", "nms"), [("8.6.0", "efficient"), ("10.9.0", "native")])
def test_an_engine_with_plugins_finds_them_in_its_bundle(
    machine, model, calibration_images, validation, tmp_path, version, nms
):
    library = plugin_library(tmp_path, "TRT_SiLU", "TRT_HardSwish")
    more = ["--silu", "plugin", "--plugin-library", library, "--nms", nms]
    place = build(machine, model, calibration_images, tmp_path / "bundle", *more, version=version)
    library.unlink()
    engine = evaluated(machine, place, validation, "--runtime", "engine", version=version)
    assert score(engine) == score(evaluated(machine, place, validation, "--runtime", "onnxruntime", version=version))


# what goes wrong once an engine could be run is an error, never the model instead


def spoilt(bundle: Path, place: Path, data: bytes, *, sealed: bool) -> Path:
    """A copy of the bundle with another engine; ``sealed``, the manifest has that one's hash."""
    shutil.copytree(bundle, place)
    (place / "model.engine").write_bytes(data)
    if sealed:
        manifest = json.loads((place / "manifest.json").read_text())
        manifest["files"]["model.engine"] = hashlib.sha256(data).hexdigest()
        (place / "manifest.json").write_text(json.dumps(manifest))
    return place


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("cut", [True, False])
def test_an_engine_that_was_altered_is_refused(machine, bundle, validation, tmp_path, sealed, cut):
    engine = Bundle(bundle).engine.read_bytes()
    data = engine[:-1000] if cut else engine[:-1] + bytes([engine[-1] ^ 1])
    found = evaluated(machine, spoilt(bundle, tmp_path / "bundle", data, sealed=sealed), validation)
    message = found["error"]["message"]
    if sealed:
        assert message.startswith("TensorRT 10.9.0 failed at loading the engine: [stdArchiveReader.cpp")
        assert message.endswith("; it was altered or cut short; build it again")
    else:
        assert "'model.engine' was altered" in message


def test_full_memory_is_an_error(machine, bundle, validation):
    found = evaluated(machine, bundle, validation, memory=1 << 20)
    assert found["error"]["type"] == "BackendError"
    assert "OutOfMemory" in found["error"]["message"]
    assert found["error"]["message"].endswith("; take a smaller batch, or end what else runs")


def test_a_device_that_fails_is_an_error(machine, bundle, validation):
    found = evaluated(machine, bundle, validation, fault=700)
    assert found["error"]["message"].startswith("the GPU failed at what it ran")


def test_a_plugin_that_is_not_there_is_named(machine, model, calibration_images, validation, tmp_path):
    library = plugin_library(tmp_path, "TRT_SiLU")
    more = ["--silu", "plugin", "--plugin-library", library]
    place = build(machine, model, calibration_images, tmp_path / "bundle", *more)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["backend"]["plugins"] = []
    (place / "manifest.json").write_text(json.dumps(manifest))
    message = evaluated(machine, place, validation)["error"]["message"]
    assert "Cannot find plugin: TRT_SiLU" in message
    assert message.endswith("; give the library that has the plugin with --plugin-library when building")


def test_pycuda_runs_it_without_graphs_and_says_so(machine, bundle, validation, on_cpu):
    found = evaluated(machine, bundle, validation, pycuda=True)
    assert found["ran_on"].startswith("TensorRT 10.9.0 (Stand-in GPU), without CUDA graphs, as pycuda ")
    assert score(found) == score(on_cpu)
