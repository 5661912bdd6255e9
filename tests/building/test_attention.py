"""A detector with attention, from the options to the bundle: its products are layers like convolutions."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from attention import PRODUCTS, attention_config, attention_detector
from models import for_onnxruntime
from onnx import numpy_helper

from trtdet import sweep
from trtdet.backends import Capabilities
from trtdet.building import build, calibrate, sensitivity
from trtdet.building.costs import weight_bytes
from trtdet.building.graph import host_graph
from trtdet.building.half import Magnitudes, half_parts
from trtdet.building.ranges import Selection
from trtdet.building.validation import check_build
from trtdet.building.variants import variant_options
from trtdet.bundle import Bundle
from trtdet.cli import main
from trtdet.demo import shapes
from trtdet.errors import BackendError, ConfigError, TrtdetWarning
from trtdet.experiments.search import tune
from trtdet.options import (
    BuildOptions,
    CalibrationOptions,
    PlanOptions,
    SensitivityOptions,
    SweepOptions,
    TuneOptions,
    changed,
)
from trtdet.plans.scores import Sensitivity
from trtdet.quantization import DataFlow, PrecisionPlan

KEPT = "/encoder/fc1/MatMul"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return shapes.generate(tmp_path_factory.mktemp("shapes"), "calibration", 20).images


@pytest.fixture(scope="module")
def two_images(images):
    return CalibrationOptions(rule="minmax", images=images, num_images=2, check_input=False)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return attention_config(tmp_path_factory.mktemp("config"))


@pytest.fixture
def caps():
    return Capabilities("new", "10.1", True, True, sms=(86, 89), default_sms=(86, 89), fp8=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "attention.onnx"
    onnx.save(attention_detector(), path)
    return path


@pytest.fixture(scope="module")
def bundle(model, config, images, tmp_path_factory):
    options = for_onnxruntime(
        effort="default", rule="minmax", images=images, check_input=False, keep_fp16=(KEPT,), int8_all=True
    )
    return build(model, config, tmp_path_factory.mktemp("bundles") / "b", options).bundle


@pytest.mark.slow
def test_products_are_corrected_and_kept_by_name(bundle):
    plan = PrecisionPlan.load(bundle.file("plan.json"))
    assert plan.counts() == {"int8": PRODUCTS + 4, "fp16": 1, "fp32": 0}
    assert plan.entries[KEPT].cause.value == "kept-named"
    done = {step.name for step in plan.entries["/encoder/q/MatMul"].corrections}
    assert done == {"smooth", "round", "bias"}
    (smooth, *_) = plan.entries["/encoder/q/MatMul"].corrections
    assert smooth.error < 0.2 * smooth.without  # two channels are twenty times the others


@pytest.mark.slow
def test_smoothing_before_products_is_in_the_layer_normalization(bundle):
    graph = onnx.load(str(bundle.file("int8.onnx"))).graph
    read = {name: node for node in graph.node for name in node.input}
    norm = next(node for node in graph.node if node.name == "/encoder/norm0")
    assert read[norm.output[0]].op_type == "QuantizeLinear"


def test_a_ranking_lists_products(model, config, images):
    calibration = CalibrationOptions(rule="minmax", images=images, check_input=False)
    found = sensitivity(
        model, config, SensitivityOptions(calibration=calibration, effort="none", plan=PlanOptions(rank_images=2))
    )
    names = {layer.name for layer in found.layers}
    assert {"/encoder/q/MatMul", "/in/Gemm", "/psa/proj/Conv"} <= names
    assert "/classes/MatMul" not in names
    assert {layer.format for layer in found.layers} == {"int8"}


@pytest.mark.slow
def test_a_ranking_of_products_in_fp8_says_so(model, config, images, tmp_path):
    asked = changed(SensitivityOptions(), rule="minmax", images=images, check_input=False, effort="none", rank_images=2)
    rows = tmp_path / "rows.jsonl"
    found = sensitivity(model, config, changed(asked, int8_attention=True, fp8=True), rows)
    by = {layer.name: layer for layer in found.layers}
    assert (by["/encoder/values/MatMul"].kind, by["/encoder/values/MatMul"].format) == (
        "product of two activations",
        "fp8",
    )
    assert (by["/psa/proj/Conv"].kind, by["/psa/proj/Conv"].format) == ("convolution", "int8")
    table = str(found.table(99))
    assert "product of two activations, FP8" in table and "product with a matrix, FP8" in table
    found.save(tmp_path / "ranking.json")
    assert Sensitivity.load(tmp_path / "ranking.json") == found
    with pytest.raises(ConfigError, match="holds results of another model"):
        sensitivity(model, config, changed(asked, int8_attention=True), rows)


@pytest.mark.slow
def test_a_sweep_says_of_each_row_what_is_quantised(model, config, images, two_images, tmp_path):
    split = shapes.generate(tmp_path, "val", 2)
    asked = SweepOptions(calibration=two_images, rules=("minmax",), efforts=("none",), backend="onnxruntime")
    asked = changed(asked, val_images=split.images, annotations=split.annotations)
    (_, plain) = sweep(model, config, tmp_path / "sweep", asked).variants
    done = sweep(model, config, tmp_path / "sweep", changed(asked, fp8=True))
    (floating, fp8, older) = done.variants
    options = [variant.axes["options"] for variant in (plain, floating, fp8)]
    assert options == ["", "", "fp8"]
    assert fp8.counts["int8"] == plain.counts["int8"] and (older.name, done.older) == (plain.name, 1)
    assert "| fp8 |" in done.markdown()
    with pytest.raises(BackendError, match="compute capability 86 has no FP8"):
        sweep(model, config, tmp_path / "other", changed(asked, fp8=True, sms=(86,), backend="tensorrt-rtx"))


@pytest.mark.slow
def test_a_front_of_products_in_fp8_says_so(model, config, images, two_images, tmp_path):
    built = BuildOptions(effort="round,bias", backend="onnxruntime", calibration=two_images, plan=PlanOptions(fp8=True))
    asked = TuneOptions(
        build=changed(built, val_images=shapes.generate(tmp_path, "val", 2).images, rank_images=1),
        points=2,
    )
    front = tune(model, config, tmp_path / "tune", asked)
    assert front.formats == ("fp8",) and front.basis.endswith("; made with fp8")
    point = next(point for point in front.variants if not point.kept)
    options, config = variant_options(tmp_path / "tune", point.number, config)
    plan = PrecisionPlan.load(build(model, config, tmp_path / "b", options).bundle.file("plan.json"))
    product = plan.entries["/encoder/q/MatMul"]
    assert product.format == "fp8" and "round" in {step.name for step in product.corrections}


def test_histograms_for_attention_are_of_what_its_products_read(model, config, two_images):
    plain, wide = (calibrate(model, config, two_images, attention=asked) for asked in (False, True))
    assert plain.collection.histograms.keys() < wide.collection.histograms.keys()


def test_what_attention_gives_is_measured_before_it_runs_in_fp16(config, images, tmp_path):
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


def test_products_of_two_activations_are_in_int8_only_where_that_is_asked_for(model, config, two_images, tmp_path):
    asked = for_onnxruntime(effort="none", calibration=two_images, int8_attention=True)
    plan = PrecisionPlan.load(build(model, config, tmp_path / "b", asked).bundle.file("plan.json"))
    assert plan.entries["/encoder/values/MatMul"].reason == "product of two activations"
    assert plan.entries["/encoder/values/MatMul"].precision == "int8"
    bundle = build(model, config, tmp_path / "f", changed(asked, fp8=True)).bundle
    fp8 = PrecisionPlan.load(bundle.file("plan.json"))
    assert any(entry.format == "fp8" for entry in fp8.entries.values()) and fp8.names("int8") == plan.names("int8")
    with pytest.raises(ConfigError, match="plan.int8_attention is about INT8; leave it out with --fp16"):
        build(model, config, tmp_path / "c", changed(asked, precision="fp16"))
    assert fp8.entries["/encoder/values/MatMul"].format == "fp8" and fp8.entries["/down/Conv"].format == "int8"
    with pytest.raises(ConfigError, match="plan.fp8 is about INT8; leave it out with --fp16"):
        build(model, config, tmp_path / "c", changed(asked, int8_attention=False, fp8=True, precision="fp16"))


@pytest.mark.slow
@pytest.mark.tensorrt
def test_layers_in_fp8_are_told_as_built(model, images, tmp_path, capsys):
    attention_config(tmp_path)
    given = [model, "--config", tmp_path / "attention.yaml", "--images", images, "--num-images", 2]
    asked = ["--int8", "--set", "plan.fp8=true", "--effort", "none", "--guard", "off", "--backend", "tensorrt-rtx"]
    asked += ["--sm", 89]
    assert main(["build", *map(str, given), *map(str, asked), "-o", str(tmp_path / "b")]) == 0
    manifest = Bundle(tmp_path / "b").manifest
    assert manifest.audit.fp8 > 0
    counted = manifest.audit.int8 + manifest.audit.fp8 + manifest.audit.fp16 + manifest.audit.fp32
    assert counted == sum(manifest.precision.model_dump().values())
    assert f"{manifest.audit.int8} convs INT8, {manifest.audit.fp8} FP8, " in (said := capsys.readouterr().out)
    assert " --set plan.fp8=true\n" in said


def convolutional(mixed: str) -> onnx.ModelProto:
    """A detector for the configuration ``attention`` whose layers with weights are one convolution."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 19]>
        net (float[1,3,128,128] images) => (float[1,64,4] boxes, float[1,64,10] scores)
        <int64[3] rows = {{1, 14, 64}}, int64[2] sizes = {{4, 10}}> {{
            cells = Conv<strides = [16, 16]>(images, weight)
            features = Reshape(cells, rows)
            {mixed}
            turned = Transpose<perm = [0, 2, 1]>(mixed)
            boxes, scores = Split<axis = 2>(turned, sizes)
        }}""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((14, 3, 16, 16), np.float32), "weight"))
    return model


