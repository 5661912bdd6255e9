"""Two-stage detectors of torchvision: Faster R-CNN and Mask R-CNN.

Exported is the whole network with both suppressions, for one image of a fixed size. Resizing, normalisation and the
paste of masks stay outside. The outputs are ``boxes`` (n, 4), ``labels`` (n,), ``scores`` (n,) and, of Mask R-CNN,
``masks`` (n, 1, 28, 28).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trtdet.config import Config, NmsConfig
from trtdet.errors import ConfigError
from trtdet.exporter import ExportOptions, parity
from trtdet.exporter.parity import DetectionCheck, OutputCheck, Outputs
from trtdet.exporter.subject import Float, Subject

SIZES = {
    "fasterrcnn_resnet50_fpn": (800, 1344),
    "fasterrcnn_resnet50_fpn_v2": (800, 1344),
    "fasterrcnn_mobilenet_v3_large_fpn": (800, 1344),
    "fasterrcnn_mobilenet_v3_large_320_fpn": (320, 640),
    "maskrcnn_resnet50_fpn": (800, 1344),
    "maskrcnn_resnet50_fpn_v2": (800, 1344),
}
"""Height and width that each is exported at: the shorter and the longer side that an image is scaled to at most, up to
the next multiple of 32."""

_PROPOSED = ("objectness", "deltas", "proposals", "proposal_scores")
_CLASSIFIED = ("logits", "regression")


class Detector(nn.Module):
    """A detector of torchvision without its own resizing and pasting, for a batch of one image.

    It gives the detections and what each stage computed: of the first stage the ``objectness`` (a, 1) and the offsets
    of all anchors, ``deltas`` (a, 4), and the ``proposals`` (p, 4) with their ``proposal_scores`` (p,); of the second
    the ``logits`` (p, columns) and the offsets of the proposals, ``regression`` (p, 4 x columns).

    Args:
        model: FasterRCNN or MaskRCNN of torchvision.
        size: height and width of the image.
    """

    def __init__(self, model: Any, size: tuple[int, int]) -> None:
        super().__init__()
        self.backbone, self.rpn, self.roi_heads, self.size = model.backbone, model.rpn, model.roi_heads, size
        self._images = importlib.import_module("torchvision.models.detection.image_list").ImageList
        self._joined = importlib.import_module("torchvision.models.detection.rpn").concat_box_prediction_layers
        self._own_masks = importlib.import_module("torchvision.models.detection.roi_heads").maskrcnn_inference

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.features(x)
        objectness, deltas, counts = self.scored(features)
        proposals, proposal_scores = self.proposed(x, features, objectness, deltas, counts)
        logits, regression = self.classified(features, proposals)
        found = self.detected(logits, regression, proposals)
        if self.roi_heads.has_mask():
            found["masks"] = self.masks(features, found["boxes"], found["labels"])
        steps = (objectness, deltas, proposals, proposal_scores, logits, regression)
        return found | dict(zip((*_PROPOSED, *_CLASSIFIED), steps, strict=True))

    def features(self, x: Tensor) -> dict[str, Tensor]:
        features = self.backbone(x)
        return {"0": features} if isinstance(features, Tensor) else features

    def scored(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[int]]:
        """Objectness (a, 1) and offsets (a, 4) of all anchors, and how many of them each level has."""
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
        result: Tensor = masks
        return result


def is_one(model: nn.Module) -> bool:
    """Whether a module is a detector of two stages that can be exported by its stages."""
    kinds = sys.modules.get("torchvision.models.detection.faster_rcnn")
    heads = getattr(model, "roi_heads", None)
    known = kinds is not None and isinstance(model, kinds.FasterRCNN)
    return known and not (heads is not None and heads.has_keypoint())


def one_at_a_time(source: str, options: ExportOptions) -> None:
    """Checks that a batch of one is asked for.

    Raises:
        ConfigError: an open batch is.
    """
    if options.dynamic_batch:
        raise ConfigError(
            f"{source} is exported for one image at a time: its suppressions are written for each image",
            "leave --dynamic-batch out",
        )


def subject(source: str, model: Any, config: Config, columns: Sequence[int] | None = None) -> Subject:
    """A detector as it is exported.

    Args:
        source: as the user named it.
        model: FasterRCNN or MaskRCNN of torchvision, in evaluation mode.
        config: of the input.
        columns: that are classes, in their order; None for all but the first, which is the background.
    """
    size = config.input.size
    reference = Detector(model, size).eval()
    given = Subject(source, reference, config, stages=_TwoStages(), for_dynamo=partial(_one_suppression, max(size)))
    if columns is None or list(columns) == list(range(1, model.roi_heads.box_predictor.cls_score.out_features)):
        return given
    fewer = with_columns(copy.deepcopy(model), list(columns))
    return replace(given, traced=Detector(fewer, size).eval(), stages=_TwoStages(tuple(columns)))


@contextlib.contextmanager
def _one_suppression(longer: int) -> Iterator[None]:
    """torchvision suppresses boxes of all groups at once, each moved away from the others, unless there are none or
    many; no exported graph decides on that.

    Args:
        longer: side of the image, in pixels.
    """
    boxes: Any = importlib.import_module("torchvision.ops.boxes")
    own = boxes.batched_nms
    boxes.batched_nms = lambda corners, scores, groups, overlap: boxes.nms(
        corners + (groups.to(corners) * (longer + 1.0))[:, None], scores, overlap
    )
    try:
        yield
    finally:
        boxes.batched_nms = own


@dataclass(frozen=True)
class _TwoStages:
    """Holds each stage to the values that the written model's stage before it gave.

    Numbers must be near, row by row. What is chosen by scores, proposals and detections, torch chooses again from the
    numbers of the model, so that rounding before it plays no part.

    Attributes:
        columns: of torch's that the exported model has; None for all.
    """

    columns: tuple[int, ...] | None = None
    hidden: tuple[str, ...] = (*_PROPOSED, *_CLASSIFIED)

    def compared(
        self, subject: Subject, tried: Sequence[Float], found: Sequence[Outputs], tolerance: float
    ) -> tuple[tuple[OutputCheck, ...], DetectionCheck, tuple[str, ...]]:
        reference: Any = subject.reference
        model: Any = subject.traced or subject.reference
        with torch.no_grad():
            steps = [_steps(model, torch.from_numpy(x), got) for x, got in zip(tried, found, strict=True)]
            whole = [self._whole(reference, model, torch.from_numpy(x), subject.source, tolerance) for x in tried]
        numbers = parity.compare_outputs(subject.source, [(step.numbers, step.given) for step in steps], tolerance)
        chosen = [
            parity.compare_selection(subject.source, name, pairs, nms, tolerance)
            for name, pairs, nms in (
                ("proposals", [step.proposals for step in steps], _of_proposals(model)),
                ("detections", [step.detections for step in steps], suppression(model)),
            )
        ]
        longer = tolerance * max(subject.config.input.size)
        total = parity.count_found(list(zip(whole, found, strict=True)), tolerance, longer)
        texts = [f"{check.matched} of {check.torch} {name}" for check, name in zip(chosen, _CHOSEN, strict=True)]
        said = f"each stage on the model's own values: {' and '.join(texts)} are those that torch chooses"
        if total.ties:
            said += "; scores of proposals that are nearly equal make the others differ from end to end"
        return numbers, total, (said,)

    def _whole(self, reference: Any, model: Any, x: Tensor, source: str, tolerance: float) -> dict[str, NDArray[Any]]:
        """What torchvision's own detector finds; columns that are no class count as background."""
        found = reference(x)
        columns = self.columns
        if columns is not None:
            kept = list(columns)
            logits, regression = model.classified(model.features(x), found["proposals"])
            offsets = found["regression"].unflatten(1, (-1, 4))[:, kept]
            wanted = {"scores": found["logits"].softmax(1)[:, kept], "regression": offsets}
            given = {"scores": logits.softmax(1)[:, 1:], "regression": regression.unflatten(1, (-1, 4))[:, 1:]}
            parity.compare_outputs(f"{source}, fewer columns", [(_arrays(wanted), _arrays(given))], tolerance)
            silent = torch.full_like(found["logits"], -torch.inf)
            silent[:, kept] = found["logits"][:, kept]
            rest = [column for column in range(silent.shape[1]) if column not in kept]
            silent[:, 0] = found["logits"][:, rest].logsumexp(1)
            found |= reference.detected(silent, found["regression"], found["proposals"])
            labels = torch.zeros(silent.shape[1], dtype=torch.int64)
            labels[kept] = torch.arange(1, len(kept) + 1)
            found["labels"] = labels[found["labels"]]
        return _arrays(found)


