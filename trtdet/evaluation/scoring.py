"""COCO mAP of a bundle or a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trtdet.backends import RunInfo
from trtdet.config import NmsConfig
from trtdet.data import CocoDataset, ImageCache, ImageStream
from trtdet.errors import ConfigError
from trtdet.evaluation.metrics import CocoMetric, CocoResult
from trtdet.runtime.detector import Detector


@dataclass(frozen=True)
class Evaluation:
    """Result of :func:`evaluate`.

    Attributes:
        metric: the detections, so that two evaluations can be compared image by image.
        ms_per_image: wall time of inference and NMS, without decoding the image file, in milliseconds.
        file: engine or ONNX file that ran.
        run_info: device and library that ran it.
        nms: where NMS ran.
        thresholds: NMS thresholds.
        masks: mask scores; None if the detector or the annotations have no masks.
    """

    result: CocoResult
    metric: CocoMetric
    ms_per_image: float
    file: str
    run_info: RunInfo
    nms: str
    thresholds: NmsConfig
    masks: CocoResult | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **self.result.as_dict(),
            **({"masks": self.masks.as_dict()} if self.masks else {}),
            "ms_per_image": self.ms_per_image,
            "file": self.file,
            "ran_on": str(self.run_info),
            "nms": self.nms,
        }


def evaluate(
    detector: Detector,
    dataset: CocoDataset,
    progress: Callable[[int, int], None] = lambda done, total: None,
    cache: ImageCache | None = None,
) -> Evaluation:
    """Runs a detector on a data set with its own NMS thresholds, see :func:`evaluate_each`.

    Without annotations there is no score; the detections are for :func:`trtdet.agree`.

    Raises:
        DataError: an image cannot be read. Without annotations, up to 10 % of the images are skipped with a warning.
    """
    return evaluate_each(detector, dataset, (detector.nms,), progress=progress, cache=cache)[0]


def evaluate_each(
    detector: Detector,
    dataset: CocoDataset,
    thresholds: Sequence[NmsConfig],
    progress: Callable[[int, int], None] = lambda done, total: None,
    cache: ImageCache | None = None,
) -> list[Evaluation]:
    """Scores one detector with several NMS thresholds in one pass over the images.

    Args:
        dataset: images and boxes, with the detector's classes.
        thresholds: thresholds of each evaluation; NMS in the graph allows only the detector's own.
        progress: called with the number of images run and their total.
        cache: decoded images, shared by several passes.

    Raises:
        DataError: an image cannot be read, or, without annotations, over 10 % of them.
        ConfigError: NMS is in the graph, and other thresholds are given.
    """
    if detector.nms_mode != "host" and tuple(thresholds) != (detector.nms,):
        raise ConfigError("suppression in the graph has its thresholds there; score the model with --nms host")
    runner = detector.as_written().runner
    metrics = [CocoMetric(dataset) for _ in thresholds]
    stream = ImageStream(
        [image.path for image in dataset.images],
        detector.input,
        batch_size=detector.batch,
        # A score of only some annotated images would not be comparable with other scores of the set.
        on_bad="raise" if dataset.annotated else "skip",
        cache=cache,
    )
    seconds, image_count = [0.0] * len(metrics), 0
    for batch in stream:
        started = time.perf_counter()
        outputs = runner(batch.images)
        shared = time.perf_counter() - started
        for number, (metric, nms) in enumerate(zip(metrics, thresholds, strict=True)):
            started = time.perf_counter()
            detections = detector.suppressed(outputs, nms)
            seconds[number] += shared + time.perf_counter() - started
            metric.update_batch(batch, detections, detector.mask_threshold)
        image_count += len(batch)
        progress(image_count, len(dataset.images))
    return [
        Evaluation(
            result=metric.compute(),
            metric=metric,
            ms_per_image=1000 * spent / image_count,
            file=str(detector.file),
            run_info=detector.runner.run_info,
            nms=detector.nms_mode,
            thresholds=nms,
            masks=metric.compute_masks() if detector.has_masks else None,
        )
        for metric, nms, spent in zip(metrics, thresholds, seconds, strict=True)
    ]
