"""FP16 on the CPU equals NumPy's rounding to float16, bit for bit.

Sums are of so few bits that float32 holds them in any order, but FP16 does not.
"""

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
import small_models
from numpy.typing import NDArray

from trtdet.backends import OnnxRunner
from trtdet.backends.onnxruntime import _runnable
from trtdet.backends.onnxruntime_half import with_roundings
from trtdet.calibration import expose
from trtdet.errors import BackendError
from trtdet.passes import provenance
from trtdet.passes.plugin_ops import attributes
from trtdet.passes.provenance import Origin

FLOAT, HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
SCALE = np.float16(257 / 4096)
"""Its products with integers have up to 16 bits."""


def net(text: str, opset: int = 19, **weights: NDArray[Any]) -> onnx.ModelProto:
    """A model from ``float[1,4,8,8] x`` to ``y``, shapes inferred."""
    model = small_models.net(f"(float[1,4,8,8] x) => {text}", opset, **weights)
    model.opset_import.append(onnx.helper.make_opsetid("trt.plugins", 1))
    return onnx.shape_inference.infer_shapes(model)


def pixels(seed: int = 0) -> NDArray[np.float32]:
    """Eighths from -16 to 16: FP16 holds them."""
    return (np.random.default_rng(seed).integers(-128, 129, (1, 4, 8, 8)) / 8).astype(np.float32)


def weight(seed: int, steps: int = 100, step: float = 1 / 64) -> NDArray[np.float16]:
    return (np.random.default_rng(seed).integers(-steps, steps, (4, 4, 1, 1)) * step).astype(np.float16)


def convolved(x: NDArray[Any], w: NDArray[Any]) -> NDArray[np.float64]:
    return np.einsum("nchw,oc->nohw", x.astype(np.float64), w[:, :, 0, 0].astype(np.float64))


def half(values: NDArray[Any]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def run(model: onnx.ModelProto, x: NDArray[np.float32] | None = None) -> dict[str, NDArray[Any]]:
    return OnnxRunner(model)(pixels() if x is None else x)


def equal(got: NDArray[Any], expected: NDArray[np.float16]) -> None:
    np.testing.assert_array_equal(got.astype(np.float64), expected.astype(np.float64))


def casts(model: onnx.ModelProto) -> Counter[int]:
    return Counter(node.attribute[0].i for node in with_roundings(model).graph.node if node.op_type == "Cast")


def test_convolution_scale_and_bias_round_one_by_one():
    factor, bias = half(np.linspace(0.3, 1.7, 4).reshape(1, 4, 1, 1)), half(np.linspace(-3, 5, 4).reshape(1, 4, 1, 1))
    model = net(
        "(float[1,4,8,8] y) { h = Cast<to = 10>(x) a = Conv(h, w) b = Mul(a, f) c = Add(b, g) y = Cast<to = 1>(c) }",
        w=weight(1),
        f=factor,
        g=bias,
    )
    exact = convolved(pixels(), weight(1))
    expected = half(exact) * factor + bias
    assert expected.dtype == np.float16
    once = half(exact * factor.astype(np.float64) + bias)
    assert (once != expected).mean() > 0.1
    equal(run(model)["y"], expected)


def test_a_silu_rounds_the_sigmoid_and_the_product():
    model = net(
        """(float16[1,4,8,8] s, float16[1,4,8,8] y) {
        h = Cast<to = 10>(x) a = Conv(h, w) s = Sigmoid(a) y = Mul(a, s) }""",
        w=weight(1),
    )
    got, a = run(model), half(convolved(pixels(), weight(1)))
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-a.astype(np.float64)))
    # Close to the middle of two values, float32's error decides.
    sure = half(sigmoid * (1 - 1e-5)) == half(sigmoid * (1 + 1e-5))
    sure &= a > -8  # below, onnxruntime's approximation has few digits
    assert sure.mean() > 0.5
    assert got["s"].dtype == got["y"].dtype == np.float16
    equal(got["s"][sure], half(sigmoid)[sure])
    equal(got["y"], a * got["s"])


