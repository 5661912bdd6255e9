"""raw head -> boxes (B, N, 4) xyxy in network pixels, scores (B, N, C), and masks, keypoints, rotated boxes"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.config import Config
from trtdet.detection.anchors import anchor_points
from trtdet.detection.expressions import evaluate, shapes
from trtdet.detection.heads import (
    Shape,
    class_columns,
    input_sides,
    match_outputs,
    of_computed,
    part_columns,
    part_outputs,
)
from trtdet.detection.parts import ANGLES, KEYPOINTS, MASK_COEFFICIENTS, PROTOTYPES, ROTATED_BOXES, Parts
from trtdet.detection.suppression import sigmoid
from trtdet.passes.base import Options, PassResult, Writer
from trtdet.passes.model import cpu_session, unchecked
from trtdet.passes.provenance import Origin
from trtdet.passes.walk import maker

NUM_DETS = "num_dets"
BOXES = "boxes"
SCORES = "scores"
CLASSES = "classes"
CONTRACT = (NUM_DETS, BOXES, SCORES, CLASSES)
"""Output names of every engine; a model's own tensors of these names are renamed."""

PARTS = (MASK_COEFFICIENTS, PROTOTYPES, KEYPOINTS, ROTATED_BOXES)
"""Names of the outputs beside these, of one-stage detectors that have masks, keypoints or rotated boxes, in order."""

_SIZED_BY_DATA = ("Compress", "If", "Loop", "NonMaxSuppression", "NonZero", "Scan", "Unique")
"""Operators whose number of output rows may depend on the image."""

ALL_BOXES, ALL_SCORES = f"{BOXES}_all", f"{SCORES}_all"
"""Names of the decoded boxes and scores in a model with other outputs."""


def of_all(part: str) -> str:
    """Name of a part of all boxes in a model with other outputs."""
    return part if part == PROTOTYPES else f"{part}_all"


