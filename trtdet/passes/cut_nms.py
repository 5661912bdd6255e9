"""EfficientNMS_TRT(boxes, scores), NonMaxSuppression(boxes, scores) -> boxes, scores

An NMS that is embedded in a model reads decoded boxes and scores. The model is cut there. The pass ``nms`` then writes
an NMS of the same or another kind, with the outputs of every engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.config import Config
from trtdet.detection.plugin_nms import EfficientNms
from trtdet.detection.suppression import sigmoid
from trtdet.errors import ModelError
from trtdet.passes.base import Options, Writer, explained
from trtdet.passes.nms import EFFICIENT
from trtdet.passes.provenance import Origin
from trtdet.passes.two_stage import is_two_stage
from trtdet.passes.walk import constant

_KINDS: dict[str, Literal["efficient", "onnx"]] = {EFFICIENT: "efficient", "NonMaxSuppression": "onnx"}


@dataclass(frozen=True)
class EmbeddedNms:
    """An NMS that is embedded in a model."""

    name: str  # of the node
    kind: Literal["efficient", "onnx"]  # a value of --nms
    thresholds: dict[str, Any]  # keys of NmsConfig and the node's values


def embedded_nms(model: onnx.ModelProto, config: Config) -> EmbeddedNms | None:
    """The NMS embedded in a model; None if there is none or ``head.outputs`` cuts it off. Raises ModelError if there
    are several, or the NMS cannot be cut off."""
    if all(node.op_type not in _KINDS for node in model.graph.node):
        return None  # most models need no parsing
    with explained("cut_nms"):
        return _find(gs.import_onnx(model), config)[0]


def cut(graph: gs.Graph, options: Options) -> Options:
    """Cuts the embedded NMS off, in place; returns the options for the rest of the model.

    Its boxes and scores become the outputs, with decode rule ``boxes``. With ``keep_embedded`` the configuration gets
    its thresholds. Raises the errors of :func:`embedded_nms`.
    """
    config = options.config
    nms, node = _find(graph, config)
    if nms is None or node is None:
        return options
    write = Writer(graph, "trtdet/own", Origin.EMBEDDED_NMS)
    boxes, scores = node.inputs[:2]
    head: dict[str, Any] = {"decode": "boxes", "outputs": None}
    if nms.kind == "efficient":
        centre, logits = node.attrs.get("box_coding", 0) == 1, node.attrs.get("score_activation", 0) == 1
        head |= {"scores": "logits" if logits else "probabilities"}
        if boxes.shape is None or len(boxes.shape) == 4:
            boxes = write("Reshape", boxes, write.const([0, -1, 4], np.int64))
    else:
        centre = node.attrs.get("center_point_box", 0) == 1
        scores = write("Transpose", scores, perm=[0, 2, 1])
    corners = config.head.boxes if config.head.decode == "boxes" else "xyxy"
    head["boxes"] = "cxcywh" if centre else corners
    for tensor in (boxes, scores):
        tensor.dtype = tensor.dtype or np.float32
    graph.outputs = [boxes, scores]
    graph.cleanup()
    changed = config.model_copy(update={"head": config.head.model_copy(update=head)})
    return replace(options, config=changed.with_nms(**nms.thresholds) if options.keep_embedded else changed)


def _find(graph: gs.Graph, config: Config) -> tuple[EmbeddedNms | None, gs.Node | None]:
    nodes = [node for node in graph.nodes if node.op in _KINDS]
    named, tensors = config.head.outputs, graph.tensors()
    is_cut_off = named is not None and all(name in tensors for name in named)
    if not nodes or is_cut_off or is_two_stage(graph):  # the suppressions of two stages are parts of the network
        return None, None
    if len(nodes) > 1:
        raise ModelError(
            f"the model embeds several NMS nodes: {', '.join(node.name or node.op for node in nodes)}; name the "
            "tensors before the last node with head.outputs and use head.decode boxes"
        )
    (node,) = nodes
    thresholds, name = _thresholds(node, config), node.name or node.op
    obstacle = _obstacle(node, config)
    if obstacle:
        raise ModelError(
            f"the NMS '{name}' embedded in the model cannot be cut off: {obstacle}",
            "name the raw outputs before it with head.outputs",
        )
    return EmbeddedNms(name, _KINDS[node.op], thresholds), node


def _obstacle(node: gs.Node, config: Config) -> str:
    boxes, scores = (list(tensor.shape or ()) for tensor in node.inputs[:2])
    efficient = node.op == EFFICIENT
    if efficient and len(node.inputs) > 2:
        return "it decodes boxes from anchors"
    if efficient and node.attrs.get("background_class", -1) >= 0:
        return f"its class {node.attrs['background_class']} is background, which 'classes' does not know"
    if len(boxes) == 4 and boxes[2] != 1:
        return "it has boxes of its own for each class"
    classes = scores[2 if efficient else 1] if len(scores) == 3 else None
    if isinstance(classes, int) and classes != len(config.classes):
        hidden = " (the class is hidden in an offset of the boxes)" if classes == 1 else ""
        return f"it gets scores of {classes} classes{hidden}, 'classes' lists {len(config.classes)}"
    return ""


def _thresholds(node: gs.Node, config: Config) -> dict[str, Any]:
    """Thresholds that a node fixes, without computed ones and without ONNX's limit, which is per class."""
    if node.op == EFFICIENT:
        names = ("score_threshold", "iou_threshold", "max_output_boxes")
        missing = [name for name in names if name not in node.attrs]
        if missing:
            name = node.name or node.op
            raise ModelError(f"node '{name}' lacks its attribute '{missing[0]}'; export the model again")
        return {
            "score_threshold": node.attrs["score_threshold"],
            "iou_threshold": node.attrs["iou_threshold"],
            "max_detections": node.attrs["max_output_boxes"],
            "class_agnostic": bool(node.attrs.get("class_agnostic", 0)),
            "pre_nms_topk": EfficientNms.CANDIDATES,
            "candidates": "all-classes",
        }
    thresholds: dict[str, Any] = {"class_agnostic": False, "candidates": "all-classes"}
    iou, score = constant(node, 3), constant(node, 4)
    if iou is not None and iou > 0:
        thresholds["iou_threshold"] = min(iou, 1.0)
    if score is not None:
        logits = config.head.decode == "boxes" and config.head.scores == "logits"
        probability = float(sigmoid(np.array(score, np.float32))) if logits else min(max(score, 0.0), 1.0)
        thresholds["score_threshold"] = probability
    return thresholds
