"""A factor per channel is folded into the layers before a tensor and changes no other tensor."""

from dataclasses import replace
from typing import Any

import nets
import numpy as np
import onnx
import pytest
from graphs import inferred

from trtdet.backends import OnnxRunner
from trtdet.calibration import expose
from trtdet.passes.base import Writer
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.plugin_ops import PLUGIN_ACTIVATIONS
from trtdet.passes.provenance import Origin, origin_of
from trtdet.quantization import Corrections, PrecisionPlan, QdqPlacement, insert_qdq, lint
from trtdet.quantization.encoding import ChannelMap
from trtdet.quantization.folding import channels_left, fold_map

FACTOR = np.array([1.0, 2.0, 0.5, 3.0, 0.25, 1.5, 4.0, 0.75])

HEAD = "(float[1,4,8,8] x) => (float[1,C,H,W] y) {"

FOLDED = {
    "Conv": "s = Conv<pads = [1,1,1,1]>(x, w, b)",
    "Conv without a bias": "s = Conv(x, w1)",
    "depthwise Conv": "s = Conv<group = 4>(x, g, b)",
    "ConvTranspose": "s = ConvTranspose<strides = [2,2]>(x, t, b)",
    "ConvTranspose in groups": "s = ConvTranspose<group = 2>(x, u, b)",
    "Relu": "a = Conv(x, w1, b) s = Relu(a)",
    "LeakyRelu": "a = Conv(x, w1, b) s = LeakyRelu<alpha = 0.1>(a)",
    "PRelu": "a = Conv(x, w1, b) s = PRelu(a, slope)",
    "Identity": "a = Conv(x, w1, b) s = Identity(a)",
    "MaxPool": "a = Conv(x, w1, b) s = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1]>(a)",
    "AveragePool": "a = Conv(x, w1, b) s = AveragePool<kernel_shape = [3,3], pads = [1,1,1,1]>(a)",
    "AveragePool over zeros": """a = Conv(x, w1, b)
        s = AveragePool<kernel_shape = [3,3], pads = [1,1,1,1], count_include_pad = 1>(a)""",
    "GlobalAveragePool": "a = Conv(x, w1, b) s = GlobalAveragePool(a)",
    "GlobalMaxPool": "a = Conv(x, w1, b) s = GlobalMaxPool(a)",
    "Resize, nearest": 'a = Conv(x, w1, b) s = Resize<mode = "nearest">(a, , doubled)',
    "Resize, linear": 'a = Conv(x, w1, b) s = Resize<mode = "linear">(a, , doubled)',
    "Pad": "a = Conv(x, w1, b) s = Pad(a, sides)",
    "Pad with a 0": "a = Conv(x, w1, b) s = Pad(a, sides, nought)",
    "Pad by the edge": 'a = Conv(x, w1, b) s = Pad<mode = "edge">(a, sides)',
    "Slice of rows": "a = Conv(x, w1, b) s = Slice(a, one, five, two)",
    "a chain": """a = Conv(x, w1, b) r = Relu(a) m = MaxPool<kernel_shape = [2,2], strides = [2,2]>(r)
        s = Resize<mode = "nearest">(m, , doubled)""",
    "a shape that is read": """a = Conv(x, w1, b) r = Relu(a) k = Shape(r) l = Cast<to = 1>(k)
        m = ReduceMax<keepdims = 0>(l) s = Relu(r) z = Mul(x, m)""",
    "BatchNormalization": "a = Relu(x) s = BatchNormalization(a, scale, shift, mean, variance)",
    "product": "a = Relu(x) s = Mul(three, a)",
    "product a channel": "a = Relu(x) s = Mul(a, column)",
    "quotient": "a = Relu(x) s = Div(a, three)",
    "Concat": "a = Conv(x, w1, b) c = Conv(x, w2) r = Relu(a) s = Concat<axis = 1>(r, c)",
    "Concat from the end": "a = Conv(x, w1, b) c = Conv(x, w2) r = Relu(a) s = Concat<axis = -3>(r, c)",
    "Split": "a = Conv(x, w8, b8) s, o = Split<axis = 1>(a) z = Sigmoid(o)",
    "Split, the second": "a = Conv(x, w8, b8) o, s = Split<axis = 1>(a, halves) z = Sigmoid(o)",
    "Split and joined": "a = Conv(x, w8, b8) o, p = Split<axis = 1>(a, halves) q = Relu(o) s = Concat<axis = 1>(p, q)",
    "normalised by a mean that is computed": (
        "a = Conv(x, w1) k = Neg(mean) s = BatchNormalization(a, scale, shift, k, variance)"
    ),
    "a convolution in float that reads it": "a = Conv(x, w1, b) s = Relu(a) z = Conv<pads = [1,1,1,1]>(s, w, b)",
    "a depthwise one": "a = Conv(x, w1, b) s = Relu(a) z = Conv<group = 4>(s, g)",
    "one in groups": "a = Conv(x, w1, b) s = Relu(a) z = Conv<group = 2>(s, u)",
    "one on the way": "a = Conv(x, w1, b) r = Relu(a) z = Conv(r, w2) s = MaxPool<kernel_shape = [1,1]>(r)",
    "one on the way to a Concat": "a = Conv(x, w1, b) c = Conv(x, w2) z = Conv(c, w) s = Concat<axis = 1>(a, c)",
}

