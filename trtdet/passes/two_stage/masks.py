"""masks (n, 1, M, M), or pasted into the picture -> masks (1, K, M, M) of the rows of detections

What the mask head gives is taken behind its sigmoid, so that a paste in the graph, a loop over the detections, is cut
off; which column is whose is written anew. See :mod:`trtdet.passes.masks`.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trtdet.config import Config
from trtdet.passes.base import PassResult, Writer
from trtdet.passes.masks import MASKS, write
from trtdet.passes.provenance import Origin
from trtdet.passes.two_stage.detections import Outputs, first_label
from trtdet.passes.two_stage.walk import maker, upstream

__all__ = ["cut", "leave_out"]

_DATA = ("NonMaxSuppression", "NonZero")
"""What makes the number of rows depend on the image."""


def cut(graph: gs.Graph, found: Outputs, rows: tuple[gs.Variable, gs.Variable] | None, config: Config) -> PassResult:
    """Makes masks of the rows of detections the last output, in place, where the model has any.

    Args:
        graph: with its levels merged.
        found: the model's detections, which masks are computed from.
        rows: boxes (n, 4) and labels (n,) to compute them from instead.
        config: the detector.
    """
    given = next((tensor for tensor in graph.outputs if _are_masks(tensor)), None)
    if given is None:
        return PassResult(0)
    probabilities = _probabilities(given)
    if probabilities is None:
        return leave_out(graph, "no sigmoid of (n, classes, M, M) is behind it")
    columns = len(config.classes) + first_label(found.scores, config)
    if probabilities.shape[1] != columns:
        return leave_out(graph, f"it is of {probabilities.shape[1]} classes, boxes are of {columns}")
    read = [node for node in upstream(probabilities) if found.boxes in node.inputs]
    obstacle = _obstacle(probabilities, found.boxes, read)
    if obstacle:
        return leave_out(graph, obstacle)
    leave_out(graph, "")
    for name, tensor in graph.tensors().items():
        if name == MASKS:
            tensor.name = f"{MASKS}/exported"
    put = Writer(graph, "trtdet/cut_masks", Origin.DECODE)
    boxes, labels = rows or (found.boxes, found.labels)
    chosen, masks = write(put, boxes, labels, probabilities, found.most)
    for node in read:
        node.inputs = [chosen if tensor is found.boxes else tensor for tensor in node.inputs]
    graph.outputs.append(masks)
    return PassResult(1)


def leave_out(graph: gs.Graph, reason: str) -> PassResult:
    """Takes masks off the outputs, in place; the result has the reason, where there were any."""
    left = [tensor for tensor in graph.outputs if _are_masks(tensor)]
    graph.outputs = [tensor for tensor in graph.outputs if tensor not in left]
    return PassResult(0, tuple(f"{tensor.name}: {reason}" for tensor in left))


def _are_masks(tensor: gs.Tensor) -> bool:
    return len(tensor.shape or ()) == 4


def _probabilities(masks: gs.Variable) -> gs.Variable | None:
    """float32 (n, C, M, M), of all classes: the nearest sigmoid of four axes."""
    for node in upstream(masks):
        shape = node.outputs[0].shape
        if node.op == "Sigmoid" and shape is not None and len(shape) == 4:
            return node.outputs[0] if all(isinstance(size, int) for size in shape[1:]) else None
    return None


def _obstacle(probabilities: gs.Variable, boxes: gs.Variable, read: list[gs.Node]) -> str:
    """Why masks cannot be computed from other boxes."""
    if not read:
        return "its regions are not the boxes that are found"
    own = {id(node) for node in upstream(boxes)}
    readers = {id(node) for node in read}
    line, seen = [probabilities], set[int]()
    for tensor in line:
        node = maker(tensor)
        if node is None or id(node) in seen or tensor is boxes:
            continue
        seen.add(id(node))
        if id(node) in own and node.op in _DATA:
            return f"it reads the detections at '{node.name}' as well, not their boxes alone"
        line += [given for given in node.inputs if not (id(node) in readers and given is boxes)]
    return ""
