"""What a correction is, and what it gets to know.

A correction is a subclass of :class:`Correction` in a file of its own and a line in ``REGISTRY`` of
:mod:`trtdet.quantization.corrections`. It overrides the hook of the point at which it acts, and proposes; what it
proposes is measured on held-back images like every other proposal and kept only where it lowers the error, see
:mod:`trtdet.quantization.corrections.gate`. It never decides.

- ``range`` has no hook: the ranges that all others start from are chosen by gradients before, see
  :mod:`trtdet.quantization.corrections.head_ranges`.
- ``propose``: another channel map of a tensor, before its convolutions' weights are rounded (``smooth``, ``shift``).
- ``round``: other integers for one convolution, from the second moments of its input (``round``). Learned rounding in
  the way of AdaRound (Nagel et al. 2020, arXiv:2004.10568) fits here: the error that it minimises,
  ``(W - Q) E[xx'] (W - Q)'``, needs the covariance of :class:`Layer` and nothing else.
- ``offset``: another bias for one convolution (``bias``).
- ``reconstruct``: other ranges and weights for all of them at once, from the whole network as the others have corrected
  it and the images that corrections are computed from (``reconstruct``).

Products in FP8 (E4M3) are corrected where that means something. Its numbers have relative errors, the same for small
values as for large ones: what trades the steps of some values for those of others (``range``, ``smooth``, ``shift``)
gains nothing there. What makes up for rounding (``round``, ``bias``) does, and is judged like the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.calibration import Ranges
from trtdet.quantization.corrections.moments import Moments
from trtdet.quantization.corrections.sources import Sources
from trtdet.quantization.encoding import ChannelMap
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.precision import Format
from trtdet.quantization.qdq import Corrections
from trtdet.quantization.windows import Window


@dataclass(frozen=True, eq=False)
class Reader:
    """What a convolution that reads a tensor means for the choice of the tensor's scales.

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


@dataclass(frozen=True, eq=False)
class Activation:
    """What is known of a tensor when its channel map is chosen.

    Attributes:
        low, high: float64 (C,): the ends of each channel's range; 0 is within where a reader pads with zeros.
        variance: float64 (C,).
        readers: the convolutions that read the tensor.
        padded: whether a reader pads.
        weight_share: what the rounding noise of the weights counts, 0..1: below 1 where the integers are chosen.
        enabled: names of the corrections in use.
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    variance: NDArray[np.float64]
    readers: Sequence[Reader]
    padded: bool
    weight_share: float
    enabled: frozenset[str]


@dataclass(frozen=True, eq=False)
class Proposal:
    """A channel map.

    Attributes:
        names: of the corrections that are in it.
        map: of the tensor.
        noise: that it is expected to leave; the proposal of least noise is measured.
    """

    names: tuple[str, ...]
    map: ChannelMap
    noise: float


@dataclass(frozen=True, eq=False)
class Layer:
    """A convolution whose weights are to be rounded, for one channel map of its input.

    Attributes:
        name: of the convolution.
        rows: float64 (groups, out / groups, D): the weights for the mapped input, one matrix a group.
        scales: float32 (groups, out / groups): the step of each row.
        map: of the input.
        window: geometry of the convolution.
        moments: of the input's windows, before the map.
        format: of the weights and of the input.
    """

    name: str
    rows: NDArray[np.float64]
    scales: NDArray[np.float32]
    map: ChannelMap
    window: Window
    moments: Moments
    format: Format = "int8"

    def covariance(self) -> NDArray[np.float64] | None:
        """Of the mapped and quantised input's windows, float64 (groups, D, D); None where only variances are kept."""
        if not self.moments.dense:
            return None
        found = self.moments.covariance()
        if self.map.scale is not None:
            spread = self.window.spread(self.map.scale)
            found = found * spread[:, :, None] * spread[:, None, :]
        if self.format == "fp8":  # its noise is under a thousandth of the values' power
            return found
        noise = np.eye(found.shape[1]) * float(self.map.step) ** 2 / 12
        return found + noise


@dataclass(frozen=True, eq=False)
class OutputMeans:
    """The mean of a convolution's output, without its bias, float64 (groups, out / groups) each.

    Attributes:
        bias: of the float model.
        wanted: the mean in float.
        got: the mean with input and weights in INT8.
    """

    bias: NDArray[np.float64]
    wanted: NDArray[np.float64]
    got: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Network:
    """The network as it is corrected so far.

    Attributes:
        model: in float.
        placement: where Q/DQ pairs go.
        ranges: of the tensors without a channel map.
        corrections: channel maps and weights; with ``insert_qdq`` they give the INT8 form.
        together: groups of tensors that share one range.
        images: that corrections may be computed from; the images held back are not among them.
        sources: run models on images.
    """

    model: onnx.ModelProto
    placement: QdqPlacement
    ranges: Ranges
    corrections: Corrections
    together: Sequence[Sequence[str]]
    images: Sequence[Path]
    sources: Sources


@dataclass(frozen=True)
class Correction:
    """A correction that changes nothing: the base of those that override a hook.

    Attributes:
        name: that ``--correct`` takes.
        counts: what a summary counts it by.
        needs_covariance: whether ``round`` wants full second moments, which take most of the time and memory.
        needs_network: whether ``reconstruct`` is to be asked.
        weight_share: what is left of the rounding noise of the weights, 0..1, as the choice of channel maps reckons.
        equal_steps: whether it is about steps that are equal, as those of INT8 are, and so means nothing in FP8.
    """

    name: ClassVar[str]
    counts: ClassVar[Literal["tensors", "convs"]] = "convs"
    needs_covariance: ClassVar[bool] = False
    needs_network: ClassVar[bool] = False
    weight_share: ClassVar[float] = 1.0
    equal_steps: ClassVar[bool] = False

    def propose(self, activation: Activation) -> Proposal | None:
        """A channel map for a tensor."""
        return None

    def round(self, layer: Layer) -> NDArray[np.number] | None:
        """Integers for a convolution, int8 (groups, out / groups, D), -127..127, for the scales of the layer; for a
        product in FP8 numbers of E4M3, float16."""
        return None

    def offset(self, means: OutputMeans) -> NDArray[np.float64] | None:
        """What is added to the integer product, float64 (groups, out / groups)."""
        return None

    def reconstruct(self, network: Network) -> tuple[Ranges, Corrections]:
        """Ranges and corrections in place of the network's, with the same channel maps but for their ``amax``.

        Raises:
            ModelError: the model cannot be reconstructed, and why.
        """
        return network.ranges, network.corrections
