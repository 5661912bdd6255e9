"""The weight formats of a backend's INT8 kernels, and how an INT8 layer's weights are written for them. With one scale
a tensor, a product with the channels' ratios follows the layer, then the bias. The layer's output is then divided by
the ratios and must fit into FP16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.passes.base import Writer
from trtdet.quantization.encoding import LARGEST, QMAX, Rounded
from trtdet.quantization.weighted import Weighted

WeightForm = Literal["channel", "tensor"]
"""Scales of a convolution's weights.

- ``channel``: one scale per output channel, on axis 0 of the weights; the bias stays in the convolution.
- ``tensor``: one scale for the whole tensor; a product with the channels' ratios and the bias follow the convolution.
  The function is the same: ``sum_i s r_o q_oi x_i + b_o``.
"""

_ROOM = 2.0  # margin for outputs on other images over the calibrated magnitude


@dataclass(frozen=True)
class DataFlow:
    """How the INT8 kernels of a backend read and write."""

    # The network is strongly typed, so FP16 between INT8 kernels must be written: scales, biases, constants and all
    # operators up to the decoding of boxes. False if the builder chooses FP16 itself, or gains nothing.
    half: bool = False
    # Forms of weight scales that its kernels take without writing float32; all of them are tried.
    weights: tuple[WeightForm, ...] = ("channel",)
    # True if the kernel of an INT8 convolution includes its activation function and the quantisation of the result.
    # False if a pointwise kernel follows, which moves its input and output in FP16 and applies constant products and
    # sums for free. None without an engine.
    fused: bool | None = None


@dataclass(frozen=True)
class WeightScales:
    """The form of the weights' scales. ``outputs`` is by layer the largest magnitude of each output channel on the
    calibration images, bias included, float64 (out,); without it the largest possible output counts."""

    form: WeightForm = "channel"
    outputs: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)


class WeightWriter:
    """Writes the weights of layers; layers with a common tensor still share it if their numbers are equal. ``weights``
    are the weights by layer before channel maps are folded into them."""

    def __init__(self, write: Writer, scales: WeightScales, weights: Mapping[str, Rounded]) -> None:
        self._write, self._form = write, scales.form
        # Sums of integer products times the input's step; folding a channel map changes scales, not these.
        self._sums = {
            name: (most + np.abs(weights[name].bias)) / weights[name].scales
            for name, most in scales.outputs.items()
            if name in weights
        }
        self._shared: dict[tuple[str, bool, bytes, bytes], gs.Variable] = {}

    def write(self, layer: Weighted, rounded: Rounded) -> None:
        """Writes weights and bias of a layer whose input comes from a DequantizeLinear; those in FP8 have one scale."""
        node = layer.node
        if rounded.integers.dtype == np.float16:  # FP8
            values = rounded.integers.astype(np.float32) * rounded.scales[0]
            constant = self._write.const(values.T if layer.turned else values, np.float32)
            node.inputs[1] = activation_pair(self._write, constant, rounded.scales[0], dtype=ml_dtypes.float8_e4m3fn)
            self._add_bias(layer, rounded)
            return
        if self._form == "channel":
            node.inputs[1] = self._pair(layer, rounded, rounded.scales)
            self._add_bias(layer, rounded)
            return
        step = np.float64(node.inputs[0].inputs[0].inputs[1].values)
        scale = tensor_scale(rounded, float(step), self._sums.get(node.name))
        ratios, bias = (layer.by_output(values) for values in (rounded.scales / scale, rounded.bias))
        node.inputs = [node.inputs[0], self._pair(layer, rounded, scale)]
        own = layer.sum is None and np.any(rounded.bias)
        self._after(node, [("Mul", ratios), ("Add", bias)] if own else [("Mul", ratios)])
        if layer.sum is not None:
            layer.set_bias(self._write.const(rounded.bias, np.float32))

    def _add_bias(self, layer: Weighted, rounded: Rounded) -> None:
        if not layer.has_place and np.any(rounded.bias):
            self._after(layer.node, [("Add", rounded.bias)])
        elif layer.has_bias or np.any(rounded.bias):
            layer.set_bias(self._write.const(rounded.bias, np.float32))

    def _after(self, node: gs.Node, steps: Sequence[tuple[str, NDArray[np.floating]]]) -> None:
        """Inserts operators with constants after a node."""
        output = node.outputs[0]
        last = gs.Variable(f"{output.name}/raw", np.float32, output.shape)
        node.outputs = [last]
        for op, values in steps:
            last = self._write(op, last, self._write.const(values, np.float32))
        last.inputs[0].outputs = [output]

    def _pair(self, layer: Weighted, rounded: Rounded, scales: NDArray[np.float32]) -> gs.Variable:
        key = (layer.node.inputs[1].name, layer.turned, rounded.integers.tobytes(), scales.tobytes())
        if key not in self._shared:
            self._shared[key] = weight_pair(self._write, rounded.integers, scales, turned=layer.turned)
        return self._shared[key]


def weight_pair(
    write: Writer, integers: NDArray[np.number], scales: NDArray[np.float32], turned: bool = False
) -> gs.Variable:
    """Weights (out, in / groups, kh, kw) or (out, in), ``turned`` as (in, out), with their Q/DQ pair. Integers are
    -127..127 of any type; scales are float32 (out,), or () for one scale."""
    # Float weights at exact steps: builders expect Q and DQ.
    values = integers * scales.reshape(-1, *[1] * (integers.ndim - 1))
    values = values.T if turned else values
    step, zero = write.const(scales, np.float32), write.const(np.zeros(scales.shape), np.int8)
    axis = {"axis": int(turned)} if scales.ndim else {}
    weight = write("QuantizeLinear", write.const(values, np.float32), step, zero, **axis)
    return write("DequantizeLinear", weight, step, zero, **axis)


def activation_pair(
    write: Writer, tensor: gs.Tensor, scale: NDArray[np.float32] | np.float32, dtype: Any = np.int8
) -> gs.Variable:
    """A Q/DQ pair of a tensor in INT8 or FP8 (E4M3), with one scale."""
    step, zero = write.const(scale, np.float32), write.const(0, dtype)
    return write("DequantizeLinear", write("QuantizeLinear", tensor, step, zero), step, zero)


def tensor_scale(rounded: Rounded, step: float, sums: NDArray[np.float64] | None) -> NDArray[np.float32]:
    """The one scale of a layer's weights, float32 ().

    It is a power of two near the largest channel scale, so that ``q * scale`` is exact in FP16. It is lower if the
    layer's output before the channels' ratios would exceed FP16.

    Args:
        step: scale of the input.
        sums: largest magnitude of each channel's sum of integer products times ``step``, float64 (out,), if known.
    """
    exponent = float(np.round(np.log2(rounded.scales.max())))
    most = np.abs(rounded.integers.reshape(len(rounded.scales), -1)).sum(axis=1, dtype=np.float64) * (QMAX * step)
    if sums is not None:
        most = np.minimum(most, _ROOM * sums)
    while most.max(initial=0.0) * 2.0**exponent > LARGEST and exponent > -24:
        exponent -= 1
    return np.array(2.0**exponent, np.float32)
