"""TopK(boxes, scores) -> boxes, scores

Exporters of detectors without NMS end the graph with rows of the best detections: box, score and class. Quantisation
changes their order, so rows cannot be compared with the float model's; and TopK has no gradient. So the model is cut
before the TopK. All boxes and scores become outputs, and the pass ``nms`` selects the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import onnx_graphsurgeon as gs

from trtdet.config import HeadConfig
from trtdet.detection.parts import PROTOTYPES
from trtdet.passes.base import Options
from trtdet.passes.exported import SIZES
from trtdet.passes.walk import SAME_VALUES, above, depends, maker, upstream, values_of


def cut(graph: gs.Graph, options: Options) -> Options:
    """Cuts off the selection of the best detections, in place; returns the options for the rest of the model.

    Two forms are cut if the configuration has no suppression:

    - rows (B, K, 6) of rule ``detections``, as Ultralytics exports YOLOv10, YOLO26 and RT-DETR (``Detect.postprocess``
      in ultralytics/nn/modules/head.py): the best of all scores, or of those of the best anchors, which is the same.
      Coefficients of masks, keypoints or the angle behind them are the third output then, and follow their boxes;
    - labels (B, K), boxes (B, K, 4) and scores (B, K), as RT-DETR, D-FINE and DEIM are exported
      (``RTDETRPostProcessor``). Their boxes are multiplied by the original image size, an input that is removed too.
    """
    config = options.config
    if config.nms.suppresses or config.head.decode not in ("boxes", "detections") or config.head.compute is not None:
        return options
    outputs = {tensor.name: tensor for tensor in graph.outputs}
    selected = [outputs[name] for name in config.head.outputs or outputs if name in outputs]
    best = None
    if len(selected) == 3 and not config.head.has_parts:
        best = _best_of_three(graph, selected)
    elif config.head.decode == "detections":
        best = _best_of_rows(selected, config.head)
    if best is None or not _fit(best.boxes, best.scores, len(config.classes)):
        return options
    head = {"decode": "boxes", "outputs": None, **_cut(graph, best, len(selected) == 3)}
    changed = config.model_copy(update={"head": config.head.model_copy(update=head)})
    if best.limit is not None:
        changed = changed.with_nms(max_detections=min(config.nms.max_detections, best.limit))
    return replace(options, config=changed)


class _Best(NamedTuple):
    """The inputs of a selection: boxes (B, N, 4), scores (B, N, C) and parts; and its K, None if computed."""

    boxes: gs.Tensor
    scores: gs.Tensor
    limit: int | None
    parts: tuple[gs.Tensor, ...] = ()


def _best_of_rows(selected: list[gs.Variable], head: HeadConfig) -> _Best | None:
    """Like :func:`_best`, for rows (B, K, 6 + E), whose last E columns are of one part, and the prototypes of masks."""
    rows = [tensor for tensor in selected if len(tensor.shape or ()) == 3]
    prototypes = [tensor for tensor in selected if len(tensor.shape or ()) == 4]
    columns = [name for name in head.raw_parts if name != PROTOTYPES]
    joined = maker(rows[0], "Concat") if (len(rows), len(prototypes)) == (1, int(head.masks)) else None
    if joined is None or len(columns) > 1 or len(joined.inputs) != 3 + len(columns) or len(selected) > 1 + head.masks:
        return None
    box, score, label, *parts = joined.inputs
    best = _best(box, score, label, parts=parts)
    # Rows of unknown shape stay: they can be read without a cut.
    if best is None or any(tensor.shape is None for tensor in (best.boxes, best.scores, *best.parts)):
        return None
    return best._replace(parts=(*best.parts, *prototypes))


def cut_three(graph: gs.Graph) -> tuple[dict[str, Any], int | None] | None:
    """Cuts labels, boxes and scores off before their selection, in place, for a configuration that is still to be
    written; returns what the head certainly is, and K. None for other outputs."""
    selected = list(graph.outputs)
    best = _best_of_three(graph, selected) if len(selected) == 3 else None
    if best is None:
        return None
    return {"decode": "boxes", **_cut(graph, best, three=True)}, best.limit


def _cut(graph: gs.Graph, best: _Best, three: bool) -> dict[str, Any]:
    """Makes boxes, scores and parts the outputs, in place; returns keys of the head that follow."""
    boxes, scores = best.boxes, best.scores
    head: dict[str, Any] = {}
    if three:
        head = {"boxes": "xyxy", "units": "relative", "scores": "probabilities", "background": "none", "columns": None}
        if (sigmoid := maker(scores, "Sigmoid")) is not None:
            scores, head["scores"] = sigmoid.inputs[0], "logits"
    graph.outputs = [boxes, scores, *best.parts]
    for tensor in graph.outputs:
        tensor.dtype = tensor.dtype or np.float32
    graph.cleanup(remove_unused_graph_inputs=True)
    return head


def _best_of_three(graph: gs.Graph, selected: list[gs.Variable]) -> _Best | None:
    """Like :func:`_best`, for labels, boxes and scores in any order; boxes before they are scaled to the image size."""
    boxes = [tensor for tensor in selected if len(tensor.shape or ()) == 3]
    flat = [tensor for tensor in selected if len(tensor.shape or ()) == 2]
    labels = [tensor for tensor in flat if tensor.dtype in (np.int64, np.int32)]
    if (len(boxes), len(flat), len(labels)) != (1, 2, 1):
        return None
    best = _best(boxes[0], flat[1 - flat.index(labels[0])], labels[0])
    scaling = None if best is None else maker(best.boxes, "Mul")
    if best is None or scaling is None:
        return None
    sizes = [tensor for tensor in graph.inputs if len(tensor.shape or ()) == 2]
    sizes += [tensor for name, tensor in graph.tensors().items() if name in SIZES]  # of an input that was folded
    for relative, factor in (scaling.inputs, scaling.inputs[::-1]):
        here, there = (any(depends(tensor, size) for size in sizes) for tensor in (relative, factor))
        if there and not here:
            return best._replace(boxes=relative)
    return None


def _best(boxes: gs.Tensor, score: gs.Tensor, label: gs.Tensor, parts: Sequence[gs.Tensor] = ()) -> _Best | None:
    """Boxes, scores and parts before the selection; None for other patterns."""
    values = above(score, *SAME_VALUES)
    best = maker(values, "TopK")
    if best is None or best.outputs[0] is not values or not best.attrs.get("largest", 1):
        return None
    scores, places = above(best.inputs[0], *SAME_VALUES), best.outputs[1]
    gather = maker(scores, "GatherElements")
    if gather is not None:  # the scores of the best anchors
        scores = gather.inputs[0]
        choice = next((node for node in upstream(gather.inputs[1]) if node.op == "TopK"), None)
        highest = None if choice is None else maker(above(choice.inputs[0], *SAME_VALUES), "ReduceMax")
        if highest is None or highest.inputs[0] is not scores:
            return None
    if not depends(label, places):
        return None
    every = [before for rows in (boxes, *parts) if (before := _before(rows, places)) is not None]
    if len(every) < 1 + len(parts):
        return None
    limit = values_of(best.inputs[1])
    count = None if limit is None else int(limit.reshape(-1)[0])
    return _Best(every[0], scores, limit=count, parts=tuple(every[1:]))


def _before(rows: gs.Tensor, places: gs.Tensor) -> gs.Tensor | None:
    """Rows before their selection by ``places``; None if these do not choose them."""
    chosen = False
    while (gather := maker(rows, "GatherElements", "GatherND")) is not None:
        chosen = chosen or depends(gather.inputs[1], places)
        rows = gather.inputs[0]
    return rows if chosen else None


def _fit(boxes: gs.Tensor, scores: gs.Tensor, classes: int) -> bool:
    """Whether the known shapes are (B, N, 4) and (B, N, C); exporters may name one open N in two ways."""
    if boxes.shape is None or scores.shape is None:
        return True
    if not len(boxes.shape) == len(scores.shape) == 3 or (boxes.shape[2], scores.shape[2]) != (4, classes):
        return False
    counts = boxes.shape[1], scores.shape[1]
    return counts[0] == counts[1] or not all(isinstance(count, int) for count in counts)
