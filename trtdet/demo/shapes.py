"""A synthetic detection data set in COCO's format: ten shapes on cluttered backgrounds.

It lets every step from training to mAP run with nothing downloaded. An image depends only on the seed, the name of
its split and its index, so a split can be made longer without changing the images it had, and can be rendered on the
fly where no file is wanted.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from trtdet.errors import DataError, OutputError
from trtdet.files import write_atomically

CLASSES: tuple[str, ...] = (
    "circle",
    "square",
    "triangle",
    "star",
    "pentagon",
    "cross",
    "ring",
    "diamond",
    "crescent",
    "arrow",
)
"""Class names by class index; the COCO category id is the index + 1."""

DEFAULT_SEED = 2107

_VERSION = 1
"""Of the renderer; raising it makes ``generate`` write again the images of an older version."""

_SIZES = ((256, 256), (256, 256), (256, 320), (320, 256))
"""(height, width) of the images; a repeated size is so much more frequent."""

_SCALES = ((13.0, 30.0), (34.0, 92.0), (98.0, 150.0))
"""Longest extent in pixels of small, medium and large objects: COCO's limits, 32 and 96 pixels, lie between."""

_SCALE_ODDS = (0.42, 0.42, 0.16)
_MIN_VISIBLE = 0.72
"""Of an object's pixels, how much later objects must leave visible."""

Boxes = NDArray[np.float32]
Image = NDArray[np.uint8]


@dataclass(frozen=True)
class ShapesSplit:
    """Where a generated split lies."""

    images: Path
    """Folder of ``000001.png`` and so on."""
    annotations: Path
    """COCO instances JSON."""


def generate(root: Path, split: str, count: int, seed: int = DEFAULT_SEED) -> ShapesSplit:
    """Writes ``root/<split>/000001.png ...`` and ``root/annotations/instances_<split>.json``.

    The annotations are written last, through a temporary name; where they exist and were made with the same arguments,
    nothing is written again.

    Args:
        root: folder of the data set; created if missing.
        split: name of the split, such as ``train`` or ``val``; other names give other images.
        count: number of images, 1 or more.
        seed: 0 or more.

    Raises:
        DataError: an argument is out of range.
        OutputError: a file cannot be written.
    """
    if count < 1:
        raise DataError(f"shapes: count is {count}, allowed is 1 or more")
    if not split or set(split) & set("/\\") or split in (".", ".."):
        raise DataError(f"shapes: split is {split!r}, expected a plain name such as 'val'")
    _check_seed(seed)
    made = ShapesSplit(root / split, root / "annotations" / f"instances_{split}.json")
    info = {"description": "trtdet shapes", "renderer": _VERSION, "split": split, "seed": seed, "count": count}
    if _is_complete(made, info):
        return made
    try:
        made.images.mkdir(parents=True, exist_ok=True)
        made.annotations.parent.mkdir(parents=True, exist_ok=True)
        made.annotations.unlink(missing_ok=True)  # the images that it describes are about to be overwritten
        document = _write_images(made.images, split, count, seed)
        write_atomically(made.annotations, json.dumps({"info": info, **document}).encode())
    except OSError as error:
        raise OutputError(f"shapes cannot be written below '{root}': {error}; choose another folder") from None
    return made


def _is_complete(split: ShapesSplit, info: dict[str, Any]) -> bool:
    try:
        document = json.loads(split.annotations.read_text())
        names = [image["file_name"] for image in document["images"]]
        return bool(document["info"] == info) and all((split.images / name).is_file() for name in names)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_images(folder: Path, split: str, count: int, seed: int) -> dict[str, Any]:
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(count):
        image, boxes, classes = render(seed, split, index)
        name = f"{index + 1:06d}.png"
        ok, encoded = cv2.imencode(".png", image[:, :, ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 1])
        if not ok:
            raise OSError(f"image {name} cannot be encoded")
        write_atomically(folder / name, encoded.tobytes())
        images.append({"id": index + 1, "file_name": name, "width": image.shape[1], "height": image.shape[0]})
        for (x1, y1, x2, y2), label in zip(boxes.tolist(), classes.tolist(), strict=True):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": index + 1,
                    "category_id": label + 1,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": (x2 - x1) * (y2 - y1),
                    "iscrowd": 0,
                }
            )
    categories = [{"id": i + 1, "name": name, "supercategory": "shape"} for i, name in enumerate(CLASSES)]
    return {"images": images, "annotations": annotations, "categories": categories}


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise DataError(f"shapes: seed is {seed}, allowed is 0 or more")


def render(seed: int, split: str, index: int) -> tuple[Image, Boxes, NDArray[np.int64]]:
    """Renders one image.

    Args:
        seed: 0 or more.
        split: any name.
        index: 0 or more; file ``000001.png`` is index 0.

    Returns:
        The image uint8 (H, W, 3), RGB, 0..255, with H and W 256 or 320; boxes float32 (n, 4), x1 y1 x2 y2 in pixels,
        tight around the visible pixels of an object and inside the image; classes int64 (n,), indices into CLASSES.
        n is 1 to 8.

    Raises:
        DataError: ``seed`` or ``index`` is negative.
    """
    image, owner, classes = _render(seed, split, index)
    return image, _boxes(owner, len(classes)), np.array(classes, np.int64)


