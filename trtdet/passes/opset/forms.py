"""Older forms of operators. A form belongs to the opset that changed the operator.

It writes nodes that compute the same before that opset, or raises ``InexpressibleError``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx

from trtdet.passes.base import NodeWriter
from trtdet.passes.opset.nodes import InexpressibleError, Scope, text_of
from trtdet.passes.protobuf import attribute


def _reduce(write: NodeWriter, scope: Scope) -> None:
    """18: the axes are an input."""
    node = write.node
    axes = [int(axis) for axis in scope.constant(node.input[1], "axes").reshape(-1)] if write.input(1) else []
    noop = attribute(node, "noop_with_empty_axes", 0)
    write.drop("noop_with_empty_axes")
    if noop and not axes:
        if node.op_type not in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
            raise InexpressibleError("it reduces over no axes (noop_with_empty_axes), which exists from opset 18 on")
        write("Identity", node.input[0])
        write.instead()
        return
    del node.input[1:]
    if axes:
        write.put("axes", axes)


def _split(write: NodeWriter, scope: Scope) -> None:
    """18: ``num_outputs`` is the number of parts; the last may be smaller."""
    node = write.node
    parts = attribute(node, "num_outputs")
    if parts is None:
        return
    size = scope.size(node.input[0], attribute(node, "axis", 0))
    write.drop("num_outputs")
    if size % parts:
        each = -(-size // parts)
        write.feed(1, write.const([each] * (parts - 1) + [size - each * (parts - 1)], np.int64))


def _pad(write: NodeWriter, scope: Scope) -> None:
    """18: ``axes`` lists the padded axes."""
    node = write.node
    if not write.input(3):
        return
    rank = scope.rank(node.input[0])
    axes = scope.constant(node.input[3], "axes").reshape(-1) % rank
    widths = np.zeros((2, rank), np.int64)
    widths[:, axes] = scope.constant(node.input[1], "widths").reshape(2, -1)
    write.feed(1, write.const(widths.reshape(-1), np.int64))
    del node.input[3:]


def _resize(write: NodeWriter, scope: Scope) -> None:
    """18: ``axes`` lists the resized axes."""
    node = write.node
    axes = attribute(node, "axes")
    if axes is None:
        return
    if write.input(1):
        raise InexpressibleError("it has a region of interest for some axes only, which exists from opset 18 on")
    rank = scope.rank(node.input[0])
    axes = [axis % rank for axis in axes]
    write.drop("axes")
    if axes == list(range(rank)):
        return
    if write.input(2):
        scales = np.ones(rank, np.float32)
        scales[axes] = scope.constant(node.input[2], "scales").reshape(-1)
        write.feed(2, write.const(scales, np.float32))
    elif axes == list(range(rank - len(axes), rank)):
        first = [write.const([at], np.int64) for at in (0, rank - len(axes), 0)]
        kept = write("Slice", write("Shape", node.input[0]), *first)
        write.feed(3, write("Concat", kept, node.input[3], axis=0))
    else:
        sizes = np.array([1 if axis in axes else scope.size(node.input[0], axis) for axis in range(rank)])
        sizes[axes] = scope.constant(node.input[3], "sizes").reshape(-1)
        write.feed(3, write.const(sizes, np.int64))


def _reshape(write: NodeWriter, scope: Scope) -> None:
    """14: with ``allowzero``, 0 in the shape is a size of 0."""
    node = write.node
    if attribute(node, "allowzero", 0) and np.all(scope.constant(node.input[1], "sizes")):
        write.drop("allowzero")


def _shape(write: NodeWriter, scope: Scope) -> None:
    """15: ``start`` and ``end`` select a part of the shape."""
    start, end = attribute(write.node, "start", 0), attribute(write.node, "end")
    if start == 0 and end is None:
        return
    last = np.iinfo(np.int64).max if end is None else end
    bounds = [write.const([bound], np.int64) for bound in (start, last, 0)]
    write("Slice", write("Shape", write.node.input[0]), *bounds)
    write.instead()


def _cast(write: NodeWriter, scope: Scope) -> None:
    """24: infinity becomes another float8 value."""
    kinds = (onnx.TensorProto.FLOAT8E4M3FNUZ, onnx.TensorProto.FLOAT8E5M2FNUZ)
    if scope.type(write.node.output[0]) in kinds:
        raise InexpressibleError("infinity becomes another value of that type from opset 24 on")


def _cast_like(write: NodeWriter, scope: Scope) -> None:
    """15: new operator."""
    kind = scope.type(write.node.input[1])
    if kind:
        write("Cast", write.node.input[0], to=kind)
        write.instead()


def _mod(write: NodeWriter, scope: Scope) -> None:
    """28: ``fmod = 0`` also takes floats, and the result has the divisor's sign."""
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16)
    if not attribute(write.node, "fmod", 0) and scope.type(write.node.input[0]) in floats:
        raise InexpressibleError("of floats it takes the sign of the divisor from opset 28 on only")


def _quantize(write: NodeWriter, scope: Scope) -> None:
    """21: ``output_dtype`` sets the output type; without it, the zero point's type is used."""
    node = write.node
    kind = attribute(node, "output_dtype", 0)
    if not kind:
        return
    shape = scope.shape(node.input[1])
    if not write.input(2) and (shape is None or None in shape):
        raise InexpressibleError(f"its attribute output_dtype = {kind} exists from opset 21 on")
    write.drop("output_dtype")
    if not write.input(2) and shape is not None:
        write.feed(2, write.const(np.zeros(shape), onnx.helper.tensor_dtype_to_np_dtype(kind)))


