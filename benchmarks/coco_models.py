"""The published detectors that scripts of this folder measure, and their scores on COCO val2017.

The folder that a script takes as ``--data`` holds ``models/NAME.onnx``, ``coco/train2017``, ``coco/val2017`` and
``coco/annotations/instances_val2017.json``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import trtdet
from trtdet.evaluation.comparison import Comparison
from trtdet.evaluation.scoring import Evaluation
from trtdet.runtime.detector import Detector

MODELS = {
    "yolox_nano": ("yolox", "best-class"),
    "yolov5n": ("yolov5", "all-classes"),
    "picodet_s": ("dfl", "all-classes"),
}
"""By file name: the shipped configuration, and the candidates of NMS that its published score was made with."""


def published_config(name: str) -> trtdet.Config:
    """The configuration of one of ``MODELS``."""
    family, candidates = MODELS[name]
    return trtdet.load_config(family).with_nms(candidates=candidates)


def val2017(coco: Path, classes: tuple[str, ...]) -> trtdet.CocoDataset:
    """The annotated images."""
    return trtdet.CocoDataset.load(coco / "annotations" / "instances_val2017.json", coco / "val2017", classes)


def scored(
    detector: Detector, coco: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> Evaluation:
    """The score of a detector on val2017."""
    return trtdet.evaluate(detector, val2017(coco, detector.classes), progress)


def points(found: Comparison) -> str:
    """The difference of mAP with its interval, in points (hundredths)."""
    return f"{100 * found.difference:+.2f} ({100 * found.low:+.2f} .. {100 * found.high:+.2f})"
