"""Which detection finds which box: COCO's matching, as pycocotools defines it.

The evaluators keep their matches to themselves or in a form of their own, and the bootstrap needs them; mAP itself is
always computed by the evaluators.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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

    Args:
        matches: at least one; a detection still matches boxes of its own class alone.
    """
    every = list(matches)
    scores = np.concatenate([of_class.scores for of_class in every])
    order = np.argsort(-scores, kind="stable")
    images = np.concatenate([of_class.images for of_class in every])[order]
    boxes = np.concatenate([of_class.boxes for of_class in every])[order]
    hits = np.concatenate([of_class.hits for of_class in every], axis=1)[:, order]
    ignored = np.concatenate([of_class.ignored for of_class in every], axis=1)[:, order]
    truths = np.sum([of_class.truths for of_class in every], axis=0)
    return ClassMatches(images, scores[order], boxes, hits, ignored, truths)


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


@dataclass
class ClassMatcher:
    """Matches one class image by image, the images given in order of their ids.

    Attributes:
        count: images in all.
    """

    count: int
    _images: list[NDArray[np.int64]] = field(default_factory=list)
    _scores: list[Floats] = field(default_factory=list)
    _boxes: list[NDArray[np.int64]] = field(default_factory=list)
    _hits: list[Flags] = field(default_factory=list)
    _ignored: list[Flags] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._truths = np.zeros(self.count, np.int64)

    def add(
        self, image: int, boxes: Floats, scores: Floats, truth: ImageTruth | None, overlaps: Floats | None = None
    ) -> None:
        """Matches the detections of one image.

        Args:
            image: its position.
            boxes: (D, 4), x y width height in pixels.
            scores: (D,).
            truth: the boxes to find; None where there are none.
            overlaps: (D, G), the IoU of their masks; None for that of the boxes.
        """
        best = np.argsort(-scores, kind="stable")[:_BEST]
        hits, ignored, found = match(boxes[best], truth, None if overlaps is None else overlaps[best])
        if truth is not None and len(truth.rows):
            found = np.where(found < 0, -1, truth.rows[found])
        if truth is not None:
            self._truths[image] = np.count_nonzero(~_ignored(truth))
        self._images.append(np.full(len(best), image))
        self._scores.append(scores[best])
        self._boxes.append(found)
        self._hits.append(hits)
        self._ignored.append(ignored)

    def matches(self) -> ClassMatches:
        """All that were given, ordered as the evaluators order them: images by id, then a stable sort by score."""
        if not self._images:
            none = np.zeros((len(IOU_THRESHOLDS), 0), bool)
            nowhere: NDArray[np.int64] = np.zeros(0, np.int64)
            return ClassMatches(nowhere, np.zeros(0), nowhere, none, none, self._truths)
        scores = np.concatenate(self._scores)
        order = np.argsort(-scores, kind="stable")
        images, boxes = (np.concatenate(values)[order] for values in (self._images, self._boxes))
        hits, ignored = (np.concatenate(flags, axis=1)[:, order] for flags in (self._hits, self._ignored))
        return ClassMatches(images, scores[order], boxes, hits, ignored, self._truths)


def match(
    boxes: Floats, truth: ImageTruth | None, overlaps: Floats | None = None
) -> tuple[Flags, Flags, NDArray[np.int64]]:
    """Matches detections of one class in one image, the best first, as pycocotools' ``evaluateImg`` does.

    Each detection takes the box of greatest IoU that is still free, among equals the last; a box that counts is
    preferred to an ignored box, and a crowd is never used up.

    Args:
        boxes: (D, 4), x y width height in pixels, in falling order of score.
        truth: the boxes to find; None where there are none.
        overlaps: (D, G), 0..1, in the place of the IoU of the boxes.

    Returns:
        (T, D), matched to a box that counts; (T, D), neither right nor wrong; (D,), the position of the box that counts
        and is matched at the lowest threshold, -1 for none.
    """
    found: NDArray[np.int64] = np.full(len(boxes), -1)
    hits: Flags = np.zeros((len(IOU_THRESHOLDS), len(boxes)), bool)
    ignored: Flags = np.zeros_like(hits)
    if truth is not None and len(truth.boxes):
        _match(iou(boxes, truth.boxes, truth.crowd) if overlaps is None else overlaps, truth, (hits, ignored), found)
    areas = boxes[:, 2] * boxes[:, 3]
    ignored |= ~hits & ((areas < 0) | (areas > _LARGEST_AREA))
    return hits, ignored, found


def _match(overlaps: Floats, truth: ImageTruth, flags: tuple[Flags, Flags], found: NDArray[np.int64]) -> None:
    hits, ignored = flags
    skipped = _ignored(truth)
    order = np.argsort(skipped, kind="stable")  # decides among equals
    skipped, crowd = skipped[order], truth.crowd[order]
    counted = np.count_nonzero(~skipped)
    overlaps = overlaps[:, order]
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


def _ignored(truth: ImageTruth) -> Flags:
    flags: Flags = truth.crowd | (truth.areas < 0) | (truth.areas > _LARGEST_AREA)
    return flags


def iou(boxes: Floats, truths: Floats, crowd: Flags) -> Floats:
    """Intersection over union in the arithmetic of pycocotools' ``bbIou``; over the detection's own area for a crowd.

    Args:
        boxes: (D, 4), x y width height.
        truths: (G, 4), likewise.
        crowd: (G,).

    Returns:
        (D, G), 0..1.
    """
    found, wanted = boxes[:, None], truths[None]
    sides = [
        np.minimum(found[..., axis + 2] + found[..., axis], wanted[..., axis + 2] + wanted[..., axis])
        - np.maximum(found[..., axis], wanted[..., axis])
        for axis in (0, 1)
    ]
    inside = (sides[0] > 0) & (sides[1] > 0)
    common = sides[0] * sides[1]
    area = found[..., 2] * found[..., 3]
    union = np.where(crowd, area, area + wanted[..., 2] * wanted[..., 3] - common)
    result: Floats = np.zeros(common.shape)
    np.divide(common, union, out=result, where=inside)
    return result
