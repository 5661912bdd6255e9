"""A synthetic detection data set in COCO format, ten shapes on cluttered backgrounds, which needs no download.

An image depends only on the seed, the split's name and its index: a longer split keeps its first images, and images
can be rendered without files.
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from trtdet.demo.drawing import Image, background, colour, degrade, outline, paint
from trtdet.detection.masks import run_lengths
from trtdet.errors import DataError, OutputError
from trtdet.files import NewFiles, finish_replacing, writing

CLASSES: tuple[str, ...] = (
    *("circle", "square", "triangle", "star", "pentagon"),
    *("cross", "ring", "diamond", "crescent", "arrow"),
)
"""Class names by class index; the COCO category id is the index + 1."""

DEFAULT_SEED = 2107

_VERSION = 2
"""Version of the renderer; ``generate`` replaces images of older versions. 2 has segmentations."""

_SIZES = ((256, 256), (256, 256), (256, 320), (320, 256))
"""(height, width) of the images; a repeated size is more frequent."""

_SCALES = ((13.0, 30.0), (34.0, 92.0), (98.0, 150.0))
"""Range of the longest side of small, medium and large objects, in pixels; COCO's limits are 32 and 96."""

_SCALE_ODDS = (0.42, 0.42, 0.16)
_MIN_VISIBLE = 0.72
"""The fraction of an object's pixels that later objects must not cover."""

Boxes = NDArray[np.float32]


@dataclass(frozen=True)
class ShapesSplit:
    """A split's folder of images (``000001.png`` and so on), and its COCO instances file."""

    images: Path
    annotations: Path


def generate(root: Path | str, split: str, count: int, seed: int = DEFAULT_SEED) -> ShapesSplit:
    """Writes ``root/<split>/000001.png ...`` and ``root/annotations/instances_<split>.json``.

    The annotations and their images appear together. If they exist for the same arguments, nothing is written.

    Args:
        root: folder of the data set; created if missing.
        split: such as ``train`` or ``val``; each name gives other images.
        count: number of images, 1 or more.
        seed: 0 or more.

    Raises:
        DataError: an argument is out of range.
        OutputError: a file cannot be written.
    """
    for name, number, least in (("count", count, 1), ("seed", seed, 0)):
        if number < least:
            raise DataError(f"shapes: {name} is {number}, allowed is {least} or more")
    if not split or set(split) & set("/\\") or split in (".", ".."):
        raise DataError(f"shapes: split is {split!r}, expected a plain name such as 'val'")
    root = Path(root)
    files = ShapesSplit(root / split, root / "annotations" / f"instances_{split}.json")
    info = {"description": "trtdet shapes", "renderer": _VERSION, "split": split, "seed": seed, "count": count}
    finish_replacing(root)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # Missing, damaged or from another program.
        document = json.loads(files.annotations.read_text())
        names = [image["file_name"] for image in document["images"]]
        if document["info"] == info and all((files.images / name).is_file() for name in names):
            return files
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    categories = [{"id": i + 1, "name": name, "supercategory": "shape"} for i, name in enumerate(CLASSES)]
    with NewFiles(files.annotations, root) as new, writing(root):
        for index in range(count):
            image, owner, labels = _render(seed, split, index)
            name = f"{index + 1:06d}.png"
            encoded, png = cv2.imencode(".png", image[:, :, ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 1])
            if not encoded:
                raise OutputError(f"shapes: image {name} cannot be encoded")
            new.place(Path(split, name)).write_bytes(png.tobytes())
            images.append({"id": index + 1, "file_name": name, "width": image.shape[1], "height": image.shape[0]})
            boxes = _boxes(owner, len(labels)).tolist()
            for number, ((x1, y1, x2, y2), label) in enumerate(zip(boxes, labels, strict=True), 1):
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": index + 1,
                        "category_id": label + 1,
                        "bbox": [x1, y1, x2 - x1, y2 - y1],
                        "area": (x2 - x1) * (y2 - y1),
                        "segmentation": run_lengths(owner == number),
                        "iscrowd": 0,
                    }
                )
        document = {"info": info, "images": images, "annotations": annotations, "categories": categories}
        listed = files.annotations.relative_to(root)
        new.place(listed).write_text(json.dumps(document))
        new.put([*(Path(split, image["file_name"]) for image in images), listed])
    return files


def render(seed: int, split: str, index: int) -> tuple[Image, Boxes, NDArray[np.int64]]:
    """Renders one image of a split; file ``000001.png`` has index 0.

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
    """The image, the object number of each pixel (H, W) with 0 for none, and the classes."""
    for name, number in (("seed", seed), ("index", index)):
        if number < 0:
            raise DataError(f"shapes: {name} is {number}, allowed is 0 or more")
    rng = np.random.default_rng([seed, zlib.crc32(split.encode()), index])
    height, width = _SIZES[int(rng.integers(len(_SIZES)))]
    canvas = background(rng, height, width)
    owner = np.zeros((height, width), np.uint8)
    classes: list[int] = []
    pixels: list[int] = []
    count = int(rng.integers(1, 9))
    for _ in range(4 * count):
        if len(classes) == count:
            break
        label = int(rng.integers(len(CLASSES)))
        # The first object always goes in, so that no image is empty.
        if _place(rng, canvas, owner, label=label, pixels=pixels):
            classes.append(label)
    return degrade(rng, canvas), owner, classes


def _boxes(owner: NDArray[np.uint8], count: int) -> Boxes:
    boxes = np.empty((count, 4), np.float32)
    for i in range(count):
        x, y, width, height = cv2.boundingRect((owner == i + 1).view(np.uint8))
        boxes[i] = (x, y, x + width, y + height)
    return boxes


def _place(rng: np.random.Generator, canvas: Image, owner: NDArray[np.uint8], label: int, pixels: list[int]) -> bool:
    """Draws an object unless it would hide too much of another; True if drawn."""
    height, width = owner.shape
    low, high = _SCALES[int(rng.choice(3, p=_SCALE_ODDS))]
    extent = math.exp(rng.uniform(math.log(low), math.log(high)))
    contours, box_width, box_height = outline(rng, CLASSES[label], extent)
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
    filling = paint(rng, box_height, box_width, under=canvas[region])
    if rng.random() < 0.3:
        edge = colour(rng, filling.reshape(-1, 3)[0].astype(np.float32), 60).tolist()
        cv2.polylines(filling, fixed, True, edge, 1 if extent < 40 else 2, cv2.LINE_AA, 4)
    alpha = mask[..., None].astype(np.float32) * np.float32(rng.uniform(0.8, 1.0) / 255)
    under = canvas[region].astype(np.float32)
    canvas[region] = (under + (filling - under) * alpha).astype(np.uint8)
    owner[region][solid] = len(pixels) + 1
    pixels.append(int(np.count_nonzero(solid)))
    return True
