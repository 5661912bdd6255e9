"""How the weights of an INT8 convolution are written: one scale an output channel, or one for the whole tensor.

With one scale a tensor the ratios of the channels follow the convolution as a product, and the bias after that. The
convolution then gives each channel divided by its ratio, which must fit into FP16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.passes.base import Writer
from trtdet.quantization.data_flow import WeightForm
from trtdet.quantization.encoding import LARGEST, QMAX, Rounded

_ROOM = 2.0
"""What images that were not seen may exceed the calibrated magnitude of an output by."""


@dataclass(frozen=True)
class WeightScales:
    """The form of the weights' scales.

    Attributes:
        form: see :data:`trtdet.quantization.data_flow.WeightForm`.
        outputs: by convolution, the largest magnitude of each channel of its output on the calibration images, bias
            included, float64 (out,); without it the most that the integers can give counts.
    """

    form: WeightForm = "channel"
    outputs: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)


class WeightWriter:
    """Writes the weights of convolutions; those that share a tensor share it still where nothing set them apart.

    Args:
        write: to the graph.
        scales: the form.
        weights: integers, scales and bias by convolution, before any channel map is folded into them.
    """

    def __init__(self, write: Writer, scales: WeightScales, weights: Mapping[str, Rounded]) -> None:
        self._write, self._form = write, scales.form
        # What the integers give, times the step of the input: folding a channel map changes scales, not this.
        self._sums = {
            name: (most + np.abs(weights[name].bias)) / weights[name].scales
            for name, most in scales.outputs.items()
            if name in weights
        }
        self._shared: dict[tuple[str, bytes, bytes], gs.Variable] = {}

    def write(self, conv: gs.Node, rounded: Rounded) -> None:
        """Gives a convolution its weights and its bias.

        Args:
            conv: its input 0 comes from a DequantizeLinear.
            rounded: the integers, scales and bias.
        """
        if self._form == "channel":
            conv.inputs[1] = self._pair(conv, rounded, rounded.scales)
            if len(conv.inputs) > 2 or np.any(rounded.bias):
                conv.inputs = [*conv.inputs[:2], self._write.const(rounded.bias, np.float32)]
            return
        step = np.float64(conv.inputs[0].inputs[0].inputs[1].values)
        scale = tensor_scale(rounded, float(step), self._sums.get(conv.name))
        conv.inputs = [conv.inputs[0], self._pair(conv, rounded, scale)]
        made = conv.outputs[0]
        raw = gs.Variable(f"{made.name}/raw", np.float32, made.shape)
        conv.outputs = [raw]
        spread = (1, -1, *[1] * (rounded.integers.ndim - 2))
        last = self._write("Mul", raw, self._write.const((rounded.scales / scale).reshape(spread), np.float32))
        if np.any(rounded.bias):
            last = self._write("Add", last, self._write.const(rounded.bias.reshape(spread), np.float32))
        last.inputs[0].outputs = [made]

    def _pair(self, conv: gs.Node, rounded: Rounded, scales: NDArray[np.float32]) -> gs.Variable:
        key = (conv.inputs[1].name, rounded.integers.tobytes(), scales.tobytes())
        if key not in self._shared:
            self._shared[key] = weight_pair(self._write, rounded.integers, scales)
        return self._shared[key]


def weight_pair(write: Writer, integers: NDArray[np.number], scales: NDArray[np.float32]) -> gs.Variable:
    """Weights with the Q/DQ pair that gives their integers.

    Args:
        write: to the graph.
        integers: (out, in / groups, kh, kw), -127..127, of any type.
        scales: float32 (out,) for the output channels, or () for the tensor.
    """
    # Float weights that lie on the integers: builders want to see Q and DQ.
    values = integers * scales.reshape(-1, *[1] * (integers.ndim - 1))
    step, zero = write.const(scales, np.float32), write.const(np.zeros(scales.shape), np.int8)
    axis = {"axis": 0} if scales.ndim else {}
    weight = write("QuantizeLinear", write.const(values, np.float32), step, zero, **axis)
    return write("DequantizeLinear", weight, step, zero, **axis)


def tensor_scale(rounded: Rounded, step: float, sums: NDArray[np.float64] | None) -> NDArray[np.float32]:
    """The one scale of a convolution's weights, float32 ().

    It is a power of two, so that ``q * scale`` is exact in FP16, near the largest scale of the channels; lower where
    what the convolution gives before the channels' ratios would exceed FP16.

    Args:
        rounded: integers, scales and bias.
        step: scale of the input.
        sums: the largest magnitude that was seen of each channel's sum of products of integers, times ``step``,
            float64 (out,); None where it is not known.
    """
    exponent = float(np.round(np.log2(rounded.scales.max())))
    most = np.abs(rounded.integers.reshape(len(rounded.scales), -1)).sum(axis=1, dtype=np.float64) * (QMAX * step)
    if sums is not None:
        most = np.minimum(most, _ROOM * sums)
    while most.max(initial=0.0) * 2.0**exponent > LARGEST and exponent > -24:
        exponent -= 1
    return np.array(2.0**exponent, np.float32)
