"""The nodes that TensorRT may quantise by itself, and those that must stay in float."""

import nets
import numpy as np
import onnx
import pytest

from trtdet.quantization import Entry, PrecisionPlan, place, quantizable


def parsed(signature: str, **values: np.ndarray) -> onnx.ModelProto:
    """A model whose nodes are named after what they make."""
    model = nets.net(f"(float[1,3,8,8] x) => {signature}", 16, **values)
    for node in model.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    return model


@pytest.fixture
def model():
    """Two convolutions with an activation between them, then the arithmetic of a head; a shape on the side."""
    return parsed(
        """(float[1,4,64] y) {
        a = Conv<pads = [1, 1, 1, 1]>(x, wa) s = Sigmoid(a) m = Mul(a, s) k = Shape(m) r = Reshape(m, k)
        b = Conv<pads = [1, 1, 1, 1]>(r, wb) f = Reshape(b, flat) e = Exp(f) y = Mul(e, two) }""",
        wa=np.ones((4, 3, 3, 3), np.float32),
        wb=np.ones((4, 4, 3, 3), np.float32),
        flat=np.array([1, 4, 64]),
        two=np.float32(2),
    )


def test_all_that_lies_before_a_convolution_needs_a_range(model):
    found = quantizable(model, place(model).plan)
    # Not the shape, which is no float; not what comes after the last convolution but what that gives itself.
    assert found.tensors == ("x", "a", "s", "m", "r", "b")
    assert found.outside == ("Reshape_f", "Exp_e", "Mul_y")
    assert set(place(model).activations) <= set(found.tensors)


def test_what_is_outside_or_kept_is_told_its_precision(model):
    plan = place(model).plan
    found = quantizable(model, plan)
    outside = dict.fromkeys(("Reshape_f", "Exp_e", "Mul_y"), "fp32")
    assert found.precisions(plan) == outside
    kept = PrecisionPlan({**plan.entries, "Conv_b": Entry("fp16", "kept: named")})
    assert found.precisions(kept) == {**outside, "Conv_b": "fp16"}


def test_a_convolution_that_cannot_be_quantised_ends_the_part(model):
    plan = place(model).plan
    unable = PrecisionPlan({**plan.entries, "Conv_b": Entry("fp32", "its weights are not constant")})
    found = quantizable(model, unable)
    assert found.tensors == ("x", "a")
    assert "Sigmoid_s" in found.outside
    assert found.precisions(unable)["Conv_b"] == "fp32"


def test_where_regions_lie_stays_in_float_though_a_layer_reads_what_is_there():
    """A second stage: its products read features at boxes that the first stage computes."""
    model = parsed(
        """(float[4,64] y) {
        a = Conv<pads = [1, 1, 1, 1]>(x, wa) d = Reshape(a, flat) w = Mul(d, two) o = Slice(w, zero, four, zero)
        r = RoiAlign<output_height = 1, output_width = 1>(a, o, zeros) g = Gather(r, order)
        f = Flatten(g) y = MatMul(f, wb) }""",
        wa=np.ones((64, 3, 3, 3), np.float32),
        wb=np.ones((64, 64), np.float32),
        flat=np.array([1024, 4]),
        two=np.float32(2),
        zero=np.array([0]),
        four=np.array([4]),
        zeros=np.zeros(4, np.int64),
        order=np.arange(4),
    )
    plan = place(model).plan
    assert plan.names("int8") == ("Conv_a", "MatMul_y")
    found = quantizable(model, plan)
    assert found.tensors == ("x", "a", "g", "f", "y")
    assert found.outside == ("Reshape_d", "Mul_w", "Slice_o", "RoiAlign_r")
    assert set(place(model).activations) <= set(found.tensors)
