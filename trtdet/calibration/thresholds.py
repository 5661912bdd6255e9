"""Threshold rules: pure functions from a histogram to amax, the largest magnitude that INT8 represents.

Larger values saturate; smaller ones are rounded to a multiple of ``amax / 127``. Rules do not change the histogram, so
another rule needs no inference.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trtdet.calibration.histograms import Histogram
from trtdet.errors import ConfigError

LEVELS = 128  # magnitudes of symmetric INT8: 0 to 127

KL_BINS = 2048
_KL_CANDIDATES = np.arange(LEVELS, KL_BINS + 1)
_KL_EDGES = -(-(_KL_CANDIDATES[:, None] * np.arange(LEVELS + 1)[None, :]) // LEVELS)
"""Row i: where each of the 128 levels begins if the first ``_KL_CANDIDATES[i]`` bins are kept."""

_LOG_SIZES = np.log(np.maximum(np.arange(KL_BINS // LEVELS + 2), 1))
_TINY = float(np.finfo(np.float64).tiny)


def minmax(histogram: Histogram) -> float:
    """The largest magnitude: nothing saturates."""
    return histogram.amax


def percentile(histogram: Histogram, percent: float = 99.99) -> float:
    """The smallest bin edge that ``percent`` % of the magnitudes do not exceed, at most the largest magnitude.

    ``percent`` is over 0 and up to 100; TensorRT's BERT demonstration uses 99.99. Raises ConfigError if ``percent`` is
    out of range.
    """
    if not 0 < percent <= 100:
        raise ConfigError(f"percentile must be over 0 and up to 100, got {percent}; the usual value is 99.99")
    running = np.cumsum(histogram.counts)
    needed = math.ceil(running[-1] * (percent / 100) - 1e-9)
    index = int(np.searchsorted(running, needed))
    return min((index + 1) * histogram.width, histogram.amax)


def entropy(histogram: Histogram) -> float:
    """The amax with the least loss of information: TensorRT's KL rule over 2048 bins.

    For every i from 128 to 2048, the reference P is the first i bins, with the tail added to the last of them. The
    candidate Q is those bins without the tail, merged into 128 levels and spread evenly over each level's non-empty
    bins. The i with the smallest KL(P || Q), the largest if several tie, gives ``amax = (i + 0.5) * width``. Source:
    Migacz, "8-bit Inference with TensorRT", GTC 2017, slides 34 to 38. As in NVIDIA's own implementations, the bin at
    zero (padding, silent channels) gets its neighbour's count. A candidate that clips more values than it keeps is left
    out, which the slides do not need: of values far from zero, P and Q would be one equal bin at its very edge.

    With S_g the sum and n_g the number of non-empty bins of level g, Q is constant ``S_g / n_g`` there, so

        N * KL = sum(P log P) - N log N + N log M - sum_g S_g log(S_g / n_g) - tail * log(Q_last)

    where N counts P and M counts Q. Prefix sums over the bins give all 1921 candidates at once.
    """
    counts, width = histogram.rebinned(KL_BINS)
    bins = counts.astype(np.float64)
    bins[0] = bins[1]
    last = int(np.flatnonzero(bins)[-1]) + 1 if bins.any() else 0
    if last <= LEVELS:
        return histogram.amax
    candidates = _KL_CANDIDATES
    below = np.concatenate([[0.0], np.cumsum(bins)])
    filled = np.concatenate([[0], np.cumsum(bins > 0)])
    logs = np.concatenate([[0.0], np.cumsum(_xlogx(bins))])
    total = below[-1]
    inside = below[candidates]
    tail = total - inside
    sums = np.diff(below.take(_KL_EDGES), axis=1)
    sizes = np.diff(filled.take(_KL_EDGES), axis=1)
    final = bins[candidates - 1]
    # An empty level has the sum 0, so any finite logarithm works.
    level = np.log(np.maximum(sums, _TINY)) - _LOG_SIZES.take(sizes)
    loss = (
        logs[candidates - 1] + _xlogx(final + tail) - total * np.log(total) + total * np.log(np.maximum(inside, _TINY))
    )
    loss -= np.einsum("ij,ij->i", sums, level) + tail * level[:, -1]
    # If an empty last bin gets the tail, Q = 0 where P > 0: an infinite loss.
    loss[((tail > 0) & (final == 0)) | (tail > inside)] = np.inf
    best = int(len(loss) - 1 - np.argmin(loss[::-1]))
    return float(min((candidates[best] + 0.5) * width, histogram.amax))


def _xlogx(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values * np.log(np.where(values > 0, values, 1.0))


def mse(histogram: Histogram) -> float:
    """The amax with the least mean squared quantisation error, out of 100 equal steps up to the largest magnitude.

    Source: Choukroun et al. 2019, arXiv:1902.06822.
    """
    counts, width = histogram.rebinned(KL_BINS)
    last = int(np.flatnonzero(counts)[-1]) + 1
    weights = counts[:last].astype(np.float64)
    centres = (np.arange(last) + 0.5) * width
    amaxes = histogram.amax * np.arange(1, 101) / 100
    steps = (amaxes / (LEVELS - 1))[:, None]
    rounded = np.minimum(np.rint(centres[None, :] / steps), LEVELS - 1) * steps
    losses = np.square(rounded - centres[None, :]) @ weights
    return float(amaxes[int(np.argmin(losses))])


RULES: dict[str, Callable[[Histogram], float]] = {
    "minmax": minmax,
    "entropy": entropy,
    "percentile": percentile,
    "mse": mse,
}
"""Rules by the name that ``--calib`` takes."""
