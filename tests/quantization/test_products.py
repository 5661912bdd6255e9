"""Products with a constant matrix as layers: which are quantised, their Q/DQ pairs, and folding into them."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from attention import PRODUCTS, attention_detector
from graphs import constants, makers

from trtdet.backends import OnnxRunner
from trtdet.passes.model import to_graph
from trtdet.quantization import (
    Corrections,
    Entry,
    PrecisionPlan,
    Switch,
    WeightScales,
    default_plan,
    insert_qdq,
    lint,
    nodes_of,
    place,
    quantizable,
    to_half,
)
from trtdet.quantization.encoding import ChannelMap, Rounded
from trtdet.quantization.macs import multiply_adds
from trtdet.quantization.qdq import plain_form
from trtdet.quantization.weighted import Weighted

NORMALISED = "/encoder/norm0_output"

TWO = """(float[1,4,32] x) => (float[1,4,32] y) {
    a = MatMul(x, w1) b = Add(bias, a) c = Relu(b) y = MatMul(c, w2) }"""


@pytest.fixture(scope="module")
def model():
    return onnx.shape_inference.infer_shapes(attention_detector())


def two(net: Any, normal: Any) -> onnx.ModelProto:
    weights = {"w1": normal(32, 64, seed=1, scale=0.2), "w2": normal(64, 32, seed=2, scale=0.2)}
    model: onnx.ModelProto = net(TWO, **weights, bias=normal(64, seed=3))
    return model


def layer_of(model: onnx.ModelProto, name: str) -> Weighted:
    layer = Weighted.of(next(node for node in to_graph(model).nodes if node.name == name))
    assert layer is not None
    return layer


def mapped_weights(layer: Weighted, scale: np.ndarray) -> Rounded:
    """For an input that is multiplied by the scale."""
    weight = layer.weight / scale
    steps = (np.abs(weight).max(axis=1) / 127).astype(np.float32)
    return Rounded(np.rint(weight / steps[:, None]).astype(np.int8), steps, layer.bias)


def weight_axes(model: onnx.ModelProto) -> dict[str, tuple[int, int]]:
    """By layer, the axis and the number of its weights' scales."""
    made_by, values, axes = makers(model), constants(model), {}
    for node in model.graph.node:
        if node.op_type in ("MatMul", "Gemm", "Conv") and node.input[1] in made_by:
            pair = made_by[node.input[1]]
            if pair.op_type == "DequantizeLinear":
                axis = next((attribute.i for attribute in pair.attribute if attribute.name == "axis"), -1)
                axes[node.name] = axis, values[pair.input[1]].size
    return axes


def test_every_product_with_weights_is_a_layer_and_attention_is_none(model):
    plan = place(model).plan
    products = [name for name, entry in plan.entries.items() if entry.reason == "product with a matrix"]
    assert len(products) == PRODUCTS
    assert plan.counts() == {"int8": PRODUCTS + 5, "fp16": 0, "fp32": 0}
    assert place(model).readers["/encoder/norm0_output"] == tuple((f"/encoder/{part}/MatMul", 0) for part in "qkv")


def test_both_inputs_of_attention_are_quantised_where_that_is_asked_for(model):
    placement = place(model, attention=True)
    assert placement.plan.counts()["int8"] == PRODUCTS + 5 + 4
    assert placement.attention == placement.plan.entries.keys() - place(model).plan.entries.keys()
    assert place(model).attention == frozenset()
    assert placement.readers["/encoder/Softmax_output"] == (("/encoder/values/MatMul", 0),)
    assert placement.readers["/encoder/v/Transpose_output"] == (("/encoder/values/MatMul", 1),)


def test_what_turns_coordinates_or_has_its_constant_on_the_left_is_no_layer(net, normal):
    text = """(float[1,4,4] x, float[1,32,4] z) => (float[1,4,4] y, float[1,32,4] v) {
        y = MatMul(x, corners) v = MatMul(left, z) }"""
    placement = place(net(text, corners=normal(4, 4), left=normal(32, 32)))
    assert placement.plan.entries == {}


def test_heads_stay_in_fp16_and_few_inputs_as_well(model):
    left = {name: entry.cause.value for name, entry in default_plan(model, place(model)).entries.items()}
    assert left["/classes/MatMul"] == left["/box1/MatMul"] == "head-output"
    assert left["/encoder/fc1/MatMul"] == left["/in/Gemm"] == "quantizable"


def test_the_scales_are_on_the_axis_of_the_outputs(model, measured, images):
    placement, ranges = measured(model, images)
    written = insert_qdq(model, placement, ranges)
    assert lint(written) == ()
    axes = weight_axes(written)
    assert axes["/encoder/fc1/MatMul"] == (1, 64)
    assert axes["/in/Gemm"] == (0, 64)  # transB
    assert axes["/out/Gemm"] == (1, 32)
    assert len(axes) == PRODUCTS + 5