@pytest.mark.parametrize(
    "node",
    [
        "y = AveragePool<kernel_shape = [3,3]>(h)",
        "y = GlobalAveragePool(h)",
        'y = Resize<mode = "linear">(h, none, scales)',
        "y = Softmax<axis = 1>(h)",
        "y = HardSigmoid<alpha = 0.3, beta = 0.4>(h)",
        "y = Sub(h, c)",
        "y = Div(h, c)",
        "y = Tanh(h)",
        "y = LeakyRelu<alpha = 0.3>(h)",
    ],
)
def test_any_other_node_rounds_what_it_gives_in_float32(node):
    constants = {"none": np.zeros(0, np.float32), "scales": np.array([1, 1, 1.5, 1.5], np.float32)}
    number = half(np.array(3.3))
    plain = net(f"(y) {{ h = Identity(x) {node} }}", c=number.astype(np.float32), **constants)
    model = net(f"(y) {{ h = Cast<to = 10>(x) {node} }}", c=number, **constants)
    x = half(pixels() / 3).astype(np.float32)
    expected = run(plain, x)["y"]
    assert (expected != half(expected)).any()
    equal(run(model, x)["y"], half(expected))


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Concat<axis = 1>(a, h)",
        "y = MaxPool<kernel_shape = [3,3]>(a)",
        'y = Resize<mode = "nearest">(a, none, scales)',
        "y = Relu(a)",
        "y = Clip(a, low)",
        "y = Slice(a, from, to, axes)",
        "b, y = Split<axis = 1, num_outputs = 2>(a)",
        "y = Transpose<perm = [0,2,3,1]>(a)",
        "b = Neg(a) y = Max(b, h)",
    ],
)
def test_moves_and_comparisons_need_no_rounding(nodes):
    others = {
        "none": np.zeros(0, np.float32),
        "scales": np.array([1, 1, 2, 2], np.float32),
        "from": np.array([1]),
        "to": np.array([3]),
        "axes": np.array([1]),
    }
    text = f"(y) {{{{ h = {{}}(x) a = Conv(h, w) {nodes} }}}}"
    low = half(np.array(-0.5))
    model = net(text.format("Cast<to = 10>"), w=weight(1), low=low, **others)
    # Whole weights: FP16 holds the sums, so that the float32 model gives the values.
    whole = weight(2, steps=4, step=1.0)
    plain = net(text.format("Identity"), w=whole.astype(np.float32), low=low.astype(np.float32), **others)
    equal(run(net(text.format("Cast<to = 10>"), w=whole, low=low, **others))["y"], half(run(plain)["y"]))
    # The input and the convolution are rounded; the output is FP16.
    assert casts(model) == {HALF: 3, FLOAT: 2}


QUANTIZED = """h = Cast<to = 10>(x) q = QuantizeLinear(h, s, zero) d = DequantizeLinear(q, s, zero)
    v = DequantizeLinear(k, t, zero)"""


def quantized(x: NDArray[np.float32]) -> tuple[NDArray[np.float64], dict[str, NDArray[Any]]]:
    """The exact values of ``d``, and the constants of QUANTIZED; the weights ``k`` are from -4 to 3."""
    steps = np.clip(np.rint(x / SCALE.astype(np.float32)), -128, 127)
    weights = np.random.default_rng(1).integers(-4, 4, (4, 4, 1, 1)).astype(np.int8)
    constants = {"s": SCALE, "t": np.float16(0.25), "zero": np.int8(0), "k": weights}
    return steps * SCALE.astype(np.float64), constants


def test_dequantized_values_are_exact_for_int8_kernels_and_rounded_for_sums():
    x = pixels() / 4
    exact, constants = quantized(x)
    model = net(f"(a, b, y) {{ {QUANTIZED} a = Conv(d, v) b = Add(d, d) y = Add(a, d) }}", **constants)
    expected = half(convolved(exact, constants["k"] * 0.25))
    assert (half(convolved(half(exact), constants["k"] * 0.25)) != expected).any()
    assert (half(exact + expected) != half(exact) + expected).any()
    got = run(model, x)
    equal(got["a"], expected)
    equal(got["b"], half(exact) + half(exact))
    equal(got["y"], expected + half(exact))


