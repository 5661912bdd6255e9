"""x -> scale * (x - shift), channel by channel, so that one range a tensor fits all of its channels.

The convolution's weights take the inverse: ``W x = (W / scale) (scale (x - shift)) + W shift``, exact in float.
Sources: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv:1906.04721,
and Xiao et al. 2022, "SmoothQuant", arXiv:2211.10438, for the scale; Wei et al. 2023, "Outlier Suppression+",
arXiv:2304.09145, for the shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QMAX = 127.0

DOUBLINGS = 2
"""Ranges are stretched to what so many doublings of the number of images would show."""

SMALLEST = 1e-4
"""A channel counts as at least this share of the widest one: one that was silent must not swallow the weights."""

_STEPS = 120
_SHARPNESS = 12.0


@dataclass(frozen=True, eq=False)
class ChannelMap:
    """How a tensor is quantised: ``clip(round(127 / amax * scale * (x - shift)))``.

    Attributes:
        amax: the largest magnitude that INT8 represents, of what is rounded.
        scale: float64 (C,), over 0; None for 1.
        shift: float64 (C,); None for 0.
    """

    amax: float
    scale: NDArray[np.float64] | None = None
    shift: NDArray[np.float64] | None = None

    def offset(self) -> NDArray[np.float64] | None:
        """What is added after the product with ``scale``: ``-scale * shift``."""
        if self.shift is None:
            return None
        return -self.shift if self.scale is None else -self.shift * self.scale


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

    def update(self, x: NDArray[np.float32]) -> None:
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


def _growth(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    both = (one > 0) & (other > 0)
    if not both.any():
        return 1.0
    return float(np.exp(np.abs(np.log(one[both] / other[both])).mean() / 2))


@dataclass(frozen=True, eq=False)
class Reader:
    """What a convolution that reads the tensor means for the choice of its scales.

    Attributes:
        squares: float64 (groups, out / groups, I): the square of the largest |w| over the taps, for each channel that
            an output channel reads; the groups' channels follow one another.
        importance: float64 (groups, out / groups): what a squared error of each output channel counts.
        taps: of the kernel.
        through: float64 (groups * I,): what a squared error of each input channel then counts.
    """

    squares: NDArray[np.float64]
    importance: NDArray[np.float64]
    taps: int
    through: NDArray[np.float64]

    @staticmethod
    def of(weight: NDArray[np.float64], groups: int, importance: NDArray[np.float64]) -> Reader:
        """From weights float64 (out, I, kh, kw) and importance float64 (out,)."""
        squares = np.square(weight).reshape(groups, len(weight) // groups, weight.shape[1], -1)
        grouped = importance.reshape(groups, -1)
        through = np.einsum("go,goit->gi", grouped, squares).reshape(-1)
        return Reader(squares.max(axis=3), grouped, squares.shape[3], through)


def choose_scale(
    reach: NDArray[np.float64], variance: NDArray[np.float64], readers: Sequence[Reader], weight_share: float
) -> tuple[NDArray[np.float64], float, float]:
    """The scale of each channel that leaves the least noise at the outputs of the convolutions that read the tensor.

    With ``A = max_i scale_i reach_i`` the activation's rounding noise is ``(A / 127)^2 / (12 scale_i^2)`` a channel,
    and the weights' ``(max_i |w_oi| / scale_i / 127)^2 / 12`` an element; both reach the output through the other
    operand. Their sum is lowered by gradient descent over log scale, which finds for every tensor its own compromise
    between the two extremes: 1 / reach (alpha 1 in SmoothQuant; the solution for depthwise convolutions) and equal
    weights (alpha 0).

    Args:
        reach: float64 (C,): the largest magnitude of each channel.
        variance: float64 (C,): of each channel; the mean's share is left to the bias.
        readers: the convolutions.
        weight_share: what the weights' noise counts, 0..1: under 1 where their rounding is chosen, not just nearest.

    Returns:
        float64 (C,), geometric mean 1, the amax of what is scaled so, and the noise that is left.
    """
    reach = np.maximum(reach, SMALLEST * reach.max())
    log_reach = np.log(reach)
    # Where every output reads one channel, that channel's scale is its weights' too and costs them nothing.
    depthwise = all(one.squares.shape[2] == 1 for one in readers)
    u = -log_reach if depthwise else -0.75 * log_reach
    momentum, power = np.zeros_like(u), np.zeros_like(u)
    best, best_loss = u, np.inf
    for step in range(1 if depthwise else _STEPS):
        loss, slope = _noise(u, log_reach, variance, readers, weight_share)
        if loss < best_loss:
            best, best_loss = u, loss
        slope /= max(loss, 1e-300)
        # Adam (Kingma and Ba 2015) with a falling rate.
        momentum = 0.9 * momentum + 0.1 * slope
        power = 0.98 * power + 0.02 * slope * slope
        rate = 0.12 * 0.97**step
        u = u - rate * momentum / (1 - 0.9 ** (step + 1)) / (np.sqrt(power / (1 - 0.98 ** (step + 1))) + 1e-8)
    scale: NDArray[np.float64] = np.exp(best - best.mean())
    return scale, float((scale * reach).max()), best_loss


def _noise(
    u: NDArray[np.float64],
    log_reach: NDArray[np.float64],
    variance: NDArray[np.float64],
    readers: Sequence[Reader],
    weight_share: float,
) -> tuple[float, NDArray[np.float64]]:
    """The noise for scales ``exp(u)`` and its gradient."""
    # A smooth maximum: the true one moves a single channel a step.
    raised = log_reach + u
    top = raised.max()
    share = np.exp(_SHARPNESS * (raised - top))
    total = share.sum()
    amax_squared = np.exp(2 * (top + np.log(total) / _SHARPNESS))
    inverse = np.exp(-2 * u)
    spread = np.exp(2 * u) * variance
    loss, slope = 0.0, np.zeros_like(u)
    for one in readers:
        activation = amax_squared * one.through * inverse
        loss += float(activation.sum())
        slope += activation.sum() * 2 * share / total - 2 * activation
        groups, _, depth = one.squares.shape
        scaled = one.squares * inverse.reshape(groups, 1, depth)
        widest = scaled.argmax(axis=2)
        step = weight_share * one.taps * one.importance * np.take_along_axis(scaled, widest[..., None], axis=2)[..., 0]
        through = spread.reshape(groups, depth)
        per_output = step * through.sum(axis=1, keepdims=True)
        loss += float(per_output.sum())
        slope += (2 * step.sum(axis=1, keepdims=True) * through).reshape(-1)
        channels = widest + depth * np.arange(groups)[:, None]
        slope -= 2 * np.bincount(channels.reshape(-1), per_output.reshape(-1), len(u))
    return loss, slope
