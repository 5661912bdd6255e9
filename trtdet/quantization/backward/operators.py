"""The derivative of each ONNX operator that detectors use, written as ONNX nodes.

An entry takes the tape, the node, and the gradients of its outputs, None where the loss does not depend on one. It
returns the gradients of the inputs in their order, None for those without. Semantics are those of the ONNX operator
specification, opset 18 to 24 (https://onnx.ai/onnx/operators/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.passes.model import IR_VERSION, cpu_session
from trtdet.quantization.backward.tape import Tape, sizes_of
from trtdet.quantization.windows import geometry

Slopes = Sequence[Any]
Derivative = Callable[[Tape, gs.Node, Slopes], Sequence[Any]]


def _sizes(tensor: gs.Tensor, what: str) -> tuple[int, ...]:
    sizes = sizes_of(tensor)
    if sizes is None:
        raise NotImplementedError(f"{what} of unknown size")
    return sizes


def _conv(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    """The gradient of the input alone: a convolution with flipped weights, or a transposed convolution."""
    x, weight = node.inputs[:2]
    size, written = (_sizes(tensor, node.op)[2:] for tensor in (x, node.outputs[0]))
    kernel, group = _sizes(weight, "a weight")[2:], int(node.attrs.get("group", 1))
    strides, dilations, before, after = geometry(node, size, kernel)
    reach = [gap * (length - 1) for gap, length in zip(dilations, kernel, strict=True)]
    low, high = ([far - pad for far, pad in zip(reach, pads, strict=True)] for pads in (before, after))
    common = {"group": group, "dilations": list(dilations)}
    if isinstance(weight, gs.Constant) and set(strides) == {1} and min(low + high) >= 0:
        # onnxruntime's Conv is faster than its ConvTranspose.
        values = np.asarray(weight.values)
        parts = values.reshape(group, len(values) // group, *values.shape[1:]).swapaxes(1, 2)
        turned = np.flip(parts, tuple(range(3, parts.ndim))).reshape(-1, parts.shape[2], *kernel)
        return (tape("Conv", slopes[0], np.ascontiguousarray(turned), pads=low + high, **common),)
    rest = [
        length - ((count - 1) * stride - first - last + far + 1)
        for length, count, stride, first, last, far in zip(size, written, strides, before, after, reach, strict=True)
    ]
    return (
        tape(
            "ConvTranspose",
            slopes[0],
            weight,
            pads=[*before, *after],
            strides=list(strides),
            output_padding=rest,
            **common,
        ),
    )


def _conv_transpose(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    if node.attrs.get("auto_pad", "NOTSET") != "NOTSET" or "output_shape" in node.attrs:
        raise NotImplementedError("ConvTranspose with automatic padding")
    # Values that output_padding adds, or pads leave, at the end are fewer than a stride: Conv passes over them.
    kept = {key: value for key, value in node.attrs.items() if key in ("group", "dilations", "strides", "pads")}
    return (tape("Conv", slopes[0], node.inputs[1], **kept),)


def _max_pool(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    _, places = tape.again(node, node.inputs, 2)
    return (tape.scattered(node.inputs[0], places, slopes[0]),)


def _separable(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    """A linear operator that is separable into rows and columns. Unit vectors give its matrix for each axis."""
    size = _sizes(node.inputs[0], node.op)
    if len(size) != 4:
        raise NotImplementedError(f"{node.op} of other than four axes")
    rows, columns = (_matrix(node, size, axis) for axis in (2, 3))
    slope = tape("MatMul", slopes[0], columns)
    return (tape("MatMul", np.ascontiguousarray(rows.T), slope),)


def _matrix(node: gs.Node, size: Sequence[int], axis: int) -> NDArray[np.float32]:
    """The matrix, float32 (out, in), that a Resize or AveragePool applies along an axis: 2 for rows, 3 for columns."""
    length = size[axis]
    units = np.eye(length, dtype=np.float32).reshape(length, 1, *((length, 1) if axis == 2 else (1, length)))
    alone = _pooling_along if node.op == "AveragePool" else _resizing_along
    attributes, others = alone(node, size, axis=axis)
    given = {"x": units, **others}
    names = [name if name in given else "" for name in ("x", "roi", "scales", "sizes")]
    while not names[-1]:
        names.pop()
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in given.items()
    ]
    made = onnx.helper.make_node(node.op, names, ["y"], **attributes)
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = onnx.helper.make_graph([made], "along", values, [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 19)], ir_version=IR_VERSION)
    (columns,) = cpu_session(model).run(None, given)
    return np.ascontiguousarray(columns.reshape(length, -1).T.astype(np.float32))


def _pooling_along(node: gs.Node, size: Sequence[int], axis: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The attributes of an AveragePool along one axis."""
    kernel = list(node.attrs["kernel_shape"])
    strides, dilations, before, after = geometry(node, size[2:], kernel)
    ends = [int(pads[axis - 2]) if place == axis else 0 for pads in (before, after) for place in (2, 3)]
    changed: dict[str, Any] = {"pads": ends, "auto_pad": "NOTSET"}
    for key, values in (("kernel_shape", kernel), ("strides", strides), ("dilations", dilations)):
        changed[key] = [int(values[axis - 2]) if place == axis else 1 for place in (2, 3)]
    return {**node.attrs, **changed}, {}


