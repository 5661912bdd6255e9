from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import constants, makers, raised

from trtdet.backends import OnnxRunner
from trtdet.errors import ModelError
from trtdet.passes import provenance
from trtdet.passes.provenance import Origin
from trtdet.quantization import (
    Entry,
    PrecisionPlan,
    insert_qdq,
    lint,
    nodes_of,
    quantized_joins,
    shared,
    tensors_of,
    to_half,
)

SILU = """(float[1,4,8,8] x) => (float[1,4,8,8] y) {
    a = Conv(x, w1) s = Sigmoid(a) b = Mul(a, s) c = Conv(b, w2) t = Sigmoid(c) d = Mul(c, t) y = Conv(d, w3) }"""


def weights(normal: Any, count: int = 3, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {f"w{one}": normal(*shapes.get(f"w{one}", (4, 4, 1, 1)), seed=one) for one in range(1, count + 1)}


def casts(model: onnx.ModelProto) -> list[tuple[str, str, str]]:
    """Each cast as (what makes its input, to, what reads its output)."""
    makers = {output: node.op_type for node in model.graph.node for output in node.output}
    found = []
    for node in model.graph.node:
        if node.op_type == "Cast":
            readers = [one.op_type for one in model.graph.node if node.output[0] in one.input]
            to = {1: "float", 10: "half"}[node.attribute[0].i]
            found.append((makers.get(node.input[0], "input"), to, "+".join(readers) or "output"))
    return found


def types(model: onnx.ModelProto) -> dict[str, int]:
    return {one.name: one.type.tensor_type.elem_type for one in model.graph.value_info}


def test_no_cast_stands_between_a_convolution_and_its_activation(net, normal):
    model = net(SILU, **weights(normal))
    half = to_half(model, ["Conv_3"])
    assert casts(half) == [("Mul", "half", "Conv"), ("Mul", "float", "Conv")]
    assert {name for name, kind in types(half).items() if kind == 10} >= {"c", "t", "d"}
    x = normal(1, 4, 8, 8, seed=7)
    np.testing.assert_allclose(OnnxRunner(half)(x)["y"], OnnxRunner(model)(x)["y"], atol=0.02)
    assert not np.array_equal(OnnxRunner(half)(x)["y"], OnnxRunner(model)(x)["y"])


def test_convolutions_that_follow_one_another_share_a_region(net, normal):
    model = net(SILU, **weights(normal))
    half = to_half(model, ["Conv_0", "Conv_3", "Conv_6"])
    assert casts(half) == [("input", "half", "Conv"), ("Conv", "float", "output")]
    assert [one.name for one in half.graph.output] == ["y"]
    assert half.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert half.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def test_a_hard_swish_of_single_steps_stays_whole(net, normal):
    text = """(float[1,4,8,8] x) => (float[1,4,8,8] y) {
        a = Conv(x, w1) b = Add(a, three) c = Clip(b, zero, six) d = Mul(a, c) e = Div(d, six) y = Conv(e, w2) }"""
    model = net(text, **weights(normal, 2), three=np.float32(3), zero=np.float32(0), six=np.float32(6))
    half = to_half(model, ["Conv_0"])
    assert casts(half) == [("input", "half", "Conv"), ("Div", "float", "Conv")]


def test_a_join_is_taken_in_where_only_the_region_reads_it(net, normal):
    text = """(float[1,4,8,8] x) => (float[1,4,8,8] y) {{
        a = Conv(x, w1) b = Relu(a) c = Conv(x, w2) d = Relu(c) e = Concat<axis = 1>(b, d) y = Conv(e, w3) {0} }}"""
    shapes = {"w3": (4, 8, 1, 1)}
    half = to_half(net(text.format(""), **weights(normal, **shapes)), ["Conv_0", "Conv_5"])
    # The other branch is cast before the join, so that the join is in FP16 as well.
    assert sorted(casts(half)) == [("Conv", "float", "output"), ("Relu", "half", "Concat"), ("input", "half", "Conv")]
    alone = to_half(net(text.format(""), **weights(normal, **shapes)), ["Conv_0"])
    assert sorted(casts(alone)) == [("Relu", "float", "Concat"), ("input", "half", "Conv")]


def test_a_residual_sum_is_taken_in(net, normal):
    text = "(float[1,4,8,8] x) => (float[1,4,8,8] y) { a = Conv(x, w1) b = Add(a, x) c = Relu(b) y = Conv(c, w2) }"
    half = to_half(net(text, **weights(normal, 2)), ["Conv_0"])
    assert sorted(casts(half)) == [("Relu", "float", "Conv"), ("input", "half", "Conv+Add")]


@pytest.mark.parametrize("side", [4, 8])
def test_the_width_of_a_feature_map_is_no_sign_of_coordinates(net, normal, side):
    places = side * side
    model = net(
        f"""(float[1,16,{side},{side}] x) => (float[1,16,{side},{side}] y) {{
        a = Conv(x, w1) b = Relu(a) q = Reshape(b, flat) k = Transpose<perm = [0,2,1]>(q) s = MatMul(k, q)
        p = Softmax<axis = -1>(s) v = MatMul(q, p) m = Reshape(v, square) d = Add(b, m) e = Conv(d, w2) f = Add(d, e)
        y = Conv(f, w3) }}""",
        **weights(normal, w1=(16, 16, 1, 1), w2=(16, 16, 1, 1), w3=(16, 16, 1, 1)),
        flat=np.array([1, 16, places], np.int64),
        square=np.array([1, 16, side, side], np.int64),
    )
    convs = [node.name for node in model.graph.node if node.op_type == "Conv"]
    assert casts(to_half(model, convs)) == [("input", "half", "Conv"), ("Conv", "float", "output")]


def test_decoding_and_what_is_no_feature_map_stay_in_float(net, normal):
    text = """(float[1,4,8,8] x) => (float[1,64,4] y) {
        a = Conv(x, w1) b = Sigmoid(a) c = Reshape(b, to) d = Transpose<perm = [0,2,1]>(c) y = Mul(d, d) }"""
    model = net(text, **weights(normal, 1), to=np.array([1, 4, 64], np.int64))
    # Moving values is exact in any type: the cast comes where they are computed with.
    assert casts(to_half(model, ["Conv_0"])) == [("input", "half", "Conv"), ("Transpose", "float", "Mul")]
    model.graph.node[1].name = "trtdet/decode/Sigmoid_1"
    assert casts(to_half(model, ["Conv_0"])) == [("input", "half", "Conv"), ("Transpose", "float", "Mul")]
    provenance.put(model, {"trtdet/decode/Sigmoid_1": Origin.DECODE})
    assert casts(to_half(model, ["Conv_0"])) == [("input", "half", "Conv"), ("Conv", "float", "Sigmoid")]
    provenance.put(model, {"trtdet/decode/Sigmoid_1": Origin.ACTIVATION})
    assert casts(to_half(model, ["Conv_0"])) == [("input", "half", "Conv"), ("Transpose", "float", "Mul")]


def test_scales_of_a_resize_are_no_data(net, normal):
    text = """(float[1,4,8,8] x) => (float[1,4,16,16] y) {
        a = Conv(x, w1) b = Resize<mode = "nearest">(a, none, scales) y = Conv(b, w2) }"""
    model = net(text, **weights(normal, 2), none=np.zeros(0, np.float32), scales=np.array([1, 1, 2, 2], np.float32))
    half = to_half(model, ["Conv_0", "Conv_2"])
    assert Counter(op for op, _, _ in casts(half)) == {"input": 1, "Conv": 1}
    assert next(one for one in half.graph.initializer if one.name == "scales").data_type == onnx.TensorProto.FLOAT


def test_int8_convolutions_keep_their_form(net, normal, measured):
    model = net(SILU, **weights(normal))
    x = normal(1, 4, 8, 8, seed=7)
    placement, ranges = measured(model, x)
    plan = PrecisionPlan(
        {name: Entry("fp16" if name == "Conv_3" else "int8", "") for name in ("Conv_0", "Conv_3", "Conv_6")}
    )
    int8 = insert_qdq(model, placement.following(plan), ranges)
    half = to_half(int8, plan.names("fp16"))
    assert casts(half) == [("Mul", "half", "Conv"), ("Mul", "float", "QuantizeLinear")]
    kinds = types(half)
    for node in half.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert kinds.get(node.input[0], 1) != onnx.TensorProto.FLOAT16


def test_the_region_is_told_before_it_is_written(net, normal):
    model = net(SILU, **weights(normal))
    assert set(tensors_of(nodes_of(model, ["Conv_3"]))) == {"b", "c", "t", "d"}
    assert tensors_of(nodes_of(model, [])) == ()
    assert to_half(model, []) is model


@pytest.mark.parametrize("name", ["Conv_0", "Conv_6"])
def test_the_ends_of_a_model(net, normal, name):
    model = net(SILU, **weights(normal))
    x = normal(1, 4, 8, 8, seed=7)
    got = OnnxRunner(to_half(model, [name]))(x)["y"]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, OnnxRunner(model)(x)["y"], atol=0.02)


