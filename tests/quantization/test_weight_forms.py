"""One weight scale per tensor with the channels' ratios outside computes the same as one scale per channel."""

import numpy as np
import onnx
import pytest
from graphs import constants, makers

from trtdet.backends import OnnxRunner
from trtdet.passes.provenance import Origin, origin_of
from trtdet.quantization import WeightScales, insert_qdq, lint
from trtdet.quantization.encoding import QMAX, Rounded, weight_scales
from trtdet.quantization.half import LARGEST
from trtdet.quantization.weight_forms import tensor_scale

TEXT = """(float[1,3,8,8] x) => (float[1,5,8,8] y) {
    a = Conv<pads = [1,1,1,1]>(x, w1, b1) r = Relu(a) y = Conv(r, w2) }"""


@pytest.fixture
def model(net, normal):
    wide = normal(4, 3, 3, 3, seed=1) * np.array([1, 1e-3, 30, 0.1], np.float32).reshape(4, 1, 1, 1)
    return net(TEXT, w1=wide, b1=normal(4, seed=2), w2=normal(5, 4, 1, 1, seed=3))


def nodes(model: onnx.ModelProto, op: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == op]


def test_both_forms_compute_the_same(model, measured, normal):
    x = normal(1, 3, 8, 8)
    placement, ranges = measured(model, x)
    channel = insert_qdq(model, placement, ranges)
    tensor = insert_qdq(model, placement, ranges, weights=WeightScales("tensor"))
    expected, got = OnnxRunner(channel)(x)["y"], OnnxRunner(tensor)(x)["y"]
    # Only a value that lies between two steps may be rounded the other way.
    assert np.median(np.abs(got - expected)) < 1e-5 * np.abs(expected).max()
    assert lint(tensor) == ()


def test_the_bias_follows_the_ratios_and_each_weight_has_one_power_of_two(model, measured, normal):
    placement, ranges = measured(model, normal(1, 3, 8, 8))
    tensor = insert_qdq(model, placement, ranges, weights=WeightScales("tensor"))
    values, origins = constants(tensor), origin_of(tensor)
    assert [len(node.input) for node in nodes(tensor, "Conv")] == [2, 2]
    made_by = makers(tensor)
    for conv, weight in zip(nodes(tensor, "Conv"), ("w1", "w2"), strict=True):
        pair = made_by[conv.input[1]]
        step = values[pair.input[1]]
        assert step.shape == ()
        assert np.log2(step) == np.round(np.log2(step))
        (ratio,) = (node for node in nodes(tensor, "Mul") if node.input[0] == conv.output[0])
        exact = weight_scales(constants(model)[weight])
        np.testing.assert_allclose(values[ratio.input[1]].reshape(-1) * step, exact, rtol=1e-6)
        assert origins[ratio.name] is Origin.QDQ
    (added,) = nodes(tensor, "Add")  # the second convolution has no bias
    np.testing.assert_array_equal(values[added.input[1]].reshape(-1), constants(model)["b1"])
    assert added.output[0] == "a"


def rounded(scales: list[float], integers: int = 127, width: int = 9) -> Rounded:
    shape = (len(scales), width, 1, 1)
    return Rounded(np.full(shape, integers, np.int8), np.array(scales, np.float32), np.zeros(len(scales), np.float32))


def test_the_scale_is_near_the_largest_of_the_channels():
    assert tensor_scale(rounded([0.02, 0.001]), 0.01, None) == np.float32(2.0**-6)
    assert tensor_scale(rounded([0.02, 0.001]), 0.01, None).shape == ()


def test_the_scale_falls_where_the_most_that_the_integers_give_exceeds_fp16():
    step = 50.0
    scale = float(tensor_scale(rounded([0.02]), step, None))
    most = 127 * QMAX * 9 * step
    assert most * scale <= LARGEST < most * scale * 2


def test_calibrated_magnitudes_keep_the_scale_where_the_integers_alone_would_lower_it():
    step = 50.0
    # The sums that were seen, in steps of the input, are a thousandth of what the integers could give.
    seen = np.array([127 * QMAX * 9 * step / 1000])
    assert tensor_scale(rounded([0.02]), step, seen) == np.float32(2.0**-6)
    # With room for twice of what was seen.
    close = np.array([LARGEST / 2.0**-6 / 1.5])
    assert tensor_scale(rounded([0.02]), step, close) == np.float32(2.0**-7)


@pytest.mark.parametrize("form", ["channel", "tensor"])
def test_weights_that_two_convolutions_share_stay_shared(net, normal, measured, form):
    text = "(float[1,4,8,8] x) => (float[1,4,8,8] y) {a = Conv(x, w) b = Relu(a) y = Conv(b, w)}"
    model = net(text, w=normal(4, 4, 1, 1))
    x = normal(1, 4, 8, 8)
    written = insert_qdq(model, *measured(model, x), weights=WeightScales(form))
    first, second = nodes(written, "Conv")
    assert first.input[1] == second.input[1]
    assert len(nodes(written, "QuantizeLinear")) == 3
    OnnxRunner(written)(x)
