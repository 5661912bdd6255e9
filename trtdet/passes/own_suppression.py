"""The suppression that an exporter wrote into a model: where it is, what it reads, and its thresholds.

Exporters write it in these ways, which one search finds:

- a plugin node on boxes and scores of all classes (``PLUGINS``): YOLOv6, YOLOv7, YOLOv8 and DAMO-YOLO "end to end",
  MMDeploy and MMYOLO for TensorRT;
- ONNX's NonMaxSuppression on the scores of all classes: MMDeploy's ``multiclass_nms`` (mmdeploy/mmcv/ops/nms.py),
  Paddle2ONNX's ``multiclass_nms3`` (paddle2onnx/mapper/detection/multiclass_nms.cc), YOLO-NAS, TensorFlow;
- NonMaxSuppression on the best class of each box, the class in an offset of the boxes: Ultralytics with ``nms=True``
  (``NMSModel`` in ultralytics/engine/exporter.py), YOLOv6 and YOLOv7 end to end for onnxruntime;
- a NonMaxSuppression for each class: TensorFlow's object detection (``multiclass_non_max_suppression`` in
  object_detection/core/post_processing.py);
- NonMaxSuppression on rows that were selected class by class, one behind the other: torchvision's SSD
  (``postprocess_detections`` in torchvision/models/detection/ssd.py);
- either, with keypoints of the kept rows: MMDeploy (:mod:`trtdet.passes.kept_rows`);
- NonMaxSuppression on what was decoded of the best of each level: MMDeploy, torchvision's RetinaNet and FCOS
  (:mod:`trtdet.passes.levels`).

Boxes and scores are followed upwards through everything that only selects rows (masks over a threshold, a TopK before
the suppression, the image of a batch) to the tensors with all boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import onnx_graphsurgeon as gs

from trtdet.config import NmsConfig
from trtdet.detection.plugin_nms import EfficientNms
from trtdet.errors import ModelError
from trtdet.passes.kept_rows import read_all_keypoints
from trtdet.passes.levels import read_all_pairs, read_all_rows
from trtdet.passes.nms import EFFICIENT
from trtdet.passes.walk import SAME_VALUES, constant, depends, downstream, maker, number, upstream

ONNX = "NonMaxSuppression"


@dataclass(frozen=True)
class Plugin:
    """The attributes of a plugin that suppresses."""

    score: str
    iou: str
    most: str  # limit for all classes together
    background: str
    candidates: str = ""  # limit of boxes before the suppression


_BATCHED = Plugin("scoreThreshold", "iouThreshold", "keepTopK", background="backgroundLabelId", candidates="topK")

PLUGINS = {
    EFFICIENT: Plugin("score_threshold", "iou_threshold", "max_output_boxes", background="background_class"),
    "BatchedNMS_TRT": _BATCHED,
    "BatchedNMSDynamic_TRT": _BATCHED,
    "TRTBatchedNMS": Plugin(
        "score_threshold", "iou_threshold", "keep_topk", background="background_label_id", candidates="topk"
    ),
}
"""By operator: TensorRT's plugins (plugin/efficientNMSPlugin, plugin/batchedNMSPlugin) and MMDeploy's
(csrc/mmdeploy/backend_ops/tensorrt/batched_nms)."""

_SAME_VALUES = (*SAME_VALUES, "Expand")
_PICKS = ("Gather", "GatherND", "GatherElements")
_INDEXING = (*_SAME_VALUES, "Slice", "Split", "Concat", "Transpose", "Add", "Mul", "Tile")
_MOST = np.iinfo(np.int32).max
_NEAR = 24
"""Number of nodes before a selection of rows that are searched for its threshold and limit."""


@dataclass(frozen=True)
class OwnSuppression:
    """A suppression in a graph, and the tensors with all boxes and scores before it."""

    name: str  # of the node
    kind: Literal["efficient", "onnx"]  # a value of --nms
    boxes: gs.Tensor  # (B, N, 4), (B, N, 1, 4) or (N, 4)
    scores: gs.Tensor  # (B, N, C), (B, C, N) or without the batch
    by_class: bool  # whether scores are (B, C, N)
    centre: bool  # whether boxes are centre, width and height
    logits: bool  # whether the node applies a sigmoid
    background: int  # the column of no object; -1 for none
    thresholds: dict[str, Any]  # keys of NmsConfig
    stretch: tuple[float, ...] = ()  # factors of x1 y1 x2 y2 behind it; empty for none
    keypoints: gs.Tensor | None = None  # (B, N, P, 3), of models that give the keypoints of the kept rows

    @property
    def background_column(self) -> Literal["none", "first", "last"]:
        """The column as a value of the key ``head.background``."""
        return "none" if self.background < 0 else "last" if self.background else "first"

    @property
    def classes(self) -> int | None:
        """The number of columns of scores; None if the shape is open."""
        shape = list(self.scores.shape or ())
        size = shape[-2 if self.by_class else -1] if len(shape) > 1 else None
        return size if isinstance(size, int) and size > 0 else None


def suppressions(graph: gs.Graph) -> list[gs.Node]:
    """The nodes of a graph that suppress."""
    return [node for node in graph.nodes if node.op == ONNX or node.op in PLUGINS]


def own_suppression(graph: gs.Graph) -> OwnSuppression | None:
    """The suppression of a graph with folded constants; None if there is none. Raises ModelError if it cannot be cut
    off, or there are several that differ."""
    nodes = suppressions(graph)
    if not nodes:
        return None
    whole = _split_by_class(nodes)
    if whole is not None:
        return _of_onnx(nodes[0], (), whole)
    keypoints = read_all_keypoints(graph, nodes[0]) if len(nodes) == 1 else None
    floors = [_read_all_levels(graph, node) if node.op == ONNX else () for node in nodes]
    owns = [
        _of_plugin(node) if node.op in PLUGINS else _of_onnx(node, floor)
        for node, floor in zip(nodes, floors, strict=True)
    ]
    first = owns[0]  # one for each image of a batch reads the same tensors
    if any((own.boxes, own.scores, own.thresholds) != (first.boxes, first.scores, first.thresholds) for own in owns):
        raise ModelError(
            f"the model embeds several NMS nodes: {', '.join(node.name or node.op for node in nodes)}; name the "
            "tensors before the last node with head.outputs and use head.decode boxes"
        )
    if keypoints is None:
        return first
    thresholds = dict(first.thresholds)
    if "pre_nms_topk" in thresholds:  # a plugin takes more than the TopK of another kind of suppression
        thresholds["pre_nms_topk"] = min(thresholds["pre_nms_topk"], NmsConfig().pre_nms_topk)
    return replace(first, keypoints=keypoints, thresholds=thresholds)


def refused(name: str, obstacle: str) -> ModelError:
    return ModelError(
        f"the NMS '{name}' embedded in the model cannot be cut off: {obstacle}",
        "name the raw outputs before it with head.outputs",
    )


def _of_plugin(node: gs.Node) -> OwnSuppression:
    names, attributes = PLUGINS[node.op], node.attrs
    missing = [name for name in (names.score, names.iou, names.most) if name not in attributes]
    if missing:
        raise ModelError(f"node '{node.name or node.op}' lacks its attribute '{missing[0]}'; export the model again")
    if len(node.inputs) > 2:
        raise refused(node.name or node.op, "it decodes boxes from anchors")
    boxes, scores = node.inputs[:2]
    if boxes.shape is not None and len(boxes.shape) == 4 and boxes.shape[2] != 1:
        raise refused(node.name or node.op, "it has boxes of its own for each class")
    most, limit = int(attributes[names.most]), EfficientNms.CANDIDATES
    if names.candidates:
        # MMDeploy asks for 5000 candidates, more than EfficientNMS takes.
        limit = min(max(int(attributes.get(names.candidates, limit)), most), EfficientNms.CANDIDATES)
    return OwnSuppression(
        name=node.name or node.op,
        kind="efficient",
        boxes=boxes,
        scores=scores,
        by_class=False,
        centre=attributes.get("box_coding", 0) == 1,
        logits=attributes.get("score_activation", 0) == 1,
        background=int(attributes.get(names.background, -1)),
        thresholds={
            "score_threshold": float(attributes[names.score]),
            "iou_threshold": float(attributes[names.iou]),
            "max_detections": most,
            "class_agnostic": bool(attributes.get("class_agnostic", 0)),
            "pre_nms_topk": limit,
            "candidates": "all-classes",
        },
    )


def _read_all_levels(graph: gs.Graph, node: gs.Node) -> Sequence[float]:
    """Makes a suppression read all rows, where the best of each level were selected before the boxes are decoded;
    returns the thresholds of that selection."""
    scores = _followed(node.inputs[1], by_class=True)
    if scores.levels is None:
        return ()
    _, boxes = _picked_boxes(node)
    branches = [_followed(source, by_class=True) for source in scores.levels.inputs[0].inputs]
    if boxes is not None and read_all_pairs(graph, node, boxes=boxes, pairs=[branch.source for branch in branches]):
        return [floor for branch in branches for floor in branch.floors()]
    read_all_rows(graph, scores.levels)
    return ()


def _split_by_class(nodes: Sequence[gs.Node]) -> gs.Tensor | None:
    """The scores (N, C) or (B, N, C) of which each node suppresses one class, with the same boxes and thresholds; None
    if the nodes are others."""
    if len(nodes) < 2 or any(node.op != ONNX or node.inputs[0] is not nodes[0].inputs[0] for node in nodes):
        return None
    columns = [_column(node.inputs[1]) for node in nodes]
    whole, thresholds = columns[0][0], {tuple(constant(node, at) for at in (2, 3, 4)) for node in nodes}
    if whole is None or not whole.shape or len(thresholds) > 1 or any(scores is not whole for scores, _ in columns):
        return None
    return whole if sorted(index for _, index in columns) == list(range(whole.shape[-1])) else None


def _column(tensor: gs.Tensor) -> tuple[gs.Tensor | None, int]:
    """The tensor of which another is one column of the last axis, and the column; None and -1 if it is none."""
    while (node := maker(tensor, *_SAME_VALUES)) is not None:
        tensor = node.inputs[0]
    node = maker(tensor, "Slice")
    if node is None or not all(isinstance(bound, gs.Constant) for bound in node.inputs[1:]):
        return None, -1
    source, (starts, stops, *rest) = node.inputs[0], [bound.values.tolist() for bound in node.inputs[1:]]
    rank = len(source.shape or ())
    axes = [axis % rank for axis in rest[0]] if rest and rank else list(range(len(starts)))
    if not rank or axes[-1] != rank - 1 or any(starts[:-1]) or stops[-1] != starts[-1] + 1:
        return None, -1
    whole = all(stop >= source.shape[axis] for axis, stop in zip(axes[:-1], stops[:-1], strict=True))
    return (source, starts[-1]) if whole else (None, -1)


def _of_onnx(node: gs.Node, selected_over: Sequence[float], whole: gs.Tensor | None = None) -> OwnSuppression:
    """``whole`` are the scores (N, C) or (B, N, C) of all classes, where the node reads those of one."""
    name, by_class = node.name or node.op, whole is None
    scores = _followed(node.inputs[1] if whole is None else whole, by_class=by_class)
    reader, picked = _picked_boxes(node)
    boxes = _followed(node.inputs[0] if picked is None else picked, by_class=False)
    if scores.levels is not None or boxes.levels is not None:
        raise ModelError(
            f"the NMS '{name}' embedded in the model cannot be cut off: its boxes are decoded level by level after the "
            "best were selected",
            "export the model without post-processing",
        )
    if picked is None and scores.reduced and _offset(node.inputs[0]):
        raise refused(
            node.name or node.op, "the class is hidden in an offset of its boxes, and these are not read without it"
        )
    if boxes.source.shape is not None and len(boxes.source.shape) == 4 and boxes.source.shape[2] != 1:
        raise refused(name, "it has boxes of its own for each class")
    thresholds: dict[str, Any] = {"class_agnostic": False, "candidates": "all-classes"}
    if scores.reduced:
        thresholds = {"class_agnostic": not _offset(node.inputs[0]), "candidates": "best-class"}
    if scores.columns is not None:
        thresholds["class_agnostic"] = not _offset(node.inputs[0])
    iou, floor = constant(node, 3), constant(node, 4)
    if iou is not None and iou > 0:
        thresholds["iou_threshold"] = min(iou, 1.0)
    floors = [value for value in (floor, *scores.floors(), *selected_over) if value is not None]
    if floors:
        thresholds["score_threshold"] = max(floors)
    one_class = scores.reduced or (by_class and node.inputs[1].shape is not None and node.inputs[1].shape[1] == 1)
    limits = [int(limit) for limit in (constant(node, 2),) if limit is not None and one_class]
    behind = _limits(node) if whole is None else _counted(node)
    limits = [limit for limit in (*limits, *behind) if 0 < limit < _MOST]
    if limits:
        thresholds["max_detections"] = min(limits)
    # Of all classes a limit counts boxes, and pre_nms_topk pairs: a tighter one would lose pairs of the best boxes.
    if scores.reduced and (before := scores.limits()):
        thresholds["pre_nms_topk"] = max(min(before), thresholds.get("max_detections", 1))
    return OwnSuppression(
        name=name,
        kind="onnx",
        boxes=boxes.source,
        scores=scores.source,
        by_class=scores.by_class,
        centre=node.attrs.get("center_point_box", 0) == 1,
        logits=False,
        background=-1 if scores.columns is None else scores.columns,
        thresholds=thresholds,
        stretch=() if reader is None else _stretch(reader),
    )


@dataclass
class _Followed:
    """The tensor with all rows behind a tensor with some, and what selected these."""

    source: gs.Tensor
    by_class: bool  # whether the rows' classes come before the rows
    reduced: bool = False  # whether the best class of each row was taken
    selections: list[gs.Node] = field(default_factory=list)
    columns: int | None = None  # the background's column, or -1, where rows were selected class by class
    levels: gs.Tensor | None = None  # rows that a Concat joins, selected from several tensors

    def _before(self) -> Iterator[gs.Node]:
        for node in self.selections:
            yield node
            if len(node.inputs) > 1 and node.op in _PICKS:
                yield from _nearest(node.inputs[1])

    def floors(self) -> list[float]:
        """Thresholds of the masks that selected rows."""
        over = [node for node in self._before() if node.op in ("Greater", "GreaterOrEqual")]
        return [value for node in over if (value := constant(node, 1)) is not None]

    def limits(self) -> list[int]:
        """Numbers of rows to which a TopK limited them."""
        kept = (node for node in self._before() if node.op == "TopK" and len(node.inputs) > 1)
        return [int(value) for node in kept if (value := _limit(node.inputs[1])) is not None and value > 1]


def _nearest(tensor: gs.Tensor) -> Iterator[gs.Node]:
    return (node for node, _ in zip(upstream(tensor), range(_NEAR), strict=False))


def _followed(tensor: gs.Tensor, by_class: bool) -> _Followed:
    followed = _Followed(tensor, by_class)
    while (node := maker(tensor)) is not None:
        selects = node.op in _PICKS or (node.op == "TopK" and node.outputs[0] is tensor)
        if node.op == "Gather" and number(node.inputs[1]) is not None:
            selects = node.attrs.get("axis", 0) == 0  # one image of the batch
        elif node.op in _PICKS and isinstance(node.inputs[1], gs.Constant):
            selects = False  # columns
        if node.op == "Slice":
            selects = constant(node, 3) == 0
        if node.op == "Split":
            selects = len(node.outputs) == 1  # the only image of a batch
        if node.op == "ReduceMax":
            axes = node.attrs.get("axes", [number(node.inputs[1]) if len(node.inputs) > 1 else None])
            rank = len(node.inputs[0].shape or (0, 0, 0))
            if len(axes) != 1 or axes[0] is None:
                break
            by_class, selects, followed.reduced = int(axes[0]) % rank != rank - 1, True, True
        elif node.op == "Concat":
            branches = [_followed(source, by_class) for source in node.inputs]
            if not all(branch.selections for branch in branches):
                break
            source, followed.columns = _joined(branches)
            if source is None:
                followed.levels = tensor
                break
            by_class = by_class and followed.columns is None  # the columns are the last axis
            followed.source, followed.by_class = source, by_class
            followed.selections += branches[0].selections
            tensor = source
            continue
        elif node.op == "Transpose":
            if node.attrs.get("perm") not in ([0, 2, 1], [1, 0]):
                break
            by_class = not by_class
        elif not selects and node.op not in _SAME_VALUES:
            break
        tensor = node.inputs[0]
        if selects:
            followed.source, followed.by_class = tensor, by_class
            followed.selections.append(node)
    # MMDeploy joins the images of a batch to pick rows of them: (B, N, C) -> (B * N, C).
    joined = maker(followed.source, "Flatten")
    if joined is not None and joined.attrs.get("axis", 1) == 2:
        followed.source = joined.inputs[0]
    return followed


def _joined(branches: list[_Followed]) -> tuple[gs.Tensor | None, int | None]:
    """The tensor from which all branches select rows, and the background's column, -1 for none, if each branch reads
    another column; None if they select from several tensors."""
    sources = [branch.source for branch in branches]
    if all(source is sources[0] for source in sources):
        return sources[0], None
    columns = [node for source in sources if (node := maker(source, "Gather")) is not None]
    if len(columns) < len(sources) or any(node.attrs.get("axis", 0) == 0 for node in columns):
        return None, None
    whole, indices = columns[0].inputs[0], [number(node.inputs[1]) for node in columns]
    first = indices[0]
    if first not in (0, 1) or indices != [first + at for at in range(len(indices))]:
        return None, None
    return (whole, 0 if first else -1) if all(node.inputs[0] is whole for node in columns) else (None, None)


def _stretch(reader: gs.Node) -> tuple[float, ...]:
    """The factor of each column of the picked boxes, by which a model undoes its own resizing; empty for none."""
    split = next((node for tensor in reader.outputs for node in tensor.outputs if node.op == "Split"), None)
    if split is None or len(split.outputs) != 4:
        return ()
    factors = list[float]()
    for column in split.outputs:
        while len(column.outputs) == 1 and column.outputs[0].op in _SAME_VALUES:
            column = column.outputs[0].outputs[0]
        if len(column.outputs) != 1 or column.outputs[0].op != "Mul":
            return ()
        factor = constant(column.outputs[0], 1)
        if factor is None:
            return ()
        factors.append(factor)
    return () if set(factors) == {1.0} else tuple(factors)


def _offset(boxes: gs.Tensor) -> bool:
    """Whether the class is hidden in an offset of boxes: a sum with numbers of classes."""
    while (node := maker(boxes, "Add", "Mul", "Div", "Slice", "Concat", *_SAME_VALUES, *_PICKS)) is not None:
        if node.op == "Add":
            operands = [tensor for tensor in node.inputs if isinstance(tensor, gs.Variable)]
            return any(before.op in ("ArgMax", "TopK", "NonZero") for tensor in operands for before in _nearest(tensor))
        boxes = node.inputs[0]
    return False


def _picked_boxes(node: gs.Node) -> tuple[gs.Node | None, gs.Tensor | None]:
    """The node that picks boxes by the selected indices, and these boxes, which may differ from the compared ones."""
    for reader in _readers(node):
        if reader.op in _PICKS:
            data = reader.inputs[0]
            # A flat index picks rows of the flattened boxes.
            while (before := maker(data, *_SAME_VALUES)) is not None:
                data = before.inputs[0]
            whole = isinstance(data, gs.Variable) and data.dtype not in (np.int64, np.int32)
            boxes = whole and depends(node.inputs[0], data) and not depends(node.inputs[1], data)
            if boxes and (data.shape is None or data.shape[-1] == 4 or isinstance(data.shape[-1], str)):
                return reader, data
    return None, None


def _readers(node: gs.Node) -> Iterator[gs.Node]:
    """The nodes that use the selected indices, nearest first."""
    queue, seen = list(node.outputs), set[int]()
    for tensor in queue:
        for reader in tensor.outputs:
            if id(reader) in seen:
                continue
            yield reader
            if reader.op in _INDEXING or (reader.op in _PICKS and reader.inputs[0] is tensor):
                seen.add(id(reader))
                queue += reader.outputs


def _limits(node: gs.Node) -> list[int]:
    """Limits on the number of detections, from nodes behind a suppression."""
    limits, queue, seen = list[int](), list(node.outputs), set[int]()
    for tensor in queue:
        for reader in tensor.outputs:
            if id(reader) in seen or reader.op in (*PLUGINS, "Shape"):
                continue
            seen.add(id(reader))
            if reader.op == "TopK" and reader.inputs[0] is tensor and len(reader.inputs) > 1:
                limits += [int(limit)] if (limit := _limit(reader.inputs[1])) is not None else []
            if reader.op == "Slice" and reader.inputs[0] is tensor and constant(reader, 3) in (0, 1, None):
                start, stop = constant(reader, 1), constant(reader, 2)
                # The first rows of one column of indices, or of a table of detections.
                limits += [int(stop)] if start == 0 and stop is not None and stop > 3 else []
            queue += reader.outputs
    return limits


def _counted(node: gs.Node) -> list[int]:
    """The constants that limit how far a Range counts detections behind a suppression."""
    limits = list[int]()
    for reader in downstream([node]):
        if reader.op == "Min" and any(last.op == "Range" for last in reader.outputs[0].outputs):
            known = [number(source) for source in reader.inputs]
            limits += [int(value) for value in known if value is not None]
    return limits


def _limit(tensor: gs.Tensor) -> float | None:
    """The value of a constant count, or the constant in the minimum that gives the count; None without a constant."""
    if (value := number(tensor)) is not None:
        return value
    for node in _nearest(tensor):
        if node.op in ("Min", "ReduceMin", "Where"):
            joined = maker(node.inputs[0], "Concat") if node.op == "ReduceMin" else None
            values = [number(source) for source in (node if joined is None else joined).inputs]
            limits = [value for value in values if value is not None and value > 1]
            if limits:
                return min(limits)
    return None
