"""COCO mAP of a bundle or a model, and the recall of a two-stage detector's proposals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.backends import OnnxRunner, RunInfo, Runner, at_once, side_by_side
from trtdet.config import InputConfig, NmsConfig
from trtdet.data import CocoDataset, ImageBatch, ImageCache, ImageStream
from trtdet.errors import ConfigError, DataError, ModelError
from trtdet.evaluation.metrics import CocoMetric, CocoResult
from trtdet.evaluation.parts import NAMES, KeypointResult, Of, RotatedResult
from trtdet.passes.two_stage import BOXES, REAL, up_to_proposals
from trtdet.runtime.detector import Detector


@dataclass(frozen=True)
class Evaluation:
    """Result of :func:`evaluate`.

    Attributes:
        metric: the detections, so that two evaluations can be compared image by image.
        ms_per_image: milliseconds of inference and NMS for each image, without decoding its file; those of runs side by
            side are shared out.
        file: engine or ONNX file that ran.
        nms: where NMS ran, with these ``thresholds``.
        masks, keypoints, rotated_boxes: scores of these; None if the detector or the annotations have none.
    """

    result: CocoResult
    metric: CocoMetric
    ms_per_image: float
    file: str
    run_info: RunInfo
    nms: str
    thresholds: NmsConfig
    masks: CocoResult | None = None
    keypoints: KeypointResult | None = None
    rotated_boxes: RotatedResult | None = None

    def score_of(self, of: Of) -> CocoResult | KeypointResult | RotatedResult:
        """The score of boxes or of a part. Raises DataError: the evaluation has none."""
        results = (self.result, self.masks, self.keypoints, self.rotated_boxes)
        result = dict(zip(NAMES, results, strict=True))[of]
        if result is None:
            raise DataError(f"'{self.file}' was scored without {of.replace('_', ' ')}; give annotations that have them")
        return result

    @property
    def scored_parts(self) -> tuple[Of, ...]:
        """The parts beside boxes that have a score."""
        return tuple(of for of in NAMES if of != "boxes" and getattr(self, of) is not None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **self.result.as_dict(),
            **{of: self.score_of(of).as_dict() for of in self.scored_parts},
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

    Raises DataError if an image cannot be read, or, without annotations, over 10 % of them; ConfigError if NMS is in
    the graph, and other thresholds are given.
    """
    if detector.nms_mode != "host" and tuple(thresholds) != (detector.nms,):
        raise ConfigError("suppression in the graph has its thresholds there; score the model with --nms host")
    runner = detector.as_written().runner
    sigmas = () if detector.keypoints is None else detector.keypoints.sigmas
    metrics = [CocoMetric(dataset, sigmas=sigmas) for _ in thresholds]
    stream = ImageStream(
        [image.path for image in dataset.images],
        detector.input,
        batch_size=detector.batch,
        # A score of only some annotated images would not be comparable with other scores of the set.
        on_bad="raise" if dataset.annotated else "skip",
        cache=cache,
    )
    seconds, image_count = [0.0] * len(metrics), 0

    def run(runner: Runner, batch: ImageBatch) -> tuple[ImageBatch, Mapping[str, NDArray[Any]], float]:
        started = time.perf_counter()
        outputs = runner(batch.images)
        return batch, outputs, (time.perf_counter() - started) / at_once(runner)

    with closing(side_by_side(runner, run, iter(stream))) as runs:
        for batch, outputs, shared in runs:
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
            keypoints=metric.compute_keypoints() if detector.keypoints is not None else None,
            rotated_boxes=metric.compute_rotated_boxes() if detector.has_rotated_boxes else None,
        )
        for metric, nms, spent in zip(metrics, thresholds, seconds, strict=True)
    ]


@dataclass(frozen=True)
class ProposalRecall:
    """Recall of the proposals that enter the second stage, against the annotated boxes of any class.

    ``ar100`` and ``ar1000`` are the mean recall over IoU 0.50:0.05:0.95 of the best 100 and 1000 proposals of each
    image, 0..1; -1 without boxes. ``proposals`` is the mean number of proposals per image.
    """

    ar100: float
    ar1000: float
    proposals: float


def proposal_recall(
    model: onnx.ModelProto,
    preprocess: InputConfig,
    dataset: CocoDataset,
    progress: Callable[[int, int], None] = lambda done, total: None,
    cache: ImageCache | None = None,
) -> ProposalRecall:
    """Runs the first stage of a two-stage model on a data set, with onnxruntime without optimisations.

    The model is a result of :func:`trtdet.passes.rewrite`, float or with Q/DQ nodes; it is not changed. Raises
    ModelError if the model's proposals were not found; DataError if an image cannot be read.
    """
    part = up_to_proposals(model)
    if part is None:
        raise ModelError("the proposals of the model were not found between its first suppression and its regions")
    runner = OnnxRunner(part, written=True)
    metric, counts = CocoMetric(dataset), list[int]()
    paths = [image.path for image in dataset.images]
    for batch in ImageStream(paths, preprocess, on_bad="raise", cache=cache):
        outputs = runner.feed({runner.input: batch.images})
        boxes = outputs[BOXES][outputs[REAL]] if REAL in outputs else outputs[BOXES]
        # The best come first; only the order of the scores matters.
        scores = -np.arange(len(boxes), dtype=np.float64)
        (index,), (transform,) = batch.indices, batch.transforms
        metric.update(dataset.images[index].id, transform.to_image(boxes), scores, np.zeros(len(boxes), np.int64))
        counts.append(len(boxes))
        progress(len(counts), len(paths))
    best, all_of_them = metric.recall(100, 1000)
    return ProposalRecall(best, all_of_them, sum(counts) / len(counts))
