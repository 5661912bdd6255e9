"""Forms of an INT8 network from one plan."""

from collections import Counter

import numpy as np
import onnx
import pytest
from graphs import makers

from trtdet.backends import OnnxRunner
from trtdet.quantization import CANDIDATES, Entry, NetworkForm, PrecisionPlan, insert_qdq, lint, place

TEXT = """(float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z) {
    a = Conv(x, w1) b = Relu(a) c = Conv(b, w2) d = Relu(c) s = Add(b, d) y = Conv(s, w3) z = Conv(s, w4) }"""
LAYERS = ("Conv_0", "Conv_2", "Conv_5", "Conv_6")


@pytest.fixture
def model(net, normal):
    return net(TEXT, **{f"w{one}": normal(4, 4, 1, 1, seed=one) for one in range(1, 5)})


def quantized(model: onnx.ModelProto, op: str) -> list[list[bool]]:
    """For each node of an operator, which of its first two inputs come from a pair."""
    made_by = makers(model)
    nodes = [node for node in model.graph.node if node.op_type == op]
    return [[made_by[name].op_type == "DequantizeLinear" for name in node.input[:2]] for node in nodes]


@pytest.mark.parametrize(
    ("residual", "inputs"), [("skip", [True, False]), ("both", [True, True]), ("none", [False, False])]
)
def test_a_sum_has_one_input_or_both_or_none_in_int8(model, measured, normal, residual, inputs):
    x = normal(1, 4, 8, 8)
    placement, ranges = measured(model, x)
    placed = NetworkForm(residual=residual).placed(model, placement)
    assert ("d" in placed.activations) == (residual == "both")
    tensors = {**ranges.tensors, "d": ranges.tensors["s"]}
    int8 = insert_qdq(model, placed, type(ranges)(**{**vars(ranges), "tensors": tensors}))
    assert (quantized(int8, "Add"), quantized(int8, "Conv"), lint(int8)) == ([inputs], [[True] * 2] * 4, ())
    want = OnnxRunner(model)(x)["y"]
    np.testing.assert_allclose(OnnxRunner(int8)(x)["y"], want, atol=0.05 * np.abs(want).max())


def test_only_the_layers_that_read_the_image_change_with_the_first(model):
    able = place(model).plan
    mixed = PrecisionPlan({**able.entries, "Conv_0": Entry("fp16", "few"), "Conv_5": Entry("fp16", "named")})
    for plan in (able, mixed):
        counts = {
            first: NetworkForm(first=first).planned(model, plan, able).names("int8") for first in ("int8", "fp16")
        }
        later = tuple(name for name in plan.names("int8") if name != "Conv_0")
        assert counts == {"int8": ("Conv_0", *later), "fp16": later}
    assert NetworkForm().planned(model, mixed, able) == mixed
    never = PrecisionPlan({**able.entries, "Conv_0": Entry("fp32", "its weights are not constant")})
    assert NetworkForm(first="int8").planned(model, never, never) == never


def test_each_reader_can_have_a_pair_of_its_own(model, measured, normal):
    x = normal(1, 4, 8, 8)
    placement, ranges = measured(model, x)
    int8 = insert_qdq(model, placement, ranges)
    own = NetworkForm(pairs="own").paired(int8)
    read = Counter(node.input[0] for node in own.graph.node if node.op_type == "QuantizeLinear")
    assert {name: read[name] for name in "xbs"} == {"x": 1, "b": 2, "s": 2}
    assert (
        max(Counter(name for node in own.graph.node for name in node.input if "DequantizeLinear" in name).values()) == 1
    )
    for name in "yz":
        np.testing.assert_array_equal(OnnxRunner(own)(x)[name], OnnxRunner(int8)(x)[name])


def test_candidates_differ_from_the_default_and_from_each_other():
    assert len({NetworkForm(), *CANDIDATES.values()}) == len(CANDIDATES) + 1
