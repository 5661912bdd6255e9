"""Tensors between which values only move share a scale if their ranges are close."""

from collections import Counter
from dataclasses import replace

import nets
import numpy as np
import onnx
import pytest
from graphs import inferred, makers, measured_ranges

from trtdet.backends import OnnxRunner
from trtdet.calibration import Range, Ranges
from trtdet.quantization import insert_qdq, place, quantized_joins, shared
from trtdet.quantization.shared_scales import quantized_cuts

TEXT = """(float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z) {
    a = Conv(x, w1) b = Relu(a) c = Conv(x, w2) d = Relu(c) j = Concat<axis = 1>(b, d)
    y = Conv(j, w3) z = Conv(b, w4) }"""


@pytest.fixture
def model(net, normal):
    shapes = {"w1": (4, 4, 1, 1), "w2": (4, 4, 1, 1), "w3": (4, 8, 1, 1), "w4": (4, 4, 1, 1)}
    return net(TEXT, **{name: normal(*shape, seed=index) for index, (name, shape) in enumerate(shapes.items())})


def ranges(**amax: float) -> Ranges:
    return Ranges("minmax", None, {name: Range(value, -value, value) for name, value in amax.items()}, "key", 1, "sha")


def test_a_joined_tensor_and_its_input_share_the_wider_range(model):
    found, together = shared(model, place(model), ranges(x=1.0, b=4.0, j=5.0))
    assert {name: entry.amax for name, entry in found.tensors.items()} == {"x": 1.0, "b": 5.0, "j": 5.0}
    assert together == (("b", "j"),)
    assert (found.tensors["b"].low, found.tensors["b"].high) == (-4.0, 4.0)


def test_ranges_that_are_far_apart_stay(model):
    given = ranges(x=1.0, b=3.9, j=5.0)
    assert shared(model, place(model), given) == (given, ())


def test_tensors_that_something_is_computed_between_do_not_share(net, normal):
    text = "(float[1,4,8,8] x) => (float[1,4,8,8] y) { a = Conv(x, w) b = Sigmoid(a) y = Conv(b, w) }"
    model = net(text, w=normal(4, 4, 1, 1))
    given = ranges(x=1.0, b=1.0)
    assert shared(model, place(model), given) == (given, ())


@pytest.mark.parametrize(("mode", "share"), [("nearest", True), ("linear", False)])
def test_a_nearest_resize_moves_values_and_an_interpolating_does_not(net, normal, mode, share):
    text = f"""(float[1,4,8,8] x) => (float[1,4,16,16] y) {{
        a = Resize<mode = "{mode}">(x, none, sizes) m = MaxPool<kernel_shape = [1,1]>(a)
        y = Conv(m, w) z = Conv(x, w) }}"""
    made = net(text, w=normal(4, 4, 1, 1), none=np.zeros(0, np.float32), sizes=np.array([1, 1, 2, 2], np.float32))
    _, together = shared(made, place(made), ranges(x=1.0, m=1.2))
    assert together == ((("m", "x"),) if share else ())


def test_a_group_does_not_grow_beyond_what_its_smallest_range_bears(net, normal):
    text = """(float[1,4,8,8] x) => (float[1,8,8,8] y) {
        p = MaxPool<kernel_shape = [1,1]>(x) q = MaxPool<kernel_shape = [1,1]>(p)
        a = Conv(x, w) b = Conv(p, w) c = Conv(q, w) y = Concat<axis = 1>(a, b) z = Add(b, c) }"""
    made = net(text, w=normal(4, 4, 1, 1))
    found, together = shared(made, place(made), ranges(x=1.0, p=1.2, q=1.44))
    # Each is within 1.25 of the next, and the first is not of the last: of two equal links the first is taken.
    assert [len(group) for group in together] == [2]
    assert max(entry.amax for entry in found.tensors.values()) <= 1.44


def test_the_inputs_of_a_join_are_quantised_where_one_is_already(model, measured, normal):
    x = normal(1, 4, 8, 8)
    placement, given = measured(model, x)
    widest = max(given.tensors[name].amax for name in "bj")
    same = replace(
        given, tensors={**given.tensors, **{name: replace(given.tensors[name], amax=widest) for name in "bj"}}
    )
    before = insert_qdq(model, placement, same)
    after = quantized_joins(before)
    made_by = makers(after)
    (join,) = (node for node in after.graph.node if node.op_type == "Concat")
    assert [made_by[name].op_type for name in join.input] == ["DequantizeLinear"] * 2
    # The tensor that has a pair already gets no second.
    counted = Counter(node.input[0] for node in after.graph.node if node.op_type == "QuantizeLinear")
    assert (counted["b"], counted["d"], counted["j"]) == (1, 1, 1)
    for name in "yz":
        np.testing.assert_array_equal(OnnxRunner(after)(x)[name], OnnxRunner(before)(x)[name])


