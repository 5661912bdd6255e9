"""A convolution's windows over its input, as the columns of a matrix, and their moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.quantization.weighted import PRODUCTS

Float = NDArray[np.float32]

MOST_COLUMNS = 4608
"""Wider windows (over 512 channels under a 3x3 kernel) have no full second moments: solving grows with the cube."""


@dataclass(frozen=True)
class Window:
    """The geometry of a 2-D convolution, or of a product with a matrix, which is a 1x1 convolution of places in a row.
    Layers with the same geometry and input share their samples. Pairs are (vertical, horizontal); pads are zeros at
    top, left, bottom and right; ``axis`` is that of the input's channels, -1 for products, else 1."""

    source: str
    groups: int = 1
    kernel: tuple[int, ...] = (1, 1)
    strides: tuple[int, ...] = (1, 1)
    dilations: tuple[int, ...] = (1, 1)
    pads: tuple[int, ...] = (0, 0, 0, 0)
    axis: int = 1

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    @staticmethod
    def of(layer: gs.Node) -> Window | None:
        """The window of a layer; None if it is not 2-D, multiplies two activations, or its padding needs an unknown
        size."""
        source, weight = layer.inputs[:2]
        if not isinstance(weight, gs.Constant):
            return None
        if layer.op in PRODUCTS:
            return Window(source.name, axis=-1)
        size = list(source.shape or ())[2:]
        sized = len(size) == 2 and all(isinstance(side, int) and side > 0 for side in size)
        same = layer.attrs.get("auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER")
        if weight.values.ndim != 4 or (same and not sized):
            return None
        steps = (layer.attrs.get(key, (1, 1)) for key in ("strides", "dilations"))
        kernel, strides, dilations = (tuple(map(int, sides)) for sides in (weight.values.shape[2:], *steps))
        return Window(
            source=source.name,
            groups=int(layer.attrs.get("group", 1)),
            kernel=kernel,
            strides=strides,
            dilations=dilations,
            pads=padding(layer, size if sized else (0, 0), kernel, strides=strides, dilations=dilations),
        )

    def sample(self, x: Float, count: int, seed: int) -> Float:
        """Windows of one image's activation (C, H, W) at ``count`` random places, or at all places if there are fewer.
        Returns float32 (groups, C / groups * taps, places), each column in the layout of the weights. The seed
        determines the places."""
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
            windows = x[:, y, z]
        else:
            # Each place reads its taps from the unpadded activation; padding all of it would cost more.
            ys = y[None, :] + step_y * np.arange(high)[:, None]
            xs = z[None, :] + step_x * np.arange(wide)[:, None]
            inside = ((ys >= 0) & (ys < x.shape[1]))[:, None, :] & ((xs >= 0) & (xs < x.shape[2]))[None, :, :]
            ys, xs = ys.clip(0, x.shape[1] - 1), xs.clip(0, x.shape[2] - 1)
            windows = x[:, ys[:, None, :], xs[None, :, :]]
            if not inside.all():
                windows *= inside
        return windows.reshape(self.groups, -1, len(chosen))

    def laid_out(self, x: Float) -> Float:
        """One image's activation as (C, H, W); the places of a product are (C, places, 1)."""
        return x if self.axis == 1 else np.moveaxis(x, -1, 0).reshape(x.shape[-1], -1, 1)

    def spread(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """A value per channel, float64 (C,), as the rows of a sample: (groups, C / groups * taps)."""
        return np.repeat(values, self.taps).reshape(self.groups, -1)

    def rows(self, weight: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weights (out, C / groups, kh, kw) as matrices for the samples: (groups, out / groups, C / groups * taps)."""
        return weight.reshape(self.groups, len(weight) // self.groups, -1)


def padding(
    node: gs.Node, size: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[int, ...]:
    """The padding of a convolution or pooling before each axis, then after each; ``size`` is that of its input."""
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


def geometry(node: gs.Node, size: Sequence[int], kernel: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Strides, dilations, and the padding before and after each axis, of a convolution or pooling; ``size`` is that of
    its input, without batch and channels."""
    axes = len(kernel)
    strides, dilations = (tuple(node.attrs.get(key, (1,) * axes)) for key in ("strides", "dilations"))
    pads = padding(node, size, kernel, strides=strides, dilations=dilations)
    return strides, dilations, pads[:axes], pads[axes:]


class Moments:
    """Sums over sampled windows, for mean, variance and, if requested, covariance. They are float64 sums of deviations
    from the first sample's mean. Sums of plain float32 squares would lose the variance of an input that hardly varies
    around a large mean."""

    def __init__(self, groups: int, width: int, covariance: bool) -> None:
        self.dense = covariance and width <= MOST_COLUMNS
        self._count = 0
        self._origin = np.zeros((groups, width, 1))
        self._sum = np.zeros((groups, width))
        self._products = np.zeros((groups, width, width) if self.dense else (groups, width))

    def update(self, windows: NDArray[np.float32]) -> Moments:
        """Adds samples, float32 (groups, width, places)."""
        if not self._count:
            self._origin = windows.mean(axis=2, dtype=np.float64, keepdims=True)
        deviations = windows - self._origin
        self._count += windows.shape[2]
        self._sum += deviations.sum(axis=2)
        if self.dense:
            self._products += deviations @ deviations.transpose(0, 2, 1)
        else:
            self._products += np.einsum("gip,gip->gi", deviations, deviations)
        return self

    def covariance(self) -> NDArray[np.float64]:
        """float64 (groups, width, width); only if ``dense``."""
        mean = self._sum / self._count
        covariance: NDArray[np.float64] = self._products / self._count - mean[:, :, None] * mean[:, None, :]
        return covariance

    def variance(self) -> NDArray[np.float64]:
        """float64 (groups, width), at least 0."""
        products = np.einsum("gii->gi", self._products) if self.dense else self._products
        variances: NDArray[np.float64] = np.maximum(products / self._count - np.square(self._sum / self._count), 0)
        return variances

    def through(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The variance of ``rows @ windows``: (groups, out). Without full moments the columns count as independent."""
        if self.dense:
            power: NDArray[np.float64] = np.einsum("goi,goi->go", rows @ self.covariance(), rows)
            return np.maximum(power, 0)
        independent: NDArray[np.float64] = np.einsum("goi,gi->go", np.square(rows), self.variance())
        return independent
