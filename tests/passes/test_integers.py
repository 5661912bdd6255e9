"""Operators on integers from onnxruntime's quantiser become float layers with Q/DQ pairs."""

import nets
import numpy as np
import onnx
import pytest
from models import small_detector
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic
from quantized import by_onnxruntime, noise, run

from trtdet.errors import ModelError, TrtdetWarning
from trtdet.passes import has_pairs, load_model
from trtdet.passes.integers import without_integers

DYNAMIC_CONV = """(float[1,4,8,8] x) => (float[1,8,8,8] y) {
    q, s, z = DynamicQuantizeLinear(x)
    i = ConvInteger<pads = [1, 1, 1, 1]>(q, w, z, wz)
    f = Cast<to = 1>(i) ss = Mul(s, ws) m = Mul(f, ss) r = Reshape(b, shape) y = Add(m, r) }"""
WEIGHTS = np.random.default_rng(1).integers(0, 256, (8, 4, 3, 3)).astype(np.uint8)


def dynamic(text=DYNAMIC_CONV, **changes):
    values = {
        "w": WEIGHTS,
        "wz": np.uint8(120),
        "ws": np.float32(0.01),
        "b": nets.normal(8),
        "shape": np.array([1, -1, 1, 1]),
        **changes,
    }
    return nets.net(text, **{name: value for name, value in values.items() if f"{name})" in text or f"{name}," in text})


def test_a_convolution_with_a_scale_for_each_image_becomes_a_float_one_with_its_weights_and_bias():
    model = dynamic()
    with pytest.warns(TrtdetWarning, match=r"scales that are computed from each image \(1 layers\)"):
        taken = without_integers(model)
    assert [node.op_type for node in taken.graph.node] == ["Conv"]
    weight, bias = (
        onnx.numpy_helper.to_array(next(one for one in taken.graph.initializer if one.name == name))
        for name in taken.graph.node[0].input[1:]
    )
    np.testing.assert_array_equal(weight, (WEIGHTS.astype(np.float32) - 120) * np.float32(0.01))
    assert bias.shape == (8,)
    image = nets.normal(1, 4, 8, 8)
    own, expected = run(taken, image)["y"], run(model, image)["y"]
    assert np.abs(own - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("channels", [False, True])
def test_dynamic_quantisation_of_a_detector_is_read_as_float(tmp_path, channels):
    onnx.save(small_detector(), tmp_path / "float.onnx")
    quantize_dynamic(
        tmp_path / "float.onnx", tmp_path / "dynamic.onnx", weight_type=QuantType.QUInt8, per_channel=channels
    )
    assert not has_pairs(tmp_path / "dynamic.onnx")
    with pytest.warns(TrtdetWarning, match="computed from each image"):
        taken = load_model(tmp_path / "dynamic.onnx")
    operators = {node.op_type for node in taken.graph.node}
    assert "Conv" in operators and not operators & {"ConvInteger", "DynamicQuantizeLinear", "Cast"}
    image = noise(1)[0]
    (name,) = (output.name for output in taken.graph.output)
    own, expected, exact = (
        run(model, image)[name] for model in (taken, onnx.load(tmp_path / "dynamic.onnx"), small_detector())
    )
    assert np.abs(own - exact).mean() <= np.abs(expected - exact).mean()  # without the rounding of activations


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": DYNAMIC_CONV.replace("ss = Mul(s, ws)", "ss = Add(s, ws)")}, "the scale of .* is used in a way"),
        ({"text": DYNAMIC_CONV.replace("Mul(f, ss)", "Div(f, ss)")}, "is not between DynamicQuantizeLinear"),
    ],
)
def test_what_is_not_known_is_named(changes, words):
    with pytest.raises(ModelError, match=words):
        without_integers(dynamic(**changes))


@pytest.mark.parametrize("activations", [QuantType.QUInt8, QuantType.QInt8])
@pytest.mark.parametrize("channels", [False, True])
def test_operators_with_constant_scales_become_pairs_that_compute_the_same(tmp_path, activations, channels):
    quantised = by_onnxruntime(
        small_detector(width=16),
        tmp_path,
        quant_format=QuantFormat.QOperator,
        activation_type=activations,
        weight_type=activations,
        per_channel=channels,
        # Weights of 7 bits: on CPUs without VNNI onnxruntime saturates sums of two products of uint8 and int8.
        reduce_range=True,
        extra_options={},
    )
    written = {node.op_type for node in quantised.graph.node}
    assert "QLinearConv" in written
    path = tmp_path / "quantized.onnx"
    assert has_pairs(path)
    with pytest.raises(ModelError, match="is quantised already: .* give the float model"):
        load_model(path)
    taken = load_model(path, allow_quantized=True)
    operators = {node.op_type for node in taken.graph.node}
    assert {"Conv", "QuantizeLinear", "DequantizeLinear"} <= operators
    assert not any(operator.startswith("QLinear") or operator == "QGemm" for operator in operators)
    image = noise(9)[-1]
    (name,) = (output.name for output in taken.graph.output)
    own, expected = run(taken, image)[name], run(quantised, image)[name]
    # Kernels round halves differently, which moves a value by a step now and then.
    assert np.abs(own - expected).mean() < 0.02 * np.abs(expected).mean()


def test_integers_that_operators_move_are_moved_as_floats():
    text = """(float[1,4,8,8] x) => (float[1,8,2,2] y) {
        q = QuantizeLinear(x, s, z) p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(q)
        c = Concat<axis = 1>(p, p) i = QLinearConv<strides = [2, 2]>(c, s, z, w, ws, wz, t, z, b)
        y = DequantizeLinear(i, t, z) }"""
    model = nets.net(
        text,
        s=np.float32(0.05),
        z=np.uint8(128),
        # Within 7 bits, see above.
        w=np.random.default_rng(1).integers(-64, 65, (8, 8, 1, 1)).astype(np.int8),
        ws=np.random.default_rng(2).uniform(0.002, 0.02, 8).astype(np.float32),
        wz=np.zeros(8, np.int8),
        t=np.float32(0.1),
        b=np.arange(-400, 400, 100, dtype=np.int32),
    )
    taken = without_integers(model)
    image = nets.normal(1, 4, 8, 8)
    own, expected = run(taken, image)["y"], run(model, image)["y"]
    assert np.abs(own - expected).max() <= 0.1 + 1e-6
    assert np.abs(own - expected).mean() < 0.005


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("n = Add(q, q) y = DequantizeLinear(n, s, z)", "Add '.*' computes with integers"),
        ("r = QuantizeLinear(x, t, z) n = Concat<axis = 1>(q, r) y = DequantizeLinear(n, s, z)", "several scales"),
    ],
)
def test_other_arithmetic_on_integers_is_refused(line, words):
    text = f"""(float[1,4,8,8] x) => (float[1,N,8,8] y, uint8[1,4,8,8] o) {{
        q = QuantizeLinear(x, s, z) o = QLinearConv(q, s, z, w, s, z, s, z) {line} }}"""
    model = nets.net(
        text,
        s=np.float32(0.05),
        t=np.float32(0.06),
        z=np.uint8(128),
        w=np.full((4, 4, 1, 1), 130, np.uint8),
    )
    with pytest.raises(ModelError, match=words):
        without_integers(model)
