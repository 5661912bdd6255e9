"""Rotated boxes: hulls, corners, and two measures of overlap.

A rotated box is float32 (5,): centre x, centre y, width, height, and the angle in radians from the x axis to the side
of the width, positive towards the y axis, which points down.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.detection.parts import Float

EPSILON = 1e-7


def hulls(rotated: NDArray[Any]) -> Float:
    """The smallest upright boxes float32 (..., 4), x1 y1 x2 y2, around rotated boxes (..., 5)."""
    boxes = np.asarray(rotated, np.float32)
    half, angle = boxes[..., 2:4] * np.float32(0.5), boxes[..., 4:]
    with np.errstate(invalid="ignore"):
        cos, sin = np.abs(np.cos(angle)), np.abs(np.sin(angle))
    width, height = half[..., :1], half[..., 1:]
    reach = np.concatenate([width * cos + height * sin, width * sin + height * cos], axis=-1)
    return np.concatenate([boxes[..., :2] - reach, boxes[..., :2] + reach], axis=-1)


def corners(rotated: NDArray[Any]) -> NDArray[Any]:
    """Corners (..., 4, 2), x y, of rotated boxes (..., 5), around the box, of the same floating-point type."""
    boxes = np.asarray(rotated)
    cos, sin = np.cos(boxes[..., 4:]), np.sin(boxes[..., 4:])
    half = boxes[..., 2:4] / 2
    along = np.concatenate([half[..., :1] * cos, half[..., :1] * sin], axis=-1)
    across = np.concatenate([-half[..., 1:] * sin, half[..., 1:] * cos], axis=-1)
    centre = boxes[..., :2]
    return np.stack(
        [centre + along + across, centre + along - across, centre - along - across, centre - along + across], -2
    )


def probabilistic_iou(first: NDArray[Any], second: NDArray[Any]) -> Float:
    """Probabilistic IoU float32 (...), 0..1, of rotated boxes (..., 5) and (..., 5), which are broadcast: (D, 1, 5) and
    (1, G, 5) give (D, G).

    A box is a Gaussian with the box's covariance; the result is 1 minus the Hellinger distance of two (Llerena et al.
    2021, arXiv:2106.06072). The arithmetic, with its epsilons, is that of ``batch_probiou`` in Ultralytics.
    """
    (x1, y1, a1, b1, c1), (x2, y2, a2, b2, c2) = _gaussians(first), _gaussians(second)
    eps, zero = np.float32(EPSILON), np.float32(0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        a, b, c = a1 + a2, b1 + b2, c1 + c2
        x, y = x2 - x1, y1 - y2
        determinant = a * b - c * c
        spread = (a * y * y + b * x * x) / (determinant + eps) * np.float32(0.25)
        skew = c * x * y / (determinant + eps) * np.float32(0.5)
        own = np.maximum(a1 * b1 - c1 * c1, zero) * np.maximum(a2 * b2 - c2 * c2, zero)
        size = np.log(determinant / (np.float32(4) * np.sqrt(own) + eps) + eps) * np.float32(0.5)
        distance = np.clip(spread + skew + size, eps, np.float32(100))
        return np.asarray(np.float32(1) - np.sqrt(np.float32(1) - np.exp(-distance) + eps), np.float32)


def _gaussians(rotated: NDArray[Any]) -> tuple[Float, Float, Float, Float, Float]:
    """x, y, and the covariances of x with x, y with y and x with y, each float32 (...)."""
    boxes = np.asarray(rotated, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        along, across = boxes[..., 2] ** 2 / np.float32(12), boxes[..., 3] ** 2 / np.float32(12)
        cos, sin = np.cos(boxes[..., 4]), np.sin(boxes[..., 4])
        cos2, sin2 = cos**2, sin**2
        return (
            boxes[..., 0],
            boxes[..., 1],
            along * cos2 + across * sin2,
            along * sin2 + across * cos2,
            (along - across) * cos * sin,
        )


def polygon_iou(
    first: NDArray[Any], second: NDArray[Any], crowd: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """IoU float64 (D, G), 0..1, of the areas of convex polygons (D, 4, 2) and (G, 4, 2), x y.

    For a crowd, bool (G,), it is the intersection over the first polygon's own area.
    """
    ours, theirs = (np.asarray(points, np.float64).reshape(-1, 4, 2) for points in (first, second))
    areas = [_areas(points) for points in (ours, theirs)]
    low, high = ([points.min(axis=1) for points in (ours, theirs)], [points.max(axis=1) for points in (ours, theirs)])
    near = (low[0][:, None] < high[1][None]).all(-1) & (low[1][None] < high[0][:, None]).all(-1)
    result = np.zeros((len(ours), len(theirs)))
    pairs = np.argwhere(near)
    for start in range(0, len(pairs), _PAIRS):
        i, j = pairs[start : start + _PAIRS].T
        shared = _shared_areas(ours[i], theirs[j])
        group = np.zeros(len(j), bool) if crowd is None else np.asarray(crowd)[j]
        union = areas[0][i] + np.where(group, 0, areas[1][j] - shared)
        np.divide(shared, union, out=shared, where=union > 0)
        result[i, j] = np.where(union > 0, np.minimum(shared, 1), 0)
    return result


_PAIRS = 4096
"""Pairs of polygons at a time, for which the memory stays small."""


def _shared_areas(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Areas (P,) that convex polygons (P, 4, 2) have in common with others (P, 4, 2).

    What two convex polygons share is the hull of the corners of each that are in the other, and of the points where
    their sides cross. Corners and sides in the same place give points twice, which add nothing: OpenCV's
    intersectConvexConvex gives 0 for 3 % of the pairs that differ by the rounding to float32.
    """
    origin = first[:, :1]
    mine, other = (_counterclockwise(points - origin) for points in (first, second))
    along, across = (np.roll(points, -1, axis=1) - points for points in (mine, other))
    slope = _cross(along[:, :, None], across[:, None])
    apart = other[:, None] - mine[:, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        here, there = _cross(apart, across[:, None]) / slope, _cross(apart, along[:, :, None]) / slope
    crossing = (slope != 0) & (here >= 0) & (here <= 1) & (there >= 0) & (there <= 1)
    points = mine[:, :, None] + np.where(crossing, here, 0)[..., None] * along[:, :, None]
    every = np.concatenate([points.reshape(-1, 16, 2), mine, other], axis=1)
    counts = np.concatenate([crossing.reshape(-1, 16), _inside(mine, other), _inside(other, mine)], axis=1)
    centre = (every * counts[..., None]).sum(axis=1) / np.maximum(counts.sum(axis=1), 1)[:, None]
    every = every - centre[:, None]
    order = np.argsort(np.where(counts, np.arctan2(every[..., 1], every[..., 0]), np.inf), axis=1)
    every, counts = np.take_along_axis(every, order[..., None], axis=1), np.take_along_axis(counts, order, axis=1)
    return np.where(counts.any(axis=1), _areas(np.where(counts[..., None], every, every[:, :1])), 0)


def _inside(points: NDArray[np.float64], polygons: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether points (P, 4, 2) are in counterclockwise polygons (P, 4, 2) or on their sides, (P, 4)."""
    sides = np.roll(polygons, -1, axis=1) - polygons
    allowed = 1e-9 * np.linalg.norm(sides, axis=-1)
    left = _cross(sides[:, None], points[:, :, None] - polygons[:, None])
    return np.asarray((left >= -allowed[:, None]).all(axis=-1))


def _cross(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(first[..., 0] * second[..., 1] - first[..., 1] * second[..., 0])


def _counterclockwise(polygons: NDArray[np.float64]) -> NDArray[np.float64]:
    turned = _cross(polygons, np.roll(polygons, -1, axis=1)).sum(axis=1) < 0
    return np.where(turned[:, None, None], polygons[:, ::-1], polygons)


def _areas(polygons: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.abs(_cross(polygons, np.roll(polygons, -1, axis=1)).sum(axis=1)) / 2)
