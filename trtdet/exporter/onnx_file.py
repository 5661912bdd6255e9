"""Checks and simplifies an ONNX model as a source, and guesses its configuration. Needs no torch.

Shapes at the input size show which head it is. Values on images show pixels or shares of the input, corners or centres,
probabilities or logits. Colour order, pixel scale and resizing are taken from the head's family.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from trtdet.config import COCO_CLASSES, Config, HeadConfig, InputConfig, NmsConfig, load_config, shipped
from trtdet.data.folders import find_images
from trtdet.detection import expressions
from trtdet.detection.heads import class_columns, match_outputs
from trtdet.errors import ConfigError, ModelError, TrtdetError
from trtdet.exporter import Confirm, ExportOptions, ParityComparison, trials
from trtdet.exporter.flattened import before_flattening, map_heads
from trtdet.exporter.forms import TASKS, form_of, no_detector
from trtdet.exporter.trials import resized
from trtdet.passes import CutOff, Options, batch, clean, cut_off, load_model, two_stage
from trtdet.passes.base import explained
from trtdet.passes.exported import SIZES, WHOLE_PIXELS, changes_of, images, resized_to
from trtdet.passes.input_size import with_input_size
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.protobuf import add_metadata, metadata, sizes_of
from trtdet.tables import counted


def convert(
    source: str, options: ExportOptions, confirm: Confirm | None = None
) -> tuple[onnx.ModelProto, Config, ParityComparison]:
    """Simplifies a model and, unless the options have a configuration, guesses it.

    Constant expressions are folded, nodes without effect are removed, and the input size is fixed or, if the graph does
    not depend on it, changed. Raises ConfigError if the size is missing or does not fit the model; ModelError if the
    model is not valid, its outputs are not recognised, or simplifying changes its results.
    """
    path = Path(source)
    original = load_model(path)
    if options.size is None and options.config is None:
        options = replace(options, size=_noted_size(original))
    if options.size is not None:
        sized = resized(options.config, options.size) if options.config else None
        original = with_input_size(original, options.size, sized)
    evidence = None
    if options.config is not None:
        config, notes = resized(options.config, options.size), []
    else:
        config, note = guess(path, original, options)
        notes = [note]
        if options.images is not None and confirm is not None:
            confirmed = confirm(original, config, find_images(options.images))
            config, evidence = confirmed.config, confirmed.evidence
            notes.append(confirmed.note)
    passes = Options(config, batch="batch" if options.dynamic_batch else None)
    with explained("clean"):
        graph = to_graph(onnx.shape_inference.infer_shapes(original))
        two_stage.check_batch(graph, passes.batch, "--dynamic-batch")
        clean.apply(graph, passes)
        graph = to_graph(to_model(graph))
    with explained("batch"):
        batch.apply(graph, passes)
        model = to_model(graph)
    add_metadata(model, original)
    outputs = tuple(output.name for output in original.graph.output)
    names = config.head.outputs or outputs
    whole = original
    if names != outputs:
        whole = onnx.ModelProto()
        whole.CopyFrom(original)
        del whole.graph.output[:]
        whole.graph.output.extend(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names)
    input_name = model.graph.input[0].name
    inputs = trials.batches(config.input, options)
    before = []
    for group in inputs:  # the original may have a batch of 1
        parts = trials.run(source, whole, names, input_name=input_name, inputs=[image[None] for image in group])
        before.append({name: np.concatenate([part[name] for part in parts]) for name in names})
    after = trials.run(source, model, names, input_name=input_name, inputs=inputs)
    pairs = list(zip(before, after, strict=True))
    comparison = trials.compared(source, config, pairs, options=options, reference="the original")
    fewer = f"{len(original.graph.node)} nodes became {len(model.graph.node)}"
    return model, config, replace(comparison, notes=(fewer, *notes), confirmed=evidence)


def guess(path: Path, model: onnx.ModelProto, options: ExportOptions) -> tuple[Config, str]:
    """The configuration that fits a float model's input and outputs, and how it was guessed, in words.

    Of the options, ``size`` is for an input of dynamic size, and the outputs on ``images`` are inspected. Raises
    ConfigError if the model's input is not a single image, or the size is missing or does not fit; ModelError if no
    supported head fits the outputs, or the model cannot be run; DataError if the images cannot be read.
    """
    input_name, dims = _single_image(path, model)
    size = options.size or _noted_size(model) or (dims[2], dims[3])
    if not all(size) or any(fixed not in (0, side) for fixed, side in zip(dims[2:], size, strict=True)):
        own = f"{dims[2] or 'any'}x{dims[3] or 'any'}"
        raise ConfigError(f"the input of model '{path}' is {own} (height x width)", "give a size that fits with --size")
    notes = metadata(model)
    refusal = no_detector(notes, (), size)
    if refusal is not None:
        raise ModelError(f"model '{path}' is not taken: {refusal[0]}", refusal[1])
    whole = WHOLE_PIXELS in changes_of(model)
    cut = cut_off(model)
    maps = before_flattening(model) if cut is None else None
    source = maps or (model if cut is None else cut.model)
    names = [output.name for output in source.graph.output]
    tries = trials.batches(InputConfig(size=size, scale=1 if whole else 1 / 255), replace(options, dynamic_batch=False))
    if dims[0] > 1:
        tries = [np.repeat(image, dims[0], axis=0) for image in tries]
    results = trials.run(str(path), source, names, input_name=input_name, inputs=tries)
    varying = [name for name in names if len({result[name].shape for result in results}) > 1]
    if varying:
        raise ModelError(
            f"model '{path}' selects its detections in a way that is not known: output '{varying[0]}' has another "
            "number of rows for each image",
            "export it without post-processing, or name the tensors before it with head.outputs in a configuration",
        )
    outputs = {name: np.concatenate([result[name] for result in results]) for name in names}
    try:
        if notes.get("task") in TASKS:
            if cut is not None:
                raise ModelError(
                    f"model '{path}' suppresses boxes itself, which loses what it gives beside boxes",
                    "export it without NMS (nms=False)",
                )
            config, note = guessed_task(notes, outputs, size, path=path, input_name=input_name)
        else:
            config, note = _guessed_as_exported(model, cut, outputs, size=size, path=path)
    except UnknownHead as error:
        refusal = no_detector(notes, [array.shape for array in outputs.values()], size)
        if refusal is None:
            raise
        raise ModelError(f"model '{path}' is not taken: {refusal[0]}", refusal[1]) from error
    if maps is not None:
        head = config.head.model_copy(update={"outputs": tuple(names)})
        config, note = config.model_copy(update={"head": head}), f"{note}; {_UNFLATTENED}"
    if whole:
        pixels = config.input.model_copy(update=_AS_THEY_ARE)
        config = config.model_copy(update={"input": pixels})
    return config, "; ".join((note, *changes_of(model)))


def _single_image(path: Path, model: onnx.ModelProto) -> tuple[str, list[int]]:
    """The name and dimensions of a model's input, 0 where they are open; an error if that is not a single image."""
    inputs = images(model)
    dims = list(sizes_of(inputs[0])) if len(inputs) == 1 else []
    pictures = [value.name for value in inputs if len(_dims(value)) == 4 and 3 in _dims(value)[1:]]
    if len(pictures) > 1:
        raise ModelError(
            f"model '{path}' is not taken: it reads {len(pictures)} images at a time ({', '.join(pictures)}), as "
            "models for tracking, optical flow and stereo depth do",
            "trtdet takes detectors",
        )
    if len(dims) != 4 or dims[1] not in (0, 3):
        listed = ", ".join(f"'{value.name}' {_dims(value)}" for value in inputs)
        known = ", ".join(SIZES)
        raise ConfigError(
            f"model '{path}' has the inputs {listed or 'none'}, a single image (B, 3, H, W) is needed",
            f"of other inputs, sizes named {known} are folded; export the model with the image alone",
        )
    return inputs[0].name, dims


