"""What a bundle becomes for Triton and for DeepStream, and what cannot become anything.

Configurations are read by Triton's published message; bundles with engines are a real one with another manifest."""

from __future__ import annotations

import configparser
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from trtdet import BuildOptions, PackageOptions, TritonOptions, build, load_config, package
from trtdet.bundle import (
    MANIFEST,
    BackendPart,
    Bundle,
    BundleWriter,
    ModelPart,
    PluginPart,
    QuantizationPart,
    ShapePart,
)
from trtdet.calibration import cache
from trtdet.cli import main
from trtdet.config import InputConfig
from trtdet.data.images import preprocess
from trtdet.deploy import MARKER
from trtdet.errors import BundleError, ConfigError, OutputError
from trtdet.exporter import SHAPES_MODEL

pytest.importorskip(
    "tritonclient.grpc", reason="Triton's configuration is read by tritonclient: pip install 'trtdet[dev]'"
)

from standin.triton.server import read_config
from tritonclient.grpc import model_config_pb2

TENSORRT = BackendPart(name="tensorrt", version="10.9.0", sms=(86, 89))
INT8 = QuantizationPart(mode="explicit", calibrator="percentile")
TABLE = cache.write({"images": 0.1}, 8600)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle for onnxruntime that leaves suppression to its reader."""
    options = BuildOptions("fp32", nms="host", backend="onnxruntime")
    return build(SHAPES_MODEL, load_config("shapes"), tmp_path_factory.mktemp("made") / "b", options).bundle


Remake = Callable[..., Path]


@pytest.fixture
def remade(made: Bundle, tmp_path: Path) -> Remake:
    """The bundle with an engine and other facts."""

    def make(batch: tuple[int, int, int] = (1, 1, 1), files: dict[str, bytes] | None = None, **changes: Any) -> Path:
        manifest = made.manifest
        fields = {name: getattr(manifest, name) for name in type(manifest).model_fields}
        shapes = {key: (size, 3, 256, 256) for key, size in zip(("min", "opt", "max"), batch, strict=True)}
        fields["input"] = manifest.input.model_copy(update={"shape": ShapePart(**shapes)})
        fields["backend"] = TENSORRT
        given = {"model.engine": b"engine", "fp32.onnx": made.model.read_bytes(), **(files or {})}
        with BundleWriter(tmp_path / "bundle") as writer:
            for name, data in given.items():
                if data:
                    writer.add(name, data)
            kept = {key: value for key, value in {**fields, **changes}.items() if key not in ("created", "files")}
            return writer.commit(kept).path

    return make


def nms(made: Bundle, **changes: Any) -> Any:
    return made.manifest.nms.model_copy(update=changes)


def pixels(made: Bundle, **changes: Any) -> Any:
    part = made.manifest.input
    config = InputConfig.model_validate({**part.preprocess.model_dump(), **changes})
    return part.model_copy(update={"preprocess": config})


def repository(bundle: Path, tmp_path: Path, **options: Any) -> Path:
    return package(bundle, tmp_path / "models", PackageOptions("triton", triton=TritonOptions(**options))).folder


def configs(folder: Path) -> dict[str, Any]:
    return {path.parent.name: read_config(path.parent) for path in sorted(folder.glob("*/config.pbtxt"))}


def shape(tensor: Any) -> tuple[str, str, list[int]]:
    return tensor.name, model_config_pb2.DataType.Name(tensor.data_type), list(tensor.dims)


# Triton

BATCHES = [(1, 1, 1), (4, 4, 4), (1, 4, 8), (2, 3, 4)]


@pytest.mark.parametrize("kind", ["encoded", "pixels"])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_steps_of_the_ensemble_fit_together(remade: Remake, tmp_path: Path, batch: Any, kind: Any) -> None:
    found = configs(repository(remade(batch), tmp_path, input=kind))
    assert set(found) == {"shapes", "shapes_preprocess", "shapes_engine", "shapes_postprocess"}
    assert all(config.name == name for name, config in found.items())
    assert len({config.max_batch_size for config in found.values()}) == 1
    ensemble = found["shapes"]
    assert ensemble.platform == "ensemble"
    known = {one.name: shape(one)[1:] for one in ensemble.input}
    for step in ensemble.ensemble_scheduling.step:
        model = found[step.model_name]
        assert step.model_version == -1
        assert {key: known[value] for key, value in step.input_map.items()} == {
            one.name: shape(one)[1:] for one in model.input
        }
        given = {one.name: shape(one)[1:] for one in model.output}
        assert set(step.output_map) == set(given)
        known |= {value: given[key] for key, value in step.output_map.items()}
    assert {one.name: known[one.name] for one in ensemble.output} == {
        one.name: shape(one)[1:] for one in ensemble.output
    }
    assert [one.name for one in ensemble.output] == ["num_dets", "boxes", "scores", "classes"]


def test_a_batch_that_starts_at_one_is_filled_by_tritons_batcher(remade: Remake, tmp_path: Path) -> None:
    found = configs(repository(remade((1, 4, 8)), tmp_path, queue_delay_us=200, cpu_instances=3))
    engine = found["shapes_engine"]
    assert (engine.platform, engine.backend, engine.max_batch_size) == ("tensorrt_plan", "tensorrt", 8)
    assert list(engine.dynamic_batching.preferred_batch_size) == [4, 8]
    assert engine.dynamic_batching.max_queue_delay_microseconds == 200
    assert [shape(one) for one in engine.input] == [("images", "TYPE_FP32", [3, 256, 256])]
    assert [shape(one) for one in engine.output] == [
        ("boxes", "TYPE_FP32", [1344, 4]),
        ("scores", "TYPE_FP32", [1344, 10]),
    ]
    assert [(one.batch_size, list(one.inputs["images"].dims)) for one in engine.model_warmup] == [
        (4, [3, 256, 256]),
        (8, [3, 256, 256]),
    ]
    assert all(one.inputs["images"].zero_data for one in engine.model_warmup)
    assert engine.version_policy.latest.num_versions == 1
    assert [(group.count, group.kind) for group in engine.instance_group] == [
        (1, model_config_pb2.ModelInstanceGroup.KIND_GPU)
    ]
    for step in ("preprocess", "postprocess"):
        (group,) = found[f"shapes_{step}"].instance_group
        assert (group.count, group.kind) == (3, model_config_pb2.ModelInstanceGroup.KIND_CPU)
        assert not found[f"shapes_{step}"].HasField("dynamic_batching")
    assert [shape(one) for one in found["shapes"].output][1] == ("boxes", "TYPE_FP32", [300, 4])


@pytest.mark.parametrize(
    ("batch", "rows", "said"),
    [((1, 1, 1), 1, "1 image "), ((4, 4, 4), 4, "4 images "), ((2, 3, 4), -1, "2 to 4 images ")],
)
def test_any_other_batch_is_served_whole(remade: Remake, tmp_path: Path, batch: Any, rows: int, said: str) -> None:
    done = package(remade(batch), tmp_path / "models", PackageOptions("triton"))
    found = configs(done.folder)
    engine = found["shapes_engine"]
    assert engine.max_batch_size == 0
    assert not engine.HasField("dynamic_batching")
    assert [shape(one) for one in engine.input] == [("images", "TYPE_FP32", [rows, 3, 256, 256])]
    (warm,) = engine.model_warmup
    assert (warm.batch_size, list(warm.inputs["images"].dims)) == (1, [batch[2], 3, 256, 256])
    # A client sees the shapes that it would see otherwise.
    assert [shape(one) for one in found["shapes"].input] == [("image", "TYPE_STRING", [-1, 1])]
    assert shape(found["shapes"].output[1]) == ("boxes", "TYPE_FP32", [-1, 300, 4])
    assert any(f"takes {said}at once" in warning and "--batch" in warning for warning in done.warnings)


def test_pixels_in_place_of_files(remade: Remake, tmp_path: Path) -> None:
    found = configs(repository(remade((1, 4, 8)), tmp_path, input="pixels"))
    assert [shape(one) for one in found["shapes"].input] == [("image", "TYPE_UINT8", [-1, -1, 3])]


@pytest.mark.parametrize(("mode", "graphs"), [("host", True), ("efficient", True), ("native", False), ("onnx", False)])
def test_cuda_graphs_where_they_can_be_captured(
    made: Bundle, remade: Remake, tmp_path: Path, mode: str, graphs: bool
) -> None:
    engine = configs(repository(remade((1, 2, 2), nms=nms(made, mode=mode)), tmp_path))["shapes_engine"]
    assert engine.optimization.cuda.graphs is graphs


def test_the_devices_of_an_engine(remade: Remake, tmp_path: Path) -> None:
    engine = configs(repository(remade(), tmp_path))["shapes_engine"]
    assert dict(engine.cc_model_filenames) == {"8.6": "model.plan", "8.9": "model.plan"}
    assert engine.default_model_filename == "model.plan"
    anywhere = TENSORRT.model_copy(update={"hardware_compatible": True})
    engine = configs(repository(remade(backend=anywhere), tmp_path))["shapes_engine"]
    assert not engine.cc_model_filenames
    assert "8.0 and later" in (tmp_path / "models" / "README.md").read_text()


def test_a_plugin_library_lies_beside_the_engine_and_is_loaded(remade: Remake, tmp_path: Path) -> None:
    plugin = PluginPart(file="libown.so", sha256="0" * 64)
    bundle = remade(backend=TENSORRT.model_copy(update={"plugins": (plugin,)}), files={"libown.so": b"library"})
    folder = repository(bundle, tmp_path)
    assert (folder / "shapes_engine" / "libown.so").read_bytes() == b"library"
    text = (folder / "README.md").read_text()
    assert "--backend-config=tensorrt,plugins=/models/shapes_engine/libown.so" in text
    assert "version-compatible" not in text


def test_host_code_in_an_engine_is_allowed(remade: Remake, tmp_path: Path) -> None:
    plugin = PluginPart(file="libown.so", sha256="0" * 64, embedded=True)
    bundle = remade(backend=TENSORRT.model_copy(update={"plugins": (plugin,)}), files={"libown.so": b"library"})
    folder = repository(bundle, tmp_path)
    assert not (folder / "shapes_engine" / "libown.so").exists()
    assert "--backend-config=tensorrt,version-compatible=true" in (folder / "README.md").read_text()
    bundle = remade(backend=TENSORRT.model_copy(update={"version_compatible": True}))
    text = (repository(bundle, tmp_path) / "README.md").read_text()
    assert "--backend-config=tensorrt,version-compatible=true" in text
    assert "TensorRT 10.9.0 or a later one" in text


def test_class_names_come_back_whatever_they_are(made: Bundle, remade: Remake, tmp_path: Path) -> None:
    names = ('say "cheese"', "back\\slash", "Straße", "自転車", "tab\there", "e", "f", "g", "h", "i")
    model = ModelPart(**{**made.manifest.model.model_dump(), "classes": names})
    ensemble = configs(repository(remade(model=model), tmp_path))["shapes"]
    assert tuple(json.loads(ensemble.parameters["classes"].string_value)) == names


def test_labels_one_a_line_and_every_file_by_its_hash(made: Bundle, remade: Remake, tmp_path: Path) -> None:
    done = package(remade(), tmp_path / "models", PackageOptions("triton"))
    assert (done.folder / "shapes" / "labels.txt").read_text().splitlines() == list(made.manifest.model.classes)
    facts = json.loads((done.folder / MARKER).read_text())
    there = {str(path.relative_to(done.folder)) for path in done.folder.rglob("*") if path.is_file()}
    assert there == {*facts["files"], MARKER} == set(done.files)
    assert facts["format"] == "triton"
    # Triton takes every folder for a model; files beside them it leaves alone.
    assert {path.name for path in done.folder.iterdir() if path.is_dir()} == set(configs(done.folder))


def test_a_bundle_without_engine_is_run_by_onnxruntime(made: Bundle, tmp_path: Path) -> None:
    done = package(made.path, tmp_path / "models", PackageOptions("triton", name="cpu"))
    engine = configs(done.folder)["cpu_engine"]
    assert (engine.platform, engine.backend) == ("onnxruntime_onnx", "onnxruntime")
    assert engine.default_model_filename == "model.onnx"
    assert (done.folder / "cpu_engine" / "1" / "model.onnx").read_bytes() == made.model.read_bytes()
    assert engine.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_CPU
    assert not engine.HasField("optimization")
    assert any("no engine" in warning and "opset 17" in warning for warning in done.warnings)
    assert "--gpus" not in (done.folder / "README.md").read_text()


def test_quantised_without_engine_it_is_computed_as_written(made: Bundle, remade: Remake, tmp_path: Path) -> None:
    bundle = remade(backend=made.manifest.backend, quantization=INT8, files={"model.engine": b""})
    engine = configs(repository(bundle, tmp_path))["shapes_engine"]
    assert engine.optimization.graph.level == -1


def test_low_thresholds_are_told(made: Bundle, remade: Remake, tmp_path: Path) -> None:
    def told(threshold: float) -> list[str]:
        bundle = remade((1, 2, 2), nms=nms(made, score_threshold=threshold))
        warnings = package(bundle, tmp_path / "models", PackageOptions("triton")).warnings
        return [warning for warning in warnings if "score threshold" in warning]

    assert len(told(0.001)) == 1
    assert told(0.25) == []


# what is refused


def refusal(bundle: Path, folder: Path, options: PackageOptions, error: type[Exception] = BundleError) -> str:
    with pytest.raises(error) as raised:
        package(bundle, folder, options)
    assert not folder.exists()
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(("format", "whose"), [("triton", "Triton has no backend"), ("deepstream", "nvinfer has no")])
def test_an_engine_of_tensorrt_rtx_is_refused(remade: Remake, tmp_path: Path, format: Any, whose: str) -> None:
    bundle = remade(backend=BackendPart(name="tensorrt-rtx", version="1.7.1", sms=(86,)))
    text = refusal(bundle, tmp_path / "models", PackageOptions(format))
    assert f"engine of TensorRT-RTX, for which {whose}" in text
    assert "--backend tensorrt" in text


@pytest.mark.parametrize("name", ["", "a b", "../up", ".hidden", "Straße", "a/b"])
def test_a_name_that_is_no_folder_is_refused(remade: Remake, tmp_path: Path, name: str) -> None:
    text = refusal(remade(), tmp_path / "models", PackageOptions("triton", name=name), ConfigError)
    assert f"'{name}' cannot be the name" in text
    assert "--name" in text


def test_options_of_triton_are_refused_elsewhere(remade: Remake, tmp_path: Path) -> None:
    options = PackageOptions("deepstream", triton=TritonOptions())
    assert "are Triton's" in refusal(remade(), tmp_path / "ds", options, ConfigError)


@pytest.mark.parametrize("given", [{"queue_delay_us": -1}, {"cpu_instances": 0}])
def test_numbers_that_cannot_be_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="the delay must be at least 0, and the processes at least 1"):
        TritonOptions(**given)


def test_an_altered_bundle_is_refused_and_what_stood_there_stays(remade: Remake, tmp_path: Path) -> None:
    bundle = remade()
    folder = repository(bundle, tmp_path)
    before = (folder / MARKER).read_bytes()
    (bundle / "model.engine").write_bytes(b"another")
    with pytest.raises(BundleError, match="'model.engine' was altered"):
        repository(bundle, tmp_path)
    assert (folder / MARKER).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "models"]


def test_another_package_is_replaced_and_anything_else_is_not(remade: Remake, tmp_path: Path) -> None:
    bundle = remade()
    folder = repository(bundle, tmp_path)
    package(bundle, folder, PackageOptions("deepstream"))
    assert (folder / "config_infer_primary.txt").is_file()
    assert not (folder / "shapes").exists()
    (folder / MARKER).unlink()
    with pytest.raises(OutputError, match="exists and is not a package of trtdet; choose another place"):
        repository(bundle, tmp_path)
    assert (folder / "config_infer_primary.txt").is_file()
    with pytest.raises(OutputError, match="is not a package of trtdet"):
        package(bundle, bundle, PackageOptions("triton"))
    assert (bundle / MANIFEST).is_file()


def test_operators_that_only_a_plugin_has_need_an_engine(made: Bundle, remade: Remake, tmp_path: Path) -> None:
    model = onnx.load(str(made.model))
    next(node for node in model.graph.node if node.op_type == "Mul").domain = "trt.plugins"
    files = {"model.engine": b"", "fp32.onnx": model.SerializeToString()}
    bundle = remade(backend=made.manifest.backend, files=files)
    assert "no operator Mul; build it with --backend tensorrt" in refusal(
        bundle, tmp_path / "m", PackageOptions("triton")
    )


def test_a_type_that_triton_does_not_serve_is_refused(made: Bundle, remade: Remake, tmp_path: Path) -> None:
    odd = tuple(part.model_copy(update={"dtype": "float64"}) for part in made.manifest.outputs)
    assert "type float64 cannot be served" in refusal(remade(outputs=odd), tmp_path / "m", PackageOptions("triton"))


# DeepStream

KEYS = {
    # Gst-nvinfer, "Gst-nvinfer File Configuration Specifications", as far as a detector in primary mode goes
    "gpu-id",
    "gie-unique-id",
    "process-mode",
    "network-type",
    "model-engine-file",
    "onnx-file",
    "int8-calib-file",
    "labelfile-path",
    "batch-size",
    "network-mode",
    "infer-dims",
    "net-scale-factor",
    "offsets",
    "model-color-format",
    "maintain-aspect-ratio",
    "symmetric-padding",
    "scaling-filter",
    "interval",
    "num-detected-classes",
    "cluster-mode",
    "output-blob-names",
    "parse-bbox-func-name",
    "custom-lib-path",
}


def nvinfer(bundle: Path, tmp_path: Path) -> tuple[configparser.ConfigParser, tuple[str, ...], Path]:
    done = package(bundle, tmp_path / "ds", PackageOptions("deepstream"))
    parser = configparser.ConfigParser()
    parser.read(done.folder / "config_infer_primary.txt")
    assert set(parser.sections()) == {"property", "class-attrs-all"}
    assert set(parser["property"]) <= KEYS
    assert set(parser["class-attrs-all"]) == {"pre-cluster-threshold", "topk"}
    for key in ("model-engine-file", "onnx-file", "int8-calib-file", "labelfile-path"):
        name = parser["property"].get(key)
        assert name is None or name.startswith("model.onnx_b") or (done.folder / name).is_file(), key
    return parser, done.warnings, done.folder


def test_nvinfer_is_told_what_the_manifest_says(made: Bundle, remade: Remake, tmp_path: Path) -> None:
    table = {"calibration.cache": TABLE.encode()}
    parser, warnings, folder = nvinfer(remade((1, 4, 8), table, quantization=INT8), tmp_path)
    keys = parser["property"]
    assert (keys["model-engine-file"], keys["onnx-file"]) == ("model.engine", "model.onnx")
    assert keys["int8-calib-file"] == "calibration.cache"
    assert (keys["batch-size"], keys["network-mode"], keys["infer-dims"]) == ("8", "1", "3;256;256")
    assert keys["output-blob-names"] == "boxes;scores"
    assert (keys["cluster-mode"], keys["parse-bbox-func-name"]) == ("4", "NvDsInferParseTrtdet")
    assert keys["custom-lib-path"] == "libnvdsinfer_trtdet.so"
    assert keys["num-detected-classes"] == "10"
    assert (folder / "labels.txt").read_text().splitlines() == list(made.manifest.model.classes)
    assert float(parser["class-attrs-all"]["pre-cluster-threshold"]) == made.manifest.nms.score_threshold
    assert {path.name for path in folder.iterdir()} >= {"nvdsinfer_trtdet.cpp", "CMakeLists.txt", "README.md"}
    assert all(warning in (folder / "README.md").read_text() for warning in warnings)


@pytest.mark.parametrize(
    ("resize", "keep", "middle"),
    [("letterbox-topleft", "1", "0"), ("letterbox-centre", "1", "1"), ("stretch", "0", "0")],
)
@pytest.mark.parametrize("grey", [0, 114])
def test_how_nvinfer_resizes_and_that_it_pads_with_black(
    made: Bundle, remade: Remake, tmp_path: Path, resize: str, keep: str, middle: str, grey: int
) -> None:
    parser, warnings, _ = nvinfer(remade(input=pixels(made, resize=resize, pad_value=grey)), tmp_path)
    keys = parser["property"]
    assert (keys["maintain-aspect-ratio"], keys["symmetric-padding"]) == (keep, middle)
    black = [warning for warning in warnings if "pads with black" in warning]
    assert len(black) == (resize != "stretch" and grey != 0)


@pytest.mark.parametrize("color", ["rgb", "bgr"])
@pytest.mark.parametrize(
    ("scale", "mean", "std"),
    [
        (1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        (1 / 255, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        (1.0, (103.53, 116.28, 123.675), (57.0, 57.0, 57.0)),
        (1 / 255, (0.485, 0.456, 0.406), (0.225, 0.225, 0.225)),
    ],
)
def test_nvinfers_formula_gives_trtdets_numbers(
    made: Bundle, remade: Remake, tmp_path: Path, color: str, scale: float, mean: Any, std: Any
) -> None:
    part = pixels(made, color=color, scale=scale, mean=mean, std=std)
    parser, _, _ = nvinfer(remade(input=part), tmp_path)
    keys = parser["property"]
    image = np.random.default_rng(3).integers(0, 256, (256, 256, 3)).astype(np.uint8)
    expected, _ = preprocess(image, part.preprocess)
    ordered = image if keys["model-color-format"] == "0" else image[:, :, ::-1]
    offsets = np.array([float(value) for value in keys["offsets"].split(";")], np.float32)
    found = np.float32(keys["net-scale-factor"]) * (ordered.astype(np.float32) - offsets)
    np.testing.assert_allclose(found.transpose(2, 0, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "value", "told"), [("nearest", "0", 0), ("linear", "1", 0), ("cubic", "2", 1), ("area", "3", 1)]
)
def test_what_nvinfer_scales_with(
    made: Bundle, remade: Remake, tmp_path: Path, given: str, value: str, told: int
) -> None:
    parser, warnings, _ = nvinfer(remade(input=pixels(made, interpolation=given)), tmp_path)
    assert parser["property"]["scaling-filter"] == value
    assert len([warning for warning in warnings if f"no '{given}' interpolation" in warning]) == told


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"std": (58.4, 57.1, 57.4)}, "one scale for all channels, and input.std is [58.4, 57.1, 57.4]"),
        ({"mean": (-1.0, 0.0, 0.0)}, "offsets must be at least 0, and input.mean is [-1.0, 0.0, 0.0]"),
    ],
)
def test_pre_processing_that_nvinfer_cannot_do_is_refused(
    made: Bundle, remade: Remake, tmp_path: Path, changes: Any, said: str
) -> None:
    bundle = remade(input=pixels(made, **changes))
    assert said in refusal(bundle, tmp_path / "ds", PackageOptions("deepstream"), ConfigError)


def test_what_else_nvinfer_cannot_take(made: Bundle, remade: Remake, tmp_path: Path) -> None:
    half = made.manifest.input.model_copy(update={"dtype": "float16"})
    text = refusal(remade(input=half), tmp_path / "ds", PackageOptions("deepstream"))
    assert "input is float16, and nvinfer gives float32" in text
    model = ModelPart(**{**made.manifest.model.model_dump(), "classes": ("two\nlines", *"abcdefghi")})
    text = refusal(remade(model=model), tmp_path / "ds", PackageOptions("deepstream"), ConfigError)
    assert r"class name 'two\nlines' cannot be a line" in text


def test_where_tensorrt_has_no_calibrators_there_is_no_table(remade: Remake, tmp_path: Path) -> None:
    newer = TENSORRT.model_copy(update={"version": "11.1.0"})
    table = {"calibration.cache": TABLE.encode()}
    parser, warnings, folder = nvinfer(remade(files=table, backend=newer, quantization=INT8), tmp_path)
    assert "int8-calib-file" not in parser["property"]
    assert not (folder / "calibration.cache").exists()
    assert any("no calibration table" in warning for warning in warnings)


def test_a_table_of_another_algorithm_is_told_where_it_matters(remade: Remake, tmp_path: Path) -> None:
    def told(mode: str, algorithm: str) -> bool:
        table = {"calibration.cache": cache.write({"images": 0.1}, 8600, algorithm).encode()}
        part = INT8.model_copy(update={"mode": mode})
        _, warnings, _ = nvinfer(remade(files=table, quantization=part), tmp_path)
        return any(f"algorithm {algorithm}" in warning for warning in warnings)

    assert told("implicit", "MinMaxCalibration")
    assert not told("implicit", cache.OURS)
    assert not told("explicit", "MinMaxCalibration")


def test_nvinfer_names_the_engine_that_it_builds_itself(made: Bundle, tmp_path: Path) -> None:
    parser, warnings, folder = nvinfer(made.path, tmp_path)
    assert parser["property"]["model-engine-file"] == "model.onnx_b1_gpu0_fp32.engine"
    assert parser["property"]["network-mode"] == "0"
    assert not (folder / "model.engine").exists()
    assert any("nvinfer builds one" in warning for warning in warnings)


def test_libraries_and_host_code_are_told_to_who_runs_nvinfer(remade: Remake, tmp_path: Path) -> None:
    plugin = PluginPart(file="libown.so", sha256="0" * 64)
    bundle = remade(backend=TENSORRT.model_copy(update={"plugins": (plugin,)}), files={"libown.so": b"library"})
    _, warnings, folder = nvinfer(bundle, tmp_path)
    assert any("libown.so" in warning and "LD_PRELOAD" in warning for warning in warnings)
    assert 'LD_PRELOAD="$PWD/libown.so" gst-launch-1.0' in (folder / "README.md").read_text()
    _, warnings, _ = nvinfer(remade(backend=TENSORRT.model_copy(update={"version_compatible": True})), tmp_path)
    assert any("carries host code" in warning for warning in warnings)


# the command


def test_the_command_says_what_it_wrote(remade: Remake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, folder = remade(), tmp_path / "models"
    arguments = ["package", str(bundle), "-o", str(folder), "--format", "triton", "--name", "street", "--json"]
    assert main([*arguments, "--input", "pixels", "--queue-delay", "100", "--cpu-instances", "1"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert set(found) == {"package", "format", "files", "warnings"}
    assert (found["package"], found["format"]) == (str(folder), "triton")
    assert all((folder / name).is_file() for name in found["files"])
    assert all(f"warning: {warning}" in captured.err for warning in found["warnings"])
    street = read_config(folder / "street")
    assert [shape(one) for one in street.input] == [("image", "TYPE_UINT8", [-1, -1, -1, 3])]


def test_the_command_refuses_in_one_line(remade: Remake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = remade(backend=BackendPart(name="tensorrt-rtx", version="1.7.1", sms=()))
    assert main(["package", str(bundle), "-o", str(tmp_path / "m"), "--format", "triton", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["type"] == "BundleError"
    assert len([line for line in captured.err.splitlines() if line.startswith("trtdet: error: ")]) == 1
    assert main(["package", str(tmp_path / "none"), "-o", str(tmp_path / "m"), "--format", "triton"]) == 1
    assert "is not a bundle" in capsys.readouterr().err
    arguments = ["package", str(bundle), "-o", str(tmp_path / "m"), "--format", "deepstream", "--queue-delay", "1"]
    assert main(arguments) == 1
    assert "are Triton's" in capsys.readouterr().err
