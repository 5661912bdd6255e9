"""Model repositories of Triton; configurations are read by Triton's published message."""

import json
from typing import Any

import pytest
from packages import INT8, TENSORRT, configs, nms, repository, shape
from tritonclient.grpc import model_config_pb2

from trtdet import PackageOptions, package
from trtdet.bundle import ModelPart, PluginPart
from trtdet.deploy import MARKER


@pytest.mark.parametrize("kind", ["encoded", "pixels"])
@pytest.mark.parametrize("batch", [(1, 1, 1), (4, 4, 4), (1, 4, 8), (2, 3, 4)])
def test_the_steps_of_the_ensemble_fit_together(remade, tmp_path, batch, kind):
    found = configs(repository(remade(batch), tmp_path, input=kind))
    assert set(found) == {"shapes", "shapes_preprocess", "shapes_engine", "shapes_postprocess"}
    assert all(config.name == name for name, config in found.items())
    assert len({config.max_batch_size for config in found.values()}) == 1
    ensemble = found["shapes"]
    assert ensemble.platform == "ensemble"

    def forms(tensors: Any) -> dict[str, Any]:
        return {tensor.name: shape(tensor)[1:] for tensor in tensors}

    known = forms(ensemble.input)
    for step in ensemble.ensemble_scheduling.step:
        model = found[step.model_name]
        assert step.model_version == -1
        assert {key: known[value] for key, value in step.input_map.items()} == forms(model.input)
        given = forms(model.output)
        assert set(step.output_map) == set(given)
        known |= {value: given[key] for key, value in step.output_map.items()}
    assert {one.name: known[one.name] for one in ensemble.output} == forms(ensemble.output)
    assert [one.name for one in ensemble.output] == ["num_dets", "boxes", "scores", "classes"]
    rows = [] if batch == (1, 4, 8) else [-1]
    image = ("TYPE_STRING", [*rows, 1]) if kind == "encoded" else ("TYPE_UINT8", [*rows, -1, -1, 3])
    assert forms(ensemble.input) == {"image": image}


def test_a_batch_that_starts_at_one_is_filled_by_tritons_batcher(remade, tmp_path):
    found = configs(repository(remade((1, 4, 8)), tmp_path, queue_delay_us=200, cpu_instances=3))
    engine = found["shapes_engine"]
    assert (engine.platform, engine.backend, engine.max_batch_size) == ("tensorrt_plan", "tensorrt", 8)
    assert list(engine.dynamic_batching.preferred_batch_size) == [4, 8]
    assert engine.dynamic_batching.max_queue_delay_microseconds == 200
    assert [shape(one) for one in engine.input] == [("images", "TYPE_FP32", [3, 256, 256])]
    outputs = [("boxes", "TYPE_FP32", [1344, 4]), ("scores", "TYPE_FP32", [1344, 10])]
    assert [shape(one) for one in engine.output] == outputs
    warmups = [(one.batch_size, list(one.inputs["images"].dims)) for one in engine.model_warmup]
    assert warmups == [(4, [3, 256, 256]), (8, [3, 256, 256])]
    assert all(one.inputs["images"].zero_data for one in engine.model_warmup)
    assert engine.version_policy.latest.num_versions == 1
    (group,) = engine.instance_group
    assert (group.count, group.kind) == (1, model_config_pb2.ModelInstanceGroup.KIND_GPU)
    for step in ("preprocess", "postprocess"):
        (group,) = found[f"shapes_{step}"].instance_group
        assert (group.count, group.kind) == (3, model_config_pb2.ModelInstanceGroup.KIND_CPU)
        assert not found[f"shapes_{step}"].HasField("dynamic_batching")
    assert [shape(one) for one in found["shapes"].output][1] == ("boxes", "TYPE_FP32", [300, 4])


@pytest.mark.parametrize(
    ("batch", "rows", "said"),
    [((1, 1, 1), 1, "1 image "), ((4, 4, 4), 4, "4 images "), ((2, 3, 4), -1, "2 to 4 images ")],
)
def test_any_other_batch_is_served_whole(remade, tmp_path, batch, rows, said):
    done = package(remade(batch), tmp_path / "models", PackageOptions("triton"))
    found = configs(done.folder)
    engine = found["shapes_engine"]
    assert engine.max_batch_size == 0
    assert not engine.HasField("dynamic_batching")
    assert [shape(one) for one in engine.input] == [("images", "TYPE_FP32", [rows, 3, 256, 256])]
    (warm,) = engine.model_warmup
    assert (warm.batch_size, list(warm.inputs["images"].dims)) == (1, [batch[2], 3, 256, 256])
    # A client sees the shapes that it would see otherwise.
    assert shape(found["shapes"].output[1]) == ("boxes", "TYPE_FP32", [-1, 300, 4])
    assert any(f"takes {said}at once" in warning and "--batch" in warning for warning in done.warnings)