LEFT = {
    "the input": ("r = Relu(x) s = MaxPool<kernel_shape = [1,1]>(r)", 4),
    "Sigmoid": ("a = Conv(x, w1, b) s = Sigmoid(a)", 4),
    "SiLU": ("a = Conv(x, w1, b) q = Sigmoid(a) s = Mul(a, q)", 4),
    "HardSwish": ("a = Conv(x, w1, b) q = HardSigmoid(a) s = Mul(a, q)", 4),
    "ReLU6": ("a = Conv(x, w1, b) s = Clip(a, nought, three)", 4),
    "sum": ("a = Conv(x, w1, b) s = Add(a, x)", 4),
    "constant over it": ("a = Relu(x) s = Div(three, a)", 4),
    "a product of a square": ("a = Conv(x, w1, b) s = Mul(a, a)", 4),
    "weights that are shared": ("a = Conv(x, w1, b) z = Conv(x, w1) s = Relu(a)", 4),
    "weights that are computed": ("k = Relu(w1) a = Conv(x, k) s = Relu(a)", 4),
    "another reader of the convolution": ("a = Conv(x, w1, b) z = Sigmoid(a) s = Relu(a)", 4),
    "a convolution in float with shared weights": ("a = Conv(x, w1) s = Relu(a) z = Conv(s, w2) v = Conv(x, w2)", 4),
    "a transposed convolution that reads it": ("a = Conv(x, w1) s = Relu(a) z = ConvTranspose(s, t)", 4),
    "weights that are what is mapped": ("s = Conv(x, w1) z = Conv(x, s)", 4),
    "another reader on the way": (
        "a = Conv(x, w1, b) r = Relu(a) z = Sigmoid(r) s = MaxPool<kernel_shape = [1,1]>(r)",
        4,
    ),
    "an output on the way": ("z = Conv(x, w1, b) s = Relu(z)", 4),
    "Pad with a 3": ("a = Conv(x, w1, b) s = Pad(a, sides, three)", 4),
    "Pad of channels": ("a = Conv(x, w1, b) s = Pad(a, added)", 5),
    "Slice of channels": ("a = Conv(x, w1, b) s = Slice(a, one, five, axis)", 3),
    "Transpose": ("a = Conv(x, w1, b) s = Transpose<perm = [0,2,1,3]>(a)", 8),
    "Resize of channels": ('a = Conv(x, w1, b) s = Resize<mode = "nearest">(a, , deeper)', 8),
    "Concat of rows": ("a = Conv(x, w1, b) c = Conv(x, w2) s = Concat<axis = 2>(a, c)", 4),
    "Concat of what does not fold": ("a = Conv(x, w1) p = Sigmoid(a) q = Sigmoid(x) s = Concat<axis = 1>(p, q)", 8),
    "Concat of the same twice": ("a = Conv(x, w1) r = Relu(a) s = Concat<axis = 1>(r, r)", 8),
    "Split that is read whole": ("a = Conv(x, w8, b8) s, o = Split<axis = 1>(a) z = Sigmoid(a)", 4),
    "Split of rows": ("a = Conv(x, w1) s, o = Split<axis = 2>(a) z = Sigmoid(o)", 4),
}


