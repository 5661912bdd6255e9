"""Head decoding in NumPy, the reference for the graph that a backend runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.config import Config, HeadConfig
from trtdet.detection.anchors import anchor_points, grid_shapes
from trtdet.detection.expressions import computed
from trtdet.detection.parts import ANGLES, KEYPOINTS, MASK_COEFFICIENTS, PROTOTYPES, Float, Parts
from trtdet.detection.rotated import hulls
from trtdet.detection.suppression import corners_of, sigmoid, softmax
from trtdet.errors import ModelError

Shape = tuple[int | None, ...]
"""Shape of a raw output; None for an open dimension."""


def decode(outputs: Mapping[str, NDArray[Any]] | Sequence[NDArray[Any]], config: Config) -> tuple[Float, Float]:
    """Boxes and scores of :func:`decode_all`, which raises ModelError."""
    return decode_all(outputs, config)[:2]


def decode_all(
    outputs: Mapping[str, NDArray[Any]] | Sequence[NDArray[Any]], config: Config
) -> tuple[Float, Float, Parts]:
    """Decodes raw outputs into boxes, scores and parts by the rule ``config.head.decode`` (see HeadConfig).

    ``outputs`` are floating point, batch first, by name or in the model's order. With ``head.outputs``, a mapping is
    read by these names, and a sequence must be in their order. Returns boxes float32 (B, N, 4), x1 y1 x2 y2 in input
    pixels, not clipped, scores float32 (B, N, C), and what the head has beside them. A score is the class probability,
    times the objectness if the head has one; with ``config.suppresses_logits`` it is a logit. Boxes of a rotated
    detector are the hulls of its rotated boxes.

    Raises:
        ModelError: an output is missing, or its shape does not fit the head, the classes or the input size.
    """
    names = config.head.outputs
    if not isinstance(outputs, Mapping):
        if names is not None and len(names) != len(outputs):
            raise ModelError(f"head.outputs names {len(names)} outputs, got {len(outputs)}; name each one, in order")
        outputs = dict(zip(names or [f"#{index}" for index in range(len(outputs))], outputs, strict=True))
    if not outputs:
        raise ModelError(f"decode rule '{config.head.decode}' got no outputs; give the model's raw outputs")
    arrays = {name: np.asarray(array, dtype=np.float32) for name, array in outputs.items()}
    if config.head.compute is not None:
        arrays, config = computed(arrays, config), of_computed(config)
    shapes = {name: array.shape for name, array in arrays.items()}
    primary, secondary = match_outputs(shapes, config)
    array = np.concatenate([arrays[name] for name in primary], axis=1)
    raw = {name: arrays[output] for name, output in part_outputs(shapes, config).items()}
    widths = part_columns(primary[0], shapes, config)
    if widths:
        rows = array.transpose(0, 2, 1) if config.head.decode == "yolov8" else array
        *before, _ = np.cumsum([rows.shape[-1] - sum(widths.values()), *widths.values()])
        rows, *columns = np.split(rows, before, axis=-1)
        array = rows.transpose(0, 2, 1) if config.head.decode == "yolov8" else rows
        raw |= dict(zip(widths, columns, strict=True))
    boxes, scores = _decoded(array, [arrays[name] for name in secondary], config)
    return _with_parts(boxes, scores, raw, config=config)


def _with_parts(boxes: Float, scores: Float, raw: Mapping[str, Float], config: Config) -> tuple[Float, Float, Parts]:
    """Adds the parts; ``raw`` has them by the names of ``head.raw_parts``."""
    keypoints, rotated = raw.get(KEYPOINTS), None
    if keypoints is not None and config.head.keypoints is not None:
        keypoints = keypoints.reshape(*keypoints.shape[:2], len(config.head.keypoints.names), -1)
        if config.head.units == "relative":
            sides = np.ones(keypoints.shape[-1], np.float32)
            sides[:2] = input_sides(config)[:2]
            keypoints = keypoints * sides
        if keypoints.shape[-1] == 2:
            keypoints = np.concatenate([keypoints, np.ones_like(keypoints[..., :1])], axis=-1)
    if ANGLES in raw:
        low, high = boxes[..., :2], boxes[..., 2:]
        rotated = np.concatenate([(low + high) * np.float32(0.5), high - low, raw[ANGLES]], axis=-1)
        boxes = hulls(rotated)
    return (
        boxes,
        scores,
        Parts(
            mask_coefficients=raw.get(MASK_COEFFICIENTS),
            prototypes=raw.get(PROTOTYPES),
            keypoints=keypoints,
            rotated_boxes=rotated,
        ),
    )


def _decoded(array: Float, secondary: Sequence[Float], config: Config) -> tuple[Float, Float]:
    """Boxes and scores of the outputs that :func:`match_outputs` chose."""
    head, classes = config.head, len(config.classes)
    if head.decode in ("yolox", "yolov5"):
        factors = sigmoid(array[..., 4:]) if head.scores == "logits" else array[..., 4:]
        centre, size = array[..., :2], array[..., 2:4]
        with np.errstate(over="ignore", invalid="ignore"):
            if head.decode == "yolox":
                points, strides = anchor_points(config, 0.0)
                centre, size = centre * strides + points, np.exp(size) * strides
            return corners_of(centre, size), factors[..., :1] * factors[..., 1:]
    if head.decode == "yolov8":
        rows = np.ascontiguousarray(array.transpose(0, 2, 1))
        return corners_of(rows[..., :2], rows[..., 2:4]), np.ascontiguousarray(rows[..., 4:])
    if head.decode == "detections":
        # A row has its score at its class and 0 elsewhere; a row of an unknown class is no candidate.
        mine = array[..., 5:] == np.arange(classes, dtype=np.float32)
        return _corners_in_pixels(array[..., :4], config), np.where(mine, array[..., 4:5], np.float32(0))
    if head.decode == "boxes":
        (scores,) = secondary
        if head.scores == "softmax":
            scores = softmax(scores)
        columns = class_columns(head, scores.shape[-1]) if head.columns is None else list(head.columns)
        return _corners_in_pixels(array, config), scores[..., columns]
    if secondary:
        scores, distances = array, np.concatenate(secondary, axis=1)
    else:
        scores, distances = array[..., :classes], array[..., classes:]
    # Each side of a box is the mean of a softmax over ``bins`` distances, in strides (Li et al. 2020).
    weights = softmax(distances.reshape(*distances.shape[:2], 4, head.bins))
    points, strides = anchor_points(config, head.cell_offset)
    ltrb = (weights @ np.arange(head.bins, dtype=np.float32)) * strides
    return np.concatenate([points - ltrb[..., :2], points + ltrb[..., 2:]], axis=-1), scores


def _corners_in_pixels(boxes: Float, config: Config) -> Float:
    if config.head.boxes == "cxcywh":
        boxes = corners_of(boxes[..., :2], boxes[..., 2:])
    elif config.head.boxes == "yxyx":
        boxes = boxes[..., [1, 0, 3, 2]]
    return boxes if config.head.units == "pixels" else boxes * input_sides(config)


def input_sides(config: Config) -> Float:
    """float32 (4,): width, height, width and height of the input in pixels, the units of relative corners."""
    return np.array([config.input.width, config.input.height] * 2, np.float32)


def class_columns(head: HeadConfig, count: int) -> slice:
    """The columns of the classes among ``count`` columns of scores, if ``head.columns`` is not set."""
    return slice(int(head.background == "first"), count - (head.background == "last"))


def of_computed(config: Config) -> Config:
    """The configuration for the boxes, scores and parts of ``head.compute``."""
    outputs = ("boxes", "scores", *config.head.raw_parts)
    return config.model_copy(update={"head": config.head.model_copy(update={"compute": None, "outputs": outputs})})


def part_outputs(shapes: Mapping[str, Shape], config: Config) -> dict[str, str]:
    """The raw outputs that hold parts alone, by the names of ``head.raw_parts``.

    For rule ``boxes`` these are all parts, for the others the prototypes. Raises ModelError: an output is missing or
    has another shape.
    """
    head, chosen = config.head, _chosen(shapes, config)
    if not head.has_parts:
        return {}
    if head.decode != "boxes":
        found = [name for name, shape in chosen.items() if len(shape) == 4]
        if not head.masks:
            return {}
        if len(found) != 1:
            raise ModelError(
                f"head.masks needs the output of the prototypes (B, M, h, w), got {_listing(chosen)}; name the outputs "
                "with head.outputs"
            )
        return {PROTOTYPES: found[0]}
    names = list(chosen)[2:]
    if len(names) != len(head.raw_parts):
        raise ModelError(
            f"decode rule 'boxes' takes boxes, scores, {', '.join(head.raw_parts)} here, got {_listing(chosen)}; "
            "name them in this order with head.outputs"
        )
    parts = dict(zip(head.raw_parts, names, strict=True))
    points = 0 if head.keypoints is None else len(head.keypoints.names)
    columns = {KEYPOINTS: (2 * points, 3 * points), ANGLES: (1,)}
    for part, name in parts.items():
        dimensions, shape = (4 if part == PROTOTYPES else 3), chosen[name]
        if len(shape) != dimensions or shape[-1] not in (None, *columns.get(part, (shape[-1],))):
            widths = " or ".join(map(str, columns.get(part, ("M",))))
            expected = "(B, M, h, w)" if part == PROTOTYPES else f"(B, N, {widths})"
            raise ModelError(f"output '{name}' is read as {part}, expected {expected}, got {_text(shape)}")
    return parts


def part_columns(name: str, shapes: Mapping[str, Shape], config: Config) -> dict[str, int]:
    """Number of columns of each part behind the classes in output ``name``; empty for rule ``boxes``.

    Raises ModelError: the columns do not fit the masks and keypoints of the configuration.
    """
    head = config.head
    if not head.has_parts or head.decode == "boxes":
        return {}
    count = shapes[name][1 if head.decode == "yolov8" else 2]
    first = 6 if head.decode == "detections" else len(config.classes) + {"yolov5": 5, "yolov8": 4}[head.decode]
    widths: dict[str, int] = {}
    if head.masks:
        widths[MASK_COEFFICIENTS] = shapes[part_outputs(shapes, config)[PROTOTYPES]][1] or 0
    left = (count or 0) - first - sum(widths.values()) - head.rotated
    if head.keypoints is not None:
        points = len(head.keypoints.names)
        widths[KEYPOINTS] = left if left in (2 * points, 3 * points) else 3 * points
    if head.rotated:
        widths[ANGLES] = 1
    total = first + sum(widths.values())
    if count != total:
        listed = " + ".join(f"{width} {part}" for part, width in widths.items())
        raise ModelError(
            f"output '{name}' has shape {_text(shapes[name])}, that is {count} channels; {total} were expected: "
            f"{first} of boxes and classes + {listed}; does 'classes' list the model's classes, and head.keypoints its "
            "keypoints?"
        )
    return widths


def _chosen(shapes: Mapping[str, Shape], config: Config) -> dict[str, Shape]:
    """The outputs that ``head.outputs`` names, or all. Raises ModelError: one is missing."""
    names = config.head.outputs
    missing = [name for name in names or () if name not in shapes]
    if missing:
        raise ModelError(
            f"head.outputs names {', '.join(map(repr, missing))}, which the model does not give; "
            f"its outputs are {', '.join(map(repr, shapes))}"
        )
    return {name: shapes[name] for name in names or shapes}


def match_outputs(shapes: Mapping[str, Shape], config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Selects the raw outputs that ``config.head.decode`` reads, here and in a graph, and checks their shapes.

    ``shapes`` are by name in the model's order, batch first. Returns the only output and an empty tuple; the class maps
    and the distance maps, in the order of the strides; or the boxes and the scores.

    Raises:
        ModelError: an output is missing or its shape does not fit; the message names the key that is likely wrong.
    """
    head = config.head
    chosen = _chosen(shapes, config)
    for name in part_outputs(shapes, config).values():
        del chosen[name]
    for name, shape in chosen.items():
        if len(shape) != 3:
            raise ModelError(
                f"output '{name}' has shape {_text(shape)}, decode rule '{head.decode}' expects three dimensions with "
                "the batch first; choose the raw outputs with head.outputs or another head.decode"
            )
    if head.decode == "boxes":
        return _match_boxes(chosen, config)
    if head.decode == "dfl" and len(chosen) != 1:
        return _match_levels(chosen, config)
    if len(chosen) != 1:
        raise ModelError(
            f"decode rule '{head.decode}' reads one output, the model gives {len(chosen)}: {_listing(chosen)}; "
            "name the one to read with head.outputs"
        )
    ((name, shape),) = chosen.items()
    if head.has_parts:
        part_columns(name, shapes, config)
    else:
        _check_channels(name, shape, config)
    if head.decode in ("yolox", "dfl"):
        expected = sum(rows * columns for rows, columns in grid_shapes(config))
        if shape[1] not in (None, expected):
            raise ModelError(
                f"output '{name}' has shape {_text(shape)}, that is {shape[1]} cells; input.size "
                f"{list(config.input.size)} with head.strides {list(head.strides)} gives {expected}; "
                "set input.size to the size the model was exported for, or head.strides to its strides"
            )
    return (name,), ()