def _render(seed: int, split: str, index: int) -> tuple[Image, NDArray[np.uint8], list[int]]:
    """The image, the map (H, W) of which object (1, 2, ...) owns a pixel (0: none), and the classes."""
    _check_seed(seed)
    if index < 0:
        raise DataError(f"shapes: index is {index}, allowed is 0 or more")
    rng = np.random.default_rng([seed, zlib.crc32(split.encode()), index])
    height, width = _SIZES[int(rng.integers(len(_SIZES)))]
    canvas = _background(rng, height, width)
    owner = np.zeros((height, width), np.uint8)
    classes: list[int] = []
    pixels: list[int] = []
    wanted = int(rng.integers(1, 9))
    attempts = 0
    while len(classes) < wanted and attempts < 4 * wanted:
        attempts += 1
        label = int(rng.integers(len(CLASSES)))
        # The first object always goes in, so that no image is empty.
        if _place(rng, canvas, owner, label, pixels):
            classes.append(label)
    return _degrade(rng, canvas), owner, classes


def _boxes(owner: NDArray[np.uint8], count: int) -> Boxes:
    boxes = np.empty((count, 4), np.float32)
    for i in range(count):
        x, y, width, height = cv2.boundingRect((owner == i + 1).view(np.uint8))
        boxes[i] = (x, y, x + width, y + height)
    return boxes


def _place(rng: np.random.Generator, canvas: Image, owner: NDArray[np.uint8], label: int, pixels: list[int]) -> bool:
    """Draws an object unless it would hide too much of another; returns whether it did."""
    height, width = owner.shape
    low, high = _SCALES[int(rng.choice(3, p=_SCALE_ODDS))]
    extent = math.exp(rng.uniform(math.log(low), math.log(high)))
    contours, box_width, box_height = _outline(rng, label, extent)
    if box_width >= width - 2 or box_height >= height - 2:
        return False
    x = int(rng.integers(1, width - box_width))
    y = int(rng.integers(1, height - box_height))
    region = np.s_[y : y + box_height, x : x + box_width]
    mask = np.zeros((box_height, box_width), np.uint8)
    fixed = [np.round(c * 16).astype(np.int32) for c in contours]
    cv2.fillPoly(mask, fixed, 255, cv2.LINE_AA, 4)
    solid = mask > 127
    covered = np.bincount(owner[region][solid], minlength=len(pixels) + 1)[1:]
    visible = np.array(pixels, np.int64)
    for i in np.flatnonzero(covered):
        if np.count_nonzero(owner == i + 1) - covered[i] < _MIN_VISIBLE * visible[i]:
            return False
    paint = _paint(rng, box_height, box_width, canvas[region])
    if rng.random() < 0.3:
        edge = _colour(rng, paint.reshape(-1, 3)[0].astype(np.float32), 60).tolist()
        cv2.polylines(paint, fixed, True, edge, 1 if extent < 40 else 2, cv2.LINE_AA, 4)
    alpha = mask[..., None].astype(np.float32) * np.float32(rng.uniform(0.8, 1.0) / 255)
    under = canvas[region].astype(np.float32)
    canvas[region] = (under + (paint - under) * alpha).astype(np.uint8)
    owner[region][solid] = len(pixels) + 1
    pixels.append(int(np.count_nonzero(solid)))
    return True


def _outline(rng: np.random.Generator, label: int, extent: float) -> tuple[list[NDArray[np.float64]], int, int]:
    """Contours of a shape, turned, squeezed and scaled to ``extent`` pixels; and the width and height of its patch."""
    contours = _template(CLASSES[label])
    angle = rng.uniform(0, 2 * math.pi)
    tilt = rng.uniform(0, 2 * math.pi)
    squeeze = rng.uniform(0.82, 1.0)
    axis = np.array([[math.cos(tilt), -math.sin(tilt)], [math.sin(tilt), math.cos(tilt)]])
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
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
    """Contours of a class around the origin; where two overlap, there is a hole (even-odd rule)."""

    def circle(radius: float, start: float = 0.0, end: float = 2 * math.pi, points: int = 40) -> NDArray[np.float64]:
        angles = np.linspace(start, end, points, endpoint=end - start < 2 * math.pi)
        return radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)

    if name == "circle":
        return (circle(1.0),)
    if name == "ring":
        return (circle(1.0), circle(0.58))
    if name == "square":
        return (np.array([[-1.0, -1], [1, -1], [1, 1], [-1, 1]]),)
    if name == "diamond":
        return (np.array([[-1.0, 0], [0, -0.55], [1, 0], [0, 0.55]]),)
    if name == "triangle":
        return (circle(1.0, points=4)[:3],)
    if name == "pentagon":
        return (circle(1.0, points=6)[:5],)
    if name == "star":
        angles = np.arange(10) * math.pi / 5
        radii = np.where(np.arange(10) % 2, 0.42, 1.0)
        return (np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1),)
    if name == "cross":
        a, b = 0.33, 1.0
        corners = [
            (-a, -b),
            (a, -b),
            (a, -a),
            (b, -a),
            (b, a),
            (a, a),
            (a, b),
            (-a, b),
            (-a, a),
            (-b, a),
            (-b, -a),
            (-a, -a),
        ]
        return (np.array(corners),)
    if name == "crescent":
        # The inner arc belongs to a circle of radius 0.8 whose centre is 0.45 to the right.
        meet = math.acos((1 + 0.45**2 - 0.8**2) / (2 * 0.45))
        outer = circle(1.0, meet, 2 * math.pi - meet, 32)
        x, y = math.cos(meet) - 0.45, math.sin(meet)
        inner_end = math.atan2(y, x)
        inner = circle(0.8, inner_end, 2 * math.pi - inner_end, 24)[::-1] + np.array([0.45, 0.0])
        return (np.concatenate([outer, inner]),)
    if name == "arrow":
        return (np.array([[-1.0, -0.25], [0.1, -0.25], [0.1, -0.7], [1, 0], [0.1, 0.7], [0.1, 0.25], [-1, 0.25]]),)
    raise ValueError(name)


