from typing import Any

import numpy as np
import pytest
from graphs import constants

from trtdet.backends import OnnxRunner
from trtdet.calibration import expose
from trtdet.quantization import Corrections, Entry, PrecisionPlan, Switch, insert_qdq
from trtdet.quantization.encoding import ChannelMap

NET = """(float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z) {
    a = Conv(x, w1) b = Relu(a) c = Conv<pads = [1,1,1,1]>(b, w2) d = Add(b, c) e = Conv(d, w3) y = Relu(e)
    z = Conv(b, w4) }"""
CONVS = ("Conv_0", "Conv_2", "Conv_4", "Conv_6")
OUTPUTS = ("y", "z")


@pytest.fixture
def model(net, normal):
    weights = {f"w{index}": normal(4, 4, 1, 1, seed=index) for index in (1, 3, 4)}
    return net(NET, **weights, w2=normal(4, 4, 3, 3, seed=2))


@pytest.fixture
def x(normal):
    return normal(1, 4, 8, 8, seed=9)


@pytest.fixture(params=["plain", "mapped"])
def corrections(request, model, undone):
    """None, and a map for the tensor that two convolutions and a sum read."""
    if request.param == "plain":
        return Corrections()
    scale = np.array([1.0, 2.0, 0.5, 1.5])
    values = constants(model)
    weights = {name: undone(values[weight], scale) for name, weight in (("Conv_2", "w2"), ("Conv_6", "w4"))}
    return Corrections({"b": ChannelMap(6.0, scale)}, weights)


@pytest.mark.parametrize("base", ["fp32", "int8"])
def test_switching_is_what_a_plan_would_write(model, x, measured, base, corrections):
    placement, ranges = measured(model, x)
    switch = Switch(model, placement, ranges, corrections, base)
    for names in ((CONVS[0],), (CONVS[1],), (CONVS[2],), (CONVS[3],), (CONVS[1], CONVS[3]), CONVS):
        int8 = set(names) if base == "fp32" else set(CONVS) - set(names)
        plan = PrecisionPlan({name: Entry("int8" if name in int8 else "fp32", "") for name in CONVS})
        written = insert_qdq(model, placement.following(plan), ranges, corrections, fold=False)
        expected = OnnxRunner(written)(x)
        got = OnnxRunner(switch.whole(names, OUTPUTS))(x)
        for name in OUTPUTS:
            np.testing.assert_array_equal(got[name], expected[name], err_msg=f"{names} {name}")


@pytest.mark.parametrize("base", ["fp32", "int8"])
@pytest.mark.parametrize("together", [True, False])
def test_a_suffix_gives_what_the_whole_gives(model, x, measured, base, corrections, together):
    placement, ranges = measured(model, x)
    switch = Switch(model, placement, ranges, corrections, base)
    groups = {f"{names}": names for names in [*((name,) for name in CONVS), CONVS[2:]]}
    suffixes = (
        switch.suffixes(groups, OUTPUTS)
        if together
        else {group: switch.suffixes({group: names}, OUTPUTS)[group] for group, names in groups.items()}
    )
    for group, names in groups.items():
        tensors, found = {"x": x}, set[str]()
        for part in map(OnnxRunner, suffixes[group]):
            needed = [name for name in part.inputs if name not in tensors]
            tensors.update(OnnxRunner(expose(switch.base, needed))(x) if needed else {})
            tensors.update(part.feed({name: tensors[name] for name in part.inputs}))
            found.update(part.outputs)
        whole = OnnxRunner(switch.whole(names, OUTPUTS))(x)
        for name in found.intersection(OUTPUTS):
            np.testing.assert_allclose(tensors[name], whole[name], rtol=1e-5, atol=1e-5)
        if names != ("Conv_6",):  # whether the sum reads its copy depends on the base and the map
            reached = {"y"} if names in (("Conv_2",), ("Conv_4",)) else {"y", "z"}
            assert found.intersection(OUTPUTS) == reached


def test_a_suffix_holds_no_more_than_it_needs(model, x, measured):
    placement, ranges = measured(model, x)
    (suffix,) = Switch(model, placement, ranges, Corrections(), "fp32").suffixes({"one": ("Conv_4",)}, ["e"])["one"]
    assert [one.name for one in suffix.graph.input] == ["d"]
    assert [one.name for one in suffix.graph.output] == ["e"]
    assert sorted(node.op_type for node in suffix.graph.node) == [
        *["Conv", "DequantizeLinear", "DequantizeLinear", "QuantizeLinear", "QuantizeLinear"]
    ]


def test_nodes_after_the_last_of_several_convolutions_are_in_a_model_that_they_share(model, x, measured):
    placement, ranges = measured(model, x)
    switch = Switch(model, placement, ranges, Corrections(), "fp32")
    groups = {"a": CONVS[:1], "b": CONVS[:2], "c": CONVS[1:2]}
    suffixes = switch.suffixes(groups, OUTPUTS)
    # The sum reads what Conv_2 reads, so it is switched with it.
    assert [node.name for node in suffixes["a"][1].graph.node] == ["Conv_4", "Relu_5", "Conv_6"]
    assert [node.name for node in suffixes["c"][1].graph.node] == ["Conv_4", "Relu_5"]
    assert suffixes["a"][1] is suffixes["b"][1]
    passed = {group: [value.name for value in suffixes[group][0].graph.output] for group in groups}
    assert {group: sorted(names) for group, names in passed.items()} == {"a": ["b", "d"], "b": ["b", "d"], "c": ["d"]}


def test_a_sum_reads_the_copy_as_long_as_there_is_one(model, x, measured):
    placement, ranges = measured(model, x)
    assert ("Add_3", 0) in placement.readers["b"]
    cases: tuple[tuple[Any, tuple[str, ...], bool], ...] = (
        ("fp32", ("Conv_6",), True),
        ("int8", ("Conv_6",), True),
        ("int8", ("Conv_2", "Conv_6"), False),
    )
    for base, names, copied in cases:
        variant = Switch(model, placement, ranges, Corrections(), base).whole(names, OUTPUTS)
        (add,) = [node for node in variant.graph.node if node.op_type == "Add"]
        assert (add.input[0] != "b") == copied


def test_integers_that_variants_read_stay_integers(net, normal):
    text = """(float[1,4,8,8] x) => (float y) {
        a = Conv(x, w) n = NonZero(a) c = Cast<to = 1>(n) s = ReduceSum(c) y = Mul(s, s) }"""
    model = net(text, w=normal(2, 4, 1, 1))
    exposed = OnnxRunner(expose(model, ["n", "s"]))(normal(1, 4, 8, 8))
    assert {name: value.dtype.kind for name, value in exposed.items()} == {"n": "i", "s": "f"}
