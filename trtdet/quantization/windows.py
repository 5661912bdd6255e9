"""What a convolution sees: its windows over the input, sampled from an activation as the columns of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.quantization.weighted import PRODUCTS

Float = NDArray[np.float32]


@dataclass(frozen=True)
class Window:
    """The geometry of a 2-D convolution, or of a product with a matrix, which is a 1x1 convolution of places in a row.

    Layers that share it and their input share their samples.

    Attributes:
        source: name of the tensor that is read.
        groups: how many groups the channels fall into.
        kernel, strides, dilations: (vertical, horizontal).
        pads: zeros added at top, left, bottom and right.
        axis: of the channels, see :func:`trtdet.quantization.weighted.channel_axis`.
    """

    source: str
    groups: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[int, int, int, int]
    axis: int = 1

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    @staticmethod
    def of(conv: gs.Node) -> Window | None:
        """The window of a layer, None where it is a convolution that is not 2-D or its padding depends on an unknown
        size, or a product of two activations."""
        weight = conv.inputs[1]
        if not isinstance(weight, gs.Constant):
            return None
        if conv.op in PRODUCTS:
            return Window(conv.inputs[0].name, 1, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0), -1)
        if weight.values.ndim != 4:
            return None
        kernel = _pair(weight.values.shape[2:])
        strides, dilations = (_pair(conv.attrs.get(key, (1, 1))) for key in ("strides", "dilations"))
        pads = _pads(conv, kernel, strides, dilations)
        if pads is None:
            return None
        return Window(conv.inputs[0].name, int(conv.attrs.get("group", 1)), kernel, strides, dilations, pads)

    def sample(self, x: Float, count: int, seed: int) -> Float:
        """Windows at random places of one image's activation, the same places for the same seed.

        Args:
            x: float32 (C, H, W).
            count: how many places; all of them where there are no more.
            seed: of the choice.

        Returns:
            float32 (groups, C / groups * taps, places); a column is laid out as the weights are.
        """
        top, left, bottom, right = self.pads
        (high, wide), (down, across) = self.kernel, self.strides
        step_y, step_x = self.dilations
        rows = (x.shape[1] + top + bottom - step_y * (high - 1) - 1) // down + 1
        columns = (x.shape[2] + left + right - step_x * (wide - 1) - 1) // across + 1
        places = rows * columns
        chosen = np.arange(places)
        if places > count:
            chosen = np.sort(np.random.default_rng(seed).choice(places, count, replace=False))
        y, z = chosen // columns * down - top, chosen % columns * across - left
        if self.taps == 1 and not any(self.pads):
            found = x[:, y, z]
        else:
            # Each place reads its own taps from the unpadded activation: padding all of it would cost more.
            ys = y[None, :] + step_y * np.arange(high)[:, None]
            xs = z[None, :] + step_x * np.arange(wide)[:, None]
            inside = ((ys >= 0) & (ys < x.shape[1]))[:, None, :] & ((xs >= 0) & (xs < x.shape[2]))[None, :, :]
            ys, xs = ys.clip(0, x.shape[1] - 1), xs.clip(0, x.shape[2] - 1)
            found = x[:, ys[:, None, :], xs[None, :, :]]
            if not inside.all():
                found *= inside
        return found.reshape(self.groups, -1, len(chosen))

    def laid_out(self, x: Float) -> Float:
        """One image's activation as (C, H, W); the places of a product are (C, places, 1)."""
        return x if self.axis == 1 else np.moveaxis(x, -1, 0).reshape(x.shape[-1], -1, 1)

    def spread(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """A value a channel, float64 (C,), laid out as the rows of a sample: (groups, C / groups * taps)."""
        return np.repeat(values, self.taps).reshape(self.groups, -1)

    def rows(self, weight: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weights (out, C / groups, kh, kw) as matrices for the samples: (groups, out / groups, C / groups * taps)."""
        return weight.reshape(self.groups, len(weight) // self.groups, -1)


def _pair(values: Sequence[int]) -> tuple[int, int]:
    return int(values[0]), int(values[1])


def _pads(
    conv: gs.Node, kernel: tuple[int, int], strides: tuple[int, int], dilations: tuple[int, int]
) -> tuple[int, int, int, int] | None:
    size = list(conv.inputs[0].shape or ())[2:]
    known = len(size) == 2 and all(isinstance(side, int) and side > 0 for side in size)
    if conv.attrs.get("auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER") and not known:
        return None
    top, left, bottom, right = padding(conv, size if known else (0, 0), kernel, strides, dilations)
    return top, left, bottom, right


def padding(
    node: gs.Node, size: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[int, ...]:
    """What a convolution or a pooling pads before each axis, then after each; ``size`` is that of its input."""
    how = node.attrs.get("auto_pad", "NOTSET")
    if how not in ("SAME_UPPER", "SAME_LOWER"):
        none = (0,) * 2 * len(size)
        return none if how == "VALID" else tuple(int(width) for width in node.attrs.get("pads", none))
    totals = [
        max(0, (-(-side // step) - 1) * step + gap * (length - 1) + 1 - side)
        for side, length, step, gap in zip(size, kernel, strides, dilations, strict=True)
    ]
    small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return (*small, *large) if how == "SAME_UPPER" else (*large, *small)
