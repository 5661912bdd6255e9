"""``asymmetric``: activations that are hardly ever negative take all codes of INT8, where only layers that read no
padding read them.

TensorRT has no zero point, and behind ReLU, LeakyReLU, SiLU and GELU half of the codes stay empty. A shift to the
middle of the range does the same: ``W x = W (x - c) + W c``, and the last term goes into the bias. Where zeros are
padded around x, that term is smaller at the border, and the layer would need a Pad of its own. Source of the zero point
and its term in the bias: Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", arXiv:1712.05877, section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from trtdet.calibration import Ranges
from trtdet.quantization.corrections.base import Correction, Network
from trtdet.quantization.encoding import ChannelMap
from trtdet.quantization.qdq import Corrections

_MOST = 0.9
"""Share of the step from which on a finer one is not worth an operator."""


@dataclass(frozen=True)
class Asymmetric(Correction):
    """The range from the least value of a tensor to its amax, instead of from -amax."""

    name: ClassVar[str] = "asymmetric"
    counts: ClassVar[Literal["tensors", "convs"]] = "tensors"
    needs_network: ClassVar[bool] = True
    equal_steps: ClassVar[bool] = True

    def reconstruct(self, network: Network) -> tuple[Ranges, Corrections]:
        before = network.corrections
        maps = {name: before.tensors.get(name) or ChannelMap(network.ranges.tensors[name].amax) for name in network.low}
        moved = {name: centred(channels, network.low[name]) for name, channels in maps.items()}
        shifted = {name: channels for name, channels in moved.items() if channels.shift}
        return network.ranges, replace(before, tensors={**before.tensors, **shifted}) if shifted else before


def centred(channels: ChannelMap, low: NDArray[np.float64]) -> ChannelMap:
    """The map with the middle of its range at 0; the same map if its step would hardly be finer. ``low``, float64
    (C,), is the least value of each channel."""
    least = max(float(np.min(low if channels.scale is None else channels.scale * low)), -channels.amax)
    half, middle = (channels.amax - least) / 2, (channels.amax + least) / 2
    return channels if half > _MOST * channels.amax else replace(channels, amax=half, shift=middle)
