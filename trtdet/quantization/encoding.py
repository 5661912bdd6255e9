"""Numbers in INT8 or FP8: channel maps of activations, integers and scales of weights. All backends use scales that
FP16 represents exactly, so the integers fit the written scale in every type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from trtdet.errors import ModelError
from trtdet.quantization.precision import Format

QMAX = 127.0

FP8_MAX = 448.0  # the largest magnitude of FP8 E4M3, which has no infinity
MOST: Mapping[Format, float] = {"int8": QMAX, "fp8": FP8_MAX}  # the largest magnitude of a value in steps, by format
STORED = {"int8": np.int8, "fp8": np.float16}  # the type that holds a format's numbers; float16 has every E4M3 number
LARGEST = 65504.0  # the largest magnitude of FP16 (IEEE 754 binary16)
SMALLEST_NORMAL = 2.0**-14  # the smallest normal number of FP16
SMALLEST_HALF = 2.0**-24  # the smallest positive number of FP16, a subnormal


def half_step(values: ArrayLike, up: bool = True) -> NDArray[np.float32]:
    """Scales over 0 rounded up to FP16 numbers, or to the nearest, as float32; scales over 65504 do not change.
    Rounding up keeps the largest magnitude of each channel within the 127 steps."""
    exact = np.asarray(values, np.float64)
    with np.errstate(over="ignore"):
        near = np.maximum(exact, SMALLEST_HALF).astype(np.float16)
        if up:
            near = np.where(near.astype(np.float64) < exact, np.nextafter(near, np.float16(np.inf)), near)
    return np.where(np.isfinite(near), near, exact).astype(np.float32)


def snap(values: NDArray[np.floating], format: Format = "int8") -> NDArray[np.floating]:
    """Rounds values, given in steps, in place to a format's numbers within its range, and returns them."""
    if format == "int8":
        np.rint(values, out=values)
        return np.clip(values, -QMAX, QMAX, out=values)
    np.clip(values, -FP8_MAX, FP8_MAX, out=values)
    values[...] = values.astype(ml_dtypes.float8_e4m3fn)
    return values


def nearest(rows: NDArray[np.floating], scales: NDArray[np.float32], format: Format = "int8") -> NDArray[np.number]:
    """Rounds weights (..., out, D) to the nearest numbers of a format, for scales float32 (..., out)."""
    return snap(rows / scales[..., None], format).astype(STORED[format])


def by_channel(values: NDArray[np.floating], axis: int) -> NDArray[np.floating]:
    """Reshapes a value per channel (C,) to broadcast with (N, C, H, W) for axis 1 or (..., C) for axis -1."""
    return values.reshape(1, -1, 1, 1) if axis == 1 else values.reshape(-1)


@dataclass(frozen=True, eq=False)
class ChannelMap:
    """How a tensor is quantised: ``clip(round(127 / amax * (scale * x - shift)))``, in FP8 with 448 instead of 127.

    The convolution's weights take the inverse, and its bias the shift: ``W x = (W / scale) (scale x - shift) + b``,
    exact in float where no padding is read.
    """

    amax: float  # the largest magnitude of ``scale * x - shift`` that is represented
    scale: NDArray[np.float64] | None = None  # float64 (C,), over 0; None for 1, as in FP8
    axis: int = 1  # channel axis: 1, or -1 if products read the tensor
    format: Format = "int8"
    shift: float = 0.0  # in FP8 and where padding is read, 0

    @property
    def step(self) -> np.float32:
        """Scale of the Q/DQ pair, exact in FP16."""
        return np.float32(half_step(self.amax / MOST[self.format]))


def fp8_map(low: float, high: float) -> ChannelMap:
    """FP8 map of a tensor from ``low`` to ``high``: the whole range, since clipping would make no step smaller."""
    return ChannelMap(max(abs(low), abs(high)) or FP8_MAX, format="fp8")


@dataclass(frozen=True, eq=False)
class Rounded:
    """Quantised weights of a convolution or product."""

    # int8 (out, in / groups, kh, kw) or (out, in), -127..127; FP8: E4M3 numbers in float16, -448..448.
    integers: NDArray[np.number]
    scales: NDArray[np.float32]  # float32 (out,), over 0; in FP8 all are equal
    bias: NDArray[np.float32]  # float32 (out,)

    def shifted(self, shift: float) -> Rounded:
        """The weights for an input that is lower by ``shift`` everywhere: with the same outputs."""
        sums = self.integers.reshape(len(self.integers), -1).sum(axis=1, dtype=np.float64)
        return replace(self, bias=(self.bias + shift * self.scales * sums).astype(np.float32))

    def same(self, other: Rounded | None) -> bool:
        return other is not None and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in ("integers", "scales", "bias")
        )


def weight_scales(weight: NDArray[np.floating], owner: str = "a layer", format: Format = "int8") -> NDArray[np.float32]:
    """The scale of each output channel of weights (out, ...), float32 (out,): ``max |w| / 127`` rounded up to FP16.

    A channel of zeros gets the scale for ``max |w| = 1``. FP8 has one scale, ``max |w| / 448`` rounded up. Raises
    ModelError if a weight of the ``owner`` is NaN or infinite.
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