_CHOSEN = ("proposals", "detections")


@dataclass(frozen=True)
class _Steps:
    """Of one image: numbers of torch and of the model, and what each chooses."""

    numbers: Outputs
    given: Outputs
    proposals: tuple[Outputs, Outputs]
    detections: tuple[Outputs, Outputs]


def _steps(model: Detector, x: Tensor, found: Outputs) -> _Steps:
    given = {name: torch.from_numpy(np.array(value)) for name, value in found.items()}
    features = model.features(x)
    objectness, deltas, counts = model.scored(features)
    boxes, scores = model.proposed(x, features, given["objectness"], given["deltas"], counts)
    logits, regression = model.classified(features, given["proposals"])
    detections = model.detected(given["logits"], given["regression"], given["proposals"])
    numbers = {"objectness": objectness, "deltas": deltas, "logits": logits, "regression": regression}
    if "masks" in found:
        numbers["masks"] = model.masks(features, given["boxes"], given["labels"])
    proposals = {"boxes": boxes, "scores": scores, "labels": torch.zeros(len(boxes), dtype=torch.int64)}
    others = {"boxes": found["proposals"], "scores": found["proposal_scores"]}
    others["labels"] = np.zeros(len(found["proposals"]), np.int64)
    return _Steps(
        _arrays(numbers),
        {name: found[name] for name in numbers},
        (_arrays(proposals), others),
        (_arrays(detections), found),
    )


