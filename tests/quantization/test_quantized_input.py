"""Models that other tools quantised: their integers and scales are kept, or an error says why not."""

from typing import Any

import nets
import numpy as np
import onnx
import pytest
from graphs import inferred
from quantized import run

from trtdet.calibration import Range, Ranges
from trtdet.errors import ModelError
from trtdet.passes import Options, batchnorm
from trtdet.passes.clean import fold
from trtdet.passes.model import to_graph, to_model
from trtdet.quantization import insert_qdq, take_apart

GOOD = """(float[1,16,8,8] x) => (float[1,16,8,8] y) {
    xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z)
    wd = DequantizeLinear<axis = 0>(wq, ws, wz) bd = DequantizeLinear<axis = 0>(bq, bs)
    y = Conv(xd, wd, bd) }"""

INTEGERS = np.random.default_rng(1).integers(-127, 128, (16, 16, 1, 1)).astype(np.int8)
SCALES = np.random.default_rng(2).uniform(0.001, 0.01, 16).astype(np.float32)


def built(text: str = GOOD, opset: int = 13, **changes: Any) -> onnx.ModelProto:
    weights = {
        "s": np.float32(0.1),
        "z": np.int8(0),
        "wq": INTEGERS,
        "ws": SCALES,
        "wz": np.zeros(16, np.int8),
        "bq": np.arange(16, dtype=np.int32),
        "bs": SCALES * np.float32(0.1),
        **changes,
    }
    used = {name for name in weights if f"{name})" in text or f"{name}," in text}
    return inferred(text, opset=opset, **{name: weights[name] for name in used})


def test_the_float_form_computes_the_same_but_for_the_rounding_of_activations():
    model = built()
    apart = take_apart(model)
    assert [node.op_type for node in apart.model.graph.node] == ["Conv"]
    image = (np.random.default_rng(3).integers(-127, 128, (1, 16, 8, 8)) * np.float32(0.1)).astype(np.float32)
    np.testing.assert_allclose(run(apart.model, image)["y"], run(model, image)["y"], atol=1e-4)
    placement, own = apart.placed(apart.model)
    assert placement.readers == {"x": (("Conv_4", 0),)}
    assert own.steps == {("Conv_4", 0): np.float32(0.1)}
    weights = own.weights["Conv_4"]
    assert np.array_equal(weights.integers, INTEGERS)
    assert np.array_equal(weights.scales, SCALES)
    np.testing.assert_allclose(weights.bias, np.arange(16) * SCALES * 0.1, rtol=1e-6)


def test_a_product_keeps_its_integers_behind_a_transpose():
    text = """(float[1,9,16] x) => (float[1,9,16] y) {
        xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z)
        wd = DequantizeLinear<axis = 0>(wq, ws, wz) wt = Transpose<perm = [1, 0]>(wd) y = MatMul(xd, wt) }"""
    apart = take_apart(built(text, wq=INTEGERS[:, :, 0, 0]))
    graph = to_graph(apart.model)
    fold(graph)
    _, own = apart.placed(to_model(graph.cleanup()))
    (weights,) = own.weights.values()
    assert np.array_equal(weights.integers, INTEGERS[:, :, 0, 0])
    assert np.array_equal(weights.scales, SCALES)


def test_a_product_of_several_matrices_is_left_in_float_and_those_behind_it_keep_their_integers():
    text = """(float[1,9,16] x) => (float[1,9,16] y) {
        xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z) vd = DequantizeLinear(vq, s, z)
        a = MatMul(xd, vd) aq = QuantizeLinear(a, s, z) ad = DequantizeLinear(aq, s, z)
        wd = DequantizeLinear<axis = 1>(wq, ws, wz) y = MatMul(ad, wd) }"""
    matrix = INTEGERS[:, :, 0, 0]
    apart = take_apart(built(text, vq=matrix[None], wq=matrix))
    _, own = apart.placed(apart.model)
    (name,) = own.weights
    assert apart.model.graph.node[-1].name == name
    assert np.array_equal(own.weights[name].integers, matrix.T)


