"""A detector with attention, from the options to the bundle: its products are layers like convolutions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from attention import PRODUCTS, attention_config, attention_detector

from trtdet import BuildOptions, CalibrationOptions, KeepOptions
from trtdet.backends import Capabilities
from trtdet.bundle import Bundle
from trtdet.config import Config
from trtdet.demo import shapes
from trtdet.errors import BackendError, ConfigError
from trtdet.pipeline import SensitivityOptions, build, sensitivity
from trtdet.pipeline.stages.calibrating import Selection
from trtdet.pipeline.stages.half_range import Magnitudes, half_parts
from trtdet.pipeline.stages.rewriting import host_graph
from trtdet.pipeline.stages.sizes import weight_bytes
from trtdet.pipeline.validation import check_build
from trtdet.quantization import DataFlow, PrecisionPlan

KEPT = "/encoder/fc1/MatMul"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes.generate(tmp_path_factory.mktemp("shapes"), "calibration", 20).images


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return attention_config(tmp_path_factory.mktemp("config"))


@pytest.fixture
def caps() -> Capabilities:
    return Capabilities("new", "10.1", True, True, sms=(86, 89), default_sms=(86, 89), fp8=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "attention.onnx"
    onnx.save(attention_detector(), path)
    return path


@pytest.fixture(scope="module")
def bundle(model: Path, config: Config, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    options = BuildOptions(
        calibration=CalibrationOptions("minmax", images=images, check_input=False),
        correct=("range", "smooth", "round", "bias"),
        keep=KeepOptions((KEPT,)),
        backend="onnxruntime",
        int8_all=True,
    )
    return build(model, config, tmp_path_factory.mktemp("bundles") / "b", options).bundle


@pytest.mark.slow
def test_products_are_corrected_and_kept_by_name(bundle: Bundle) -> None:
    plan = PrecisionPlan.load(bundle.file("plan.json"))
    assert plan.counts() == {"int8": PRODUCTS + 4, "fp16": 1, "fp32": 0}
    assert plan.entries[KEPT].cause.value == "kept-named"
    done = {step.name for step in plan.entries["/encoder/q/MatMul"].corrections}
    assert done == {"smooth", "round", "bias"}
    (smooth, *_) = plan.entries["/encoder/q/MatMul"].corrections
    assert smooth.error < 0.2 * smooth.without  # two channels are twenty times the others


@pytest.mark.slow
def test_smoothing_before_products_is_in_the_layer_normalization(bundle: Bundle) -> None:
    graph = onnx.load(str(bundle.file("int8.onnx"))).graph
    read = {name: node for node in graph.node for name in node.input}
    norm = next(node for node in graph.node if node.name == "/encoder/norm0")
    assert read[norm.output[0]].op_type == "QuantizeLinear"


def test_a_ranking_lists_products(model: Path, config: Config, images: Path) -> None:
    calibration = CalibrationOptions("minmax", images=images, check_input=False)
    found = sensitivity(model, config, SensitivityOptions(calibration, correct=(), num_images=2))
    names = {layer.name for layer in found.layers}
    assert {"/encoder/q/MatMul", "/in/Gemm", "/psa/proj/Conv"} <= names
    assert "/classes/MatMul" not in names


def test_what_attention_gives_is_measured_before_it_runs_in_fp16(config: Config, images: Path, tmp_path: Path) -> None:
    path = tmp_path / "large.onnx"
    onnx.save(attention_detector(outlier=1e5), path)
    graph = host_graph(path, config)
    selected = Selection(tuple(sorted(images.glob("*.jpg")) or sorted(images.iterdir()))[:2])
    plan = graph.placement.plan
    found = half_parts(graph.model, plan, DataFlow(half=True, weights=("tensor",)), Magnitudes(graph, selected))
    assert "/encoder/norm0" in found.left
    assert found.reasons["/encoder/norm0"].startswith("FP16 would overflow: '/encoder/norm0_output' reaches ")
    assert found.outputs["/encoder/q/MatMul"].shape == (32,)
    assert weight_bytes(graph.model, plan) == sum(
        weight.dims[0] * weight.dims[1] * (1 if len(weight.dims) == 2 else weight.dims[2] * weight.dims[3])
        for weight in graph.model.graph.initializer
        if weight.name.endswith(".weight") and len(weight.dims) > 1
    )


def test_products_of_two_activations_are_in_int8_only_where_that_is_asked_for(
    model: Path, config: Config, images: Path, tmp_path: Path
) -> None:
    calibration = CalibrationOptions("minmax", images=images, num_images=2, check_input=False)
    asked = BuildOptions(calibration=calibration, correct=(), backend="onnxruntime", int8_attention=True)
    plan = PrecisionPlan.load(build(model, config, tmp_path / "b", asked).bundle.file("plan.json"))
    assert plan.entries["/encoder/values/MatMul"].reason == "product of two activations"
    assert plan.entries["/encoder/values/MatMul"].precision == "int8"
    bundle = build(model, config, tmp_path / "f", replace(asked, fp8=True)).bundle
    fp8 = PrecisionPlan.load(bundle.file("plan.json"))
    assert any(entry.format == "fp8" for entry in fp8.entries.values()) and fp8.names("int8") == plan.names("int8")
    with pytest.raises(ConfigError, match="--int8-attention belongs to --int8; leave it out with --fp16"):
        build(model, config, tmp_path / "c", replace(asked, precision="fp16"))
    assert fp8.entries["/encoder/values/MatMul"].format == "fp8" and fp8.entries["/down/Conv"].format == "int8"
    with pytest.raises(ConfigError, match="--fp8 belongs to --int8; leave it out with --fp16"):
        build(model, config, tmp_path / "c", replace(asked, int8_attention=False, fp8=True, precision="fp16"))


def test_fp8_is_for_gpus_that_have_it(caps: Capabilities) -> None:
    asked = BuildOptions(calibration=CalibrationOptions(images=Path("images")), fp8=True, sms=(86,))
    with pytest.raises(BackendError, match="compute capability 86 has no FP8, which came with 89"):
        check_build(asked, caps)
    with pytest.raises(BackendError, match="old 8.6 has no FP8 for products of matrices"):
        check_build(replace(asked, sms=(89,)), replace(caps, name="old", version="8.6", fp8=False))
    with pytest.raises(ConfigError, match="--fp8 is written into the model; leave --quantization implicit out"):
        check_build(replace(asked, quantization="implicit"), caps)
