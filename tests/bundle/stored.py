"""Bundles of each manifest schema, as a version of its time wrote them.

``python tests/bundle/stored.py`` writes them anew, for which only a new schema is a reason.
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from pathlib import Path

import cv2
import numpy as np

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import task_models
from models import SMALL_MODEL

import trtdet
from benchmarks.cards import drawn
from trtdet.config import Config, load_config
from trtdet.demo import shapes
from trtdet.evaluation.guessing import guess_config

FOLDER = Path(__file__).parents[1] / "fixtures" / "bundles"
PICTURE = "picture.png"
EXPECTED = "detections.json"
THRESHOLD = 0.05  # both networks are unsure, as their weights are random


def write(name: str, model: Path, config: Config, images: Path, work: Path) -> None:
    """Builds a bundle, and stores it with a picture and what it detects there."""
    options = trtdet.BuildOptions(
        backend="onnxruntime",
        guard="off",
        effort="quick",
        plan=trtdet.PlanOptions(int8_all=True),
        calibration=trtdet.CalibrationOptions(images=images, check_input=False),
    )
    bundle = trtdet.build(model, config, work / name, options).bundle
    picture = sorted(images.iterdir())[0]
    (result,) = trtdet.Detector.open(bundle.path).predict(picture, score_threshold=THRESHOLD)
    expected = {"boxes": result.boxes.tolist(), "scores": result.scores.tolist(), "classes": result.classes.tolist()}
    (work / EXPECTED).write_text(json.dumps(expected))
    FOLDER.mkdir(exist_ok=True)
    with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz") as archive:
        archive.add(bundle.path, name)
        archive.add(work / EXPECTED, EXPECTED)
        archive.add(picture, PICTURE)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shapes.generate(work, "calibration", 4)
        write(
            "schema1",
            SMALL_MODEL,
            config=load_config("shapes").with_nms(score_threshold=0.05),
            images=work / "calibration",
            work=work,
        )
        cards = work / "cards"
        cards.mkdir()
        for seed in range(4):
            cv2.imwrite(str(cards / f"{seed}.png"), np.ascontiguousarray(drawn(seed)[0][..., ::-1]))
        model = task_models.save(work, "pose")
        write("schema2", model, config=guess_config(model).config, images=cards, work=work)


if __name__ == "__main__":
    main()
