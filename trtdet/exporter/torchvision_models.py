"""Detectors of torchvision: one-stage RetinaNet, FCOS, SSD and SSDlite, and two-stage Faster R-CNN and Mask R-CNN.

The export of a one-stage detector has the backbone, the head and the decoding to boxes and scores with the anchors of
the input size. Resizing, normalisation and NMS are in the configuration. Decoding is torchvision's: offsets from
anchors (Ren et al. 2015, arXiv:1506.01497) or distances to four sides (Tian et al. 2019, arXiv:1904.01355).

A two-stage detector is exported with both its NMS steps, for one image of a fixed size. The outputs are ``boxes``
(n, 4), ``labels`` (n,), ``scores`` (n,) and, for Mask R-CNN, ``masks`` (n, 1, 28, 28), not yet pasted into the image.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trtdet.config import COCO_CLASSES, Config, NmsConfig
from trtdet.detection.parts import Float
from trtdet.errors import ConfigError, ModelError
from trtdet.exporter import UNDETECTED, ExportOptions, ParityComparison, checkpoints, parity
from trtdet.exporter.parity import Outputs
from trtdet.exporter.trials import SourceModel, first_line, resized

_ONE_STAGE = {
    "retinanet_resnet50_fpn": (800, 1344),
    "retinanet_resnet50_fpn_v2": (800, 1344),
    "fcos_resnet50_fpn": (800, 1344),
    "ssd300_vgg16": (300, 300),
    "ssdlite320_mobilenet_v3_large": (320, 320),
}
"""Input height and width of each export. Models from 800 on scale an image's shorter side to 800 and its longer side to
at most 1333; an engine has one size, which is landscape."""

_TWO_STAGE = {
    "fasterrcnn_resnet50_fpn": (800, 1344),
    "fasterrcnn_resnet50_fpn_v2": (800, 1344),
    "fasterrcnn_mobilenet_v3_large_fpn": (800, 1344),
    "fasterrcnn_mobilenet_v3_large_320_fpn": (320, 640),
    "maskrcnn_resnet50_fpn": (800, 1344),
    "maskrcnn_resnet50_fpn_v2": (800, 1344),
}
"""The same, rounded up to a multiple of 32."""

STEPS = ("objectness", "deltas", "proposals", "proposal_scores", "logits", "regression")
"""Outputs that are compared but not written."""

_WITHOUT_EPSILON = ("retinanet_resnet50_fpn", "fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn")

_COLUMNS = 91
"""Score columns of torchvision's COCO models: the category ids, of which COCO does not use ten, and 0 for no object."""

_COCO_COLUMNS = [number for number in range(1, _COLUMNS) if number not in {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}]
"""The columns of COCO's 80 categories."""

_LARGEST_LOGARITHM = math.log(1000 / 16)
"""Largest logarithm of a box's size over its anchor's, as in torchvision's BoxCoder."""


def load(place: str, options: ExportOptions) -> SourceModel:
    if place not in _ONE_STAGE | _TWO_STAGE:
        raise ModelError(
            f"torchvision:{place} is not allowed, allowed are {', '.join(_ONE_STAGE | _TWO_STAGE)}; export others with "
            "a factory that gives boxes and scores"
        )
    if place in _TWO_STAGE:
        check_batch(f"torchvision:{place}", options)
    if options.weights is None and not options.random_weights:
        raise ModelError(
            f"export of torchvision:{place} needs its weights, got none; give the state dict that torchvision "
            "publishes, or your own, with --weights FILE.pth"
        )
    try:
        detection = importlib.import_module("torchvision.models.detection")
    except Exception as error:  # a torchvision for another torch fails in many ways
        raise ModelError(
            f"export of torchvision:{place} needs torchvision, which cannot be imported ({first_line(error)}); install "
            "it with: pip install torchvision"
        ) from None
    state = checkpoints.read_state(options.weights) if options.weights is not None else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, total = _built(detection, place, state, options=options)
    if state and options.weights is not None:
        checkpoints.load_state(model, state, Path(options.weights), advice=f"expected weights of torchvision's {place}")
    config = resized(options.config or _configuration(place, model, total), options.size)
    source, count = f"torchvision:{place}", len(config.classes)
    # The score columns of the classes, in their order; torchvision trains column 0 as no object.
    if options.config is None or (total == _COLUMNS and config.classes == COCO_CLASSES):
        columns = _COCO_COLUMNS
    elif total == count + 1:
        columns = list(range(1, total))
    elif total == count and place in _ONE_STAGE and not place.startswith("ssd"):
        columns = list(range(total))
    else:
        raise ConfigError(
            f"the weights of {source} have {total} columns of scores, the configuration has {count} classes",
            "list as many classes, without that of no object, which is column 0",
        )
    if place in _ONE_STAGE:
        return SourceModel(source, _OneStage(model.eval(), config.input.size, columns).eval(), config)
    return two_stage_source(source, model.eval(), config, columns=columns)