def guessed_task(
    metadata: Mapping[str, str], outputs: Arrays, size: tuple[int, int], path: Path, input_name: str
) -> tuple[Config, str]:
    """The configuration of Ultralytics' models with masks, keypoints or rotated boxes, by their metadata."""
    family = f"yolov8-{TASKS[metadata['task']]}"
    data = load_config(family).model_dump() | {"name": path.stem}
    names = _value(metadata, "names")
    classes = tuple(str(name) for name in names.values()) if isinstance(names, dict) else data["classes"]
    data["classes"] = classes
    data["input"] |= {"size": size, "name": input_name}
    rows = next(array for array in outputs.values() if array.ndim == 3)
    if (
        rows.shape[1] <= _MOST_ROWS
        and rows.shape[2] < rows.shape[1]
        and rows.shape[2] != sum(_cells(size, (8, 16, 32)))
    ):
        data["head"] |= {"decode": "detections", "boxes": "cxcywh" if family.endswith("obb") else "xyxy"}
        data["nms"] |= {"iou_threshold": 1.0}
    shape = _value(metadata, "kpt_shape")
    if family.endswith("pose") and shape is not None:
        named = _value(metadata, "kpt_names")
        points = next(iter(named.values()), ()) if isinstance(named, dict) else ()
        data["head"]["keypoints"] = _keypoints(int(shape[0]), points)
    config = Config.model_validate(data)
    match_outputs({key: array.shape for key, array in outputs.items()}, config)
    return (
        config,
        f"recognised by task {metadata['task']} in its metadata: {counted(len(classes), 'class')}, as {family} reads "
        "them",
    )