def test_moves_between_dequantization_and_an_int8_kernel_round_nothing():
    x = pixels() / 4
    exact, constants = quantized(x)
    model = net(f"(a, b) {{ {QUANTIZED} m = Neg(d) n = Relu(m) a = Conv(n, v) b = Sub(n, h) }}", **constants)
    moved = np.maximum(-exact, 0)
    got = run(model, x)
    equal(got["a"], half(convolved(moved, constants["k"] * 0.25)))
    equal(got["b"], half(moved) - half(x))


def test_quantized_weights_alone_make_no_int8_kernel():
    x = pixels()
    _, constants = quantized(x)
    constants["t"] = SCALE
    constants["k"] = np.random.default_rng(1).integers(-128, 128, (4, 4, 1, 1)).astype(np.int8)
    model = net("(y) { h = Cast<to = 10>(x) v = DequantizeLinear(k, t, zero) y = Conv(h, v) }", **constants)
    exact = constants["k"] * SCALE.astype(np.float64)
    expected = half(convolved(x, half(exact)))
    assert (half(convolved(x, exact)) != expected).any()
    equal(run(model, x)["y"], expected)


def test_quantization_divides_in_float32():
    scale = half(np.array(0.0937))
    values = half(np.arange(0, 8, 1 / 1024))
    expected = np.rint(values.astype(np.float32) / scale.astype(np.float32))
    differs = np.flatnonzero(np.rint(values / scale) != expected)
    chosen = np.resize(differs, (1, 4, 8, 8))
    model = net(
        "(y) { h = Cast<to = 10>(x) q = QuantizeLinear(h, s, zero) y = Cast<to = 1>(q) }", s=scale, zero=np.int8(0)
    )
    np.testing.assert_array_equal(run(model, values[chosen].astype(np.float32))["y"], expected[chosen])


def test_values_beyond_fp16_become_infinite():
    model = net(
        """(float16[1,4,8,8] y, z) {
        h = Cast<to = 10>(x) y = Mul(h, f) q = QuantizeLinear(y, s, zero) z = DequantizeLinear(q, s, zero) }""",
        f=np.float16(8192),
        s=np.float16(256),
        zero=np.int8(0),
    )
    with np.errstate(over="ignore"):
        expected = half(pixels()) * np.float16(8192)
    assert np.isinf(expected).any()
    assert np.isfinite(expected).any()
    got = run(model)
    equal(got["y"], expected)
    np.testing.assert_array_equal(got["z"], np.clip(np.rint(expected.astype(np.float32) / 256), -128, 127) * 256)


def test_a_plugin_rounds_once():
    model = net("(y) { h = Cast<to = 10>(x) y = trt.plugins.TRT_SiLU(h) }")
    model.graph.node[1].attribute.extend(onnx.helper.make_attribute(*pair) for pair in attributes().items())
    plain = net("(y) { y = trt.plugins.TRT_SiLU(x) }")
    plain.graph.node[0].attribute.extend(onnx.helper.make_attribute(*pair) for pair in attributes().items())
    expected = run(plain)["y"]
    assert (expected != half(expected)).any()
    equal(run(model)["y"], half(expected))


@pytest.mark.opset(24)  # onnxruntime 1.23 lacks QuantizeLinear of opset 23
def test_types_that_are_written_as_attributes_follow():
    """From opset 23 on the nodes of Q/DQ pairs state types of their own."""
    x = pixels() / 4
    exact, constants = quantized(x)
    model = net(
        """(y) { h = Cast<to = 10>(x) q = QuantizeLinear<precision = 10>(h, s, zero)
        d = DequantizeLinear<output_dtype = 10>(q, s, zero) o = CastLike(x, d) y = Add(d, o) }""",
        opset=23,
        **{name: constants[name] for name in ("s", "zero")},
    )
    onnx.checker.check_model(with_roundings(model), full_check=True)
    equal(run(model, x)["y"], half(exact) + half(x))


