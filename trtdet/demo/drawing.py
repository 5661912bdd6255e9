"""Paints shapes and backgrounds: outlines, fillings, clutter, blur and noise."""

from __future__ import annotations

import functools
import math
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]


def outline(rng: np.random.Generator, name: str, extent: float) -> tuple[list[NDArray[np.float64]], int, int]:
    """Contours of a shape, rotated, squeezed and scaled to ``extent`` pixels; and width and height of its patch."""
    contours = _template(name)
    angle = rng.uniform(0, 2 * math.pi)
    tilt = rng.uniform(0, 2 * math.pi)
    squeeze = rng.uniform(0.82, 1.0)
    axis, turn = (np.array([[math.cos(by), -math.sin(by)], [math.sin(by), math.cos(by)]]) for by in (tilt, angle))
    matrix = turn @ axis @ np.diag([1.0, squeeze]) @ axis.T
    turned = [c @ matrix.T for c in contours]
    points = np.concatenate(turned)
    low, size = points.min(axis=0), np.ptp(points, axis=0)
    scale = extent / float(size.max())
    placed = [(c - low) * scale + 1.0 for c in turned]
    width, height = (math.ceil(float(s) * scale) + 3 for s in size)
    return placed, width, height


@functools.cache
def _template(name: str) -> tuple[NDArray[np.float64], ...]:
    """Contours of a class around the origin; overlapping contours make a hole (even-odd rule)."""

    def circle(radius: float, start: float = 0.0, end: float = 2 * math.pi, points: int = 40) -> NDArray[np.float64]:
        angles = np.linspace(start, end, points, endpoint=end - start < 2 * math.pi)
        return radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)

    if name == "ring":
        return circle(1.0), circle(0.58)
    match name:
        case "circle":
            contour = circle(1.0)
        case "square":
            contour = np.array([[-1.0, -1], [1, -1], [1, 1], [-1, 1]])
        case "diamond":
            contour = np.array([[-1.0, 0], [0, -0.55], [1, 0], [0, 0.55]])
        case "triangle":
            contour = circle(1.0, points=4)[:3]
        case "pentagon":
            contour = circle(1.0, points=6)[:5]
        case "star":
            angles = np.arange(10) * math.pi / 5
            radii = np.where(np.arange(10) % 2, 0.42, 1.0)
            contour = np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)
        case "cross":
            quarter, turn = np.array([[-0.33, -1.0], [0.33, -1.0], [0.33, -0.33]]), np.array([[0.0, 1.0], [-1.0, 0.0]])
            contour = np.concatenate([quarter @ np.linalg.matrix_power(turn, quarters) for quarters in range(4)])
        case "crescent":
            # The inner arc belongs to a circle of radius 0.8 whose centre is 0.45 to the right.
            meet = math.acos((1 + 0.45**2 - 0.8**2) / (2 * 0.45))
            outer = circle(1.0, meet, 2 * math.pi - meet, 32)
            end = math.atan2(math.sin(meet), math.cos(meet) - 0.45)
            inner = circle(0.8, end, 2 * math.pi - end, 24)[::-1] + np.array([0.45, 0.0])
            contour = np.concatenate([outer, inner])
        case "arrow":
            contour = np.array([[-1.0, -0.25], [0.1, -0.25], [0.1, -0.7], [1, 0], [0.1, 0.7], [0.1, 0.25], [-1, 0.25]])
        case _:
            raise ValueError(name)
    return (contour,)


def colour(rng: np.random.Generator, against: NDArray[np.float32], contrast: float) -> NDArray[np.float32]:
    """A colour float32 (3,), 0..255, which differs from ``against`` in one channel by at least ``contrast``.

    After 9 attempts, the last colour is taken.
    """
    for _ in range(9):
        colour = rng.uniform(0, 255, 3).astype(np.float32)
        if float(np.abs(colour - against).max()) >= contrast:
            break
    return colour


def paint(rng: np.random.Generator, height: int, width: int, under: Image) -> Image:
    """The filling of an object, uint8 (height, width, 3): one colour, a gradient or stripes."""
    ground = np.array(cv2.mean(under)[:3], np.float32)
    first = colour(rng, ground, rng.uniform(35, 110))
    kind = rng.random()
    if kind < 0.45:
        return np.full((height, width, 3), first, np.float32).astype(np.uint8)
    pattern, reach = (_gradient, 70) if kind < 0.8 else (_stripes, 60)
    second = np.clip(first + rng.uniform(-reach, reach, 3).astype(np.float32), 0, 255)
    return pattern(rng, height, width, first=first, second=second)


def _ramp(rng: np.random.Generator, height: int, width: int) -> NDArray[np.float32]:
    """A plane float32 (height, width): distance in pixels from the middle along a random direction."""
    angle = rng.uniform(0, 2 * math.pi)
    y = (np.arange(height, dtype=np.float32) - height / 2)[:, None] * np.float32(math.sin(angle))
    x = (np.arange(width, dtype=np.float32) - width / 2)[None, :] * np.float32(math.cos(angle))
    return np.asarray(y + x, np.float32)


