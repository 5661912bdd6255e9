"""Each lowered node computes the same in onnxruntime, without its graph optimisations."""

import warnings
from collections.abc import Iterator
from typing import Any

import nets
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trtdet.errors import ModelError
from trtdet.exporter import SHAPES_MODEL, ExportOptions
from trtdet.passes import plugin_ops
from trtdet.passes.base import PLUGIN_DOMAIN
from trtdet.passes.opset.forms import FORMS
from trtdet.passes.opset.lowering import lower
from trtdet.passes.opset.nodes import types_and_constants

NEWEST = 26
"""The newest opset that onnxruntime 1.31 runs."""

pytestmark = pytest.mark.opset(28)

exact = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def parsed(text: str, opset: int, **constants: Any) -> onnx.ModelProto:
    return nets.net(text, opset, domain=PLUGIN_DOMAIN, **constants)


def compute(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[NDArray[Any]]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def lowered(model: onnx.ModelProto, version: int, **feeds: Any) -> onnx.ModelProto:
    """Lowers a model and checks that it is valid and, where there is an input, that it gives the same bits."""
    untouched = model.SerializeToString()
    after, _ = lower(model, version)
    assert model.SerializeToString() == untouched
    onnx.checker.check_model(after, full_check=True)
    assert [one.version for one in after.opset_import if not one.domain] == [version]
    if feeds:
        for old, new in zip(compute(model, feeds), compute(after, feeds), strict=True):
            np.testing.assert_array_equal(new, old)
    return after


def test_constants_have_the_types_of_their_attributes():
    model = parsed("""() => (float y) {
        y = Constant<value_float = 1.5>() a = Constant<value_floats = [1.5, 2.0]>() b = Constant<value_int = 3>()
        c = Constant<value_ints = [3, 4]>() d = Constant<value = float {2.0}>() }""", 20)  # fmt: skip
    types, constants = types_and_constants(model.graph)
    expected = {"y": np.float32(1.5), "a": np.array([1.5, 2], np.float32), "b": np.int64(3), "c": np.array([3, 4])}
    for name, value in {**expected, "d": np.float32(2)}.items():
        found = onnx.numpy_helper.to_array(constants[name])
        assert found.dtype == value.dtype == onnx.helper.tensor_dtype_to_np_dtype(types[name].elem_type)
        assert found.shape == value.shape == tuple(dim.dim_value for dim in types[name].shape.dim)
        np.testing.assert_array_equal(found, value)


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


def why(model: onnx.ModelProto, version: int) -> str:
    """The reason that is given for a node that cannot be expressed."""
    with pytest.raises(ModelError) as caught:
        lower(model, version)
    head, _, rest = str(caught.value).partition(", the newest that the backend reads: ")
    assert head.startswith("node '")
    reason, _, advice = rest.partition("; export the model with opset ")
    assert advice == f"{version} or older, or choose another --backend"
    return reason


def noise(*shape: int, seed: int = 0, scale: float = 3.0) -> NDArray[np.float32]:
    return nets.normal(*shape, seed=seed, scale=scale)


@pytest.mark.parametrize(("reduction", "left"), [("none", []), ("add", [b"add"])])
def test_the_default_reduction_of_a_scatter_is_left_out(reduction, left):
    """TensorRT's parser before 10.9 refuses it."""
    text = f'(float[3,4] x) => (float[3,4] y) {{ y = ScatterND<reduction = "{reduction}">(x, at, row) }}'
    after = lowered(parsed(text, 18, at=np.array([[1]]), row=noise(1, 4)), 17, x=noise(3, 4))
    assert [entry.s for node in after.graph.node for entry in node.attribute if entry.name == "reduction"] == left


REDUCTIONS = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"]


@exact
@given(
    kind=st.sampled_from(REDUCTIONS),
    axes=st.none() | st.lists(st.integers(0, 3), unique=True, max_size=4),
    negative=st.booleans(),
    keepdims=st.integers(0, 1),
    noop=st.integers(0, 1),
    source=st.integers(18, NEWEST),
    target=st.integers(13, 17),
)
def test_reduced_axes(kind, axes, negative, keepdims, noop, source, target):
    operand = "" if axes is None else ", axes"
    node = f"Reduce{kind}<keepdims = {keepdims}, noop_with_empty_axes = {noop}>(x{operand})"
    rank = 4 if keepdims or (noop and not axes) else 4 - len(axes or range(4))
    text = f"(float[2,3,4,5] x) => (float[{','.join('abcd'[:rank])}] y) {{ y = {node} }}"
    constants = {"axes": np.array([axis - 4 * negative for axis in axes or []], np.int64)} if operand else {}
    model = parsed(text, source, **constants)
    if rank == 0:
        model.graph.output[0].type.tensor_type.shape.ClearField("dim")
    x = np.abs(noise(2, 3, 4, 5)) + np.float32(0.5)
    after, _ = lower(model, target)
    onnx.checker.check_model(after, full_check=True)
    before, result = compute(model, {"x": x})[0], compute(after, {"x": x})[0]
    # The sums of logarithms take another kernel of onnxruntime, which adds in another order.
    np.testing.assert_allclose(result, before, rtol=1e-6 if kind.startswith("Log") else 0)


@exact
@given(
    size=st.integers(2, 12),
    parts=st.integers(1, 5),
    axis=st.sampled_from([1, -1]),
    source=st.integers(18, NEWEST),
    target=st.integers(13, 17),
)
def test_parts_of_a_split(size, parts, axis, source, target):
    assume(size - -(-size // parts) * (parts - 1) > 0)
    names = [f"y{index}" for index in range(parts)]
    outputs = ", ".join(f"float[1,{'n,2' if axis == 1 else '2,n'}] {name}" for name in names)
    shape = (1, size, 2) if axis == 1 else (1, 2, size)
    node = f"Split<axis = {axis}, num_outputs = {parts}>(x)"
    text = f"(float[{','.join(map(str, shape))}] x) => ({outputs}) {{ {', '.join(names)} = {node} }}"
    model = parsed(text, source)
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    after, _ = lower(model, target)
    x = noise(*shape)
    for old, new in zip(compute(model, {"x": x}), compute(after, {"x": x}), strict=True):
        np.testing.assert_array_equal(new, old)
    assert ("Constant" in [node.op_type for node in after.graph.node]) == bool(size % parts)


@exact
@given(
    axes=st.lists(st.integers(-4, 3), unique_by=lambda axis: axis % 4, min_size=1, max_size=4),
    widths=st.lists(st.integers(-1, 2), min_size=8, max_size=8),
    mode=st.sampled_from(["constant", "edge", "reflect"]),
    value=st.booleans(),
    source=st.integers(18, NEWEST),
)
def test_padded_axes(axes, widths, mode, value, source):
    if mode != "constant":
        widths = [abs(width) for width in widths]
    pads = np.array(widths[: 2 * len(axes)])
    node = f'Pad<mode = "{mode}">(x, pads, {"v" if value else ""}, axes)'
    text = f"(float[3,4,5,6] x) => (float[a,b,c,d] y) {{ y = {node} }}"
    model = parsed(text, source, pads=pads, axes=np.array(axes), **({"v": np.float32(0.25)} if value else {}))
    lowered(model, 17, x=noise(3, 4, 5, 6))


@exact
@given(
    axes=st.sampled_from([None, [2, 3], [3, 2], [-2, -1], [3], [0, 1, 2, 3], [1]]),
    mode=st.sampled_from(["nearest", "linear"]),
    transform=st.sampled_from(["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]),
    by_scale=st.booleans(),
    factors=st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0]), min_size=4, max_size=4),
    source=st.integers(18, NEWEST),
    target=st.integers(13, 17),
)
def test_resized_axes(axes, mode, transform, by_scale, factors, source, target):
    shape = (1, 2, 6, 8)
    wanted = [axis % 4 for axis in axes] if axes else [0, 1, 2, 3]
    scales = np.array([factors[axis] if axis > 1 else 1.0 for axis in wanted], np.float32)
    sizes = np.array([int(shape[axis] * scale) for axis, scale in zip(wanted, scales, strict=True)])
    chosen = f", axes = {axes}" if axes else ""
    node = f'Resize<mode = "{mode}", coordinate_transformation_mode = "{transform}"{chosen}>'
    inputs = "(x, , scales)" if by_scale else "(x, , , sizes)"
    text = f"(float[1,2,6,8] x) => (float[a,b,c,d] y) {{ y = {node}{inputs} }}"
    model = parsed(text, source, **{"scales": scales} if by_scale else {"sizes": sizes})
    lowered(model, target, x=noise(*shape))


@exact
@given(start=st.integers(-6, 6), end=st.none() | st.integers(-6, 6), source=st.integers(15, NEWEST))
def test_parts_of_shapes(start, end, source):
    bounds = f"start = {start}" + ("" if end is None else f", end = {end}")
    model = parsed(f"(float[a,3,4,5] x) => (int64[n] y) {{ y = Shape<{bounds}>(x) }}", source)
    # onnxruntime refuses bounds in the wrong order.
    first, last = (min(max(one + 4 if one < 0 else one, 0), 4) for one in (start, 4 if end is None else end))
    assume(first <= last)
    lowered(model, 13, x=noise(2, 3, 4, 5))


@exact
@given(
    mode=st.sampled_from([None, "linear", "nearest", "cubic"]),
    padding=st.sampled_from(["zeros", "border", "reflection"]),
    corners=st.integers(0, 1),
    source=st.integers(20, NEWEST),
    target=st.integers(16, 19),
)
def test_modes_of_a_grid(mode, padding, corners, source, target):
    chosen = "" if mode is None else f', mode = "{mode}"'
    node = f'GridSample<padding_mode = "{padding}", align_corners = {corners}{chosen}>(x, g)'
    model = parsed(f"(float[1,2,5,6] x, float[1,3,4,2] g) => (float[a,b,c,d] y) {{ y = {node} }}", source)
    lowered(model, target, x=noise(1, 2, 5, 6), g=noise(1, 3, 4, 2, seed=1, scale=0.7))


@exact
@given(
    kind=st.sampled_from(["MaxPool", "AveragePool"]),
    size=st.integers(5, 12),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 4),
    pads=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    ceil=st.integers(0, 1),
    source=st.integers(22, NEWEST),
    target=st.integers(19, 21),
)
def test_windows_of_a_pool(kind, size, kernel, stride, pads, ceil, source, target):
    pads = [min(pad, kernel - 1) for pad in pads]
    shape = f"kernel_shape = [{kernel}, {kernel}], strides = [{stride}, {stride}], pads = {pads}, ceil_mode = {ceil}"
    model = parsed(f"(float[1,2,{size},{size}] x) => (float[1,2,c,d] y) {{ y = {kind}<{shape}>(x) }}", source)
    outside = [
        (-(-(size + first + last - kernel) // stride)) * stride >= size + first
        for first, last in zip(pads[:2], pads[2:], strict=True)
    ]
    if ceil and any(outside):
        assert "starts in the padding, which is left out from opset 22 on" in why(model, target)
    else:
        lowered(model, target, x=noise(1, 2, size, size))


@exact
@given(auto=st.sampled_from(["VALID", "SAME_UPPER", "SAME_LOWER"]), size=st.integers(4, 9), stride=st.integers(1, 3))
def test_average_pools_that_pad_themselves_mean_the_same_in_every_opset(auto, size, stride):
    """The formulas in ONNX's text changed with opset 19, what they give did not."""
    node = f'AveragePool<kernel_shape = [3,3], strides = [{stride},{stride}], auto_pad = "{auto}">(x)'
    model = parsed(f"(float[1,2,{size},{size}] x) => (float[1,2,c,d] y) {{ y = {node} }}", 22)
    x = noise(1, 2, size, size)
    after = lowered(model, 13)
    # Another kernel of onnxruntime, which adds in another order.
    np.testing.assert_allclose(compute(after, {"x": x})[0], compute(model, {"x": x})[0], rtol=0, atol=4e-6)


@exact
@given(
    body=st.sampled_from(
        [
            *("Mish(x)", "Swish(x)", "Swish<alpha = 1.7>(x)", "HardSwish(x)", "LeakyRelu<alpha = 0.2>(x)", "Selu(x)"),
            *("CastLike(x, x)", "Cast<to = 1, saturate = 1>(x)", "Reshape<allowzero = 1>(x, shape)"),
            *("Clip(x, low)", 'ScatterND<reduction = "none">(x, at, row)', "Transpose(x)", "Flatten(x)"),
            *("BatchNormalization<training_mode = 0>(x, c, c, c, c)", "Squeeze(x)", "Pow(x, low)", "Softplus(x)"),
        ]
    ),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    source=st.integers(24, NEWEST),
    target=st.integers(13, 20),
)
def test_older_forms_give_the_same_bits(body, scale, source, target):
    assume(source == 24 or not body.startswith("Swish"))  # onnxruntime 1.31 knows it in that opset alone
    used = {
        "shape": np.array([2, -1]),
        "low": np.float32(2),
        "at": np.array([[1]]),
        "row": np.ones((1, 3, 4, 5), np.float32),
        "c": np.arange(1, 4, dtype=np.float32),
    }
    constants = {name: value for name, value in used.items() if f", {name}" in body}
    model = parsed(f"(float[2,3,4,5] x) => (float y) {{ y = {body} }}", source, **constants)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    after, _ = lower(model, target)
    x = noise(2, 3, 4, 5, scale=scale)
    np.testing.assert_array_equal(compute(after, {"x": x})[0], compute(model, {"x": x})[0])


@exact
@given(
    body=st.sampled_from(
        [
            *("Gelu(x)", 'Gelu<approximate = "tanh">(x)', "LayerNormalization(x, last, last)"),
            *("LayerNormalization<axis = 1>(x, rest, rest)", "GroupNormalization<num_groups = 2>(x, c, c)"),
            *("RMSNormalization(x, last)", "Attention(x, x, x)", "Attention<is_causal = 1, scale = 0.5>(x, x, x)"),
        ]
    ),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    seed=st.integers(0, 9),
    source=st.integers(23, NEWEST),
    target=st.sampled_from([13, 17, 20]),
)
def test_definitions_are_right_to_some_units_in_the_last_place(body, scale, seed, source, target):
    """onnxruntime has kernels of its own for these: both stay within 8 units in the last place of the largest value."""
    used = {"last": (6,), "rest": (4, 5, 6), "c": (4,)}
    constants = {name: noise(*shape, seed=7, scale=1) for name, shape in used.items() if f", {name}" in body}
    model = parsed(f"(float[2,4,5,6] x) => (float[2,4,5,6] y) {{ y = {body} }}", source, **constants)
    after = lowered(model, target)
    x = noise(2, 4, 5, 6, seed=seed, scale=scale)
    before = compute(model, {"x": x})[0]
    unit = np.spacing(np.abs(before).max())
    np.testing.assert_allclose(compute(after, {"x": x})[0], before, rtol=0, atol=8 * unit)


def test_group_normalization_keeps_its_digits_where_the_definition_loses_them():
    text = "(float[1,4,8,8] x) => (float[1,4,8,8] y) { y = GroupNormalization<num_groups = 2, epsilon = 0.0>(x, c, c) }"
    model = parsed(text, 21, c=np.ones(4, np.float32))
    after, _ = lower(model, 17)
    x = noise(1, 4, 8, 8, scale=0.1) + np.float32(100)
    groups = x.astype(np.float64).reshape(2, -1)
    deviation = groups.std(axis=1, keepdims=True)
    right = ((groups - groups.mean(axis=1, keepdims=True)) / deviation + 1).reshape(x.shape)
    error = [np.abs(compute(one, {"x": x})[0] - right).max() for one in (after, model)]
    assert error[0] < 1e-3 < error[1]


def test_half_precision_is_normalised_in_the_precision_that_is_asked_for():
    text = "(float16[1,4,3,3] x) => (float16[1,4,3,3] y) { y = GroupNormalization<num_groups = 2>(x, c, c) }"
    after = lowered(parsed(text, 21, c=np.ones(4, np.float16)), 17)
    assert operators(after)[:4] == ["Reshape", "Cast", "InstanceNormalization", "Cast"]
    x = noise(1, 4, 3, 3, scale=100).astype(np.float16)
    assert np.isfinite(compute(after, {"x": x})[0]).all()


def test_names_domains_and_inner_graphs_are_kept():
    text = """(float[1,4,8,8] x, bool c) => (float[1,4,1,8] y) {
        p = trt.plugins.TRT_SiLU(x)
        y = If (c) <
            then_branch = yes () => (float[1,4,1,8] t) { t = ReduceMean(p, axes) },
            else_branch = no () => (float[1,4,1,8] e) { e = ReduceMax(x, axes) }
        > }"""
    after = lowered(parsed(text, 20, axes=np.array([2])), 17)
    plugin, branch = after.graph.node
    assert (plugin.domain, plugin.op_type, plugin.name) == (PLUGIN_DOMAIN, plugin_ops.SILU, "TRT_SiLU_0")
    assert branch.name == "If_1"
    inner = [attribute.g.node[0] for attribute in branch.attribute]
    assert sorted(node.op_type for node in inner) == ["ReduceMax", "ReduceMean"]
    assert all(list(node.input) in (["p"], ["x"]) for node in inner)
    assert {entry.domain: entry.version for entry in after.opset_import} == {"": 17, PLUGIN_DOMAIN: 1}
    x = noise(1, 4, 8, 8)
    plain = [plugin_ops.plain(one) for one in (parsed(text, 20, axes=np.array([2])), after)]
    for chosen in (True, False):
        old, new = (compute(one, {"x": x, "c": np.array(chosen)})[0] for one in plain)
        np.testing.assert_array_equal(new, old)


def test_nodes_of_a_definition_are_named_after_the_node():
    text = "(float[1,4,8,8] x) => (float[1,4,8,8] y) { a = Gelu(x) b = Gelu(a) y = Mish(b) }"
    after = lowered(parsed(text, 20), 17)
    names = [node.name for node in after.graph.node]
    assert len(set(names)) == len(names)
    assert {name.split("/")[0] for name in names} == {"Gelu_0", "Gelu_1", "Mish_2"}
    assert {"a", "b", "y"} <= {name for node in after.graph.node for name in node.output}


def test_an_operator_that_two_opsets_share_is_not_taken_apart():
    text = "(float[1,2,5,6] x) => (float[1,2,5,6] y) { y = Attention<left_window_size = -1>(x, x, x) }"
    after = lowered(parsed(text, 25), 24)
    assert operators(after) == ["Attention"]
    assert len(operators(lowered(parsed(text, 25), 23))) > 5


def test_local_functions_are_written_out():
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18, "local": 1]>
        net (float[1,4,8,8] x) => (float[1,4,1,1] y) { y = local.pool(x) }
        <domain: "local", opset_import: ["": 18]>
        pool (x) => (y) { axes = Constant<value_ints = [2, 3]>() y = ReduceMean(x, axes) }"""
    )
    after, _ = lower(model, 17)
    assert operators(after) == ["ReduceMean"]
    assert not after.functions
    x = noise(1, 4, 8, 8)
    np.testing.assert_array_equal(compute(after, {"x": x})[0], compute(model, {"x": x})[0])


def test_the_zero_point_carries_the_output_type_of_a_quantizer():
    text = "(float[2,3,4] x) => (int8[2,3,4] y) { y = QuantizeLinear<output_dtype = 3, axis = 1>(x, s) }"
    after = lowered(parsed(text, 21, s=np.array([0.1, 0.2, 0.3], np.float32)), 17, x=noise(2, 3, 4))
    assert len(after.graph.node[-1].input) == 3
    text = "(int8[2,3,4] x) => (float[2,3,4] y) { y = DequantizeLinear<output_dtype = 1>(x, s) }"
    lowered(parsed(text, 23, s=np.float32(0.1)), 17, x=np.arange(24, dtype=np.int8).reshape(2, 3, 4))


@pytest.mark.parametrize(
    ("body", "source", "target", "reason"),
    [
        ("ReduceMean(x, i)", 18, 17, "its axes are computed in the graph, an older opset needs them as constants"),
        ("ReduceMax<noop_with_empty_axes = 1>(x, i)", 18, 17, "its axes are computed in the graph, an older opset"),
        ('Pad<mode = "wrap">(x, pads)', 19, 18, "its attribute mode = wrap exists from opset 19 on"),
        ("Pad(x, i, , one)", 18, 17, "its widths are computed in the graph, an older opset needs them as constants"),
        ("Resize<antialias = 1>(x, , s)", 18, 17, "its attribute antialias = 1 exists from opset 18 on"),
        (
            'Resize<keep_aspect_ratio_policy = "not_smaller">(x, , , n)',
            *(18, 17),
            "its attribute keep_aspect_ratio_policy = not_smaller exists from opset 18 on",
        ),
        (
            'Resize<coordinate_transformation_mode = "half_pixel_symmetric">(x, , s)',
            *(19, 18),
            "its attribute coordinate_transformation_mode = half_pixel_symmetric exists from opset 19 on",
        ),
        (
            'Resize<axes = [2, 3], coordinate_transformation_mode = "tf_crop_and_resize">(x, roi, two)',
            *(18, 17),
            "it has a region of interest for some axes only, which exists from opset 18 on",
        ),
        ("Split<num_outputs = 3>(u)", 18, 17, "the size of axis 0 of its input 'u' is not fixed"),
        ("Reshape<allowzero = 1>(x, i)", 14, 13, "its sizes are computed in the graph, an older opset"),
        ("Reshape<allowzero = 1>(x, zero)", 14, 13, "its attribute allowzero = 1 exists from opset 14 on"),
        ('ScatterND<reduction = "max">(x, at, row)', 18, 17, "its attribute reduction = max exists from opset 18 on"),
        ('ScatterND<reduction = "min">(x, at, row)', 18, 17, "its attribute reduction = min exists from opset 18 on"),
        ('ScatterND<reduction = "add">(x, at, row)', 16, 13, "its attribute reduction = add exists from opset 16 on"),
        ("AveragePool<kernel_shape = [2,2], dilations = [2,2]>(x)", 19, 17, "its attribute dilations = [2, 2] exists"),
        ("GridSample(v, g)", 20, 19, "inputs other than (N, C, H, W) exist from opset 20 on"),
        ("RoiAlign(x, r, b)", 16, 13, "coordinate_transformation_mode = half_pixel exists from opset 16 on"),
        ("DFT(x)", 20, 17, "its axis is an input from opset 20 on"),
        ("Mod(x, x)", 28, 26, "of floats it takes the sign of the divisor from opset 28 on only"),
        ("BitwiseNot(i)", 18, 17, "the operator exists from opset 18 on"),
        ("Trilu(x)", 14, 13, "the operator exists from opset 14 on"),
        ("QuantizeLinear(h, hs)", 19, 17, "its input 'h' is float16, which newer opsets take"),
        ("QuantizeLinear<block_size = 2>(x, qs)", 21, 17, "its attribute block_size = 2 exists from opset 21 on"),
        ("DequantizeLinear<output_dtype = 10>(q, s1)", 23, 17, "its attribute output_dtype = 10 exists from opset 23"),
        ("Cast<to = 18>(x)", 24, 23, "infinity becomes another value of that type from opset 24 on"),
        ("RMSNormalization(w, l)", 23, 17, "the type of its input 'w' is not known, which its definition needs"),
        (
            "CenterCropPad<axes = [2]>(x, b)",
            *(18, 17),
            "its definition by other operators holds a Pad: its widths are computed in the graph",
        ),
    ],
)
def test_an_inexpressible_node_is_an_error_with_the_reason(body, source, target, reason):
    inputs = (
        "float[1,4,8,8] x, int64[4] i, float[n] u, float[1,4,8,8,8] v, float[1,2,2,2,3] g, float[1,4] r, int64[1] b, "
        "float16[2,2] h, int8[2,2] q, float[8] l, float[2,2] hs_"
    )
    integers = {"pads": [0, 0, 1, 1, 0, 0, 1, 1], "one": [2, 3], "n": [1, 4, 16, 20], "zero": [1, 0], "at": [[0]]}
    floats: dict[str, Any] = {"s": [1, 1, 2, 2], "roi": [0, 0, 1, 1], "two": [2, 2], "s1": 0.5}
    floats |= {"row": np.ones((1, 4, 8, 8)), "qs": np.ones((1, 4, 8, 4))}
    constants = {name: np.array(value) for name, value in integers.items()} | {"hs": np.array(0.5, np.float16)}
    constants |= {name: np.array(value, np.float32) for name, value in floats.items()}
    made = "y, y2, y3" if body.startswith("Split") else "y"
    first = "w = other.Unknown(x) " if "(w" in body else ""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {source}, "other": 1]> net ({inputs}) => (float y) '
        f"{{ {first}{made} = {body} }}"
    )
    for name, value in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    model.graph.output[0].ClearField("type")
    model.graph.node[-1].name = "it"
    assert why(model, target).startswith(reason)


def test_operators_of_another_default_have_a_form():
    """A node that leaves an attribute out means another thing where the default changed."""
    first: dict[str, int] = {}
    schemas = [one for one in onnx.defs.get_all_schemas_with_history() if not one.domain]
    for schema in schemas:
        first[schema.name] = min(first.get(schema.name, schema.since_version), schema.since_version)
    changed = set()
    for schema in schemas:
        if schema.since_version > max(13, first[schema.name]):
            older = onnx.defs.get_schema(schema.name, schema.since_version - 1).attributes
            for name in older.keys() & schema.attributes.keys():
                if schema.attributes[name].default_value != older[name].default_value:
                    changed.add(schema.name)
    assert changed == {"GridSample"}
    assert changed <= set(FORMS)


def cases() -> Iterator[tuple[str, onnx.ModelProto, dict[str, Any]]]:
    """Those of ONNX's test cases of single operators that onnxruntime runs."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases("")
    for case in found:
        version = next((one.version for one in case.model.opset_import if not one.domain), 0)
        values = (*case.model.graph.input, *case.model.graph.output)
        if (
            not 13 < version <= NEWEST
            or not case.data_sets
            or not all(one.type.HasField("tensor_type") for one in values)
        ):
            continue
        model = onnx.ModelProto.FromString(case.model.SerializeToString())
        model.ir_version = min(model.ir_version, 13)
        for index, node in enumerate(model.graph.node):
            node.name = node.name or f"{node.op_type}_{index}"
        feeds = dict(zip([one.name for one in model.graph.input], case.data_sets[0][0], strict=False))
        # In a detector all but the first input of an operator, such as axes and sizes, are constants.
        for value in list(model.graph.input)[1:]:
            if isinstance(feeds.get(value.name), np.ndarray):
                model.graph.input.remove(value)
                model.graph.initializer.append(onnx.numpy_helper.from_array(feeds.pop(value.name), value.name))
        yield case.name, model, feeds


def outcome_of(name: str, before: list[Any], after: list[Any]) -> str:
    """``equal`` for the same bits, or ``close``; anything else fails."""
    found = "equal"
    for old, new in zip(before, after, strict=True):
        if old.dtype.kind != "f":
            np.testing.assert_array_equal(new, old, name)
        elif old.tobytes() != new.tobytes():
            # Where onnxruntime takes another kernel, or ONNX's definition stands for one. A masked score is minus
            # infinity by that definition, and the lowest number in onnxruntime.
            kind = np.finfo(old.dtype)
            old, new = (np.clip(one, kind.min, kind.max).astype(np.float64) for one in (old, new))
            unit = kind.eps * np.abs(old[np.abs(old) < kind.max / 2]).max(initial=0)
            np.testing.assert_allclose(new, old, rtol=0, atol=8 * unit, err_msg=name)
            found = "close"
    return found


@pytest.mark.slow
def test_onnx_own_cases_of_every_operator_give_the_same_or_are_refused():
    counts = {"equal": 0, "close": 0, "refused": 0}
    for name, model, feeds in cases():
        newest = next(one.version for one in model.opset_import if not one.domain)
        try:
            before = compute(model, feeds)
        except Exception:  # onnxruntime lacks some operators and types, and has an exception for each of its reasons
            continue
        for version in (13, 17):
            if version >= newest:
                continue
            try:
                after, _ = lower(model, version)
            except ModelError:
                counts["refused"] += 1
                continue
            onnx.checker.check_model(after)
            counts[outcome_of(f"{name} in opset {version}", before, compute(after, feeds))] += 1
    assert counts["equal"] > 1000, counts
    assert counts["equal"] > 3 * counts["refused"], counts


@pytest.mark.parametrize("name", ["yolox_nano", "yolov5n", "picodet_s"])
@pytest.mark.parametrize(("raised", "version"), [(18, 17), (26, 13)])
def test_real_models_come_back_from_newer_opsets(shared_data, name, raised, version):
    newer = onnx.version_converter.convert_version(onnx.load(shared_data / "models" / f"{name}.onnx"), raised)
    newer.ir_version = 10
    image = newer.graph.input[0]
    shape = [dim.dim_value or 1 for dim in image.type.tensor_type.shape.dim]
    x = np.random.default_rng(0).uniform(0, 1, shape).astype(np.float32)
    lowered(newer, version, **{image.name: x})


@pytest.mark.parametrize("opset", [13, 14, 15, 16, 17, 18, 19, 20])
def test_exports_of_torch_in_any_opset_are_lowered(opset):
    torch = pytest.importorskip("torch", reason="exports from torch: pip install 'trtdet[export]'")
    from trtdet.exporter.convert import to_onnx

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            nn = torch.nn
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 1))
            self.norm = nn.GroupNorm(2, 8)
            self.layer = nn.LayerNorm(8)

        def forward(self, x: Any) -> Any:
            functional = torch.nn.functional
            a = functional.gelu(self.norm(self.stem(x)))
            b = functional.mish(functional.avg_pool2d(a, 3, 2, 1, ceil_mode=True))
            c = functional.interpolate(b, size=(9, 9), mode="bilinear") + functional.hardswish(a[..., :9, :9])
            d = functional.pad(c, (1, 1, 2, 2)).amax(dim=1, keepdim=True) * c.mean(dim=(2, 3), keepdim=True)
            first, second = d.chunk(2, dim=1)
            rows = self.layer((first + second).flatten(2).repeat(1, 2, 1).transpose(1, 2))
            return torch.cat([rows, rows.topk(8, dim=2)[0]], dim=2)

    torch.manual_seed(0)
    model = to_onnx(Net().eval(), torch.zeros(1, 3, 20, 20), ("images", "output"), ExportOptions(opset=opset))
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{index}"
    x = noise(1, 3, 20, 20, scale=1)
    before = compute(model, {"images": x})[0]
    for version in (13, 17):
        if version <= opset:
            after = lowered(model, version)
            np.testing.assert_allclose(compute(after, {"images": x})[0], before, rtol=0, atol=4e-6)


def test_the_shipped_detector_needs_no_lowering():
    model = onnx.load(SHAPES_MODEL)
    assert lower(model, 17)[0] is model
    after = lowered(model, 13, images=np.zeros((1, 3, 256, 256), np.float32))
    assert [node.name for node in after.graph.node] == [node.name for node in model.graph.node]