@pytest.mark.parametrize(("mode", "graphs"), [("host", True), ("efficient", True), ("native", False), ("onnx", False)])
def test_cuda_graphs_where_they_can_be_captured(made, remade, tmp_path, mode, graphs):
    engine = configs(repository(remade((1, 2, 2), nms=nms(made, mode=mode)), tmp_path))["shapes_engine"]
    assert engine.optimization.cuda.graphs is graphs


def test_the_devices_of_an_engine(remade, tmp_path):
    engine = configs(repository(remade(), tmp_path))["shapes_engine"]
    assert dict(engine.cc_model_filenames) == {"8.6": "model.plan", "8.9": "model.plan"}
    assert engine.default_model_filename == "model.plan"
    anywhere = TENSORRT.model_copy(update={"hardware_compatible": True})
    engine = configs(repository(remade(backend=anywhere), tmp_path))["shapes_engine"]
    assert not engine.cc_model_filenames
    assert "8.0 and later" in (tmp_path / "models" / "README.md").read_text()


def test_a_plugin_library_lies_beside_the_engine_and_is_loaded(remade, tmp_path):
    plugin = PluginPart(file="libown.so", sha256="0" * 64)
    bundle = remade(backend=TENSORRT.model_copy(update={"plugins": (plugin,)}), files={"libown.so": b"library"})
    folder = repository(bundle, tmp_path)
    assert (folder / "shapes_engine" / "libown.so").read_bytes() == b"library"
    text = (folder / "README.md").read_text()
    assert "--backend-config=tensorrt,plugins=/models/shapes_engine/libown.so" in text
    assert "version-compatible" not in text


def test_host_code_in_an_engine_is_allowed(remade, tmp_path):
    plugin = PluginPart(file="libown.so", sha256="0" * 64, embedded=True)
    bundle = remade(backend=TENSORRT.model_copy(update={"plugins": (plugin,)}), files={"libown.so": b"library"})
    folder = repository(bundle, tmp_path)
    assert not (folder / "shapes_engine" / "libown.so").exists()
    assert "--backend-config=tensorrt,version-compatible=true" in (folder / "README.md").read_text()
    bundle = remade(backend=TENSORRT.model_copy(update={"version_compatible": True}))
    text = (repository(bundle, tmp_path) / "README.md").read_text()
    assert "--backend-config=tensorrt,version-compatible=true" in text
    assert "TensorRT 10.9.0 or a later one" in text


def test_class_names_come_back_whatever_they_are(made, remade, tmp_path):
    names = ('say "cheese"', "back\\slash", "Straße", "自転車", "tab\there", "e", "f", "g", "h", "i")
    model = ModelPart(**{**made.manifest.model.model_dump(), "classes": names})
    ensemble = configs(repository(remade(model=model), tmp_path))["shapes"]
    assert tuple(json.loads(ensemble.parameters["classes"].string_value)) == names


def test_labels_one_a_line_and_every_file_by_its_hash(made, remade, tmp_path):
    done = package(remade(), tmp_path / "models", PackageOptions("triton"))
    assert (done.folder / "shapes" / "labels.txt").read_text().splitlines() == list(made.manifest.model.classes)
    facts = json.loads((done.folder / MARKER).read_text())
    there = {str(path.relative_to(done.folder)) for path in done.folder.rglob("*") if path.is_file()}
    assert there == {*facts["files"], MARKER} == set(done.files)
    assert facts["format"] == "triton"
    # Triton takes every folder for a model; files beside them it leaves alone.
    assert {path.name for path in done.folder.iterdir() if path.is_dir()} == set(configs(done.folder))


def test_a_bundle_without_engine_is_run_by_onnxruntime(made, remade, tmp_path):
    done = package(made.path, tmp_path / "models", PackageOptions("triton", name="cpu"))
    engine = configs(done.folder)["cpu_engine"]
    assert (engine.platform, engine.backend) == ("onnxruntime_onnx", "onnxruntime")
    assert engine.default_model_filename == "model.onnx"
    assert (done.folder / "cpu_engine" / "1" / "model.onnx").read_bytes() == made.model.read_bytes()
    assert engine.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_CPU
    assert not engine.HasField("optimization")
    assert any("no engine" in warning and "opset 17" in warning for warning in done.warnings)
    assert "--gpus" not in (done.folder / "README.md").read_text()
    quantised = remade(backend=made.manifest.backend, quantization=INT8, files={"model.engine": b""})
    assert configs(repository(quantised, tmp_path))["shapes_engine"].optimization.graph.level == -1


def test_low_thresholds_are_told(made, remade, tmp_path):
    def told(threshold: float) -> list[str]:
        bundle = remade((1, 2, 2), nms=nms(made, score_threshold=threshold))
        warnings = package(bundle, tmp_path / "models", PackageOptions("triton")).warnings
        return [warning for warning in warnings if "score threshold" in warning]

    assert len(told(0.001)) == 1
    assert told(0.25) == []
