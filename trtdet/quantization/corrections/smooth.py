"""``smooth``: x -> scale * x for each channel, so that one range fits all channels of a tensor.

The scales minimise the expected noise. Sources: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization
and Bias Correction", arXiv:1906.04721, and Xiao et al. 2022, "SmoothQuant", arXiv:2211.10438. FP8 gains nothing: its
rounding error is relative, so scaling does not change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from trtdet.calibration.channel_ranges import SMALLEST
from trtdet.quantization.corrections.base import Correction, Reader
from trtdet.quantization.encoding import ChannelMap

_STEPS = 120
_SHARPNESS = 12.0


@dataclass(frozen=True)
class Smooth(Correction):
    """The channel scales of least noise at the outputs of the convolutions that read the tensor.

    With ``A = max_i scale_i reach_i`` the activation's rounding noise is ``(A / 127)^2 / (12 scale_i^2)`` a channel,
    and the weights' noise is ``(max_i |w_oi| / scale_i / 127)^2 / 12`` an element. Both reach the output through the
    other operand. Gradient descent over log scale lowers their sum. The result lies between two extremes: 1 / reach
    (alpha 1 in SmoothQuant; the solution for depthwise convolutions) and equal weights (alpha 0). The geometric mean of
    the scales is 1. ``bias`` compensates the mean's share of the noise.
    """

    name: ClassVar[str] = "smooth"
    counts: ClassVar[Literal["tensors", "convs"]] = "tensors"
    equal_steps: ClassVar[bool] = True
    maps_channels: ClassVar[bool] = True

    def propose(
        self, reach: NDArray[np.float64], variance: NDArray[np.float64], readers: Sequence[Reader], weight_share: float
    ) -> tuple[ChannelMap, float]:
        reach = np.maximum(reach, SMALLEST * reach.max())
        log_reach = np.log(reach)
        # If every output reads a single channel, the channel's scale also scales its weights and costs nothing.
        depthwise = all(reader.squares.shape[2] == 1 for reader in readers)
        u = -log_reach if depthwise else -0.75 * log_reach
        momentum, power = np.zeros_like(u), np.zeros_like(u)
        best, best_loss = u, np.inf
        for step in range(1 if depthwise else _STEPS):
            loss, slope = _noise(u, log_reach, variance, readers=readers, weight_share=weight_share)
            if loss < best_loss:
                best, best_loss = u, loss
            slope /= max(loss, 1e-300)
            # Adam (Kingma and Ba 2015) with a decreasing rate.
            momentum = 0.9 * momentum + 0.1 * slope
            power = 0.98 * power + 0.02 * slope * slope
            rate = 0.12 * 0.97**step
            u = u - rate * momentum / (1 - 0.9 ** (step + 1)) / (np.sqrt(power / (1 - 0.98 ** (step + 1))) + 1e-8)
        scale: NDArray[np.float64] = np.exp(best - best.mean())
        return ChannelMap(float((scale * reach).max()), scale), best_loss


def _noise(
    u: NDArray[np.float64],
    log_reach: NDArray[np.float64],
    variance: NDArray[np.float64],
    readers: Sequence[Reader],
    weight_share: float,
) -> tuple[float, NDArray[np.float64]]:
    """The noise for scales ``exp(u)`` and its gradient."""
    # A smooth maximum: the gradient of the true one moves only one channel per step.
    raised = log_reach + u
    top = raised.max()
    share = np.exp(_SHARPNESS * (raised - top))
    total = share.sum()
    amax_squared = np.exp(2 * (top + np.log(total) / _SHARPNESS))
    inverse = np.exp(-2 * u)
    spread = np.exp(2 * u) * variance
    loss, slope = 0.0, np.zeros_like(u)
    for reader in readers:
        activation = amax_squared * reader.through * inverse
        loss += float(activation.sum())
        slope += activation.sum() * 2 * share / total - 2 * activation
        groups, _, depth = reader.squares.shape
        scaled = reader.squares * inverse.reshape(groups, 1, depth)
        widest = scaled.argmax(axis=2)
        largest = np.take_along_axis(scaled, widest[..., None], axis=2)[..., 0]
        step = weight_share * reader.taps * reader.importance * largest
        through = spread.reshape(groups, depth)
        per_output = step * through.sum(axis=1, keepdims=True)
        loss += float(per_output.sum())
        slope += (2 * step.sum(axis=1, keepdims=True) * through).reshape(-1)
        channels = widest + depth * np.arange(groups)[:, None]
        slope -= 2 * np.bincount(channels.reshape(-1), per_output.reshape(-1), len(u))
    return loss, slope