def test_scales_on_the_wrong_axis_are_found(model, measured, images):
    written = insert_qdq(model, *measured(model, images))
    node = makers(written)[next(node for node in written.graph.node if node.name == "/encoder/fc1/MatMul").input[1]]
    node.attribute[0].i = 0
    problems = [str(problem) for problem in lint(written)]
    assert problems == ["/encoder/fc1/MatMul: its weights are quantised on axis 0: it would run in float; use axis 1"]


@pytest.mark.parametrize("form", ["channel", "tensor"])
def test_what_is_written_computes_what_the_integers_say(net, normal, measured, form):
    model, x = two(net, normal), normal(1, 4, 32, seed=5)
    placement, ranges = measured(model, x)
    bias = normal(32, seed=9)  # the second product has no place for it
    weights = {"MatMul_3": replace(plain_form(layer_of(model, "MatMul_3")), bias=bias)}
    written = insert_qdq(model, placement, ranges, Corrections({}, weights), weights=WeightScales(form))
    assert lint(written) == ()
    value = x
    for name, form_ in (("x", plain_form(layer_of(model, "MatMul_0"))), ("c", weights["MatMul_3"])):
        step = np.float32(np.float16(ranges.tensors[name].scale))
        step = step if step >= ranges.tensors[name].scale else np.float32(np.nextafter(np.float16(step), np.float16(1)))
        read = np.clip(np.rint(value / step), -127, 127) * step
        value = read @ (form_.integers * form_.scales[:, None]).T + form_.bias
        value = np.maximum(value, 0) if name == "x" else value
    np.testing.assert_allclose(OnnxRunner(written)(x)["y"], value, rtol=0, atol=2e-5)


def test_a_channel_map_goes_into_the_layer_normalization(model, measured, images, normal):
    placement, ranges = measured(model, images)
    scale = np.exp(0.2 * normal(32).astype(np.float64))
    maps = {NORMALISED: ChannelMap(ranges.tensors[NORMALISED].amax * float(scale.max()), scale, axis=-1)}
    names = [f"/encoder/{part}/MatMul" for part in "qkv"]
    weights = {name: mapped_weights(layer_of(model, name), scale) for name in names}
    written = insert_qdq(model, placement, ranges, Corrections(maps, weights))
    assert not [node for node in written.graph.node if node.op_type == "Mul" and node.name.startswith("trtdet")]
    norm = next(node for node in written.graph.node if node.name == "/encoder/norm0")
    before = next(node for node in model.graph.node if node.name == "/encoder/norm0")
    np.testing.assert_allclose(constants(written)[norm.input[1]], constants(model)[before.input[1]] * scale, rtol=1e-6)
    plain = OnnxRunner(insert_qdq(model, placement, ranges))(images)["scores"]
    exact = OnnxRunner(model)(images)["scores"]
    assert np.abs(OnnxRunner(written)(images)["scores"] - exact).max() < 2 * np.abs(plain - exact).max()


def mapped(model: onnx.ModelProto, measured: Any, x: np.ndarray, scale: np.ndarray) -> onnx.ModelProto:
    """The net of two products with a channel map between them."""
    placement, ranges = measured(model, x)
    rounded = mapped_weights(layer_of(model, "MatMul_3"), scale)
    maps = {"c": ChannelMap(ranges.tensors["c"].amax * float(scale.max()), scale, axis=-1)}
    return insert_qdq(model, placement, ranges, Corrections(maps, {"MatMul_3": rounded}))


def test_a_channel_map_goes_through_relu_into_the_product_and_its_bias(net, normal, measured):
    model, x = two(net, normal), normal(1, 4, 32, seed=5)
    scale = np.exp(0.2 * normal(64, seed=4).astype(np.float64))
    written = mapped(model, measured, x, scale)
    assert [node.op_type for node in written.graph.node if node.op_type in ("Mul", "Add")] == ["Add"]
    add = next(node for node in written.graph.node if node.op_type == "Add")
    np.testing.assert_allclose(constants(written)[add.input[0]], constants(model)["bias"] * scale, rtol=1e-6)
    assert np.abs(OnnxRunner(written)(x)["y"] - OnnxRunner(model)(x)["y"]).max() < 0.15


