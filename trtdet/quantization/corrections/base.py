"""What a correction is, and what it gets to know.

A correction is a subclass of :class:`Correction` in a file of its own and a line in ``REGISTRY`` of
:mod:`trtdet.quantization.corrections`. It overrides the hook of the point at which it acts, and proposes; what it
proposes is measured on held-back images like every other proposal and kept only where it lowers the error, see
:mod:`trtdet.quantization.corrections.gate`. It never decides.

``range`` has no hook: the ranges that all others start from are chosen by gradients before, see
:mod:`trtdet.quantization.corrections.head_ranges`.

Products in FP8 (E4M3) are corrected where that means something. Its numbers have relative errors, the same for small
values as for large ones: what trades the steps of some values for those of others (``range``, ``smooth``)
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
from trtdet.quantization.encoding import ChannelMap
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.precision import Format
from trtdet.quantization.qdq import Corrections
from trtdet.quantization.sources import Sources
from trtdet.quantization.windows import Moments, Window


@dataclass(frozen=True, eq=False)
class Reader:
    """What a convolution that reads a tensor means for the choice of the tensor's scales.

    Attributes:
        squares: float64 (groups, out / groups, I): the square of the largest |w| over the taps.
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
        return Reader(squares.max(axis=3), importance=grouped, taps=squares.shape[3], through=through)


@dataclass(frozen=True, eq=False)
class RoundedLayer:
    """A convolution whose weights are to be rounded, for one channel map of its input.

    Attributes:
        rows: float64 (groups, out / groups, D): the weights for the mapped input, one matrix a group.
        scales: float32 (groups, out / groups): the step of each row.
        map: of the input.
        moments: of the input's windows, before the map.
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
        covariance = self.moments.covariance()
        if self.map.scale is not None:
            spread = self.window.spread(self.map.scale)
            covariance = covariance * spread[:, :, None] * spread[:, None, :]
        if self.format == "fp8":  # its noise is under a thousandth of the values' power
            return covariance
        return covariance + np.eye(covariance.shape[1]) * float(self.map.step) ** 2 / 12


@dataclass(frozen=True, eq=False)
class Network:
    """The network as it is corrected so far.

    Attributes:
        ranges: of the tensors without a channel map.
        corrections: with ``insert_qdq`` they give the INT8 form.
        together: groups of tensors that share one range.
        images: that corrections may be computed from; the images held back are not among them.
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
        name: that ``--effort`` takes.
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

    def propose(
        self, reach: NDArray[np.float64], variance: NDArray[np.float64], readers: Sequence[Reader], weight_share: float
    ) -> tuple[ChannelMap, float] | None:
        """A channel map for a tensor, and the noise that it is expected to leave: that of least noise is measured.

        Args:
            reach: float64 (C,): the largest magnitude of each channel.
            variance: float64 (C,): of each channel.
            readers: the convolutions that read the tensor.
            weight_share: what the rounding noise of the weights counts, 0..1: below 1 where the integers are chosen.
        """
        return None

    def round(self, layer: RoundedLayer) -> NDArray[np.number] | None:
        """Integers for a convolution, int8 (groups, out / groups, D), -127..127, for the scales of the layer; for a
        product in FP8 numbers of E4M3, float16.

        Learned rounding in the way of AdaRound (Nagel et al. 2020, arXiv:2004.10568) fits here: the error that it
        minimises, ``(W - Q) E[xx'] (W - Q)'``, needs the covariance of the layer and nothing else.
        """
        return None

    def offset(
        self, bias: NDArray[np.float64], exact: NDArray[np.float64], got: NDArray[np.float64]
    ) -> NDArray[np.float64] | None:
        """What is added to the integer product, float64 (groups, out / groups), like all that it is given: the float
        model's bias, and the mean of the output without it in float and with input and weights in INT8."""
        return None

    def reconstruct(self, network: Network) -> tuple[Ranges, Corrections]:
        """Ranges and corrections in place of the network's, with the same channel maps but for their ``amax``.

        Raises:
            ModelError: the model cannot be reconstructed, and why.
        """
        return network.ranges, network.corrections
