"""TopK(boxes, scores) -> boxes, scores

Exporters of detectors without NMS end the graph with rows of the best detections: box, score and class. Quantisation
changes their order, so rows cannot be compared with the float model's; and TopK has no gradient. So the model is cut
before the TopK. All boxes and scores become outputs, and the pass ``nms`` selects the best.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from trtdet.passes.base import Options
from trtdet.passes.exported import SIZES
from trtdet.passes.walk import above, depends, maker, upstream

_SAME_VALUES = ("Unsqueeze", "Squeeze", "Flatten", "Reshape", "Cast", "Identity")
"""Operators that change the shape or type of their first input, but no values."""


def cut(graph: gs.Graph, options: Options) -> Options:
    """Cuts off the selection of the best detections, in place; returns the options for the rest of the model.

    Two forms are cut if the configuration has no suppression:

    - rows (B, K, 6) of rule ``detections``, as Ultralytics exports YOLOv10, YOLO26 and RT-DETR (``Detect.postprocess``
      in ultralytics/nn/modules/head.py): the best of all scores, or of those of the best anchors, which is the same;
    - labels (B, K), boxes (B, K, 4) and scores (B, K), as RT-DETR, D-FINE and DEIM are exported
      (``RTDETRPostProcessor``). Their boxes are multiplied by the original image size, an input that is removed too.
    """
    config = options.config
    if config.nms.suppresses or config.head.decode not in ("boxes", "detections") or config.head.compute is not None:
        return options
    if config.head.has_parts:  # whose rows were selected too
        return options
    outputs = {tensor.name: tensor for tensor in graph.outputs}
    selected = [outputs[name] for name in config.head.outputs or outputs if name in outputs]
    best = None
    joined = maker(selected[0], "Concat") if len(selected) == 1 and config.head.decode == "detections" else None
    if joined is not None and len(joined.inputs) == 3:
        best = _best(*joined.inputs)
        # Rows of unknown shape stay: they can be read without a cut.
        if best is not None and (best[0].shape is None or best[1].shape is None):
            best = None
    elif len(selected) == 3:
        best = _best_of_three(graph, selected)
    if best is None or not _fit(best[0], best[1], len(config.classes)):
        return options
    head = {"decode": "boxes", "outputs": None, **_cut(graph, best, len(selected) == 3)}
    changed = config.model_copy(update={"head": config.head.model_copy(update=head)})
    if best[2] is not None:
        changed = changed.with_nms(max_detections=min(config.nms.max_detections, best[2]))
    return replace(options, config=changed)


def cut_three(graph: gs.Graph) -> tuple[dict[str, Any], int | None] | None:
    """Cuts labels, boxes and scores off before their selection, in place, for a configuration that is still to be
    written; returns what the head certainly is, and K. None for other outputs."""
    selected = list(graph.outputs)
    best = _best_of_three(graph, selected) if len(selected) == 3 else None
    if best is None:
        return None
    return {"decode": "boxes", **_cut(graph, best, three=True)}, best[2]


def _cut(graph: gs.Graph, best: tuple[gs.Tensor, gs.Tensor, int | None], three: bool) -> dict[str, Any]:
    """Makes boxes and scores the outputs, in place; returns keys of the head that follow."""
    boxes, scores, _ = best
    head: dict[str, Any] = {}
    if three:
        head = {"boxes": "xyxy", "units": "relative", "scores": "probabilities", "background": "none", "columns": None}
        if (sigmoid := maker(scores, "Sigmoid")) is not None:
            scores, head["scores"] = sigmoid.inputs[0], "logits"
    for tensor in (boxes, scores):
        tensor.dtype = tensor.dtype or np.float32
    graph.outputs = [boxes, scores]
    graph.cleanup(remove_unused_graph_inputs=True)
    return head


def _best_of_three(graph: gs.Graph, selected: list[gs.Variable]) -> tuple[gs.Tensor, gs.Tensor, int | None] | None:
    """Like :func:`_best`, for labels, boxes and scores in any order; boxes before they are scaled to the image size."""
    boxes = [tensor for tensor in selected if len(tensor.shape or ()) == 3]
    flat = [tensor for tensor in selected if len(tensor.shape or ()) == 2]
    labels = [tensor for tensor in flat if tensor.dtype in (np.int64, np.int32)]
    if (len(boxes), len(flat), len(labels)) != (1, 2, 1):
        return None
    best = _best(boxes[0], flat[1 - flat.index(labels[0])], labels[0])
    scaling = None if best is None else maker(best[0], "Mul")
    if best is None or scaling is None:
        return None
    sizes = [tensor for tensor in graph.inputs if len(tensor.shape or ()) == 2]
    sizes += [tensor for name, tensor in graph.tensors().items() if name in SIZES]  # of an input that was folded
    for relative, factor in (scaling.inputs, scaling.inputs[::-1]):
        here, there = (any(depends(tensor, size) for size in sizes) for tensor in (relative, factor))
        if there and not here:
            return relative, best[1], best[2]
    return None


def _best(boxes: gs.Tensor, score: gs.Tensor, label: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor, int | None] | None:
    """Boxes (B, N, 4), scores (B, N, C) before the selection, and K or None if computed; None for other patterns."""
    values = above(score, *_SAME_VALUES)
    best = maker(values, "TopK")
    if best is None or best.outputs[0] is not values or not best.attrs.get("largest", 1):
        return None
    scores, places = above(best.inputs[0], *_SAME_VALUES), best.outputs[1]
    gather = maker(scores, "GatherElements")
    if gather is not None:  # the scores of the best anchors
        scores = gather.inputs[0]
        choice = next((node for node in upstream(gather.inputs[1]) if node.op == "TopK"), None)
        highest = None if choice is None else maker(above(choice.inputs[0], *_SAME_VALUES), "ReduceMax")
        if highest is None or highest.inputs[0] is not scores:
            return None
    if not depends(label, places):
        return None
    chosen = False
    while (gather := maker(boxes, "GatherElements", "GatherND")) is not None:
        chosen = chosen or depends(gather.inputs[1], places)
        boxes = gather.inputs[0]
    if not chosen:
        return None
    computed = maker(best.inputs[1])
    limit = best.inputs[1] if computed is None else computed.attrs.get("value")
    return boxes, scores, int(np.asarray(limit.values).reshape(-1)[0]) if isinstance(limit, gs.Constant) else None


def _fit(boxes: gs.Tensor, scores: gs.Tensor, classes: int) -> bool:
    """Whether the known shapes are (B, N, 4) and (B, N, C); exporters may name one open N in two ways."""
    if boxes.shape is None or scores.shape is None:
        return True
    if not len(boxes.shape) == len(scores.shape) == 3 or (boxes.shape[2], scores.shape[2]) != (4, classes):
        return False
    counts = boxes.shape[1], scores.shape[1]
    return counts[0] == counts[1] or not all(isinstance(count, int) for count in counts)
