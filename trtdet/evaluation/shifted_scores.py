"""Score shift between two detectors: the thresholds of one that correspond to thresholds of the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trtdet.evaluation.agreement import against_detections
from trtdet.evaluation.comparison import check_pair
from trtdet.evaluation.matching import ClassMatches, Floats, pooled
from trtdet.evaluation.resampling import Bootstrap, draws
from trtdet.evaluation.scoring import Evaluation
from trtdet.tables import Column, Table

THRESHOLDS = (0.25, 0.5)
"""Thresholds of the reference: usual in demos, and usual in services."""

LOWEST = 0.05
"""Lower scores are ignored, because nobody sets a threshold there."""

FEWEST = 20
"""Fewer detections give no threshold: the standard error of their precision can exceed 0.11."""

_HELD = 2_000_000
"""Detections times resamples in memory at a time: 16 MB an array."""

Basis = Literal["precision", "detections"]
"""What two equal thresholds have in common: precision or, without annotations, the number of detections."""

Weights = NDArray[np.int32]


@dataclass(frozen=True)
class EqualThreshold:
    """A threshold of the reference, and the detector's equal threshold, which is None for the reason in ``problem``.

    The reference keeps ``detections`` detections, those with at least the score ``reference``; ``precision`` is theirs,
    0..1, or None without annotations. ``low`` and ``high`` are the interval of ``threshold``.
    """

    reference: float
    detections: int
    precision: float | None
    threshold: float | None = None
    low: float | None = None
    high: float | None = None
    problem: str = ""

    def __str__(self) -> str:
        if self.threshold is None or self.low is None or self.high is None:
            return self.problem
        return f"{self.threshold:.3f} ({self.low:.3f} .. {self.high:.3f})"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an empty ``problem`` is None."""
        return {**asdict(self), "problem": self.problem or None}


@dataclass(frozen=True)
class ScoreRatio:
    """Ratios of the detector's scores to the reference's, for objects that both find.

    ``median`` is None if both find no common object; ``low`` and ``high`` are its interval. ``pairs`` is the number of
    common objects, among those with a reference score of at least 0.25.
    """

    median: float | None
    low: float | None
    high: float | None
    pairs: int

    def __str__(self) -> str:
        if self.median is None or self.low is None or self.high is None:
            return "no object is found by both"
        return (
            f"{self.pairs} objects are found by both: the median score is {self.median:.3f} of the reference's "
            f"({self.low:.3f} .. {self.high:.3f})"
        )


@dataclass(frozen=True)
class ScoreShift:
    """Result of :func:`score_shift`: for each of :data:`THRESHOLDS`, one equal threshold for all classes, and the same
    for each class on its own.
    """

    basis: Basis
    overall: tuple[EqualThreshold, ...]
    per_class: Mapping[str, tuple[EqualThreshold, ...]]
    ratio: ScoreRatio
    bootstrap: Bootstrap

    def __str__(self) -> str:
        """A table of the classes that have a threshold, with a note on the others."""
        equal = {
            "precision": "precision (against the annotations, IoU 0.50)",
            "detections": "number of detections (precision needs annotations)",
        }[self.basis]
        rows = [["all", *map(str, self.overall)]]
        for name, entries in self.per_class.items():
            if any(entry.threshold is not None for entry in entries):
                rows.append([name, *map(str, entries)])
        silent, notes = len(self.per_class) + 1 - len(rows), [str(self.ratio)]
        if silent:
            few = f"{silent} of {len(self.per_class)} classes"
            notes.append(f"{few} have too few detections for a threshold of their own")
        columns: list[Column | str] = ["class", *(Column(f"for {threshold:g}") for threshold in THRESHOLDS)]
        return str(Table(columns, rows, title=f"thresholds with the reference's {equal}", notes=notes))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "basis": self.basis,
            "overall": [entry.as_dict() for entry in self.overall],
            "per_class": {name: [entry.as_dict() for entry in entries] for name, entries in self.per_class.items()},
            "score_ratio": asdict(self.ratio),
            **asdict(self.bootstrap),
        }


