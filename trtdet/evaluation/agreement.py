"""Agreement of two detectors' detections, as average precision; no annotations are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.data import GroundTruth
from trtdet.detection.masks import areas
from trtdet.detection.rotated import corners
from trtdet.errors import ConfigError, DataError
from trtdet.evaluation.comparison import PartScore, check_classes, check_pair, check_score, warn_of_thresholds
from trtdet.evaluation.matching import IOU_THRESHOLDS, pooled
from trtdet.evaluation.metrics import CocoMetric
from trtdet.evaluation.parts import NAMES, FoundParts, Of
from trtdet.evaluation.resampling import Bootstrap, mean_average_precision
from trtdet.evaluation.scoring import Evaluation

_SEEN = 0.5
"""Lowest score of a keypoint of the reference that counts."""
_MOST_POSES = 100  # as for boxes; COCO's 20 would leave out what the reference finds


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
        of: what is compared.
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
    of: Of = "boxes"

    def __str__(self) -> str:
        """One sentence, in points (hundredths)."""
        name = "agreement" if self.of == "boxes" else f"agreement of {self.of.replace('_', ' ')}"
        if self.ap is None or self.low is None or self.high is None:
            return f"{name}: {self.problem}"
        bootstrap = self.options.bootstrap
        return (
            f"{name}: AP {100 * self.ap:.2f} ({100 * bootstrap.confidence:g} % interval {100 * self.low:.2f} .. "
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
    of: Of = "boxes",
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
        return Agreement(images=len(evaluation.metric.image_ids), options=options, problem=problem, of=of)
    return agreement_of(evaluation.metric, reference.metric, options, progress=progress, of=of)


def agreeing_parts(evaluation: Evaluation, reference: Evaluation) -> tuple[Of, ...]:
    """The parts beside boxes that both detected on all images, which can agree."""
    both = (evaluation.metric, reference.metric)
    found = [parts for metric in both for parts in metric.parts.values()]
    return tuple(of for of in NAMES if of != "boxes" and found and all(parts.has(of) for parts in found))


def part_agreements(evaluation: Evaluation, reference: Evaluation) -> dict[Of, PartScore]:
    """The agreement of each part that both have, with a reference on the same images.

    Raises:
        ConfigError, DataError: as :func:`agreement_of`; DataError if the reference has too little of a part.
    """
    scores: dict[Of, PartScore] = {}
    for of in agreeing_parts(evaluation, reference):
        part = agree(evaluation, reference, of=of)
        if part.ap is None or part.low is None or part.high is None:
            raise DataError(f"the agreement of {of.replace('_', ' ')} cannot be measured: {part.problem}")
        scores[of] = PartScore(map=None, difference=part.ap - 1, low=part.low - 1, high=part.high - 1)
    return scores


def agreement_of(
    found: CocoMetric,
    reference: CocoMetric,
    options: AgreementOptions = AgreementOptions(),
    progress: Callable[[int, int], None] = lambda done, total: None,
    of: Of = "boxes",
) -> Agreement:
    """Agreement of the detections ``found`` with those of a reference on the same images.

    This is COCO's average precision with the reference's detections as ground truth; annotated boxes are ignored. It
    depends on the order of the scores, not on their values: it is 1 if every box is found exactly and before any other
    detection. :func:`trtdet.evaluation.shifted_scores.score_shift` measures the values.

    Classes are pooled, as in the AP pool of Dave et al. 2021 (arXiv:2102.01066), because a mean over classes depends on
    the number of images: a class with few boxes is found completely or not at all. Boxes without an area are left out.
    With ``of`` masks, keypoints or rotated boxes, these are compared, as in :func:`trtdet.compare`. The reference's
    keypoints with a score under 0.5 do not count; the size of an object is that of its box.
    The interval is a bootstrap over the images, as in :func:`trtdet.compare`; ``progress`` gets the number of resamples
    scored and their total. Raises ConfigError if the classes differ; DataError if the images differ, or the installed
    evaluator matches differently from pycocotools.
    """
    metric, _ = against_detections(found, reference, options.threshold, of=of)
    images, boxes = len(metric.image_ids), len(metric.dataset.truth)
    if not boxes:
        problem = (
            f"the reference finds nothing with a score of at least {options.threshold:g} in {images} images, so there "
            "is nothing to agree with; ask for lower scores or give other images"
        )
        return Agreement(images=images, options=options, problem=problem, of=of)
    whole, matches = np.ones((1, images), np.int32), metric.class_matches(of)
    together, score = pooled(matches.values()), metric.map_of(of)
    check_score("the agreement", metric.engine, score, got=mean_average_precision(metric.matches(of), whole))
    per_class = {
        name: float(mean_average_precision((one,), whole)[0]) for name, one in matches.items() if one.truths.any()
    }
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
        map=score,
        per_class=per_class,
        images=images,
        boxes=boxes,
        options=options,
        of=of,
    )


def against_detections(
    found: CocoMetric, reference: CocoMetric, threshold: float, of: Of = "boxes"
) -> tuple[CocoMetric, NDArray[np.float64]]:
    """Makes a metric of ``found`` whose ground truth is the reference detections with at least the threshold's score,
    and the part ``of`` them.

    Returns:
        The metric, and (M,) the reference's scores, 0..1, of its M ground-truth boxes, in their order.

    Raises ConfigError if the classes differ; DataError if the images differ.
    """
    dataset, other = found.dataset, reference.dataset
    check_pair(("the detector", found), ("the reference", reference), "agreement")
    if not found.image_ids:
        raise DataError("no image was given, so nothing can agree; call update for each image first")
    order = np.array([dataset.classes.index(name) for name in other.classes], np.int64)
    rows = {image_id: _certain(reference, image_id, threshold, of=of) for image_id in reference.detections}
    certain = {
        image_id: tuple(values[rows[image_id]] for values in detections)
        for image_id, detections in reference.detections.items()
    }
    boxes, scores, labels = (np.concatenate(values) for values in zip(*certain.values(), strict=True))
    ids = np.repeat(np.array(list(certain), np.int64), [len(detections[1]) for detections in certain.values()])
    sides = boxes[:, 2:] - boxes[:, :2]
    truth = GroundTruth(
        ids,
        classes=order[labels],
        boxes=np.concatenate([boxes[:, :2], sides], axis=1),
        areas=sides.prod(axis=1),
        crowd=np.zeros(len(ids), bool),
        **_truth_of(of, [reference.parts[image_id].of(rows[image_id]) for image_id in certain]),
    )
    metric = CocoMetric(replace(dataset, truth=truth), found.engine, found.sigmas, most_poses=_MOST_POSES)
    for image_id, detections in found.detections.items():
        kept = _certain(found, image_id, 0.0, of=of)
        own_boxes, own_scores, own_labels = (values[kept] for values in detections)
        parts = found.parts[image_id].of(kept)
        metric.update(image_id, own_boxes, own_scores, classes=own_labels, parts=parts)
    return metric, scores


def _truth_of(of: Of, parts: Sequence[FoundParts]) -> dict[str, Any]:
    """The part of detections as annotations: fields of GroundTruth."""
    if of == "keypoints":
        points = [part.keypoints for part in parts if part.keypoints is not None]
        truth = np.concatenate(points).astype(np.float64)
        truth[..., 2] = np.where(truth[..., 2] >= _SEEN, 2, 0)
        return {"keypoints": truth}
    forms: list[Any] = []
    for part in parts:
        if of == "masks":
            forms += part.masks or ()
        elif of == "rotated_boxes" and part.rotated_boxes is not None:
            forms += [[points.reshape(-1).tolist()] for points in corners(part.rotated_boxes.astype(np.float64))]
    segmentations = np.empty(len(forms), object)
    for row, form in enumerate(forms):
        segmentations[row] = form
    return {} if of == "boxes" else {"segmentations": segmentations}


def _certain(metric: CocoMetric, image_id: int, threshold: float, of: Of) -> NDArray[np.bool_]:
    """Which detections have at least this score; boxes and masks without an area cannot match and are left out."""
    boxes, scores, _ = metric.detections[image_id]
    kept: NDArray[np.bool_] = (scores >= threshold) & (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
    masks = metric.parts[image_id].masks
    if of == "masks" and masks is not None:
        kept &= np.array(areas(masks)) > 0
    return kept
