"""Checkpoints of the package ``ultralytics``: YOLOv5u, v8, v9, v10, 11, 12 and 26, for detection, segmentation, poses
and rotated boxes.

The file pickles the whole network and is read as records. The installed package builds the network from the description
in the file and loads the weights. Both networks are compared module by module, because another version of the package
may build another network from the same description.
"""

from __future__ import annotations

import copy
import importlib
import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtdet.config import Config
from trtdet.errors import ModelError, one_line
from trtdet.exporter import ExportOptions, checkpoints
from trtdet.exporter.checkpoints import Record
from trtdet.exporter.trials import SourceModel, first_line, quiet, resized

_HEADS = {
    **dict.fromkeys(("Detect", "v10Detect"), "DetectionModel"),
    **dict.fromkeys(("Segment", "Segment26"), "SegmentationModel"),
    **dict.fromkeys(("Pose", "Pose26"), "PoseModel"),
    **dict.fromkeys(("OBB", "OBB26"), "OBBModel"),
}
"""The package's model class by the module that a network ends in."""
_FAMILIES = {"SegmentationModel": "yolov8-seg", "PoseModel": "yolov8-pose", "OBBModel": "yolov8-obb"}
"""The shipped configurations that read their outputs."""
_EXTRAS = {"SegmentationModel": "mask_coefficients", "PoseModel": "keypoints", "OBBModel": "angles"}
_ARGUMENT = r"(?:\w+\s*=\s*)?[\w.+-]+"
_ACTIVATION = re.compile(rf"(?:torch\.)?nn\.(\w+)\((?:{_ARGUMENT}(?:,\s*{_ARGUMENT})*(?:,\s*)?)?\)")
"""A comma precedes each argument but the first, so that matching takes at most quadratic time."""
_MOST_REPEATS = 1000
_MODULES = ("torch.nn.modules.", "ultralytics.nn.modules.")

_NOT_COMPARED = frozenset(("inplace", "export", "dynamic", "format", "np", "i", "max_det", "_end2end", "end2end"))
"""Attributes of modules that differ between training and export, or do not affect results."""


def load(place: str, options: ExportOptions) -> SourceModel:
    """The network of a checkpoint up to its decoded boxes and scores, without the selection of the best.
    Of two heads it has the one-to-one head, which needs no NMS, or with ``one_to_many`` the other."""
    path = Path(place)
    content = checkpoints.read(path, ("ultralytics",), "ultralytics:")
    network = checkpoints.network_of(path, content, "expected a file that ultralytics' trainer wrote, such as best.pt")
    with quiet("ultralytics"):
        model = _built(path, network)
        if getattr(model.model[-1], "one2one_cv2", None) is not None:
            model.model[-1].end2end = not options.one_to_many
        elif options.one_to_many:
            raise ModelError(f"checkpoint '{path}' has a single head, which is one-to-many; leave out --one-to-many")
        extra = _EXTRAS.get(type(model).__name__, "")
        reference, traced = _Raw(model, extra), _Raw(copy.deepcopy(model).fuse(verbose=False), extra)
    config = options.config or _configuration(path, network, content, end_to_end=reference.end_to_end)
    config = resized(config, options.size, 1 if options.config else int(model.stride.max()))
    return SourceModel(f"ultralytics:{place}", reference=reference.eval(), config=config, traced=traced.eval())


class _Raw(nn.Module):
    """Returns ``output0`` (B, 4 + C, N): centre, width and height in pixels, and probabilities; behind them the rows of
    ``extra``, and with masks ``output1``, the prototypes.

    A one-to-one head returns ``boxes`` (B, N, 4) in pixels, corners or, if rotated, centre and size, ``scores``
    (B, N, C), probabilities, then the columns of ``extra`` and with masks ``prototypes``.
    """

    def __init__(self, model: Any, extra: str = "") -> None:
        super().__init__()
        self.model, self.extra = model, extra
        self.classes = int(model.model[-1].nc)
        head = model.model[-1]
        self.end_to_end = bool(head.end2end)
        head.export, head.dynamic, head.format, head.shape = True, False, "onnx", None
        # The package selects the best detections in this method; an attribute of the instance overrides it.
        head.postprocess = lambda decoded, *_: decoded

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        results = self.model(x)
        decoded, *prototypes = results if isinstance(results, (tuple, list)) else (results,)
        if not self.end_to_end:
            return {f"output{index}": tensor for index, tensor in enumerate((decoded, *prototypes))}
        last = 4 + self.classes
        outputs = {"boxes": decoded[..., :4], "scores": decoded[..., 4:last]}
        if self.extra:
            outputs[self.extra] = decoded[..., last:]
        return outputs | dict(zip(("prototypes",), prototypes, strict=False))


