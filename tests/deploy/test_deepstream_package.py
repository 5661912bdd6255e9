"""Configurations of DeepStream's Gst-nvinfer."""

import configparser
from pathlib import Path

import numpy as np
import pytest
from packages import INT8, TABLE, TENSORRT, pixels, refusal

from trtdet import PackageOptions, package
from trtdet.bundle import ModelPart, PluginPart
from trtdet.calibration import cache
from trtdet.data.images import preprocess
from trtdet.errors import ConfigError

# Gst-nvinfer, "Gst-nvinfer File Configuration Specifications", as far as a detector in primary mode goes
KEYS = (
    "gpu-id gie-unique-id process-mode network-type model-engine-file onnx-file int8-calib-file labelfile-path "
    "batch-size network-mode infer-dims net-scale-factor offsets model-color-format maintain-aspect-ratio "
    "symmetric-padding scaling-filter interval num-detected-classes cluster-mode output-blob-names "
    "parse-bbox-func-name custom-lib-path enable-dla use-dla-core"
)


def nvinfer(bundle: Path, tmp_path: Path) -> tuple[configparser.ConfigParser, tuple[str, ...], Path]:
    done = package(bundle, tmp_path / "ds", PackageOptions("deepstream"))
    parser = configparser.ConfigParser()
    parser.read(done.folder / "config_infer_primary.txt")
    assert set(parser.sections()) == {"property", "class-attrs-all"}
    assert set(parser["property"]) <= set(KEYS.split())
    assert set(parser["class-attrs-all"]) == {"pre-cluster-threshold", "topk"}
    for key in ("model-engine-file", "onnx-file", "int8-calib-file", "labelfile-path"):
        name = parser["property"].get(key)
        assert name is None or name.startswith("model.onnx_b") or (done.folder / name).is_file(), key
    return parser, done.warnings, done.folder


def test_nvinfer_is_told_what_the_manifest_says(made, remade, tmp_path):
    table = {"calibration.cache": TABLE.encode()}
    parser, warnings, folder = nvinfer(remade((1, 4, 8), table, quantization=INT8), tmp_path)
    keys = parser["property"]
    assert (keys["model-engine-file"], keys["onnx-file"]) == ("model.engine", "model.onnx")
    assert keys["int8-calib-file"] == "calibration.cache"
    assert (keys["batch-size"], keys["network-mode"], keys["infer-dims"]) == ("8", "1", "3;256;256")
    assert keys["output-blob-names"] == "boxes;scores" and "enable-dla" not in keys
    assert (keys["cluster-mode"], keys["parse-bbox-func-name"]) == ("4", "NvDsInferParseTrtdet")
    assert (keys["custom-lib-path"], keys["num-detected-classes"]) == ("libnvdsinfer_trtdet.so", "10")
    assert (folder / "labels.txt").read_text().splitlines() == list(made.manifest.model.classes)
    assert float(parser["class-attrs-all"]["pre-cluster-threshold"]) == made.manifest.nms.score_threshold
    assert {path.name for path in folder.iterdir()} >= {"nvdsinfer_trtdet.cpp", "CMakeLists.txt", "README.md"}
    assert all(warning in (folder / "README.md").read_text() for warning in warnings)


def test_nvinfer_is_told_of_a_dla(remade, tmp_path):
    parser, _, _ = nvinfer(remade(backend=TENSORRT.model_copy(update={"dla": 1})), tmp_path)
    assert (parser["property"]["enable-dla"], parser["property"]["use-dla-core"]) == ("1", "1")


@pytest.mark.parametrize(
    ("resize", "keep", "middle"),
    [("letterbox-topleft", "1", "0"), ("letterbox-centre", "1", "1"), ("stretch", "0", "0")],
)
@pytest.mark.parametrize("grey", [0, 114])
def test_how_nvinfer_resizes_and_that_it_pads_with_black(made, remade, tmp_path, resize, keep, middle, grey):
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
def test_nvinfers_formula_gives_trtdets_numbers(made, remade, tmp_path, color, scale, mean, std):
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
def test_what_nvinfer_scales_with(made, remade, tmp_path, given, value, told):
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
def test_pre_processing_that_nvinfer_cannot_do_is_refused(made, remade, tmp_path, changes, said):
    bundle = remade(input=pixels(made, **changes))
    assert said in refusal(bundle, tmp_path / "ds", PackageOptions("deepstream"), ConfigError)


def test_what_else_nvinfer_cannot_take(made, remade, tmp_path):
    half = made.manifest.input.model_copy(update={"dtype": "float16"})
    text = refusal(remade(input=half), tmp_path / "ds", PackageOptions("deepstream"))
    assert "input is float16, and nvinfer gives float32" in text
    model = ModelPart(**{**made.manifest.model.model_dump(), "classes": ("two\nlines", *"abcdefghi")})
    text = refusal(remade(model=model), tmp_path / "ds", PackageOptions("deepstream"), ConfigError)
    assert r"class name 'two\nlines' cannot be a line" in text


def test_where_tensorrt_has_no_calibrators_there_is_no_table(remade, tmp_path):
    newer = TENSORRT.model_copy(update={"version": "11.1.0"})
    table = {"calibration.cache": TABLE.encode()}
    parser, warnings, folder = nvinfer(remade(files=table, backend=newer, quantization=INT8), tmp_path)
    assert "int8-calib-file" not in parser["property"]
    assert not (folder / "calibration.cache").exists()
    assert any("no calibration table" in warning for warning in warnings)


def test_a_table_of_another_algorithm_is_told_where_it_matters(remade, tmp_path):
    def told(mode: str, algorithm: str) -> bool:
        table = {"calibration.cache": cache.write({"images": 0.1}, 8600).replace(cache.OURS, algorithm).encode()}
        part = INT8.model_copy(update={"mode": mode})
        _, warnings, _ = nvinfer(remade(files=table, quantization=part), tmp_path)
        return any(f"algorithm {algorithm}" in warning for warning in warnings)

    assert told("implicit", "MinMaxCalibration")
    assert not told("implicit", cache.OURS)
    assert not told("explicit", "MinMaxCalibration")


def test_nvinfer_names_the_engine_that_it_builds_itself(made, tmp_path):
    parser, warnings, folder = nvinfer(made.path, tmp_path)
    assert parser["property"]["model-engine-file"] == "model.onnx_b1_gpu0_fp32.engine"
    assert parser["property"]["network-mode"] == "0"
    assert not (folder / "model.engine").exists()
    assert any("nvinfer builds one" in warning for warning in warnings)


def test_libraries_and_host_code_are_told_to_who_runs_nvinfer(remade, tmp_path):
    plugin = PluginPart(file="libown.so", sha256="0" * 64)
    bundle = remade(backend=TENSORRT.model_copy(update={"plugins": (plugin,)}), files={"libown.so": b"library"})
    _, warnings, folder = nvinfer(bundle, tmp_path)
    assert any("libown.so" in warning and "LD_PRELOAD" in warning for warning in warnings)
    assert 'LD_PRELOAD="$PWD/libown.so" gst-launch-1.0' in (folder / "README.md").read_text()
    _, warnings, _ = nvinfer(remade(backend=TENSORRT.model_copy(update={"version_compatible": True})), tmp_path)
    assert any("carries host code" in warning for warning in warnings)
