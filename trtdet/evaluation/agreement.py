"""How far a detector's detections agree with those of another, as average precision; no annotations are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.data import GroundTruth
from trtdet.errors import ConfigError, DataError
from trtdet.evaluation.comparison import check_classes, check_score, warn_of_thresholds
from trtdet.evaluation.matching import IOU_THRESHOLDS, pooled
from trtdet.evaluation.metrics import CocoMetric, Found
from trtdet.evaluation.resampling import Bootstrap, draws, mean_average_precision
from trtdet.evaluation.scoring import Evaluation


@dataclass(frozen=True)
class AgreementOptions:
    """What counts as an object that the reference sees.

    Attributes:
        threshold: detections of the reference with at least this score are the boxes to find, above 0 and below 1.
        bootstrap: how the images are drawn for the interval.

    Raises:
        ConfigError: the threshold is out of range.
    """

    threshold: float = 0.25
    bootstrap: Bootstrap = Bootstrap()

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ConfigError(f"--agreement-threshold must be above 0 and below 1, got {self.threshold}")


@dataclass(frozen=True)
class Agreement:
    """What :func:`agree` found; fractions, 0..1, and 1 where both detectors find the same in the same order.

    Attributes:
        ap: average precision over IoU 0.50:0.95 of the detections of all classes in one order of score; None where
            there is none.
        ap50, ap75: likewise, at one IoU.
        low, high: the interval of ``ap``.
        map: the mean over the classes that the reference finds, as in COCO. Few images flatter it: a class with a box
            or two is found whole more often than not.
        per_class: average precision over IoU 0.50:0.95 of each class that the reference finds.
        images: how many images both ran on.
        boxes: how many detections of the reference were the boxes to find.
        options: how they were chosen, and how the images were drawn.
        problem: why there is no figure; empty where there is.
    """

    ap: float | None
    ap50: float | None
    ap75: float | None
    low: float | None
    high: float | None
    map: float | None
    per_class: dict[str, float]
    images: int
    boxes: int
    options: AgreementOptions
    problem: str = ""

    def __str__(self) -> str:
        """One sentence, in points (hundredths)."""
        if self.ap is None or self.low is None or self.high is None:
            return f"agreement: {self.problem}"
        bootstrap = self.options.bootstrap
        return (
            f"agreement: AP {100 * self.ap:.2f} ({100 * bootstrap.confidence:g} % interval {100 * self.low:.2f} .. "
            f"{100 * self.high:.2f}, bootstrap over {self.images} images) of the reference's {self.boxes} detections "
            f"with a score of at least {self.options.threshold:g}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None where there is no figure, and ``problem`` says why."""
        return {
            "ap": self.ap,
            "ap50": self.ap50,
            "ap75": self.ap75,
            "low": self.low,
            "high": self.high,
            "map": self.map,
            "confidence": self.options.bootstrap.confidence,
            "resamples": self.options.bootstrap.resamples,
            "seed": self.options.bootstrap.seed,
            "threshold": self.options.threshold,
            "images": self.images,
            "boxes": self.boxes,
            "per_class": self.per_class,
            "problem": self.problem or None,
        }


