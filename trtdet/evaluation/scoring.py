"""COCO mAP of a bundle or a model: what it costs is the difference of two of these."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trtdet.backends import RunInfo
from trtdet.config import NmsConfig
from trtdet.data import Batch, CocoDataset, ImageStream
from trtdet.detection.suppression import Detections
from trtdet.errors import ConfigError
from trtdet.evaluation.metrics import CocoMetric, CocoResult
from trtdet.runtime.detector import Detector


@dataclass(frozen=True)
class Evaluation:
    """A score, and how it came about.

    Attributes:
        result: COCO's figures.
        metric: what they were computed from, so that two evaluations can be compared image by image.
        ms_per_image: wall time of inference and suppression, without decoding the image file, in milliseconds.
        file: the file that ran.
        run_info: where it ran.
        nms: what suppressed.
        thresholds: what the suppression worked with.
    """

    result: CocoResult
    metric: CocoMetric
    ms_per_image: float
    file: str
    run_info: RunInfo
    nms: str
    thresholds: NmsConfig

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **self.result.as_dict(),
            "ms_per_image": self.ms_per_image,
            "file": self.file,
            "ran_on": str(self.run_info),
            "nms": self.nms,
        }


def evaluate(
    detector: Detector, dataset: CocoDataset, progress: Callable[[int, int], None] = lambda done, total: None
) -> Evaluation:
    """Runs a detector over an annotated data set.

    Args:
        detector: what to score.
        dataset: images and boxes; its classes are the detector's.
        progress: called with images done and in all.

    Raises:
        DataError: an image cannot be read: a score over the others would not be comparable.
    """
    (only,) = evaluate_each(detector, dataset, (detector.nms,), progress)
    return only


def record(metric: CocoMetric, batch: Batch, found: Detections) -> None:
    """Adds the detections of a batch to a metric, in pixels of the images themselves.

    Args:
        metric: over the data set that the batch is of, by index.
        batch: where each image lies in the network's input.
        found: the detections in the network's input.
    """
    for row, (index, placement) in enumerate(zip(batch.indices, batch.transforms, strict=True)):
        boxes, scores, classes = found.image(row)
        metric.update(metric.dataset.images[index].id, placement.to_image(boxes), scores, classes)


def evaluate_each(
    detector: Detector,
    dataset: CocoDataset,
    thresholds: Sequence[NmsConfig],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Evaluation]:
    """Scores one detector with several suppressions, from one pass over the images.

    Args:
        detector: what to score.
        dataset: images and boxes; its classes are the detector's.
        thresholds: of each suppression; one in the graph has its own, and only that.
        progress: called with images done and in all.

    Raises:
        DataError: an image cannot be read.
        ConfigError: other thresholds than its own for a detector that suppresses in the graph.
    """
    if detector.where != "host" and tuple(thresholds) != (detector.nms,):
        raise ConfigError("suppression in the graph has its thresholds there; score the model with --nms host")
    metrics = [CocoMetric(dataset) for _ in thresholds]
    stream = ImageStream(
        [image.path for image in dataset.images],
        detector.input,
        batch_size=detector.batch,
        on_bad="raise",
    )
    seconds, done = [0.0] * len(metrics), 0
    for batch in stream:
        started = time.perf_counter()
        outputs = detector.runner(batch.images)
        shared = time.perf_counter() - started
        for number, (metric, nms) in enumerate(zip(metrics, thresholds, strict=True)):
            started = time.perf_counter()
            found = detector.suppressed(outputs, nms)
            seconds[number] += shared + time.perf_counter() - started
            record(metric, batch, found)
        done += len(batch)
        progress(done, len(dataset.images))
    return [
        Evaluation(
            metric.compute(),
            metric,
            1000 * spent / done,
            str(detector.file),
            detector.runner.run_info,
            detector.where,
            nms,
        )
        for metric, nms, spent in zip(metrics, thresholds, seconds, strict=True)
    ]