def _match_boxes(chosen: Mapping[str, Shape], config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    head = config.head
    classes = len(config.classes) + (head.background != "none")
    least = None if head.columns is None else max(head.columns) + 1
    expected = f"boxes (B, N, 4) and scores (B, N, {classes if least is None else f'{least} or more'})"
    if len(chosen) != 2:
        raise ModelError(
            f"decode rule 'boxes' takes {expected}, got {len(chosen)} outputs: {_listing(chosen)}; name the two with "
            "head.outputs"
        )
    names = list(chosen)
    for boxes, scores in (names, names[::-1]):  # where both have four columns, boxes come first
        columns = chosen[scores][2]
        fits = columns is None or (columns == classes if least is None else columns >= least)
        if chosen[boxes][2] in (None, 4) and fits:
            return (boxes,), (scores,)
    free = least is None and head.background == "none"
    one_more = free and any(shape[2] == classes + 1 for shape in chosen.values())
    raise ModelError(
        f"decode rule 'boxes' takes {expected}, got {_listing(chosen)}; does 'classes' list the model's classes"
        + (", and is one of the scores that of no object (head.background: last)?" if one_more else "?")
    )


def _match_levels(chosen: Mapping[str, Shape], config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    head, classes, sides = config.head, len(config.classes), 4 * config.head.bins
    cells = [rows * columns for rows, columns in grid_shapes(config)]
    if len(chosen) != 2 * len(cells):
        raise ModelError(
            f"decode rule 'dfl' takes one output or a class map and a distance map for each of head.strides "
            f"{list(head.strides)}, got {len(chosen)} outputs: {_listing(chosen)}; set head.strides, or "
            "head.outputs"
        )
    unmatched, score_maps, distance_maps = dict(chosen), list[str](), list[str]()
    for stride, count in zip(head.strides, cells, strict=True):
        for width, maps, kind in ((classes, score_maps, "class"), (sides, distance_maps, "distance")):
            # If classes and distances have equally many channels, classes come first in the model.
            fitting = [name for name, shape in unmatched.items() if shape[1] in (None, count) and shape[2] == width]
            if not fitting:
                raise ModelError(
                    f"no output is the {kind} map (B, {count}, {width}) of stride {stride}, got "
                    f"{_listing(chosen)}; check input.size {list(config.input.size)}, head.strides, "
                    f"head.bins and the {classes} classes"
                )
            maps.append(fitting[0])
            del unmatched[fitting[0]]
    return tuple(score_maps), tuple(distance_maps)


def _text(shape: Shape) -> str:
    return "(" + ", ".join("?" if size is None else str(size) for size in shape) + ")"


def _listing(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"'{name}' {_text(shape)}" for name, shape in shapes.items())


def _check_channels(name: str, shape: Shape, config: Config) -> None:
    """Refuses a wrong number of channels and names the key that is likely wrong."""
    rule, bins, classes = config.head.decode, config.head.bins, len(config.classes)
    if rule == "detections":
        if shape[2] != 6:
            raise ModelError(
                f"output '{name}' has shape {_text(shape)}, decode rule 'detections' expects (B, N, 6): a box, its "
                "score and its class; choose the output with head.outputs or another head.decode"
            )
        return
    extra = {"yolox": 5, "yolov5": 5, "yolov8": 4, "dfl": 4 * bins}[rule]
    axis = 1 if rule == "yolov8" else 2
    if shape[axis] == extra + classes:
        return
    middle, last = (size or 0 for size in shape[1:])
    channels = min(last, middle) if rule == "yolov8" else last
    room = f" (the output has room for {channels - extra})" if channels > extra else ""
    hints = {
        "is head.decode 'yolox' or 'yolov5'?": last == 5 + classes,
        "is head.decode 'yolov8'?": middle == 4 + classes,
        "the output is transposed, it must be (B, 4 + C, N)": rule == "yolov8" and last == 4 + classes,
        "is head.decode 'dfl'?": last == classes + 4 * bins and rule != "dfl",
        "is head.decode 'detections' (with nms: none)?": last == 6,
        f"does 'classes' list the model's classes{room}?": True,
    }
    layout = f"(B, N, {extra + classes})" if axis == 2 else f"(B, {extra + classes}, N)"
    box_channels = f"4 * {bins} head.bins" if rule == "dfl" else str(extra)
    raise ModelError(
        f"output '{name}' has shape {_text(shape)}, that is {shape[axis]} channels; decode rule '{rule}' expects "
        f"{layout}, {box_channels} + {classes} classes; "
        f"{next(hint for hint, fits in hints.items() if fits)}"
    )
