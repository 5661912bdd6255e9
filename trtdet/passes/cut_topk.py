"""TopK(boxes, scores) -> boxes, scores

Exporters of detectors without NMS end the graph with the best detections, rows of a box, its score and its class. What
is quantised changes their order, so that rows could not be compared with those of the float model, and no gradient
passes a TopK. The model is cut before it: all boxes and scores become the outputs, and the best of them are taken
where those of every other detector are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from trtdet.passes.base import Options

_SAME_VALUES = ("Unsqueeze", "Squeeze", "Flatten", "Reshape", "Cast", "Identity")
"""Operators that change the shape of their first input, or its type, and no value."""

_GATHERS = ("GatherElements", "GatherND")

_FARTHEST = 200
"""Nodes that are looked at between a TopK and the rows that it leads to; exporters write some forty."""


@dataclass(frozen=True, eq=False)
class _Best:
    """What a graph's rows of detections are taken from.

    Attributes:
        boxes: (B, N, 4).
        scores: (B, N, C).
        count: rows; None where the graph computes their number.
    """

    boxes: gs.Variable
    scores: gs.Variable
    count: int | None


def cut(graph: gs.Graph, options: Options) -> Options:
    """Cuts the choice of the best detections off a graph, in place; gives the options for the rest of the model.

    It takes rows (B, K, 6) of rule ``detections`` without suppression, made as the YOLOv10, YOLO26 and RT-DETR of
    Ultralytics are exported (``Detect.postprocess`` in ultralytics/nn/modules/head.py): the best of all scores, or of
    the scores of the anchors whose highest is best, which are the same. Any other graph is left alone.
    """
    config = options.config
    if config.head.decode != "detections" or config.nms.suppresses:
        return options
    outputs = {tensor.name: tensor for tensor in graph.outputs}
    names = config.head.outputs or tuple(outputs)
    rows = outputs.get(names[0]) if len(names) == 1 else None
    found = None if rows is None else _best(rows, len(config.classes))
    if found is None:
        return options
    for tensor in (found.boxes, found.scores):
        tensor.dtype = tensor.dtype or np.float32
    graph.outputs = [found.boxes, found.scores]
    graph.cleanup()
    head = config.head.model_copy(update={"decode": "boxes", "outputs": None})
    changed = config.model_copy(update={"head": head})
    if found.count is not None:
        changed = changed.with_nms(max_detections=min(config.nms.max_detections, found.count))
    return replace(options, config=changed)


def _best(rows: gs.Variable, classes: int) -> _Best | None:
    """The boxes and scores that rows are taken from; None where they are not made in a known way."""
    joined = _maker(rows)
    if joined is None or joined.op != "Concat" or len(joined.inputs) != 3:
        return None
    boxes, score, label = joined.inputs
    values = _unchanged(score)
    best = _maker(values)
    if best is None or best.op != "TopK" or best.outputs[0] is not values:
        return None
    scores = _unchanged(best.inputs[0])
    gather = _maker(scores)
    if gather is not None and gather.op == "GatherElements":
        if not _of_the_best_anchors(gather):
            return None
        scores = gather.inputs[0]
    places = best.outputs[1]
    if places not in _behind(label):
        return None
    source, chosen = boxes, False
    while (maker := _maker(source)) is not None and maker.op in _GATHERS:
        chosen = chosen or places in _behind(maker.inputs[1])
        source = maker.inputs[0]
    if not chosen or not _fit(source, scores, classes):
        return None
    return _Best(source, scores, _constant(best.inputs[1]))


def _of_the_best_anchors(gather: gs.Node) -> bool:
    """Whether the scores that are gathered are those of the anchors whose highest score is best."""
    scores = gather.inputs[0]
    for tensor in _behind(gather.inputs[1]):
        maker = _maker(tensor)
        if maker is not None and maker.op == "TopK":
            highest = _maker(_unchanged(maker.inputs[0]))
            return highest is not None and highest.op == "ReduceMax" and highest.inputs[0] is scores
    return False


def _fit(boxes: gs.Tensor, scores: gs.Tensor, classes: int) -> bool:
    one, other = list(boxes.shape or ()), list(scores.shape or ())
    return len(one) == len(other) == 3 and one[2] == 4 and other[2] == classes and one[1] == other[1]


def _maker(tensor: gs.Tensor) -> gs.Node | None:
    return tensor.inputs[0] if isinstance(tensor, gs.Variable) and tensor.inputs else None


def _unchanged(tensor: gs.Tensor) -> gs.Tensor:
    """The tensor that has the same values, before operators that change none."""
    while (maker := _maker(tensor)) is not None and maker.op in _SAME_VALUES:
        tensor = maker.inputs[0]
    return tensor


def _behind(tensor: gs.Tensor) -> Iterator[gs.Tensor]:
    """The tensors that a tensor is computed from, itself included, the nearest first."""
    waiting, seen = [tensor], {id(tensor)}
    for current in waiting:
        yield current
        maker = _maker(current)
        for source in maker.inputs if maker is not None and len(waiting) < _FARTHEST else ():
            if id(source) not in seen:
                seen.add(id(source))
                waiting.append(source)


def _constant(tensor: gs.Tensor) -> int | None:
    maker = _maker(tensor)
    values = tensor if isinstance(tensor, gs.Constant) else maker.attrs.get("value") if maker is not None else None
    return int(np.asarray(values.values).reshape(-1)[0]) if isinstance(values, gs.Constant) else None
