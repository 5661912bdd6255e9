"""Plugin operators: ONNX's shape inference, and the CPU form against NumPy."""

import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import pytest

from trtdet.backends import OnnxRunner
from trtdet.backends.tensorrt.silu_aot import ATTRIBUTES
from trtdet.errors import ModelError
from trtdet.passes import load_model, plugin_ops
from trtdet.passes.base import PLUGIN_DOMAIN
from trtdet.passes.model import save_model, to_graph, to_model
from trtdet.passes.nms import EFFICIENT

TYPES = {0: np.float32, 1: np.float16, 2: np.int8}
ONNX_TYPES = {np.float32: 1, np.float16: 10, np.int8: 3}


def single(op: str, shape: tuple[int, ...], source: Any = np.float32, **attributes: Any) -> onnx.ModelProto:
    """A model of one plugin node between float32 input and output, so that any type can be fed."""
    attributes = plugin_ops.attributes(**attributes)
    asked = attributes["output_type"]
    made = source if asked == -1 else TYPES[asked]
    nodes = [
        onnx.helper.make_node("Cast", ["x"], ["cast"], "before", to=ONNX_TYPES[source]),
        onnx.helper.make_node(op, ["cast"], ["made"], "node", domain=PLUGIN_DOMAIN, **attributes),
        onnx.helper.make_node("Cast", ["made"], ["y"], "after", to=1),
    ]
    info = [onnx.helper.make_tensor_value_info(name, 1, shape) for name in "xy"]
    graph = onnx.helper.make_graph(nodes, "net", info[:1], info[1:])
    imports = [onnx.helper.make_opsetid("", 13), onnx.helper.make_opsetid(PLUGIN_DOMAIN, 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    types = {one.name: one.type.tensor_type.elem_type for one in inferred.graph.value_info}
    assert types["made"] == ONNX_TYPES[made]
    onnx.checker.check_model(inferred, full_check=True)
    return model


def contract(op: str, x: np.ndarray, made: Any, scale: Any = 1.0, factor: Any = 1.0, offset: Any = 0.0) -> np.ndarray:
    """The arithmetic of the plugin, float32 and rounded once a step."""

    def channels(value: Any) -> np.ndarray:
        return np.asarray(value, np.float32).reshape(-1, *[1] * (x.ndim - 2))

    one = np.float32(1)
    values = x.astype(np.float32) * channels(scale) if x.dtype == np.int8 else x.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        gate = one / (one + np.exp(-values))
        if op == plugin_ops.HARD_SWISH:
            gate = np.clip(values / np.float32(6) + np.float32(0.5), np.float32(0), one)
        y = values * gate * channels(factor) + channels(offset)
    if made != np.int8:
        return y.astype(made)
    return np.where(np.isnan(y), 0, np.clip(np.rint(y), -128, 127)).astype(np.int8)


def ran(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return OnnxRunner(model)(x.astype(np.float32))["y"]


@pytest.mark.parametrize("op", plugin_ops.PLUGIN_ACTIVATIONS)
@pytest.mark.parametrize("asked", [-1, 0, 1, 2])
@pytest.mark.parametrize("source", [np.float32, np.float16, np.int8])
@pytest.mark.parametrize("wide", [False, True])
def test_the_plain_form_computes_the_contract(op, asked, source, wide):
    rng = np.random.default_rng(0)
    x = rng.normal(0, 4, (2, 5, 7, 3)).astype(np.float32)
    if source == np.int8:
        x = rng.integers(-128, 128, (2, 5, 7, 3))
    x = x.astype(source)
    many = rng.uniform(0.2, 9, (3, 5)).astype(np.float32) if wide else rng.uniform(0.2, 9, (3, 1)).astype(np.float32)
    scale, factor, offset = many[0] / 64, many[1], many[2] - 4
    model = single(op, x.shape, source, output_type=asked, input_scale=[*scale], factor=[*factor], offset=[*offset])
    made = source if asked == -1 else TYPES[asked]
    expected = contract(op, x, made, scale, factor, offset).astype(np.float32)
    got = ran(model, x)
    if op == plugin_ops.HARD_SWISH:
        np.testing.assert_array_equal(got, expected)
    elif made == np.int8:  # two sigmoids differ in their last bit, which a rounding can hit
        assert (got != expected).mean() < 0.01
        assert np.abs(got - expected).max() <= 1
    else:
        # onnxruntime's sigmoid is good to a millionth, times a factor of up to nine here.
        np.testing.assert_allclose(got, expected, rtol=2e-3 if made == np.float16 else 2e-6, atol=1e-5)


@pytest.mark.parametrize("op", plugin_ops.PLUGIN_ACTIVATIONS)
def test_ties_go_to_even_values_saturate_and_nan_is_0(op):
    # From 20 on both activations give back what they are given.
    x = np.array([25, 27, 29, 31, 1000, np.inf, np.nan, 0, -40], np.float32).reshape(1, 1, 9)
    halves = ran(single(op, x.shape, output_type=2, factor=[0.5]), x)
    np.testing.assert_array_equal(halves[0, 0], [12, 14, 14, 16, 127, 127, 0, 0, 0])
    negated = ran(single(op, x.shape, output_type=2, factor=[-0.5], offset=[1.0]), x)
    np.testing.assert_array_equal(negated[0, 0], [-12, -12, -14, -14, -128, -128, 0, 1, 1])


@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 5), (1, 4, 2, 3, 2)])
def test_channels_are_the_second_axis_of_any_rank(shape, normal):
    x, factor = normal(*shape), np.array([1, 2, 3, 4], np.float32)
    got = ran(single(plugin_ops.HARD_SWISH, shape, factor=[*factor]), x)
    np.testing.assert_array_equal(got, contract(plugin_ops.HARD_SWISH, x, np.float32, factor=factor))


