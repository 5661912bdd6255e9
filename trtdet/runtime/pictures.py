"""Writes detections as pictures and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import cv2

from trtdet.data import ImageStream
from trtdet.data.images import draw, read_image
from trtdet.detection.masks import paste, run_lengths
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
    compressed form, see :func:`trtdet.detection.masks.run_lengths`.

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
            boxes, scores, classes = detections.image(row)
            keep = scores >= score_threshold
            inside, grids = transform.to_image(boxes[keep]), detections.image_masks(row)
            pairs = zip(grids[keep], inside, strict=True) if grids is not None else ()
            size = (transform.height, transform.width)
            masks = [paste(grid, box, *size, detector.mask_threshold) for grid, box in pairs]
            picture = draw(
                read_image(path), inside, scores[keep], classes=classes[keep], names=detector.classes, masks=masks
            )
            pictures.append(folder / names[len(pictures)])
            valid, data = cv2.imencode(".jpg", picture[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, 92])
            if not valid:
                raise OutputError(
                    f"'{pictures[-1]}' could not be encoded as JPEG; is the image over 65500 pixels wide or high?"
                )
            write_atomically(pictures[-1], bytes(data))
            listed: list[dict[str, Any]] = []
            for label, score, box, mask in zip_longest(classes[keep], scores[keep], inside, masks):
                corners = [round(float(value), 2) for value in box]
                listed.append({"class": detector.classes[int(label)], "score": round(float(score), 5), "box": corners})
                if mask is not None:
                    listed[-1]["mask"] = run_lengths(mask)
            rows.append({"image": path.name, "width": size[1], "height": size[0], "detections": listed})
            progress(len(pictures), len(images))
    listing = folder / "detections.json"
    write_atomically(listing, (json.dumps(rows, indent=1) + "\n").encode())
    return Pictures(folder, json=listing, pictures=tuple(pictures), detections=tuple(rows))