def _keypoints(count: int, names: Sequence[Any]) -> Any:
    """The key ``head.keypoints``: 17 are taken for COCO's of persons; ``names`` are used if they are as many."""
    if count == _OF_PERSONS:
        return "coco"
    default = [f"keypoint {index}" for index in range(count)]
    return {"names": list(map(str, names)) if len(names) == count else default}


def _value(metadata: Mapping[str, str], key: str) -> Any:
    """A Python value in the metadata; None if it is missing or something else."""
    try:
        return ast.literal_eval(metadata.get(key, "None"))
    except _UNREADABLE:
        return None


def _guessed_as_exported(
    model: onnx.ModelProto, cut: CutOff | None, outputs: Arrays, size: tuple[int, int], path: Path
) -> tuple[Config, str]:
    """The configuration of a model, or of what is left of it after ``cut``, by its outputs on images."""
    form, names, input_name = form_of(model), class_names(model), images(model)[0].name
    whole = WHOLE_PIXELS in changes_of(model)
    if cut is None and (form is None or form.name != "RF-DETR or LW-DETR"):
        return guessed(outputs, size, path.stem, input_name=input_name, classes=names, whole_pixels=whole)
    family = load_config(form.family if form is not None else "yolov8")
    origin = form.name if form is not None else "an unnamed framework"
    data = family.model_dump() | {"name": path.stem}
    data["input"] |= {"size": size, "name": input_name}
    if cut is None:
        columns = family.head.columns or ()
        if any(array.shape[-1] == max(columns, default=0) + 1 for array in outputs.values()):
            return Config.model_validate(data), f"recognised as an export of {origin}"
        return guessed(outputs, size, path.stem, input_name=input_name, classes=names, whole_pixels=whole)
    boxes, scores, *points = outputs.values()
    count = scores.shape[-1] - (cut.head["background"] != "none")
    default = COCO_CLASSES if count == len(COCO_CLASSES) else placeholders(count)
    data["head"] = {"units": _form(boxes, scores)["units"], **cut.head}
    if points:
        data["head"]["keypoints"] = _keypoints(points[0].shape[2] // 3, ())
        default = family.classes if count == len(family.classes) else default
    data["classes"] = names if names is not None and len(names) == count else default
    if form is not None and cut.head["boxes"] == "xyxy":
        data["head"]["boxes"] = form.boxes
    thresholds = dict(cut.thresholds)
    most = thresholds.get("max_detections", NmsConfig().max_detections)
    if most > thresholds.get("pre_nms_topk", NmsConfig().pre_nms_topk):
        thresholds["pre_nms_topk"] = most
    data["nms"] = thresholds
    config = Config.model_validate(data)
    shown = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in thresholds.values())
    kept = ", ".join(f"{key} {value}" for key, value in zip(thresholds, shown, strict=True))
    cut_part = "suppression" if config.nms.suppresses else "selection of the best"
    return config, (
        f"recognised as an export of {origin}, {counted(count, 'class')}: its {cut_part} is cut off and done again, "
        f"with {kept}; as usual for it: {config.input.color}, {config.input.resize}"
    )