def test_a_model_with_plugins_is_read_checked_and_keeps_its_names(tmp_path, normal):
    model = single(plugin_ops.SILU, (1, 2, 3))
    save_model(model, tmp_path / "model.onnx")
    read = load_model(tmp_path / "model.onnx")
    graph = to_graph(read)
    assert [node.domain for node in graph.nodes] == [None, PLUGIN_DOMAIN, None]
    assert [(one.domain, one.version) for one in to_model(graph).opset_import] == [("", 13), (PLUGIN_DOMAIN, 1)]
    before = read.SerializeToString()
    lowered = plugin_ops.plain(read)
    assert read.SerializeToString() == before
    assert "made" in {output for node in lowered.graph.node for output in node.output}
    assert [one.domain for one in lowered.opset_import] == [""]
    x = normal(1, 2, 3)
    np.testing.assert_array_equal(OnnxRunner(before)(x)["y"], OnnxRunner(read)(x)["y"])
    assert plugin_ops.plain(lowered) is lowered


def test_a_plugin_in_a_branch_is_found_and_lowered(net, normal):
    text = """(float[1,2,3] x) => (float[1,2,3] y) {
        sum = ReduceSum<keepdims = 0>(x)
        positive = Cast<to = 9>(sum)
        y = If (positive) <
            then_branch = yes () => (float[1,2,3] b) { b = trt.plugins.TRT_SiLU<factor = [1.0, 2.0]>(x) },
            else_branch = no () => (float[1,2,3] c) { c = Neg(x) }
        > }"""
    model = net(text, domain=PLUGIN_DOMAIN)
    assert [list(node.output) for node in plugin_ops.plugin_nodes(model.graph)] == [["b"]]
    x = normal(1, 2, 3)
    expected = contract(plugin_ops.SILU, x, np.float32, factor=[1, 2])
    np.testing.assert_allclose(OnnxRunner(model)(x)["y"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"factor": [1.0, 2.0]}, r"has 2 values in factor, but its input has 3 channels"),
        ({"output_type": 7}, r"output_type is 7; allowed: -1 as the input, 0 float32, 1 float16, 2 int8"),
    ],
)
def test_attributes_that_do_not_fit_are_an_error_that_names_the_node(attributes, words):
    model = single(plugin_ops.SILU, (1, 3, 2))
    node = model.graph.node[1]
    for name, value in attributes.items():
        for old in [one for one in node.attribute if one.name == name]:
            node.attribute.remove(old)
        node.attribute.append(onnx.helper.make_attribute(name, value))
    with pytest.raises(ModelError, match=rf"node 'node' \(TRT_SiLU\).*{words}"):
        plugin_ops.plain(model)


def test_a_node_has_all_its_attributes_in_the_order_in_which_a_compiled_plugin_takes_them():
    names = list(plugin_ops.attributes(offset=[1.0], output_type=plugin_ops.INT8))
    assert names == ["plugin_version", "plugin_namespace", *ATTRIBUTES]


def test_no_operator_outlives_the_interpreter():
    """ONNX 1.19 let go of their functions after it: each process ended with a crash, or not at all."""
    lines = (
        "import atexit, onnx, trtdet.passes.nms, trtdet.passes.plugin_ops",
        f"left = lambda: [one.name for one in onnx.defs.get_all_schemas() if one.domain == {PLUGIN_DOMAIN!r}]",
        "print(sorted(left()))",
        "atexit._run_exitfuncs()",
        "print(left())",
    )
    said = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [str(sorted([EFFICIENT, *plugin_ops.PLUGIN_ACTIVATIONS])), "[]"]
