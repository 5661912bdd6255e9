"""Channel maps as Q/DQ pairs: written, folded and padded, they mean what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from trtdet.backends import OnnxRunner
from trtdet.calibration import expose
from trtdet.quantization import Corrections, insert_qdq, lint, place
from trtdet.quantization.encoding import ChannelMap, Rounded, nearest, weight_scales

WRITTEN = {
    "unpadded": "(float[1,4,8,8] x) => (float[1,N,H,W] y) { s = Sigmoid(x) y = Conv(s, w1) }",
    "padded": "(float[1,4,8,8] x) => (float[1,N,H,W] y) { s = Sigmoid(x) y = Conv<pads = [1,1,1,1]>(s, w3) }",
    "both": """(float[1,4,8,8] x) => (float[1,N,H,W] y) {
        s = Sigmoid(x) a = Conv<pads = [1,1,1,1]>(s, w3) b = Conv(s, w1) y = Add(a, b) }""",
    "residual": "(float[1,4,8,8] x) => (float[1,N,H,W] y) { s = Sigmoid(x) a = Conv(s, w1) y = Add(a, s) }",
    "residual of a padded one": """(float[1,4,8,8] x) => (float[1,N,H,W] y) {
        s = Sigmoid(x) a = Conv<pads = [1,1,1,1]>(s, w3) y = Add(a, s) }""",
    "after a product": "(float[1,4,8,8] x) => (float[1,N,H,W] y) { q = Sigmoid(x) s = Div(q, six) y = Conv(q0, w1) }",
    "output": "(float[1,4,8,8] x) => (float[1,N,H,W] y, float[1,4,8,8] s) { s = Mul(x, six) y = Conv(s, w1) }",
}
WRITTEN["after a product"] = WRITTEN["after a product"].replace("q0", "s")


@pytest.mark.parametrize("case", WRITTEN)
def test_a_channel_map_means_the_same(net: Any, normal: Any, measured: Any, case: str) -> None:
    text = WRITTEN[case]
    weights = {"w1": normal(4, 4, 1, 1), "w3": normal(4, 4, 3, 3), "six": np.float32(6)}
    model = net(text, **{name: value for name, value in weights.items() if name in text})
    x = normal(1, 4, 8, 8, seed=1)
    tensor = "s"
    scale, shift = np.array([1.0, 2.0, 0.5, 3.0]), np.array([0.1, -0.2, 0.3, 0.05])
    placement = place(model)
    widest = float(np.abs(OnnxRunner(expose(model, [tensor]))(x)[tensor]).max() + 0.3) * 3
    rounded = {}
    for node in model.graph.node:
        if node.op_type == "Conv":
            weight = weights[node.input[1]]
            inner = weight / scale.reshape(1, 4, 1, 1).astype(np.float32)
            steps = weight_scales(inner)
            integers = nearest(inner.reshape(4, -1), steps).reshape(weight.shape)
            bias = np.einsum("oikl,i->o", weight, shift).astype(np.float32)
            rounded[node.name] = Rounded(integers, steps, bias)
    corrections = Corrections({tensor: ChannelMap(widest, scale, shift)}, rounded)
    int8 = insert_qdq(model, placement, measured(model, x)[1], corrections)
    assert lint(int8) == ()
    expected, got = OnnxRunner(model)(x), OnnxRunner(int8)(x)
    for name, value in expected.items():
        assert np.abs(got[name] - value).max() < 0.06 * np.abs(value).max(), name
    kinds = [node.op_type for node in int8.graph.node]
    assert kinds.count("Pad") == (1 if "pads" in text else 0)
    assert kinds.count("Mul") - [node.op_type for node in model.graph.node].count("Mul") == {
        "both": 2,
        "residual": 2,
        "after a product": 0,
    }.get(case, 1)


def test_a_map_is_folded_into_the_convolution_before_it(net: Any, normal: Any, measured: Any) -> None:
    model = net(
        "(float[1,4,8,8] x) => (float[1,N,H,W] y) { a = Conv(x, w1) y = Conv(a, w2) }",
        w1=normal(4, 4, 1, 1),
        w2=normal(4, 4, 1, 1, seed=1),
    )
    x = normal(1, 4, 8, 8, seed=2)
    placement = place(model)
    scale, shift = np.array([1.0, 2.0, 0.5, 3.0]), np.array([0.1, -0.2, 0.3, 0.05])
    w2 = onnx.numpy_helper.to_array(model.graph.initializer[1])
    a = OnnxRunner(expose(model, ["a"]))(x)["a"][0]
    amax = float(np.abs(scale[:, None, None] * (a - shift[:, None, None])).max())
    inner = w2 / scale.reshape(1, 4, 1, 1).astype(np.float32)
    steps = weight_scales(inner)
    bias = np.einsum("oikl,i->o", w2, shift).astype(np.float32)
    rounded = Rounded(nearest(inner.reshape(4, -1), steps).reshape(w2.shape), steps, bias)
    corrections = Corrections({"a": ChannelMap(amax, scale, shift)}, {"Conv_1": rounded})
    found = measured(model, x)[1]
    int8 = insert_qdq(model, placement, found, corrections)
    kinds = {node.op_type for node in int8.graph.node}
    assert kinds == {"QuantizeLinear", "DequantizeLinear", "Conv"}
    expected, got = OnnxRunner(model)(x)["y"], OnnxRunner(int8)(x)["y"]
    assert np.abs(got - expected).max() < 0.08 * np.abs(expected).max()
