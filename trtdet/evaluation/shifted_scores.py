"""How far a detector's scores are shifted against those of another: the thresholds that serve as the other's did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trtdet.evaluation.agreement import against_detections
from trtdet.evaluation.comparison import check_pair
from trtdet.evaluation.matching import ClassMatches, pooled
from trtdet.evaluation.resampling import Bootstrap, draws
from trtdet.evaluation.scoring import Evaluation
from trtdet.tables import Column, Table

THRESHOLDS = (0.25, 0.5)
"""The reference's thresholds: what demos draw, and what services take."""

LOWEST = 0.05
"""Scores below it are not looked at: nobody sets a threshold there."""

FEWEST = 20
"""With fewer detections a precision has a standard error of up to 0.11, and a threshold says nothing."""

_HELD = 2_000_000
"""How many detections, over several resamples, are held at a time: 16 MB an array."""

Basis = Literal["precision", "detections"]
"""What the two thresholds have in common: precision against annotations, or, without any, how much is detected."""

Weights = NDArray[np.int32]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class EqualThreshold:
    """A threshold of the reference, and the detector's own that serves as well.

    Attributes:
        reference: the threshold of the reference; detections with at least this score are taken.
        detections: how many the reference has there.
        precision: of these, the part that is right, 0..1; None without annotations.
        threshold: of the detector; None where there is none.
        low, high: the interval of ``threshold``.
        problem: why there is none; empty where there is.
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
        """Plain values for JSON; None where there is no threshold, and ``problem`` says why."""
        return {**asdict(self), "problem": self.problem or None}


@dataclass(frozen=True)
class ScoreRatio:
    """The scores of objects that both find, as parts of the reference's.

    Attributes:
        median: of the ratios; None where no object is found by both.
        low, high: the interval of the median.
        pairs: how many objects, of those that the reference gives a score of at least 0.25.
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
    """What :func:`score_shift` found.

    Attributes:
        basis: what the thresholds have in common.
        overall: for one threshold for all classes, at each of :data:`THRESHOLDS`.
        per_class: likewise, for a threshold of each class.
        ratio: the scores of objects that both find.
        bootstrap: how the images were drawn for the intervals.
    """

    basis: Basis
    overall: tuple[EqualThreshold, ...]
    per_class: Mapping[str, tuple[EqualThreshold, ...]]
    ratio: ScoreRatio
    bootstrap: Bootstrap

    def __str__(self) -> str:
        """A table of the classes that have a threshold, and a line on the rest."""
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
            "per_class": {name: [entry.as_dict() for entry in found] for name, found in self.per_class.items()},
            "score_ratio": asdict(self.ratio),
            **asdict(self.bootstrap),
        }


def score_shift(
    evaluation: Evaluation,
    reference: Evaluation,
    bootstrap: Bootstrap = Bootstrap(),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ScoreShift:
    """At which thresholds a detector serves as the reference does at 0.25 and at 0.5.

    With annotations the thresholds have equal precision: of the detections with at least that score, the same part is
    right. Precision at a threshold is interpolated as in PASCAL VOC and COCO (Everingham et al. 2010, section 4.2), the
    highest at it or at a lower one, so that it rises with the threshold. Without annotations both thresholds give as
    many detections (the equipercentile method of Kolen and Brennan 2014, Test Equating, chapter 2): where precision
    falls with the number of detections as the reference's does, the two are the same threshold. Where several serve
    equally, the nearest to the reference's is taken, so that a detector has its own thresholds. The intervals are those
    of images drawn anew, as in :func:`trtdet.compare`.

    Args:
        evaluation: the detector's detections.
        reference: the reference's, of the same images and annotations.
        bootstrap: how the images are drawn.
        progress: called with classes done and in all.

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
    """N detections of one or more classes in falling order of score."""

    images: NDArray[np.int64]
    scores: Floats
    right: NDArray[np.bool_]
    """Matched at IoU 0.50."""
    counted: NDArray[np.bool_]
    """Right or wrong; the others are on a crowd."""

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
        """(K,) scores, falling, and the position of the last detection with each."""
        ends = np.flatnonzero(np.append(self.scores[1:] != self.scores[:-1], True)[: len(self.scores)])
        return self.scores[ends], ends

    def levels(self, basis: Basis, weights: Weights) -> Floats:
        """What a threshold at each distinct score gives on (B, I) weights: (B, K), nowhere rising from a score to a
        lower one: interpolated precision, or minus the number of detections."""
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
    """The scores that the suppressions of both leave out, up to and with them."""
    bootstrap: Bootstrap
    weights: Weights
    """(B, I), the resamples."""

    def thresholds(self, ours: _Scores, theirs: _Scores) -> tuple[EqualThreshold, ...]:
        """At each of :data:`THRESHOLDS` of the reference: the threshold, or the reason why there is none."""
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
        """(R, B) thresholds for each of R of the reference, and (R, B) its levels there."""
        own, others = (scores.levels(self.basis, weights) for scores in (ours, theirs))
        ends = [int(np.count_nonzero(theirs.distinct[0] >= threshold)) - 1 for threshold in THRESHOLDS]
        wanted = [others[:, end] if end >= 0 else np.zeros(len(weights)) for end in ends]
        equal = [
            _equal(ours.distinct[0], own, level, near=near) for level, near in zip(wanted, THRESHOLDS, strict=True)
        ]
        return np.stack(equal), np.stack(wanted)


def _equal(scores: Floats, levels: Floats, wanted: Floats, near: float) -> Floats:
    """The thresholds whose level is the one wanted, for each resample the nearest to ``near``.

    Args:
        scores: (K,), distinct, falling.
        levels: (B, K), see :meth:`_Scores.levels`.
        wanted: (B,).
        near: a threshold.

    Returns:
        (B,); infinite where the level is above all of ``levels``, minus infinite where it is below all.
    """
    if not len(scores):
        return np.full(len(wanted), -np.inf)
    # Between a score and the next lower one, every threshold takes the same detections.
    reached = np.count_nonzero(levels >= wanted[:, None], axis=1)
    above = np.count_nonzero(levels > wanted[:, None], axis=1)
    highest = scores[np.minimum(above, np.maximum(reached - 1, 0))]
    lowest = np.append(scores, 0.0)[reached]
    found: Floats = np.clip(near, lowest, highest)
    found[reached == 0] = np.inf
    found[above == len(scores)] = -np.inf
    return found


def _ratio(evaluation: Evaluation, reference: Evaluation, bootstrap: Bootstrap, weights: Weights) -> ScoreRatio:
    metric, scores = against_detections(evaluation.metric, reference.metric, THRESHOLDS[0])
    matches = pooled(metric.class_matches().values())
    found = matches.boxes >= 0
    ratios = matches.scores[found] / scores[matches.boxes[found]]
    if not len(ratios):
        return ScoreRatio(None, low=None, high=None, pairs=0)
    order = np.argsort(ratios, kind="stable")
    ratios, images = ratios[order], matches.images[found][order]
    until = np.cumsum(weights[:, images], axis=1)
    drawn = until[:, -1] > 0
    middle = np.count_nonzero(2 * until[drawn] < until[drawn, -1:], axis=1)
    low, high = bootstrap.interval(ratios[middle])
    return ScoreRatio(float(np.median(ratios)), low=low, high=high, pairs=len(ratios))
