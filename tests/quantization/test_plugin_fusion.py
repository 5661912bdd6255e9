"""INT8 input and output of plugin activations: steps from the ranges, values as computed by NumPy."""

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
from graphs import constants

from trtdet.backends import OnnxRunner
from trtdet.calibration import ChannelRange, expose
from trtdet.config import InputConfig
from trtdet.passes import Decoded
from trtdet.passes.base import PLUGIN_DOMAIN
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.plugin_ops import attributes
from trtdet.quantization import Corrections, Sources, insert_qdq, lint, reach, requantize, to_half
from trtdet.quantization.encoding import ChannelMap, half_step, nearest, weight_scales
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.plugin_fusion import Requantized
from trtdet.quantization.precision import Entry, PrecisionPlan

F = np.float32
TEXT = """(float[1,3,8,8] x) => (float[1,5,8,8] y) {
    a = Conv<pads = [1,1,1,1]>(x, w1, b1) p = Neg(a)
    c = Conv<pads = [1,1,1,1]>(p, w2, b2) q = Neg(c) y = Conv(q, w3) }"""


def plugged(model: onnx.ModelProto, op: str = "TRT_SiLU") -> onnx.ModelProto:
    """The model with every Neg, which stands for it in the text, as a plugin node."""
    for node in model.graph.node:
        if node.op_type == "Neg":
            node.op_type, node.domain = op, PLUGIN_DOMAIN
            node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in attributes().items())
    if PLUGIN_DOMAIN not in [one.domain for one in model.opset_import]:
        model.opset_import.append(onnx.helper.make_opsetid(PLUGIN_DOMAIN, 1))
    return onnx.shape_inference.infer_shapes(model)


def requantized_alike(model: onnx.ModelProto, x: np.ndarray, measured: Callable[..., Any]) -> Requantized:
    """A model with plugins for Neg, requantised with a range for each channel of ``a``: valid, and computes alike."""
    model = plugged(model)
    explicit = insert_qdq(model, *measured(model, x))
    done = requantize(explicit, {"a": ChannelRange((3.0, 4.0, 5.0, 6.0), 0.0)})
    assert lint(done.model) == ()
    got, expected = OnnxRunner(done.model)(x)["y"], OnnxRunner(explicit)(x)["y"]
    assert np.abs(got - expected).mean() < 0.05 * np.abs(expected).mean()
    return done


@pytest.fixture
def model(net, normal):
    weights = {"w1": normal(4, 3, 3, 3, seed=1), "b1": normal(4, seed=2), "w2": normal(6, 4, 3, 3, seed=3, scale=0.3)}
    return plugged(net(TEXT, **weights, b2=normal(6, seed=4), w3=normal(5, 6, 1, 1, seed=5)))


@pytest.fixture
def inputs(model, normal):
    found = OnnxRunner(expose(model, "ac"))(normal(1, 3, 8, 8))
    return {name: ChannelRange(tuple(np.abs(found[name]).max(axis=(0, 2, 3)).astype(float)), 0.0) for name in "ac"}


def nodes(model: onnx.ModelProto, op: str = "TRT_SiLU") -> list[Any]:
    return [node for node in to_graph(model).nodes if node.op == op]


def integer_readers(model: onnx.ModelProto) -> set[str]:
    """The operators that read an INT8 tensor."""
    graph = to_graph(model)
    integers = [node.outputs[0] for node in graph.nodes if node.op == "QuantizeLinear"]
    integers += [node.outputs[0] for node in graph.nodes if node.attrs.get("output_type") == 2]
    return {reader.op for tensor in integers for reader in tensor.outputs}


def convolved(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | float) -> np.ndarray:
    """A convolution with stride 1 over an input that is padded already, float64."""
    high, wide = (x.shape[axis] - weight.shape[axis] + 1 for axis in (2, 3))
    y = np.zeros((len(x), len(weight), high, wide))
    for i, j in np.ndindex(*weight.shape[2:]):
        y += np.einsum("bchw,oc->bohw", x[:, :, i : i + high, j : j + wide], weight[:, :, i, j].astype(np.float64))
    return y + np.asarray(bias).reshape(1, -1, 1, 1)


