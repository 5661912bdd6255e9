"""``range``: each activation's range, chosen by the effect of rounding and clipping on the detections. FP8 always takes
the whole range: clipping makes none of its steps smaller."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.calibration import Ranges
from trtdet.data import evenly
from trtdet.errors import ModelError
from trtdet.quantization.corrections.base import Correction
from trtdet.quantization.head_noise import HeadNoise
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.sources import Sources, held_back

_IMAGES = 48  # maximum number of images for gradients, evenly spaced over the images that corrections are computed from

_FAR = 0.01
"""Error power of one tensor, from which scores or boxes move by a tenth. Most tensors of a network stay under 0.001."""


@dataclass(frozen=True)
class HeadRange(Correction):
    """The range of least noise at the decoded boxes and scores."""

    name: ClassVar[str] = "range"
    counts: ClassVar[Literal["tensors", "convs"]] = "tensors"
    equal_steps: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class Start:
    """The state before any correction."""

    # Ranges of the rule alone, which every correction has to beat; None for the first candidate's.
    plain: Ranges | None = None
    noise: HeadNoise | None = None  # the effect of each activation's rounding on the detections; None without gradients
    reason: str = ""  # why there are no gradients although they were requested
    together: Sequence[Sequence[str]] = ()  # groups of tensors that share one range
    # Tensors for which a channel map's Mul costs their bytes in FP16. It would separate them from the kernel that
    # rounds them, or from other readers of the same INT8.
    parted: Collection[str] = ()
    fused: bool = False  # kernels of convolutions round what they write

    def ruling(self, ranges: Ranges) -> frozenset[str]:
        """Tensors that move the detections far by themselves, as where one channel takes the codes of all others: a map
        is worth its Mul there at any price. Empty without gradients."""
        noise = self.noise
        if noise is None:
            return frozenset()
        return frozenset(name for name in noise.tensors if noise.noise(name, ranges.tensors[name].amax) > _FAR)


def sense(model: onnx.ModelProto, placement: QdqPlacement, ranges: Ranges, sources: Sources) -> tuple[Ranges, Start]:
    """Chooses each activation's range by its noise at the decoded boxes and scores, on the images for corrections.

    The network's input keeps its range, see :meth:`trtdet.calibration.Ranges.choose`. Without gradients all activations
    keep the ranges of the rule. Raises ConfigError if there are fewer than two images.
    """
    placement = placement.integers
    try:
        noise = head_noise(model, placement, ranges, sources=sources)
    except ModelError as error:
        return ranges, Start(ranges, reason=str(error))
    if not noise.seen:
        return ranges, Start(ranges, reason="nothing is detected on the images")
    source = model.graph.input[0].name
    chosen = {
        name: replace(ranges.tensors[name], amax=noise.best(name))
        for name in placement.activations
        if name != source and noise.tensors[name].largest > 0
    }
    return replace(ranges, tensors={**ranges.tensors, **chosen}), Start(ranges, noise)


def head_noise(
    model: onnx.ModelProto,
    placement: QdqPlacement,
    ranges: Ranges,
    sources: Sources,
    reach: Mapping[str, NDArray[np.float64]] = {},
    before: HeadNoise | None = None,
) -> HeadNoise:
    """Measures how rounding and clipping each activation moves the detections, channel by channel for those in
    ``reach``. ``before`` is an earlier measurement of the same model and images.

    Raises:
        ConfigError: fewer than two images.
        ModelError: the model cannot be differentiated.
    """
    fit, _ = held_back(sources.images)
    chosen = replace(sources, images=evenly(fit, _IMAGES))
    return HeadNoise(
        model, placement, ranges, sources=chosen, reach=reach, weight=None if before is None else before.weight
    )
