"""Number of proposals that enter the suppression of the first stage, and the second stage.

Both are constants of an exported graph. Lower numbers make the suppression or the second stage faster and cost recall.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.passes.base import PassResult, Writer
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.provenance import Origin
from trtdet.passes.two_stage.suppressions import in_order, limit_of, minima
from trtdet.passes.walk import constant, downstream, picks, upstream

BOXES = "trtdet/proposals/boxes"
"""float32 (n, 4), proposals that enter the second stage, xyxy in input pixels, best first."""

REAL = "trtdet/proposals/real"  # bool (n,), for a fixed n: False for boxes that were suppressed or filtered out


def name_boxes(graph: gs.Graph) -> None:
    """Names the tensor of proposals that enter the second stage ``BOXES``, in place, if there is one."""
    nodes = in_order(graph)
    limit = limit_of(nodes[0]) if len(nodes) > 1 else ""
    if isinstance(limit, str):
        return
    for node in picks(limit.kept):
        boxes = node.inputs[0].shape
        if boxes is not None and len(boxes) == 2 and boxes[1] == 4:
            node.outputs[0].name = BOXES
            return


def up_to_proposals(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """The part of a rewritten model that gives ``BOXES`` and, if present, ``REAL``; None without ``BOXES``."""
    graph = to_graph(model)
    tensors = graph.tensors()
    if BOXES not in tensors:
        return None
    graph.outputs = [tensors[name] for name in (BOXES, REAL) if name in tensors]
    for tensor, kind in zip(graph.outputs, (np.float32, np.bool_), strict=False):
        tensor.dtype = np.dtype(kind)
    graph.cleanup().toposort()
    return to_model(graph)


def limit_before(graph: gs.Graph, count: int) -> PassResult:
    """Keeps at most the best ``count`` anchors of each level, in place, and adapts dependent constants."""
    suppressions = in_order(graph)
    # The TopK of each level, before the suppression of the proposals.
    choices = [node for node in upstream(suppressions[0].outputs[0]) if node.op == "TopK"] if suppressions else []
    if not choices:
        return PassResult(0, ("no TopK chooses anchors before a NonMaxSuppression",))
    counts = [constant(node, 1) for node in choices]
    if None in counts:
        return PassResult(0, (f"{choices[counts.index(None)].name}: its number of anchors is not constant",))
    before = [int(most or 0) for most in counts]
    after = [min(most, count) for most in before]
    sizes = {old: new for old, new in zip([*before, sum(before)], [*after, sum(after)], strict=True) if old != new}
    changed = [node for node, old in zip(choices, before, strict=True) if old in sizes]
    if changed:
        obstacle = _resize(graph, changed, sizes)
        if obstacle:
            return PassResult(0, (obstacle,))
        write = Writer(graph, f"{changed[0].name}/best", Origin.LOWERING)
        for node in changed:
            node.inputs[1] = write.const([count], np.int64)
        _forget_shapes(graph)
    return PassResult(len(changed))


def _resize(graph: gs.Graph, changed: list[gs.Node], sizes: dict[int, int]) -> str:
    """Adapts constants between TopK and suppression; or changes nothing and returns why one cannot be adapted."""
    replaced: list[tuple[gs.Node, int, gs.Constant]] = []
    write = Writer(graph, f"{changed[0].name}/sizes", Origin.LOWERING)
    for node in downstream(changed, "NonMaxSuppression"):
        for position, tensor in enumerate(node.inputs):
            if not isinstance(tensor, gs.Constant) or node.op == "TopK":
                continue
            values = np.asarray(tensor.values)
            if position == 1 and node.op in ("Reshape", "Expand"):
                resized = np.array([sizes.get(int(size), int(size)) for size in values], values.dtype)
            else:
                for axis in [axis for axis, size in enumerate(values.shape) if size in sizes]:
                    first = values.take([0], axis)
                    if not np.array_equal(np.broadcast_to(first, values.shape), values):
                        return f"{node.name}: a constant has a value for each of {values.shape[axis]} anchors"
                    values = np.repeat(first, sizes[values.shape[axis]], axis)
                resized = values
            if resized.shape != np.shape(tensor.values) or not np.array_equal(resized, tensor.values):
                replaced.append((node, position, write.const(resized, resized.dtype)))
    for node, position, constant_of_size in replaced:
        node.inputs[position] = constant_of_size
    return ""


def limit_after(graph: gs.Graph, count: int) -> PassResult:
    """Limits the second stage to the best ``count`` proposals, in place."""
    nodes = in_order(graph)
    if len(nodes) < 2:
        return PassResult(0, (f"the graph has {len(nodes)} NonMaxSuppression, and proposals have one of their own",))
    limit = limit_of(nodes[0])
    if isinstance(limit, str):
        return PassResult(0, (f"{nodes[0].name}: {limit}",))
    if count >= limit.count:
        return PassResult(0)
    kept = limit.slice or nodes[0]
    limits = [(kept, 2)]
    for reader in limit.indices.outputs:
        if reader is not kept:
            counted = minima(reader, limit.count)
            if counted is None and reader.op == "Shape":
                return PassResult(0, (f"{nodes[0].name}: the number of its boxes is used before the slice",))
            limits += counted or []
    write = Writer(graph, f"{nodes[0].name}/proposals", Origin.LOWERING)
    for node, position in limits:
        shape = np.shape(node.inputs[position].values)
        node.inputs[position] = write.const(np.full(shape, count), np.int64)
    _forget_shapes(graph)
    return PassResult(1)


def _forget_shapes(graph: gs.Graph) -> None:
    for tensor in (*(output for node in graph.nodes for output in node.outputs), *graph.outputs):
        tensor.shape = None
