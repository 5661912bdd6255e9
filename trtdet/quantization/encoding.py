"""How numbers become INT8 or FP8: the channel maps of activations, the integers and scales of weights.

Scales are numbers that FP16 holds, for every backend: the integers are chosen for the scale as it will be written, in
whichever type that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from trtdet.errors import ModelError
from trtdet.quantization.precision import Format

QMAX = 127.0

FP8_MAX = 448.0
"""The largest magnitude of FP8 in its form E4M3, which has no infinity."""

MOST: Mapping[Format, float] = {"int8": QMAX, "fp8": FP8_MAX}
"""The largest magnitude of what multiplies a scale, by format."""

LARGEST = 65504.0
"""The largest magnitude of FP16 (IEEE 754 binary16)."""

SMALLEST_NORMAL = 2.0**-14
"""The smallest number of FP16 with all of its digits."""

SMALLEST_HALF = 2.0**-24
"""The smallest number over 0 that FP16 holds, a subnormal."""


def half_step(values: ArrayLike, up: bool = True) -> NDArray[np.float32]:
    """The least FP16 numbers that are not below these scales over 0, or the nearest, as float32; scales over 65504 stay
    as they are. Rounding up keeps the largest magnitude of each channel within the 127 steps."""
    exact = np.asarray(values, np.float64)
    with np.errstate(over="ignore"):
        near = np.maximum(exact, SMALLEST_HALF).astype(np.float16)
        if up:
            near = np.where(near.astype(np.float64) < exact, np.nextafter(near, np.float16(np.inf)), near)
    return np.where(np.isfinite(near), near, exact).astype(np.float32)


def snap(values: NDArray[np.floating], format: Format = "int8") -> NDArray[np.floating]:
    """Changes values, which are given in steps, to the nearest numbers of a format within its range, and gives them."""
    if format == "int8":
        np.rint(values, out=values)
        return np.clip(values, -QMAX, QMAX, out=values)
    np.clip(values, -FP8_MAX, FP8_MAX, out=values)
    values[...] = values.astype(ml_dtypes.float8_e4m3fn)
    return values


def kept(values: NDArray[np.floating], format: Format) -> NDArray[np.number]:
    """Numbers of a format as they are kept: int8, or float16, which has every number of E4M3."""
    return values.astype(np.int8 if format == "int8" else np.float16)


def nearest(rows: NDArray[np.floating], scales: NDArray[np.float32], format: Format = "int8") -> NDArray[np.number]:
    """Each weight (..., out, D) to the nearest number of a format, for scales float32 (..., out)."""
    return kept(snap(rows / scales[..., None], format), format)


def by_channel(values: NDArray[np.floating], axis: int) -> NDArray[np.floating]:
    """A value a channel (C,), to be broadcast with a tensor: (N, C, H, W) for axis 1, (..., C) for axis -1."""
    return values.reshape(1, -1, 1, 1) if axis == 1 else values.reshape(-1)


@dataclass(frozen=True, eq=False)
class ChannelMap:
    """How a tensor is quantised: ``clip(round(127 / amax * scale * x))``; 448 in the place of 127 in FP8.

    The convolution's weights take the inverse: ``W x = (W / scale) (scale x)``, exact in float.

    Attributes:
        amax: the largest magnitude that is represented, of what is rounded.
        scale: float64 (C,), over 0; None for 1, as in FP8.
        axis: of the channels: 1, or -1 where products read the tensor.
    """

    amax: float
    scale: NDArray[np.float64] | None = None
    axis: int = 1
    format: Format = "int8"

    @property
    def step(self) -> np.float32:
        """The scale of the Q/DQ pair, a number that FP16 holds."""
        return np.float32(half_step(self.amax / MOST[self.format]))


def fp8_map(low: float, high: float) -> ChannelMap:
    """How a tensor from ``low`` to ``high`` is quantised to FP8: the whole range, as its steps grow with the values, so
    that clipping gains nothing."""
    return ChannelMap(max(abs(low), abs(high)) or FP8_MAX, format="fp8")


@dataclass(frozen=True, eq=False)
class Rounded:
    """The weights of a convolution or a product as they are written.

    Attributes:
        integers: int8 (out, in / groups, kh, kw), or (out, in) of a product, -127..127; of a product in FP8 float16,
            numbers of E4M3, -448..448.
        scales: float32 (out,), over 0; in FP8 all the same.
        bias: float32 (out,).
    """

    integers: NDArray[np.number]
    scales: NDArray[np.float32]
    bias: NDArray[np.float32]

    def same(self, other: Rounded | None) -> bool:
        """Whether every number is the same."""
        return other is not None and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in ("integers", "scales", "bias")
        )


def weight_scales(weight: NDArray[np.floating], owner: str = "a layer", format: Format = "int8") -> NDArray[np.float32]:
    """The scale of each output channel of weights (out, ...), float32 (out,): ``max |w| / 127`` raised to the next
    number that FP16 holds.

    A channel of zeros gets that of 1 / 127. In FP8 all channels have one scale, ``max |w| / 448`` raised likewise.

    Raises:
        ModelError: a weight of the ``owner`` is NaN or infinite.
    """
    amax = np.abs(weight.reshape(len(weight), -1)).max(axis=1)
    if not np.isfinite(amax).all():
        wrong = int((~np.isfinite(weight)).sum())
        raise ModelError(
            f"the weights of {owner} are NaN or infinite in {wrong} of {weight.size} places; INT8 needs finite weights",
            "export the model again from a checkpoint whose training did not diverge",
        )
    if format == "fp8":
        largest = float(amax.max(initial=0.0))
        return np.full(len(weight), half_step(largest / FP8_MAX if largest > 0 else 1.0), np.float32)
    return half_step(np.where(amax > 0, amax, 1.0) / QMAX)
