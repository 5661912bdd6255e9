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
    """A score, and how it came about.

    Attributes:
        result: COCO's figures.
        metric: the detections behind them, so that two evaluations can be compared image by image.
        ms_per_image: wall time of inference and suppression, without decoding the image file, in milliseconds.
        file: the file that ran.
        run_info: where it ran.
        nms: where the suppression ran.
        thresholds: those of the suppression.
        masks: COCO's figures of masks; None where the detector or the annotations have none.
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
    """Runs a detector over a data set: :func:`evaluate_each` with the detector's own suppression.

    Without annotations there is no score, and the detections are for :func:`trtdet.agree`.

    Raises:
        DataError: an image cannot be read: a score over the others would not be comparable. Without annotations, over
            10 % of the images cannot be read; up to there they are left out with a warning.
    """
    return evaluate_each(detector, dataset, (detector.nms,), progress=progress, cache=cache)[0]


def evaluate_each(
    detector: Detector,
    dataset: CocoDataset,
    thresholds: Sequence[NmsConfig],
    progress: Callable[[int, int], None] = lambda done, total: None,
    cache: ImageCache | None = None,
) -> list[Evaluation]:
    """Scores one detector with several suppressions, from one pass over the images.

    Args:
        detector: the detector to score.
        dataset: images and boxes; its classes are the detector's.
        thresholds: of each suppression; a suppression in the graph has only its own.
        progress: called with images done and in all.
        cache: shared by several passes over the same images.

    Raises:
        DataError: an image cannot be read, or, without annotations, over 10 % of them.
        ConfigError: other thresholds than its own for a detector that suppresses in the graph.
    """
    if detector.nms_mode != "host" and tuple(thresholds) != (detector.nms,):
        raise ConfigError("suppression in the graph has its thresholds there; score the model with --nms host")
    runner = detector.as_written().runner
    metrics = [CocoMetric(dataset) for _ in thresholds]
    stream = ImageStream(
        [image.path for image in dataset.images],
        detector.input,
        batch_size=detector.batch,
        # A score over a part of the annotated images is not that of the set; detections alone say which they are of.
        on_bad="raise" if dataset.annotated else "skip",
        cache=cache,
    )
    seconds, done = [0.0] * len(metrics), 0
    for batch in stream:
        started = time.perf_counter()
        outputs = runner(batch.images)
        shared = time.perf_counter() - started
        for number, (metric, nms) in enumerate(zip(metrics, thresholds, strict=True)):
            started = time.perf_counter()
            found = detector.suppressed(outputs, nms)
            seconds[number] += shared + time.perf_counter() - started
            metric.update_batch(batch, found, detector.mask_threshold)
        done += len(batch)
        progress(done, len(dataset.images))
    return [
        Evaluation(
            result=metric.compute(),
            metric=metric,
            ms_per_image=1000 * spent / done,
            file=str(detector.file),
            run_info=detector.runner.run_info,
            nms=detector.nms_mode,
            thresholds=nms,
            masks=metric.compute_masks() if detector.has_masks else None,
        )
        for metric, nms, spent in zip(metrics, thresholds, seconds, strict=True)
    ]
