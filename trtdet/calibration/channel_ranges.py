"""The range of each channel of a tensor, with room for what the calibration images did not show."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DOUBLINGS = 2
"""Ranges are stretched to what so many doublings of the number of images would show."""

SMALLEST = 1e-4
"""A channel counts as at least this share of the widest channel: a silent channel must not swallow the weights."""


class Extremes:
    """The smallest and the largest value of each channel, over the even and over the odd images.

    The two halves say how fast a maximum grows with the number of images: a detector's deep features are large only
    where there is an object, so that sixty-four images do not show all of their range, while pixels and the first
    layers have shown theirs.
    """

    def __init__(self) -> None:
        self._low: list[NDArray[np.float64]] = []
        self._high: list[NDArray[np.float64]] = []
        self._images = 0

    def update(self, x: NDArray[np.float32]) -> Extremes:
        """Adds one image's activation, float32 (C, H, W)."""
        flat = x.reshape(len(x), -1)
        low, high = flat.min(axis=1).astype(np.float64), flat.max(axis=1).astype(np.float64)
        half = self._images % 2
        if len(self._low) <= half:
            self._low.append(low)
            self._high.append(high)
        else:
            self._low[half] = np.minimum(self._low[half], low)
            self._high[half] = np.maximum(self._high[half], high)
        self._images += 1
        return self

    def ranges(self, doublings: float = DOUBLINGS) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The lower and the upper end of each channel, float64 (C,) each, with room for what was not seen.

        From half of the images to all of them an end grows by some factor, averaged over the channels as a geometric
        mean; the same growth is added for every doubling.
        """
        low, high = np.min(self._low, axis=0), np.max(self._high, axis=0)
        if len(self._low) == 2:
            low = low * np.where(low < 0, _growth(-self._low[0], -self._low[1]) ** doublings, 1.0)
            high = high * np.where(high > 0, _growth(self._high[0], self._high[1]) ** doublings, 1.0)
        return low, high


def _growth(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    both = (first > 0) & (second > 0)
    if not both.any():
        return 1.0
    return float(np.exp(np.abs(np.log(first[both] / second[both])).mean() / 2))