def test_a_constant_beyond_fp16_becomes_its_largest_value(net, normal):
    """A Clip that only bounds below keeps bounding nothing above, and no constant becomes infinite."""
    model = net(
        """(float[1,4,8,8] x) => (float[1,4,8,8] y) {
        a = Conv(x, w1) b = Clip(a, zero, most) c = Add(b, low) y = Conv(c, w2) }""",
        **weights(normal, 2),
        zero=np.float32(0),
        most=np.float32(3e38),
        low=np.full((1, 1, 1, 1), -1e5, np.float32),
    )
    half = to_half(model, ["Conv_0"])
    by_op = {node.op_type: node for node in half.graph.node}
    values = constants(half)
    most, low = values[by_op["Clip"].input[2]], values[by_op["Add"].input[1]]
    assert (most.dtype, float(most)) == (np.float16, 65504.0)
    assert (low.dtype, float(low.reshape(()))) == (np.float16, -65504.0)


def test_the_value_of_a_pad_is_data(net, normal):
    model = net(
        """(float[1,4,8,8] x) => (float[1,4,8,8] y) {
        a = Conv(x, w1) b = Pad(a, widths, value) y = Conv(b, w2) }""",
        **weights(normal, 2, w2=(4, 4, 3, 3)),
        widths=np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
        value=np.float32(0.75),
    )
    half = to_half(model, ["Conv_0", "Conv_2"])
    (pad,) = (node for node in half.graph.node if node.op_type == "Pad")
    values = constants(half)
    assert values[pad.input[1]].dtype == np.int64
    assert (values[pad.input[2]].dtype, float(values[pad.input[2]])) == (np.float16, 0.75)
    x = normal(1, 4, 8, 8, seed=7)
    np.testing.assert_allclose(OnnxRunner(half)(x)["y"], OnnxRunner(model)(x)["y"], atol=0.03)