def _built(path: Path, network: Record) -> Any:
    description = network["yaml"]
    try:
        from ultralytics.nn import tasks
    except ImportError as error:
        raise ModelError(
            f"export of ultralytics:{path} needs the package ultralytics, which cannot be imported "
            f"({first_line(error)}); install it with: pip install ultralytics (AGPL-3.0)"
        ) from None
    package = f"ultralytics {importlib.import_module('ultralytics').__version__}"
    advice = "install the version of ultralytics that it was trained with"
    logging.getLogger("ultralytics").setLevel(logging.ERROR)
    _check_description(path, description, tasks, package=package)
    try:
        with torch.random.fork_rng(devices=[]):
            kind = getattr(tasks, _HEADS[description["head"][-1][2]])
            model = kind(copy.deepcopy(description), ch=3, verbose=False)
    except Exception as error:  # the package may raise anything for a wrong description
        raise ModelError(
            f"{package} cannot build the network of checkpoint '{path}': {type(error).__name__}: "
            f"{first_line(error)}; {advice}"
        ) from None
    checkpoints.load_state(model, network.state(), path, advice=advice)
    checkpoints.check_same(path, model, network, ignored=_NOT_COMPARED, builder=package, advice=advice)
    return model.eval()


def _check_description(path: Path, description: Any, tasks: Any, package: str) -> None:
    """Allows only descriptions that build modules: the package would evaluate any Python text as the activation, and
    some of its classes load other files."""
    refused = f"checkpoint '{path}' is refused: the description of its network"
    if not isinstance(description, dict) or not all(
        isinstance(description.get(part), list) and description[part] for part in ("backbone", "head")
    ):
        raise ModelError(f"{refused} has no lists 'backbone' and 'head'; expected a file that its trainer wrote")
    activation = description.get("activation")
    if activation is not None:
        named = _ACTIVATION.fullmatch(activation) if isinstance(activation, str) else None
        kind = None if named is None else getattr(nn, named[1], None)
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise ModelError(
                f"{refused} has the activation {one_line(repr(activation), 80)}, expected a module of torch such as "
                "nn.SiLU(); nothing of it was run"
            )
    for row in (*description["backbone"], *description["head"]):
        if not (isinstance(row, list) and len(row) == 4 and isinstance(row[2], str) and isinstance(row[3], list)):
            raise ModelError(f"{refused} has the row {one_line(repr(row), 80)}, expected [from, number, module, args]")
        _, repeats, name, arguments = row
        kind = getattr(nn, name[3:], None) if name.startswith("nn.") else getattr(tasks, name, None)
        own = isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__.startswith(_MODULES)
        if not own or name == "TorchVision":
            raise ModelError(
                f"{refused} has the module {one_line(repr(name), 80)}, which is no part of a detector in "
                f"{package}; update ultralytics if the checkpoint is newer"
            )
        if not isinstance(repeats, int) or not 0 < repeats <= _MOST_REPEATS or not _is_plain(arguments):
            raise ModelError(f"{refused} has the row {one_line(repr(row), 80)}, expected numbers, names and lists")
    head = description["head"][-1][2]
    if head not in _HEADS:
        raise ModelError(
            f"checkpoint '{path}' ends in {one_line(head, 40)}, allowed are {', '.join(_HEADS)}: detectors with fixed "
            "classes"
        )
    channels = description.get("channels", description.get("ch", 3))
    if channels != 3:
        raise ModelError(f"checkpoint '{path}' takes {channels!r} channels, allowed is 3")


def _is_plain(value: Any, depth: int = 4) -> bool:
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _configuration(path: Path, network: Record, content: dict[str, Any], end_to_end: bool) -> Config:
    layers = network.modules.get("model")
    inner = list(layers.modules.values()) if isinstance(layers, Record) else []
    head = inner[-1] if inner and isinstance(inner[-1], Record) else None
    count = head["nc"] if head is not None else None
    arguments = [content.get("train_args"), network["args"]]
    kind = _HEADS[network["yaml"]["head"][-1][2]]
    family = _FAMILIES.get(kind, "yolov8")
    settings = checkpoints.family_settings(path, family, network, count, arguments=arguments)
    shape = head["kpt_shape"] if head is not None and kind == "PoseModel" else (17, 3)
    if tuple(shape)[:1] != (17,):
        settings["head"]["keypoints"] = {"names": [f"keypoint {index}" for index in range(int(shape[0]))]}
    if end_to_end:
        settings["head"] |= {"decode": "boxes", "boxes": "cxcywh" if kind == "OBBModel" else "xyxy"}
        limit = head["max_det"] if head is not None else None
        settings["nms"] |= {"iou_threshold": 1.0} | ({"max_detections": limit} if isinstance(limit, int) else {})
    return Config.model_validate(settings)
