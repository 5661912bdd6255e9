"""The range of each channel of a tensor, with room for values beyond those of the calibration images."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

DOUBLINGS = 2  # ranges leave room for this many doublings of the number of images

SMALLEST = 1e-4
"""Minimum range of a channel, as a share of the widest channel's: a silent channel must not swallow the weights."""


@dataclass(eq=False)
class Extremes:
    """Smallest and largest value of each channel, over the even and over the odd images.

    The halves show how a maximum grows with the number of images. Deep features of a detector are large only where
    there is an object, so 64 images do not show their full range.
    """

    _halves: list[NDArray[np.float64]] = field(default_factory=list)  # (2, C) each, negated minima and maxima
    _images: int = 0

    def update(self, x: NDArray[np.float32]) -> None:
        """Adds one image's activation, float32 (C, H, W)."""
        flat = x.reshape(len(x), -1)
        ends = np.stack([-flat.min(axis=1), flat.max(axis=1)]).astype(np.float64)
        half = self._images % 2
        if len(self._halves) <= half:
            self._halves.append(ends)
        else:
            self._halves[half] = np.maximum(self._halves[half], ends)
        self._images += 1

    def ranges(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Lower and upper end of each channel, float64 (C,) each.

        From half of the images to all of them, ends grow by a factor (geometric mean over channels). The returned ends
        grow by it again for each of ``DOUBLINGS``.
        """
        ends = np.max(self._halves, axis=0)
        if len(self._halves) == 2:
            for end, even, odd in zip(ends, *self._halves, strict=True):
                both = (even > 0) & (odd > 0)
                if both.any():
                    growth = float(np.exp(np.abs(np.log(even[both] / odd[both])).mean() / 2))
                    end[end > 0] *= growth**DOUBLINGS
        return -ends[0], ends[1]