def test_a_join_of_other_scales_is_left(model, measured, normal):
    placement, given = measured(model, normal(1, 4, 8, 8))
    wider = replace(given, tensors={**given.tensors, "j": replace(given.tensors["j"], amax=100.0)})
    before = insert_qdq(model, placement, wider)
    assert quantized_joins(before).graph.node == before.graph.node


C2F = """(float[1,4,8,8] x) => (float[1,4,8,8] y) {{
    a = Conv(x, w1) b = Relu(a) {0} e = Conv(d, w2) f = Concat<axis = 1>(c, d, e) y = Conv(f, w3) }}"""
CUTS = {
    "Split": "c, d = Split<axis = 1>(b, halves)",
    "Slice": "c = Slice(b, none, two, one) d = Slice(b, two, four, one)",
}


def cut_block(text: str, scale: float = 0.1, **changes: float):
    """A C2f block with one scale, with Q/DQ pairs, and its input."""
    shapes = {"w1": (4, 4, 1, 1), "w2": (2, 2, 1, 1), "w3": (4, 6, 1, 1)}
    weights = {name: nets.normal(*shape, seed=index, scale=scale) for index, (name, shape) in enumerate(shapes.items())}
    numbers = {"halves": [2, 2], "none": [0], "one": [1], "two": [2], "four": [4]}
    given = inferred(C2F.format(text), **weights, **{name: np.array(each) for name, each in numbers.items()})
    x = nets.normal(1, 4, 8, 8)
    placement, found = measured_ranges(given, x)
    amax = {"d": 0.5, "f": 0.5, **changes}
    tensors = {**found.tensors, **{name: Range(value, -value, value) for name, value in amax.items()}}
    return quantized_joins(insert_qdq(given, placement, replace(found, tensors=tensors))), x


cut = pytest.fixture(lambda: cut_block, name="cut")


@pytest.mark.parametrize("op", CUTS)
def test_a_tensor_whose_parts_have_one_scale_is_quantised_before_it_is_cut(cut, op):
    before, x = cut(CUTS[op])
    after = quantized_cuts(before)
    made_by = makers(after)
    cuts = [node for node in after.graph.node if node.op_type == op]
    (pair,) = {node.input[0] for node in cuts}
    quantizer = made_by[made_by[pair].input[0]]
    assert (made_by[pair].op_type, quantizer.op_type, quantizer.input[0]) == ("DequantizeLinear", "QuantizeLinear", "b")
    np.testing.assert_array_equal(OnnxRunner(after)(x)["y"], OnnxRunner(before)(x)["y"])
    assert quantized_cuts(after).graph.node == after.graph.node


def test_a_tensor_whose_parts_have_other_scales_or_float_readers_is_cut_in_float(cut):
    other, _ = cut(CUTS["Split"], f=0.7)
    floating, _ = cut(CUTS["Split"])
    output, _ = cut(CUTS["Split"])
    floating.graph.node.append(onnx.helper.make_node("Relu", ["c"], ["z"], "Relu"))
    for before, name in ((floating, "z"), (output, "c")):
        before.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 2, 8, 8]))
    for before in (other, floating, output):
        assert {node.name for node in quantized_cuts(before).graph.node} == {node.name for node in before.graph.node}


def test_every_input_of_a_join_can_be_quantised_also_before_a_pool_and_a_resize(net, normal, measured):
    """As in spatial pyramid pooling, where no input of the join has a pair."""
    text = """(float[1,4,8,8] x) => (float[1,4,8,8] y) {
        a = Conv(x, w1) b = Relu(a) p = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1]>(b)
        q = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1]>(p) j = Concat<axis = 1>(b, p, q) y = Conv(j, w2) }"""
    model, x = net(text, w1=normal(4, 4, 1, 1), w2=normal(4, 12, 1, 1)), normal(1, 4, 8, 8)
    placement, found = measured(model, x)
    before = insert_qdq(model, placement, found)
    assert quantized_cuts(quantized_joins(before)).graph.node == before.graph.node
    after = quantized_cuts(quantized_joins(before, every=True), every=True)
    made_by = makers(after)
    moved = [node for node in after.graph.node if node.op_type in ("MaxPool", "Concat")]
    assert {made_by[name].op_type for node in moved for name in node.input} == {"DequantizeLinear"}
    quantized = {node.input[0] for node in after.graph.node if node.op_type == "QuantizeLinear"}
    assert quantized >= {"x", "b", "p", "q", "j"}
    np.testing.assert_array_equal(OnnxRunner(after)(x)["y"], OnnxRunner(before)(x)["y"])