def rounded(x: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(x), -128, 127)


def quantized(weight: np.ndarray) -> np.ndarray:
    scales = weight_scales(weight)
    shape = (-1, *[1] * (weight.ndim - 1))
    return nearest(weight.reshape(len(weight), -1), scales).reshape(weight.shape) * scales.reshape(shape)


def agree(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal but for a rounding that the last bit of a float32 sum turned."""
    scale = np.abs(expected).max()
    assert np.median(np.abs(got - expected)) < 1e-5 * scale
    assert np.abs(got - expected).max() < 0.05 * scale


def test_the_numbers_are_those_of_int8_step_by_step(model, inputs, measured, normal):
    x = normal(1, 3, 8, 8)
    placement, ranges = measured(model, x)
    done = requantize(insert_qdq(model, placement, ranges), inputs)
    assert (done.read, done.written, done.skipped) == (2, 2, ())
    assert lint(done.model) == ()
    found = constants(model)

    steps = {name: half_step(entry.scale) for name, entry in ranges.tensors.items()}
    value = rounded(x / steps["x"]) * steps["x"]
    for source, made, weight, bias in (("a", "p", "w1", "b1"), ("c", "q", "w2", "b2")):
        padded = np.pad(value, ((0, 0), (0, 0), (1, 1), (1, 1)))
        step = (np.array(inputs[source].amax) / 127).reshape(1, -1, 1, 1)
        read = rounded(convolved(padded, quantized(found[weight]), found[bias]) / step) * step
        value = rounded(read / (1 + np.exp(-read)) / steps[made]) * steps[made]
    agree(OnnxRunner(done.model)(x)["y"], convolved(value, quantized(found["w3"]), 0.0))


def test_the_steps_are_those_of_the_ranges(model, inputs, measured, normal):
    placement, ranges = measured(model, normal(1, 3, 8, 8))
    done = requantize(insert_qdq(model, placement, ranges), inputs).model
    for node, source, made in zip(nodes(done), "ac", "pq", strict=True):
        amax = np.array(inputs[source].amax)
        assert node.attrs["output_type"] == 2
        np.testing.assert_allclose(node.attrs["input_scale"], amax / 127, rtol=1e-6)
        np.testing.assert_allclose(node.attrs["factor"], [1 / half_step(ranges.tensors[made].scale)], rtol=1e-6)
        np.testing.assert_allclose(node.attrs["offset"], [0.0])
        quantizer, (dequantizer,) = node.inputs[0].inputs[0], node.outputs[0].outputs
        assert (quantizer.op, dequantizer.op) == ("QuantizeLinear", "DequantizeLinear")
        assert quantizer.inputs[0].inputs[0].op == "Conv"
        np.testing.assert_allclose(quantizer.inputs[1].values, amax.max() / 127, rtol=1e-6)
        np.testing.assert_allclose(dequantizer.inputs[1].values, half_step(ranges.tensors[made].scale), rtol=1e-6)


def test_the_convolution_before_keeps_its_integers(model, inputs, measured, normal):
    before = insert_qdq(model, *measured(model, normal(1, 3, 8, 8)))
    after = requantize(before, inputs).model
    for name, source in (("Conv_0", "a"), ("Conv_2", "c")):
        pairs = []
        for one in (before, after):
            conv = next(node for node in to_graph(one).nodes if node.name == name)
            quantizer = conv.inputs[1].inputs[0].inputs[0].inputs[0]
            scales = quantizer.inputs[1].values
            integers = np.rint(quantizer.inputs[0].values / scales.reshape(-1, 1, 1, 1))
            pairs.append((integers, scales, conv.inputs[2].values))
        (integers, scales, bias), (moved, steps, offset) = pairs
        np.testing.assert_array_equal(moved, integers)
        share = np.array(inputs[source].amax) / max(inputs[source].amax)
        np.testing.assert_allclose(steps, scales / share, rtol=1e-6)
        np.testing.assert_allclose(offset, bias / share, rtol=1e-6)


def test_a_channel_map_goes_into_the_activation_before_it(model, inputs, measured, undone, normal):
    x = normal(1, 3, 8, 8)
    placement, ranges = measured(model, x)
    maps = {"p": ChannelMap(2.0, np.array([0.5, 1.0, 1.5, 2.0])), "q": ChannelMap(1.5)}
    found = constants(model)
    changed = {"Conv_2": undone(found["w2"], maps["p"].scale, found["b2"]), "Conv_4": undone(found["w3"], np.ones(6))}
    explicit = insert_qdq(model, placement, ranges, Corrections(maps, changed))
    kept, taken = requantize(explicit, {}), requantize(explicit, inputs)
    assert (kept.read, kept.written, taken.read, taken.written) == (0, 2, 2, 2)
    # With float inputs nothing but the order of two float32 operations is another one.
    agree(OnnxRunner(kept.model)(x)["y"], OnnxRunner(explicit)(x)["y"])
    first, second = nodes(taken.model)
    np.testing.assert_allclose(first.attrs["factor"], maps["p"].scale / maps["p"].step, rtol=1e-6)
    np.testing.assert_allclose(second.attrs["factor"], [1 / maps["q"].step], rtol=1e-6)
    assert integer_readers(taken.model) <= {"DequantizeLinear", "TRT_SiLU"}
    assert lint(taken.model) == ()
    got, expected = OnnxRunner(taken.model)(x)["y"], OnnxRunner(explicit)(x)["y"]
    assert 0 < np.abs(got - expected).mean() < 0.05 * np.abs(expected).mean()


@pytest.mark.parametrize(
    ("text", "outputs", "reason"),
    [
        ("p = Neg(a) c = Conv(p, w2) y = Sub(c, p)", 1, "it writes float: Sub 'Sub_3' reads it as it is"),
        ("p = Neg(a) y = Conv(p, w2)", 2, "it writes float: its output is an output of the model"),
        ("d = Pad(a, one, one_f) p = Neg(d) y = Conv(p, w4)", 1, "it reads float: its input comes from Pad, not Conv"),
        ("r = Relu(a) p = Neg(r) y = Conv(p, w2)", 1, "it reads float: its input comes from Relu, not Conv"),
        ("p = Neg(a) c = Conv(p, w2) y = Sub(c, a)", 1, "it reads float: 'a' is read elsewhere as well"),
        ("p = Neg(a) m = MaxPool<kernel_shape = [1,1]>(p) y = Conv(m, w2)", 1, "it writes float: MaxPool"),
    ],
)
def test_a_side_that_others_need_in_float_stays_so_and_says_why(net, normal, measured, text, outputs, reason):
    listed = ", ".join(f"float[1,4,8,8] {name}" for name in ("y", "p")[:outputs])
    model = net(
        f"(float[1,3,8,8] x) => ({listed}) {{ a = Conv(x, w1) {text} }}",
        w1=normal(4, 3, 1, 1),
        w2=normal(4, 4, 1, 1),
        w4=normal(4, 4, 3, 3),
        one=np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        one_f=F(1),
    )
    done = requantized_alike(model, normal(1, 3, 8, 8), measured)
    assert any(reason in one for one in done.skipped), done.skipped


@pytest.mark.parametrize("value", ["", ", nothing"])
def test_zeros_around_feature_maps_are_padded_in_int8_also_where_none_says_that_they_are_zeros(
    net, normal, measured, value
):
    model = net(
        f"""(float[1,3,8,8] x) => (float[1,4,8,8] y) {{
            a = Conv(x, w1) d = Pad(a, one{value}) p = Neg(d) y = Conv(p, w4) }}""",
        w1=normal(4, 3, 1, 1),
        w4=normal(4, 4, 3, 3),
        one=np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        nothing=F(0),
    )
    done = requantized_alike(model, normal(1, 3, 8, 8), measured)
    assert done.read == 1, done.skipped


@pytest.mark.parametrize("mapped", [False, True])
def test_a_join_of_channels_joins_int8(net, normal, measured, undone, mapped):
    text = """(float[1,3,8,8] x) => (float[1,4,8,8] y) {
        a = Conv(x, w1) p = Neg(a) b = Conv(x, w2) q = Relu(b) j = Concat<axis = 1>(p, q, x) y = Conv(j, w3) }"""
    weights = {"w1": normal(4, 3, 1, 1), "w2": normal(2, 3, 1, 1, seed=1), "w3": normal(4, 9, 1, 1, seed=2)}
    model = plugged(net(text, **weights))
    x = normal(1, 3, 8, 8)
    placement, ranges = measured(model, x)
    maps, changed = {}, {}
    if mapped:
        maps["j"] = ChannelMap(3.0, np.linspace(0.5, 1.5, 9))
        changed["Conv_5"] = undone(weights["w3"], maps["j"].scale)
    explicit = insert_qdq(model, placement, ranges, Corrections(maps, changed))
    done = requantize(explicit, {"a": ChannelRange((3.0, 4.0, 5.0, 6.0), 0.0)})
    assert (done.read, done.written, done.skipped) == (1, 1, ())
    (concat,) = nodes(done.model, "Concat")
    quantizers = [tensor.inputs[0].inputs[0].inputs[0].op for tensor in concat.inputs]
    assert [tensor.inputs[0].op for tensor in concat.inputs] == ["DequantizeLinear"] * 3
    assert quantizers == ["TRT_SiLU", "QuantizeLinear", "QuantizeLinear"]
    (after,) = concat.outputs[0].outputs
    assert after.op == "QuantizeLinear"
    assert all(tensor.inputs[0].inputs[1] is after.inputs[1] for tensor in concat.inputs)
    assert integer_readers(done.model) <= {"DequantizeLinear", "TRT_SiLU"}
    assert lint(done.model) == ()
    kept = requantize(explicit, {})
    agree(OnnxRunner(kept.model)(x)["y"], OnnxRunner(explicit)(x)["y"])


@pytest.mark.parametrize("axis", [2, -1])
def test_a_join_of_rows_or_columns_stays_in_float(net, normal, measured, axis):
    text = f"""(float[1,3,8,8] x) => (float[1,4,M,N] y) {{
        a = Conv(x, w1) p = Neg(a) b = Conv(x, w2) q = Relu(b) j = Concat<axis = {axis}>(p, q) y = Conv(j, w3) }}"""
    weights = {"w1": normal(4, 3, 1, 1), "w2": normal(4, 3, 1, 1, seed=1), "w3": normal(4, 4, 1, 1, seed=2)}
    model = plugged(net(text, **weights))
    explicit = insert_qdq(model, *measured(model, normal(1, 3, 8, 8)))
    done = requantize(explicit, {"a": ChannelRange((3.0, 4.0, 5.0, 6.0), 0.0)})
    (concat,) = nodes(done.model, "Concat")
    assert [tensor.inputs[0].op for tensor in concat.inputs] == ["TRT_SiLU", "Relu"]
    assert [reader.op for reader in concat.outputs[0].outputs] == ["QuantizeLinear"]


def test_noisy_and_unknown_ranges_leave_the_input_in_float(model, measured, normal):
    explicit = insert_qdq(model, *measured(model, normal(1, 3, 8, 8)))
    done = requantize(explicit, {"a": ChannelRange((1.0,) * 4, 0.002)})
    assert (done.read, done.written) == (0, 2)
    assert done.skipped == (
        "Neg_1: it reads float: INT8 would add noise of 0.20% of its variance, over 0.05%",
        "Neg_3: it reads float: the range of 'c' is not known",
    )


def test_fp16_convolutions_keep_float_around_them(model, inputs, measured, normal):
    x = normal(1, 3, 8, 8)
    placement, ranges = measured(model, x)
    entries = {**placement.plan.entries, "Conv_2": Entry("fp16", "kept")}
    explicit = insert_qdq(model, QdqPlacement.following(placement, PrecisionPlan(entries)), ranges)
    done = requantize(to_half(explicit, ("Conv_2",)), inputs)
    first, second = nodes(done.model)
    # Before the FP16 convolution: INT8 in, float out. After it: FP16 in, INT8 out.
    assert (first.inputs[0].dtype, first.attrs["output_type"]) == (np.int8, 0)
    assert (second.inputs[0].dtype, second.attrs["output_type"]) == (np.float16, 2)
    assert "Neg_3: it reads float: 'Conv_2' does not run in INT8" in done.skipped
    assert lint(done.model) == ()
    got, expected = OnnxRunner(done.model)(x)["y"], OnnxRunner(model)(x)["y"]
    assert np.abs(got - expected).mean() < 0.05 * np.abs(expected).mean()


def test_a_model_without_plugins_is_given_back_as_it_is(net, normal):
    model = net("(float[1,3,8,8] x) => (float[1,4,8,8] y) { y = Conv(x, w) }", w=normal(4, 3, 1, 1))
    assert requantize(model, {}).model is model


@pytest.mark.parametrize(("op", "floor"), [("TRT_SiLU", 8.0), ("TRT_HardSwish", 3.0)])
def test_ranges_reach_over_what_was_seen_but_not_where_the_activation_is_0(net, tmp_path, op, floor):
    for index in range(4):
        cv2.imwrite(str(tmp_path / f"{index}.png"), np.full((8, 8, 3), 60 * index + 10, np.uint8))
    weight = np.array([0.1, -1.0, 0.0], F).reshape(3, 1, 1, 1)
    model = plugged(
        net("(float[1,3,8,8] x) => (float[1,3,8,8] y) { a = Conv<group = 3>(x, w) y = Neg(a) }", w=weight), op
    )
    config = InputConfig.model_validate({"size": [8, 8], "resize": "stretch"})
    told: list[int] = []
    progress: Callable[[str, int, int], None] = lambda stage, done, total: told.append(done)  # noqa: E731
    paths = sorted(tmp_path.glob("*.png"))
    sources = Sources(paths, config, OnnxRunner, Decoded("y", "y"), progress)
    found = reach(model, sources)["a"]
    assert told == [1, 2, 3, 4]
    # Pixels of 10..190: the first channel reaches over 19, the second is far below 0, the third always 0.
    assert 19 < found.amax[0] < 60
    assert found.amax[1] == floor
    assert 0 < found.amax[2] < 0.01
    assert 0 < found.noise < 0.01
    assert reach(net("(float[1,3,8,8] x) => (float[1,3,8,8] y) { y = Relu(x) }"), sources) == {}


def test_lint_names_what_reads_integers_and_steps_that_cannot_be(model, inputs, measured, normal):
    graph = to_graph(requantize(insert_qdq(model, *measured(model, normal(1, 3, 8, 8))), inputs).model)
    first, second = (node for node in graph.nodes if node.op == "TRT_SiLU")
    quantizer = first.inputs[0].inputs[0]
    copied = quantizer.outputs[0].copy()
    copied.name = "copied"
    graph.nodes.append(first.__class__("Identity", "copy", inputs=[quantizer.outputs[0]], outputs=[copied]))
    first.inputs = [copied]
    first.attrs["input_scale"] = [0.0, 1.0, 1.0, 1.0]
    second.attrs["factor"] = [float("inf")]
    made = graph.nodes[-1].outputs[0].copy()
    made.name = "moved"
    graph.nodes.append(first.__class__("Identity", "stranger", inputs=[first.outputs[0]], outputs=[made]))
    graph.outputs.append(made)
    made.dtype = np.int8
    allowed = "only TRT_SiLU, TRT_HardSwish, DequantizeLinear may"
    assert sorted(str(problem) for problem in lint(to_model(graph))) == sorted(
        [
            f"{quantizer.name}: Identity 'copy' reads its INT8 output: {allowed}",
            f"{first.name}: Identity 'stranger' reads its INT8 output: only DequantizeLinear may",
            f"{first.name}: its input_scale must be over 0 and finite in every channel",
            f"{second.name}: its factor and offset must be finite in every channel",
        ]
    )