def _built(detection: Any, name: str, state: dict[str, Tensor], options: ExportOptions) -> tuple[Any, int]:
    """The detector without its weights, and its number of score columns."""
    make = getattr(detection, name)
    blank = {"weights": None, "weights_backbone": None}
    columns = len(options.config.classes) + 1 if options.config is not None else _COLUMNS
    if state:
        # The last layer has a channel per class and anchor of a cell, which gives the number of classes.
        small = make(**blank, num_classes=2).state_dict()
        ends = ("classification_head", "box_predictor.cls_score")
        key = next((key for key in reversed(small) if any(e in key for e in ends) and key.endswith("weight")), "")
        if key in state and len(state[key]) % max(len(small[key]) // 2, 1) == 0:
            columns = len(state[key]) // (len(small[key]) // 2)
    model = make(**blank, num_classes=columns)
    frozen = state and not any(key.endswith("num_batches_tracked") for key in state)
    if frozen and name in _WITHOUT_EPSILON and options.config is None:
        # torchvision runs its own COCO weights without the epsilon of batch normalisation.
        for module in model.backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = 0.0
    return model, columns


def _feature_maps(backbone: nn.Module, x: Tensor) -> dict[str, Tensor]:
    features = backbone(x)
    return {"0": features} if isinstance(features, Tensor) else features


class _OneStage(nn.Module):
    """Returns ``boxes`` (B, N, 4), corners in pixels, and ``scores`` (B, N, C), probabilities."""

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
            (anchors,) = model.anchor_generator(images, list(_feature_maps(self.backbone, image).values()))
        self.register_buffer("anchors", anchors, persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = self.head(list(_feature_maps(self.backbone, x).values()))
        logits, numbers = outputs["cls_logits"], outputs["bbox_regression"]
        scores = logits.softmax(-1) if self.softmax else logits.sigmoid()
        if self.distances:
            scores = (scores * outputs["bbox_ctrness"].sigmoid()).sqrt()
        low, high = self.anchors[:, :2], self.anchors[:, 2:]
        sides, centres = high - low, (low + high) * 0.5
        first, second = numbers[..., :2], numbers[..., 2:]
        if self.distances:
            boxes = torch.cat((centres - first * sides, centres + second * sides), -1)
        else:
            centres = centres + first / self.scale[0] * sides
            half = (second / self.scale[1]).clamp(max=_LARGEST_LOGARITHM).exp() * sides * 0.5
            boxes = torch.cat((centres - half, centres + half), -1)
        return {"boxes": boxes, "scores": scores.index_select(2, self.columns)}


def _configuration(name: str, model: Any, total: int) -> Config:
    if total != _COLUMNS:
        raise ConfigError(
            f"the weights of torchvision:{name} have {total} columns of scores, which have no names",
            f"list the {total - 1} classes after that of no object in a configuration, and give it with --config",
        )
    transform, fixed = model.transform, name.startswith("ssd")
    mean = tuple(float(value) for value in transform.image_mean)
    data = {
        "size": (_ONE_STAGE | _TWO_STAGE)[name],
        "name": "images",
        "resize": "stretch" if fixed else "letterbox-topleft",
        "pad_value": round(255 * sum(mean) / 3),  # closest to torchvision's border, which is 0 after normalisation
        "scale": 1 / 255,
        "mean": mean,
        "std": tuple(float(value) for value in transform.image_std),
    }
    head: dict[str, Any] = {"decode": "boxes", "outputs": ("boxes", "scores")}
    if name in _ONE_STAGE:
        nms = {"iou_threshold": float(model.nms_thresh), "max_detections": int(model.detections_per_img)}
    else:  # the model has its own NMS
        own = _suppression(model)
        head, nms = {"decode": "detections"}, {"iou_threshold": 1.0, "max_detections": own.max_detections}
        nms["score_threshold"] = own.score_threshold
    return Config.model_validate({"name": name, "classes": COCO_CLASSES, "input": data, "head": head, "nms": nms})


class TwoStageModel(nn.Module):
    """A torchvision detector for one image of ``size`` (height, width), without resizing and mask pasting.

    It returns the detections and the values of each stage. First stage: ``objectness`` (a, 1) and offsets ``deltas``
    (a, 4) of all anchors, and ``proposals`` (p, 4) with ``proposal_scores`` (p,). Second stage: ``logits``
    (p, columns) and offsets ``regression`` (p, 4 x columns) of the proposals.
    """

    def __init__(self, model: Any, size: tuple[int, int]) -> None:
        super().__init__()
        self.backbone, self.rpn, self.roi_heads, self.size = model.backbone, model.rpn, model.roi_heads, size
        self._images = importlib.import_module("torchvision.models.detection.image_list").ImageList
        self._joined = importlib.import_module("torchvision.models.detection.rpn").concat_box_prediction_layers
        self._own_masks = importlib.import_module("torchvision.models.detection.roi_heads").maskrcnn_inference

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = _feature_maps(self.backbone, x)
        objectness, deltas, counts = self.scored(features)
        proposals, proposal_scores = self.proposed(x, features, objectness, deltas=deltas, counts=counts)
        logits, regression = self.classified(features, proposals)
        outputs = self.detected(logits, regression, proposals)
        if self.roi_heads.has_mask():
            outputs["masks"] = self.masks(features, outputs["boxes"], outputs["labels"])
        steps = (objectness, deltas, proposals, proposal_scores, logits, regression)
        return outputs | dict(zip(STEPS, steps, strict=True))

    def scored(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[int]]:
        """Objectness (a, 1) and offsets (a, 4) of all anchors, and the number of anchors of each level."""
        objectness, deltas = self.rpn.head(list(features.values()))
        counts = [int(level[0].numel()) for level in objectness]
        return (*self._joined(objectness, deltas), counts)

    def proposed(
        self, x: Tensor, features: dict[str, Tensor], objectness: Tensor, deltas: Tensor, counts: list[int]
    ) -> tuple[Tensor, Tensor]:
        """The proposals (p, 4) and their scores (p,)."""
        anchors = self.rpn.anchor_generator(self._images(x, [self.size]), list(features.values()))
        boxes = self.rpn.box_coder.decode(deltas, anchors).view(1, -1, 4)
        (proposals,), (scores,) = self.rpn.filter_proposals(boxes, objectness, [self.size], counts)
        return proposals, scores

    def classified(self, features: dict[str, Tensor], proposals: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (p, columns) and offsets (p, 4 x columns) of proposals."""
        heads = self.roi_heads
        logits, regression = heads.box_predictor(heads.box_head(heads.box_roi_pool(features, [proposals], [self.size])))
        return logits, regression

    def detected(self, logits: Tensor, regression: Tensor, proposals: Tensor) -> dict[str, Tensor]:
        """Boxes (n, 4), labels (n,) and scores (n,)."""
        (boxes,), (scores,), (labels,) = self.roi_heads.postprocess_detections(
            logits, regression, [proposals], [self.size]
        )
        return {"boxes": boxes, "labels": labels, "scores": scores}

    def masks(self, features: dict[str, Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
        """The mask (n, 1, 28, 28) of each box."""
        heads = self.roi_heads
        logits = heads.mask_predictor(heads.mask_head(heads.mask_roi_pool(features, [boxes], [self.size])))
        (masks,) = self._own_masks(logits, [labels])
        return masks  # type: ignore[no-any-return]


def check_batch(source: str, options: ExportOptions) -> None:
    """Raises a ConfigError for a dynamic batch."""
    if options.dynamic_batch:
        raise ConfigError(
            f"{source} is exported for one image at a time: its suppressions are written for each image",
            "leave --dynamic-batch out",
        )


def two_stage_source(source: str, model: Any, config: Config, columns: Sequence[int] | None = None) -> SourceModel:
    """The export of a FasterRCNN or MaskRCNN in evaluation mode; ``columns`` are those of the classes, None for all
    but the first, which is the background."""
    size = config.input.size
    reference = TwoStageModel(model, size).eval()
    detector = SourceModel(
        source, reference, config, compare_stages=compare_stages, for_dynamo=partial(_one_suppression, max(size))
    )
    if columns is None or list(columns) == list(range(1, model.roi_heads.box_predictor.cls_score.out_features)):
        return detector
    fewer = copy.deepcopy(model)
    heads = fewer.roi_heads
    heads.box_predictor = _Fewer(heads.box_predictor, list(columns))
    if heads.mask_predictor is not None:
        heads.mask_predictor.mask_fcn_logits = _rows(heads.mask_predictor.mask_fcn_logits, [0, *columns])
    traced = TwoStageModel(fewer, size).eval()
    return replace(detector, traced=traced, compare_stages=partial(compare_stages, columns=columns))


@contextlib.contextmanager
def _one_suppression(longer: int) -> Iterator[None]:
    """Makes torchvision run a single NMS with the groups moved apart; ``longer`` is the longer image side in pixels.
    Otherwise it decides by the number of boxes, which an exported graph cannot do."""
    boxes: Any = importlib.import_module("torchvision.ops.boxes")
    own = boxes.batched_nms
    boxes.batched_nms = lambda corners, scores, groups, overlap: boxes.nms(
        corners + (groups.to(corners) * (longer + 1.0))[:, None], scores, overlap
    )
    try:
        yield
    finally:
        boxes.batched_nms = own


def compare_stages(
    detector: SourceModel,
    inputs: Sequence[Float],
    outputs: Sequence[Outputs],
    tolerance: float,
    columns: Sequence[int] | None = None,
) -> ParityComparison:
    """Compares each stage of torch, run on the written model's values of the stage before, on one image each.

    Numbers must agree row by row, else a ModelError is raised. Torch selects proposals and detections from the model's
    numbers, because rounding changes the selection among nearly equal scores and so all later stages. ``columns`` are
    the columns of torch's model that the written model has; None for all.
    """
    source, model = detector.source, cast(TwoStageModel, detector.traced or detector.reference)
    numbers, proposals, detections, whole = [], [], [], []
    with torch.no_grad():
        for batch, written in zip(inputs, outputs, strict=True):
            x = torch.from_numpy(batch)
            tensors = {name: torch.from_numpy(np.array(value)) for name, value in written.items()}
            features = _feature_maps(model.backbone, x)
            objectness, deltas, counts = model.scored(features)
            logits, regression = model.classified(features, tensors["proposals"])
            expected = {"objectness": objectness, "deltas": deltas, "logits": logits, "regression": regression}
            if "masks" in written:
                expected["masks"] = model.masks(features, tensors["boxes"], tensors["labels"])
            numbers.append((_arrays(expected), {name: written[name] for name in expected}))
            boxes, scores = model.proposed(x, features, tensors["objectness"], tensors["deltas"], counts)
            ours = {"boxes": boxes, "scores": scores, "labels": torch.zeros(len(boxes), dtype=torch.int64)}
            theirs = {"boxes": written["proposals"], "scores": written["proposal_scores"]}
            theirs["labels"] = np.zeros(len(written["proposals"]), np.int64)
            proposals.append((_arrays(ours), theirs))
            selected = model.detected(tensors["logits"], tensors["regression"], tensors["proposals"])
            detections.append((_arrays(selected), written))
            whole.append((_whole(model, x, detector, columns=columns, tolerance=tolerance), written))
    checks = parity.compare_outputs(source, numbers, tolerance)
    rpn = cast(Any, model.rpn)
    rpn_nms = NmsConfig(
        score_threshold=float(rpn.score_thresh),
        iou_threshold=float(rpn.nms_thresh),
        max_detections=int(rpn.post_nms_top_n()),
    )
    texts = []
    for name, pairs, nms in (("proposals", proposals, rpn_nms), ("detections", detections, _suppression(model))):
        check = parity.compare_selection(f"{source}, {name}", pairs, nms, score=tolerance, corner=tolerance)
        texts.append(f"{check.matched} of {check.torch} {name}")
    longer = max(detector.config.input.size)
    total = parity.compare_selection(source, whole, None, score=tolerance, corner=tolerance * longer)
    note = f"each stage on the model's own values: {' and '.join(texts)} are those that torch chooses"
    if total.ties:
        note += "; scores of proposals that are nearly equal make the others differ from end to end"
    undetected = "" if total.torch else UNDETECTED
    return ParityComparison(outputs=checks, detections=total, undetected=undetected, notes=(note,))


def _whole(
    model: Any, x: Tensor, detector: SourceModel, columns: Sequence[int] | None, tolerance: float
) -> dict[str, NDArray[Any]]:
    """The detections of torchvision's own detector; columns without a class count as background."""
    reference: Any = detector.reference
    outputs = reference(x)
    if columns is not None:
        kept = list(columns)
        logits, regression = model.classified(_feature_maps(model.backbone, x), outputs["proposals"])
        offsets = outputs["regression"].unflatten(1, (-1, 4))[:, kept]
        expected = {"scores": outputs["logits"].softmax(1)[:, kept], "regression": offsets}
        fewer = {"scores": logits.softmax(1)[:, 1:], "regression": regression.unflatten(1, (-1, 4))[:, 1:]}
        parity.compare_outputs(f"{detector.source}, fewer columns", [(_arrays(expected), _arrays(fewer))], tolerance)
        silent = torch.full_like(outputs["logits"], -torch.inf)
        silent[:, kept] = outputs["logits"][:, kept]
        rest = [column for column in range(silent.shape[1]) if column not in kept]
        silent[:, 0] = outputs["logits"][:, rest].logsumexp(1)
        outputs |= reference.detected(silent, outputs["regression"], outputs["proposals"])
        labels = torch.zeros(silent.shape[1], dtype=torch.int64)
        labels[kept] = torch.arange(1, len(kept) + 1)
        outputs["labels"] = labels[outputs["labels"]]
    return _arrays(outputs)


def _arrays(tensors: dict[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


class _Fewer(nn.Module):
    """A box predictor with fewer columns: the others count as background, as the logarithm of the sum of their
    exponentials, so that the remaining probabilities stay the same."""

    def __init__(self, predictor: Any, columns: list[int]) -> None:
        super().__init__()
        rest = [column for column in range(predictor.cls_score.out_features) if column not in columns]
        self.kept = len(columns)
        self.cls_score = _rows(predictor.cls_score, [*columns, *rest])
        boxes = [4 * column + side for column in (0, *columns) for side in range(4)]
        self.bbox_pred = _rows(predictor.bbox_pred, boxes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.flatten(start_dim=1)
        logits = self.cls_score(x)
        background = logits[:, self.kept :].logsumexp(dim=1, keepdim=True)
        return torch.cat((background, logits[:, : self.kept]), dim=1), self.bbox_pred(x)


def _rows(layer: Any, rows: list[int]) -> Any:
    """A linear layer or a 1x1 convolution with some of its outputs."""
    fewer = copy.deepcopy(layer)
    fewer.weight, fewer.bias = nn.Parameter(layer.weight[rows]), nn.Parameter(layer.bias[rows])
    return fewer


def _suppression(model: Any) -> NmsConfig:
    """The thresholds of the model's own final NMS."""
    heads = model.roi_heads
    return NmsConfig(
        score_threshold=float(heads.score_thresh),
        iou_threshold=float(heads.nms_thresh),
        max_detections=int(heads.detections_per_img),
    )
