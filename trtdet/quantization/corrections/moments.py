"""First and second moments of a convolution's windows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_COLUMNS = 4608
"""Wider windows (over 512 channels under a 3x3 kernel) have no full second moments: solving grows with the cube."""


class Moments:
    """Sums over sampled windows, from which mean, variance and covariance come.

    They are float64 sums of deviations from the first sample's mean. An input that hardly varies around a large mean
    has a variance that is lost where float32 squares are summed, or where the square of the whole mean is taken off.

    Args:
        groups, width: of the samples.
        covariance: whether full second moments are wanted; windows over ``MOST_COLUMNS`` wide have none.
    """

    def __init__(self, groups: int, width: int, covariance: bool) -> None:
        self.dense = covariance and width <= MOST_COLUMNS
        self._count = 0
        self._origin = np.zeros((groups, width, 1))
        self._sum = np.zeros((groups, width))
        self._products = np.zeros((groups, width, width) if self.dense else (groups, width))

    def update(self, windows: NDArray[np.float32]) -> Moments:
        """Adds samples, float32 (groups, width, places)."""
        if not self._count:
            self._origin = windows.mean(axis=2, dtype=np.float64, keepdims=True)
        deviations = windows - self._origin
        self._count += windows.shape[2]
        self._sum += deviations.sum(axis=2)
        if self.dense:
            self._products += deviations @ deviations.transpose(0, 2, 1)
        else:
            self._products += np.einsum("gip,gip->gi", deviations, deviations)
        return self

    def covariance(self) -> NDArray[np.float64]:
        """float64 (groups, width, width); only where ``dense``."""
        mean = self._sum / self._count
        found: NDArray[np.float64] = self._products / self._count - mean[:, :, None] * mean[:, None, :]
        return found

    def variance(self) -> NDArray[np.float64]:
        """float64 (groups, width), at least 0."""
        products = np.einsum("gii->gi", self._products) if self.dense else self._products
        found: NDArray[np.float64] = np.maximum(products / self._count - np.square(self._sum / self._count), 0)
        return found

    def through(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The variance of ``rows @ windows``: (groups, out). Without full moments, as if columns were independent."""
        if self.dense:
            found: NDArray[np.float64] = np.einsum("goi,goi->go", rows @ self.covariance(), rows)
            return np.maximum(found, 0)
        independent: NDArray[np.float64] = np.einsum("goi,gi->go", np.square(rows), self.variance())
        return independent
