"""The range of each channel of a tensor, with room for values beyond those of the calibration images."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DOUBLINGS = 2
"""Doublings of the number of images that ranges leave room for."""

SMALLEST = 1e-4
"""A channel counts as at least this share of the widest channel: a silent channel must not swallow the weights."""


class Extremes:
    """The smallest and the largest value of each channel, over the even and over the odd images.

    The two halves say how fast a maximum grows with the number of images: a detector's deep features are large only
    where there is an object, so that sixty-four images do not show all of their range.
    """

    def __init__(self) -> None:
        self._halves: list[NDArray[np.float64]] = []  # (2, C) each, the smallest values times -1 and the largest
        self._images = 0

    def update(self, x: NDArray[np.float32]) -> Extremes:
        """Adds one image's activation, float32 (C, H, W)."""
        flat = x.reshape(len(x), -1)
        ends = np.stack([-flat.min(axis=1), flat.max(axis=1)]).astype(np.float64)
        half = self._images % 2
        if len(self._halves) <= half:
            self._halves.append(ends)
        else:
            self._halves[half] = np.maximum(self._halves[half], ends)
        self._images += 1
        return self

    def ranges(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The lower and the upper end of each channel, float64 (C,) each.

        From half of the images to all of them an end grows by some factor, averaged over the channels as a geometric
        mean. The ends grow by it once more for every doubling.
        """
        ends = np.max(self._halves, axis=0)
        if len(self._halves) == 2:
            for end, even, odd in zip(ends, *self._halves, strict=True):
                both = (even > 0) & (odd > 0)
                if both.any():
                    growth = float(np.exp(np.abs(np.log(even[both] / odd[both])).mean() / 2))
                    end[end > 0] *= growth**DOUBLINGS
        return -ends[0], ends[1]
