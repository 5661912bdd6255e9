"""Detectors of torchvision: RetinaNet, FCOS, SSD and SSDlite, and those of :mod:`torchvision_two_stage`.

Exported of a detector of one stage are the backbone, the head and the decoding of its numbers by the anchors of the
input's size, as boxes and scores. Resizing and normalisation are the configuration's, and so is suppression. The
decodings are those of torchvision: offsets from anchors (Ren et al. 2015, arXiv:1506.01497) and distances to four sides
(Tian et al. 2019, arXiv:1904.01355).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trtdet.config import COCO_CLASSES, Config
from trtdet.errors import ConfigError, ModelError
from trtdet.exporter import ExportOptions, checkpoints, weights
from trtdet.exporter import torchvision_two_stage as two_stage
from trtdet.exporter.subject import Subject
from trtdet.exporter.trials import first_line, resized

_ONE_STAGE = {
    "retinanet_resnet50_fpn": (800, 1344),
    "retinanet_resnet50_fpn_v2": (800, 1344),
    "fcos_resnet50_fpn": (800, 1344),
    "ssd300_vgg16": (300, 300),
    "ssdlite320_mobilenet_v3_large": (320, 320),
}
"""Height and width that each is exported at. Those of 800 and more scale the shorter side of an image to 800 and the
longer to 1333 at most; an engine has a single size, which is that of a landscape."""

_SIZES = _ONE_STAGE | two_stage.SIZES

_WITHOUT_EPSILON = ("retinanet_resnet50_fpn", "fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn")

_COLUMNS = 91
"""Of models trained by torchvision on COCO: its category ids with the ten that it never gave, and 0 for no object."""

_LARGEST_LOGARITHM = math.log(1000 / 16)
"""How much larger than its anchor a box may be, as torchvision's BoxCoder clamps it."""


def load(place: str, options: ExportOptions) -> Subject:
    """A detector of torchvision by its name, with the weights of the options.

    Args:
        place: a key of the table of sizes.
        options: ``weights`` is a state dict, as torchvision publishes it.

    Raises:
        ConfigError: the configuration has another number of classes.
        ModelError: there is no such detector, the package or the weights are missing, or the weights do not fit.
    """
    if place not in _SIZES:
        raise ModelError(
            f"torchvision:{place} is not allowed, allowed are {', '.join(_SIZES)}; export others with a factory that "
            "gives boxes and scores"
        )
    if place in two_stage.SIZES:
        two_stage.one_at_a_time(f"torchvision:{place}", options)
    if options.weights is None and not options.random_weights:
        raise ModelError(
            f"export of torchvision:{place} needs its weights, got none; give the state dict that torchvision "
            "publishes, or your own, with --weights FILE.pth"
        )
    try:
        detection = importlib.import_module("torchvision.models.detection")
    except Exception as error:  # also a build for another torch, which fails in many ways
        raise ModelError(
            f"export of torchvision:{place} needs torchvision, which cannot be imported ({first_line(error)}); install "
            "it with: pip install torchvision"
        ) from None
    state = weights.read_state(options.weights) if options.weights is not None else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _built(detection, place, state, options)
    if state and options.weights is not None:
        checkpoints.load_state(model, state, options.weights, f"expected weights of torchvision's {place}")
    config = resized(options.config or _configuration(place, model), options.size)
    columns = _class_columns(place, model, config, options)
    source = f"torchvision:{place}"
    if place in _ONE_STAGE:
        return Subject(source, _Detector(model.eval(), config.input.size, columns).eval(), config)
    return two_stage.subject(source, model.eval(), config, columns)