def _dims(value: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_value or dim.dim_param or "?" for dim in value.type.tensor_type.shape.dim]


def _noted_size(model: onnx.ModelProto) -> tuple[int, int] | None:
    """The size in the metadata, or that to which the graph itself resizes, for an input of dynamic size."""
    inputs = images(model)
    sizes = sizes_of(inputs[0]) if len(inputs) == 1 else ()
    if len(sizes) != 4 or any(sizes[2:]):
        return None
    return input_size(model) or resized_to(model)


Arrays = Mapping[str, NDArray[Any]]
Heads = Iterator[tuple[str, dict[str, Any], int]]
"""Heads that may fit: the shipped configuration of the family, the keys of the head, and the number of classes."""

_STRIDES = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))
_BINS = (8, 16, 17, 33)
_ANCHORS = 9  # boxes of a cell of EfficientDet: three sizes in three shapes
_MOST_ROWS = 1000
"""Limit for final detections; grids of cells have more rows."""

_AS_THEY_ARE = {"scale": 1.0, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
"""Keys of the input of a graph that normalises pixels itself."""

_UNFLATTENED = "its output flattens maps without a transpose, so that the maps before it are read (head.outputs)"

_OF_PERSONS = 17
"""Keypoints of persons in COCO."""

_UNREADABLE = (ValueError, SyntaxError, MemoryError, RecursionError)

_NAMES = ("names", "classes", "class_names", "labels", "character")
"""Metadata keys for class names: Ultralytics writes the first, RapidAI's conversions of PaddleDetection the last."""


@dataclass(frozen=True)
class Described:
    """A model whose head is not recognised; ``classes`` are names from the model, ``shapes`` are those of outputs."""

    name: str
    input_name: str
    size: tuple[int, int]  # height and width of the input in pixels
    classes: tuple[str, ...] | None
    shapes: Mapping[str, tuple[int, ...]]


class UnknownHead(ModelError):
    """No supported head fits the outputs of the model ``described``, or their values are ambiguous."""

    def __init__(self, problem: str, hint: str, described: Described) -> None:
        super().__init__(problem, hint)
        self.described = described


def described(model: onnx.ModelProto, config: Config) -> Described:
    """A model whose head was guessed wrongly, by its configuration; open sizes are 0."""
    shapes = {output.name: sizes_of(output) for output in model.graph.output}
    return Described(
        config.name, input_name=config.input.name or "", size=config.input.size, classes=None, shapes=shapes
    )


def class_names(model: onnx.ModelProto) -> tuple[str, ...] | None:
    """Class names in a model's metadata: a Python list or dict, or text separated by lines or commas; else None."""
    entries = metadata(model)
    for text in (entries[key] for key in _NAMES if key in entries):
        try:
            value = ast.literal_eval(text)
        except _UNREADABLE:
            if any(sign in text for sign in "[{("):  # not Python's notation
                continue
            value = text.split("\n" if "\n" in text.strip() else ",")
        if isinstance(value, dict):
            value = list(value.values())
        names = [name for each in value if (name := str(each).strip())] if isinstance(value, (list, tuple)) else []
        if names and len(set(names)) == len(names):
            return tuple(names)
    return None


def input_size(model: onnx.ModelProto) -> tuple[int, int] | None:
    """Height and width in pixels that Ultralytics' exporters write into a model's metadata; None without them."""
    try:
        value = ast.literal_eval(metadata(model).get("imgsz", "None"))
    except _UNREADABLE:
        return None
    sides = value if isinstance(value, (list, tuple)) else [value, value]
    valid = len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)
    return (sides[0], sides[1]) if valid else None


