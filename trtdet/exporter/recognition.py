"""The configuration of an ONNX model whose outputs nobody has described: guessed from shapes, confirmed by values.

Shapes say which head has so many rows and columns at this input size. The values of the outputs on images then say what
shapes leave open: pixels or shares of the input, corners or centres, probabilities or logits. What numbers cannot say
(order of colours, scale of pixels, resizing) is that of the family.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.config import COCO_CLASSES, Config, HeadConfig, load_config, shipped
from trtdet.detection import expressions
from trtdet.detection.heads import class_columns, match_outputs
from trtdet.errors import ModelError, TrtdetError

Arrays = Mapping[str, NDArray[Any]]

_STRIDES = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))
_BINS = (8, 16, 17, 33)
_MOST_ROWS = 1000
"""Of finished detections; grids of cells have more."""

_SUM = 1e-3
"""So far may the probabilities of a softmax be from 1 together."""

_FEWEST_BOXES = 20
"""That are looked at to tell corners from centres."""


_NAMES = ("names", "classes", "class_names", "labels", "character")
"""The keys of a model's metadata that hold class names: the first is that of Ultralytics' packages, the last that of
models that RapidAI converts from PaddleDetection."""


@dataclass(frozen=True)
class Described:
    """What is known of a model whose head is not.

    Attributes:
        name: of the model.
        input_name: of its input.
        size: height and width of the input in pixels.
        classes: their names, where the model has them.
        shapes: of the outputs by name, batch first.
    """

    name: str
    input_name: str
    size: tuple[int, int]
    classes: tuple[str, ...] | None
    shapes: Mapping[str, tuple[int, ...]]


class UnknownHead(ModelError):
    """No head that is known fits the outputs of a model, or their values do not say what to make of it.

    Attributes:
        described: what is known all the same.
    """

    def __init__(self, problem: str, hint: str, described: Described) -> None:
        super().__init__(problem, hint)
        self.described = described


def class_names(model: onnx.ModelProto) -> tuple[str, ...] | None:
    """The names that an exporter wrote into a model's metadata: a list or dictionary in Python's notation, or text with
    a name a line or commas between them; None where there are none."""
    entries = {entry.key: entry.value for entry in model.metadata_props}
    for key in _NAMES:
        names = _listed(entries[key]) if key in entries else []
        if names and len(set(names)) == len(names):
            return tuple(names)
    return None


def _listed(text: str) -> list[str]:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        if any(sign in text for sign in "[{("):  # a notation that is none of Python's
            return []
        value = text.split("\n" if "\n" in text.strip() else ",")
    if isinstance(value, dict):
        value = list(value.values())
    return [name for each in value if (name := str(each).strip())] if isinstance(value, (list, tuple)) else []


def input_size(model: onnx.ModelProto) -> tuple[int, int] | None:
    """Height and width in pixels that Ultralytics' exporters write into a model's metadata; None where they are not."""
    for entry in model.metadata_props:
        if entry.key == "imgsz":
            try:
                value = ast.literal_eval(entry.value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return None
            sides = value if isinstance(value, (list, tuple)) else [value, value]
            if len(sides) == 2 and all(type(side) is int and side > 0 for side in sides):
                return sides[0], sides[1]
    return None


def placeholders(count: int) -> tuple[str, ...]:
    """Names in the place of those that are not known."""
    return tuple(f"class {index}" for index in range(count))


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
        UnknownHead: no head that is known fits, or the values do not say what to make of it.
    """
    shapes = {key: array.shape for key, array in outputs.items()}
    described = Described(name, input_name, size, classes, shapes)
    try:
        config = _fitting(outputs, described)
    except ModelError as error:
        raise UnknownHead(error.problem, error.hint, described) from None
    if config is not None:
        return config, _said(config, classes is not None)
    listed = ", ".join(f"'{key}' {shape}" for key, shape in shapes.items())
    of_classes = f" of {len(classes)} classes" if classes else ""
    raise UnknownHead(
        f"no head{of_classes} that is known has the outputs {listed} at an input of {size[0]}x{size[1]}",
        "write into a configuration what they mean, with head.compute if need be (docs/heads.md), and give it with "
        "--config",
        described,
    )


