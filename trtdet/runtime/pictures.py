"""Pictures with boxes, and the boxes as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from trtdet.data import ImageStream
from trtdet.data.images import draw, read_image
from trtdet.errors import ConfigError, OutputError
from trtdet.files import write_atomically
from trtdet.runtime.detector import Detector


@dataclass(frozen=True)
class Pictures:
    """The files that :func:`infer` wrote."""

    folder: Path
    json: Path
    pictures: tuple[Path, ...]
    detections: tuple[dict[str, Any], ...]


def infer(
    detector: Detector,
    images: Sequence[Path],
    folder: Path,
    *,
    score_threshold: float = 0.3,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Pictures:
    """Detects on images and writes a picture for each and one ``detections.json``.

    Args:
        detector: what to run.
        images: image files.
        folder: where to write; made if missing.
        score_threshold: detections below it are neither drawn nor listed, 0 to 1.

    Raises:
        DataError: an image cannot be read.
        ConfigError: two images have the same file name, so that one picture would replace the other.
        OutputError: the folder cannot be written.
    """
    names = [f"{path.stem}.jpg" for path in images]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"several images would be written as '{twice[0]}'; infer them into different folders with -o")
    stream = ImageStream(images, detector.input, batch_size=detector.batch, on_bad="raise")
    rows: list[dict[str, Any]] = []
    pictures: list[Path] = []
    for batch in stream:
        found = detector(batch.images)
        for row, (path, transform) in enumerate(zip(batch.paths, batch.transforms, strict=True)):
            boxes, scores, classes = found.image(row)
            keep = scores >= score_threshold
            inside = transform.to_image(boxes[keep])
            picture = draw(read_image(path), inside, scores[keep], classes[keep], detector.classes)
            pictures.append(folder / names[len(pictures)])
            write_atomically(pictures[-1], _jpeg(picture, pictures[-1]))
            rows.append(
                {
                    "image": path.name,
                    "width": transform.width,
                    "height": transform.height,
                    "detections": [
                        {
                            "class": detector.classes[int(label)],
                            "score": round(float(score), 5),
                            "box": [round(float(value), 2) for value in box],
                        }
                        for box, score, label in zip(inside, scores[keep], classes[keep], strict=True)
                    ],
                }
            )
            progress(len(pictures), len(images))
    listing = folder / "detections.json"
    write_atomically(listing, (json.dumps(rows, indent=1) + "\n").encode())
    return Pictures(folder, listing, tuple(pictures), tuple(rows))


def _jpeg(picture: Any, path: Path) -> bytes:
    done, data = cv2.imencode(".jpg", np.ascontiguousarray(picture[:, :, ::-1]), [cv2.IMWRITE_JPEG_QUALITY, 92])
    if not done:
        raise OutputError(f"'{path}' could not be encoded as JPEG; is the image over 65500 pixels wide or high?")
    return bytes(data)
