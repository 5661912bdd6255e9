"""Scores of masks, keypoints and rotated boxes: how similar two of a kind are, and what is reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from trtdet.detection.rotated import corners, polygon_iou, probabilistic_iou
from trtdet.evaluation.matching import IOU_THRESHOLDS, Floats

Of = Literal["boxes", "masks", "keypoints", "rotated_boxes"]
"""What a score is of."""

NAMES: dict[Of, str] = {
    "boxes": "mAP",
    "masks": "mask mAP",
    "keypoints": "keypoint mAP",
    "rotated_boxes": "rotated mAP",
}
"""How messages call the mean average precision of each."""

BEST_OF_KEYPOINTS = 20
"""Only this many detections of a class and image count for keypoints, as in COCO."""

_ELEVEN = np.arange(0.0, 1.1, 0.1)
"""The recall points of PASCAL VOC 2007, to the bit of DOTA's evaluation."""


@dataclass(frozen=True, eq=False)
class FoundParts:
    """What was detected beside the N boxes of an image, in pixels of the picture; None for detectors without."""

    masks: Sequence[dict[str, Any]] | None = None
    """Run lengths of each mask, see :func:`trtdet.detection.masks.run_lengths`."""
    keypoints: NDArray[np.float32] | None = None
    """(N, P, 3): x, y and score."""
    rotated_boxes: NDArray[np.float32] | None = None
    """(N, 5), see :mod:`trtdet.detection.rotated`."""

    def has(self, part: Of) -> bool:
        return part == "boxes" or getattr(self, part) is not None

    def of(self, rows: NDArray[Any]) -> FoundParts:
        """The parts of some of the detections."""
        masks, indices = self.masks, np.arange(len(rows))[rows] if rows.dtype == bool else rows
        return FoundParts(
            masks=None if masks is None else [masks[row] for row in indices],
            keypoints=None if self.keypoints is None else self.keypoints[indices],
            rotated_boxes=None if self.rotated_boxes is None else self.rotated_boxes[indices],
        )


@dataclass(frozen=True)
class Figures:
    """Figures of an evaluation, 0..1; -1 where there is none."""

    def __str__(self) -> str:
        shown = [field.name for field in fields(self) if field.name not in ("images", "detections", "per_class")]
        return "\n".join(f" {name:<10} = {getattr(self, name):0.3f}" for name in shown)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a score of -1 becomes None."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return None if value < 0 else value


@dataclass(frozen=True)
class KeypointResult(Figures):
    """COCO's scores of keypoints by object keypoint similarity (OKS), 0..1; -1 without objects of that size or class.

    As in COCO, only the 20 best detections of an image and class count, and objects without an annotated keypoint need
    not be found.
    """

    map: float
    """Mean AP over OKS 0.50:0.05:0.95 and the classes."""
    map50: float
    map75: float
    map_medium: float
    map_large: float
    ar: float
    ar50: float
    ar75: float
    ar_medium: float
    ar_large: float
    images: int
    detections: int
    per_class: Mapping[str, float]


@dataclass(frozen=True)
class RotatedResult(Figures):
    """Scores of rotated boxes, 0..1; -1 without objects.

    ``map``, ``map50`` and ``map75`` are COCO's average precision (101 recall points, COCO's matching) with the IoU of
    the rotated rectangles' areas. ``dota50`` is the score of DOTA's evaluation, task 1 (Xia et al. 2018,
    arXiv:1711.10398): PASCAL VOC 2007's average precision over 11 recall points at an IoU above 0.5, where each
    detection may only match the box that it overlaps most; crowds are its difficult objects. ``ultralytics`` is what
    Ultralytics' validator calls mAP50-95, by the probabilistic IoU; crowds are left out.
    """

    map: float
    map50: float
    map75: float
    dota50: float
    ultralytics: float
    images: int
    detections: int
    per_class: Mapping[str, float]


def keypoint_similarity(
    found: NDArray[Any], truth: NDArray[Any], boxes: NDArray[Any], areas: NDArray[Any], sigmas: Sequence[float]
) -> Floats:
    """Object keypoint similarity (D, G), 0..1, as pycocotools' ``computeOks`` defines it.

    Args:
        found: (D, P, 3), x, y and score, which has no influence.
        truth: (G, P, 3), x, y and visibility; above 0 if annotated.
        boxes: (G, 4), x y width height. Without annotated keypoints the distance is that to this box grown to three
            times its size.
        areas: (G,), in square pixels.
        sigmas: (P,), tolerances.
    """
    mine, other = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    difference = mine[:, None, :, :2] - other[None, :, :, :2]
    size = boxes[:, None, 2:]
    low, high = boxes[:, None, :2] - size, boxes[:, None, :2] + 2 * size
    place = mine[:, None, :, :2]
    outside = np.maximum(low[None] - place, 0) + np.maximum(place - high[None], 0)
    seen: NDArray[np.bool_] = np.asarray(other[:, :, 2] > 0)
    some: NDArray[np.bool_] = np.asarray(seen.any(axis=1))
    squares = np.where(some[None, :, None, None], difference, outside) ** 2
    variances = (2 * np.asarray(sigmas, np.float64)) ** 2
    errors = squares.sum(axis=-1) / variances / (np.asarray(areas, np.float64)[:, None] + np.spacing(1)) / 2
    counted = np.where(some[:, None], seen, True)
    return np.asarray((np.exp(-errors) * counted).sum(axis=-1) / counted.sum(axis=-1), np.float64)


