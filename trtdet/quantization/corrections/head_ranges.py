"""The range of each activation by what rounding and clipping it do to the detections, whatever the threshold rule.

In FP8 it means nothing: clipping makes no step smaller, so that the range is the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import onnx

from trtdet.calibration import Ranges
from trtdet.data import evenly
from trtdet.errors import ModelError
from trtdet.quantization.corrections.base import Correction
from trtdet.quantization.encoding import ChannelMap
from trtdet.quantization.gradients import NO_TORCH, available, calm_threads
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.sources import Sources

if TYPE_CHECKING:
    from trtdet.quantization.gradients.head_noise import HeadNoise

_IMAGES = 48
"""Images that gradients are computed on at most, evenly spaced over those that corrections are computed from."""


@dataclass(frozen=True)
class HeadRange(Correction):
    """The range of least noise at the head."""

    name: ClassVar[str] = "range"
    counts: ClassVar[Literal["tensors", "convs"]] = "tensors"
    equal_steps: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class Start:
    """What corrections start from.

    Attributes:
        plain: the ranges of the rule alone, which every correction has to be better than; None for those given.
        noise: what each activation's rounding does at the head; None where no gradients are known.
        reason: why there are none although they were asked for.
        together: groups of tensors that share one range.
        parted: tensors that a channel map's Mul would part from the kernel that rounds them as well, or from others
            that read the same INT8: there it costs their bytes in FP16.
    """

    plain: Ranges | None = None
    noise: HeadNoise | None = None
    reason: str = ""
    together: Sequence[Sequence[str]] = ()
    parted: Collection[str] = ()


def sense(model: onnx.ModelProto, placement: QdqPlacement, ranges: Ranges, sources: Sources) -> tuple[Ranges, Start]:
    """Chooses the range of every activation by its noise at the head, on the images that corrections come from.

    The network's input keeps its range, see :meth:`trtdet.calibration.Ranges.choose`; where there are no gradients, all
    activations keep the ranges of the rule.

    Raises:
        ConfigError: fewer than two images.
    """
    placement = placement.integers
    if not available():
        return ranges, Start(ranges, reason=NO_TORCH)
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
    maps: Mapping[str, ChannelMap] = {},
) -> HeadNoise:
    """What each activation's rounding and clipping do at the head, as it is or as a channel map makes it.

    Raises:
        ConfigError: fewer than two images.
        ModelError: the model cannot be differentiated.
    """
    calm_threads()
    from trtdet.quantization.gradients.head_noise import HeadNoise

    noise = HeadNoise(model, placement=placement, ranges=ranges, head=sources.head, maps=maps)
    fit, _ = sources.split()
    for images in sources.batches(model, evenly(fit, _IMAGES), "correcting: gradients of the detections"):
        noise.update(images)
    return noise
