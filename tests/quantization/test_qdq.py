import numpy as np
import onnx
import pytest
from graphs import constants, makers

from trtdet.backends import OnnxRunner
from trtdet.calibration import Range, Ranges
from trtdet.errors import CalibrationError
from trtdet.quantization import insert_qdq, lint, place
from trtdet.quantization.encoding import half_step

NET = """(float[N,3,16,16] x) => (float[N,4,16,16] y) {
    a = Conv<pads = [1,1,1,1]>(x, w1, b1) s = Sigmoid(a) c = Mul(a, s)
    d = Conv<group = 8>(c, w2, b2) e = Relu(d) f = Conv(e, w3) g = Add(c, f) y = Conv(g, w4) }"""


@pytest.fixture
def model(net, normal):
    return net(
        NET,
        w1=normal(8, 3, 3, 3, seed=1, scale=0.3),
        b1=normal(8, seed=2),
        w2=normal(8, 1, 1, 1, seed=3),
        b2=normal(8, seed=4),
        w3=normal(8, 8, 1, 1, seed=5, scale=0.3),
        w4=normal(4, 8, 1, 1, seed=6, scale=0.3),
    )


def test_int8_is_close_to_float(model, measured, normal):
    x = normal(2, 3, 16, 16)
    placement, ranges = measured(model, x)
    before = model.SerializeToString()
    int8 = insert_qdq(model, placement, ranges)
    assert model.SerializeToString() == before
    expected, got = OnnxRunner(model)(x)["y"], OnnxRunner(int8)(x)["y"]
    error = np.abs(got - expected).mean() / np.abs(expected).mean()
    assert 0 < error < 0.03
    assert lint(int8) == ()
    onnx.checker.check_model(int8, full_check=True)


@pytest.fixture
def written(model, measured, normal):
    placement, ranges = measured(model, normal(1, 3, 16, 16))
    return placement, ranges, insert_qdq(model, placement, ranges)


def test_the_form_is_the_one_that_tensorrt_accepts(written):
    placement, _, int8 = written
    values, made_by = constants(int8), makers(int8)
    quantizers = [node for node in int8.graph.node if node.op_type == "QuantizeLinear"]
    dequantizers = [node for node in int8.graph.node if node.op_type == "DequantizeLinear"]
    assert len(quantizers) == len(dequantizers) == len(placement.activations) + 4
    for node in [*quantizers, *dequantizers]:
        scale, zero = values[node.input[1]], values[node.input[2]]
        assert scale.dtype == np.float32 and np.all(scale > 0)
        assert zero.dtype == np.int8 and not zero.any() and zero.shape == scale.shape
    convolutions = [node for node in int8.graph.node if node.op_type == "Conv"]
    assert len(convolutions) == 4
    for node in convolutions:
        activation, weight = made_by[node.input[0]], made_by[node.input[1]]
        assert activation.op_type == weight.op_type == "DequantizeLinear"
        assert values[activation.input[1]].shape == ()
        assert [attribute.i for attribute in weight.attribute if attribute.name == "axis"] == [0]
        source = values[made_by[weight.input[0]].input[0]]
        assert values[weight.input[1]].shape == (len(source),)
        np.testing.assert_allclose(values[weight.input[1]], np.abs(source).max(axis=(1, 2, 3)) / 127, rtol=1e-6)
        if len(node.input) > 2:
            assert values[node.input[2]].dtype == np.float32


def test_activation_scales_are_those_of_the_ranges(written):
    placement, ranges, int8 = written
    values = constants(int8)
    scales = {node.input[0]: values[node.input[1]] for node in int8.graph.node if node.op_type == "QuantizeLinear"}
    for name in placement.activations:
        assert scales[name] == half_step(ranges.tensors[name].amax / 127)


def test_a_tensor_read_by_several_nodes_has_one_pair(written):
    _, _, int8 = written
    assert sum(node.input[0] == "c" for node in int8.graph.node if node.op_type == "QuantizeLinear") == 1
    pair = next(node.input[0] for node in int8.graph.node if node.name == "Conv_3")
    assert next(node.input[0] for node in int8.graph.node if node.name == "Add_6") == pair


def test_a_weight_that_a_float_convolution_shares_stays_float_there(net, normal, measured):
    text = """(float[1,4,8,8] x) => (float[1,4,8,8] y) {
            a = Conv(x, w) m = Softmax<axis = 1>(a) y = Conv(m, w) }"""
    model = net(text, w=normal(4, 4, 1, 1))
    x = normal(1, 4, 8, 8)
    int8 = insert_qdq(model, *measured(model, x))
    last = next(node for node in int8.graph.node if node.name == "Conv_2")
    assert list(last.input) == ["m", "w"]
    OnnxRunner(int8)(x)


def test_a_channel_of_zeros_has_a_scale_over_0_and_stays_zero(net, normal, measured):
    weight = normal(4, 4, 1, 1)
    weight[2] = 0
    model = net("(float[1,4,8,8] x) => (float[1,4,8,8] y) {y = Conv(x, w)}", w=weight)
    x = normal(1, 4, 8, 8)
    int8 = insert_qdq(model, *measured(model, x))
    assert lint(int8) == ()
    assert not OnnxRunner(int8)(x)["y"][0, 2].any()


def test_convolutions_in_one_and_three_dimensions_are_quantised(net, normal, measured):
    for dims in (1, 3):
        shape = ",".join(["8"] * dims)
        model = net(f"(float[1,4,{shape}] x) => (float[1,4,{shape}] y) {{y = Conv(x, w)}}", w=normal(4, 4, *[1] * dims))
        x = normal(1, 4, *[8] * dims)
        int8 = insert_qdq(model, *measured(model, x))
        np.testing.assert_allclose(OnnxRunner(int8)(x)["y"], OnnxRunner(model)(x)["y"], atol=0.15)


def test_ranges_of_another_model_are_an_error_that_counts_and_names(model):
    ranges = Ranges("minmax", None, {"x": Range(1.0, 0.0, 1.0), "other": Range(1.0, 0.0, 1.0)}, "", 1, "")
    with pytest.raises(CalibrationError) as caught:
        insert_qdq(model, place(model), ranges)
    assert "the ranges lack 3 of the model's 4 activations, the first is 'c'" in str(caught.value)
    assert "made from another model; calibrate this model" in str(caught.value)


def test_quantising_twice_gives_the_same_bytes(model, written):
    placement, ranges, int8 = written
    again = insert_qdq(model, placement, ranges)
    assert again.SerializeToString(deterministic=True) == int8.SerializeToString(deterministic=True)