def agree(
    evaluation: Evaluation,
    reference: Evaluation,
    options: AgreementOptions = AgreementOptions(),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Agreement:
    """How far one detector's detections agree with those of another on the same images, annotated or not.

    Args:
        evaluation: the detections to be judged.
        reference: the detections that are taken for the truth.
        options: which of them, and how the images are drawn for the interval.
        progress: called with resamples done and in all.

    Raises:
        ConfigError: the classes differ.
        DataError: the images differ, or the installed evaluator matches otherwise than pycocotools.

    Warns:
        TrtdetWarning: without annotations, that the thresholds of the suppression differ, so that more than the models
            is compared.
    """
    check_classes(
        (evaluation.file, evaluation.metric.dataset.classes), (reference.file, reference.metric.dataset.classes)
    )
    if not evaluation.metric.dataset.annotated:  # with annotations, trtdet.compare says it
        warn_of_thresholds(evaluation, reference)
    lowest = reference.thresholds.score_threshold
    if lowest > options.threshold:
        images = len(evaluation.metric.image_ids)
        return _nothing(
            f"the reference suppresses scores up to {lowest:g}, so that not all of its detections with a score of at "
            f"least {options.threshold:g} are known; ask for those of at least {lowest:g}",
            images,
            options,
        )
    return agreement_of(evaluation.metric, reference.metric, options, progress)


def agreement_of(
    found: CocoMetric,
    reference: CocoMetric,
    options: AgreementOptions = AgreementOptions(),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Agreement:
    """The agreement of detections with those of a reference.

    COCO's average precision with the reference's detections, from a score on, in the place of annotated boxes: a
    detection is right where it overlaps one of them, of its class, that no better detection has taken, and all
    detections count, in falling order of score. It is 1 where every box is found exactly and before anything else,
    whatever the scores themselves are: how far scores are shifted is another question. The classes are taken together,
    as in the AP pool of Dave et al. 2021 (arXiv:2102.01066), since a mean over classes depends on the number of images:
    with few boxes a class is found whole or not at all. Boxes without an area are left out. The interval is that of
    images drawn anew, as in :func:`trtdet.compare`.

    Args:
        found: the detections to be judged.
        reference: the detections that are taken for the truth, of the same images; boxes annotated there play no part.
        options: which of them, and how the images are drawn for the interval.
        progress: called with resamples done and in all.

    Raises:
        ConfigError: the classes differ.
        DataError: the images differ, or the installed evaluator matches otherwise than pycocotools.
    """
    metric, _ = against_detections(found, reference, options.threshold)
    images, boxes = len(metric.image_ids), len(metric.dataset.truth)
    if not boxes:
        return _nothing(
            f"the reference finds nothing with a score of at least {options.threshold:g} in {images} images, so there "
            "is nothing to agree with; ask for lower scores or give other images",
            images,
            options,
        )
    result, together = metric.compute(), pooled(metric.class_matches().values())
    whole = np.ones((1, images), np.int32)
    check_score("the agreement", metric.engine, result.map, mean_average_precision(metric.matches(), whole))
    drawn: list[NDArray[np.float64]] = []
    for weights in draws(images, options.bootstrap):
        drawn.append(mean_average_precision((together,), weights))
        progress(sum(map(len, drawn)), options.bootstrap.resamples)
    low, high = options.bootstrap.interval(np.concatenate(drawn))
    at_each = [
        replace(together, hits=together.hits[level, None], ignored=together.ignored[level, None])
        for level in range(len(IOU_THRESHOLDS))
    ]
    points = [float(mean_average_precision((at_one,), whole)[0]) for at_one in at_each]
    per_class = {name: value for name, value in result.per_class.items() if value >= 0}
    ap = float(np.mean(points))
    return Agreement(ap, points[0], points[5], low, high, result.map, per_class, images, boxes, options)


def against_detections(
    found: CocoMetric, reference: CocoMetric, threshold: float
) -> tuple[CocoMetric, NDArray[np.float64]]:
    """The detections of ``found``, to be scored with those of ``reference`` as the boxes to find.

    Args:
        found: the detections to be judged.
        reference: the detections that are taken for the truth, of the same images and classes.
        threshold: their lowest score.

    Returns:
        The metric, and (M,) the scores of its M boxes to find, 0..1, in the order of its ground truth.

    Raises:
        ConfigError: the classes differ.
        DataError: the images differ.
    """
    dataset, other = found.dataset, reference.dataset
    check_classes(("the detector", dataset.classes), ("the reference", other.classes))
    if found.image_ids != reference.image_ids:
        raise DataError(
            f"the detector ran on {len(found.image_ids)} images and the reference on others "
            f"({len(reference.image_ids)}); agreement needs the same images for both"
        )
    if not found.image_ids:
        raise DataError("no image was given, so nothing can agree; call update for each image first")
    order = np.array([dataset.classes.index(name) for name in other.classes], np.int64)
    sure = {image_id: _certain(found, threshold) for image_id, found in reference.detections.items()}
    ids = np.concatenate([np.full(len(scores), image_id) for image_id, (_, scores, _) in sure.items()])
    boxes = np.concatenate([boxes for boxes, _, _ in sure.values()])
    sides = boxes[:, 2:] - boxes[:, :2]
    classes = order[np.concatenate([classes for _, _, classes in sure.values()])]
    xywh = np.concatenate([boxes[:, :2], sides], axis=1)
    truth = GroundTruth(ids.astype(np.int64), classes, xywh, sides.prod(axis=1), np.zeros(len(ids), bool))
    metric = CocoMetric(replace(dataset, truth=truth), found.engine)
    for image_id, detections in found.detections.items():
        metric.update(image_id, *_certain(detections, 0.0))
    return metric, np.concatenate([scores for _, scores, _ in sure.values()])


def _certain(found: Found, threshold: float) -> Found:
    """The detections from a score on; those without an area, which can match nothing, are left out."""
    boxes, scores, classes = found
    kept = (scores >= threshold) & (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    return boxes[kept], scores[kept], classes[kept]


def _nothing(problem: str, images: int, options: AgreementOptions) -> Agreement:
    return Agreement(None, None, None, None, None, None, {}, images, 0, options, problem)
