"""The configuration of a detector, read from YAML and validated: pre-processing, meaning of the outputs, NMS, classes.

It is copied unchanged into the bundle's manifest, from which C++ programs read it.
"""

from __future__ import annotations

import ast
import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from trtdet.errors import ConfigError, one_line
from trtdet.files import finish_replacing
from trtdet.options.rows import nearest

# fmt: off
COCO_CLASSES: tuple[str, ...] = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow",
    "elephant", "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee",
    "skis", "snowboard", "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard",
    "tennis racket", "bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple",
    "sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch",
    "potted plant", "bed", "dining table", "toilet", "tv", "laptop", "mouse", "remote", "keyboard", "cell phone",
    "microwave", "oven", "toaster", "sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear",
    "hair drier", "toothbrush",
)
# fmt: on
"""The 80 category names of COCO in the order of their ids, which nearly every release uses as its class order."""

NmsMode = Literal["native", "onnx", "efficient", "host"]
"""Where NMS runs: in the engine, as plain operators (``native``), ONNX's NonMaxSuppression (``onnx``) or TensorRT's
EfficientNMS_TRT (``efficient``); or on the host, after the engine."""

SiluForm = Literal["keep", "swish", "plugin"]
"""How SiLU is written: unchanged, as ONNX's Swish, or as the operator of trtdet's plugin library."""


