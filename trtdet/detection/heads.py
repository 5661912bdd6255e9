"""Head decoding in NumPy: the reference for the graph that a backend runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.config import Config, HeadConfig
from trtdet.detection.anchors import anchor_points, grid_shapes
from trtdet.detection.expressions import computed
from trtdet.detection.suppression import corners_of, sigmoid
from trtdet.errors import ModelError

Float = NDArray[np.float32]

Shape = tuple[int | None, ...]
"""Dimensions of a raw output; None for an open dimension."""


def decode(outputs: Mapping[str, NDArray[Any]] | Sequence[NDArray[Any]], config: Config) -> tuple[Float, Float]:
    """Turns raw outputs into boxes and scores, by the rule ``config.head.decode`` (see HeadConfig).

    The score of a class is its probability, times the objectness where the head has one; it stays a logit where
    ``config.suppresses_logits``.

    Args:
        outputs: the raw outputs by name or in the model's order, floating point, batch first. With
            ``head.outputs``, a mapping is read by these names; a sequence must be in their order.
        config: the head, the input size and the class names.

    Returns:
        boxes float32 (B, N, 4), x1 y1 x2 y2 in pixels of the network's input, not clipped; scores
        float32 (B, N, C), 0..1 or logits.

    Raises:
        ModelError: an output is missing or its shape does not fit the head, the classes and the input size; the
            message names the output, both shapes and the key that is likely wrong.
    """
    arrays = _arrays(outputs, config.head)
    if config.head.compute is not None:
        arrays, config = computed(arrays, config), of_computed(config)
    first, distances = match_outputs({name: array.shape for name, array in arrays.items()}, config)
    array = np.concatenate([arrays[name] for name in first], axis=1)
    if config.head.decode == "boxes":
        return _decode_boxes(array, config), _class_scores(arrays[distances[0]], config.head)
    if config.head.decode == "dfl":
        if not distances:
            classes = len(config.classes)
            return _decode_dfl(array[..., :classes], array[..., classes:], config)
        return _decode_dfl(array, np.concatenate([arrays[name] for name in distances], axis=1), config)
    rules = {"yolox": _decode_yolox, "yolov5": _decode_yolov5, "yolov8": _decode_yolov8}
    return {**rules, "detections": _decode_detections}[config.head.decode](array, config)


def of_computed(config: Config) -> Config:
    """The configuration of boxes and scores that ``head.compute`` has given."""
    return config.model_copy(
        update={"head": config.head.model_copy(update={"compute": None, "outputs": ("boxes", "scores")})}
    )


def match_outputs(shapes: Mapping[str, Shape], config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Finds which raw outputs the rule ``config.head.decode`` reads, and checks that they fit it.

    Shared by the reference here and the pass that writes the same rule into a graph.

    Args:
        shapes: the raw outputs' shapes by name, in the model's order, batch first.
        config: the head, the input size and the class names.

    Returns:
        The outputs that hold everything, or the class maps, or the boxes; and the distance maps in the order of the
        strides, or the scores that belong to the boxes; empty where one output holds everything.

    Raises:
        ModelError: an output is missing or its shape does not fit; the message names the key that is likely wrong.
    """
    head = config.head
    chosen = dict(shapes)
    if head.outputs is not None:
        missing = [name for name in head.outputs if name not in chosen]
        if missing:
            raise ModelError(
                f"head.outputs names {', '.join(map(repr, missing))}, which the model does not give; "
                f"its outputs are {', '.join(map(repr, chosen))}"
            )
        chosen = {name: chosen[name] for name in head.outputs}
    for name, shape in chosen.items():
        if len(shape) != 3:
            raise ModelError(
                f"output '{name}' has shape {_text(shape)}, decode rule '{head.decode}' expects three "
                "dimensions with the batch first; choose the raw outputs with head.outputs or another "
                "head.decode"
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
    least = max(head.columns, default=0) + 1 if head.columns is not None else None
    width = str(classes) if least is None else f"{least} or more"
    expected = f"boxes (B, N, 4) and scores (B, N, {width})"
    if len(chosen) != 2:
        raise ModelError(
            f"decode rule 'boxes' takes {expected}, got {len(chosen)} outputs: "
            f"{_listing(chosen)}; name the two with head.outputs"
        )
    names = list(chosen)
    for boxes, scores in (names, names[::-1]):  # where both have four columns, boxes come first
        columns = chosen[scores][2]
        fits = columns == classes if least is None else columns is not None and columns >= least
        if chosen[boxes][2] in (None, 4) and (columns is None or fits):
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
    left = dict(chosen)
    score_maps: list[str] = []
    distance_maps: list[str] = []
    for stride, count in zip(head.strides, cells, strict=True):
        for width, maps, kind in ((classes, score_maps, "class"), (sides, distance_maps, "distance")):
            # Where classes and distances have as many channels, the model's order decides: classes first.
            fitting = [name for name, shape in left.items() if shape[1] in (None, count) and shape[2] == width]
            if not fitting:
                raise ModelError(
                    f"no output is the {kind} map (B, {count}, {width}) of stride {stride}, got "
                    f"{_listing(chosen)}; check input.size {list(config.input.size)}, head.strides, "
                    f"head.bins and the {classes} classes"
                )
            maps.append(fitting[0])
            del left[fitting[0]]
    return tuple(score_maps), tuple(distance_maps)


def _arrays(outputs: Mapping[str, NDArray[Any]] | Sequence[NDArray[Any]], head: HeadConfig) -> dict[str, Float]:
    """The outputs by name, as float32."""
    if not isinstance(outputs, Mapping):
        names = head.outputs if head.outputs is not None else tuple(f"#{i}" for i in range(len(outputs)))
        if len(names) != len(outputs):
            raise ModelError(f"head.outputs names {len(names)} outputs, got {len(outputs)}; name each one, in order")
        outputs = dict(zip(names, outputs, strict=True))
    if not outputs:
        raise ModelError(f"decode rule '{head.decode}' got no outputs; give the model's raw outputs")
    return {name: np.asarray(array, dtype=np.float32) for name, array in outputs.items()}


def _text(shape: Shape) -> str:
    return "(" + ", ".join("?" if size is None else str(size) for size in shape) + ")"


def _listing(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"'{name}' {_text(shape)}" for name, shape in shapes.items())


def _check_channels(name: str, shape: Shape, config: Config) -> None:
    rule = config.head.decode
    if rule == "detections":
        if shape[2] != 6:
            raise ModelError(
                f"output '{name}' has shape {_text(shape)}, decode rule 'detections' expects (B, N, 6): a box, its "
                "score and its class; choose the output with head.outputs or another head.decode"
            )
        return
    extra = {"yolox": 5, "yolov5": 5, "yolov8": 4, "dfl": 4 * config.head.bins}[rule]
    axis = 1 if rule == "yolov8" else 2
    expected, got = extra + len(config.classes), shape[axis]
    if got == expected:
        return
    layout = "(B, N, {})" if axis == 2 else "(B, {}, N)"
    others = f"4 * {config.head.bins} head.bins" if rule == "dfl" else str(extra)
    raise ModelError(
        f"output '{name}' has shape {_text(shape)}, that is {got} channels; decode rule "
        f"'{rule}' expects {layout.format(expected)}, {others} + {len(config.classes)} "
        f"classes{_hint(shape, extra, config)}"
    )


def _hint(shape: Shape, extra: int, config: Config) -> str:
    """The key that is most likely wrong where an output has the wrong number of channels."""
    count, bins, rule = len(config.classes), config.head.bins, config.head.decode
    middle, last = (size or 0 for size in shape[1:])
    if last == 5 + count:
        return "; is head.decode 'yolox' or 'yolov5'?"
    if middle == 4 + count:
        return "; is head.decode 'yolov8'?"
    if rule == "yolov8" and last == 4 + count:
        return "; the output is transposed, it must be (B, 4 + C, N)"
    if last == count + 4 * bins and rule != "dfl":
        return "; is head.decode 'dfl'?"
    if last == 6:
        return "; is head.decode 'detections' (with nms: none)?"
    channels = min(last, middle) if rule == "yolov8" else last
    given = f" (the output has room for {channels - extra})" if channels > extra else ""
    return f"; does 'classes' list the model's classes{given}?"


def _decode_yolox(array: Float, config: Config) -> tuple[Float, Float]:
    points, strides = anchor_points(config, 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        boxes = corners_of(array[..., :2] * strides + points, np.exp(array[..., 2:4]) * strides)
    scores = sigmoid(array[..., 4:]) if config.head.scores == "logits" else array[..., 4:]
    return boxes, scores[..., :1] * scores[..., 1:]


def _decode_yolov5(array: Float, config: Config) -> tuple[Float, Float]:
    scores = sigmoid(array[..., 4:]) if config.head.scores == "logits" else array[..., 4:]
    return corners_of(array[..., :2], array[..., 2:4]), scores[..., :1] * scores[..., 1:]


def _decode_yolov8(array: Float, config: Config) -> tuple[Float, Float]:
    rows = np.ascontiguousarray(array.transpose(0, 2, 1))
    return corners_of(rows[..., :2], rows[..., 2:4]), np.ascontiguousarray(rows[..., 4:])


def _decode_boxes(boxes: Float, config: Config) -> Float:
    if config.head.boxes == "cxcywh":
        boxes = corners_of(boxes[..., :2], boxes[..., 2:])
    elif config.head.boxes == "yxyx":
        boxes = boxes[..., [1, 0, 3, 2]]
    return boxes if config.head.units == "pixels" else boxes * input_sides(config)


def input_sides(config: Config) -> Float:
    """float32 (4,): the input's width, height, width and height in pixels, which relative corners are shares of."""
    return np.array([config.input.width, config.input.height] * 2, np.float32)


def _class_scores(scores: Float, head: HeadConfig) -> Float:
    """The scores of the classes: after a softmax over them where there is one to do, and without the background."""
    if head.scores == "softmax":
        with np.errstate(invalid="ignore"):  # infinite logits give NaN scores, not a warning
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            scores = weights / weights.sum(axis=-1, keepdims=True)
    if head.columns is not None:
        return scores[..., list(head.columns)]
    return scores[..., class_columns(head, scores.shape[-1])]


def class_columns(head: HeadConfig, count: int) -> slice:
    """Which of so many columns of scores are the classes', where ``head.columns`` does not say it."""
    return slice(int(head.background == "first"), count - (head.background == "last"))


def _decode_detections(rows: Float, config: Config) -> tuple[Float, Float]:
    """The score of a row at its class, 0 at all others: a row of another class is a candidate for none."""
    mine = rows[..., 5:] == np.arange(len(config.classes), dtype=np.float32)
    return _decode_boxes(rows[..., :4], config), np.where(mine, rows[..., 4:5], np.float32(0))


def _decode_dfl(scores: Float, distances: Float, config: Config) -> tuple[Float, Float]:
    """Each side of a box is the mean of a softmax over ``bins`` distances, in strides (Li et al. 2020)."""
    head = config.head
    sides = distances.reshape(*distances.shape[:2], 4, head.bins)
    with np.errstate(invalid="ignore"):  # infinite logits give NaN boxes, not a warning
        weights = np.exp(sides - sides.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
    points, strides = anchor_points(config, head.cell_offset)
    ltrb = (weights @ np.arange(head.bins, dtype=np.float32)) * strides
    boxes = np.concatenate([points - ltrb[..., :2], points + ltrb[..., 2:]], axis=-1)
    return boxes, scores