def score_shift(
    evaluation: Evaluation,
    reference: Evaluation,
    bootstrap: Bootstrap = Bootstrap(),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ScoreShift:
    """Finds the detector's thresholds that equal 0.25 and 0.5 of a reference on the same images and annotations.

    With annotations, equal thresholds have equal precision. The precision at a threshold is interpolated as in PASCAL
    VOC and COCO (Everingham et al. 2010, section 4.2): the highest at this or a lower threshold, so that it rises with
    the threshold. Without annotations, equal thresholds give the same number of detections (equipercentile method of
    Kolen and Brennan 2014, Test Equating, chapter 2). Of several equal thresholds, the nearest to the reference's is
    chosen, so that a detector compared with itself gets the same thresholds. The intervals are a bootstrap over the
    images, as in :func:`trtdet.compare`. ``progress`` gets the number of classes searched and their total.

    Raises:
        ConfigError: the classes differ.
        DataError: the images differ.
    """
    first, second = evaluation.metric, reference.metric
    check_pair((evaluation.file, first), (reference.file, second), "a shift of scores")
    basis: Basis = "precision" if first.dataset.annotated else "detections"
    floors = (evaluation.thresholds.score_threshold, reference.thresholds.score_threshold)
    weights = np.concatenate(list(draws(len(first.image_ids), bootstrap)))
    search = _Search(basis, floors=floors, bootstrap=bootstrap, weights=weights)
    ours, theirs = first.class_matches(), second.class_matches()
    overall = search.thresholds(*(_Scores.of(pooled(matches.values())) for matches in (ours, theirs)))
    per_class = {}
    for number, name in enumerate(ours, 1):
        per_class[name] = search.thresholds(_Scores.of(ours[name]), _Scores.of(theirs[name]))
        progress(number, len(ours))
    return ScoreShift(
        basis,
        overall=overall,
        per_class=per_class,
        ratio=_ratio(evaluation, reference, bootstrap, weights=weights),
        bootstrap=bootstrap,
    )


@dataclass(frozen=True, eq=False)
class _Scores:
    """N detections of one or more classes in descending order of score."""

    images: NDArray[np.int64]
    scores: Floats
    right: NDArray[np.bool_]
    """Matched at IoU 0.50."""
    counted: NDArray[np.bool_]
    """Right or wrong, not on a crowd."""

    @staticmethod
    def of(matches: ClassMatches) -> _Scores:
        kept = slice(np.count_nonzero(matches.scores >= LOWEST))
        return _Scores(
            matches.images[kept],
            scores=matches.scores[kept],
            right=matches.hits[0, kept],
            counted=~matches.ignored[0, kept],
        )

    @property
    def distinct(self) -> tuple[Floats, NDArray[np.int64]]:
        """(K,) distinct scores, descending, and the position of the last detection with each."""
        ends = np.flatnonzero(np.append(self.scores[1:] != self.scores[:-1], True)[: len(self.scores)])
        return self.scores[ends], ends

    def levels(self, basis: Basis, weights: Weights) -> Floats:
        """(B, K): interpolated precision, or minus the number of detections, at each distinct score for (B, I) weights.

        Levels never rise from a score to a lower one.
        """
        ends = self.distinct[1]
        drawn = weights[:, self.images]
        if basis == "detections":
            return -np.cumsum(drawn, axis=1, dtype=np.float64)[:, ends]
        right, counted = (
            np.cumsum(drawn * kind, axis=1, dtype=np.float64)[:, ends] for kind in (self.right, self.counted)
        )
        precision = np.divide(right, counted, out=np.zeros_like(right), where=counted > 0)
        return np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]


