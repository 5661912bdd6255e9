"""Masks, keypoints and rotated boxes of an image: from pixels of the network's input to those of the picture.

The input holds the picture scaled and moved: ``input = picture * scale + pad`` on each axis (ImageTransform). Boxes are
placed by :meth:`trtdet.data.images.ImageTransform.to_image`. The C++ library computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.data.images import ImageTransform, Overlay
from trtdet.detection.masks import THRESHOLD, paste
from trtdet.detection.parts import Float, Parts
from trtdet.detection.rotated import corners


@dataclass(frozen=True, eq=False)
class Placed:
    """Parts of the n detections of a picture of H x W pixels; None where the detector gives none."""

    masks: tuple[NDArray[np.bool_], ...] | None = None
    """bool (H, W) of each detection."""
    keypoints: Float | None = None
    """float32 (n, P, 3): x and y in pixels of the picture, within it, and a score 0..1."""
    rotated_boxes: Float | None = None
    """float32 (n, 5), see :mod:`trtdet.detection.rotated`; a box may reach out of the picture."""

    def overlays(self, count: int, skeleton: tuple[tuple[int, int], ...] = ()) -> list[Overlay]:
        """What pictures show of each of ``count`` detections."""
        outlines = None if self.rotated_boxes is None else corners(self.rotated_boxes)
        return [
            Overlay(
                mask=None if self.masks is None else self.masks[i],
                outline=None if outlines is None else outlines[i],
                keypoints=None if self.keypoints is None else self.keypoints[i],
                skeleton=skeleton,
            )
            for i in range(count)
        ]


def place(
    parts: Parts, boxes: Float, transform: ImageTransform, size: tuple[int, int], threshold: float = THRESHOLD
) -> Placed:
    """Places the parts of n detections of one image in its picture.

    Args:
        parts: of one image, see :meth:`trtdet.detection.parts.Parts.image`.
        boxes: float32 (n, 4), x1 y1 x2 y2 in pixels of the picture, clipped to it.
        size: height and width of the network's input in pixels.
        threshold: probability above which a pixel belongs to a mask.
    """
    masks: Sequence[NDArray[np.bool_]] | None = None
    if parts.masks is not None:
        sides = transform.height, transform.width
        masks = [paste(grid, box, *sides, threshold) for grid, box in zip(parts.masks, boxes, strict=True)]
    elif parts.mask_coefficients is not None and parts.prototypes is not None:
        masks = [
            prototype_mask(row, parts.prototypes, box, transform=transform, size=size, threshold=threshold)
            for row, box in zip(parts.mask_coefficients, boxes, strict=True)
        ]
    return Placed(
        masks=None if masks is None else tuple(masks),
        keypoints=None if parts.keypoints is None else place_keypoints(parts.keypoints, transform),
        rotated_boxes=None if parts.rotated_boxes is None else place_rotated(parts.rotated_boxes, transform),
    )


def prototype_mask(
    coefficients: Float,
    prototypes: Float,
    box: Float,
    *,
    transform: ImageTransform,
    size: tuple[int, int],
    threshold: float = THRESHOLD,
) -> NDArray[np.bool_]:
    """The mask of one detection of a one-stage detector, bool (H, W) of the picture (YOLACT, arXiv:1904.02689).

    The logit of a prototype's cell is the sum over m of ``coefficients[m] * prototypes[m]``, in float32. With
    ``r = w / width``, ``width`` being that of the input, pixel (u, v) of the picture lies at
    ``x = ((u + 0.5) * scale_x + pad_x) * r - 0.5`` of the w x h cells, and y likewise, in float64. The border of the
    input has no say: ``x = max(min(x, (pad_x + scale_x * W) * r - 1), pad_x * r)``. The pixel's logit is bilinear
    between the cells ``floor(x)`` and ``min(floor(x) + 1, w - 1)``, with the float32 share ``x - floor(x)``: first
    along y, then along x, each as ``low * (1 - share) + high * share``. The pixel belongs to the mask if the logit
    exceeds ``log(threshold / (1 - threshold))`` and the pixel lies in the box: ``ceil(x1) <= u < ceil(x2)``, and v
    likewise. Up to the order of interpolations this is ``process_mask_native`` of Ultralytics.

    Args:
        coefficients: float32 (M,).
        prototypes: float32 (M, h, w).
        box: float32 (4,), x1 y1 x2 y2 in pixels of the picture, clipped to it; a box that is not finite has no mask.
        size: height and width of the network's input in pixels.
        threshold: probability 0..1, exclusive.
    """
    mask = np.zeros((transform.height, transform.width), bool)
    if not np.isfinite(box).all():
        return mask
    left, top, right, bottom = (int(value) for value in np.ceil(box))
    if left >= right or top >= bottom:
        return mask
    rows, columns = prototypes.shape[1:]
    wide, high = (transform.scale_x, transform.pad_x), (transform.scale_y, transform.pad_y)
    x0, x1, across = _cells(np.arange(left, right), wide, (transform.width, size[1], columns))
    y0, y1, down = _cells(np.arange(top, bottom), high, (transform.height, size[0], rows))
    window = np.asarray(prototypes, np.float32)[:, y0[0] : y1[-1] + 1, x0[0] : x1[-1] + 1]
    logits = np.tensordot(np.asarray(coefficients, np.float32), window, axes=1)
    x0, x1, y0, y1 = x0 - x0[0], x1 - x0[0], y0 - y0[0], y1 - y0[0]
    one, share = np.float32(1), down[:, None]
    lines = logits[y0] * (one - share) + logits[y1] * share
    values = lines[:, x0] * (one - across) + lines[:, x1] * across
    mask[top:bottom, left:right] = values > np.float32(math.log(threshold / (1 - threshold)))
    return mask


def _cells(
    pixels: NDArray[np.intp], scale_and_pad: tuple[float, int], lengths: tuple[int, int, int]
) -> tuple[NDArray[np.intp], NDArray[np.intp], Float]:
    """The two cells around each pixel, and the share of the second; see :func:`prototype_mask`.

    ``lengths`` are those of the picture, the input and the prototypes along the axis.
    """
    scale, pad = scale_and_pad
    picture, side, count = lengths
    ratio = count / side
    place = ((pixels + 0.5) * scale + pad) * ratio - 0.5
    place = np.maximum(np.minimum(place, (pad + scale * picture) * ratio - 1), pad * ratio)
    first = np.floor(place).astype(np.intp)
    return first, np.minimum(first + 1, count - 1), (place - first).astype(np.float32)


def place_keypoints(keypoints: NDArray[Any], transform: ImageTransform) -> Float:
    """Keypoints (n, P, 3) with x and y in pixels of the picture, clipped to it: ``(x - pad) / scale`` in float32."""
    placed = np.array(keypoints, np.float32)
    scale = np.array([transform.scale_x, transform.scale_y], np.float32)
    pad = np.array([transform.pad_x, transform.pad_y], np.float32)
    ends = np.array([transform.width, transform.height], np.float32)
    placed[..., :2] = np.clip((placed[..., :2] - pad) / scale, 0, ends)
    return placed


def place_rotated(rotated: NDArray[Any], transform: ImageTransform) -> Float:
    """Rotated boxes (n, 5) in pixels of the picture, not clipped.

    The centre is placed as a keypoint. The two sides, ``w * (cos, sin)`` and ``h * (-sin, cos)``, are divided by the
    scale of each axis; the new width and height are their lengths, the new angle is that of the first, atan2(y, x). The
    scales of a letterbox are equal up to a pixel, so that the result is a rectangle; with ``stretch`` it need not be.
    """
    boxes = np.array(rotated, np.float32)
    scale = np.array([transform.scale_x, transform.scale_y], np.float32)
    pad = np.array([transform.pad_x, transform.pad_y], np.float32)
    cos, sin = np.cos(boxes[:, 4]), np.sin(boxes[:, 4])
    width = np.hypot(cos / scale[0], sin / scale[1])
    height = np.hypot(sin / scale[0], cos / scale[1])
    angle = np.arctan2(sin / scale[1], cos / scale[0])
    centre = (boxes[:, :2] - pad) / scale
    return np.concatenate([centre, np.stack([boxes[:, 2] * width, boxes[:, 3] * height, angle], axis=1)], axis=1)
