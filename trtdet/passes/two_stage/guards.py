"""If(no boxes) { nothing } else { NonMaxSuppression(boxes) } -> NonMaxSuppression(boxes)

The tracing exporter writes torchvision's test for an empty tensor as an ``If``. The suppression itself gives nothing
for no boxes, so its branch can always run. What may not run on nothing is the largest coordinate that it starts with:
a maximum of no elements is refused by some runtimes, so the lowest float joins it.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trtdet.passes.base import PassResult, Writer
from trtdet.passes.provenance import Origin
from trtdet.passes.two_stage.walk import above, maker, redirect

LOWEST = np.finfo(np.float32).min
"""No score and no coordinate is below it."""


def inline(graph: gs.Graph) -> PassResult:
    """Puts the branch of each guarded suppression into the graph, in place."""
    count, skipped = 0, []
    for node in [node for node in graph.nodes if node.op == "If"]:
        branch = node.attrs["else_branch"]
        if not any(inner.op == "NonMaxSuppression" for inner in branch.nodes):
            continue
        obstacle = _obstacle(node)
        if obstacle:
            skipped.append(f"{node.name}: {obstacle}")
            continue
        _inline(graph, node, branch)
        count += 1
    if count:
        graph.cleanup().toposort()
    return PassResult(count, tuple(skipped))


def _obstacle(node: gs.Node) -> str:
    nothing, branch = node.attrs["then_branch"], node.attrs["else_branch"]
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
    return ""


def _inline(graph: gs.Graph, node: gs.Node, branch: gs.Graph) -> None:
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
    (found,) = branch.outputs
    redirect(graph, node.outputs[0], found)
    node.outputs.clear()
