"""COCO's matching of detections and boxes, as pycocotools defines it.

The bootstrap uses these matches, because the evaluators do not return theirs in a common form. The evaluators compute
mAP itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

IOU_THRESHOLDS: Floats = np.linspace(0.5, 0.95, 10)
"""COCO's IoU thresholds, to the bit; Ultralytics' validator has the same."""

_BEST = 100
"""Only this many detections of a class and image count."""

_LARGEST_AREA = 1e5**2
"""In square pixels; boxes with a larger or a negative area are neither right nor wrong."""


@dataclass(frozen=True, eq=False)
class ClassMatches:
    """Matches of one class: N detections in I images, at COCO's T IoU thresholds, 0.50:0.05:0.95.

    Boxes of every area count, and the 100 best detections of each image. Detections are in descending order of score,
    equal scores in the order of the images.
    """

    images: NDArray[np.int64]
    """(N,), position of each detection's image among the I images in order of id."""
    scores: Floats  # (N,)
    boxes: NDArray[np.int64]
    """(N,), row in the ground truth of the box matched at the lowest threshold; -1 for none."""
    hits: Flags
    """(T, N), matched to a box."""
    ignored: Flags
    """(T, N), neither right nor wrong, such as a detection on a crowd."""
    truths: NDArray[np.int64]
    """(I,), number of boxes to find in each image."""


def pooled(matches: Iterable[ClassMatches]) -> ClassMatches:
    """Joins the matches of at least one class on the same images into one, in descending order of score."""
    every = list(matches)
    parts = [(part.images, part.scores, part.boxes, part.hits, part.ignored) for part in every]
    return _ordered(parts, np.sum([part.truths for part in every], axis=0))


def _ordered(parts: Iterable[tuple[NDArray[Any], ...]], truths: NDArray[np.int64]) -> ClassMatches:
    """Joins parts of (images, scores, boxes, hits, ignored), stably sorted by descending score."""
    columns = [np.concatenate(values, axis=-1) for values in zip(*parts, strict=True)]
    order = np.argsort(-columns[1], kind="stable")
    images, scores, boxes, hits, ignored = (column[..., order] for column in columns)
    return ClassMatches(images=images, scores=scores, boxes=boxes, hits=hits, ignored=ignored, truths=truths)


@dataclass(frozen=True, eq=False)
class ImageTruth:
    """The G annotated boxes of one class in one image."""

    boxes: Floats
    """(G, 4), x y width height in pixels."""
    areas: Floats
    """(G,), as annotated, in square pixels."""
    crowd: Flags
    """(G,), a group of objects: any number of detections on it are neither right nor wrong."""
    rows: NDArray[np.int64]
    """(G,), row of each box in the ground truth of all images."""
    unseen: Flags | None = None
    """(G,), objects without an annotated keypoint, which need not be found."""

    @property
    def ignored(self) -> Flags:
        """(G,), boxes that need not be found; detections that match them are neither right nor wrong."""
        flags: Flags = self.crowd | (self.areas < 0) | (self.areas > _LARGEST_AREA)
        return flags if self.unseen is None else flags | self.unseen


class ClassMatcher:
    """Matches one class image by image, in order of the ids of the ``count`` images; of an image, the ``best``
    detections count."""

    def __init__(self, count: int, best: int = _BEST) -> None:
        self._best = best  # only this many detections of an image count
        nowhere, none = np.zeros(0, np.int64), np.zeros((len(IOU_THRESHOLDS), 0), bool)
        self._parts: list[tuple[NDArray[Any], ...]] = [(nowhere, np.zeros(0), nowhere, none, none)]
        self._truths = np.zeros(count, np.int64)

    def add(
        self, image: int, boxes: Floats, scores: Floats, truth: ImageTruth | None, overlaps: Floats | None = None
    ) -> None:
        """Matches the detections, in any order, of the image at this position; scores are (D,), the rest as in
        :func:`match`."""
        best = np.argsort(-scores, kind="stable")[: self._best]
        hits, ignored, rows = match(boxes[best], truth, None if overlaps is None else overlaps[best])
        if truth is not None and len(truth.rows):
            rows = np.where(rows < 0, -1, truth.rows[rows])
            self._truths[image] = np.count_nonzero(~truth.ignored)
        self._parts.append((np.full(len(best), image), scores[best], rows, hits, ignored))

    def matches(self) -> ClassMatches:
        """The matches of all images, in the evaluators' order: images by id, then a stable sort by score."""
        return _ordered(self._parts, self._truths)