@pytest.mark.parametrize(
    ("operation", "shape", "added"),
    [
        ("Sigmoid(a) c = Mul(b, k)", (64,), False),
        ("Sigmoid(a) c = Mul(k, b)", (1, 1, 64), False),
        ("Sigmoid(a) c = Mul(b, k)", (1,), False),
        ("Sigmoid(a) c = Div(b, k)", (64,), False),
        ("Relu(a) c = Add(b, k)", (64,), False),
        ("Sigmoid(a) c = Div(k, b)", (64,), True),
        ("Sigmoid(a) c = Mul(b, k)", (4, 1), True),
        ("Sigmoid(a) c = Add(b, k)", (64,), True),
    ],
)
def test_a_channel_map_goes_into_constants_along_the_last_axis(net, normal, measured, operation, shape, added):
    weights = {"w1": normal(32, 64, seed=1, scale=0.2), "w2": normal(64, 32, seed=2, scale=0.2)}
    text = f"(float[1,4,32] x) => (float[1,4,32] y) {{ a = MatMul(x, w1) b = {operation} y = MatMul(c, w2) }}"
    model, x = net(text, **weights, k=np.abs(normal(*shape, seed=3)) + 1), normal(1, 4, 32, seed=5)
    scale = np.exp(0.2 * normal(64, seed=4).astype(np.float64))
    written = mapped(model, measured, x, scale)
    plain, found = (sorted(node.op_type for node in form.graph.node) for form in (model, written))
    assert [kind for kind in found if not kind.endswith("Linear")] == sorted([*plain, *["Mul"] * added])
    expected = OnnxRunner(model)(x)["y"]
    assert np.abs(OnnxRunner(written)(x)["y"] - expected).max() < 0.05 * np.abs(expected).max()


def test_a_channel_map_behind_gelu_is_a_product_along_the_last_axis(net, normal, measured):
    model = two(net, normal)
    model.graph.node[2].op_type = "Sigmoid"
    x, scale = normal(1, 4, 32, seed=5), np.exp(0.2 * normal(64, seed=4).astype(np.float64))
    written = mapped(model, measured, x, scale)
    (product,) = [node for node in written.graph.node if node.op_type == "Mul"]
    np.testing.assert_allclose(constants(written)[product.input[1]], scale.astype(np.float32))
    assert np.abs(OnnxRunner(written)(x)["y"] - OnnxRunner(model)(x)["y"]).max() < 0.15


@pytest.mark.parametrize("base", ["fp32", "int8"])
def test_a_product_is_switched_with_its_bias(net, normal, measured, base):
    model, x = two(net, normal), normal(1, 4, 32, seed=5)
    placement, ranges = measured(model, x)
    forms = {name: plain_form(layer_of(model, name)) for name in placement.plan.entries}
    shifted = {name: replace(form, bias=form.bias + 3) for name, form in forms.items()}
    switch = Switch(model, placement, ranges, Corrections({}, shifted), base)
    for name in shifted:
        others = [other for other in shifted if (other == name) == (base == "fp32")]
        kept = Corrections({}, {other: form for other, form in shifted.items() if other == name})
        entries = {other: Entry("int8" if other == name else "fp32", "") for other in shifted}
        alone = placement.following(PrecisionPlan(entries))
        expected = OnnxRunner(insert_qdq(model, alone, ranges, kept))(x)["y"]
        found = switch.whole(others, ["y"])
        np.testing.assert_allclose(OnnxRunner(found)(x)["y"], expected, atol=1e-5)
        assert np.abs(expected - OnnxRunner(model)(x)["y"]).max() > 1


def test_attention_is_in_fp16_and_coordinates_are_not(model, images):
    plan = place(model).plan
    inside = {node.name for node in nodes_of(model, tuple(plan.entries))}
    assert {"/encoder/scores/MatMul", "/encoder/Softmax", "/encoder/norm0", "/encoder/Erf", "/psa/Softmax"} <= inside
    assert not {"/places/Add", "/boxes", "/box1/Add", "/classes/Add"} & inside
    half = to_half(onnx.version_converter.convert_version(model, 20), tuple(plan.entries))
    np.testing.assert_allclose(OnnxRunner(half)(images)["boxes"], OnnxRunner(model)(images)["boxes"], rtol=0, atol=5e-3)


def test_a_builder_that_quantises_by_itself_leaves_attention_in_float(model):
    plan = place(model).plan
    told = quantizable(model, plan).precisions(plan)
    assert told["/encoder/Softmax"] == told["/encoder/norm0"] == told["/encoder/values/MatMul"] == "fp16"
    assert "/encoder/fc1/MatMul" not in told


def test_the_work_of_a_product_is_counted_for_one_image():
    work = multiply_adds(onnx.shape_inference.infer_shapes(attention_detector(2)))
    assert (work["/encoder/fc1/MatMul"].count, work["/encoder/fc1/MatMul"].outputs) == (64 * 32 * 64, 64)
    assert (work["/in/Gemm"].count, work["/in/Gemm"].inputs) == (64 * 32 * 64, 32)
    assert work["/encoder/scores/MatMul"].count == 2 * 64 * 64 * 16
