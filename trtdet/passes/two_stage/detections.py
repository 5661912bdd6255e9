"""boxes (n, 4), labels (n,), scores (n,) -> rows (1, K, 6) of box, score and class

K is the limit of the second suppression. Rows past n are zero.

masks (n, 1, M, M), or pasted into the picture -> masks (1, K, M, M) of the rows of detections

Mask probabilities are read behind the sigmoid of the mask head. This cuts off a paste in the graph, which is a loop
over the detections. See :mod:`trtdet.passes.masks`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.config import Config
from trtdet.errors import ModelError
from trtdet.passes import masks
from trtdet.passes.base import PassResult, Writer
from trtdet.passes.masks import MASKS
from trtdet.passes.provenance import Origin
from trtdet.passes.two_stage.levels import most_rows
from trtdet.passes.walk import read_instead, upstream


@dataclass(frozen=True)
class Outputs:
    """Detections of a two-stage model."""

    boxes: gs.Variable  # float32 (n, 4), xyxy in pixels of the input
    labels: gs.Variable  # int64 (n,)
    scores: gs.Variable  # float32 (n,)
    most: int  # maximum of n
    exact: bool = False  # whether n always equals ``most``


def write(graph: gs.Graph, outputs: Outputs, config: Config) -> None:
    """Makes rows of detections the output of a two-stage graph, before any masks, in place.

    Labels start at 1 if the classifier has a background column. Raises ModelError if the model has other classes than
    the configuration.
    """
    put = Writer(graph, "trtdet/two_stage", Origin.DECODE)
    columns = [outputs.boxes]
    for tensor, first in ((outputs.scores, 0), (outputs.labels, first_label(outputs.scores, config))):
        column = put("Cast", tensor, to=int(onnx.TensorProto.FLOAT))
        if first:
            column = put("Sub", column, put.const(first, np.float32))
        columns.append(put("Unsqueeze", column, put.const([1], np.int64)))
    rows = put("Concat", *columns, axis=1)
    detections = masks.padded(put, rows, outputs.most, sizes=(6,), exact=outputs.exact)
    graph.outputs = [detections, *(tensor for tensor in graph.outputs if tensor.name == MASKS)]
    graph.cleanup().toposort()


def outputs(graph: gs.Graph, config: Config) -> Outputs:
    """Boxes, labels and scores of a two-stage graph, by ``head.outputs``, by their names, or in this order. Raises
    ModelError if they are not those of one image, or the number of detections has no limit."""
    names, tensors = config.head.outputs, graph.tensors()
    if names is not None:
        missing = [name for name in names if name not in tensors]
        if missing:
            raise ModelError(
                f"head.outputs names '{missing[0]}', which the model does not have",
                "name the outputs for boxes, labels and scores",
            )
        selected = [tensors[name] for name in names]
    else:
        named = [tensor for name in ("boxes", "labels", "scores") for tensor in graph.outputs if tensor.name == name]
        selected = named if len(named) == 3 else list(graph.outputs)
    shapes = [list(tensor.shape or ()) for tensor in selected]
    fits = len(selected) >= 3 and len(shapes[0]) == 2 and shapes[0][1] == 4 and all(len(s) == 1 for s in shapes[1:3])
    if not fits:
        listed = ", ".join(f"{tensor.name} {shape}" for tensor, shape in zip(selected, shapes, strict=True))
        raise ModelError(
            f"the outputs of the two-stage model are {listed}; expected are boxes (n, 4), labels (n,) and scores (n,) "
            "of one image, in this order; name them with head.outputs"
        )
    most = most_rows(selected[0])
    if most is None:
        raise ModelError(
            "the number of detections of the two-stage model is not bounded: nothing limits its last suppression",
            "export it with a limit (torchvision: box_detections_per_img)",
        )
    return Outputs(selected[0], labels=selected[1], scores=selected[2], most=most)


def first_label(scores: gs.Variable, config: Config) -> int:
    """Label of the first class: 1 if the classifier has a background column, else 0. Raises ModelError if the model has
    other classes than the configuration."""
    classes = len(config.classes)
    softmax = next((node for node in upstream(scores) if node.op == "Softmax"), None)
    if softmax is None:
        return 0
    columns = (softmax.inputs[0].shape or [None])[-1]
    if columns not in (classes, classes + 1):
        raise ModelError(
            f"the classifier of the two-stage model has {columns} columns, and 'classes' lists {classes}; "
            f"expected are {classes}, or {classes + 1} with the background"
        )
    return int(columns) - classes


def cut_masks(
    graph: gs.Graph, outputs: Outputs, rows: tuple[gs.Variable, gs.Variable] | None, config: Config
) -> PassResult:
    """Makes masks of the detections the last output, in place, if the model has masks.

    The levels of ``graph`` must be merged. Masks are computed from ``rows``, boxes (n, 4) and labels (n,), or from
    ``outputs`` if that is None.
    """
    exported = next((tensor for tensor in graph.outputs if _are_masks(tensor)), None)
    if exported is None:
        return PassResult(0)
    sigmoids = (node.outputs[0] for node in upstream(exported) if node.op == "Sigmoid")
    probabilities = next((tensor for tensor in sigmoids if _are_masks(tensor)), None)
    if probabilities is None or not all(isinstance(size, int) for size in probabilities.shape[1:]):
        return leave_out_masks(graph, "no sigmoid of (n, classes, M, M) is behind it")
    columns = len(config.classes) + first_label(outputs.scores, config)
    if probabilities.shape[1] != columns:
        return leave_out_masks(graph, f"it is of {probabilities.shape[1]} classes, boxes are of {columns}")
    read = [node for node in upstream(probabilities) if outputs.boxes in node.inputs]
    if not read:
        return leave_out_masks(graph, "its regions are not the boxes that are found")
    sources = {id(node) for node in upstream(outputs.boxes)}
    for node in upstream(probabilities, end=outputs.boxes):
        if id(node) in sources and node.op in ("NonMaxSuppression", "NonZero"):
            return leave_out_masks(graph, f"it reads the detections at '{node.name}' as well, not their boxes alone")
    leave_out_masks(graph, "")
    tensors = graph.tensors()
    if MASKS in tensors:
        tensors[MASKS].name = f"{MASKS}/exported"
    put = Writer(graph, "trtdet/cut_masks", Origin.DECODE)
    boxes, labels = rows or (outputs.boxes, outputs.labels)
    chosen, written = masks.write(put, boxes, labels, probabilities=probabilities, most=outputs.most)
    read_instead(read, outputs.boxes, chosen)
    graph.outputs.append(written)
    return PassResult(1)


def leave_out_masks(graph: gs.Graph, reason: str) -> PassResult:
    """Removes masks from the outputs, in place; the result holds the reason if there were any."""
    exported = [tensor for tensor in graph.outputs if _are_masks(tensor)]
    graph.outputs = [tensor for tensor in graph.outputs if not _are_masks(tensor)]
    return PassResult(0, tuple(f"{tensor.name}: {reason}" for tensor in exported))


def _are_masks(tensor: gs.Tensor) -> bool:
    return len(tensor.shape or ()) == 4
