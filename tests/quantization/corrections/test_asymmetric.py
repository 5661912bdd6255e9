"""One-sided activations take all codes of INT8, where no padding is read around them and an Add costs nothing."""

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from graphs import constants, inferred, measured_ranges, undone_weights

from trtdet.backends import OnnxRunner
from trtdet.calibration import expose
from trtdet.quantization import Corrections, PrecisionPlan, Start, correct, insert_qdq, lint, place
from trtdet.quantization.corrections import gate, policies
from trtdet.quantization.corrections.asymmetric import centred
from trtdet.quantization.corrections.trials import find_sites
from trtdet.quantization.encoding import ChannelMap
from trtdet.quantization.precision import Entry
from trtdet.quantization.qdq import plain_form
from trtdet.quantization.weighted import Weighted

DETECTOR = """(float[1,3,32,32] x) => (float[1,64,4] boxes, float[1,64,2] scores) {
    a = Conv<pads = [1,1,1,1], strides = [4,4]>(x, w1, b1) s = Sigmoid(a) c = Mul(a, s)
    d = Conv(c, w2) t = Sigmoid(d) e = Mul(d, t)
    f = Conv<pads = [1,1,1,1]>(e, w3) u = Sigmoid(f) g = Mul(f, u)
    h = Conv(g, w4) i = Relu(h) k = Add(i, g) p = MaxPool<kernel_shape = [1,1]>(k) l = Conv(p, w5)
    m = Transpose<perm = [0,2,3,1]>(l) n = Reshape(m, to) o, q = Split<axis = 2>(n, sizes)
    boxes = Mul(o, wide) scores = Sigmoid(q) }"""
"""``c`` is read without padding, ``e`` with padding, ``g`` by a sum as well, and ``p`` is moved by a pool."""


@pytest.fixture
def detector(normal):
    shapes = {"w2": (16, 16, 1, 1), "w3": (16, 16, 3, 3), "w4": (16, 16, 1, 1), "w5": (6, 16, 1, 1)}
    weights = {
        name: normal(*shape, seed=number, scale=1.5 / np.prod(shape[1:]) ** 0.5)
        for number, (name, shape) in enumerate(shapes.items())
    }
    return inferred(
        DETECTOR,
        w1=normal(16, 3, 3, 3, seed=8, scale=3e-3),
        b1=normal(16, seed=9),
        **weights,
        to=np.array([1, 64, 6], np.int64),
        sizes=np.array([4, 2], np.int64),
        wide=np.float32(10),
    )


def shifted(found: Any) -> set[str]:
    return {name for name, channels in found.corrections.tensors.items() if channels.shift}


def test_the_middle_of_the_range_goes_to_zero():
    low = np.array([-0.25, -0.1])
    moved = centred(ChannelMap(8.0), low)
    assert (moved.amax, moved.shift) == (4.125, 3.875)
    moved = centred(ChannelMap(8.0, np.array([1.0, 20.0])), low)  # the second channel reaches down to -2
    assert (moved.amax, moved.shift) == (5.0, 3.0)
    assert centred(ChannelMap(8.0), np.array([-30.0, 0.0])).shift == 0.0  # what is clipped on both sides
    assert centred(ChannelMap(8.0), np.array([-6.5, 0.0])).shift == 0.0  # a step finer by less than a tenth
    negative = centred(ChannelMap(8.0), np.array([-8.0, -8.0]))
    assert negative.amax == 8.0


