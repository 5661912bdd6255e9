"""Multiply-adds, counted from the shapes in a model."""

import numpy as np
import onnx
import pytest
from graphs import inferred

from trtdet.calibration import Range, Ranges
from trtdet.quantization import insert_qdq, place
from trtdet.quantization.macs import Macs, multiply_adds, products

NET = """(float[1,4,8,8] x) => (float[1,8,16,16] y) {
    a = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w) b = Conv<group = 6, pads = [1,1,1,1]>(a, d)
    c = Conv<group = 2>(b, g) y = ConvTranspose<strides = [4,4]>(c, t) }"""
WEIGHTS = {"w": (6, 4, 3, 3), "d": (6, 1, 3, 3), "g": (4, 3, 1, 1), "t": (4, 8, 4, 4)}
FOUND = {
    "n0": Macs(6 * 4 * 9 * 16, False, 4, 6, 1, (3, 3)),
    "n1": Macs(6 * 9 * 16, True, 6, 6, 6, (3, 3)),
    "n2": Macs(4 * 3 * 16, False, 6, 4, 2, (1, 1)),
    "n3": Macs(4 * 8 * 16 * 16, False, 4, 8, 1, (4, 4)),
}


def parsed(text: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    model = inferred(text, **{name: np.ones(shape, np.float32) for name, shape in weights.items()})
    for index, node in enumerate(model.graph.node):
        node.name = f"n{index}"
    return model


def test_each_kind_of_convolution():
    assert multiply_adds(parsed(NET, **WEIGHTS)) == FOUND


def test_weights_behind_their_quantisation_count_the_same():
    model = parsed(NET, **WEIGHTS)
    placement = place(model)
    ranges = Ranges("minmax", None, {name: Range(4.0, -4.0, 4.0) for name in placement.activations}, "", 1, "")
    quantised = insert_qdq(model, placement, ranges)
    assert "QuantizeLinear" in {node.op_type for node in quantised.graph.node}
    assert multiply_adds(quantised) == FOUND


def test_what_is_not_known_counts_nothing():
    text = """(float[1,4,8,8] x, float[4,4,1,1] w) => (float[1,4,8,8] y) {
        y = Conv(x, w) }"""
    computed = parsed(text)
    assert multiply_adds(computed) == {"n0": Macs(0, False)}
    shapeless = parsed(NET, **WEIGHTS)
    del shapeless.graph.value_info[:]
    assert multiply_adds(shapeless)["n0"] == Macs(0, False, 4, 6, 1, (3, 3))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("(float[2,5,3] x) => (float[2,5,7] y) { y = MatMul(x, w) }", 2 * 5 * 7 * 3),
        ("(float[N,5,3] x) => (float[N,5,7] y) { y = MatMul(x, w) }", 5 * 7 * 3),
        ("(float[5,3] x) => (float[5,7] y) { y = Gemm(x, w) }", 5 * 7 * 3),
        ("(float[3,5] x) => (float[5,7] y) { y = Gemm<transA = 1>(x, w) }", 5 * 7 * 3),
    ],
)
def test_matrix_products(text, count):
    assert products(parsed(text, w=(3, 7))) == {"n0": count}
