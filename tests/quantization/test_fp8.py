"""FP8 instead of INT8 for products: the Q/DQ pairs, their exact simulation, and the nodes that stay in INT8."""

import json

import ml_dtypes
import numpy as np
import onnx
import pytest
from attention import PRODUCTS, attention_detector
from graphs import constants, raised

from trtdet.backends import OnnxRunner
from trtdet.quantization import PrecisionPlan, insert_qdq, lint, place, to_half

TWO = """(float[1,4,32] x) => (float[1,4,32] y) {
    a = MatMul(x, w1) b = Add(bias, a) c = Relu(b) y = MatMul(c, w2) }"""


def e4m3(values: np.ndarray) -> np.ndarray:
    """Through FP8 with the scale that the largest needs, as IEEE rounding of the nearest scale in FP16 gives it."""
    exact = np.float64(np.abs(values).max()) / 448
    scale = np.float16(exact)
    scale = scale if np.float64(scale) >= exact else np.nextafter(scale, np.float16(np.inf))
    scaled = np.clip(values / np.float32(scale), -448, 448)
    found: np.ndarray = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(scale)
    return found


@pytest.fixture(scope="module")
def model():
    return onnx.version_converter.convert_version(onnx.shape_inference.infer_shapes(attention_detector()), 19)


def test_products_are_planned_in_fp8_and_convolutions_in_int8(model, tmp_path):
    plan = place(model, fp8=True).plan
    assert len(plan.fp8) == PRODUCTS and len(plan.names("int8")) == PRODUCTS + 5
    assert "/down/Conv" not in plan.fp8 and "/encoder/q/MatMul" in plan.fp8
    plan.save(tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())["entries"]
    assert written["/encoder/q/MatMul"]["format"] == "fp8" and "format" not in written["/down/Conv"]
    assert PrecisionPlan.load(tmp_path / "plan.json") == plan
    entry = plan.entries["/encoder/q/MatMul"]
    assert place(model).plan.entries["/encoder/q/MatMul"].edited_from(entry).format == "fp8"


def test_onnxruntime_computes_exactly_what_fp8_holds(net, normal, measured):
    weights = {"w1": normal(32, 64, seed=1, scale=0.2), "w2": normal(64, 32, seed=2, scale=0.2)}
    model = raised(net(TWO, **weights, bias=normal(64, seed=3)))
    x = normal(1, 4, 32, seed=5)
    _, ranges = measured(model, x)
    written = insert_qdq(model, place(model, fp8=True), ranges)
    assert lint(written) == ()
    hidden = np.maximum(e4m3(x) @ e4m3(weights["w1"]) + normal(64, seed=3), 0)
    # The range is that of the float model.
    pairs = {node.input[0]: node.input[1] for node in written.graph.node if node.op_type == "QuantizeLinear"}
    scale = constants(written)[pairs["c"]]
    read = np.clip(hidden / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    np.testing.assert_allclose(OnnxRunner(written)(x)["y"], read @ e4m3(weights["w2"]), rtol=0, atol=2e-5)


def test_scales_in_fp16_give_the_same(model, measured, images):
    _, ranges = measured(model, images)
    placement = place(model, fp8=True)
    written = insert_qdq(model, placement, ranges)
    half = to_half(written, placement.plan.names("int8"))
    assert lint(half) == ()
    kinds = [tensor.data_type for tensor in half.graph.initializer]
    assert onnx.TensorProto.FLOAT8E4M3FN in kinds and onnx.TensorProto.FLOAT16 in kinds
    for name, most in (("boxes", 0.05), ("scores", 0.3)):
        expected, got = (OnnxRunner(each)(images)[name] for each in (written, half))
        np.testing.assert_allclose(got, expected, rtol=0, atol=most * np.abs(expected).max())


def test_corrections_are_of_what_is_in_int8(model):
    placement = place(model, fp8=True)
    assert len(placement.integers.plan.names("int8")) == 5
    assert "/encoder/norm0_output" in placement.activations
    assert "/encoder/norm0_output" not in placement.integers.activations
    plain = place(model)
    assert plain.integers is plain


def test_a_tensor_that_convolutions_and_products_read_has_a_pair_of_each(net, normal, measured):
    text = """(float[1,16,4,16] x) => (float[1,16,4,16] y, float[1,16,4,16] z) {
        a = Relu(x) y = Conv(a, w) z = MatMul(a, m) }"""
    model = raised(net(text, w=normal(16, 16, 1, 1), m=normal(16, 16)))
    x = normal(1, 16, 4, 16)
    _, ranges = measured(model, x)
    written = insert_qdq(model, place(model, fp8=True), ranges)
    assert [node.input[0] for node in written.graph.node if node.op_type == "QuantizeLinear"].count("a") == 2
    assert lint(written) == ()
    for name in ("y", "z"):
        expected = OnnxRunner(model)(x)[name]
        np.testing.assert_allclose(OnnxRunner(written)(x)[name], expected, rtol=0, atol=0.06 * np.abs(expected).max())