def test_a_batch_normalisation_is_folded_into_the_scales_and_keeps_the_integers():
    text = """(float[1,3,8,8] x) => (float[1,16,8,8] y) {
        xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z) wd = DequantizeLinear<axis = 0>(wq, ws, wz)
        c = Conv(xd, wd) y = BatchNormalization(c, gamma, beta, mean, var) }"""
    gamma = np.linspace(-2, 2, 16).astype(np.float32)
    weights = {name: nets.normal(16) for name in ("beta", "mean")} | {"var": np.full(16, 0.5, np.float32)}
    apart = take_apart(built(text, wq=INTEGERS[:, :3], gamma=gamma, **weights))
    graph = to_graph(apart.model)
    assert batchnorm.apply(graph, Options(nets.configuration())).count == 1
    _, own = apart.placed(to_model(graph))
    (weights,) = own.weights.values()
    signs = np.sign(gamma).astype(np.int8).reshape(-1, 1, 1, 1)
    assert np.array_equal(weights.integers, INTEGERS[:, :3] * signs)
    np.testing.assert_allclose(weights.scales, SCALES * np.abs(gamma) / np.sqrt(0.5 + 1e-5), rtol=1e-5)


def test_fp16_between_pairs_and_the_clip_of_brevitas_are_taken():
    text = """(float[1,16,8,8] x) => (float[1,16,8,8] y) {
        h = Cast<to = 10>(x) xq = QuantizeLinear(h, s, z) xc = Clip(xq, low, high) xd = DequantizeLinear(xc, s, z)
        wc = Clip(wq, low, high) wd = DequantizeLinear<axis = 0>(wc, ws, wz) c = Conv(xd, wd) y = Cast<to = 1>(c) }"""
    half = {"s": np.float16(0.1), "ws": SCALES.astype(np.float16), "low": np.int8(-127), "high": np.int8(127)}
    apart = take_apart(built(text, opset=19, **half))
    assert [node.op_type for node in apart.model.graph.node] == ["Conv"]
    _, own = apart.placed(apart.model)
    ((place, step),) = own.steps.items()
    assert (place, step) == (("Conv_6", 0), np.float16(0.1))
    assert np.array_equal(own.weights["Conv_6"].integers, INTEGERS)
    assert np.array_equal(own.weights["Conv_6"].scales, SCALES.astype(np.float16))
    with pytest.raises(ModelError, match="Clip 'Clip_2' keeps fewer than 8 bits"):
        take_apart(built(text, opset=19, **half | {"low": np.int8(-8)}))


def test_layers_that_the_passes_changed_are_left_in_float_and_said():
    text = GOOD.replace(
        "y = Conv(xd, wd, bd)",
        "a = Conv(xd, wd, bd) aq = QuantizeLinear(a, s, z) ad = DequantizeLinear(aq, s, z) y = Conv(ad, wd)",
    )
    apart = take_apart(built(text))
    changed = onnx.ModelProto()
    changed.CopyFrom(apart.model)
    name = changed.graph.node[1].input[1]
    changed.graph.initializer.append(onnx.numpy_helper.from_array(nets.normal(16, 16, 1, 1), "other"))
    changed.graph.node[1].input[1] = "other"
    assert name != "other"
    placement, own = apart.placed(changed)
    assert placement.plan.counts() == {"int8": 1, "fp16": 1, "fp32": 0}
    assert "changed while the graph was rewritten" in own.problems[-1].text