CONVOLUTIONS = {
    "pointwise": ((5, 4, 1, 1), "y = Conv(s, w)"),
    "with a bias": ((5, 4, 1, 1), "y = Conv(s, w, b)"),
    "of groups": ((6, 2, 3, 3), "y = Conv<group = 2>(s, w)"),
    "with strides": ((5, 4, 2, 2), "y = Conv<strides = [2,2]>(s, w, b)"),
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_the_integers_are_those_of_a_zero_point(normal, kind, scaled):
    """onnxruntime has zero points: the same scale and zero point give the same outputs, without an Add."""
    shape, conv = CONVOLUTIONS[kind]
    weights = {"w": normal(*shape), **({"b": normal(shape[0], seed=3)} if ", b" in conv else {})}
    model = inferred(f"(float[1,4,8,8] x) => (float[1,N,H,W] y) {{ s = Sigmoid(x) {conv} }}", **weights)
    x = normal(1, 4, 8, 8, seed=1, scale=3)
    placement, ranges = measured_ranges(model, x)
    scale = np.array([1.0, 1.5, 0.75, 2.0]) if scaled else None
    map = ChannelMap(127 / 128, scale, shift=64 / 128)  # a step of 2 ** -7, and a zero point of 64 steps
    layer = Weighted.of(gs.import_onnx(model).nodes[-1])
    assert layer is not None
    corrections = Corrections({"s": map}, {"Conv_1": plain_form(layer)})
    got = insert_qdq(model, placement, ranges, corrections)
    assert lint(got) == ()
    pointed = insert_qdq(
        model, placement, ranges, Corrections({"s": ChannelMap(127 / 128, scale)}, corrections.weights)
    )
    zero = onnx.numpy_helper.from_array(np.int8(-64), "zero")
    pointed.graph.initializer.append(zero)
    makers = {output: node for node in pointed.graph.node for output in node.output}
    dequantize = makers[next(node for node in pointed.graph.node if node.op_type == "Conv").input[0]]
    for node in (dequantize, makers[dequantize.input[0]]):
        node.input[2] = "zero"
    np.testing.assert_allclose(OnnxRunner(got)(x)["y"], OnnxRunner(pointed)(x)["y"], atol=2e-5)


def test_a_layer_that_stays_in_fp16_keeps_its_bias(normal):
    text = "(float[1,4,8,8] x) => (float[1,5,8,8] y, float[1,5,8,8] z) { s = Sigmoid(x) y = Conv(s, v) z = Conv(s, w) }"
    model = inferred(text, v=normal(5, 4, 1, 1), w=normal(5, 4, 1, 1, seed=1))
    x = normal(1, 4, 8, 8, seed=2)
    placement, ranges = measured_ranges(model, x)
    corrections = Corrections({"s": ChannelMap(0.5, shift=0.5)})
    plan = PrecisionPlan({**placement.plan.entries, "Conv_1": Entry("fp16", "asked for")})
    int8 = insert_qdq(model, placement.following(plan), ranges, corrections)
    expected, got = OnnxRunner(model)(x), OnnxRunner(int8)(x)
    np.testing.assert_allclose(got["y"], expected["y"], atol=1e-6)
    assert 0 < np.abs(got["z"] - expected["z"]).max() < 0.02 * np.abs(expected["z"]).max()


def test_a_sum_gets_the_shift_back(normal):
    """As where a form of the network quantises both inputs of a sum."""
    text = "(float[1,4,8,8] x) => (float[1,4,8,8] y) { s = Sigmoid(x) t = Conv(s, w) y = Add(s, t) }"
    model = inferred(text, w=normal(4, 4, 1, 1))
    x = normal(1, 4, 8, 8, seed=1)
    placement, ranges = measured_ranges(model, x)
    assert ("Add_2", 0) in placement.readers["s"]
    scale = np.array([1.0, 1.5, 0.75, 2.0])
    weights = {"Conv_1": undone_weights(constants(model)["w"], scale)}
    corrections = Corrections({"s": ChannelMap(1.0, scale, shift=1.0)}, weights)
    expected, got = OnnxRunner(model)(x)["y"], OnnxRunner(insert_qdq(model, placement, ranges, corrections))(x)["y"]
    assert np.abs(got - expected).max() < 0.02 * np.abs(expected).max()


def test_a_product_takes_the_shift(normal):
    model = inferred("(float[1,6,32] x) => (float[1,6,16] y) { s = Sigmoid(x) y = MatMul(s, w) }", w=normal(32, 16))
    x = normal(1, 6, 32, seed=1)
    placement, ranges = measured_ranges(model, x)
    got = insert_qdq(model, placement, ranges, Corrections({"s": ChannelMap(0.5, axis=-1, shift=0.5)}))
    plain = insert_qdq(model, placement, ranges)
    exact = OnnxRunner(model)(x)["y"]
    errors = [np.abs(OnnxRunner(each)(x)["y"] - exact).mean() for each in (got, plain)]
    assert errors[0] < 0.9 * errors[1]


def test_where_no_padding_is_read_the_error_falls(detector, sources, chosen, distance):
    given, placement = sources(12), place(detector)
    ranges = chosen(detector, given, "minmax")
    before = correct(detector, placement, ranges, ("bias",), given)
    found = correct(detector, placement, ranges, ("bias", "asymmetric"), given)
    assert shifted(found) == {"c"}
    assert "asymmetric: 1 of 5 tensors" in found.summary
    assert found.corrections.tensors["c"].amax < 0.6 * ranges["minmax"].tensors["c"].amax
    errors = [
        distance(detector, insert_qdq(detector, placement, each.ranges, each.corrections), given)
        for each in (before, found)
    ]
    assert errors[1] < errors[0]


def test_its_add_is_not_held_against_it(detector, sources, chosen, monkeypatch):
    """Forms with more nodes have to be surely better; one with more Adds in kernels that are there anyway has not."""
    given, placement = sources(12), place(detector)
    ranges = chosen(detector, given, "minmax")
    monkeypatch.setattr(gate, "confidence", lambda better, worse: 0.0)
    monkeypatch.setattr(gate, "_MUCH", np.inf)
    monkeypatch.setattr(gate, "_STANDING", 0.0)  # the uncorrected form is not to be kept
    assert shifted(correct(detector, placement, ranges, ("bias", "asymmetric"), given)) == {"c"}


def test_no_kernel_is_spent_on_it(detector, sources, chosen):
    """Where the kernel of a convolution rounds what it writes, an Add is free only beside the Mul of a map."""
    given, placement = sources(12), place(detector)
    ranges = chosen(detector, given, "minmax")
    start = Start(fused=True)
    assert not shifted(correct(detector, placement, ranges, ("bias", "asymmetric"), given, start))
    sites = {site.tensor: site for site in find_sites(detector, placement, ())}
    values = OnnxRunner(expose(detector, list(sites)))(np.full((1, 3, 32, 32), 128, np.float32))
    image = sites.pop("x")
    assert image.padded
    for name, site in sites.items():
        site.add_moments(values[name][0], None)
    assert {name for name, site in sites.items() if site.low(mapped=False, fused=True) is not None} == set()
    assert {name for name, site in sites.items() if site.low(mapped=True, fused=True) is not None} == {"c", "p"}
    np.testing.assert_array_equal(
        sites["c"].low(mapped=True, fused=False), values["c"][0].min(axis=(1, 2)).astype(np.float64)
    )


def test_nothing_is_measured_again_where_nothing_is_shifted(detector, sources, chosen, monkeypatch):
    given, placement = sources(12), place(detector)
    ranges = chosen(detector, given, "minmax")
    measured: list[int] = []
    compare = policies.compare
    monkeypatch.setattr(policies, "compare", lambda task, forms: measured.append(len(forms)) or compare(task, forms))
    correct(detector, placement, ranges, ("bias", "asymmetric"), given, Start(parted=placement.activations))
    without = list(measured)
    correct(detector, placement, ranges, ("bias", "asymmetric"), given)
    assert measured[len(without) :] == [*without, 3]