def _resizing_along(node: gs.Node, size: Sequence[int], axis: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The attributes of a Resize along one axis, and its scales or sizes."""
    if not all(tensor.is_empty() or isinstance(tensor, gs.Constant) for tensor in node.inputs[1:]):
        raise NotImplementedError("Resize to a size that the data decide")
    attributes = {key: value for key, value in node.attrs.items() if key != "axes"}
    scales = node.inputs[2] if len(node.inputs) > 2 else None
    if isinstance(scales, gs.Constant) and scales.values.size:
        factors = np.ones(4, np.float32)
        factors[axis] = np.asarray(scales.values, np.float32)[axis - len(size)]
        return attributes, {"scales": factors}
    written = _sizes(node.outputs[0], node.op)
    sizes = [size[axis], 1, *(written[place] if place == axis else 1 for place in (2, 3))]
    return attributes, {"sizes": np.array(sizes, np.int64)}


def _global_average(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    x = node.inputs[0]
    return (_spread(tape, x, tape("Div", slopes[0], _count(tape, x, node.outputs[0]))),)


def _count(tape: Tape, x: gs.Tensor, reduced: Any) -> Any:
    """Number of values behind each reduced value, as float."""
    return tape("Cast", tape("Div", tape("Size", x), tape("Size", reduced)), to=onnx.TensorProto.FLOAT)


def _spread(tape: Tape, x: gs.Tensor, slope: Any) -> Any:
    return tape("Expand", slope, tape.shape(x))


def _reduced(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    x = node.inputs[0]
    whole = node.outputs[0] if node.attrs.get("keepdims", 1) else tape.again(node, node.inputs, keepdims=1)[0]
    slope = slopes[0] if whole is node.outputs[0] else tape.shaped(slopes[0], whole)
    if node.op == "ReduceMean":
        slope = tape("Div", slope, _count(tape, x, whole))
    if node.op in ("ReduceMax", "ReduceMin"):
        return (tape.masked(tape("Equal", x, whole), slope),)
    return (_spread(tape, x, slope),)


def _kept(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    """An operator that keeps some values: the gradient is that of the places where input and output are equal."""
    return (tape.masked(tape("Equal", node.inputs[0], node.outputs[0]), slopes[0]),)


def _moved(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    """An operator that only moves values. Applied to their numbers, it shows where each gradient belongs."""
    x, *others = node.inputs
    places = tape.again(node, [tape.numbered(x), *others], len(node.outputs))
    parts = [tape.scattered(x, place, slope) for place, slope in zip(places, slopes, strict=True) if slope is not None]
    return (tape("Sum", *parts),) if len(parts) > 1 else tuple(parts)


def _slice(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    x, *limits = node.inputs
    size = sizes_of(x)
    if size is None or not all(tensor.is_empty() or isinstance(tensor, gs.Constant) for tensor in limits):
        return _moved(tape, node, slopes)
    starts, ends, axes, steps = (
        [] if tensor.is_empty() else tensor.values.reshape(-1).tolist()
        for tensor in (*limits, *(gs.Variable.empty(),) * (4 - len(limits)))
    )
    if any(step != 1 for step in steps):
        return _moved(tape, node, slopes)
    low, high = [0] * len(size), [0] * len(size)
    for start, end, axis in zip(starts, ends, axes or range(len(starts)), strict=True):
        kept = range(size[axis])[slice(start, end)]
        low[axis], high[axis] = kept.start, size[axis] - kept.stop
    return (tape("Pad", slopes[0], np.array([*low, *high], np.int64)),)


def _split(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    parts = [
        tape.zeros(tape.shape(output)) if slope is None else slope
        for output, slope in zip(node.outputs, slopes, strict=True)
    ]
    return (tape("Concat", *parts, axis=int(node.attrs.get("axis", 0))),)


def _concat(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    axis = int(node.attrs["axis"])
    sizes = [sizes_of(tensor) for tensor in node.inputs]
    if all(size is not None for size in sizes):
        lengths: Any = np.array([size[axis] for size in sizes if size is not None], np.int64)
    else:
        at = np.array([axis], np.int64)
        lengths = tape("Concat", *(tape("Gather", tape("Shape", each), at) for each in node.inputs), axis=0)
    return tape.several("Split", [slopes[0], lengths], len(node.inputs), axis=axis)


def _reshaped(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    return (tape.shaped(slopes[0], node.inputs[0]),)


def _transpose(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    order = node.attrs.get("perm")
    back = {} if order is None else {"perm": np.argsort(order).tolist()}
    return (tape("Transpose", slopes[0], **back),)


def _gather(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    if int(node.attrs.get("axis", 0)):
        return _moved(tape, node, slopes)
    x, rows = node.inputs
    zeros, places = tape.zeros(tape.shape(x)), tape("Unsqueeze", rows, np.array([-1], np.int64))
    return (tape("ScatterND", zeros, places, slopes[0], reduction="add"),)


def _scatter(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    if node.attrs.get("reduction", "none") != "none":
        raise NotImplementedError("ScatterND that adds up")
    _, places, updates = node.inputs
    kept = tape("ScatterND", slopes[0], places, tape.zeros(tape("Shape", updates)))
    return kept, None, tape("GatherND", slopes[0], places)


def _top(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    """The choice itself has no gradient, only the chosen values."""
    zeros, axis = tape.zeros(tape.shape(node.inputs[0])), int(node.attrs.get("axis", -1))
    return (tape("ScatterElements", zeros, node.outputs[1], slopes[0], axis=axis),)


def _pad(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    if node.attrs.get("mode", "constant") != "constant":
        raise NotImplementedError("a Pad that repeats values")
    axes = node.inputs[3] if len(node.inputs) > 3 else None
    return (tape("Pad", slopes[0], tape("Neg", node.inputs[1]), None, axes),)


def _expanded(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    return (tape.summed(slopes[0], node.inputs[0], sizes_of(node.outputs[0])),)


def _space(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    """Both modes as a Reshape, a Transpose and a Reshape."""
    size, side = _sizes(node.inputs[0], node.op), int(node.attrs["blocksize"])
    batch, channels, rows, columns = size
    if node.op == "SpaceToDepth":
        split = (batch, side, side, channels, rows // side, columns // side)
        order = [0, 3, 4, 1, 5, 2]
    else:
        few = channels // side**2
        split = (batch, few, rows, side, columns, side)
        order = [0, 1, 3, 5, 2, 4] if node.attrs.get("mode", "DCR") == "CRD" else [0, 3, 5, 1, 2, 4]
    parts = tape("Transpose", tape("Reshape", slopes[0], np.array(split, np.int64)), perm=order)
    return (tape("Reshape", parts, np.array(size, np.int64)),)


def _turned(tape: Tape, x: gs.Tensor) -> Any:
    """A matrix with its last two axes exchanged."""
    if isinstance(x, gs.Constant):
        return np.ascontiguousarray(np.asarray(x.values).swapaxes(-1, -2))
    if x.shape is None:
        raise NotImplementedError("a product of unknown rank")
    order = list(range(len(x.shape)))
    return tape("Transpose", x, perm=[*order[:-2], order[-1], order[-2]])


def _matmul(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    first, other = node.inputs
    if isinstance(other, gs.Constant) and other.values.ndim == 1:
        return (tape("Mul", tape("Unsqueeze", slopes[0], np.array([-1], np.int64)), other),)
    if any(tensor.shape is None or len(tensor.shape) < 2 for tensor in (first, other)):
        raise NotImplementedError("a product with a vector")
    products = tape("MatMul", slopes[0], _turned(tape, other)), tape("MatMul", _turned(tape, first), slopes[0])
    written = sizes_of(node.outputs[0])
    # Batch axes may be broadcast.
    return [
        tape.summed(product, factor, None if written is None else (*written[:-2], *factor.shape[-2:]))
        for product, factor in zip(products, (first, other), strict=True)
    ]


def _gemm(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    first, other, *rest = node.inputs
    scale = np.float32(node.attrs.get("alpha", 1.0))
    slope = tape("Mul", slopes[0], scale)
    turned = [bool(node.attrs.get(key, 0)) for key in ("transA", "transB")]
    # For y = A' B' the gradient of A' is that of y times the transpose of B'; a transposed input gets its transpose.
    own = tape("MatMul", slope, other if turned[1] else _turned(tape, other))
    its = tape("MatMul", first if turned[0] else _turned(tape, first), slope)
    parts = [
        tape("Transpose", part, perm=[1, 0]) if swap else part for part, swap in zip((own, its), turned, strict=True)
    ]
    if rest:
        bias = tape("Mul", slopes[0], np.float32(node.attrs.get("beta", 1.0)))
        parts.append(tape.summed(bias, rest[0], sizes_of(node.outputs[0])))
    return parts


def _einsum(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    sides = str(node.attrs["equation"]).replace(" ", "").split("->")
    terms = sides[0].split(",")
    if len(sides) != 2 or any("." in term or len(set(term)) != len(term) for term in (*terms, sides[1])):
        raise NotImplementedError(f"Einsum of {node.attrs['equation']}")
    parts = []
    for place, term in enumerate(terms):
        others = [
            (text, tensor)
            for index, (text, tensor) in enumerate(zip(terms, node.inputs, strict=True))
            if index != place
        ]
        letters = set(sides[1]).union(*(text for text, _ in others))
        if not set(term) <= letters:
            raise NotImplementedError(f"Einsum of {node.attrs['equation']}")
        equation = ",".join([sides[1], *(text for text, _ in others)]) + f"->{term}"
        parts.append(tape("Einsum", slopes[0], *(tensor for _, tensor in others), equation=equation))
    return parts


def _softmax(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    y, axis = node.outputs[0], int(node.attrs.get("axis", -1))
    total = tape.reduce("ReduceSum", tape("Mul", slopes[0], y), [axis])
    return (tape("Mul", y, tape("Sub", slopes[0], total)),)


def _batch_norm(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    """With the mean and variance of training."""
    x, scale, _, _, variance = node.inputs
    if not all(isinstance(tensor, gs.Constant) for tensor in (scale, variance)):
        raise NotImplementedError("BatchNormalization without constants")
    factor = scale.values / np.sqrt(variance.values + np.float32(node.attrs.get("epsilon", 1e-5)))
    return (tape("Mul", slopes[0], factor.reshape(-1, *(1,) * (len(x.shape or (0,) * 4) - 2)).astype(np.float32)),)


def _layer_norm(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    x, scale = node.inputs[:2]
    if x.shape is None:
        raise NotImplementedError("LayerNormalization of unknown rank")
    axes = list(range(int(node.attrs.get("axis", -1)) % len(x.shape), len(x.shape)))
    centred = tape("Sub", x, tape.reduce("ReduceMean", x, axes))
    variance = tape.reduce("ReduceMean", tape("Mul", centred, centred), axes)
    inverse = tape("Reciprocal", tape("Sqrt", tape("Add", variance, np.float32(node.attrs.get("epsilon", 1e-5)))))
    normal, slope = tape("Mul", centred, inverse), tape("Mul", slopes[0], scale)
    along = tape("Mul", normal, tape.reduce("ReduceMean", tape("Mul", slope, normal), axes))
    rest = tape("Sub", tape("Sub", slope, tape.reduce("ReduceMean", slope, axes)), along)
    return (tape("Mul", inverse, rest),)


def _arithmetic(each: Callable[..., tuple[Any, Any]]) -> Derivative:
    """The derivative of an operator on two broadcast tensors.

    ``each`` takes the tape, both tensors, the result and its gradient, and returns the gradients of both tensors.
    """

    def derivative(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
        y = node.outputs[0]
        parts = each(tape, *node.inputs, y, slopes[0])
        return [
            None if part is None or isinstance(tensor, gs.Constant) else tape.summed(part, tensor, sizes_of(y))
            for tensor, part in zip(node.inputs, parts, strict=True)
        ]

    return derivative


def _power(tape: Tape, x: Any, exponent: Any, y: Any, slope: Any) -> tuple[Any, Any]:
    if not isinstance(exponent, gs.Constant):
        raise NotImplementedError("Pow with a computed exponent")
    powers = np.asarray(exponent.values, np.float32)
    return tape("Mul", slope, tape("Mul", tape("Pow", x, powers - 1), powers)), None


def _quotient(tape: Tape, x: Any, divisor: Any, y: Any, slope: Any) -> tuple[Any, Any]:
    share = tape("Div", slope, divisor)
    return share, tape("Neg", tape("Mul", share, y))


def _extreme(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    """Min and Max: the gradient belongs to the input that is the result."""
    y = node.outputs[0]
    return [
        None if isinstance(x, gs.Constant) else tape.summed(tape.masked(tape("Equal", x, y), slopes[0]), x, sizes_of(y))
        for x in node.inputs
    ]


def _where(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    condition, first, other = node.inputs
    wide, zero = sizes_of(node.outputs[0]), np.float32(0)
    mine, its = tape("Where", condition, slopes[0], zero), tape("Where", condition, zero, slopes[0])
    return None, tape.summed(mine, first, wide), tape.summed(its, other, wide)


def _prelu(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    x, steepness = node.inputs
    return (tape("Where", tape("Less", x, np.float32(0)), tape("Mul", slopes[0], steepness), slopes[0]),)


def _each(factor: Callable[..., Any], **defaults: float) -> Derivative:
    """The derivative of an element-wise function.

    ``factor`` takes the tape, the input, the output, and the attributes with these defaults; it returns the factor of
    the gradient.
    """

    def derivative(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
        settings = [np.float32(node.attrs.get(key, value)) for key, value in defaults.items()]
        return (tape("Mul", slopes[0], factor(tape, node.inputs[0], node.outputs[0], *settings)),)

    return derivative


def _between(tape: Tape, x: Any, low: float, high: float) -> Any:
    """1 where low < x < high, else 0."""
    inside = tape("And", tape("Greater", x, np.float32(low)), tape("Less", x, np.float32(high)))
    return tape("Cast", inside, to=onnx.TensorProto.FLOAT)


def _sigmoid_factor(tape: Tape, x: Any, y: Any) -> Any:
    return tape("Mul", y, tape("Sub", np.float32(1), y))


def _tanh_factor(tape: Tape, x: Any, y: Any) -> Any:
    return tape("Sub", np.float32(1), tape("Mul", y, y))


def _swish_factor(tape: Tape, x: Any, y: Any, alpha: np.float32) -> Any:
    s = tape("Sigmoid", tape("Mul", x, alpha))
    return tape("Add", s, tape("Mul", tape("Mul", y, alpha), tape("Sub", np.float32(1), s)))


def _hard_swish_factor(tape: Tape, x: Any, y: Any) -> Any:
    line = tape("Add", tape("Mul", x, np.float32(1 / 3)), np.float32(0.5))
    middle = tape("Mul", line, _between(tape, x, low=-3, high=3))
    above = tape("Cast", tape("GreaterOrEqual", x, np.float32(3)), to=onnx.TensorProto.FLOAT)
    return tape("Add", middle, above)


def _mish_factor(tape: Tape, x: Any, y: Any) -> Any:
    t = tape("Tanh", tape("Softplus", x))
    rest = tape("Mul", tape("Mul", x, tape("Sigmoid", x)), _tanh_factor(tape, x, t))
    return tape("Add", t, rest)


def _gelu(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    x, half = node.inputs[0], np.float32(0.5)
    if node.attrs.get("approximate", "none") == "tanh":
        root = np.float32(math.sqrt(2 / math.pi))
        cube = tape("Mul", tape("Mul", x, x), x)
        t = tape("Tanh", tape("Mul", tape("Add", x, tape("Mul", cube, np.float32(0.044715))), root))
        inner = tape("Mul", tape("Add", tape("Mul", tape("Mul", x, x), np.float32(0.134145)), np.float32(1)), root)
        first = tape("Mul", tape("Add", t, np.float32(1)), half)
        factor = tape("Add", first, tape("Mul", tape("Mul", tape("Mul", x, half), _tanh_factor(tape, x, t)), inner))
    else:
        area = tape("Mul", tape("Add", tape("Erf", tape("Mul", x, np.float32(math.sqrt(0.5)))), np.float32(1)), half)
        bell = tape("Exp", tape("Mul", tape("Mul", x, x), -half))
        factor = tape("Add", area, tape("Mul", tape("Mul", x, bell), np.float32(1 / math.sqrt(2 * math.pi))))
    return (tape("Mul", slopes[0], factor),)


def _erf_factor(tape: Tape, x: Any, y: Any) -> Any:
    return tape("Mul", tape("Exp", tape("Neg", tape("Mul", x, x))), np.float32(2 / math.sqrt(math.pi)))


def _cast(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    return (tape("CastLike", slopes[0], node.inputs[0]),)


def _same(tape: Tape, node: gs.Node, slopes: Slopes) -> Sequence[Any]:
    return (slopes[0],)


OPERATORS: dict[str, Derivative] = {
    "Add": _arithmetic(lambda tape, x, other, y, slope: (slope, slope)),
    "Sub": _arithmetic(lambda tape, x, other, y, slope: (slope, tape("Neg", slope))),
    "Mul": _arithmetic(lambda tape, x, other, y, slope: (tape("Mul", slope, other), tape("Mul", slope, x))),
    "Div": _arithmetic(_quotient),
    "Pow": _arithmetic(_power),
    "Min": _extreme,
    "Max": _extreme,
    "Where": _where,
    "Clip": _kept,
    "Cast": _cast,
    "Identity": _same,
    "Dropout": _same,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _max_pool,
    "AveragePool": _separable,
    "Resize": _separable,
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _kept,
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"), _reduced),
    **dict.fromkeys(("GatherElements", "GatherND", "Tile"), _moved),
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze", "Flatten"), _reshaped),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _space),
    "Gather": _gather,
    "Slice": _slice,
    "Split": _split,
    "Concat": _concat,
    "Transpose": _transpose,
    "ScatterND": _scatter,
    "TopK": _top,
    "Pad": _pad,
    "Expand": _expanded,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Softmax": _softmax,
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "PRelu": _prelu,
    "Gelu": _gelu,
    "Sigmoid": _each(_sigmoid_factor),
    "Tanh": _each(_tanh_factor),
    "Relu": _each(lambda tape, x, y: tape("Sign", y)),
    "LeakyRelu": _each(
        lambda tape, x, y, alpha: tape("Where", tape("Less", x, np.float32(0)), alpha, np.float32(1)), alpha=0.01
    ),
    "Elu": _each(
        lambda tape, x, y, alpha: tape("Where", tape("Less", x, np.float32(0)), tape("Add", y, alpha), np.float32(1)),
        alpha=1.0,
    ),
    "Exp": _each(lambda tape, x, y: y),
    "Log": _each(lambda tape, x, y: tape("Reciprocal", x)),
    "Sqrt": _each(lambda tape, x, y: tape("Div", np.float32(0.5), y)),
    "Sin": _each(lambda tape, x, y: tape("Cos", x)),
    "Cos": _each(lambda tape, x, y: tape("Neg", tape("Sin", x))),
    "Abs": _each(lambda tape, x, y: tape("Sign", x)),
    "Neg": _each(lambda tape, x, y: np.float32(-1)),
    "Reciprocal": _each(lambda tape, x, y: tape("Neg", tape("Mul", y, y))),
    "Erf": _each(_erf_factor),
    "Softplus": _each(lambda tape, x, y: tape("Sigmoid", x)),
    "Mish": _each(_mish_factor),
    "HardSwish": _each(_hard_swish_factor),
    "HardSigmoid": _each(
        lambda tape, x, y, alpha, beta: tape("Mul", _between(tape, y, low=0, high=1), alpha), alpha=0.2, beta=0.5
    ),
    "Swish": _each(_swish_factor, alpha=1.0),
}
"""By operator type."""
