"""Gather(Concat(Unsqueeze(x), Unsqueeze(y), ...), 0) -> x"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trtdet.passes.base import Options, PassResult


def apply(graph: gs.Graph, options: Options) -> PassResult:
    """Reads what a choice among stacked tensors chooses, and leaves out what only the others need.

    DETR's kin as transformers writes them stack the logits and boxes of all layers of the decoder and take the last:
    the heads of the other layers serve training alone, but would be quantised, built and run.
    """
    count = 0
    skipped: list[str] = []
    for choice in [node for node in graph.nodes if node.op == "Gather"]:
        stack = choice.inputs[0].inputs
        if not stack or stack[0].op != "Concat":
            continue
        chosen, reason = _chosen(choice, stack[0])
        reason = reason or _replace(graph, choice.outputs[0], chosen)
        if reason:
            skipped.append(f"{choice.name}: {reason}")
            continue
        choice.outputs.clear()
        count += 1
    if count:
        graph.cleanup()
    return PassResult(count, tuple(skipped))


def _replace(graph: gs.Graph, gone: gs.Tensor, chosen: gs.Tensor) -> str:
    """Puts a tensor in another's place, under the other's name if that is an output; or why it cannot."""
    given = {id(tensor) for tensor in (*graph.inputs, *graph.outputs)}
    old, new = (chosen, gone) if id(gone) in given else (gone, chosen)
    if old is chosen:
        if id(chosen) in given or not chosen.inputs:
            return "what it chooses is an input, a constant or another output of the model"
        (maker,) = chosen.inputs
        maker.outputs = [new if tensor is old else tensor for tensor in maker.outputs]
    for reader in list(old.outputs):
        reader.inputs = [new if tensor is old else tensor for tensor in reader.inputs]
    return ""


def _chosen(choice: gs.Node, stack: gs.Node) -> tuple[gs.Tensor | None, str]:
    """The tensor that is chosen, or None and why it is not known."""
    index = choice.inputs[1]
    if not isinstance(index, gs.Constant) or index.values.ndim != 0:
        return None, "what it chooses is no single constant index"
    makers = [tensor.inputs[0] for tensor in stack.inputs if tensor.inputs and tensor.inputs[0].op == "Unsqueeze"]
    if len(makers) < len(stack.inputs):
        return None, "what is joined are no tensors that were given a dimension for it"
    rank = len(stack.inputs[0].shape or ())
    axes = {_axis(stack.attrs["axis"], rank), _axis(choice.attrs.get("axis", 0), rank)}
    added = [_unsqueezed(maker) for maker in makers]
    axes |= {_axis(axis, rank) for those in added for axis in those}
    if len(axes) > 1 or not rank or not all(added):
        return None, "it chooses along another dimension than tensors are joined along"
    position = int(index.values)
    return makers[position].inputs[0], ""


def _axis(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


def _unsqueezed(node: gs.Node) -> list[int]:
    """The dimensions that an Unsqueeze adds, none where that is not constant; an attribute before opset 13."""
    if "axes" in node.attrs:
        return list(node.attrs["axes"])
    axes = node.inputs[1]
    return [int(axis) for axis in axes.values] if isinstance(axes, gs.Constant) else []