def placeholders(count: int) -> tuple[str, ...]:
    """Names for classes without known names."""
    return tuple(f"class {index}" for index in range(count))


def guessed(
    outputs: Arrays,
    size: tuple[int, int],
    name: str,
    input_name: str,
    classes: tuple[str, ...] | None,
    whole_pixels: bool = False,
) -> tuple[Config, str]:
    """The configuration whose head fits the outputs, and how it was guessed; an UnknownHead if none fits clearly.

    ``whole_pixels`` is True if the graph normalises pixels itself.
    """
    shapes = {key: array.shape for key, array in outputs.items()}
    known = Described(name, input_name=input_name, size=size, classes=classes, shapes=shapes)
    try:
        for family, keys, count in _heads(outputs, size, len(classes) if classes else None):
            shipped_config = load_config(family)
            names = shipped_config.classes if len(shipped_config.classes) == count else placeholders(count)
            data = shipped_config.model_dump() | {"name": name, "classes": classes or names}
            data["input"] |= {"size": size, "name": input_name}
            data["input"] |= _AS_THEY_ARE if whole_pixels else {}
            data["head"] |= keys
            if data["head"]["decode"] == "detections":
                data["nms"] |= {"iou_threshold": 1.0}
            try:
                config = Config.model_validate(data)
                match_outputs(shapes if config.head.compute is None else expressions.shapes(shapes, config), config)
            except (TrtdetError, ValueError):
                continue
            break
        else:
            listed = ", ".join(f"'{key}' {shape}" for key, shape in shapes.items())
            of_classes = f" of {counted(len(classes), 'class')}" if classes else ""
            raw = all(len(shape) == 5 and shape[1] == 3 for shape in shapes.values())
            anchors = (
                ": raw maps of three anchors a cell, whose sizes the model does not hold (YOLOv7's exporter decodes "
                "with its option grid)"
            )
            raise ModelError(
                f"no head{of_classes} that is known has the outputs {listed} at an input of {size[0]}x{size[1]}"
                f"{anchors if raw else ''}",
                "write into a configuration what they mean, with head.compute if need be (docs/heads.md), and give it "
                "with --config",
            )
    except ModelError as error:
        raise UnknownHead(error.problem, error.hint, known) from None
    head = config.head
    parts = [
        f"decode {head.decode}",
        counted(len(config.classes), "class") + ("" if classes else ", not named in the model"),
    ]
    if head.decode == "dfl":
        parts.append(f"{head.bins} bins, strides {' '.join(map(str, head.strides))}")
    if head.decode in ("boxes", "detections"):
        parts.append(f"boxes {head.boxes} in {head.units if head.units == 'pixels' else 'shares of the input'}")
    parts.append(head.scores)
    order, scale = config.input.color, "1/255" if config.input.scale != 1 else "1"
    return config, (
        f"guessed from shapes and values: {', '.join(parts)}; as in its family: {order}, scale {scale}, "
        f"{config.input.resize}, which trtdet build tries on the images"
    )


def _heads(outputs: Arrays, size: tuple[int, int], class_count: int | None) -> Heads:
    arrays = list(outputs.values())
    computed = list(_computed(outputs, size, class_count))
    # A shipped head with its own number of classes, or with keypoints, comes first: the match is no accident.
    for head in computed:
        shipped_config = load_config(head[0])
        if head[2] == len(shipped_config.classes) or shipped_config.head.keypoints is not None:
            yield head
    yield from _with_masks(arrays, size, class_count)
    if all(array.ndim == 3 for array in arrays):
        if len(arrays) == 1:
            yield from _single(arrays[0], size, class_count)
        elif len(arrays) == 2:
            yield from _pair(outputs, class_count)
        for strides in _STRIDES:
            if len(arrays) == 2 * len(strides):
                yield from _levels(arrays, _cells(size, strides), strides, class_count=class_count)
    for strides in _STRIDES:
        yield from map_heads(outputs, size, strides, class_count=class_count)
    yield from computed