PLAIN = "mixed = Identity(features)"
ATTENTION = "there = Transpose<perm = [0, 2, 1]>(features) s = MatMul(features, there) mixed = MatMul(s, features)"
NOTHING, ONLY = "nothing to put into FP8: .* a matrix of weights", ", and its 2 products of two activations .* only"


@pytest.mark.parametrize(
    ("mixed", "plan", "said"),
    [
        (PLAIN, PlanOptions(fp8=True), f"{NOTHING}; convolutions stay"),
        (ATTENTION, PlanOptions(fp8=True), f"{NOTHING}{ONLY}; convolutions stay"),
        (PLAIN, PlanOptions(int8_attention=True), "plan.int8_attention changes nothing: the model has no product of"),
    ],
)
def test_a_model_without_products_is_told_so(mixed, plan, said, config, tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(convolutional(mixed), path)
    with pytest.warns(TrtdetWarning, match=said):
        host_graph(path, config, plan=plan)


def test_fp8_is_for_gpus_that_have_it(caps):
    asked = BuildOptions(sms=(86,), calibration=CalibrationOptions(images=Path("images")), plan=PlanOptions(fp8=True))
    with pytest.raises(BackendError, match="compute capability 86 has no FP8, which came with 89"):
        check_build(asked, caps)
    with pytest.raises(BackendError, match="old 8.6 has no FP8 for products of matrices"):
        check_build(replace(asked, sms=(89,)), replace(caps, name="old", version="8.6", fp8=False))
    with pytest.raises(ConfigError, match="plan.fp8 is written into the model; leave --quantization implicit out"):
        check_build(replace(asked, quantization="implicit"), caps)