def probabilistic_overlaps(found: NDArray[Any], truth: NDArray[Any]) -> Floats:
    """Probabilistic IoU (D, G), 0..1, of rotated boxes (D, 5) and annotated corners (G, 4, 2), of which the smallest
    rectangle counts, as in Ultralytics."""
    rectangles = [cv2.minAreaRect(points) for points in np.asarray(truth, np.float32).reshape(-1, 4, 2)]
    boxes = np.array([(*centre, *sides, np.deg2rad(angle)) for centre, sides, angle in rectangles], np.float32)
    mine = np.asarray(found, np.float32).reshape(-1, 1, 5)
    return probabilistic_iou(mine, boxes.reshape(1, -1, 5)).astype(np.float64)


def rotated_overlaps(found: NDArray[Any], truth: NDArray[Any], crowd: NDArray[np.bool_]) -> Floats:
    """IoU (D, G), 0..1, of rotated boxes (D, 5) and annotated corners (G, 4, 2); for a crowd, the intersection over the
    detection's own area."""
    return polygon_iou(corners(np.asarray(found, np.float64)), truth, crowd)


class ImageOverlaps(NamedTuple):
    """Detections and objects of one class in one image."""

    scores: Floats
    """(D,)"""
    overlaps: Floats
    """(D, G), IoU 0..1."""
    difficult: NDArray[np.bool_]
    """(G,), objects that need not be found; matching one is neither right nor wrong."""


def dota_average_precision(images: Sequence[ImageOverlaps]) -> float:
    """Average precision of one class as DOTA's evaluation defines it, 0..1; -1 without objects to find.

    All detections are taken by falling score, those of equal score in the order of the images. Each belongs to the
    object that it overlaps most; it is right if the IoU exceeds 0.5 and no better detection belongs to that
    object.
    """
    total = sum(int(np.count_nonzero(~image.difficult)) for image in images)
    if not total:
        return -1.0
    places = [(number, row) for number, image in enumerate(images) for row in range(len(image.scores))]
    scores = np.array([images[number].scores[row] for number, row in places])
    used = [np.zeros(len(image.difficult), bool) for image in images]
    right, wrong = np.zeros(len(places)), np.zeros(len(places))
    for rank, index in enumerate(np.argsort(-scores, kind="stable")):
        image, row = places[index]
        overlaps, difficult = images[image].overlaps[row], images[image].difficult
        best = int(overlaps.argmax()) if len(overlaps) else -1
        if best < 0 or overlaps[best] <= 0.5:
            wrong[rank] = 1
        elif not difficult[best]:
            (wrong if used[image][best] else right)[rank] = 1
            used[image][best] = True
    hits = np.cumsum(right)
    recall = hits / total
    precision = hits / np.maximum(hits + np.cumsum(wrong), np.finfo(np.float64).eps)
    return float(np.mean([precision[recall >= point].max(initial=0.0) for point in _ELEVEN]))


def ultralytics_average_precision(images: Sequence[ImageOverlaps]) -> float:
    """Average precision of one class over IoU 0.50:0.05:0.95 as Ultralytics' validator defines it, 0..1; -1 without
    objects to find.

    By falling score a detection takes the free object of its image that it overlaps most, if the IoU reaches the
    threshold. The area under the envelope of precision is that of a polyline through 101 points of recall (Ultralytics
    8.4, ``match_predictions`` in ultralytics/engine/validator.py, ``compute_ap`` in ultralytics/utils/metrics.py).
    Difficult objects are left out.
    """
    kept = [image._replace(overlaps=image.overlaps[:, ~image.difficult]) for image in images]
    total = sum(image.overlaps.shape[1] for image in kept)
    if not total:
        return -1.0
    right = np.concatenate([_taken(image) for image in kept])
    hits = np.cumsum(right[np.argsort(-np.concatenate([image.scores for image in kept]), kind="stable")], axis=0)
    precision = hits / np.arange(1, len(hits) + 1)[:, None]
    points = np.linspace(0, 1, 101)
    areas = []
    for column in range(len(IOU_THRESHOLDS)) if len(hits) else ():
        recall = np.concatenate([[0.0], hits[:, column] / (total + 1e-16)])
        recall = np.concatenate([recall, [recall[-1], 1.0]])
        envelope = np.concatenate([[1.0], precision[:, column], [0.0, 0.0]])[::-1]
        heights = np.interp(points, recall, np.maximum.accumulate(envelope)[::-1])
        areas.append(float(((heights[1:] + heights[:-1]) / 2 * np.diff(points)).sum()))
    return float(np.mean(areas)) if areas else 0.0


def _taken(image: ImageOverlaps) -> NDArray[np.bool_]:
    """Whether each detection is right at each threshold, bool (D, 10)."""
    right = np.zeros((len(image.scores), len(IOU_THRESHOLDS)), bool)
    if not image.overlaps.shape[1]:
        return right
    used = np.zeros((image.overlaps.shape[1], len(IOU_THRESHOLDS)), bool)
    for row in np.argsort(-image.scores, kind="stable"):
        free = np.where(used, 0.0, image.overlaps[row][:, None])
        best = free.argmax(axis=0)
        right[row] = free.max(axis=0) >= IOU_THRESHOLDS
        used[best, range(len(IOU_THRESHOLDS))] |= right[row]
    return right
