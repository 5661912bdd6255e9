"""How far detections have moved: two models' decoded boxes and scores, as one number.

What never becomes a detection does not count: pairs and boxes under a score of 0.05 are left out, and the others count
by their score.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SEEN = 0.05


class HeadError:
    """Gathers the error of one model against a reference over images."""

    def __init__(self) -> None:
        self._scores = np.zeros(2)
        self._boxes = np.zeros(3)

    def update(
        self,
        reference: tuple[NDArray[np.float32], NDArray[np.float32]],
        other: tuple[NDArray[np.float32], NDArray[np.float32]],
    ) -> HeadError:
        """Adds one image.

        Args:
            reference: decoded boxes float32 (N, 4), x1 y1 x2 y2 in pixels, and scores float32 (N, C), 0..1.
            other: the same of the model that is judged.
        """
        (boxes, scores), (moved, changed) = reference, other
        # Few pairs count, and this runs for every variant of a model.
        pairs = np.flatnonzero((scores > _SEEN) | (changed > _SEEN))
        before, after = (array.reshape(-1)[pairs].astype(np.float64) for array in (scores, changed))
        weight = np.maximum(before, after)
        self._scores += float((weight * np.square(after - before)).sum()), float(weight.sum())
        found = np.unique(np.flatnonzero(scores > _SEEN) // scores.shape[1])
        shares = scores[found].max(axis=1).astype(np.float64) if found.size else np.zeros(0)
        lost = 1 - _iou(boxes[found], moved[found])
        self._boxes += float((shares * lost).sum()), float((shares * np.square(lost)).sum()), float(shares.sum())
        return self

    @staticmethod
    def weight(scores: NDArray[np.float32]) -> float:
        """What an image counts: the sum of the scores (N, C) of all that may become a detection."""
        return float(scores[scores > _SEEN].sum(dtype=np.float64))

    @property
    def distance(self) -> float:
        """The root mean square of the score error plus the mean of 1 - IoU; 0 where nothing was detected."""
        return float(np.sqrt(_mean(*self._scores)) + _mean(self._boxes[0], self._boxes[2]))

    @property
    def power(self) -> float:
        """The mean square of the score error plus that of 1 - IoU: what independent causes add up in."""
        return _mean(*self._scores) + _mean(self._boxes[1], self._boxes[2])


def _mean(total: float, weight: float) -> float:
    return float(total / weight) if weight > 0 else 0.0


def _iou(first: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float32]:
    """IoU of boxes (N, 4), x1 y1 x2 y2, pair by pair."""
    low, high = np.maximum(first[:, :2], other[:, :2]), np.minimum(first[:, 2:], other[:, 2:])
    shared = np.prod(np.clip(high - low, 0, None), axis=1)
    union = np.prod(first[:, 2:] - first[:, :2], axis=1) + np.prod(other[:, 2:] - other[:, :2], axis=1) - shared
    found: NDArray[np.float32] = np.where(union > 0, shared / np.maximum(union, 1e-9), 1.0)
    return found