def model_of(body: str) -> onnx.ModelProto:
    """A model of the statements, with the weights that they name; tensor ``s`` is what is mapped."""
    shapes = {"w1": (4, 4, 1, 1), "w2": (4, 4, 1, 1), "w": (4, 4, 3, 3), "w8": (8, 4, 1, 1), "g": (4, 1, 1, 1)}
    shapes |= {"t": (4, 4, 2, 2), "u": (4, 2, 1, 1), "b8": (8,), "slope": (4, 1, 1), "column": (1, 4, 1, 1)}
    shapes |= dict.fromkeys(("b", "scale", "shift", "mean", "variance"), (4,))
    values = {name: nets.normal(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    values |= {name: np.abs(values[name]) for name in ("slope", "variance")}
    lists = {"one": [1], "five": [5], "two": [2], "axis": [1], "halves": [4, 4], "sides": [0, 0, 1, 2, 0, 0, 0, 1]}
    values |= {name: np.array(value) for name, value in (lists | {"added": [0, 1, 0, 0, 0, 0, 0, 0]}).items()}
    floats = {"three": 3, "nought": 0, "doubled": [1, 1, 2, 2], "deeper": [1, 2, 1, 1]}
    values |= {name: np.array(value, np.float32) for name, value in floats.items()}
    words = set(body.replace("(", " ").replace(")", " ").replace(",", " ").split())
    head = HEAD if " z = " not in f" {body}" else HEAD.replace(" y)", " y, float[1,D,E,F] z)")
    return inferred(f"{head} {body} y = Sigmoid(s) }}", **{name: values[name] for name in values if name in words})


made = pytest.fixture(lambda: model_of, name="made")


def folded(model: onnx.ModelProto, factor: np.ndarray) -> tuple[onnx.ModelProto, np.ndarray | None]:
    """The model that makes the product in the place of ``s``, as far as it goes in, and what is left."""
    graph = to_graph(model)
    write = Writer(graph, "test", Origin.QDQ)
    left = fold_map(write, graph.tensors()["s"], [reader(model)], factor, {})
    return to_model(graph), left


def reader(model: onnx.ModelProto) -> str:
    """The node that reads ``s`` for the sake of ``y``."""
    return next(node.name for node in model.graph.node if node.output[0] == "y")


def channels(model: onnx.ModelProto) -> int:
    graph = to_graph(model)
    return int(graph.tensors()["s"].shape[1])


def left_to_multiply(model: onnx.ModelProto) -> int:
    """The channels of ``s`` that need a Mul for the sake of ``y``, which reads it."""
    graph = to_graph(model)
    return channels_left(graph, graph.tensors()["s"], channels(model), [reader(model)], ())


def kinds(model: onnx.ModelProto) -> list[str]:
    return sorted(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("case", FOLDED)
def test_a_factor_goes_in_without_a_node(made, normal, case):
    model = made(FOLDED[case])
    factor = FACTOR[: channels(model)]
    changed, left = folded(model, factor)
    assert left is None
    assert left_to_multiply(model) == 0
    assert kinds(changed) == kinds(model)
    x = normal(1, 4, 8, 8, seed=20)
    expected, got = (OnnxRunner(expose(form, ["s"]))(x) for form in (model, changed))
    np.testing.assert_allclose(got["s"], expected["s"] * factor.reshape(1, -1, 1, 1), rtol=1e-4, atol=1e-4)
    if "z" in expected:
        np.testing.assert_allclose(got["z"], expected["z"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_homogeneous_or_is_read_elsewhere_stops_a_factor(made, case):
    body, count = LEFT[case]
    model = made(body)
    before = to_model(to_graph(model)).SerializeToString(deterministic=True)
    changed, left = folded(model, FACTOR[:count])
    assert left is not None and len(left) == count
    assert changed.SerializeToString(deterministic=True) == before
    assert left_to_multiply(model) == count


def test_an_input_of_a_concat_that_cannot_take_its_part_gets_a_mul_of_it(made, normal):
    """Four of twelve channels come from a convolution; a Sigmoid's and those of the input itself are multiplied."""
    model = made(
        """a = Conv(x, w1, b) r = Relu(a) q = Sigmoid(x) i = Concat<axis = 1>(r, q)
        m = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1]>(i) s = Concat<axis = 1>(x, m)"""
    )
    factor = np.concatenate([FACTOR, FACTOR[:4]])
    changed, left = folded(model, factor)
    assert left is None
    assert left_to_multiply(model) == 8
    added = [name for name, origin in origin_of(changed).items() if origin is Origin.CHANNEL_MAP]
    makers = {node.output[0]: node for node in changed.graph.node}
    joins = [node for node in changed.graph.node if node.op_type == "Concat"]
    assert sorted(makers[name].input[0] for join in joins for name in join.input if name in added) == ["q", "x"]
    x = normal(1, 4, 8, 8, seed=20)
    expected, got = (OnnxRunner(expose(form, ["s"]))(x)["s"] for form in (model, changed))
    np.testing.assert_allclose(got, expected * factor.reshape(1, -1, 1, 1), rtol=1e-4, atol=1e-5)


def test_a_plugin_activation_keeps_the_map_after_the_concat(made):
    """There it takes over the map together with the rounding; before the Concat it would not."""
    model = made("a = Conv(x, w1, b) c = Conv(x, w2) q = Sigmoid(c) s = Concat<axis = 1>(a, q)")
    (activation,) = (node for node in model.graph.node if node.name == "Sigmoid_2")
    activation.op_type = PLUGIN_ACTIVATIONS[0]
    graph = to_graph(model)
    nodes = len(graph.nodes)
    left = fold_map(Writer(graph, "test", Origin.QDQ), graph.tensors()["s"], [reader(model)], FACTOR, {})
    assert left is FACTOR and len(graph.nodes) == nodes
    for tensor, count in (("s", 8), ("q", 4)):  # the plugin has a factor of its own, so that no Mul is left
        readers = [node.name for node in graph.tensors()[tensor].outputs]
        assert channels_left(graph, graph.tensors()[tensor], count, readers, ()) == 0


@pytest.mark.parametrize(
    ("weight", "bias", "factor", "goes"),
    [
        (60000.0, 0.0, 1.05, True),
        (60000.0, 0.0, 1.2, False),
        (1.0, 60000.0, 1.2, False),
        (70000.0, 0.0, 1.2, True),  # beyond FP16 already
        (1e-4, 0.0, 0.9, True),
        (1e-4, 0.0, 0.5, False),
        (1e-4, 0.0, 1.5, True),
        (1e-5, 0.0, 0.5, True),  # no normal number of FP16 already
        (1.0, 1e-4, 0.5, True),  # a bias that small is nothing beside the product
        (0.0, 0.0, 0.5, True),
    ],
)
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose<group = 2>"])
def test_weights_in_float_stay_normal_numbers_of_fp16(net, kind, weight, bias, factor, goes):
    weights = np.full((4, 2 if "group" in kind else 4, 1, 1), 0.5, np.float32)
    channel = weights[2:, 1] if "group" in kind else weights[3]
    channel[:] = weight
    biases = np.array([1, 1, 1, bias], np.float32)
    text = f"(float[1,4,8,8] x) => (float[1,4,8,8] y) {{ a = {kind}(x, w, b) s = Relu(a) y = Sigmoid(s) }}"
    model = net(text, w=weights, b=biases)
    _, left = folded(model, np.array([1.0, 1.0, 1.0, factor]))
    assert (left is None) == goes


def test_what_undoes_a_factor_stays_normal_numbers_of_fp16(net, normal):
    """The second output channel reads the second input channel alone, with a small weight."""
    text = """(float[1,2,8,8] x) => (float[1,2,8,8] y, float[1,2,8,8] z) {
            a = Conv(x, w) s = Relu(a) y = Sigmoid(s) z = Conv(s, u) }"""
    model = net(text, w=normal(2, 2, 1, 1), u=np.array([[1, 0], [0, 1e-4]], np.float32).reshape(2, 2, 1, 1))
    for factor, goes in (([1.0, 1.5], True), ([1.0, 2.0], False), ([2.0, 1.0], True), ([1e-5, 1.0], False)):
        assert (folded(model, np.array(factor))[1] is None) == goes


def fitting(model: onnx.ModelProto, x: np.ndarray, tensor: str, scale: np.ndarray) -> ChannelMap:
    """A map of this scale that reaches over all values of the tensor."""
    values = OnnxRunner(expose(model, [tensor]))(x)[tensor][0].reshape(len(scale), -1)
    return ChannelMap(float((scale[:, None] * np.abs(values)).max()), scale)


def with_precision(placement: QdqPlacement, conv: str, precision: Any) -> QdqPlacement:
    entries = placement.plan.entries
    return placement.following(PrecisionPlan({**entries, conv: replace(entries[conv], precision=precision)}))


@pytest.mark.parametrize("float_maker", [False, True])
def test_between_convolutions_of_any_precision_stands_nothing_but_their_activation(
    net, normal, measured, undone, float_maker
):
    weights = {"w1": normal(4, 4, 1, 1), "b1": normal(4, seed=1), "w2": normal(4, 4, 1, 1, seed=2)}
    text = """(float[1,4,8,8] x) => (float[1,4,8,8] y) {
            a = Conv(x, w1, b1) r = Relu(a) s = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1]>(r) y = Conv(s, w2) }"""
    model = net(text, **weights)
    x = normal(1, 4, 8, 8, seed=3)
    placement, ranges = measured(model, x)
    if float_maker:
        placement = with_precision(placement, "Conv_0", "fp16")
    scale = np.array([4.0, 1.0, 0.5, 2.0])
    corrections = Corrections({"s": fitting(model, x, "s", scale)}, {"Conv_3": undone(weights["w2"], scale)})
    int8 = insert_qdq(model, placement, ranges, corrections)
    assert lint(int8) == ()
    assert [kind for kind in kinds(int8) if not kind.endswith("Linear")] == ["Conv", "Conv", "MaxPool", "Relu"]
    expected, got = OnnxRunner(model)(x)["y"], OnnxRunner(int8)(x)["y"]
    assert np.abs(got - expected).max() < 0.06 * np.abs(expected).max()
    kept = insert_qdq(model, placement, ranges, corrections, fold=False)
    assert kinds(kept).count("Mul") == 1


def test_two_parts_of_a_split_convolution_take_their_maps(net, normal, measured, undone):
    weights = {"w1": normal(8, 4, 1, 1), "w2": normal(4, 4, 1, 1, seed=2), "w3": normal(4, 4, 1, 1, seed=3)}
    text = """(float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z) {
            a = Conv(x, w1) r = Relu(a) p, q = Split<axis = 1>(r) y = Conv(p, w2) z = Conv(q, w3) }"""
    model = net(text, **weights)
    x = normal(1, 4, 8, 8, seed=4)
    placement, ranges = measured(model, x)
    maps, rounded = {}, {}
    for tensor, conv, weight, scale in (("p", "Conv_3", "w2", FACTOR[:4]), ("q", "Conv_4", "w3", FACTOR[4:])):
        maps[tensor], rounded[conv] = fitting(model, x, tensor, scale), undone(weights[weight], scale)
    int8 = insert_qdq(model, placement, ranges, Corrections(maps, rounded))
    assert [kind for kind in kinds(int8) if not kind.endswith("Linear")] == ["Conv", "Conv", "Conv", "Relu", "Split"]
    expected, got = OnnxRunner(model)(x), OnnxRunner(int8)(x)
    for name in ("y", "z"):
        assert np.abs(got[name] - expected[name]).max() < 0.08 * np.abs(expected[name]).max()


@pytest.mark.parametrize("reader", ["int8", "fp16"])
def test_a_tensor_on_the_way_may_be_read_in_float_but_not_quantised_by_itself(net, normal, measured, undone, reader):
    weights = {name: normal(4, 4, 1, 1, seed=seed) for seed, name in enumerate(("w1", "w2", "w3"))}
    text = """(float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z) {
            a = Conv(x, w1) r = Relu(a) z = Conv(r, w2) s = MaxPool<kernel_shape = [1,1]>(r) y = Conv(s, w3) }"""
    model = net(text, **weights)
    x = normal(1, 4, 8, 8, seed=4)
    placement, ranges = measured(model, x)
    placement = with_precision(placement, "Conv_2", reader)
    scale = FACTOR[:4]
    corrections = Corrections({"s": fitting(model, x, "s", scale)}, {"Conv_4": undone(weights["w3"], scale)})
    int8 = insert_qdq(model, placement, ranges, corrections)
    assert kinds(int8).count("Mul") == (1 if reader == "int8" else 0)
    expected, got = OnnxRunner(model)(x), OnnxRunner(int8)(x)
    for name in ("y", "z"):
        assert np.abs(got[name] - expected[name]).max() < 0.08 * np.abs(expected[name]).max()