def match(
    boxes: Floats, truth: ImageTruth | None, overlaps: Floats | None = None
) -> tuple[Flags, Flags, NDArray[np.int64]]:
    """Matches detections of one class in one image, the best first, as pycocotools' ``evaluateImg`` does.

    Each detection takes the free box of greatest IoU, the last among equals. It prefers boxes that count to ignored
    boxes. A crowd can match any number of detections.

    ``boxes`` are (D, 4), x y width height in pixels, in descending order of score; ``truth`` is None if the image has
    none; ``overlaps`` (D, G) are the IoU of masks, 0..1, and None computes that of the boxes. Returns (T, D), matched
    to a box that counts; (T, D), neither right nor wrong; (D,), position of the box that counts and is matched at the
    lowest threshold, -1 for none.
    """
    positions: NDArray[np.int64] = np.full(len(boxes), -1)
    hits: Flags = np.zeros((len(IOU_THRESHOLDS), len(boxes)), bool)
    ignored: Flags = np.zeros_like(hits)
    if truth is not None and len(truth.boxes):
        order = np.argsort(truth.ignored, kind="stable")  # decides among equals
        skipped, crowd = truth.ignored[order], truth.crowd[order]
        counted = np.count_nonzero(~skipped)
        overlaps = (iou(boxes, truth.boxes, truth.crowd) if overlaps is None else overlaps)[:, order]
        thresholds = np.minimum(IOU_THRESHOLDS, 1 - 1e-10)[:, None]
        used = np.zeros((len(thresholds), len(crowd)), bool)
        rows = np.arange(len(thresholds))
        for detection in np.flatnonzero(overlaps.max(axis=1) >= thresholds[0]):
            free = (overlaps[detection] >= thresholds) & ~(used & ~crowd)
            free[free[:, :counted].any(axis=1), counted:] = False
            values = np.where(free, overlaps[detection], -1.0)
            last = values.shape[1] - 1 - values[:, ::-1].argmax(axis=1)
            matched = free[rows, last]
            used[rows[matched], last[matched]] = True
            hits[:, detection] = matched & ~skipped[last]
            ignored[:, detection] = matched & skipped[last]
            positions[detection] = order[last[0]] if hits[0, detection] else -1
    areas = boxes[:, 2] * boxes[:, 3]
    ignored |= ~hits & ((areas < 0) | (areas > _LARGEST_AREA))
    return hits, ignored, positions


def iou(boxes: Floats, truths: Floats, crowd: Flags) -> Floats:
    """IoU, (D, G), 0..1, of boxes (D, 4) and truths (G, 4), x y width height, computed as pycocotools' ``bbIou`` does.

    For a crowd, (G,), it is the intersection over the detection's own area.
    """
    corner, size = boxes[:, None, :2], boxes[:, None, 2:]
    other_corner, other_size = truths[None, :, :2], truths[None, :, 2:]
    sides = np.minimum(size + corner, other_size + other_corner) - np.maximum(corner, other_corner)
    common, area = sides.prod(axis=-1), size.prod(axis=-1)
    union = np.where(crowd, area, area + other_size.prod(axis=-1) - common)
    result: Floats = np.divide(common, union, out=np.zeros_like(common), where=(sides > 0).all(axis=-1))
    return result


def xywh(boxes: Floats) -> Floats:
    """Converts boxes (N, 4) from x1 y1 x2 y2 to x y width height."""
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
