"""The base class of corrections, and the data that they read.

A correction is a subclass of :class:`Correction` in a file of its own and a line in ``REGISTRY`` of
:mod:`trtdet.quantization.corrections`. It overrides one or more hooks. A hook only proposes: the proposal is measured
on held-back images and kept where it lowers the error, see :mod:`trtdet.quantization.corrections.gate`. ``range`` has
no hook: gradients choose the ranges before all other corrections, see
:mod:`trtdet.quantization.corrections.head_ranges`.

FP8 (E4M3) has relative errors, equal for small and large values. So ``range`` and ``smooth``, which trade the steps of
some values for those of others, gain nothing there. ``round`` and ``bias``, which compensate rounding errors, do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """A convolution that reads a tensor, as far as the choice of the tensor's scales depends on it."""

    squares: NDArray[np.float64]  # float64 (groups, out / groups, I): the largest w^2 over the taps
    importance: NDArray[np.float64]  # float64 (groups, out / groups): weight of each output channel's squared error
    taps: int  # number of kernel elements
    through: NDArray[np.float64]  # float64 (groups * I,): the resulting weight of each input channel's squared error

    @staticmethod
    def of(weight: NDArray[np.float64], groups: int, importance: NDArray[np.float64]) -> Reader:
        """From weights float64 (out, I, kh, kw) and importance float64 (out,)."""
        squares = np.square(weight).reshape(groups, len(weight) // groups, weight.shape[1], -1)
        grouped = importance.reshape(groups, -1)
        through = np.einsum("go,goit->gi", grouped, squares).reshape(-1)
        return Reader(squares.max(axis=3), importance=grouped, taps=squares.shape[3], through=through)


@dataclass(frozen=True, eq=False)
class RoundedLayer:
    """A convolution whose weights are to be rounded, for one channel map of its input."""

    name: str
    rows: NDArray[np.float64]  # float64 (groups, out / groups, D): the weights for the mapped input, one matrix a group
    scales: NDArray[np.float32]  # float32 (groups, out / groups): the step of each row
    map: ChannelMap
    window: Window
    moments: Moments  # moments of the input's windows, before the map
    format: Format = "int8"

    def covariance(self) -> NDArray[np.float64] | None:
        """Covariance of the mapped and quantised windows, float64 (groups, D, D); None if only variances are kept."""
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
    """The network with the corrections so far: ``ranges`` of the tensors without a channel map, groups of tensors that
    share a range (``together``), the least value of each channel, float64 (C,), of the tensors that may be shifted
    (``low``), and the ``images`` that corrections may use, without held-back ones."""

    model: onnx.ModelProto
    placement: QdqPlacement
    ranges: Ranges
    corrections: Corrections
    together: Sequence[Sequence[str]]
    images: Sequence[Path]
    sources: Sources
    low: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)


@dataclass(frozen=True)
class Correction:
    """Base class of corrections; by itself it changes nothing."""

    name: ClassVar[str]  # name in ``--effort``
    counts: ClassVar[Literal["tensors", "convs"]] = "convs"  # unit in which a summary counts it
    # ``round`` reads full second moments, which take most of the time and memory.
    needs_covariance: ClassVar[bool] = False
    maps_channels: ClassVar[bool] = False  # it proposes channel maps
    needs_network: ClassVar[bool] = False  # ``reconstruct`` is to be called
    # Share of the weights' rounding noise that remains, 0..1; the choice of channel maps uses it.
    weight_share: ClassVar[float] = 1.0
    equal_steps: ClassVar[bool] = False  # it relies on the equal steps of INT8, so it does not apply to FP8

    def propose(
        self, reach: NDArray[np.float64], variance: NDArray[np.float64], readers: Sequence[Reader], weight_share: float
    ) -> tuple[ChannelMap, float] | None:
        """Proposes a channel map for a tensor, with its expected noise; the proposal of least noise is measured.

        Args:
            reach: float64 (C,): the largest magnitude of each channel that is to be represented.
            variance: float64 (C,): the variance of each channel.
            readers: the convolutions that read the tensor.
            weight_share: weight of the weights' rounding noise, 0..1; below 1 if a correction chooses the integers.
        """
        return None

    def round(self, layer: RoundedLayer) -> NDArray[np.number] | None:
        """Integers for the layer's scales, int8 (groups, out / groups, D), -127..127; for FP8 E4M3 numbers in float16.
        AdaRound (Nagel et al. 2020, arXiv:2004.10568) would fit here: the error that it minimises,
        ``(W - Q) E[xx'] (W - Q)'``, depends on the layer's covariance alone."""
        return None

    def offset(
        self, bias: NDArray[np.float64], exact: NDArray[np.float64], got: NDArray[np.float64]
    ) -> NDArray[np.float64] | None:
        """The offset added to the integer product. All arrays are float64 (groups, out / groups): the float model's
        bias, and the mean output without it, in float and with INT8 input and weights."""
        return None

    def reconstruct(self, network: Network) -> tuple[Ranges, Corrections]:
        """New ranges and corrections for the network; the scales of its channel maps do not change. Raises ModelError
        if it cannot be done, and why."""
        return network.ranges, network.corrections
