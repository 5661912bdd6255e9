"""Channel maps as Q/DQ pairs keep the function, also where they are folded or padded."""

import numpy as np
import onnx
import pytest
from graphs import constants, measured_ranges, undone_weights

from trtdet.backends import OnnxRunner
from trtdet.calibration import expose
from trtdet.quantization import Corrections, insert_qdq, lint
from trtdet.quantization.encoding import ChannelMap

WRITTEN = {
    "unpadded": "(float[1,4,8,8] x) => (float[1,N,H,W] y) { s = Sigmoid(x) y = Conv(s, w1) }",
    "padded": "(float[1,4,8,8] x) => (float[1,N,H,W] y) { s = Sigmoid(x) y = Conv<pads = [1,1,1,1]>(s, w3) }",
    "both": """(float[1,4,8,8] x) => (float[1,N,H,W] y) {
        s = Sigmoid(x) a = Conv<pads = [1,1,1,1]>(s, w3) b = Conv(s, w1) y = Add(a, b) }""",
    "residual": "(float[1,4,8,8] x) => (float[1,N,H,W] y) { s = Sigmoid(x) a = Conv(s, w1) y = Add(a, s) }",
    "residual of a padded one": """(float[1,4,8,8] x) => (float[1,N,H,W] y) {
        s = Sigmoid(x) a = Conv<pads = [1,1,1,1]>(s, w3) y = Add(a, s) }""",
    "after a product": "(float[1,4,8,8] x) => (float[1,N,H,W] y) { q = Sigmoid(x) s = Div(q, six) y = Conv(s, w1) }",
    "output": "(float[1,4,8,8] x) => (float[1,N,H,W] y, float[1,4,8,8] s) { s = Mul(x, six) y = Conv(s, w1) }",
}

SCALE = np.array([1.0, 2.0, 0.5, 3.0])


def checked_int8(model: onnx.ModelProto, x: np.ndarray, amax: float | None = None) -> onnx.ModelProto:
    """The INT8 form of a model with a map for its tensor ``s``, which must compute what the model does."""
    placement, ranges = measured_ranges(model, x)
    reach = np.abs(OnnxRunner(expose(model, ["s"]))(x)["s"][0].reshape(4, -1)).max(axis=1)
    channels = ChannelMap(float((SCALE * reach).max()) if amax is None else amax, SCALE)
    values = constants(model)
    convs = [node for node in model.graph.node if node.op_type == "Conv" and node.input[0] == "s"]
    weights = {conv.name: undone_weights(values[conv.input[1]], SCALE) for conv in convs}
    int8 = insert_qdq(model, placement, ranges, Corrections({"s": channels}, weights))
    assert lint(int8) == ()
    expected, got = OnnxRunner(model)(x), OnnxRunner(int8)(x)
    for name, value in expected.items():
        assert got[name].shape == value.shape
        assert np.abs(got[name] - value).max() < 0.06 * np.abs(value).max(), name
    return int8


written = pytest.fixture(lambda: checked_int8, name="written")


@pytest.mark.parametrize("case", WRITTEN)
def test_a_channel_map_means_the_same(net, normal, written, case):
    text = WRITTEN[case]
    weights = {"w1": normal(4, 4, 1, 1), "w3": normal(4, 4, 3, 3), "six": np.float32(6)}
    model = net(text, **{name: value for name, value in weights.items() if name in text})
    x = normal(1, 4, 8, 8, seed=1)
    widest = float(np.abs(OnnxRunner(expose(model, ["s"]))(x)["s"]).max() + 0.3) * 3
    kinds = [node.op_type for node in written(model, x, widest).graph.node]
    assert "Pad" not in kinds
    assert kinds.count("Mul") - [node.op_type for node in model.graph.node].count("Mul") == {
        "residual": 2,
        "residual of a padded one": 2,
        "after a product": 0,
    }.get(case, 1)


def test_a_map_is_folded_into_the_convolution_before_it(net, normal, written):
    text = "(float[1,4,8,8] x) => (float[1,N,H,W] y) { s = Conv(x, w1) y = Conv(s, w2) }"
    model = net(text, w1=normal(4, 4, 1, 1), w2=normal(4, 4, 1, 1, seed=1))
    int8 = written(model, normal(1, 4, 8, 8, seed=2))
    assert {node.op_type for node in int8.graph.node} == {"QuantizeLinear", "DequantizeLinear", "Conv"}


@pytest.mark.parametrize("numerator", [True, False])
def test_a_quotient_takes_the_scale_only_as_its_divisor(net, normal, written, numerator):
    product = "Div(k, q)" if numerator else "Div(q, k)"
    text = f"(float[1,4,8,8] x) => (float[1,4,8,8] y) {{ q = Sigmoid(x) s = {product} y = Conv(s, w1) }}"
    model = net(text, k=np.float32(3), w1=normal(4, 4, 1, 1))
    int8 = written(model, normal(1, 4, 8, 8, seed=1))
    assert [node.op_type for node in int8.graph.node].count("Mul") == (1 if numerator else 0)


def test_shared_weights_are_parted_where_a_folded_map_gives_them_other_scales(net, normal, written):
    text = """(float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z) {
            s = Conv(x, w1) y = Conv(s, w2) z = Conv(x, w1) }"""
    model = net(text, w1=normal(4, 4, 1, 1), w2=normal(4, 4, 1, 1, seed=1))
    int8 = written(model, normal(1, 4, 8, 8, seed=2))
    first, third = (next(node for node in int8.graph.node if node.name == f"Conv_{index}") for index in (0, 2))
    assert first.input[0] == third.input[0]
    assert first.input[1] != third.input[1]
