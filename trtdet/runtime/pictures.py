"""Writes detections as pictures and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from trtdet.data import ImageStream
from trtdet.data.images import draw, read_image
from trtdet.detection.masks import run_lengths
from trtdet.detection.placing import Placed
from trtdet.errors import ConfigError, OutputError
from trtdet.files import write_atomically
from trtdet.runtime.detector import Detector


@dataclass(frozen=True)
class Pictures:
    """Files written by :func:`infer`."""

    folder: Path
    json: Path
    pictures: tuple[Path, ...]
    detections: tuple[dict[str, Any], ...]


def infer(
    detector: Detector,
    images: Sequence[Path | str],
    folder: Path | str,
    *,
    score_threshold: float = 0.3,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Pictures:
    """Detects on image files, and writes a picture of each and one ``detections.json`` to the folder.

    Detections with a score below the threshold, 0..1, are neither drawn nor listed. Masks are listed in COCO's
    compressed form, see :func:`trtdet.detection.masks.run_lengths`; keypoints as x, y and score in the order of their
    names; rotated boxes as centre x, centre y, width, height in pixels and the angle in radians.

    Raises:
        DataError: an image cannot be read.
        ConfigError: two images have the same file name, so that one picture would replace the other.
        OutputError: the folder cannot be written.
    """
    folder, paths = Path(folder), [Path(image) for image in images]
    names = [f"{path.stem}.jpg" for path in paths]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"several images would be written as '{twice[0]}'; infer them into different folders with -o")
    stream = ImageStream(paths, detector.input, batch_size=detector.batch, on_bad="raise")
    rows: list[dict[str, Any]] = []
    pictures: list[Path] = []
    for batch in stream:
        detections = detector(batch.images)
        for row, (path, transform) in enumerate(zip(batch.paths, batch.transforms, strict=True)):
            best = detections.over(score_threshold)
            boxes, scores, classes = best.image(row)
            inside = transform.to_image(boxes)
            placed = detector.placed(best, row, boxes=inside, transform=transform)
            overlays = placed.overlays(len(inside), detector.keypoints.skeleton if detector.keypoints else ())
            picture = draw(read_image(path), inside, scores, classes=classes, names=detector.classes, overlays=overlays)
            pictures.append(folder / names[len(pictures)])
            valid, data = cv2.imencode(".jpg", picture[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, 92])
            if not valid:
                raise OutputError(
                    f"'{pictures[-1]}' could not be encoded as JPEG; is the image over 65500 pixels wide or high?"
                )
            write_atomically(pictures[-1], bytes(data))
            listed = [
                {
                    "class": detector.classes[int(classes[i])],
                    "score": round(float(scores[i]), 5),
                    "box": _rounded(inside[i], 2),
                    **_listed(placed, i),
                }
                for i in range(len(inside))
            ]
            size = {"width": transform.width, "height": transform.height}
            rows.append({"image": path.name, **size, "detections": listed})
            progress(len(pictures), len(images))
    listing = folder / "detections.json"
    write_atomically(listing, (json.dumps(rows, indent=1) + "\n").encode())
    return Pictures(folder, json=listing, pictures=tuple(pictures), detections=tuple(rows))


def _listed(placed: Placed, i: int) -> dict[str, Any]:
    """The parts of a detection as plain values for JSON."""
    parts: dict[str, Any] = {}
    if placed.masks is not None:
        parts["mask"] = run_lengths(placed.masks[i])
    if placed.keypoints is not None:
        parts["keypoints"] = [[*_rounded(row[:2], 2), *_rounded(row[2:], 5)] for row in placed.keypoints[i]]
    if placed.rotated_boxes is not None:
        box = placed.rotated_boxes[i]
        parts["rotated_box"] = [*_rounded(box[:4], 2), *_rounded(box[4:], 5)]
    return parts


def _rounded(values: NDArray[np.float32], digits: int) -> list[float]:
    return [round(float(value), digits) for value in values]