def _built(detection: Any, name: str, state: dict[str, Tensor], options: ExportOptions) -> Any:
    make = getattr(detection, name)
    blank = {"weights": None, "weights_backbone": None}
    columns = len(options.config.classes) + 1 if options.config is not None else _COLUMNS
    if state:
        # The number of classes is that of the last layer's channels, for each anchor of a cell.
        small = make(**blank, num_classes=2).state_dict()
        ends = ("classification_head", "box_predictor.cls_score")
        key = next((key for key in reversed(small) if any(e in key for e in ends) and key.endswith("weight")), "")
        if key in state and len(state[key]) % max(len(small[key]) // 2, 1) == 0:
            columns = len(state[key]) // (len(small[key]) // 2)
    model = make(**blank, num_classes=columns)
    frozen = state and not any(key.endswith("num_batches_tracked") for key in state)
    if frozen and name in _WITHOUT_EPSILON and options.config is None:
        # torchvision's own weights for COCO are run without the epsilon of batch normalisation.
        for module in model.backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = 0.0
    return model


def _columns_of(model: Any) -> int:
    if hasattr(model, "roi_heads"):
        return int(model.roi_heads.box_predictor.cls_score.out_features)
    head = model.head.classification_head
    return int(head.num_columns if hasattr(head, "num_columns") else head.num_classes)


def _class_columns(name: str, model: Any, config: Config, options: ExportOptions) -> list[int]:
    """The columns of the scores that are the classes', in their order; 0 is no object in torchvision's own training."""
    total = _columns_of(model)
    if options.config is None:
        return _coco_columns()
    count = len(config.classes)
    if total == _COLUMNS and config.classes == COCO_CLASSES:
        return _coco_columns()
    if total == count + 1:
        return list(range(1, total))
    if total == count and name in _ONE_STAGE and not name.startswith("ssd"):
        return list(range(total))
    raise ConfigError(
        f"the weights of torchvision:{name} have {total} columns of scores, the configuration has {count} classes",
        "list as many classes, without that of no object, which is column 0",
    )


def _coco_columns() -> list[int]:
    """COCO's 80 categories among its ids 1 to 90."""
    never_given = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
    return [number for number in range(1, _COLUMNS) if number not in never_given]


class _Detector(nn.Module):
    """Gives ``boxes`` (B, N, 4), corners in pixels, and ``scores`` (B, N, C), probabilities."""

    anchors: Tensor

    def __init__(self, model: Any, size: tuple[int, int], columns: Sequence[int]) -> None:
        super().__init__()
        self.backbone, self.head = model.backbone, model.head
        kind = type(model).__name__
        self.softmax = kind == "SSD"
        self.distances = kind == "FCOS"
        self.scale = (10.0, 5.0) if self.softmax else (1.0, 1.0)
        self.register_buffer("columns", torch.tensor(list(columns)), persistent=False)
        image = torch.zeros(1, 3, *size)
        images = importlib.import_module("torchvision.models.detection.image_list").ImageList(image, [size])
        with torch.no_grad():
            (anchors,) = model.anchor_generator(images, self._features(image))
        self.register_buffer("anchors", anchors, persistent=False)

    def _features(self, x: Tensor) -> list[Tensor]:
        features = self.backbone(x)
        return [features] if isinstance(features, Tensor) else list(features.values())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        given = self.head(self._features(x))
        logits = given["cls_logits"]
        scores = logits.softmax(-1) if self.softmax else logits.sigmoid()
        if self.distances:
            scores = (scores * given["bbox_ctrness"].sigmoid()).sqrt()
        return {"boxes": self._boxes(given["bbox_regression"]), "scores": scores.index_select(2, self.columns)}

    def _boxes(self, numbers: Tensor) -> Tensor:
        low, high = self.anchors[:, :2], self.anchors[:, 2:]
        sides, centres = high - low, (low + high) * 0.5
        first, second = numbers[..., :2], numbers[..., 2:]
        if self.distances:
            return torch.cat((centres - first * sides, centres + second * sides), -1)
        centres = centres + first / self.scale[0] * sides
        half = (second / self.scale[1]).clamp(max=_LARGEST_LOGARITHM).exp() * sides * 0.5
        return torch.cat((centres - half, centres + half), -1)


def _configuration(name: str, model: Any) -> Config:
    total = _columns_of(model)
    if total != _COLUMNS:
        raise ConfigError(
            f"the weights of torchvision:{name} have {total} columns of scores, which have no names",
            f"list the {total - 1} classes after that of no object in a configuration, and give it with --config",
        )
    transform, fixed = model.transform, name.startswith("ssd")
    mean = tuple(float(value) for value in transform.image_mean)
    given = {
        "size": _SIZES[name],
        "name": "images",
        "resize": "stretch" if fixed else "letterbox-topleft",
        "pad_value": round(255 * sum(mean) / 3),  # nearest to torchvision's border, which is 0 after normalisation
        "scale": 1 / 255,
        "mean": mean,
        "std": tuple(float(value) for value in transform.image_std),
    }
    head: dict[str, Any] = {"decode": "boxes", "outputs": ("boxes", "scores")}
    if name in _ONE_STAGE:
        nms = {"iou_threshold": float(model.nms_thresh), "max_detections": int(model.detections_per_img)}
    else:  # the model suppresses by itself
        own = two_stage.suppression(model)
        head, nms = {"decode": "detections"}, {"iou_threshold": 1.0, "max_detections": own.max_detections}
        nms["score_threshold"] = own.score_threshold
    return Config.model_validate(
        {
            "name": name,
            "classes": COCO_CLASSES,
            "input": given,
            "head": head,
            "nms": nms,
        }
    )