def _computed(outputs: Arrays, size: tuple[int, int], class_count: int | None) -> Heads:
    """Shipped heads defined by expressions that give valid scores and a box for every cell with these outputs."""
    configs = {family: load_config(family) for family in shipped("configs")}
    # Those that read more of the outputs come first.
    for family, config in sorted(configs.items(), key=lambda item: not item[1].head.has_parts):
        if config.head.compute is None:
            continue
        try:
            tensors = expressions.computed(outputs, config.with_size(size))
        except TrtdetError:
            continue
        boxes, scores = tensors["boxes"], tensors["scores"]
        keys: dict[str, Any] = {}
        count = scores.shape[-1]
        if config.head.columns is not None:
            whole = count == max(config.head.columns) + 1
            keys, count = ({}, len(config.head.columns)) if whole else ({"columns": None}, count)
        if count == 0 or class_count not in (None, count):
            continue
        # Expressions with cell points fit only outputs of their head; without them, the number of boxes must match.
        pointed = any("points(" in expression for expression in config.head.compute.values())
        cells = sum(_cells(size, config.head.strides))
        rows: tuple[int, ...] = (cells, _ANCHORS * cells)
        if "keypoints" in tensors:  # three boxes a cell are YOLOv5's with classes instead, unless they are in pixels
            rows = (3 * cells,) if float(np.abs(tensors["keypoints"]).max()) > 2 else ()
        if not pointed and boxes.shape[1] not in rows:
            continue
        if config.head.scores == "probabilities" and not (scores.min() >= 0 and scores.max() <= 1 + 1e-5):
            continue
        if np.isfinite(boxes).all() and np.isfinite(scores).all():
            yield family, keys, count


def _single(array: NDArray[Any], size: tuple[int, int], class_count: int | None) -> Heads:
    _, rows, columns = array.shape
    is_dfl = any(columns == (class_count or len(COCO_CLASSES)) + 4 * bins for bins in _BINS)
    for strides in _STRIDES:
        cells = sum(_cells(size, strides))
        # Only boxes in pixels: decoding offsets in cells would need anchors, which the model does not contain.
        if rows == 3 * cells and columns > 5 and float(np.abs(array[..., :4]).max()) > 2:
            scores = _kind(array[..., 4:])
            yield "yolov5", {"decode": "yolov5", "strides": strides, "scores": scores}, columns - 5
        if rows == cells and columns > 5 and class_count in (None, columns - 5) and not is_dfl:
            # Boxes that are already decoded cover the input; offsets in cells do not.
            if float(np.abs(array[..., :2]).max()) > min(size) / 2:
                yield "yolov5", {"decode": "yolov5", "scores": _kind(array[..., 4:])}, columns - 5
            elif not any(side % stride for side in size for stride in strides):
                yield "yolox", {"decode": "yolox", "strides": strides, "scores": _kind(array[..., 4:])}, columns - 5
        if columns == cells and rows > 4:
            yield "yolov8", {"decode": "yolov8", "strides": strides, "scores": _kind(array[:, 4:])}, rows - 4
        if rows == cells:
            for bins in _BINS:
                count = columns - 4 * bins
                if count == (class_count or len(COCO_CLASSES)):
                    scores = _kind(array[..., :count])
                    yield "dfl", {"decode": "dfl", "strides": strides, "bins": bins, "scores": scores}, count
    if columns == 6 and rows <= _MOST_ROWS:
        labels = array[..., 5]
        if bool((labels == np.round(labels)).all() and labels.min() >= -1):
            count = class_count or max(len(COCO_CLASSES), int(labels.max()) + 1)
            yield "yolov8", {"decode": "detections", **_form(array[..., :4], array[..., 4:5])}, count


