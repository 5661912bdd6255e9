"""The configuration of an ONNX model whose outputs nobody has described: guessed from shapes, confirmed by values.

Shapes say which head has so many rows and columns at this input size. The values of the outputs on images then say what
shapes leave open: pixels or shares of the input, corners or centres, probabilities or logits. What numbers cannot say
(order of colours, scale of pixels, resizing) is that of the family.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.config import COCO_CLASSES, Config, load_config
from trtdet.detection.heads import match_outputs
from trtdet.errors import ModelError, TrtdetError

Arrays = Mapping[str, NDArray[Any]]

_STRIDES = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))
_BINS = (8, 16, 17, 33)
_MOST_ROWS = 1000
"""Of finished detections; grids of cells have more."""

_FEWEST_BOXES = 20
"""That are looked at to tell corners from centres."""


def class_names(model: onnx.ModelProto) -> tuple[str, ...] | None:
    """The names that exporters of Ultralytics' packages write into a model; None where there are none."""
    for entry in model.metadata_props:
        if entry.key == "names":
            try:
                value = ast.literal_eval(entry.value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return None
            names = list(value.values()) if isinstance(value, dict) else value
            if isinstance(names, (list, tuple)) and names and len({str(name) for name in names}) == len(names):
                return tuple(str(name) for name in names)
    return None


def guessed(
    outputs: Arrays, size: tuple[int, int], name: str, input_name: str, classes: tuple[str, ...] | None
) -> tuple[Config, str]:
    """The configuration whose head fits the shapes of the outputs, and in words what was taken from where.

    Args:
        outputs: of an image, by name in the model's order, batch first.
        size: height and width of the input in pixels.
        name: of the model.
        input_name: of its input.
        classes: their names, where the model has them.

    Raises:
        ModelError: no head that is known fits, or the values do not say what to make of it.
    """
    shapes = {key: array.shape for key, array in outputs.items()}
    for family, head, count in _heads(outputs, size, len(classes) if classes else None):
        data = load_config(family).model_dump()
        data |= {"name": name, "classes": classes or _names(count)}
        data["input"] |= {"size": size, "name": input_name}
        data["head"] |= head
        if head["decode"] == "detections":
            data["nms"] |= {"iou_threshold": 1.0}
        try:
            config = Config.model_validate(data)
            match_outputs(shapes, config)
        except (TrtdetError, ValueError):
            continue
        return config, _said(config, classes is not None)
    listed = ", ".join(f"'{key}' {shape}" for key, shape in shapes.items())
    known = f" of {len(classes)} classes" if classes else ""
    raise ModelError(
        f"no head{known} that is known has the outputs {listed} at an input of {size[0]}x{size[1]}",
        "say what they mean in a configuration, and give it with --config",
    )


def _names(count: int) -> tuple[str, ...]:
    return COCO_CLASSES if count == len(COCO_CLASSES) else tuple(f"class {index}" for index in range(count))


def _said(config: Config, named: bool) -> str:
    head = config.head
    parts = [f"decode {head.decode}", f"{len(config.classes)} classes{'' if named else ', not named in the model'}"]
    if head.decode == "dfl":
        parts.append(f"{head.bins} bins, strides {' '.join(map(str, head.strides))}")
    if head.decode in ("boxes", "detections"):
        parts.append(f"boxes {head.boxes} in {head.units if head.units == 'pixels' else 'shares of the input'}")
    parts.append(head.scores)
    order, scale = config.input.color, "1/255" if config.input.scale != 1 else "1"
    return (
        f"guessed from shapes and values: {', '.join(parts)}; as in its family: {order}, scale {scale}, "
        f"{config.input.resize}, which trtdet build tries on the images"
    )


def _heads(outputs: Arrays, size: tuple[int, int], known: int | None) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Heads that may fit: the nearest shipped configuration, the keys of the head, and the number of classes."""
    arrays = list(outputs.values())
    if any(array.ndim != 3 for array in arrays):
        return
    if len(arrays) == 1:
        yield from _single(arrays[0], size, known)
    elif len(arrays) == 2:
        yield from _pair(outputs, known)
    for strides in _STRIDES:
        if len(arrays) == 2 * len(strides):
            yield from _levels(arrays, _cells(size, strides), strides, known)


def _single(array: NDArray[Any], size: tuple[int, int], known: int | None) -> Iterator[tuple[str, dict[str, Any], int]]:
    _, rows, columns = array.shape
    for strides in _STRIDES:
        cells = sum(_cells(size, strides))
        if rows == 3 * cells and columns > 5:
            scores = _kind(array[..., 4:])
            yield "yolov5", {"decode": "yolov5", "strides": strides, "scores": scores}, columns - 5
        if rows == cells and columns > 5 and known in (None, columns - 5) and not _is_dfl(columns, known):
            # A head that is decoded already covers the input; offsets in cells do not.
            if float(np.abs(array[..., :2]).max()) > min(size) / 2:
                yield "yolov5", {"decode": "yolov5", "scores": _kind(array[..., 4:])}, columns - 5
            elif not any(side % stride for side in size for stride in strides):
                yield "yolox", {"decode": "yolox", "strides": strides, "scores": _kind(array[..., 4:])}, columns - 5
        if columns == cells and rows > 4:
            yield "yolov8", {"decode": "yolov8", "strides": strides, "scores": _kind(array[:, 4:])}, rows - 4
        if rows == cells:
            for bins in _BINS:
                count = columns - 4 * bins
                if count == (known or len(COCO_CLASSES)):
                    scores = _kind(array[..., :count])
                    yield "dfl", {"decode": "dfl", "strides": strides, "bins": bins, "scores": scores}, count
    if columns == 6 and rows <= _MOST_ROWS:
        labels = array[..., 5]
        if bool((labels == np.round(labels)).all() and labels.min() >= -1):
            count = known or max(len(COCO_CLASSES), int(labels.max()) + 1)
            yield "yolov8", {"decode": "detections", **_form(array[..., :4], array[..., 4:5])}, count


def _is_dfl(columns: int, known: int | None) -> bool:
    return any(columns == (known or len(COCO_CLASSES)) + 4 * bins for bins in _BINS)


def _pair(outputs: Arrays, known: int | None) -> Iterator[tuple[str, dict[str, Any], int]]:
    names = list(outputs)
    for boxes, scores in (names, names[::-1]):
        count = outputs[scores].shape[2]
        if outputs[boxes].shape[2] != 4 or outputs[boxes].shape[1] != outputs[scores].shape[1]:
            continue
        kind = _kind(outputs[scores])
        if (known is None and kind == "logits" and count != len(COCO_CLASSES)) or count == (known or -1) + 1:
            raise ModelError(
                f"output '{scores}' has {count} columns of {kind}, and numbers cannot say whether one is that of "
                "no object and whether a softmax or a sigmoid belongs to them",
                "set classes, head.scores and head.background in a configuration, and give it with --config",
            )
        head = {"decode": "boxes", "outputs": (boxes, scores), "scores": kind, **_form(outputs[boxes], outputs[scores])}
        yield "yolov8", head, count


def _levels(
    arrays: Sequence[NDArray[Any]], cells: Sequence[int], strides: tuple[int, ...], known: int | None
) -> Iterator[tuple[str, dict[str, Any], int]]:
    if sorted(array.shape[1] for array in arrays) != sorted([*cells, *cells]):
        return
    widths = sorted({array.shape[2] for array in arrays})
    for bins in _BINS:
        others = [width for width in widths if width != 4 * bins]
        if 4 * bins in widths and len(others) <= 1:
            count = others[0] if others else 4 * bins
            maps = [array for array in arrays if array.shape[2] == count]
            kinds = {_kind(array) for array in maps}
            head = {"decode": "dfl", "strides": strides, "bins": bins}
            if known in (None, count):
                yield "dfl", head | {"scores": "logits" if "logits" in kinds else "probabilities"}, count


def _cells(size: tuple[int, int], strides: Sequence[int]) -> list[int]:
    return [-(-size[0] // stride) * -(-size[1] // stride) for stride in strides]


def _kind(scores: NDArray[Any]) -> str:
    """``probabilities`` where all numbers are, with some room for rounding."""
    return "probabilities" if scores.min() >= -1e-6 and scores.max() <= 1 + 1e-5 else "logits"


def _form(boxes: NDArray[Any], scores: NDArray[Any]) -> dict[str, str]:
    """What four numbers of boxes are: corners if few boxes would be inside out, and pixels if they exceed 2.

    Only the boxes of the best scores count: behind low ones a network may give anything.
    """
    best = scores.reshape(-1, scores.shape[-1]).max(axis=1)
    rows = boxes.reshape(-1, 4)[np.argsort(-best, kind="stable")[: max(_FEWEST_BOXES, len(best) // 20)]]
    inside_out = float((rows[:, 2:] < rows[:, :2]).any(axis=1).mean()) if len(rows) else 0.0
    far = float(np.abs(rows).max(initial=0.0))
    return {"boxes": "cxcywh" if inside_out > 0.3 else "xyxy", "units": "pixels" if far > 2 else "relative"}