def _gradient(
    rng: np.random.Generator, height: int, width: int, first: NDArray[np.float32], second: NDArray[np.float32]
) -> Image:
    position = _ramp(rng, height, width) * np.float32(127.0 / math.hypot(height, width) * 2) + np.float32(127.5)
    return _colourise(position.astype(np.uint8), np.linspace(first, second, 256))


def _colourise(plane: NDArray[np.uint8], colours: NDArray[Any]) -> Image:
    """Looks up values (H, W) in colours (256, 3), several times faster than NumPy's indexing."""
    return np.asarray(cv2.LUT(cv2.merge([plane, plane, plane]), colours.astype(np.uint8)[None]), np.uint8)


def _stripes(
    rng: np.random.Generator, height: int, width: int, first: NDArray[np.float32], second: NDArray[np.float32]
) -> Image:
    period = rng.uniform(4, 16)
    # The offset keeps positions positive, so that the integer conversion is a floor.
    position = (_ramp(rng, height, width) * np.float32(2 / period) + np.float32(1024)).astype(np.uint16)
    return _colourise((position & 1).astype(np.uint8), np.stack([first, second] * 128))


def background(rng: np.random.Generator, height: int, width: int) -> Image:
    """A gradient with clouds, and on it patches, lines, scribbles and letters that belong to no class."""
    first = rng.uniform(10, 245, 3).astype(np.float32)
    second = np.clip(first + rng.uniform(-90, 90, 3), 0, 255).astype(np.float32)
    canvas = _gradient(rng, height, width, first=first, second=second)
    cells = int(rng.integers(3, 24))
    spread = rng.uniform(4, 40)
    clouds = rng.normal(0, spread, (cells, cells, 3)).astype(np.float32)
    clouds = np.asarray(cv2.resize(clouds, (width, height), interpolation=cv2.INTER_LINEAR), np.float32)
    canvas = np.asarray(cv2.add(canvas, clouds, dtype=cv2.CV_8U), np.uint8)
    for _ in range(int(rng.integers(0, 4))):
        h, w = int(rng.integers(20, height // 2)), int(rng.integers(20, width // 2))
        y, x = int(rng.integers(height - h)), int(rng.integers(width - w))
        patch = canvas[y : y + h, x : x + w]
        mean = np.array(cv2.mean(patch)[:3], np.float32)
        low, high = (np.clip(mean + rng.uniform(-50, 50, 3), 0, 255).astype(np.float32) for _ in range(2))
        stripes = _stripes(rng, h, w, first=low, second=high)
        canvas[y : y + h, x : x + w] = cv2.addWeighted(patch, 0.5, stripes, 0.5, 0)
    for _ in range(int(rng.integers(0, 9))):
        colour = rng.integers(0, 256, 3).tolist()
        thickness = int(rng.integers(1, 4))
        kind = rng.random()
        if kind < 0.4:
            x1, x2 = rng.integers(0, width, 2).tolist()
            y1, y2 = rng.integers(0, height, 2).tolist()
            cv2.line(canvas, (x1, y1), (x2, y2), colour, thickness, cv2.LINE_AA)
        elif kind < 0.8:
            start = rng.uniform(0, (width, height))
            steps = rng.normal(0, 14, (int(rng.integers(4, 14)), 2))
            path = np.round(start + steps.cumsum(axis=0)).astype(np.int32)
            cv2.polylines(canvas, [path], False, colour, thickness, cv2.LINE_AA)
        else:
            letter = chr(int(rng.integers(97, 123)))
            x, y = int(rng.integers(width)), int(rng.integers(height))
            cv2.putText(
                canvas, letter, (x, y), int(rng.integers(0, 8)), rng.uniform(0.4, 2.0), colour, thickness, cv2.LINE_AA
            )
    return canvas


def degrade(rng: np.random.Generator, canvas: Image) -> Image:
    """Adds blur, brightness, contrast and sensor noise to the image."""
    if rng.random() < 0.3:
        canvas = cv2.GaussianBlur(canvas, (3, 3), rng.uniform(0.4, 1.0)).astype(np.uint8, copy=False)
    gain, offset = rng.uniform(0.6, 1.25), rng.uniform(-25, 25)
    height, width = canvas.shape[:2]
    tile = _noise()
    y, x = int(rng.integers(tile.shape[0] - height + 1)), int(rng.integers(tile.shape[1] - width + 1))
    window, strength = tile[y : y + height, x : x + width], rng.uniform(0, 14) / 32
    return np.asarray(cv2.addWeighted(canvas, gain, window, strength, offset - 128 * strength), np.uint8)


@functools.lru_cache(maxsize=1)
def _noise() -> Image:
    """Gaussian noise uint8 (512, 512, 3), mean 128, deviation 32; windows of it are cheaper than new noise."""
    noise = np.random.default_rng(0).normal(128, 32, (512, 512, 3))
    return np.asarray(np.clip(np.round(noise), 0, 255).astype(np.uint8))