def _dequantize(write: NodeWriter, scope: Scope) -> None:
    """23: ``output_dtype`` sets the output type; without it, the scale's type is used."""
    if attribute(write.node, "output_dtype", 0) == scope.type(write.node.input[1]):
        write.drop("output_dtype")


def _pool(write: NodeWriter, scope: Scope) -> None:
    """22: with ``ceil_mode``, windows that start in the padding at the end are dropped."""
    node = write.node
    if not attribute(node, "ceil_mode", 0) or attribute(node, "auto_pad", b"").startswith(b"SAME"):
        return
    kernel = attribute(node, "kernel_shape")
    strides, dilations = (attribute(node, name, [1] * len(kernel)) for name in ("strides", "dilations"))
    pads = np.array(attribute(node, "pads", [0] * 2 * len(kernel))).reshape(2, -1)
    for axis, window in enumerate(kernel):
        size = scope.size(node.input[0], axis + 2)
        reach = dilations[axis] * (window - 1) + 1
        windows = -(-(size + pads[:, axis].sum() - reach) // strides[axis]) + 1
        if (windows - 1) * strides[axis] >= size + pads[0, axis]:
            raise InexpressibleError(
                f"its last window along axis {axis + 2} starts in the padding, which is left out from opset 22 on and "
                "counted before"
            )


def _roi_align(write: NodeWriter, scope: Scope) -> None:
    """16: the sampling grid can be moved by half a pixel, and is by default."""
    mode = attribute(write.node, "coordinate_transformation_mode", b"half_pixel")
    if mode != b"output_half_pixel":
        raise InexpressibleError(f"coordinate_transformation_mode = {text_of(mode)} exists from opset 16 on")
    write.drop("coordinate_transformation_mode")


def _grid_sample(write: NodeWriter, scope: Scope) -> None:
    """20: new names of the modes; any number of axes."""
    node = write.node
    if scope.rank(node.input[0]) != 4:
        raise InexpressibleError("inputs other than (N, C, H, W) exist from opset 20 on")
    mode = attribute(node, "mode", b"linear").decode()
    write.put("mode", {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode))


def _swish(write: NodeWriter, scope: Scope) -> None:
    """24: new operator. ONNX's definition multiplies by ``alpha`` even if it is 1."""
    node = write.node
    if attribute(node, "alpha", 1.0) == 1.0:
        write("Mul", node.input[0], write("Sigmoid", node.input[0]))
        write.instead()


def _group_normalization(write: NodeWriter, scope: Scope) -> None:
    """21: scale and bias are per channel.

    InstanceNormalization with groups as channels computes the same (Wu and He, "Group Normalization", ECCV 2018,
    section 3.1). ONNX's own definition computes the variance as a difference of two means, which loses digits.
    """
    node = write.node
    source, scale, bias = node.input
    groups, rank = attribute(node, "num_groups"), scope.rank(source)
    kind, computed = scope.type(source), attribute(node, "stash_type", onnx.TensorProto.FLOAT)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(computed)
    normal = write("Reshape", source, write.const([0, groups, -1], np.int64))
    if computed != kind:
        normal = write("Cast", normal, to=computed)
    ones, zeros = write.const(np.ones(groups), dtype), write.const(np.zeros(groups), dtype)
    normal = write("InstanceNormalization", normal, ones, zeros, epsilon=attribute(node, "epsilon", 1e-5))
    if computed != kind:
        normal = write("Cast", normal, to=kind)
    trailing = write.const(range(1, rank - 1), np.int64)
    normal = write("Reshape", normal, write("Shape", source))
    scaled = write("Mul", normal, write("Unsqueeze", scale, trailing))
    write("Add", scaled, write("Unsqueeze", bias, trailing))
    write.instead()


FORMS: Mapping[str, Mapping[int, Callable[[NodeWriter, Scope], None] | str]] = {
    **{f"Reduce{kind}": {18: _reduce} for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod")},
    "ReduceSumSquare": {18: _reduce},
    "Split": {18: _split},
    "Pad": {18: _pad},
    "Resize": {18: _resize},
    "Reshape": {14: _reshape},
    "Shape": {15: _shape},
    "Cast": {24: _cast},
    "CastLike": {15: _cast_like, 24: _cast},
    "Mod": {28: _mod},
    "QuantizeLinear": {21: _quantize},
    "DequantizeLinear": {23: _dequantize},
    "AveragePool": {22: _pool},
    "MaxPool": {22: _pool},
    "RoiAlign": {16: _roi_align},
    "GridSample": {20: _grid_sample},
    "Swish": {24: _swish},
    "GroupNormalization": {21: _group_normalization},
    "Attention": {24: "it hides other keys from opset 24 on"},
    "DFT": {20: "its axis is an input from opset 20 on"},
}
"""Forms by operator and by the opset that changed it; instead of a form the reason why there is none."""


def older_form(node: onnx.NodeProto, scope: Scope) -> list[onnx.NodeProto]:
    """The older form of a node in the opsets of ``scope``; a copy of the node if it did not change. Raises
    InexpressibleError if the older opset cannot express it."""
    write = NodeWriter(node)
    for version, form in FORMS.get(node.op_type, {}).items():
        if scope.target < version <= scope.source and not write.replaced:
            if isinstance(form, str):
                raise InexpressibleError(form)
            form(write, scope)
    return write.nodes if write.replaced else [*write.nodes, write.node]
