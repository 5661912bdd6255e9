"""Whole commands on a machine with a GPU and TensorRT, as far as there is one without: see tests/standin."""

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


@pytest.fixture(scope="module")
def make(machine, model, calibration_images, tmp_path_factory):
    """Makes an INT8 bundle with an engine, of TensorRT 10.9 unless said otherwise."""

    def call(*arguments: object, detector: Path = model, **settings: object) -> Path:
        place = tmp_path_factory.mktemp("engine") / "bundle"
        command = ["build", detector, "--config", "shapes", "--backend", "tensorrt", "--images", calibration_images]
        command += ["--num-images", 4, "--int8-all", "--effort", "none", "--guard", "off", "-o", place]
        assert machine.trtdet(*command, *arguments, **settings).ok
        return place

    return call


@pytest.fixture(scope="module")
def evaluate(machine, labelled):
    """What ``eval --json`` says of a bundle or a model."""

    def call(target: Path, *arguments: object, data: object = labelled, **settings: object):
        done = machine.trtdet("eval", target, *data, "--json", *arguments, **settings)
        assert done.code in (0, 1), done.err
        return done.json

    return call


@pytest.fixture(scope="module")
def bundle(make):
    return make()


@pytest.fixture(scope="module")
def on_cpu(evaluate, bundle):
    """The evaluation of the bundle's model."""
    return evaluate(bundle, "--runtime", "onnxruntime")


def score(result):
    """All of it but where and how fast it ran."""
    assert "error" not in result, result
    return {key: value for key, value in result.items() if key not in ("ms_per_image", "file", "ran_on")}


def test_an_engine_scores_what_its_model_does(make, evaluate, trained, scored):
    """The stand-in runs the model that it was given: what is seen here is the way there and back, not a GPU."""
    place = make(detector=trained)
    engine, model = (evaluate(place, *more, data=scored) for more in ((), ("--runtime", "onnxruntime")))
    assert score(engine) == score(model)
    assert engine["map"] > 0.3
    assert (engine["ran_on"], model["ran_on"]) == ("TensorRT 10.9.0 (Stand-in GPU)", CPU)
    assert (Path(engine["file"]).name, Path(model["file"]).name) == ("model.engine", "int8.onnx")


@pytest.mark.parametrize(("version", "nms"), [("8.6.0", "efficient"), ("10.9.0", "native"), ("11.1.0", None)])
def test_engines_of_other_versions_and_with_plugins_score_the_same(make, evaluate, tmp_path, version, nms):
    """An engine finds its plugins in its bundle."""
    arguments = []
    if nms is not None:
        library = plugin_library(tmp_path, "TRT_SiLU", "TRT_HardSwish")
        arguments = ["--silu", "plugin", "--set", f"engine.plugins={library}", "--nms", nms]
    place = make(*arguments, version=version)
    if nms is not None:
        library.unlink()
    engine = evaluate(place, "--runtime", "engine", version=version)
    assert engine["ran_on"] == f"TensorRT {version} (Stand-in GPU)"
    assert score(engine) == score(evaluate(place, "--runtime", "onnxruntime", version=version))


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
def test_the_model_runs_where_the_engine_cannot_and_the_reason_is_said(evaluate, bundle, on_cpu, settings, reason):
    result = evaluate(bundle, **settings)
    assert result["ran_on"] == f"{CPU}, as {reason}"
    assert Path(result["file"]).name == "int8.onnx"
    assert score(result) == score(on_cpu)
    refused = evaluate(bundle, "--runtime", "engine", **settings)
    assert refused["error"]["message"] == f"the engine of bundle '{bundle}' cannot be run here, as {reason}"


def test_what_has_no_engine_is_refused_as_one(make, evaluate, model):
    place = make("--backend", "onnxruntime")
    message = evaluate(place, "--runtime", "engine")["error"]["message"]
    assert message.startswith(f"bundle '{place}' has no engine; build it with --backend")
    assert evaluate(place)["ran_on"] == CPU
    message = evaluate(model, "--config", "shapes", "--runtime", "engine")["error"]["message"]
    assert message == f"'{model}' is a model, which has no engine; give a bundle, or leave --runtime out"