def _with_masks(arrays: Sequence[NDArray[Any]], size: tuple[int, int], class_count: int | None) -> Heads:
    """Rows with mask coefficients beside prototypes at a quarter of the input's size, and poses of persons."""
    cells = sum(_cells(size, (8, 16, 32)))
    if len(arrays) == 1 and arrays[0].ndim == 3 and arrays[0].shape[1:] == (5 + 51, cells) and class_count in (None, 1):
        yield "yolov8-pose", {}, 1
    if len(arrays) != 2 or sorted(array.ndim for array in arrays) != [3, 4]:
        return
    rows, prototypes = sorted(arrays, key=lambda array: array.ndim)
    if prototypes.shape[2:] != (size[0] // 4, size[1] // 4):
        return
    for family, first, channels, count in (
        ("yolov8-seg", 4, rows.shape[1], rows.shape[2]),
        ("yolov5-seg", 5, rows.shape[2], rows.shape[1]),
    ):
        classes = channels - first - prototypes.shape[1]
        if count == (3 if first == 5 else 1) * cells and classes > 0 and class_count in (None, classes):
            yield family, {}, classes


def _pair(outputs: Arrays, class_count: int | None) -> Heads:
    names = list(outputs)
    for boxes, scores in (names, names[::-1]):
        count = outputs[scores].shape[2]
        if outputs[boxes].shape[2] != 4 or outputs[boxes].shape[1] != outputs[scores].shape[1]:
            continue
        kind, background = _kind(outputs[scores]), "none"
        if kind == "probabilities" and class_count != count:
            # If each row sums to 1, there is a column for no object: the first or the last one, if it is the largest
            # on average, because most places of an image show nothing.
            share = outputs[scores].reshape(-1, count).mean(axis=0)
            if count > 1 and float(np.abs(outputs[scores].sum(axis=-1) - 1).max()) <= 1e-3:
                background = {0: "first", count - 1: "last"}.get(int(share.argmax()), "none")
        if background == "none" and (
            (class_count is None and kind == "logits" and count != len(COCO_CLASSES))
            or count == (class_count or -1) + 1
        ):
            raise ModelError(
                f"output '{scores}' has {count} columns of {kind}, and numbers cannot say whether one is that of "
                "no object and whether a softmax or a sigmoid belongs to them",
                "set classes, head.scores and head.background in a configuration, and give it with --config",
            )
        keys = {"decode": "boxes", "outputs": (boxes, scores), "scores": kind, "background": background}
        columns = class_columns(HeadConfig.model_validate(keys), count)
        form = _form(outputs[boxes], outputs[scores][..., columns])
        yield "yolov8", keys | form, count - (background != "none")


def _levels(
    arrays: Sequence[NDArray[Any]], cells: Sequence[int], strides: tuple[int, ...], class_count: int | None
) -> Heads:
    if sorted(array.shape[1] for array in arrays) != sorted([*cells, *cells]):
        return
    widths = sorted({array.shape[2] for array in arrays})
    for bins in _BINS:
        class_widths = [width for width in widths if width != 4 * bins]
        if 4 * bins in widths and len(class_widths) <= 1:
            count = class_widths[0] if class_widths else 4 * bins
            maps = [array for array in arrays if array.shape[2] == count]
            kinds = {_kind(array) for array in maps}
            head = {"decode": "dfl", "strides": strides, "bins": bins}
            if class_count in (None, count):
                yield "dfl", head | {"scores": "logits" if "logits" in kinds else "probabilities"}, count


def _cells(size: tuple[int, int], strides: Sequence[int]) -> list[int]:
    return [-(-size[0] // stride) * -(-size[1] // stride) for stride in strides]


def _kind(scores: NDArray[Any]) -> str:
    """``probabilities`` if all values are in 0..1 up to rounding, else ``logits``."""
    return "probabilities" if scores.min() >= -1e-6 and scores.max() <= 1 + 1e-5 else "logits"


def _form(boxes: NDArray[Any], scores: NDArray[Any]) -> dict[str, str]:
    """The form of boxes by those with the best scores: corners if few are inside out, pixels if values exceed 2."""
    best = scores.reshape(-1, scores.shape[-1]).max(axis=1)
    rows = boxes.reshape(-1, 4)[np.argsort(-best, kind="stable")[: max(20, len(best) // 20)]]
    inside_out = float((rows[:, 2:] < rows[:, :2]).any(axis=1).mean()) if len(rows) else 0.0
    far = float(np.abs(rows).max(initial=0.0))
    return {"boxes": "cxcywh" if inside_out > 0.3 else "xyxy", "units": "pixels" if far > 2 else "relative"}
