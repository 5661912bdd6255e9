"""Agreement of two detectors' detections, as average precision; no annotations are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.data import GroundTruth
from trtdet.errors import ConfigError, DataError
from trtdet.evaluation.comparison import check_classes, check_pair, check_score, warn_of_thresholds
from trtdet.evaluation.matching import IOU_THRESHOLDS, pooled
from trtdet.evaluation.metrics import CocoMetric, Found
from trtdet.evaluation.resampling import Bootstrap, mean_average_precision
from trtdet.evaluation.scoring import Evaluation


@dataclass(frozen=True)
class AgreementOptions:
    """Settings of an agreement.

    Attributes:
        threshold: lowest score of the reference detections that are the boxes to find, above 0 and below 1.
        bootstrap: settings of the interval.

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
    """Result of :func:`agree`, as fractions 0..1; 1 if both detectors find the same objects in the same order.

    Attributes:
        ap: average precision over IoU 0.50:0.95, with all classes pooled in one order of score; None without a result.
        ap50, ap75: average precision at one IoU.
        low, high: interval of ``ap``.
        map: COCO's mean over the classes that the reference finds. It is too high on few images, where most classes
            have one or two boxes and are found completely.
        per_class: average precision over IoU 0.50:0.95 of each class that the reference finds.
        images: number of images that both ran on.
        boxes: number of reference detections that were the boxes to find.
        problem: why there is no result; empty if there is one.
    """

    ap: float | None = None
    ap50: float | None = None
    ap75: float | None = None
    low: float | None = None
    high: float | None = None
    map: float | None = None
    per_class: dict[str, float] = field(default_factory=dict)
    images: int = 0
    boxes: int = 0
    options: AgreementOptions = AgreementOptions()
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
        """Plain values for JSON; figures are None if there is a ``problem``."""
        values = asdict(self)
        options = values.pop("options")
        return {**values, **options.pop("bootstrap"), **options, "problem": self.problem or None}


def agree(
    evaluation: Evaluation,
    reference: Evaluation,
    options: AgreementOptions = AgreementOptions(),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Agreement:
    """Agreement of two evaluations on the same images, see :func:`agreement_of`.

    Raises:
        ConfigError, DataError: as :func:`agreement_of`.

    Warns:
        TrtdetWarning: the NMS thresholds differ, so that more than the models is compared (only without annotations).
    """
    check_classes(*((one.file, one.metric.dataset.classes) for one in (evaluation, reference)))
    if not evaluation.metric.dataset.annotated:  # with annotations, trtdet.compare says it
        warn_of_thresholds(evaluation, reference)
    lowest = reference.thresholds.score_threshold
    if lowest > options.threshold:
        problem = (
            f"the reference suppresses scores up to {lowest:g}, so that not all of its detections with a score of at "
            f"least {options.threshold:g} are known; ask for those of at least {lowest:g}"
        )
        return Agreement(images=len(evaluation.metric.image_ids), options=options, problem=problem)
    return agreement_of(evaluation.metric, reference.metric, options, progress=progress)


def agreement_of(
    found: CocoMetric,
    reference: CocoMetric,
    options: AgreementOptions = AgreementOptions(),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Agreement:
    """Agreement of the detections ``found`` with those of a reference on the same images.

    This is COCO's average precision with the reference's detections as ground truth; annotated boxes are ignored. It
    depends on the order of the scores, not on their values: it is 1 if every box is found exactly and before any other
    detection. :func:`trtdet.evaluation.shifted_scores.score_shift` measures the values.

    Classes are pooled, as in the AP pool of Dave et al. 2021 (arXiv:2102.01066), because a mean over classes depends on
    the number of images: a class with few boxes is found completely or not at all. Boxes without an area are left out.
    The interval is a bootstrap over the images, as in :func:`trtdet.compare`; ``progress`` gets the number of resamples
    scored and their total. Raises ConfigError if the classes differ; DataError if the images differ, or the installed
    evaluator matches differently from pycocotools.
    """
    metric, _ = against_detections(found, reference, options.threshold)
    images, boxes = len(metric.image_ids), len(metric.dataset.truth)
    if not boxes:
        problem = (
            f"the reference finds nothing with a score of at least {options.threshold:g} in {images} images, so there "
            "is nothing to agree with; ask for lower scores or give other images"
        )
        return Agreement(images=images, options=options, problem=problem)
    result, together = metric.compute(), pooled(metric.class_matches().values())
    whole = np.ones((1, images), np.int32)
    check_score("the agreement", metric.engine, result.map, got=mean_average_precision(metric.matches(), whole))
    low, high = options.bootstrap.interval_of(partial(mean_average_precision, (together,)), images, progress)
    points = []
    for level in range(len(IOU_THRESHOLDS)):
        at_one = replace(together, hits=together.hits[level, None], ignored=together.ignored[level, None])
        points.append(float(mean_average_precision((at_one,), whole)[0]))
    return Agreement(
        ap=float(np.mean(points)),
        ap50=points[0],
        ap75=points[5],
        low=low,
        high=high,
        map=result.map,
        per_class={name: value for name, value in result.per_class.items() if value >= 0},
        images=images,
        boxes=boxes,
        options=options,
    )


def against_detections(
    found: CocoMetric, reference: CocoMetric, threshold: float
) -> tuple[CocoMetric, NDArray[np.float64]]:
    """Makes a metric of ``found`` whose ground truth is the reference detections with at least the threshold's score.

    Returns:
        The metric, and (M,) the reference's scores, 0..1, of its M ground-truth boxes, in their order.

    Raises ConfigError if the classes differ; DataError if the images differ.
    """
    dataset, other = found.dataset, reference.dataset
    check_pair(("the detector", found), ("the reference", reference), "agreement")
    if not found.image_ids:
        raise DataError("no image was given, so nothing can agree; call update for each image first")
    order = np.array([dataset.classes.index(name) for name in other.classes], np.int64)
    certain = {image_id: _certain(detections, threshold) for image_id, detections in reference.detections.items()}
    boxes, scores, labels = (np.concatenate(parts) for parts in zip(*certain.values(), strict=True))
    ids = np.repeat(np.array(list(certain), np.int64), [len(detections[1]) for detections in certain.values()])
    sides = boxes[:, 2:] - boxes[:, :2]
    truth = GroundTruth(
        ids,
        classes=order[labels],
        boxes=np.concatenate([boxes[:, :2], sides], axis=1),
        areas=sides.prod(axis=1),
        crowd=np.zeros(len(ids), bool),
    )
    metric = CocoMetric(replace(dataset, truth=truth), found.engine)
    for image_id, detections in found.detections.items():
        metric.update(image_id, *_certain(detections, 0.0))
    return metric, scores


def _certain(found: Found, threshold: float) -> Found:
    """Detections with at least this score; those without an area cannot match and are left out."""
    boxes, scores, classes = found
    kept = (scores >= threshold) & (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    return boxes[kept], scores[kept], classes[kept]
