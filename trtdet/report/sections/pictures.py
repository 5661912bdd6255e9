"""The same images by two detectors, where they differ most, with boxes drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from trtdet.data import ImageStream
from trtdet.data.folders import evenly, find_images
from trtdet.data.images import draw, read_image
from trtdet.evaluation.comparison import open_pair
from trtdet.report.document import Picture, Section, Text
from trtdet.runtime.detector import Detector

LOOKED_AT = 64
_SHOWN = 6
_SCORE = 0.25
_OVERLAP = 0.5
_WIDE = 560
"""Pixels that one of two pictures is wide and high at most."""

_QUALITY = 80

Found = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]
"""Boxes (N, 4) xyxy in pixels of the image, scores (N,), classes (N,)."""


@dataclass(frozen=True)
class _Apart:
    """An image with what both found, and how far apart that is."""

    path: Path
    first: Found
    second: Found
    difference: float


def pictures_section(
    target: Path,
    reference: Path,
    images: Path,
    count: int = LOOKED_AT,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Section:
    """Runs two detectors on some images and shows those on which they differ most.

    Args:
        target: a bundle.
        reference: a bundle, or a model that is read with the configuration of the target.
        images: a folder or a list of file names.
        count: images that are looked at, at most, evenly spaced.
        progress: told of images.

    Raises:
        TrtdetError: a detector cannot be opened, or an image not be read.
    """
    paths = find_images(images)
    chosen = evenly(paths, min(count, len(paths)))
    pair = open_pair(target, reference)
    found = [_detected(detector, chosen, lambda done, total: progress("pictures", done, total)) for detector in pair]
    apart = [
        _Apart(path, first, second, difference(first, second))
        for path, first, second in zip(chosen, *found, strict=True)
    ]
    apart.sort(key=lambda one: -one.difference)
    shown = [one for one in apart[:_SHOWN] if one.difference > 0]
    said = (
        f"{len(chosen)} images by '{reference.name}' (left) and '{target.name}' (right), detections with a score of at "
        f"least {_SCORE}; the {len(shown)} on which they differ most, by the scores of what only one finds and the "
        "differences of scores of what both find."
    )
    if not shown:
        said = f"On {len(chosen)} images '{target.name}' finds exactly what '{reference.name}' finds."
    return Section(
        "Where the detections differ most", (Text((said,)), *(_picture(one, pair[0].classes) for one in shown))
    )


def difference(first: Found, second: Found) -> float:
    """How far apart two sets of detections are: the scores of what only one finds, and the differences of the scores of
    pairs of a class that overlap by at least half, taken in falling order of score."""
    total, free = 0.0, set(range(len(second[1])))
    for place in np.argsort(-first[1], kind="stable"):
        overlaps = {
            other: _iou(first[0][place], second[0][other]) for other in free if second[2][other] == first[2][place]
        }
        best = max(overlaps, key=lambda other: overlaps[other], default=None)
        if best is None or overlaps[best] < _OVERLAP:
            total += float(first[1][place])
        else:
            total += abs(float(first[1][place]) - float(second[1][best]))
            free.remove(best)
    return total + sum(float(second[1][place]) for place in free)


def _iou(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    low, high = np.maximum(first[:2], second[:2]), np.minimum(first[2:], second[2:])
    both = float(np.prod(np.maximum(high - low, 0.0)))
    areas = float(np.prod(first[2:] - first[:2])) + float(np.prod(second[2:] - second[:2]))
    return both / (areas - both) if areas > both else 0.0


def _detected(detector: Detector, paths: Sequence[Path], progress: Callable[[int, int], None]) -> list[Found]:
    found: list[Found] = []
    for batch in ImageStream(paths, detector.input, batch_size=detector.batch, on_bad="raise"):
        detections = detector(batch.images)
        for row, transform in enumerate(batch.transforms):
            boxes, scores, classes = detections.image(row)
            keep = scores >= _SCORE
            found.append((transform.to_image(boxes[keep]), scores[keep], classes[keep]))
        progress(len(found), len(paths))
    return found


def _picture(one: _Apart, classes: Sequence[str]) -> Picture:
    image = read_image(one.path)
    halves = [_small(draw(image, *found, classes)) for found in (one.second, one.first)]
    gap = np.full((halves[0].shape[0], 6, 3), 128, np.uint8)
    joined = np.ascontiguousarray(np.hstack([halves[0], gap, halves[1]])[:, :, ::-1])
    done, data = cv2.imencode(".jpg", joined, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    assert done, "a picture of under 2000 pixels can be encoded"
    counts = f"{len(one.second[1])} and {len(one.first[1])} detections"
    return Picture(bytes(data), f"{one.path.name}: {counts}, difference {one.difference:.2f}")


def _small(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width = picture.shape[:2]
    scale = min(_WIDE / width, _WIDE / height, 2.0)
    size = max(round(width * scale), 1), max(round(height * scale), 1)
    smaller = cv2.resize(picture, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
    return np.asarray(smaller, np.uint8)
