"""Pictures on which two detectors differ most, with both detectors' boxes drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from trtdet.data import ImageStream
from trtdet.data.folders import evenly, find_images
from trtdet.data.images import draw, read_image
from trtdet.evaluation.comparison import open_pair
from trtdet.evaluation.matching import iou, xywh
from trtdet.progress import Progress, silent
from trtdet.report.document import Picture, Section, Text
from trtdet.runtime.detector import Detector

_SHOWN = 6
_SCORE = 0.25
_OVERLAP = 0.5
_WIDE = 560
"""Largest width and height of one of the two pictures, in pixels."""

Found = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]
"""Boxes (N, 4) xyxy in pixels of the image, scores (N,), classes (N,)."""


def pictures_section(
    target: Path, reference: Path, images: Path, count: int = 64, progress: Progress = silent
) -> Section:
    """Runs two detectors on at most ``count`` evenly spaced images and shows those on which they differ most.

    ``target`` is a bundle, ``reference`` a bundle or a model, which is read with the target's configuration, and
    ``images`` a folder or a list of file names. Raises TrtdetError: a detector cannot be opened, or an image cannot be
    read.
    """
    paths = find_images(images)
    paths = evenly(paths, min(count, len(paths)))
    pair = open_pair(target, reference)
    first, second = (_detections(detector, paths, progress) for detector in pair)
    distances = [difference(*both) for both in zip(first, second, strict=True)]
    largest = [place for place in np.argsort(-np.array(distances), kind="stable")[:_SHOWN] if distances[place] > 0]
    text = (
        f"{len(paths)} images by '{reference.name}' (left) and '{target.name}' (right), detections with a score of at "
        f"least {_SCORE}; the {len(largest)} on which they differ most, by the scores of what only one finds and the "
        "differences of scores of what both find."
    )
    if not largest:
        text = f"On {len(paths)} images '{target.name}' finds exactly what '{reference.name}' finds."
    shown = [paths[place] for place in largest]
    drawings = [_drawings(detector, shown) for detector in (pair[1], pair[0])]
    pictures = []
    for place, *sides in zip(largest, *drawings, strict=True):
        counts = len(second[place][1]), len(first[place][1])
        caption = f"{paths[place].name}: {counts[0]} and {counts[1]} detections, difference"
        pictures.append(Picture(_side_by_side(sides), f"{caption} {distances[place]:.2f}"))
    return Section("Where the detections differ most", (Text((text,)), *pictures), folded=False)


def difference(first: Found, second: Found) -> float:
    """Distance of two sets of detections: the sum of unmatched scores and of score differences of matched pairs.

    A pair has the same class and an IoU of at least 0.5; matching is greedy, by falling score.
    """
    mine, theirs = (xywh(np.asarray(boxes, np.float64)) for boxes, *_ in (first, second))
    overlaps = iou(mine, theirs, np.zeros(len(theirs), bool))
    overlaps[first[2][:, None] != second[2]] = 0.0
    total, free = 0.0, np.ones(len(theirs), bool)
    for place in np.argsort(-first[1], kind="stable"):
        best = int(np.argmax(overlaps[place] * free)) if free.any() else -1
        if best < 0 or overlaps[place, best] * free[best] < _OVERLAP:
            total += float(first[1][place])
        else:
            total += abs(float(first[1][place]) - float(second[1][best]))
            free[best] = False
    return total + float(second[1][free].sum())


def _detections(detector: Detector, paths: Sequence[Path], progress: Progress) -> list[Found]:
    detections: list[Found] = []
    for batch in ImageStream(paths, detector.input, batch_size=detector.batch, on_bad="raise"):
        output = detector(batch.images)
        for row, transform in enumerate(batch.transforms):
            boxes, scores, classes = output.image(row)
            keep = scores >= _SCORE
            detections.append((transform.to_image(boxes[keep]), scores[keep], classes[keep]))
        progress("pictures", len(detections), len(paths))
    return detections


def _drawings(detector: Detector, paths: Sequence[Path]) -> list[NDArray[np.uint8]]:
    """The images with a detector's boxes, masks, keypoints and rotated boxes; a second run, as few are shown."""
    drawings: list[NDArray[np.uint8]] = []
    for batch in ImageStream(paths, detector.input, batch_size=detector.batch, on_bad="raise"):
        output = detector(batch.images).over(_SCORE)
        for row, (path, transform) in enumerate(zip(batch.paths, batch.transforms, strict=True)):
            boxes, scores, classes = output.image(row)
            inside = transform.to_image(boxes)
            placed = detector.placed(output, row, boxes=inside, transform=transform)
            overlays = placed.overlays(len(inside), detector.keypoints.skeleton if detector.keypoints else ())
            image = read_image(path)
            drawings.append(draw(image, inside, scores, classes=classes, names=detector.classes, overlays=overlays))
    return drawings


def _side_by_side(sides: Sequence[NDArray[np.uint8]]) -> bytes:
    """Both detectors' pictures as one JPEG file."""
    shape, halves = sides[0].shape, []
    scale = min(_WIDE / max(shape[:2]), 2.0)
    size = max(round(shape[1] * scale), 1), max(round(shape[0] * scale), 1)
    for drawing in sides:
        how = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
        halves.append(np.asarray(cv2.resize(drawing, size, interpolation=how), np.uint8))
    gap = np.full((halves[0].shape[0], 6, 3), 128, np.uint8)
    joined = np.ascontiguousarray(np.hstack([halves[0], gap, halves[1]])[:, :, ::-1])
    encoded, data = cv2.imencode(".jpg", joined, [cv2.IMWRITE_JPEG_QUALITY, 80])
    assert encoded, "a picture of under 2000 pixels can be encoded"
    return bytes(data)
