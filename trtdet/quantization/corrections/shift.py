"""x -> x - shift, channel by channel, so that half of the INT8 codes of a SiLU are not left empty.

The shift is the middle of the channel's range. Together with a scale the range that is left decides the scale.
Source: Wei et al. 2023, "Outlier Suppression+", arXiv:2304.09145.

In FP8 it means nothing: it has a sign and no codes to fill, and its numbers are densest at 0 already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from trtdet.quantization.corrections.base import Activation, Correction, Proposal
from trtdet.quantization.corrections.smooth import Smooth, choose_scale
from trtdet.quantization.encoding import ChannelMap

_PAD_GAIN = 0.9
"""A shift before a padded convolution needs an explicit Pad, so it must lower the noise at least to this share."""


@dataclass(frozen=True)
class Shift(Correction):
    """The middle of each channel's range becomes 0."""

    name: ClassVar[str] = "shift"
    counts: ClassVar[Literal["tensors", "convs"]] = "tensors"
    equal_steps: ClassVar[bool] = True

    def propose(self, activation: Activation) -> Proposal:
        middle = (activation.low + activation.high) / 2
        reach = (activation.high - activation.low) / 2
        if Smooth.name not in activation.enabled:
            return Proposal((self.name,), ChannelMap(float(reach.max()), None, middle), 0.0)
        scale, amax, noise = choose_scale(reach, activation.variance, activation.readers, activation.weight_share)
        needed = noise / (_PAD_GAIN if activation.padded else 1.0)
        return Proposal((Smooth.name, self.name), ChannelMap(amax, scale, middle), needed)