def test_float32_models_are_run_as_they_are():
    model = net(
        "(float[1,4,8,8] y) { q = QuantizeLinear(x, s, zero) d = DequantizeLinear(q, s, zero) y = Conv(d, w) }",
        s=np.float32(0.25),
        zero=np.int8(0),
        w=weight(1).astype(np.float32),
    )
    assert with_roundings(model) is model
    data = model.SerializeToString()
    assert _runnable(data)[:2] == (data, False)
    assert _runnable(data)[0] is data


def test_inputs_and_outputs_keep_their_names_and_types():
    model = net("(float16[1,4,8,8] a, float[1,4,8,8] y) { a = Mul(x, x) b = Relu(a) y = Cast<to = 1>(b) }")
    model.graph.input[0].type.tensor_type.elem_type = HALF
    model = onnx.shape_inference.infer_shapes(onnx.ModelProto.FromString(model.SerializeToString()))
    runner = OnnxRunner(model)
    onnx.checker.check_model(runner.model, full_check=True)
    x = half(pixels() / 3)
    got = runner.feed({"x": x})
    assert (runner.inputs, runner.outputs) == (("x",), ("a", "y"))
    assert (got["a"].dtype, got["y"].dtype) == (np.float16, np.float32)
    equal(got["a"], x * x)
    equal(got["y"], np.maximum(x * x, np.float16(0)))


def test_inner_tensors_are_found_by_name():
    x = pixels() / 4
    exact, constants = quantized(x)
    model = net(f"(y) {{ {QUANTIZED} a = Conv(d, v) b = Relu(a) y = Sigmoid(b) }}", **constants)
    got = run(expose(model, ["h", "d", "v", "a", "b"]), x)
    a = half(convolved(exact, constants["k"] * 0.25))
    equal(got["h"], half(x))
    equal(got["d"], half(exact))
    equal(got["v"], half(constants["k"] * 0.25))
    equal(got["a"], a)
    equal(got["b"], np.maximum(a, np.float16(0)))
    assert {value.dtype for value in got.values()} == {np.dtype(np.float32)}


def test_branches_and_loops_get_the_types_they_ask_for():
    model = net(
        """(y) {
        h = Cast<to = 10>(x) a = Mul(h, h) b = Relu(h) yes = Constant<value = bool {1}>()
        c = If (yes) <then_branch = then () => (p) { p = Max(a, b) }, else_branch = other () => (r) { r = Neg(a) }>
        y = Add(c, a) }"""
    )
    x = pixels() / 3
    h = half(x)
    equal(run(model, x)["y"], np.maximum(h * h, h) + h * h)


def test_a_profile_names_the_nodes_of_the_model():
    model = net("(y) { h = Cast<to = 10>(x) a = Conv(h, w) s = Sigmoid(a) y = Mul(a, s) }", w=weight(1))
    provenance.put(model, {"Cast_0": Origin.FP16, "Mul_3": Origin.ACTIVATION})
    runner = OnnxRunner(model)
    named = {name for layer in runner.profile(pixels(), 2, 1) for name in layer.onnx}
    assert {"Conv_1", "Sigmoid_2", "Mul_3"} <= named
    origins = provenance.origin_of(runner.model)
    assert origins["Mul_3"] is Origin.ACTIVATION
    added = named - {node.name for node in model.graph.node}
    assert added
    assert {origins[name] for name in added} == {Origin.FP16}


def test_a_tensor_that_no_node_gives_is_an_error_of_one_line():
    model = net("(float[1,4,8,8] y) {h = Cast<to=10>(x) a = Abs(h) s = Add(h, a) y = Cast<to=1>(s)}")
    del model.graph.node[1]
    with pytest.raises(BackendError, match="cannot load the model: no node before its readers gives the tensor 'a'"):
        OnnxRunner(model.SerializeToString())
