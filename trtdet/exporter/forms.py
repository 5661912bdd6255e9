"""Recognises the framework that exported a detector, and exports that do not detect boxes.

The framework decides how images are read where the head of the model leaves that open. Inputs and suppressions in the
graph are recognised and rewritten by :mod:`trtdet.passes.exported` and :mod:`trtdet.passes.own_suppression`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from trtdet.passes.cut_nms import embeds_nms
from trtdet.passes.exported import images
from trtdet.passes.protobuf import metadata


@dataclass(frozen=True)
class Form:
    """How one framework exports; a model has the form if it has all that is listed."""

    name: str
    family: str  # the shipped configuration with its pixels
    inputs: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()
    metadata: tuple[str, str] = ("", "")  # a key, and the start of its value
    suppresses: bool | None = None  # whether boxes are suppressed in the graph; None for both
    boxes: str = "xyxy"  # the order of corners that a suppression reads


FORMS = (
    Form("PaddleDetection", "ppyoloe", inputs=frozenset(("scale_factor",))),
    Form("RT-DETR, D-FINE or DEIM", "dfine", inputs=frozenset(("orig_target_sizes",))),
    Form("Ultralytics", "yolov8", metadata=("author", "Ultralytics")),
    Form("MMDeploy", "rtmo", outputs=frozenset(("dets", "keypoints")), suppresses=True),
    Form("MMDeploy", "rtmdet", outputs=frozenset(("dets", "labels")), suppresses=True),
    Form("RF-DETR or LW-DETR", "rfdetr", outputs=frozenset(("dets", "labels")), suppresses=False),
    Form("MMYOLO or YOLO end to end", "yolov8", outputs=frozenset(("num_dets", "boxes", "scores", "labels"))),
    Form("YOLO end to end", "yolov8", outputs=frozenset(("num_dets", "det_boxes", "det_scores", "det_classes"))),
    Form("YOLO-NAS", "yolov8", outputs=frozenset(("num_detections", "pred_boxes", "pred_scores", "pred_classes"))),
    Form("YOLO-NAS", "yolov8", outputs=frozenset(("graph2_num_predictions", "graph2_pred_boxes"))),
    Form("YOLO-NAS", "yolov8", outputs=frozenset(("graph2_flat_predictions",))),
    Form(
        "TensorFlow's object detection",
        "dfine",
        outputs=frozenset(("detection_boxes", "detection_scores", "detection_classes", "num_detections")),
        suppresses=True,
        boxes="yxyx",
    ),
    Form("torchvision", "dfine", outputs=frozenset(("boxes", "scores", "labels"))),
)
"""All forms; the first that fits counts."""


def form_of(model: onnx.ModelProto) -> Form | None:
    """The form of a model, as loaded or as it is in its file; None if it is not known."""
    # Inputs that were folded are initialisers or outputs of nodes now.
    names = {value.name for value in images(model)} | {tensor.name for tensor in model.graph.initializer}
    names |= {name for node in model.graph.node for name in node.output}
    outputs = {value.name for value in model.graph.output}
    notes = metadata(model)
    for form in FORMS:
        key, start = form.metadata
        fits = form.inputs <= names and form.outputs <= outputs and (not key or notes.get(key, "").startswith(start))
        if fits and form.suppresses in (None, embeds_nms(model)):
            return form
    return None


TASKS = {"segment": "seg", "pose": "pose", "obb": "obb"}
"""What Ultralytics' exporter writes as ``task`` into the metadata of detectors with more than boxes, and the end of the
shipped configurations that read them."""

OTHER_TASKS = {
    "classify": "a classification model",
    "semantic": "a semantic segmentation model",
    "depth": "a depth model",
}
"""What it writes for models that are no detectors."""

_TAKEN = "trtdet takes detectors"
_MOST_LANES = 8
_WITHOUT = "give a configuration that reads its outputs, such as yolov8-seg, with --config"


def no_detector(
    metadata: Mapping[str, str], shapes: Sequence[Sequence[int]], size: tuple[int, int]
) -> tuple[str, str] | None:
    """What a model with outputs of these shapes is, if it is not recognised as a detector, and what can be done.

    ``metadata`` is the model's, ``size`` its input's height and width. Returns None if nothing shows that it is not.
    """
    task = metadata.get("task", "")
    if task in OTHER_TASKS:
        return f"it is {OTHER_TASKS[task]} (task: {task} in its metadata)", f"{_TAKEN}; export one with task detect"
    other = _lanes(shapes) or _tracker(shapes, size) or _text(shapes)
    if other:
        return f"it is {other}", _TAKEN
    ranks = [len(shape) for shape in shapes]
    maps = [tuple(shape[2:]) for shape in shapes if len(shape) == 4]
    if len(shapes) == 1 and ranks[0] in (2, 4) and (ranks[0] == 2 or set(maps[0]) == {1}):
        kind = "an embedding or classification model" if shapes[0][1] >= 2 else "a regression model"
        return f"it is {kind}: its output is one row of {shapes[0][1]} numbers an image", _TAKEN
    if len(shapes) > 1 and set(ranks) == {2}:
        counts = " and ".join(str(shape[1]) for shape in shapes)
        return f"it is a classification or regression model: its outputs are rows of {counts} numbers an image", _TAKEN
    sides = tuple(side // 4 for side in size)
    if len(shapes) == 2 and sorted(ranks) == [3, 4] and maps[0] == sides:
        what = f"prototypes of masks {list(shapes[ranks.index(4)])} stand beside its rows"
        return f"it is a segmentation model: {what}", _WITHOUT
    if len(shapes) == 1 and ranks == [4] and maps[0] in (tuple(size), sides, tuple(side // 8 for side in size)):
        return (
            f"it is a segmentation or heat map model: its output is {shapes[0][1]} maps of {maps[0][0]}x{maps[0][1]}",
            _TAKEN,
        )
    if len(shapes) == 1 and ranks == [3] and _is_pose(tuple(shapes[0]), size):
        return "it is a pose model of one class: its rows hold a box, a score and 17 points", _WITHOUT
    return None


def _is_pose(shape: tuple[int, ...], size: tuple[int, int]) -> bool:
    cells = sum(-(-size[0] // stride) * -(-size[1] // stride) for stride in (8, 16, 32))
    return shape[1:] in ((56, cells), (cells, 56))


def _lanes(shapes: Sequence[Sequence[int]]) -> str:
    """Ultra Fast Lane Detection has columns by rows of the image and lanes, its second version also rows by columns;
    CLRNet and LaneATT have rows of a score pair, a start, an angle, a length and 72 points."""
    maps = [tuple(shape[1:]) for shape in shapes if len(shape) == 4]
    if len(shapes) == len(maps) == 1 and maps[0][2] <= _MOST_LANES < maps[0][1] < maps[0][0]:
        return f"a lane detection model: its output is {maps[0][0]} places for {maps[0][2]} lanes in {maps[0][1]} rows"
    if len(shapes) == len(maps) == 4 and sum(one[0] == 2 for one in maps) == 2 and {one[2] for one in maps} == {4}:
        return "a lane detection model: its outputs are places of 4 lanes by row and column, and whether there are any"
    if len(shapes) == 1 and len(shapes[0]) == 3 and shapes[0][2] in (72 + 5, 72 + 6):
        return f"a lane detection model: its output is {shapes[0][1]} lines of 72 points"
    return ""


def _tracker(shapes: Sequence[Sequence[int]], size: tuple[int, int]) -> str:
    """FairMOT has heat maps at a quarter of the size, and a map of embeddings beside them."""
    maps = [tuple(shape[1:]) for shape in shapes if len(shape) == 4]
    if len(shapes) != len(maps) or len(maps) < 3 or {one[1:] for one in maps} != {tuple(side // 4 for side in size)}:
        return ""
    most = max(one[0] for one in maps)
    return f"a tracking model: a map of {most} numbers to know objects again stands beside its heat maps" * (most >= 64)


def _text(shapes: Sequence[Sequence[int]]) -> str:
    """A recogniser of text has a row of symbols for each of a few places."""
    if len(shapes) != 1 or len(shapes[0]) != 3 or not shapes[0][1] < 200 < 1000 < shapes[0][2]:
        return ""
    return f"a text recognition model: its output is {shapes[0][1]} places with {shapes[0][2]} symbols"
