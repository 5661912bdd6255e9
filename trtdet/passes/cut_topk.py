"""TopK(boxes, scores) -> boxes, scores

Exporters of detectors without NMS end the graph with the best detections, rows of a box, its score and its class. What
is quantised changes their order, so that rows could not be compared with those of the float model, and no gradient
passes a TopK. The model is cut before it: all boxes and scores become the outputs, and the best of them are taken
where those of every other detector are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

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
    """What a graph's best detections are taken from.

    Attributes:
        boxes: (B, N, 4).
        scores: (B, N, C).
        count: detections; None where the graph computes their number.
        head: keys of the configuration's head that these tensors change.
    """

    boxes: gs.Variable
    scores: gs.Variable
    count: int | None
    head: dict[str, Any]


def cut(graph: gs.Graph, options: Options) -> Options:
    """Cuts the choice of the best detections off a graph, in place; gives the options for the rest of the model.

    It takes, where nothing is suppressed,

    - rows (B, K, 6) of rule ``detections``, made as the YOLOv10, YOLO26 and RT-DETR of Ultralytics are exported
      (``Detect.postprocess`` in ultralytics/nn/modules/head.py): the best of all scores, or of the scores of the
      anchors whose highest is best, which are the same;
    - labels (B, K), boxes (B, K, 4) and scores (B, K), made as the exporters of RT-DETR, D-FINE and DEIM make them
      (``RTDETRPostProcessor``), with boxes times the size of the original image, a second input, which goes as well.

    Any other graph is left alone.
    """
    config = options.config
    if config.nms.suppresses or config.head.decode not in ("boxes", "detections") or config.head.compute is not None:
        return options
    outputs = {tensor.name: tensor for tensor in graph.outputs}
    given = [outputs[name] for name in config.head.outputs or outputs if name in outputs]
    found = None
    if len(given) == 1 and config.head.decode == "detections":
        found = _of_rows(given[0], len(config.classes))
    elif len(given) == 3:
        found = _of_three(graph, given, len(config.classes))
    if found is None:
        return options
    for tensor in (found.boxes, found.scores):
        tensor.dtype = tensor.dtype or np.float32
    graph.outputs = [found.boxes, found.scores]
    graph.cleanup(remove_unused_graph_inputs=True)
    head = config.head.model_copy(update={"decode": "boxes", "outputs": None, **found.head})
    changed = config.model_copy(update={"head": head})
    if found.count is not None:
        changed = changed.with_nms(max_detections=min(config.nms.max_detections, found.count))
    return replace(options, config=changed)


def _of_rows(rows: gs.Variable, classes: int) -> _Best | None:
    joined = _maker(rows)
    if joined is None or joined.op != "Concat" or len(joined.inputs) != 3:
        return None
    found = _best(*joined.inputs)
    # Rows can be read as they are, so that what is not known to fit is left alone.
    known = found is not None and found.boxes.shape is not None and found.scores.shape is not None
    return found if found is not None and known and _fit(found.boxes, found.scores, classes) else None


def _of_three(graph: gs.Graph, given: list[gs.Variable], classes: int) -> _Best | None:
    """Of labels, boxes and scores, in any order."""
    boxes = [tensor for tensor in given if len(tensor.shape or ()) == 3]
    others = [tensor for tensor in given if len(tensor.shape or ()) == 2]
    whole = [tensor for tensor in others if tensor.dtype in (np.int64, np.int32)]
    if (len(boxes), len(others), len(whole)) != (1, 2, 1):
        return None
    score = others[1 - others.index(whole[0])]
    found = _best(boxes[0], score, whole[0])
    relative = None if found is None else _before_scaling(graph, found.boxes)
    if found is None or relative is None or not _fit(relative, found.scores, classes):
        return None
    head = {"boxes": "xyxy", "units": "relative", "scores": "probabilities", "background": "none", "columns": None}
    scores = found.scores
    maker = _maker(scores)
    if maker is not None and maker.op == "Sigmoid":
        scores, head["scores"] = maker.inputs[0], "logits"
    return _Best(relative, scores, found.count, head)


def _before_scaling(graph: gs.Graph, boxes: gs.Variable) -> gs.Variable | None:
    """Boxes (B, N, 4) before they are multiplied by an input of the model, the size of the original image."""
    scaling = _maker(boxes)
    if scaling is None or scaling.op != "Mul":
        return None
    inputs = {id(tensor) for tensor in graph.inputs if len(tensor.shape or ()) == 2}
    for relative, size in (scaling.inputs, scaling.inputs[::-1]):
        here, there = (any(id(source) in inputs for source in _behind(tensor)) for tensor in (relative, size))
        if there and not here:
            return relative
    return None


def _best(boxes: gs.Tensor, score: gs.Tensor, label: gs.Tensor) -> _Best | None:
    """The boxes and scores that detections are taken from; None where they are not made in a known way."""
    values = _unchanged(score)
    best = _maker(values)
    if best is None or best.op != "TopK" or best.outputs[0] is not values or not best.attrs.get("largest", 1):
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
    if not chosen:
        return None
    return _Best(source, scores, _constant(best.inputs[1]), {})


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
    """Whether boxes are (B, N, 4) and scores (B, N, C), as far as their shapes are known."""
    if boxes.shape is None or scores.shape is None:
        return True
    one, other = list(boxes.shape), list(scores.shape)
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