def test_an_engine_is_compared_with_a_model_and_with_an_engine(evaluate, bundle, model):
    with_model, with_engine = (evaluate(bundle, "--against", other) for other in (model, bundle))
    assert with_model["ran_on"].startswith("TensorRT") and with_engine["ran_on"].startswith("TensorRT")
    assert with_model["against"]["ran_on"] == CPU
    assert with_model["against"]["difference"] < 0
    assert with_engine["against"]["difference"] == 0.0


def test_predict_draws_what_the_engine_finds(machine, bundle, calibration_images, tmp_path):
    pictures = sorted(calibration_images.iterdir())[:3]
    detections = {}
    for runtime, where in (("engine", "TensorRT 10.9.0 (Stand-in GPU)"), ("onnxruntime", CPU)):
        done = machine.trtdet("predict", bundle, *pictures, "-o", tmp_path / runtime, "--runtime", runtime).ok
        detections[runtime] = [
            json.loads(line) for line in (tmp_path / runtime / "detections.jsonl").read_text().splitlines()
        ]
        assert f"on {where};" in done.out
    assert detections["engine"] == detections["onnxruntime"]
    assert any(row["detections"] for row in detections["engine"])


def test_a_dynamic_batch_is_evaluated_at_its_best_size(make, evaluate, dynamic):
    """16 images in batches of 3 leave one, which the engine takes only with another."""
    place = make("--batch", "2:3:4", detector=dynamic)
    engine, model = (evaluate(place, "--runtime", runtime) for runtime in ("engine", "onnxruntime"))
    assert score(engine) == score(model)


# what goes wrong once an engine could be run is an error, never the model instead


@pytest.mark.parametrize("cut", [True, False])
def test_an_engine_that_was_altered_is_refused(evaluate, bundle, tmp_path, cut):
    """Also where the manifest has its hash."""
    engine, place = Bundle(bundle).engine.read_bytes(), tmp_path / "bundle"
    data = engine[:-1000] if cut else engine[:-1] + bytes([engine[-1] ^ 1])
    shutil.copytree(bundle, place)
    (place / "model.engine").write_bytes(data)
    assert "'model.engine' was altered" in evaluate(place)["error"]["message"]
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"]["model.engine"] = hashlib.sha256(data).hexdigest()
    (place / "manifest.json").write_text(json.dumps(manifest))
    message = evaluate(place)["error"]["message"]
    assert message.startswith("TensorRT 10.9.0 failed at loading the engine: [stdArchiveReader.cpp")
    assert message.endswith("; it was altered or cut short; build it again")


def test_a_device_that_fails_or_is_full_is_an_error(evaluate, bundle):
    error = evaluate(bundle, memory=1 << 20)["error"]
    assert error["type"] == "BackendError"
    assert "OutOfMemory" in error["message"]
    assert error["message"].endswith("; take a smaller batch, or end what else runs")
    assert evaluate(bundle, fault=700)["error"]["message"].startswith("the GPU failed at what it ran")


def test_a_plugin_that_is_not_there_is_named(make, evaluate, tmp_path):
    place = make("--silu", "plugin", "--set", f"engine.plugins={plugin_library(tmp_path, 'TRT_SiLU')}")
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["backend"]["plugins"] = []
    (place / "manifest.json").write_text(json.dumps(manifest))
    message = evaluate(place)["error"]["message"]
    assert "Cannot find plugin: TRT_SiLU" in message
    assert message.endswith("; give the library that has the plugin with --set engine.plugins=LIBRARY when building")


def test_pycuda_runs_it_without_graphs_and_says_so(evaluate, bundle, on_cpu):
    result = evaluate(bundle, pycuda=True)
    assert result["ran_on"].startswith("TensorRT 10.9.0 (Stand-in GPU), without CUDA graphs, as pycuda ")
    assert score(result) == score(on_cpu)
