"""EfficientNMS_TRT(boxes, scores), NonMaxSuppression(boxes, scores) -> boxes, scores

A suppression that is embedded in a model (:mod:`trtdet.passes.own_suppression`) is cut off with all that follows it.
The pass ``nms`` then writes a suppression of the same or another kind, with the outputs of every engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.config import Config
from trtdet.detection.parts import KEYPOINTS
from trtdet.detection.suppression import sigmoid
from trtdet.passes import cut_topk
from trtdet.passes.base import Options, Writer, explained
from trtdet.passes.clean import fold
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.own_suppression import ONNX, PLUGINS, OwnSuppression, own_suppression, refused, suppressions
from trtdet.passes.protobuf import graphs
from trtdet.passes.provenance import Origin
from trtdet.passes.two_stage import is_two_stage
from trtdet.passes.two_stage.suppressions import inline_guards


@dataclass(frozen=True)
class EmbeddedNms:
    """An NMS that is embedded in a model."""

    name: str  # of the node
    kind: Literal["efficient", "onnx"]  # a value of --nms
    thresholds: dict[str, Any]  # keys of NmsConfig and the node's values


@dataclass(frozen=True)
class CutOff:
    """A model that was cut before its suppression, for a configuration that is still to be written."""

    model: onnx.ModelProto  # outputs: boxes (B, N, 4) and scores (B, N, C), as the suppression read them, and keypoints
    head: dict[str, Any]  # keys of HeadConfig that are certain
    thresholds: dict[str, Any]  # keys of NmsConfig and the node's values


def embedded_nms(model: onnx.ModelProto, config: Config) -> EmbeddedNms | None:
    """The NMS embedded in a model; None if there is none or ``head.outputs`` cuts it off. Raises ModelError if there
    are several, or the NMS cannot be cut off."""
    if not embeds_nms(model):
        return None  # most models need no parsing
    with explained("cut_nms"):
        _, own = _found(to_graph(onnx.shape_inference.infer_shapes(model)), config)
        return None if own is None else EmbeddedNms(own.name, own.kind, _thresholds(own, config))


def cut(graph: gs.Graph, options: Options) -> tuple[gs.Graph, Options]:
    """The graph without its embedded NMS, and the options for it.

    Its boxes and scores become the outputs, with decode rule ``boxes``. With ``keep_embedded`` the configuration gets
    its thresholds. Raises the errors of :func:`embedded_nms`.
    """
    config = options.config
    graph, own = _found(graph, config)
    if own is None:
        return graph, options
    if config.head.has_parts and (own.keypoints is None or config.head.raw_parts != (KEYPOINTS,)):
        raise refused(own.name, "it loses the masks, keypoints or rotated boxes of head.masks, keypoints and rotated")
    own = own if config.head.has_parts else replace(own, keypoints=None)
    head = {**_cut(graph, own), "outputs": None, "compute": None, "columns": None}
    if not own.centre and config.head.decode == "boxes" and config.head.boxes != "cxcywh":
        head["boxes"] = config.head.boxes
    if config.head.decode != "boxes":
        head["units"] = "pixels"
    elif own.kind == "onnx":
        head["scores"] = config.head.scores
    changed = config.model_copy(update={"head": config.head.model_copy(update=head)})
    thresholds = _thresholds(own, config)
    return graph, replace(options, config=changed.with_nms(**thresholds) if options.keep_embedded else changed)


def cut_off(model: onnx.ModelProto) -> CutOff | None:
    """A model before its embedded NMS or, if its outputs are labels, boxes and scores, before their selection; None if
    it has neither, or is of two stages. Raises ModelError if the NMS cannot be cut off."""
    with explained("cut_nms"):
        if embeds_nms(model):
            graph, own = _found(to_graph(onnx.shape_inference.infer_shapes(model)), None)
            if own is None:
                return None
            head = _cut(graph, own)
            return CutOff(to_model(graph), head, own.thresholds)
        if len(model.graph.output) != 3:
            return None
        graph = to_graph(onnx.shape_inference.infer_shapes(model))
        selection = cut_topk.cut_three(graph)
        if selection is None:
            return None
        head, count = selection
        return CutOff(
            to_model(graph), head, {"iou_threshold": 1.0, **({} if count is None else {"max_detections": count})}
        )


def embeds_nms(model: onnx.ModelProto) -> bool:
    """Whether a node of a model suppresses, also in branches and loops."""
    return any(node.op_type == ONNX or node.op_type in PLUGINS for part in graphs(model.graph) for node in part.node)


def _cut(graph: gs.Graph, own: OwnSuppression) -> dict[str, Any]:
    """Makes boxes (B, N, 4), scores (B, N, C) and, where there are any, keypoints (B, N, 3 P) the outputs, in place;
    returns what the head certainly is."""
    write = Writer(graph, "trtdet/own", Origin.EMBEDDED_NMS)
    boxes, scores = own.boxes, own.scores
    if boxes.shape is None or len(boxes.shape) != 3:
        boxes = write("Reshape", boxes, write.const([0 if len(boxes.shape or ()) != 2 else 1, -1, 4], np.int64))
    if len(scores.shape or (0, 0, 0)) == 2:
        scores = write("Unsqueeze", scores, write.const([0], np.int64))
    if own.by_class:
        scores = write("Transpose", scores, perm=[0, 2, 1])
    if own.stretch:
        boxes = write("Mul", boxes, write.const(list(own.stretch), np.float32))
    graph.outputs = [boxes, scores]
    if own.keypoints is not None:
        graph.outputs.append(write("Reshape", own.keypoints, write.const([0, 0, -1], np.int64)))
    for tensor in graph.outputs:
        tensor.dtype = tensor.dtype or np.float32
    graph.cleanup()
    return {
        "decode": "boxes",
        "boxes": "cxcywh" if own.centre else "xyxy",
        "scores": "logits" if own.logits else "probabilities",
        "background": own.background_column,
    }


def _found(graph: gs.Graph, config: Config | None) -> tuple[gs.Graph, OwnSuppression | None]:
    """A graph with folded constants, and its embedded NMS, which fits the configuration."""
    guarded = any(node.op == "If" for node in graph.nodes)
    if not (guarded or suppressions(graph)) or is_two_stage(graph):
        return graph, None  # the suppressions of two stages are parts of the network
    named, tensors = None if config is None else config.head.outputs, graph.tensors()
    if named is not None and all(name in tensors for name in named):
        return graph, None
    fold(graph)
    if guarded:
        inline_guards(graph)
    graph.cleanup().toposort()
    own = own_suppression(graph)
    if own is not None and config is not None:
        _check(own, len(config.classes))
    return graph, own


def _check(own: OwnSuppression, classes: int) -> None:
    obstacle = ""
    columns = own.classes
    if own.background >= 0 and columns is not None and columns != classes + 1:
        obstacle = f"its class {own.background} is background, which 'classes' does not know"
    elif own.background not in (-1, 0) and columns is not None and own.background != columns - 1:
        obstacle = f"its class {own.background} is background, and neither the first nor the last"
    elif own.background < 0 and columns is not None and columns != classes:
        hidden = " (the class is hidden in an offset of the boxes)" if columns == 1 else ""
        obstacle = f"it gets scores of {columns} classes{hidden}, 'classes' lists {classes}"
    if obstacle:
        raise refused(own.name, obstacle)


def _thresholds(own: OwnSuppression, config: Config) -> dict[str, Any]:
    """Thresholds that a node fixes, as keys of NmsConfig that allow each other."""
    thresholds = dict(own.thresholds)
    score = thresholds.get("score_threshold")
    if score is not None and own.kind == "onnx":
        logits = config.head.decode == "boxes" and config.head.scores == "logits"
        probability = float(sigmoid(np.array(score, np.float32))) if logits else min(max(score, 0.0), 1.0)
        thresholds["score_threshold"] = probability
    return thresholds
