"""Channel maps as Q/DQ pairs: written, folded and padded, they mean what they say."""

from __future__ import annotations

from dataclasses import replace
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


def corrected(model: onnx.ModelProto, tensor: str, channels: ChannelMap) -> Corrections:
    """The map of a tensor, and the weights of the convolutions that read it, undone for it."""
    values = {one.name: onnx.numpy_helper.to_array(one) for one in model.graph.initializer}
    scale = np.ones(4) if channels.scale is None else channels.scale
    shift = np.zeros(4) if channels.shift is None else channels.shift
    rounded = {}
    for node in model.graph.node:
        if node.op_type == "Conv" and node.input[0] == tensor:
            weight = values[node.input[1]]
            inner = weight / scale.reshape(1, 4, 1, 1).astype(np.float32)
            steps = weight_scales(inner)
            integers = nearest(inner.reshape(4, -1), steps).reshape(weight.shape)
            rounded[node.name] = Rounded(integers, steps, np.einsum("oikl,i->o", weight, shift).astype(np.float32))
    return Corrections({tensor: channels}, rounded)


SCALE, SHIFT = np.array([1.0, 2.0, 0.5, 3.0]), np.array([0.4, -0.6, 0.5, 0.3])


def written(model: onnx.ModelProto, measured: Any, x: np.ndarray, channels: ChannelMap) -> onnx.ModelProto:
    """The INT8 form of a model with a map for its tensor ``s``, which must compute what the model does."""
    placement, ranges = measured(model, x)
    s = OnnxRunner(expose(model, ["s"]))(x)["s"][0]
    scale = np.ones(4) if channels.scale is None else channels.scale
    shift = np.zeros(4) if channels.shift is None else channels.shift
    # The zeros that a convolution pads with are quantised as well.
    reach = np.maximum(np.abs(s.reshape(4, -1) - shift[:, None]).max(axis=1), np.abs(shift))
    found = corrected(model, "s", replace(channels, amax=float((scale * reach).max())))
    int8 = insert_qdq(model, placement, ranges, found)
    assert lint(int8) == ()
    expected, got = OnnxRunner(model)(x), OnnxRunner(int8)(x)
    for name, value in expected.items():
        assert got[name].shape == value.shape
        assert np.abs(got[name] - value).max() < 0.06 * np.abs(value).max(), name
    return int8


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_a_shift_before_automatic_padding_pads_once(net: Any, normal: Any, measured: Any, auto_pad: str) -> None:
    model = net(
        f'(float[1,4,8,8] x) => (float[1,4,H,W] y) {{ s = Sigmoid(x) y = Conv<auto_pad = "{auto_pad}">(s, w) }}',
        w=normal(4, 4, 2, 2),
    )
    int8 = written(model, measured, normal(1, 4, 8, 8, seed=1), ChannelMap(1.0, SCALE, SHIFT))
    (conv,) = (node for node in int8.graph.node if node.op_type == "Conv")
    assert {attribute.name for attribute in conv.attribute} == {"pads"}
    assert list(conv.attribute[0].ints) == [0, 0, 0, 0]


def test_a_shift_is_not_folded_over_padding(net: Any, normal: Any, measured: Any) -> None:
    """The scale goes into the convolution before; the shift has to come after the zeros."""
    model = net(
        "(float[1,4,8,8] x) => (float[1,4,8,8] y) { s = Conv(x, w1, b1) y = Conv<pads = [1,1,1,1]>(s, w3) }",
        w1=normal(4, 4, 1, 1),
        b1=normal(4, seed=2),
        w3=normal(4, 4, 3, 3, seed=3),
    )
    int8 = written(model, measured, normal(1, 4, 8, 8, seed=1), ChannelMap(1.0, SCALE, SHIFT))
    kinds = [node.op_type for node in int8.graph.node]
    assert (kinds.count("Mul"), kinds.count("Pad"), kinds.count("Add")) == (0, 1, 1)


@pytest.mark.parametrize("numerator", [True, False])
def test_a_quotient_takes_the_scale_only_as_its_divisor(net: Any, normal: Any, measured: Any, numerator: bool) -> None:
    product = "Div(k, q)" if numerator else "Div(q, k)"
    model = net(
        f"(float[1,4,8,8] x) => (float[1,4,8,8] y) {{ q = Sigmoid(x) s = {product} y = Conv(s, w1) }}",
        k=np.float32(3),
        w1=normal(4, 4, 1, 1),
    )
    int8 = written(model, measured, normal(1, 4, 8, 8, seed=1), ChannelMap(1.0, SCALE))
    assert [node.op_type for node in int8.graph.node].count("Mul") == (1 if numerator else 0)


def test_shared_weights_are_parted_where_a_folded_map_gives_them_other_scales(
    net: Any, normal: Any, measured: Any
) -> None:
    model = net(
        """(float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z) {
            s = Conv(x, w1) y = Conv(s, w2) z = Conv(x, w1) }""",
        w1=normal(4, 4, 1, 1),
        w2=normal(4, 4, 1, 1, seed=1),
    )
    int8 = written(model, measured, normal(1, 4, 8, 8, seed=2), ChannelMap(1.0, SCALE))
    first, third = (next(node for node in int8.graph.node if node.name == f"Conv_{index}") for index in (0, 2))
    assert first.input[0] == third.input[0]
    assert first.input[1] != third.input[1]
