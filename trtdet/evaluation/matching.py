"""Which detection finds which box: COCO's matching, as pycocotools defines it.

The evaluators keep their matches to themselves or in a form of their own, and the bootstrap needs them; mAP itself is
always computed by the evaluators.
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
"""COCO's, to the bit."""

_BEST = 100
"""So many detections of a class and image count."""

_LARGEST_AREA = 1e5**2
"""In square pixels; boxes above it, or below 0, are neither right nor wrong."""


@dataclass(frozen=True, eq=False)
class ClassMatches:
    """The matches of one class: N detections in I images, at T IoU thresholds.

    The thresholds are COCO's, 0.50:0.05:0.95; boxes of every area count, and of each image the 100 best detections.
    """

    images: NDArray[np.int64]
    """(N,), the position of each detection's image among the I images in order of id. The detections are in falling
    order of score, equal scores in the order of the images."""
    scores: Floats
    """(N,)."""
    boxes: NDArray[np.int64]
    """(N,), the row in the ground truth of the box that each found at the lowest threshold; -1 for none."""
    hits: Flags
    """(T, N), matched to a box."""
    ignored: Flags
    """(T, N), neither right nor wrong, such as a detection on a crowd."""
    truths: NDArray[np.int64]
    """(I,), how many boxes each image has to find."""


def pooled(matches: Iterable[ClassMatches]) -> ClassMatches:
    """The matches of several classes of the same images as those of one: in falling order of score over all of them.

    There is at least one class; a detection still matches boxes of its own class alone.
    """
    every = list(matches)
    parts = [(part.images, part.scores, part.boxes, part.hits, part.ignored) for part in every]
    return _ordered(parts, np.sum([part.truths for part in every], axis=0))


def _ordered(parts: Iterable[tuple[NDArray[Any], ...]], truths: NDArray[np.int64]) -> ClassMatches:
    """Parts of (images, scores, boxes, hits, ignored) as one, in falling order of score, equal scores as they come."""
    columns = [np.concatenate(values, axis=-1) for values in zip(*parts, strict=True)]
    order = np.argsort(-columns[1], kind="stable")
    images, scores, boxes, hits, ignored = (column[..., order] for column in columns)
    return ClassMatches(images=images, scores=scores, boxes=boxes, hits=hits, ignored=ignored, truths=truths)


@dataclass(frozen=True, eq=False)
class ImageTruth:
    """The annotated boxes of one class in one image, G of them."""

    boxes: Floats
    """(G, 4), x y width height in pixels."""
    areas: Floats
    """(G,), as annotated, in square pixels."""
    crowd: Flags
    """(G,), a group of objects: any number of detections on it are neither right nor wrong."""
    rows: NDArray[np.int64]
    """(G,), where each box stands in the ground truth of all images."""

    @property
    def ignored(self) -> Flags:
        """(G,), neither to be found nor wrong to be found."""
        flags: Flags = self.crowd | (self.areas < 0) | (self.areas > _LARGEST_AREA)
        return flags


class ClassMatcher:
    """Matches one class image by image, the images given in order of their ids.

    Args:
        count: images in all.
    """

    def __init__(self, count: int) -> None:
        nowhere, none = np.zeros(0, np.int64), np.zeros((len(IOU_THRESHOLDS), 0), bool)
        self._parts: list[tuple[NDArray[Any], ...]] = [(nowhere, np.zeros(0), nowhere, none, none)]
        self._truths = np.zeros(count, np.int64)

    def add(
        self, image: int, boxes: Floats, scores: Floats, truth: ImageTruth | None, overlaps: Floats | None = None
    ) -> None:
        """Matches the detections of the image at this position, scores (D,); the rest as of :func:`match`."""
        best = np.argsort(-scores, kind="stable")[:_BEST]
        hits, ignored, rows = match(boxes[best], truth, None if overlaps is None else overlaps[best])
        if truth is not None and len(truth.rows):
            rows = np.where(rows < 0, -1, truth.rows[rows])
            self._truths[image] = np.count_nonzero(~truth.ignored)
        self._parts.append((np.full(len(best), image), scores[best], rows, hits, ignored))

    def matches(self) -> ClassMatches:
        """All that were given, ordered as the evaluators order them: images by id, then a stable sort by score."""
        return _ordered(self._parts, self._truths)


def match(
    boxes: Floats, truth: ImageTruth | None, overlaps: Floats | None = None
) -> tuple[Flags, Flags, NDArray[np.int64]]:
    """Matches detections of one class in one image, the best first, as pycocotools' ``evaluateImg`` does.

    Each detection takes the box of greatest IoU that is still free, among equals the last; a box that counts is
    preferred to an ignored box, and a crowd is never used up.

    Args:
        boxes: (D, 4), x y width height in pixels, in falling order of score.
        truth: the boxes to find; None where there are none.
        overlaps: (D, G), the IoU of masks, 0..1; None for that of the boxes.

    Returns:
        (T, D), matched to a box that counts; (T, D), neither right nor wrong; (D,), the position of the box that counts
        and is matched at the lowest threshold, -1 for none.
    """
    found: NDArray[np.int64] = np.full(len(boxes), -1)
    hits: Flags = np.zeros((len(IOU_THRESHOLDS), len(boxes)), bool)
    ignored: Flags = np.zeros_like(hits)
    if truth is not None and len(truth.boxes):
        order = np.argsort(truth.ignored, kind="stable")  # decides among equals
        skipped, crowd = truth.ignored[order], truth.crowd[order]
        counted = np.count_nonzero(~skipped)
        overlaps = (iou(boxes, truth.boxes, truth.crowd) if overlaps is None else overlaps)[:, order]
        thresholds = np.minimum(IOU_THRESHOLDS, 1 - 1e-10)[:, None]
        taken = np.zeros((len(thresholds), len(crowd)), bool)
        rows = np.arange(len(thresholds))
        for detection in np.flatnonzero(overlaps.max(axis=1) >= thresholds[0]):
            free = (overlaps[detection] >= thresholds) & ~(taken & ~crowd)
            free[free[:, :counted].any(axis=1), counted:] = False
            values = np.where(free, overlaps[detection], -1.0)
            last = values.shape[1] - 1 - values[:, ::-1].argmax(axis=1)
            matched = free[rows, last]
            taken[rows[matched], last[matched]] = True
            hits[:, detection] = matched & ~skipped[last]
            ignored[:, detection] = matched & skipped[last]
            found[detection] = order[last[0]] if hits[0, detection] else -1
    areas = boxes[:, 2] * boxes[:, 3]
    ignored |= ~hits & ((areas < 0) | (areas > _LARGEST_AREA))
    return hits, ignored, found


def iou(boxes: Floats, truths: Floats, crowd: Flags) -> Floats:
    """Intersection over union in the arithmetic of pycocotools' ``bbIou``; over the detection's own area for a crowd.

    Boxes (D, 4) and truths (G, 4) are x y width height; with crowd (G,) they give (D, G), 0..1.
    """
    corner, size, other_corner, other_size = (
        boxes[:, None, :2],
        boxes[:, None, 2:],
        truths[None, :, :2],
        truths[None, :, 2:],
    )
    sides = np.minimum(size + corner, other_size + other_corner) - np.maximum(corner, other_corner)
    common, area = sides.prod(axis=-1), size.prod(axis=-1)
    union = np.where(crowd, area, area + other_size.prod(axis=-1) - common)
    result: Floats = np.divide(common, union, out=np.zeros_like(common), where=(sides > 0).all(axis=-1))
    return result


def xywh(boxes: Floats) -> Floats:
    """Boxes (N, 4), x1 y1 x2 y2, as x y width height."""
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