def test_between_int8_convolutions_all_is_fp16(net, normal, measured):
    model = raised(net(SILU, **weights(normal)))
    x = normal(1, 4, 8, 8, seed=7)
    placement, ranges = measured(model, x)
    int8 = insert_qdq(model, placement, ranges)
    half = to_half(int8, placement.plan.names("int8"))
    # The image is quantised as it is; the last convolution's output is cast once.
    assert casts(half) == [("Conv", "float", "output")]
    values = {tensor.name: tensor.data_type for tensor in half.graph.initializer}
    scales = [
        values[node.input[1]] for node in half.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")
    ]
    assert Counter(scales) == {10: 11, 1: 1}
    np.testing.assert_allclose(OnnxRunner(half)(x)["y"], OnnxRunner(int8)(x)["y"], atol=0.05)


def test_an_int8_convolution_that_is_left_out_writes_float32(net, normal, measured):
    model = raised(net(SILU, **weights(normal)))
    x = normal(1, 4, 8, 8, seed=7)
    placement, ranges = measured(model, x)
    half = to_half(insert_qdq(model, placement, ranges), ["Conv_0", "Conv_6"])
    kinds = types(half)
    assert (kinds["a"], kinds["c"], kinds["d"]) == (10, 1, 1)
    # Its pairs stay pairs: no cast stands between a DequantizeLinear and a convolution.
    made_by = makers(half)
    for node in half.graph.node:
        if node.op_type == "Conv":
            assert [made_by[name].op_type for name in node.input[:2]] == ["DequantizeLinear"] * 2
    assert OnnxRunner(half)(x)["y"].shape == (1, 4, 8, 8)


