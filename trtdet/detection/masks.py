"""Masks of detections: small in the network, pasted into the picture outside it.

A mask gives the probabilities of the detection's class on a grid of M x M cells over its box (Mask R-CNN, He et al.
2017, arXiv:1703.06870). :func:`paste` works like ``paste_masks_in_image`` of torchvision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from trtdet.detection.parts import Float

THRESHOLD = 0.5
"""Probability above which a pixel belongs to the object."""

_BORDER = 1  # cells of probability 0 around a mask, so that it ends inside its box


def paste(probabilities: Float, box: Float, height: int, width: int, threshold: float = THRESHOLD) -> NDArray[np.bool_]:
    """The mask of one detection, bool (height, width) of the picture.

    The grid gets a border of one cell, and the box grows with it around its centre. Box corners are cut to whole
    pixels; the last pixel belongs to the box. The grid is resized to that box, bilinear between cell centres.

    Args:
        probabilities: float32 (M, M), 0..1.
        box: float32 (4,), x1 y1 x2 y2 in pixels of the picture, clipped to it; a box that is not finite has no mask.
        threshold: probability that pixels of the object exceed.
    """
    pasted = np.zeros((height, width), bool)
    if not np.isfinite(box).all():
        return pasted
    cells, corners = np.pad(np.asarray(probabilities, np.float32), _BORDER), np.asarray(box, np.float32)
    half = (corners[2:] - corners[:2]) * np.float32(0.5) * np.float32(len(cells) / len(probabilities))
    centre = (corners[2:] + corners[:2]) * np.float32(0.5)
    x1, y1, x2, y2 = (int(value) for value in (*(centre - half), *(centre + half)))
    wide, high = max(x2 - x1 + 1, 1), max(y2 - y1 + 1, 1)
    left, top, right, bottom = max(x1, 0), max(y1, 0), min(x2 + 1, width), min(y2 + 1, height)
    if left < right and top < bottom:
        resized = cv2.resize(cells, (wide, high), interpolation=cv2.INTER_LINEAR)
        pasted[top:bottom, left:right] = resized[top - y1 : bottom - y1, left - x1 : right - x1] > threshold
    return pasted


def run_lengths(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """A mask bool (height, width) in COCO's compressed form, ``{"size": [height, width], "counts": text}``."""
    from faster_coco_eval.core import mask as coco  # the import takes most of a second

    encoded = coco.encode(np.asfortranarray(mask, np.uint8))
    return {"size": [int(size) for size in encoded["size"]], "counts": encoded["counts"].decode()}


def areas(encoded: Sequence[dict[str, Any]]) -> list[float]:
    """Pixels of each mask of :func:`run_lengths`."""
    from faster_coco_eval.core import mask as coco

    return [float(area) for area in coco.area([_in_bytes(mask) for mask in encoded])] if encoded else []


def overlaps(
    detected: Sequence[dict[str, Any]], annotated: Sequence[Any], crowd: Sequence[bool], height: int, width: int
) -> NDArray[np.float64]:
    """IoU of masks (D, G), 0..1; for a crowd, the intersection over the detection's own area.

    ``detected`` are D masks of :func:`run_lengths`. ``annotated`` are G segmentations of COCO's files, polygons or run
    lengths; ``crowd`` tells which of them are groups of objects. ``height`` and ``width`` are the picture's.
    """
    from faster_coco_eval.core import mask as coco

    if not detected or not annotated:
        return np.zeros((len(detected), len(annotated)))

    def encoded(segmentation: Any) -> Any:
        if isinstance(segmentation, list):
            return coco.merge(coco.frPyObjects(segmentation, height, width))
        if isinstance(segmentation["counts"], list):
            return coco.frPyObjects(segmentation, height, width)
        return _in_bytes(segmentation)

    crowds = [int(flag) for flag in crowd]
    return np.asarray(coco.iou([_in_bytes(mask) for mask in detected], [*map(encoded, annotated)], crowds), np.float64)


def _in_bytes(encoded: dict[str, Any]) -> dict[str, Any]:
    """Run lengths with counts as bytes, for the library."""
    counts = encoded["counts"]
    return {**encoded, "counts": counts.encode()} if isinstance(counts, str) else encoded


def from_run_lengths(encoded: dict[str, Any]) -> NDArray[np.bool_]:
    """The mask bool (height, width) of :func:`run_lengths`."""
    from faster_coco_eval.core import mask as coco

    return np.asarray(coco.decode(_in_bytes(encoded)), np.bool_)