def _fitting(outputs: Arrays, known_of: Described) -> Config | None:
    """The configuration of the first head that fits; None where none does.

    Raises:
        ModelError: the values do not say what to make of one that does.
    """
    classes, size = known_of.classes, known_of.size
    for family, head, count in _heads(outputs, size, len(classes) if classes else None):
        known = load_config(family)
        names = known.classes if len(known.classes) == count else placeholders(count)
        data = known.model_dump() | {"name": known_of.name, "classes": classes or names}
        data["input"] |= {"size": size, "name": known_of.input_name}
        data["head"] |= head
        if data["head"]["decode"] == "detections":
            data["nms"] |= {"iou_threshold": 1.0}
        try:
            config = Config.model_validate(data)
            shapes = known_of.shapes
            match_outputs(shapes if config.head.compute is None else expressions.shapes(shapes, config), config)
        except (TrtdetError, ValueError):
            continue
        return config
    return None


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
    computed = list(_computed(outputs, size, known))
    # That a shipped head has as many classes as it was shipped with is no accident.
    yield from (found for found in computed if found[2] == len(load_config(found[0]).classes))
    if all(array.ndim == 3 for array in arrays):
        if len(arrays) == 1:
            yield from _single(arrays[0], size, known)
        elif len(arrays) == 2:
            yield from _pair(outputs, known)
        for strides in _STRIDES:
            if len(arrays) == 2 * len(strides):
                yield from _levels(arrays, _cells(size, strides), strides, known)
    yield from computed


def _computed(outputs: Arrays, size: tuple[int, int], known: int | None) -> Iterator[tuple[str, dict[str, Any], int]]:
    """The shipped heads that are written as expressions, where these make of the outputs boxes of every cell and scores
    that can be such."""
    for family in shipped("configs"):
        config = load_config(family)
        if config.head.compute is None:
            continue
        try:
            found = expressions.computed(outputs, config.with_size(size))
        except TrtdetError:
            continue
        boxes, scores = found["boxes"], found["scores"]
        count = scores.shape[-1]
        if count == 0 or known not in (None, count):
            continue
        # Points of cells fit the outputs of this head alone; where there are none, the number of boxes has to say it.
        pointed = any("points(" in expression for expression in config.head.compute.values())
        if not pointed and boxes.shape[1] != sum(_cells(size, config.head.strides)):
            continue
        if config.head.scores == "probabilities" and not (scores.min() >= 0 and scores.max() <= 1 + 1e-5):
            continue
        if np.isfinite(boxes).all() and np.isfinite(scores).all():
            yield family, {}, count


def _single(array: NDArray[Any], size: tuple[int, int], known: int | None) -> Iterator[tuple[str, dict[str, Any], int]]:
    _, rows, columns = array.shape
    for strides in _STRIDES:
        cells = sum(_cells(size, strides))
        # Boxes in pixels: shares of cells would have to be decoded with anchors that the model does not hold.
        if rows == 3 * cells and columns > 5 and float(np.abs(array[..., :4]).max()) > 2:
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
        kind, background = _kind(outputs[scores]), "none"
        if kind == "probabilities" and known != count:
            background = _background(outputs[scores])
        if background == "none" and (
            (known is None and kind == "logits" and count != len(COCO_CLASSES)) or count == (known or -1) + 1
        ):
            raise ModelError(
                f"output '{scores}' has {count} columns of {kind}, and numbers cannot say whether one is that of "
                "no object and whether a softmax or a sigmoid belongs to them",
                "set classes, head.scores and head.background in a configuration, and give it with --config",
            )
        known_head = {"decode": "boxes", "outputs": (boxes, scores), "scores": kind, "background": background}
        columns = class_columns(HeadConfig.model_validate(known_head), count)
        form = _form(outputs[boxes], outputs[scores][..., columns])
        yield "yolov8", known_head | form, count - (background != "none")


def _background(scores: NDArray[Any]) -> str:
    """Which column of probabilities is that of no object: where each row sums to 1, the first or the last if it has
    most of all rows together, as in a picture most places show nothing."""
    share = scores.reshape(-1, scores.shape[-1]).mean(axis=0)
    if len(share) < 2 or float(np.abs(scores.sum(axis=-1) - 1).max()) > _SUM:
        return "none"
    return {0: "first", len(share) - 1: "last"}.get(int(share.argmax()), "none")


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