def test_a_tensor_that_a_float32_and_a_half_convolution_read_in_int8_has_a_pair_for_each_type(net, normal, measured):
    text = """(float[1,4,8,8] x) => (float[1,4,8,8] y) {
        a = Conv(x, w1) r = Relu(a) b = Conv(r, w2) c = Conv(r, w3) y = Add(b, c) }"""
    model = raised(net(text, **weights(normal)))
    placement, ranges = measured(model, normal(1, 4, 8, 8))
    half = to_half(insert_qdq(model, placement, ranges), ["Conv_0", "Conv_2"])
    readers = {node.name: node.input[0] for node in half.graph.node if node.op_type == "Conv"}
    kinds = types(half)
    assert (kinds[readers["Conv_2"]], kinds[readers["Conv_3"]]) == (10, 1)
    quantizers = [node for node in half.graph.node if node.op_type == "QuantizeLinear" and node.input[0] == "r"]
    assert len(quantizers) == 1


JOINED = """(float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z) {
    a = Conv(x, w1) b = Relu(a) c = Conv(x, w2) d = Relu(c) j = Concat<axis = 1>(b, d)
    y = Conv(j, w3) z = Conv(b, w4) }"""


@pytest.fixture
def joined(net, normal, measured):
    """A model with a Concat of pairs with one scale."""
    model = raised(net(JOINED, **{**weights(normal, 4, w3=(4, 8, 1, 1)), "w2": normal(4, 4, 1, 1, scale=0.1)}))
    placement, ranges = measured(model, normal(1, 4, 8, 8, seed=7))
    ranges, together = shared(model, placement, ranges)
    assert together == (("b", "j"),)
    return quantized_joins(insert_qdq(model, placement, ranges))


def test_a_join_of_pairs_is_in_fp16_where_what_was_quantised_is(joined, normal):
    half = to_half(joined, ["Conv_0", "Conv_2", "Conv_5", "Conv_6"])
    assert casts(half) == [("Conv", "float", "output")] * 2
    assert (types(half)["j"], lint(half)) == (10, ())
    x = normal(1, 4, 8, 8, seed=7)
    for name in "yz":
        np.testing.assert_allclose(OnnxRunner(half)(x)[name], OnnxRunner(joined)(x)[name], atol=0.1)


@pytest.mark.parametrize(("left", "kind"), [("Concat_4", 1), ("Relu_3", 10)])
def test_a_pair_that_float32_and_fp16_read_gives_both_without_a_cast(joined, left, kind):
    half = to_half(joined, ["Conv_0", "Conv_5", "Conv_6"], [left])
    assert types(half)["j"] == kind
    assert [cast for cast in casts(half) if "DequantizeLinear" in (cast[0], cast[2])] == []
    assert lint(half) == ()


def test_what_is_to_stay_in_float32_does(net, normal):
    model = net(SILU, **weights(normal))
    half = to_half(model, ["Conv_0", "Conv_3", "Conv_6"], ["Mul_5"])
    kinds = types(half)
    assert (kinds["b"], kinds["c"], kinds["d"]) == (10, 10, 1)


def test_pairs_in_fp16_want_a_newer_opset(net, normal, measured):
    model = net(SILU, **weights(normal))
    placement, ranges = measured(model, normal(1, 4, 8, 8))
    with pytest.raises(ModelError, match="Q/DQ pairs in FP16 need opset 19, and the model has opset 13"):
        to_half(insert_qdq(model, placement, ranges), ["Conv_0"])