@pytest.mark.parametrize("skip", ["x", "xd", "xe"])
def test_every_reader_gets_the_scale_that_it_has_and_a_float_skip_stays_float(skip):
    text = """(float[1,16,8,8] x) => (float[1,16,8,8] y) {
        xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z)
        xf = QuantizeLinear(x, t, z) xe = DequantizeLinear(xf, t, z)
        wd = DequantizeLinear<axis = 0>(wq, ws, wz) c = Conv(xd, wd) y = Add(c, SKIP) }"""
    apart = take_apart(built(text.replace("SKIP", skip), t=np.float32(0.3)))
    placement, own = apart.placed(apart.model)
    ranges = Ranges("minmax", None, {"x": Range(1.0, -1.0, 1.0)}, key="", images=0, images_sha256="")
    model = insert_qdq(apart.model, placement, ranges, own.corrections(half=False))
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    makers = {node.output[0]: node for node in model.graph.node}
    conv, add = (next(node for node in model.graph.node if node.op_type == op) for op in ("Conv", "Add"))
    assert values[makers[conv.input[0]].input[1]] == np.float32(0.1)
    if skip == "x":
        assert add.input[1] == "x"
    else:
        assert values[makers[add.input[1]].input[1]] == {"xd": np.float32(0.1), "xe": np.float32(0.3)}[skip]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"z": np.zeros(3, np.int8)}, "has 3 zero points for 1 scales"),
        ({"s": np.full(16, 0.1, np.float32), "z": np.zeros(16, np.int8)}, "has 16 scales of an activation"),
        ({"s": np.float32(0)}, "has a scale that is not over 0"),
        ({"text": GOOD.replace("(xq, s, z)", "(xq, s2, z)"), "s2": np.float32(0.2)}, "has another scale than"),
        ({"text": GOOD.replace("<axis = 0>(wq", "<axis = 1>(wq")}, "scales the weights of Conv 'Conv_4' on axis 1"),
        (
            {"text": GOOD.replace("wd, bd)", "w, bd)"), "w": nets.normal(16, 16, 1, 1)},
            "no layer of the quantised model",
        ),
    ],
)
def test_pairs_that_no_int8_kernel_takes_are_refused(changes, words):
    with pytest.raises(ModelError, match=words):
        apart = take_apart(built(**changes))
        apart.placed(apart.model)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"z": np.int8(3)}, 131 / 127),
        ({"z": np.int8(-128)}, 255 / 127),
        ({"z": np.uint8(0)}, 255 / 127),
        ({"z": np.uint8(20)}, 235 / 127),
        ({"z": np.uint8(128)}, 1),
        ({"text": GOOD.replace("(x, s, z)", "(x, s)").replace("(xq, s, z)", "(xq, s)")}, 255 / 127),
    ],
)
def test_an_activation_that_is_not_symmetric_gets_the_symmetric_step_of_its_range(changes, steps):
    apart = take_apart(built(**changes))
    _, own = apart.placed(apart.model)
    assert own.steps == {("Conv_4", 0): pytest.approx(0.1 * steps, rel=1e-6)}
    assert [problem.kind for problem in apart.problems] == ["asymmetric"] * (steps != 1)
    if steps != 1:
        assert "calibration.rescale=true" in apart.problems[0].text
        assert f"up to {steps:.2f} times" in apart.problems[0].text


@pytest.mark.parametrize(("zero", "kind"), [(128, np.uint8), (20, np.uint8), (1, np.int8), (0, np.uint8)])
def test_weights_that_are_not_symmetric_keep_their_values(zero, kind):
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    stored = np.random.default_rng(4).integers(low, high + 1, (16, 16, 1, 1)).astype(kind)
    model = built(wq=stored, wz=np.full(16, zero, kind))
    apart = take_apart(model)
    _, own = apart.placed(apart.model)
    weights = own.weights["Conv_4"]
    exact = (stored.astype(np.float64) - zero) * SCALES.astype(np.float64).reshape(-1, 1, 1, 1)
    distance = weights.integers * weights.scales.astype(np.float64).reshape(-1, 1, 1, 1) - exact
    fits = np.abs(stored.astype(int) - zero).max() <= 128
    assert np.all(np.abs(distance) <= (1e-6 if fits else 0.5 * weights.scales.reshape(-1, 1, 1, 1) * 1.001))
    assert [problem.kind for problem in apart.problems] == ["asymmetric"] * (not fits)
    if fits:
        assert np.array_equal(weights.scales, SCALES)


def test_floats_before_a_pair_with_a_zero_point_keep_their_values():
    text = GOOD.replace("wd = Deq", "wi = QuantizeLinear<axis = 0>(w, ws, wz) wd = Deq").replace("(wq,", "(wi,")
    exact = nets.normal(16, 16, 1, 1, scale=0.2)
    low, high = exact.min(axis=(1, 2, 3)), exact.max(axis=(1, 2, 3))
    scales = ((high - low) / 255).astype(np.float32)
    zeros = np.rint(-low / scales).astype(np.uint8)
    apart = take_apart(built(text, w=exact, ws=scales, wz=zeros))
    _, own = apart.placed(apart.model)
    weights = own.weights["Conv_5"]
    spread = weights.scales.reshape(-1, 1, 1, 1)
    rounded_twice = 0.5 * scales.reshape(-1, 1, 1, 1) + 0.5 * spread
    assert np.all(np.abs(weights.integers * spread - exact) <= 1.01 * rounded_twice)


def test_fp8_is_refused():
    model = built(opset=19)
    for tensor in model.graph.initializer:
        if tensor.name == "z":
            tensor.data_type, tensor.raw_data = onnx.TensorProto.FLOAT8E4M3FN, b"\0"
    with pytest.raises(ModelError, match="'QuantizeLinear_0' is of type float8e4m3fn"):
        take_apart(model)