def _colour(rng: np.random.Generator, against: NDArray[np.float32], contrast: float) -> NDArray[np.float32]:
    """A colour float32 (3,), 0..255, at least ``contrast`` away from another in its largest channel difference."""
    colour = rng.uniform(0, 255, 3).astype(np.float32)
    for _ in range(8):
        if float(np.abs(colour - against).max()) >= contrast:
            break
        colour = rng.uniform(0, 255, 3).astype(np.float32)
    return colour


def _paint(rng: np.random.Generator, height: int, width: int, under: Image) -> Image:
    """The filling of an object: one colour, a gradient or stripes, uint8 (height, width, 3)."""
    ground = np.array(cv2.mean(under)[:3], np.float32)
    first = _colour(rng, ground, rng.uniform(35, 110))
    kind = rng.random()
    if kind < 0.45:
        return np.full((height, width, 3), first, np.float32).astype(np.uint8)
    if kind < 0.8:
        second = np.clip(first + rng.uniform(-70, 70, 3).astype(np.float32), 0, 255)
        return _gradient(rng, height, width, first, second)
    second = np.clip(first + rng.uniform(-60, 60, 3).astype(np.float32), 0, 255)
    return _stripes(rng, height, width, first, second)


def _ramp(rng: np.random.Generator, height: int, width: int) -> NDArray[np.float32]:
    """A plane float32 (height, width) that rises in a random direction, in pixels from the middle."""
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
    """Looks the values of a plane (H, W) up in colours (256, 3): several times faster than NumPy's indexing."""
    return np.asarray(cv2.LUT(cv2.merge([plane, plane, plane]), colours.astype(np.uint8)[None]), np.uint8)


def _stripes(
    rng: np.random.Generator, height: int, width: int, first: NDArray[np.float32], second: NDArray[np.float32]
) -> Image:
    period = rng.uniform(4, 16)
    # The offset keeps the position positive, so that cutting to whole numbers is a floor.
    position = (_ramp(rng, height, width) * np.float32(2 / period) + np.float32(1024)).astype(np.uint16)
    return _colourise((position & 1).astype(np.uint8), np.stack([first, second] * 128))


def _background(rng: np.random.Generator, height: int, width: int) -> Image:
    """A gradient with cloudy texture, and over it patches, lines, scribbles and letters that belong to no class."""
    first = rng.uniform(10, 245, 3).astype(np.float32)
    second = np.clip(first + rng.uniform(-90, 90, 3), 0, 255).astype(np.float32)
    canvas = _gradient(rng, height, width, first, second)
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
        stripes = _stripes(rng, h, w, low, high)
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


def _degrade(rng: np.random.Generator, canvas: Image) -> Image:
    """Blur, brightness, contrast and sensor noise over the whole image."""
    if rng.random() < 0.3:
        canvas = cv2.GaussianBlur(canvas, (3, 3), rng.uniform(0.4, 1.0)).astype(np.uint8, copy=False)
    gain, offset = rng.uniform(0.6, 1.25), rng.uniform(-25, 25)
    height, width = canvas.shape[:2]
    tile = _noise()
    y, x = int(rng.integers(tile.shape[0] - height + 1)), int(rng.integers(tile.shape[1] - width + 1))
    strength = rng.uniform(0, 14)
    mixed = cv2.addWeighted(
        canvas, gain, tile[y : y + height, x : x + width], strength / 32, offset - 128 * strength / 32
    )
    return np.asarray(mixed, np.uint8)


@functools.lru_cache(maxsize=1)
def _noise() -> Image:
    """Gaussian noise uint8 (512, 512, 3) of mean 128 and deviation 32: a window of it is cheaper than new noise."""
    noise = np.random.default_rng(0).normal(128, 32, (512, 512, 3))
    return np.asarray(np.clip(np.round(noise), 0, 255).astype(np.uint8))
