"""Suppressions of a two-stage graph: their guards, score thresholds and limits.

If(no boxes) { nothing } else { NonMaxSuppression(boxes) } -> NonMaxSuppression(boxes)

The tracing exporter writes torchvision's test for an empty tensor as an ``If``. The suppression of no boxes gives no
boxes, so its branch can always run. It starts with the maximum of all coordinates, which some runtimes refuse for an
empty tensor, so the lowest float is appended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from trtdet.passes.base import PassResult, Writer, rewrite_nodes
from trtdet.passes.provenance import Origin
from trtdet.passes.walk import above, constant, maker, redirect

LOWEST = np.finfo(np.float32).min  # no score and no coordinate is lower

_UNLIMITED = np.iinfo(np.int32).max


def inline_guards(graph: gs.Graph) -> PassResult:
    """Inlines the branch of each guarded suppression, in place."""
    return rewrite_nodes(graph, _inline, "If")


def _inline(graph: gs.Graph, node: gs.Node) -> str | None:
    nothing, branch = node.attrs["then_branch"], node.attrs["else_branch"]
    if not any(inner.op == "NonMaxSuppression" for inner in branch.nodes):
        return None
    if len(node.outputs) != 1 or len(branch.outputs) != 1:
        return "it has several outputs"
    if any(inner.op in ("If", "Loop", "Scan") for inner in branch.nodes):
        return "its branch holds a branch of its own"
    for inner in nothing.nodes:
        if inner.op not in ("Constant", "ConstantOfShape", "Identity", "Cast"):
            return f"without boxes it computes something: {inner.op}"
    shape = nothing.outputs[0].shape
    if shape is None or 0 not in shape:
        return f"without boxes it gives shape {shape}, not an empty tensor"
    test = maker(above(node.inputs[0], "Cast"), "Equal")
    if test is None or maker(above(test.inputs[0], "Cast"), "ReduceProd", "Size") is None:
        return "its condition is not that there are no boxes"
    write = Writer(graph, f"{node.name or 'If'}/inlined", Origin.LOWERING)
    for inner in branch.nodes:
        inner.name = f"{write.prefix}/{inner.name or inner.op}"
        for tensor in inner.outputs:
            tensor.name = f"{write.prefix}/{tensor.name}"
        graph.nodes.append(inner)
    for inner in branch.nodes:
        if inner.op == "ReduceMax":
            flat = write("Reshape", inner.inputs[0], write.const([-1], np.int64))
            inner.inputs = [write("Concat", flat, write.const([LOWEST], np.float32), axis=0)]
            inner.attrs = {"keepdims": 0}
    redirect(graph, node.outputs[0], branch.outputs[0])
    node.outputs.clear()
    return ""


def write_thresholds(graph: gs.Graph) -> PassResult:
    """Gives each suppression without a score threshold one below every score, in place.

    Without a threshold, ONNX keeps every box; TensorRT uses 0 and loses proposals with negative logits.
    """
    count, write = 0, Writer(graph, "trtdet/threshold", Origin.LOWERING)
    for node in [node for node in graph.nodes if node.op == "NonMaxSuppression"]:
        inputs = [None if tensor.is_empty() else tensor for tensor in node.inputs] + [None] * (5 - len(node.inputs))
        if inputs[4] is None:
            most = write.const([_UNLIMITED], np.int64) if inputs[2] is None else inputs[2]
            overlap = write.const([0], np.float32) if inputs[3] is None else inputs[3]
            node.inputs = [*inputs[:2], most, overlap, write.const([LOWEST], np.float32)]
            count += 1
    return PassResult(count)


@dataclass(frozen=True)
class Limit:
    """The limit of the boxes behind a suppression."""

    indices: gs.Variable  # int64 (n,), the selected boxes, best first
    slice: gs.Node | None  # keeps the first ``count``; None if the suppression itself is limited
    count: int

    @property
    def kept(self) -> gs.Variable:
        """The first ``count`` of ``indices``."""
        return self.indices if self.slice is None else self.slice.outputs[0]


def limit_of(node: gs.Node) -> Limit | str:
    """The limit behind a suppression, or the reason why there is none."""
    column = _column(node)
    if column is None:
        return "its selected boxes are read in another form than their indices"
    most = constant(node, 2)
    slices = [reader for reader in column.outputs if reader.op == "Slice" and reader.inputs[0] is column]
    if not slices:
        limited = most is not None and 0 < most < _UNLIMITED
        return Limit(column, slice=None, count=int(most or 0)) if limited else "no slice limits its boxes"
    if len(slices) > 1:
        return f"{len(slices)} slices of its boxes are read"
    (kept,) = slices
    start, stop, step = constant(kept, 1), constant(kept, 2), constant(kept, 4)
    if start != 0 or stop is None or stop <= 0 or stop >= _UNLIMITED or step not in (None, 1):
        return f"the slice behind it is [{start}:{stop}:{step}], not the first of its boxes"
    return Limit(column, slice=kept, count=int(stop))


def fold_limits(graph: gs.Graph) -> PassResult:
    """NonMaxSuppression -> Slice [0:K] becomes NonMaxSuppression of at most K, in place.

    Only for one class of one image: the operator's limit is per class.
    """
    return rewrite_nodes(graph, _fold_limit, "NonMaxSuppression")


def _fold_limit(graph: gs.Graph, node: gs.Node) -> str | None:
    limit = limit_of(node)
    if isinstance(limit, str):
        return limit
    if limit.slice is None:
        return None
    shape = list(node.inputs[1].shape or ())
    if len(shape) != 3 or shape[:2] != [1, 1]:
        return f"its scores have shape {shape}, and the limit counts for each class of each image; it takes [1, 1, N]"
    for reader in limit.indices.outputs:
        if reader is not limit.slice and minima(reader, limit.count) is None:
            return f"{reader.op} reads its boxes before the slice"
    node.inputs[2] = Writer(graph, f"{node.name}/limit", Origin.LOWERING).const([limit.count], np.int64)
    redirect(graph, limit.slice.outputs[0], limit.indices)
    limit.slice.outputs.clear()
    return ""


def minima(node: gs.Node, limit: int) -> list[tuple[gs.Node, int]] | None:
    """The Min nodes, with input index, that limit the number of boxes ``node`` reads; None if a use has no limit."""
    if node.op != "Shape":
        return None
    limits: list[tuple[gs.Node, int]] = []
    queue = list(node.outputs)
    for reader in (reader for tensor in queue for reader in tensor.outputs):
        if reader.op in ("Slice", "Squeeze", "Gather", "Reshape", "Identity"):
            queue += reader.outputs
            continue
        positions = [at for at in range(len(reader.inputs)) if constant(reader, at) == limit]
        if reader.op != "Min" or not positions:
            return None
        limits.append((reader, positions[0]))
    return limits


def _column(node: gs.Node) -> gs.Variable | None:
    """Box indices int64 (n,) of the rows (image, class, box) of a suppression; None if they are read in another way."""
    readers = node.outputs[0].outputs
    if len(readers) != 1:
        return None
    (reader,) = readers
    if reader.op == "Gather":
        third = reader.attrs.get("axis", 0) == 1 and constant(reader, 1) == 2
    else:
        third = reader.op == "Slice" and [constant(reader, at) for at in (1, 2, 3)] == [2, 3, 1]
    if not third:
        return None
    column = reader.outputs[0]
    while len(column.outputs) == 1 and column.outputs[0].op in ("Squeeze", "Reshape", "Cast"):
        column = column.outputs[0].outputs[0]
    return column if above(column, "Squeeze", "Reshape", "Cast", reader.op) is node.outputs[0] else None


def in_order(graph: gs.Graph) -> list[gs.Node]:
    """Suppressions of a sorted graph, that of the proposals first."""
    return [node for node in graph.nodes if node.op == "NonMaxSuppression" and maker(node.outputs[0]) is node]