@dataclass(frozen=True)
class Decoded:
    """Names of the tensors with all boxes, scores and parts of a rewritten model."""

    boxes: str  # float32 (B, N, 4), xyxy in network pixels
    scores: str  # float32 (B, N, C)
    logits: bool = False  # whether the scores still lack their sigmoid
    parts: tuple[tuple[str, str], ...] = ()  # each part and its tensor, see :class:`trtdet.detection.parts.Parts`
    size: tuple[int, int] = (0, 0)  # height and width of the input in pixels

    @property
    def names(self) -> tuple[str, ...]:
        return (self.boxes, self.scores, *(name for _, name in self.parts))

    def parts_of(self, outputs: Mapping[str, NDArray[Any]]) -> Parts:
        """The parts of a model's outputs, with or without the batch axis."""
        return Parts.of({part: outputs[name] for part, name in self.parts})

    def read(self, outputs: Mapping[str, NDArray[Any]]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Boxes, and scores 0..1, of a model's outputs, with or without the batch axis."""
        scores = outputs[self.scores]
        return outputs[self.boxes], sigmoid(scores) if self.logits else scores


def apply(graph: gs.Graph, options: Options) -> PassResult:
    """Writes the decode rule behind the raw outputs; ``boxes``, ``scores`` and the parts become the outputs.

    The arithmetic is the same as in :func:`trtdet.detection.heads.decode_all`. Raises ModelError if an output named in
    ``head.outputs`` is missing, or a shape does not fit the rule.
    """
    config = options.config
    _measure(graph)
    masks = [graph.outputs.pop()] if options.masks else []
    raw = {tensor.name: tensor for tensor in graph.outputs}
    write = Writer(graph, "trtdet/decode", Origin.DECODE)
    tensors = graph.tensors()
    for name in (*CONTRACT, ALL_BOXES, ALL_SCORES, *(each for part in PARTS for each in (part, of_all(part)))):
        if name in tensors:
            free = f"{name}_raw"
            while free in tensors:
                free += "_"
            tensors[name].name = free
    if config.head.compute is not None:
        raw, config = _computed(write, raw, config), of_computed(config)
    sizes = {name: _shape(tensor) for name, tensor in raw.items()}
    primary, secondary = match_outputs(sizes, config)
    raw_primary, raw_secondary = ([raw[name] for name in names] for names in (primary, secondary))
    values = {part: _joined(write, [raw[name]]) for part, name in part_outputs(sizes, config).items()}
    for part, name in part_outputs(sizes, config).items():
        values[part].shape = raw[name].shape
    if widths := part_columns(primary[0], sizes, config):
        axis = 1 if config.head.decode == "yolov8" else 2
        first = (sizes[primary[0]][axis] or 0) - sum(widths.values())
        lengths = write.const([first, *widths.values()], np.int64)
        rows, *columns = write.many("Split", 1 + len(widths), _joined(write, raw_primary), lengths, axis=axis)
        for tensor in (rows, *columns):
            tensor.dtype = np.float32
        for (part, width), column in zip(widths.items(), columns, strict=True):
            values[part] = _transposed(write, column) if axis == 1 else column
            values[part].shape = [None, None, width]
        raw_primary = [rows]
    boxes, scores = _decoded(write, raw_primary, raw_secondary, config=config)
    boxes, parts = _parts(write, boxes, values, config=config)
    for name, tensor in {BOXES: boxes, SCORES: scores, **parts}.items():
        tensor.name = name
        tensor.dtype = np.float32
    graph.outputs = [boxes, scores, *(parts[name] for name in PARTS if name in parts), *masks]
    graph.cleanup().toposort()
    return PassResult(1)


def _measure(graph: gs.Graph) -> None:
    """Runs a black image and sets unknown output sizes, in place: shape inference misses the number of boxes in some
    exports with an open batch."""
    image = graph.inputs[0]
    sides = list(image.shape or ())[1:]
    unsized = [tensor for tensor in graph.outputs if not tensor.shape or None in _shape(tensor)[1:]]
    if not unsized or len(graph.inputs) != 1 or not all(isinstance(side, int) for side in sides):
        return
    if any(node.op in _SIZED_BY_DATA for node in graph.nodes):
        return
    batch = image.shape[0] if isinstance(image.shape[0], int) and image.shape[0] > 0 else 1
    feeds = {image.name: np.zeros((batch, *sides), np.float32)}
    try:
        arrays = cpu_session(unchecked(graph)).run([tensor.name for tensor in unsized], feeds)
    except Exception:  # an operator that onnxruntime lacks: the sizes stay open
        return
    for tensor, array in zip(unsized, arrays, strict=True):
        tensor.shape = [image.shape[0], *array.shape[1:]]


def _computed(write: Writer, raw: dict[str, gs.Variable], config: Config) -> dict[str, gs.Variable]:
    """Boxes and scores that ``head.compute`` gives, with their shapes."""

    def step(op: str, tensors: Sequence[gs.Tensor | NDArray[Any]], attributes: dict[str, Any]) -> gs.Variable:
        inputs = (tensor if isinstance(tensor, gs.Tensor) else write.const(tensor, tensor.dtype) for tensor in tensors)
        return write(op, *inputs, **attributes)

    sizes = shapes({name: _shape(tensor) for name, tensor in raw.items()}, config)
    computed = evaluate({name: _joined(write, [tensor]) for name, tensor in raw.items()}, step, config)
    batch = next(iter(raw.values())).shape[0]
    for name, tensor in computed.items():
        tensor.dtype = np.float32
        tensor.shape = [batch, *(size or f"{name}_{at}" for at, size in enumerate(sizes[name][1:]))]
    return computed


def _shape(tensor: gs.Tensor) -> Shape:
    return tuple(size if isinstance(size, int) and size > 0 else None for size in tensor.shape or ())


def _joined(write: Writer, tensors: list[gs.Variable]) -> gs.Variable:
    # A float64 constant makes some exporters decode in float64; everything behind this is float32.
    single = [tensor if tensor.dtype == np.float32 else write("Cast", tensor, to=1) for tensor in tensors]
    return single[0] if len(single) == 1 else write("Concat", *single, axis=1)


def _split(write: Writer, tensor: gs.Variable, sizes: list[int], *, axis: int = 2) -> list[gs.Variable]:
    return write.many("Split", len(sizes), tensor, write.const(sizes, np.int64), axis=axis)


def _corners(write: Writer, centre: gs.Variable, size: gs.Variable, *, axis: int = 2) -> gs.Variable:
    half = write("Mul", size, write.const(0.5, np.float32))
    return write("Concat", write("Sub", centre, half), write("Add", centre, half), axis=axis)


def _transposed(write: Writer, tensor: gs.Variable) -> gs.Variable:
    return write("Transpose", tensor, perm=[0, 2, 1])


def _joint_parts(tensor: gs.Tensor, widths: list[int]) -> list[gs.Tensor]:
    """The tensors that are joined along the channels to give this one, if they are this wide; none otherwise."""
    joint = maker(tensor, "Concat")
    found = list(joint.inputs) if joint and joint.attrs["axis"] == 1 else []
    return found if [part.shape[1] if part.shape else None for part in found] == widths else []


def _columns(write: Writer, tensor: gs.Variable, widths: list[int]) -> list[gs.Variable]:
    """Parts (B, width, N) of a tensor (B, C, N). Where it joins parts, of all boxes or of the maps (B, C, H, W) of each
    level, these are taken as they were before, as to join and to split again takes time."""
    if parts := _joint_parts(tensor, widths):
        return parts
    levels = maker(tensor, "Concat")
    reshapes = [maker(level, "Reshape") for level in levels.inputs] if levels and levels.attrs["axis"] == 2 else []
    maps = [_joint_parts(reshape.inputs[0], widths) if reshape else [] for reshape in reshapes]
    if not maps or any(not level or len(level[0].shape) != 4 for level in maps):
        return _split(write, tensor, widths, axis=1)
    sizes = [write.const([0, width, -1], np.int64) for width in widths]
    flat = [[write("Reshape", *pair) for pair in zip(level, sizes, strict=True)] for level in maps]
    return [write("Concat", *level_parts, axis=2) for level_parts in zip(*flat, strict=True)]


def _boxes_and_scores(
    write: Writer, joined: gs.Variable, *, widths: list[int], config: Config
) -> tuple[gs.Variable, gs.Variable]:
    """Boxes and scores of rows, or of columns, of centre, size and what is multiplied to a score.

    Columns as a whole are computed in a fraction of the time of rows of 2 to 80 numbers.
    """
    transpose, columns = maker(joined, "Transpose"), joined if config.head.decode == "yolov8" else None
    rows = 1 if columns is None else 2  # axis of the boxes
    if columns is None and transpose and transpose.attrs.get("perm") == [0, 2, 1]:
        columns = transpose.inputs[0]
    axis = 2 if columns is None else 1
    corners, *factors = _split(write, joined, widths) if columns is None else _columns(write, columns, widths)
    centre, size = _split(write, corners, [2, 2], axis=axis)
    if config.head.decode == "yolox":
        points, strides = (array if axis == 2 else array.T for array in anchor_points(config, 0.0))
        stride = write.const(strides[None], np.float32)
        centre = write("Add", write("Mul", centre, stride), write.const(points[None], np.float32))
        size = write("Mul", write("Exp", size), stride)
    boxes, scores = _corners(write, centre, size, axis=axis), factors[0]
    if len(factors) == 2:
        logits = config.head.scores == "logits"
        scores = write("Mul", *(write("Sigmoid", tensor) if logits else tensor for tensor in factors))
    if axis == 1:
        boxes, scores = _transposed(write, boxes), _transposed(write, scores)
    if joined.shape:  # which inference may not find again, as it is told of the output alone
        boxes.shape, scores.shape = ([joined.shape[0], joined.shape[rows], width] for width in (4, widths[-1]))
    return boxes, scores


def _decoded(
    write: Writer, primary: list[gs.Variable], secondary: list[gs.Variable], config: Config
) -> tuple[gs.Variable, gs.Variable]:
    """Boxes and scores of the outputs that :func:`match_outputs` chose."""
    head, classes = config.head, len(config.classes)
    joined = _joined(write, primary)
    if head.decode in ("yolox", "yolov5"):
        return _boxes_and_scores(write, joined, widths=[4, 1, classes], config=config)
    if head.decode == "yolov8":
        return _boxes_and_scores(write, joined, widths=[4, classes], config=config)
    if head.decode == "detections":
        boxes, score, label = _split(write, joined, [4, 1, 1])
        mine = write("Equal", label, write.const(np.arange(classes)[None, None], np.float32))
        return _boxes(write, boxes, config), write("Where", mine, score, write.const(0.0, np.float32))
    if head.decode == "boxes":
        boxes, scores = _boxes(write, joined, config), _joined(write, secondary)
        if head.scores == "softmax":
            scores = write("Softmax", scores, axis=2)
        if head.columns is not None:
            scores = write("Gather", scores, write.const(head.columns, np.int64), axis=2)
        elif head.background != "none":
            columns = class_columns(head, classes + 1)
            scores = write("Slice", scores, *(write.const([at], np.int64) for at in (columns.start, columns.stop, 2)))
        return boxes, scores
    if secondary:
        scores, distances = joined, _joined(write, secondary)
    else:
        scores, distances = _split(write, joined, [classes, 4 * head.bins])
    points, strides = anchor_points(config, head.cell_offset)
    per_side = write("Reshape", distances, write.const([0, -1, 4, head.bins], np.int64))
    weights = write.const(np.arange(head.bins).reshape(head.bins, 1), np.float32)
    expected = write("MatMul", write("Softmax", per_side, axis=3), weights)
    sides = write("Reshape", expected, write.const([0, -1, 4], np.int64))
    before, after = _split(write, write("Mul", sides, write.const(strides[None], np.float32)), [2, 2])
    centre = write.const(points[None], np.float32)
    return write("Concat", write("Sub", centre, before), write("Add", centre, after), axis=2), scores


def _parts(
    write: Writer, boxes: gs.Variable, values: Mapping[str, gs.Variable], config: Config
) -> tuple[gs.Variable, dict[str, gs.Variable]]:
    """Boxes, which are hulls if they are rotated, and the parts by name; ``values`` are named as ``head.raw_parts``."""
    parts = {name: value for name, value in values.items() if name in (MASK_COEFFICIENTS, PROTOTYPES)}
    if KEYPOINTS in values and config.head.keypoints is not None:
        points = len(config.head.keypoints.names)
        width = int(values[KEYPOINTS].shape[2]) // points
        rows = write("Reshape", values[KEYPOINTS], write.const([0, 0, points, width], np.int64))
        if config.head.units == "relative":
            factors = np.append(input_sides(config)[:2], np.ones(width - 2, np.float32))
            rows = write("Mul", rows, write.const(factors, np.float32))
        if width == 2:  # a third column of ones
            rows = write("Pad", rows, write.const([0] * 7 + [1], np.int64), write.const(1.0, np.float32))
        parts[KEYPOINTS] = rows
    if ANGLES in values:
        half = write.const(0.5, np.float32)
        low, high = _split(write, boxes, [2, 2])
        centre, size = write("Mul", write("Add", low, high), half), write("Sub", high, low)
        parts[ROTATED_BOXES] = write("Concat", centre, size, values[ANGLES], axis=2)
        sides = write("Mul", size, half)
        cos, sin = (write("Abs", write(op, values[ANGLES])) for op in ("Cos", "Sin"))
        width, height = _split(write, sides, [1, 1])
        across = write("Add", write("Mul", width, cos), write("Mul", height, sin))
        down = write("Add", write("Mul", width, sin), write("Mul", height, cos))
        reach = write("Concat", across, down, axis=2)
        boxes = write("Concat", write("Sub", centre, reach), write("Add", centre, reach), axis=2)
    return boxes, parts


def _boxes(write: Writer, boxes: gs.Variable, config: Config) -> gs.Variable:
    if config.head.boxes == "cxcywh":
        boxes = _corners(write, *_split(write, boxes, [2, 2]))
    elif config.head.boxes == "yxyx":
        boxes = write("Gather", boxes, write.const([1, 0, 3, 2], np.int64), axis=2)
    if config.head.units == "pixels":
        return boxes
    return write("Mul", boxes, write.const(input_sides(config), np.float32))
