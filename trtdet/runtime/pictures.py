"""Writes detections as pictures and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtdet.errors import ConfigError
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

    Detections with a score below the threshold, 0..1, are neither drawn nor listed. They are listed as
    :meth:`trtdet.runtime.prediction.Prediction.to_dict` gives them.

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
    rows: list[dict[str, Any]] = []
    pictures: list[Path] = []
    for found in detector.predict(paths, score_threshold=score_threshold, stream=True):
        pictures.append(found.save(folder / names[len(pictures)]))
        rows.append(found.to_dict())
        progress(len(pictures), len(images))
    listing = folder / "detections.json"
    write_atomically(listing, (json.dumps(rows, indent=1) + "\n").encode())
    return Pictures(folder, json=listing, pictures=tuple(pictures), detections=tuple(rows))
