"""Gather(Concat(Unsqueeze(x), Unsqueeze(y), ...), 0) -> x"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trtdet.passes.base import Options, PassResult, rewrite_nodes
from trtdet.passes.walk import maker, redirect


def apply(graph: gs.Graph, options: Options) -> PassResult:
    """Reads the chosen tensor of a stack directly, and removes what only the other tensors need.

    The DETR models of transformers stack the logits and boxes of all decoder layers and choose the last. The other
    heads are for training only, but would be quantised, built and run.
    """
    return rewrite_nodes(graph, _read_chosen, "Gather")


def _read_chosen(graph: gs.Graph, choice: gs.Node) -> str | None:
    """Replaces the choice by the chosen tensor; model outputs keep their names."""
    stack, index = maker(choice.inputs[0], "Concat"), choice.inputs[1]
    if stack is None:
        return None
    if not isinstance(index, gs.Constant) or index.values.ndim != 0:
        return "its index is not a single constant"
    makers = [node for tensor in stack.inputs if (node := maker(tensor, "Unsqueeze")) is not None]
    if len(makers) < len(stack.inputs):
        return "the joined tensors do not all come from Unsqueeze"
    rank = len(stack.inputs[0].shape or ())
    axes = [stack.attrs["axis"], choice.attrs.get("axis", 0)]
    for node in makers:
        added = node.attrs.get("axes")  # before opset 13
        if added is None and isinstance(node.inputs[1], gs.Constant):
            added = node.inputs[1].values
        axes += [None] if added is None or not len(added) else list(added)
    if not rank or None in axes or len({int(axis) % rank for axis in axes}) > 1:
        return "its axis is not the axis of the Concat and of each Unsqueeze"
    old, new = choice.outputs[0], makers[int(index.values)].inputs[0]
    fixed = {id(tensor) for tensor in (*graph.inputs, *graph.outputs)}
    if id(old) in fixed:
        old, new = new, old
        if id(old) in fixed or not old.inputs:
            return "the chosen tensor is an input, a constant or another output of the model"
        (source,) = old.inputs
        source.outputs = [new if tensor is old else tensor for tensor in source.outputs]
    redirect(graph, old, new)
    choice.outputs.clear()
    return ""