@dataclass(frozen=True, eq=False)
class _Search:
    """Finds equal thresholds."""

    basis: Basis
    floors: tuple[float, float]
    """NMS score thresholds of detector and reference: no detection has this or a lower score."""
    bootstrap: Bootstrap
    weights: Weights
    """(B, I), how often each resample contains each image."""

    def thresholds(self, ours: _Scores, theirs: _Scores) -> tuple[EqualThreshold, ...]:
        """The equal threshold, or the reason why there is none, for each of :data:`THRESHOLDS`."""
        counts = [int(np.count_nonzero(theirs.scores >= threshold)) for threshold in THRESHOLDS]
        few = [
            EqualThreshold(reference, count, None, problem=f"{count} detections, under {FEWEST}")
            for reference, count in zip(THRESHOLDS, counts, strict=True)
        ]
        if max(counts) < FEWEST:
            return tuple(few)
        measured, levels = self._equal_at(ours, theirs, np.ones((1, self.weights.shape[1]), np.int32))
        rows = max(1, _HELD // max(1, len(ours.scores), len(theirs.scores)))
        parts = [self.weights[start : start + rows] for start in range(0, len(self.weights), rows)]
        drawn = np.concatenate([self._equal_at(ours, theirs, part)[0] for part in parts], axis=1)
        lowest, equal = max(LOWEST, self.floors[0]), []
        for unknown, (value,), (level,), values in zip(few, measured, levels, drawn, strict=True):
            reference, count, problem = unknown.reference, unknown.detections, ""
            precision = float(level) if self.basis == "precision" else None
            if count < FEWEST:
                equal.append(unknown)
                continue
            if self.floors[1] > reference:
                problem = f"the reference suppresses scores up to {self.floors[1]:g}"
            elif precision == 0:
                problem = f"none of {count} detections is right"
            elif np.isinf(value):
                problem = "at no threshold" if value > 0 else f"below {lowest:g}"
            if problem:
                equal.append(EqualThreshold(reference, count, precision, problem=problem))
            else:
                low, high = self.bootstrap.interval(np.clip(values, lowest, 1.0))
                equal.append(EqualThreshold(reference, count, precision, threshold=float(value), low=low, high=high))
        return tuple(equal)

    def _equal_at(self, ours: _Scores, theirs: _Scores, weights: Weights) -> tuple[Floats, Floats]:
        """(R, B) equal thresholds for R thresholds of the reference, and (R, B) levels of the reference there."""
        own, others = (scores.levels(self.basis, weights) for scores in (ours, theirs))
        ends = [int(np.count_nonzero(theirs.distinct[0] >= threshold)) - 1 for threshold in THRESHOLDS]
        targets = [others[:, end] if end >= 0 else np.zeros(len(weights)) for end in ends]
        equal = [
            _equal(ours.distinct[0], own, target, near=near) for target, near in zip(targets, THRESHOLDS, strict=True)
        ]
        return np.stack(equal), np.stack(targets)


def _equal(scores: Floats, levels: Floats, target: Floats, near: float) -> Floats:
    """(B,) thresholds, one a resample: the nearest to ``near`` with the level ``target``, (B,).

    ``scores``, (K,), are distinct and descending; ``levels``, (B, K), are those of :meth:`_Scores.levels`. The result
    is infinite if the target is above all levels, minus infinite if it is below all.
    """
    if not len(scores):
        return np.full(len(target), -np.inf)
    # Between a score and the next lower one, every threshold keeps the same detections.
    reached = np.count_nonzero(levels >= target[:, None], axis=1)
    above = np.count_nonzero(levels > target[:, None], axis=1)
    highest = scores[np.minimum(above, np.maximum(reached - 1, 0))]
    lowest = np.append(scores, 0.0)[reached]
    thresholds: Floats = np.clip(near, lowest, highest)
    thresholds[reached == 0] = np.inf
    thresholds[above == len(scores)] = -np.inf
    return thresholds


def _ratio(evaluation: Evaluation, reference: Evaluation, bootstrap: Bootstrap, weights: Weights) -> ScoreRatio:
    metric, scores = against_detections(evaluation.metric, reference.metric, THRESHOLDS[0])
    matches = pooled(metric.class_matches().values())
    paired = matches.boxes >= 0
    ratios = matches.scores[paired] / scores[matches.boxes[paired]]
    if not len(ratios):
        return ScoreRatio(None, low=None, high=None, pairs=0)
    order = np.argsort(ratios, kind="stable")
    ratios, images = ratios[order], matches.images[paired][order]
    until = np.cumsum(weights[:, images], axis=1)
    drawn = until[:, -1] > 0
    middle = np.count_nonzero(2 * until[drawn] < until[drawn, -1:], axis=1)
    low, high = bootstrap.interval(ratios[middle])
    return ScoreRatio(float(np.median(ratios)), low=low, high=high, pairs=len(ratios))