def _encodable(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("has a lone surrogate, which no file can hold; write the character itself")
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Listed = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Validator of a tuple: YAML and JSON give it as a list."""
Positive = Annotated[int, Field(gt=0, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Colour = Annotated[tuple[Finite, Finite, Finite], Listed]

_LARGEST = 1 << 20
"""Largest size of a configuration file in bytes, so that no other large file or device is read to its end."""
_MOST_VALUES = 100_000
_MOST_PROBLEMS = 10
_LONGEST = 2000
"""Largest length of an expression in characters."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class InputConfig(_Section):
    """Pre-processing of an image: decode to 8-bit, resize, reorder channels, ``(x * scale - mean) / std`` per channel.

    ``mean`` and ``std`` are in the channel order of ``color``. The result is float32, NCHW.
    """

    size: Annotated[tuple[Positive, Positive], Listed]
    """(height, width) in pixels."""
    name: Text | None = None
    """Name of the model's input; needed only if the model has several."""
    resize: Literal["letterbox-topleft", "letterbox-centre", "stretch"] = "letterbox-centre"
    interpolation: Literal["nearest", "linear", "cubic", "area"] = "linear"
    pad_value: Annotated[int, Field(ge=0, le=255)] = 114
    """Grey level of the letterbox border, before scale and mean."""
    color: Literal["rgb", "bgr"] = "rgb"
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    mean: Colour = (0.0, 0.0, 0.0)
    std: Colour = (1.0, 1.0, 1.0)

    @field_validator("std")
    @classmethod
    def _no_zero(cls, value: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(value) <= 0:
            raise ValueError(f"must be above 0, got {list(value)}")
        return value

    @property
    def height(self) -> int:
        return self.size[0]

    @property
    def width(self) -> int:
        return self.size[1]


class KeypointsConfig(_Section):
    """Keypoints of each object. ``keypoints: coco`` in a configuration means the 17 of persons in COCO."""

    names: Annotated[tuple[Text, ...], Field(min_length=1), Listed]
    """In the model's order."""
    sigmas: Annotated[tuple[Annotated[float, Field(gt=0.0, allow_inf_nan=False)], ...], Listed] = ()
    """Tolerance of each keypoint in COCO's keypoint AP, as a share of the object's size. By default 1 / their number,
    as in Ultralytics' evaluation."""
    skeleton: Annotated[
        tuple[Annotated[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], Listed], ...], Listed
    ] = ()
    """Pairs of keypoints that a picture joins by a line: indices from 0."""

    @model_validator(mode="before")
    @classmethod
    def _uniform(cls, value: Any) -> Any:
        names = value.get("names") if isinstance(value, dict) else None
        if isinstance(names, (list, tuple)) and names and not value.get("sigmas"):
            return {**value, "sigmas": (1 / len(names),) * len(names)}
        return value

    @model_validator(mode="after")
    def _counts(self) -> KeypointsConfig:
        count = len(self.names)
        if len(set(self.names)) < count:
            raise ValueError("keypoint names must be distinct")
        if len(self.sigmas) != count:
            raise ValueError(f"has {count} names and {len(self.sigmas)} sigmas; each keypoint has one")
        if any(index >= count for pair in self.skeleton for index in pair):
            raise ValueError(f"the skeleton joins a keypoint that is not among 0 to {count - 1}")
        return self


# fmt: off
_COCO_KEYPOINTS: dict[str, Any] = {
    "names": (
        "nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder", "left_elbow",
        "right_elbow", "left_wrist", "right_wrist", "left_hip", "right_hip", "left_knee", "right_knee", "left_ankle",
        "right_ankle",
    ),
    "sigmas": (
        0.026, 0.025, 0.025, 0.035, 0.035, 0.079, 0.079, 0.072, 0.072, 0.062, 0.062, 0.107, 0.107, 0.087, 0.087, 0.089,
        0.089,
    ),
    "skeleton": (
        (15, 13), (13, 11), (16, 14), (14, 12), (11, 12), (5, 11), (6, 12), (5, 6), (5, 7), (6, 8), (7, 9), (8, 10),
        (1, 2), (0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6),
    ),
}
# fmt: on
_WITH_PARTS = ("yolov5", "yolov8", "boxes", "detections")
"""Decode rules of detectors that can have masks, keypoints or rotated boxes."""


class HeadConfig(_Section):
    """Meaning of the raw outputs.

    ``decode`` is one of these rules:

    - ``yolox``: (B, N, 5 + C), ``xy = (xy + grid) * stride``, ``wh = exp(wh) * stride``, objectness, classes
    - ``yolov5``: (B, N, 5 + C), boxes already decoded to centre x, y, width, height in pixels, objectness, classes
    - ``yolov8``: (B, 4 + C, N), boxes decoded as above, classes; also YOLO11
    - ``dfl``: distance distributions of ``bins`` values per side (Li et al. 2020, arXiv:2006.04388), as a single output
      (B, N, C + 4 * bins) or, per stride, a class map (B, N_s, C) and a distance map (B, N_s, 4 * bins)
    - ``boxes``: decoded boxes (B, N, 4), see ``boxes`` and ``units``, and scores (B, N, C), or (B, N, C + 1) with a
      background class; also the queries of DETR and similar models
    - ``detections``: (B, N, 6): a box as for rule ``boxes``, its score and its class index; also YOLOv10 and YOLO26
      from their own exporters

    ``masks``, ``keypoints`` and ``rotated`` are what some detectors give beside boxes. Rules ``yolov5``, ``yolov8`` and
    ``detections`` read them from further columns of their output, in this order: M mask coefficients, x, y and maybe a
    score of each keypoint, and the angle in radians; a second output has the prototypes (B, M, h, w). For rule
    ``boxes`` each is an output after boxes and scores, in this order: mask coefficients (B, N, M), prototypes,
    keypoints (B, N, 2 P or 3 P) and angles (B, N, 1); or ``compute`` has expressions of these names:
    ``mask_coefficients``, ``prototypes``, ``keypoints`` and ``angles``. Keypoints have the ``units`` of boxes, and
    their scores are probabilities.
    """

    decode: Literal["yolox", "yolov5", "yolov8", "dfl", "boxes", "detections"]
    strides: Annotated[tuple[Positive, ...], Field(min_length=1), Listed] = (8, 16, 32)
    bins: Annotated[int, Field(ge=2)] = 8
    cell_offset: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Offset of a ``dfl`` anchor point in its cell, in strides; 0 for NanoDet-Plus."""
    boxes: Literal["xyxy", "yxyx", "cxcywh"] = "xyxy"
    """Box format of rules ``boxes`` and ``detections``: two corners, or centre, width and height."""
    units: Literal["pixels", "relative"] = "pixels"
    """Units of these boxes: pixels of the network's input, or fractions of its width and height."""
    scores: Literal["probabilities", "logits", "softmax"] = "probabilities"
    """``logits`` if the scores still need a sigmoid, ``softmax`` if rule ``boxes`` needs a softmax over the classes."""
    background: Literal["none", "first", "last"] = "none"
    """Position of the background score in rule ``boxes``; the background is not one of ``classes``."""
    columns: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(min_length=1), Listed] | None = None
    """Score column of each class in rule ``boxes``, in the order of ``classes``; None for all except the background.
    DETR's COCO weights, for example, have columns for unused category ids."""
    compute: dict[Text, Text] | None = None
    """Computes the inputs of rule ``boxes`` from other outputs: an expression by name, with ``boxes`` (B, N, 4) and
    ``scores`` (B, N, C) among the names. Expressions use outputs and earlier names (trtdet.detection.expressions)."""
    rpn_pre_nms_topk: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Largest number of anchors per level that enter the NMS of a two-stage model; None keeps the exported number."""
    rpn_post_nms_topk: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Largest number of proposals for its second stage; None keeps the exported number."""
    outputs: Annotated[tuple[Text, ...], Field(min_length=1), Listed] | None = None
    """Names of the raw outputs in the order that the rule expects; None takes the model's outputs in their order."""
    masks: bool = False
    """The detector gives masks, as coefficients of prototypes (YOLACT, Bolya et al. 2019, arXiv:1904.02689)."""
    keypoints: Annotated[
        KeypointsConfig | None, BeforeValidator(lambda value: _COCO_KEYPOINTS if value == "coco" else value)
    ] = None
    """The keypoints of each object, in pixels of the input; None for detectors without."""
    rotated: bool = False
    """Boxes are rotated: centre, width and height, and an angle in radians."""

    @field_validator("compute")
    @classmethod
    def _expressions(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        for name, text in (value or {}).items():
            if len(text) > _LONGEST:
                raise ValueError(f"'{one_line(name, 60)}' has {len(text)} characters, allowed are {_LONGEST}")
            try:
                ast.parse(text.strip(), mode="eval")
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise ValueError(f"'{one_line(name, 60)}' is no expression: {one_line(error, 200)}") from None
        if value is not None and not {"boxes", "scores"} <= value.keys():
            raise ValueError(f"computes boxes and scores, got {', '.join(value) or 'nothing'}")
        return value

    @model_serializer(mode="wrap")
    def _without_absent_parts(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Detectors of plain boxes keep the keys of schema 1, which older versions read."""
        data: dict[str, Any] = handler(self)
        return {key: value for key, value in data.items() if value or key not in ("masks", "keypoints", "rotated")}

    @property
    def has_parts(self) -> bool:
        """Whether the detector gives masks, keypoints or rotated boxes."""
        return bool(self.raw_parts)

    @property
    def raw_parts(self) -> tuple[str, ...]:
        """Names of the raw values beside boxes and scores, in the order of columns and outputs."""
        return (
            *(("mask_coefficients", "prototypes") if self.masks else ()),
            *(("keypoints",) if self.keypoints is not None else ()),
            *(("angles",) if self.rotated else ()),
        )

    @model_validator(mode="after")
    def _parts(self) -> HeadConfig:
        if self.has_parts and self.decode not in _WITH_PARTS:
            raise ValueError(
                f"head.masks, head.keypoints and head.rotated belong to head.decode {', '.join(_WITH_PARTS)}, "
                f"not {self.decode}"
            )
        missing = [name for name in self.raw_parts if self.compute is not None and name not in self.compute]
        if missing:
            raise ValueError(f"head.compute has no expression for {', '.join(missing)}")
        if self.rotated and self.decode in ("boxes", "detections") and self.boxes != "cxcywh":
            raise ValueError(f"head.rotated takes head.boxes cxcywh, not {self.boxes}")
        if self.rotated and self.units != "pixels":
            raise ValueError(f"head.rotated takes head.units pixels, not {self.units}")
        return self

    @model_validator(mode="after")
    def _rules(self) -> HeadConfig:
        box_keys = {
            "scores softmax": self.scores == "softmax",
            "background": self.background != "none",
            "columns": self.columns is not None,
            "compute": self.compute is not None,
        }
        for key, is_set in box_keys.items():
            if is_set and self.decode != "boxes":
                raise ValueError(f"head.{key} belongs to head.decode boxes, not {self.decode}")
        if self.columns is not None and self.background != "none":
            raise ValueError("head.columns names the classes' columns, so the background's is not among them: drop one")
        if self.columns is not None and len(set(self.columns)) < len(self.columns):
            raise ValueError("head.columns has a column twice; each class has its own")
        if self.decode not in ("boxes", "detections") and self.units != "pixels":
            raise ValueError(f"head.units belongs to head.decode boxes and detections, not {self.decode}")
        if self.decode == "detections" and self.scores == "logits":
            raise ValueError("head.scores logits: head.decode detections takes probabilities")
        return self


class NmsConfig(_Section):
    """Selection of detections. The defaults suit COCO mAP; for confident boxes only, raise ``score_threshold``."""

    score_threshold: Probability = 0.001
    """A candidate's score must exceed this."""
    iou_threshold: Annotated[float, Field(gt=0.0, le=1.0)] = 0.65
    """A box is suppressed if its IoU with a better box of its class exceeds this. 1 suppresses nothing; ``nms: none``
    in a configuration means 1."""
    max_detections: Positive = 300
    pre_nms_topk: Positive = 3000
    """Largest number of candidates per image that enter the suppression; the best are taken."""
    class_agnostic: bool = False
    candidates: Literal["all-classes", "best-class"] = "all-classes"
    """``all-classes``: a box competes with every class over the threshold; ``best-class``: with its best class only."""

    @property
    def suppresses(self) -> bool:
        """Whether a box can suppress another; False for detectors that find each object only once."""
        return self.iou_threshold < 1

    @property
    def most_candidates(self) -> int:
        """Number of best candidates per image that are considered."""
        return self.pre_nms_topk if self.suppresses else self.max_detections

    @model_validator(mode="after")
    def _order(self) -> NmsConfig:
        most = self.pre_nms_topk
        if self.max_detections > most:
            raise ValueError(f"max_detections ({self.max_detections}) must not exceed pre_nms_topk ({most})")
        return self


class Config(_Section):
    """Configuration of a detector."""

    name: Text
    classes: Annotated[
        tuple[Text, ...], BeforeValidator(lambda value: COCO_CLASSES if value == "coco" else value), Listed
    ]
    input: InputConfig
    head: HeadConfig
    nms: Annotated[NmsConfig, BeforeValidator(lambda value: {"iou_threshold": 1.0} if value == "none" else value)] = (
        NmsConfig()
    )

    @field_validator("classes")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("needs at least one class name")
        twice = sorted({name for name in value if value.count(name) > 1})
        if twice:
            raise ValueError(f"class names must be distinct, got twice: {', '.join(twice)}")
        return value

    @model_validator(mode="after")
    def _sizes(self) -> Config:
        columns = self.head.columns
        if columns is not None and len(columns) != len(self.classes):
            raise ValueError(f"head.columns names {len(columns)} columns, 'classes' lists {len(self.classes)}")
        for stride in self.head.strides if self.head.decode == "yolox" else ():
            if self.input.height % stride or self.input.width % stride:
                raise ValueError(f"input.size {list(self.input.size)} is not a multiple of stride {stride}")
        return self

    @property
    def suppresses_logits(self) -> bool:
        """Whether NMS compares logits and applies the sigmoid only to kept scores.

        YOLOX and YOLOv5 cannot: their score is objectness times class, a product of probabilities.
        """
        return self.head.scores == "logits" and self.head.decode not in ("yolox", "yolov5")

    def with_size(self, size: tuple[int, int]) -> Config:
        """This configuration with another input size (height, width) in pixels.

        Raises:
            ConfigError: a value is out of range, or not a multiple of the head's strides.
        """
        data = self.model_dump()
        data["input"]["size"] = size
        return _validate(data, f"--size {size[0]}x{size[1]}")

    def with_nms(self, **changes: Any) -> Config:
        """This configuration with some NMS keys replaced; None leaves a key as it is. Raises ConfigError: a value is
        out of range."""
        values = {key: value for key, value in changes.items() if value is not None}
        if not values:
            return self
        data = self.model_dump()
        data["nms"].update(values)
        return _validate(data, "options")


def shipped_folder(name: str) -> Path:
    """A folder of trtdet's data: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


def shipped(kind: Literal["configs", "calib"]) -> dict[str, Path]:
    """The shipped files in ``configs/`` or ``calib/``, by stem."""
    files = sorted(shipped_folder(kind).iterdir())
    return {path.stem: path for path in files if path.is_file() and path.suffix != ".md"}


def load_config(source: str | Path) -> Config:
    """Reads a YAML file, or a shipped configuration by its name such as ``yolox``.

    A file can extend another one and give only the keys that differ: ``extends:`` takes a shipped name, or a path
    relative to the file.

    Raises:
        ConfigError: the file is missing, too large or not YAML, or a key is misspelt, missing, of the wrong type or out
            of range; the message is a single line that names the key path.
    """
    return _validate(_read(source), str(source))


def _read(source: str | Path, folder: Path = Path(), chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    names = shipped("configs")
    path = names[str(source)] if str(source) in names else folder / source
    try:
        place = path.resolve()
        if place in chain:
            raise ConfigError(f"{path}: 'extends' runs in a circle; extend a shipped configuration: {', '.join(names)}")
        finish_replacing(path.parent)
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except FileNotFoundError:
        raise _error(
            f"configuration '{source}' is neither a file nor a shipped name; shipped: {', '.join(names)}"
            f"{nearest(str(source), names)}"
        ) from None
    except (OSError, ValueError, RuntimeError) as error:  # also for null characters and circular links
        raise _error(f"configuration '{source}' cannot be read: {error}") from None
    if len(content) > _LARGEST:
        raise _error(f"configuration '{source}' is larger than {_LARGEST} bytes; a detector takes a few dozen lines")
    try:
        data = yaml.load(content.decode("utf-8"), _Loader)
    except UnicodeDecodeError as error:
        raise _error(f"configuration '{source}' cannot be read: {error}; write it in UTF-8") from None
    except yaml.YAMLError as error:
        raise _error(f"configuration '{source}' is not YAML: {error}") from None
    except RecursionError:
        raise _error(f"configuration '{source}' is nested too deeply; a detector takes three levels") from None
    except Exception as error:
        # For tagged values, PyYAML passes on exceptions of int(), datetime() and its own lookups.
        raise _error(f"configuration '{source}' has a value that YAML cannot read: {error}") from None
    if not isinstance(data, dict):
        raise _error(f"configuration '{source}' must be a mapping of keys, got {type(data).__name__}")
    _count(data, str(source), {})
    base = data.pop("extends", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise _error(f"{source}: 'extends' must be a name or a file, got {_shown(base)}")
    return _merge(_read(base, path.parent, (*chain, place)), data)


class _Loader(yaml.SafeLoader):
    merged_keys = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Expands ``<<`` and counts its keys: nested aliases would multiply here, before ``_count`` runs."""
        before = len(node.value)
        super().flatten_mapping(node)
        self.merged_keys += len(node.value) - before
        if self.merged_keys > _MOST_VALUES:
            raise yaml.constructor.ConstructorError(None, None, f"over {_MOST_VALUES} merged keys", node.start_mark)


def _count(value: Any, source: str, counts: dict[int, int]) -> int:
    """Number of values with all aliases expanded; a few bytes of YAML can mean billions.

    ``counts`` maps id() of lists and mappings to their number; 0 marks a count in progress.
    """
    if not isinstance(value, (dict, list)):
        return 1
    total = counts.get(id(value))
    if total == 0:
        raise _error(f"configuration '{source}' has an alias that contains itself; write the values out")
    if total is None:
        counts[id(value)] = 0
        parts = value.values() if isinstance(value, dict) else value
        total = counts[id(value)] = 1 + sum(_count(part, source, counts) for part in parts)
    if total > _MOST_VALUES:
        raise _error(f"configuration '{source}' has over {_MOST_VALUES} values by its aliases; write the values out")
    return total


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if nested else value
    return merged


def _validate(data: dict[str, Any], source: str) -> Config:
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        problems = [_explain(dict(item)) for item in error.errors(include_url=False)[:_MOST_PROBLEMS]]
        others = error.error_count() - 1
        more = f" (and {others} more: {'; '.join(problems[1:])}{', ...' if others >= len(problems) else ''})"
        raise _error(f"{source}: {problems[0]}{more if others else ''}") from None


def _explain(item: dict[str, Any]) -> str:
    location: tuple[str | int, ...] = item["loc"]
    path = ".".join(one_line(part, 60) for part in location) or "configuration"
    if item["type"] == "extra_forbidden":
        section: type[BaseModel] = Config
        for part in location[:-1]:
            annotation = section.model_fields[str(part)].annotation
            for kind in (annotation, *get_args(annotation)):  # a section may be optional
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    section = kind
        allowed = sorted(section.model_fields)
        return f"unknown key '{path}'{nearest(str(location[-1]), allowed)}; allowed here: {', '.join(allowed)}"
    if item["type"] == "missing":
        return f"key '{path}' is missing"
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"key '{path}': {message}" if location else message
    return f"key '{path}': {message[0].lower()}{message[1:]}, got {_shown(item['input'])}"


def _shown(value: Any) -> str:
    """A short repr of any value, for messages."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    try:
        return short.repr(value)
    except ValueError:
        return f"{type(value).__name__} of too many digits"


def _error(message: str) -> ConfigError:
    return ConfigError(one_line(message, 2000))
