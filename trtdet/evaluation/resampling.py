"""Bootstrap over images: COCO's mAP of every resample from one matching."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.errors import ConfigError
from trtdet.evaluation.matching import ClassMatches

RECALLS = np.linspace(0.0, 1.0, 101)
"""Bit-identical to COCO's recall points."""

_DRAWN = 100
"""Resamples scored between two reports of progress."""

_HELD = 4_000_000
"""Detections times resamples in memory at a time: 32 MB an array."""


@dataclass(frozen=True)
class Bootstrap:
    """Settings of a bootstrap interval.

    Attributes:
        resamples: at least 100.
        confidence: share of the resamples within the interval, above 0 and below 1.
        seed: the same seed gives the same interval.

    Raises:
        ConfigError: a value is out of range.
    """

    resamples: int = 1000
    confidence: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        if self.resamples < 100:
            raise ConfigError(
                f"--resamples must be at least 100 for an interval to mean something, got {self.resamples}"
            )
        if not 0 < self.confidence < 1:
            raise ConfigError(f"confidence must be above 0 and below 1, got {self.confidence}")

    def interval(self, values: NDArray[np.float64]) -> tuple[float, float]:
        """Percentile interval of (B,) values, one a resample; NaN values are left out."""
        tail = 50 * (1 - self.confidence)
        low, high = np.nanpercentile(values, [tail, 100 - tail])
        return float(low), float(high)

    def interval_of(
        self,
        figure: Callable[[NDArray[np.int32]], NDArray[np.float64]],
        images: int,
        progress: Callable[[int, int], None],
    ) -> tuple[float, float]:
        """Interval of a ``figure``, which computes (B,) values from (B, I) weights of I images."""
        values: list[NDArray[np.float64]] = []
        for weights in draws(images, self):
            values.append(figure(weights))
            progress(sum(map(len, values)), self.resamples)
        return self.interval(np.concatenate(values))


def mean_average_precision(matches: Sequence[ClassMatches], weights: NDArray[np.int32]) -> NDArray[np.float64]:
    """COCO's mAP of several resamples of the images, from the matches of all classes that have a box to find.

    ``weights``, (B, I), say how often each of B resamples contains each of I images. Returns (B,), 0..1: the mean over
    IoU thresholds, recall points and the classes that have a box in the resample; NaN if none has. If all weights are
    1, it is the evaluators' mAP.
    """
    total, classes = np.zeros(len(weights)), np.zeros(len(weights), np.int64)
    for of_class in matches:
        rows = max(1, _HELD // max(1, len(of_class.images)))
        for start in range(0, len(weights), rows):
            part = slice(start, start + rows)
            truths = weights[part] @ of_class.truths
            present = np.flatnonzero(truths) + start
            total[present] += _average_precision(of_class, weights[present], truths[present - start])
            classes[present] += 1
    mean: NDArray[np.float64] = np.full(len(weights), np.nan)
    return np.divide(total, classes, out=mean, where=classes > 0)


def _average_precision(
    matches: ClassMatches, weights: NDArray[np.int32], truths: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Average precision, (B,), of a class for (B, I) weights; ``truths`` (B,) are the numbers of boxes, all above 0."""

    def cumulative(chosen: Any) -> NDArray[np.int64]:
        """Cumulative number of the chosen detections, in descending order of score."""
        return np.cumsum(np.take(weights, matches.images[chosen], axis=1), axis=1, dtype=np.int64)

    # Recall and the precision envelope change only at hits, so only the sums at hits are used.
    detected = cumulative(slice(None))
    result: NDArray[np.float64] = np.zeros(len(weights))
    for hit, ignored in zip(matches.hits, matches.ignored, strict=True):
        hits, skipped = np.flatnonzero(hit), np.flatnonzero(ignored)
        if not hits.size:
            continue
        right = cumulative(hits)
        counted = detected[:, hits]
        if skipped.size:
            before = np.pad(cumulative(skipped), ((0, 0), (1, 0)))
            counted = counted - before[:, np.searchsorted(skipped, hits)]
        # The evaluators add this too, against division by zero.
        precision = right / (counted + np.spacing(1))
        envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        # Each hit contributes its precision at the recall points that are first reached there.
        reached = np.searchsorted(RECALLS, right / truths[:, None], side="right")
        result += np.einsum("bh,bh->b", np.diff(reached, axis=1, prepend=0), envelope)
    return result / (len(RECALLS) * len(matches.hits))


def draws(images: int, bootstrap: Bootstrap) -> Iterator[NDArray[np.int32]]:
    """Yields the resamples in blocks of (B, I) weights: how often each resample contains each image."""
    generator = np.random.default_rng(bootstrap.seed)
    for start in range(0, bootstrap.resamples, _DRAWN):
        size = min(_DRAWN, bootstrap.resamples - start)
        yield generator.multinomial(images, np.full(images, 1 / images), size=size).astype(np.int32)