def _arrays(tensors: dict[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


class _Fewer(nn.Module):
    """A predictor of boxes with fewer columns: those that are left out count as background.

    The logarithm of the sum of their exponentials takes their place, so that the probabilities of the others stay the
    same.
    """

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


def with_columns(model: Any, columns: list[int]) -> Any:
    """A model with the classes of some of its columns, in their order, changed in place; column 0 is the background."""
    heads = model.roi_heads
    heads.box_predictor = _Fewer(heads.box_predictor, columns)
    if heads.mask_predictor is not None:
        heads.mask_predictor.mask_fcn_logits = _rows(heads.mask_predictor.mask_fcn_logits, [0, *columns])
    return model


def _rows(layer: Any, rows: list[int]) -> Any:
    """A linear layer or a convolution of 1 x 1 with some of its outputs."""
    if isinstance(layer, nn.Linear):
        made: Any = nn.Linear(layer.in_features, len(rows))
    else:
        made = nn.Conv2d(layer.in_channels, len(rows), 1)
    with torch.no_grad():
        made.weight.copy_(layer.weight[rows])
        made.bias.copy_(layer.bias[rows])
    return made.eval()


def suppression(model: Any) -> NmsConfig:
    """The thresholds of the model's own suppression of detections."""
    heads = model.roi_heads
    return NmsConfig(
        score_threshold=float(heads.score_thresh),
        iou_threshold=float(heads.nms_thresh),
        max_detections=int(heads.detections_per_img),
    )


def _of_proposals(model: Any) -> NmsConfig:
    rpn = model.rpn
    return NmsConfig(
        score_threshold=float(rpn.score_thresh),
        iou_threshold=float(rpn.nms_thresh),
        max_detections=int(rpn.post_nms_top_n()),
    )
