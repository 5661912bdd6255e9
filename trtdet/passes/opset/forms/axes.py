"""Operators whose axes or parts were attributes, or had to be all: reductions, Split, Pad, Resize, Reshape, Shape."""

from __future__ import annotations

import numpy as np
import onnx

from trtdet.passes.opset.nodes import NodeWriter, attribute
from trtdet.passes.opset.scope import InexpressibleError, Scope


def _reduce(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """18: the axes are an input."""
    if not scope.crosses(18):
        return write.before()
    node = write.node
    axes = [int(axis) for axis in scope.constant(node.input[1], "axes").reshape(-1)] if write.input(1) else []
    noop = attribute(node, "noop_with_empty_axes", 0)
    write.drop("noop_with_empty_axes")
    if noop and not axes:
        if node.op_type not in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
            raise InexpressibleError("it reduces over no axes (noop_with_empty_axes), which exists from opset 18 on")
        write("Identity", node.input[0])
        return write.instead()
    del node.input[1:]
    if axes:
        write.put("axes", axes)
    return write.before()


def _split(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """18: ``num_outputs`` is the number of parts, the last may be smaller."""
    node = write.node
    parts = attribute(node, "num_outputs")
    if not scope.crosses(18) or parts is None:
        return write.before()
    size = scope.size(node.input[0], attribute(node, "axis", 0))
    write.drop("num_outputs")
    if size % parts:
        each = -(-size // parts)
        write.feed(1, write.const([each] * (parts - 1) + [size - each * (parts - 1)], np.int64))
    return write.before()


def _pad(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """18: ``axes`` lists the axes of the widths."""
    node = write.node
    if not scope.crosses(18) or not write.input(3):
        return write.before()
    rank = scope.rank(node.input[0])
    axes = scope.constant(node.input[3], "axes").reshape(-1) % rank
    widths = np.zeros((2, rank), np.int64)
    widths[:, axes] = scope.constant(node.input[1], "widths").reshape(2, -1)
    write.feed(1, write.const(widths.reshape(-1), np.int64))
    del node.input[3:]
    return write.before()


def _resize(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """18: ``axes`` lists the axes of the scales or sizes."""
    node = write.node
    axes = attribute(node, "axes")
    if not scope.crosses(18) or axes is None:
        return write.before()
    if write.input(1):
        raise InexpressibleError("it has a region of interest for some axes only, which exists from opset 18 on")
    rank = scope.rank(node.input[0])
    axes = [axis % rank for axis in axes]
    write.drop("axes")
    if axes == list(range(rank)):
        return write.before()
    if write.input(2):
        scales = np.ones(rank, np.float32)
        scales[axes] = scope.constant(node.input[2], "scales").reshape(-1)
        write.feed(2, write.const(scales, np.float32))
    elif axes == list(range(rank - len(axes), rank)):
        first = [write.const([at], np.int64) for at in (0, rank - len(axes), 0)]
        others = write("Slice", write("Shape", node.input[0]), *first)
        write.feed(3, write("Concat", others, node.input[3], axis=0))
    else:
        sizes = np.array([1 if axis in axes else scope.size(node.input[0], axis) for axis in range(rank)])
        sizes[axes] = scope.constant(node.input[3], "sizes").reshape(-1)
        write.feed(3, write.const(sizes, np.int64))
    return write.before()


def _reshape(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """14: with ``allowzero`` a zero in the shape is meant."""
    node = write.node
    if scope.crosses(14) and attribute(node, "allowzero", 0) and np.all(scope.constant(node.input[1], "sizes")):
        write.drop("allowzero")
    return write.before()


def _shape(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """15: a part of the shape."""
    start, end = attribute(write.node, "start", 0), attribute(write.node, "end")
    if not scope.crosses(15) or (start == 0 and end is None):
        return write.before()
    last = np.iinfo(np.int64).max if end is None else end
    bounds = [write.const([bound], np.int64) for bound in (start, last, 0)]
    write("Slice", write("Shape", write.node.input[0]), *bounds)
    return write.instead()


FORMS = {
    **dict.fromkeys(
        (
            *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
            *("ReduceProd", "ReduceSumSquare"),
        ),
        _reduce,
    ),
    "Split": _split,
    "Pad": _pad,
    "Resize": _resize,
    "Reshape": _reshape,
    "Shape": _shape,
}
