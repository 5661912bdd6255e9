"""Q/DQ pairs in the form that TensorRT accepts: symmetric INT8, zero point 0, float bias.

Activations have one scale a tensor; weights one scale an output channel, on the axis of the output channels, or one
scale a tensor with the channels' ratios outside, see :mod:`trtdet.quantization.weight_forms`. A tensor is quantised
once and all its readers share the pair.

Where a tensor has a channel map, ``scale * (x - shift)`` is what is quantised. The map is folded into what makes the
tensor as far as it can be, see :mod:`trtdet.quantization.folding`; what is left is one Mul and one Add before Q, which
a builder fuses with the activation function. A shift moves the zero that a convolution pads with, so its zeros are
written as a Pad before the map; a builder generates that into the same kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.calibration import Range, Ranges
from trtdet.errors import CalibrationError
from trtdet.passes.base import Writer
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.provenance import Origin
from trtdet.quantization.encoding import (
    ChannelMap,
    Rounded,
    by_channel,
    fp8_map,
    fp8_scales,
    half_step,
    nearest,
    weight_scales,
)
from trtdet.quantization.folding import fold_map
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.precision import Format, PrecisionPlan
from trtdet.quantization.weight_forms import WeightScales, WeightWriter, fp8_pair
from trtdet.quantization.weighted import Weighted
from trtdet.quantization.windows import Window


@dataclass(frozen=True, eq=False)
class Corrections:
    """What is written instead of the plain form.

    Attributes:
        tensors: channel maps by tensor; every layer that reads one is among ``weights``.
        weights: by layer, for the input as it is mapped.
    """

    tensors: Mapping[str, ChannelMap] = field(default_factory=dict)
    weights: Mapping[str, Rounded] = field(default_factory=dict)

    def hash_into(self, digest: hashlib._Hash) -> None:
        """Adds every number to a hash, for keys of what follows from them."""
        for name, channels in sorted(self.tensors.items()):
            for part in (np.float64(channels.amax), channels.scale, channels.shift):
                digest.update(name.encode() + (b"" if part is None else np.asarray(part).tobytes()))
        for name, rounded in sorted(self.weights.items()):
            digest.update(
                name.encode() + rounded.integers.tobytes() + rounded.scales.tobytes() + rounded.bias.tobytes()
            )


def insert_qdq(
    model: onnx.ModelProto,
    placement: QdqPlacement,
    ranges: Ranges,
    corrections: Corrections = Corrections(),
    *,
    fold: bool = True,
    weights: WeightScales = WeightScales(),
) -> onnx.ModelProto:
    """Writes the explicit INT8 model: the float model is not changed.

    Args:
        model: float model, opset 13 or newer.
        placement: where the pairs go.
        ranges: amax of each tensor in ``placement.activations``; used where there is no channel map.
        corrections: channel maps and weights; empty for the textbook form. Those of convolutions that the plan keeps
            in float are left out.
        fold: fold channel maps where that is possible; otherwise every tensor of the float model keeps its meaning.
        weights: how the scales of weights are written.

    Raises:
        CalibrationError: ``ranges`` lacks a tensor, so it was made from another model.
    """
    missing = [name for name in placement.activations if name not in ranges.tensors]
    if missing:
        raise CalibrationError(
            f"the ranges lack {len(missing)} of the model's {len(placement.activations)} activations, the first is "
            f"'{missing[0]}': they were made from another model; calibrate this model"
        )
    graph = to_graph(model)
    nodes = {node.name: node for node in graph.nodes}
    tensors = graph.tensors()
    write = Writer(graph, "trtdet/qdq", Origin.QDQ)
    found = {name: Weighted.of(nodes[name]) for name in placement.plan.names("int8")}
    layers = {name: layer for name, layer in found.items() if layer is not None}  # attention's products have no weights
    fp8 = placement.plan.fp8
    rounded = {
        name: corrections.weights.get(name) or plain_form(layer) for name, layer in layers.items() if name not in fp8
    }
    writer = WeightWriter(write, weights, rounded)
    for name in placement.activations:
        readers = [(nodes[reader], position) for reader, position in placement.readers[name]]
        if fp8:
            readers = _quantize_to_fp8(write, tensors[name], ranges.tensors[name], readers, placement.plan)
        channels = corrections.tensors.get(name)
        if channels is None and readers:
            pair = _pair(write, tensors[name], half_step(ranges.tensors[name].scale))
            for reader, position in readers:
                reader.inputs[position] = pair
        elif channels is not None:
            _quantize_mapped(write, tensors[name], channels, readers, rounded, fold)
    # Written last: folding a map changes the weights of the convolution before it.
    for name, integers in rounded.items():
        writer.write(layers[name], integers)
    for name in fp8 & layers.keys():
        writer.write_fp8(layers[name], corrections.weights.get(name) or plain_form(layers[name], "fp8"))
    graph.cleanup()
    return to_model(graph)


def _quantize_to_fp8(
    write: Writer,
    tensor: gs.Tensor,
    found: Range,
    readers: list[tuple[gs.Node, int]],
    plan: PrecisionPlan,
) -> list[tuple[gs.Node, int]]:
    """Gives the readers in FP8 their pair; the others that a pair in INT8 is for."""
    fp8 = plan.fp8
    others = [(reader, position) for reader, position in readers if reader.name not in fp8]
    if len(others) < len(readers):
        pair = fp8_pair(write, tensor, fp8_map(found.low, found.high).step)
        for reader, position in readers:
            if reader.name in fp8:
                reader.inputs[position] = pair
    # A sum reads the INT8 copy of a layer.
    return others if any(reader.name in plan.entries for reader, _ in others) else []


def plain_form(layer: Weighted, format: Format = "int8") -> Rounded:
    """Weights to the nearest, and the float model's bias; in FP8 with one scale for all of them, as its activations."""
    weight = layer.weight.astype(np.float32)
    scales = (weight_scales if format == "int8" else fp8_scales)(weight, f"'{layer.node.name}'")
    integers = nearest(weight.reshape(len(weight), -1), scales, format).reshape(weight.shape)
    return Rounded(integers, scales, layer.bias)


def _pair(write: Writer, tensor: gs.Tensor, scale: NDArray[np.float32] | np.float32) -> gs.Variable:
    step, zero = write.const(scale, np.float32), write.const(0, np.int8)
    return write("DequantizeLinear", write("QuantizeLinear", tensor, step, zero), step, zero)


def _quantize_mapped(
    write: Writer,
    tensor: gs.Tensor,
    channels: ChannelMap,
    readers: list[tuple[gs.Node, int]],
    weights: dict[str, Rounded],
    fold: bool,
) -> None:
    step = channels.step
    windows = {node.name: Window.of(node) for node, _ in readers if node.name in weights}
    moves = channels.shift is not None
    pads = {name: window.pads for name, window in windows.items() if window and any(window.pads) and moves}
    direct = len(pads) < len(windows)
    factor, offset = channels.scale, channels.offset()
    # Without a pair a sum would read the tensor as it is.
    if fold and (direct or len(windows) == len(readers)):
        # Zeros that are padded in between stay zeros under a factor, not under an offset.
        names = [node.name for node, _ in readers]
        factor, rest = fold_map(write, tensor, names, factor, None if pads else offset, weights)
        offset = offset if pads else rest
    pair = _pair(write, _mapped(write, tensor, factor, offset, channels.axis), step) if direct else None
    padded = {
        sides: _pair(write, _mapped(write, _padded(write, tensor, sides), factor, offset), step)
        for sides in dict.fromkeys(pads.values())
    }
    for node, position in readers:
        if node.name in pads:
            node.inputs[position] = padded[pads[node.name]]
            node.attrs["pads"] = [0, 0, 0, 0]
            node.attrs.pop("auto_pad", None)
        elif node.name in windows:
            node.inputs[position] = pair
        elif pair is not None:
            node.inputs[position] = _unmapped(write, pair, channels)


def _padded(write: Writer, tensor: gs.Tensor, pads: tuple[int, int, int, int]) -> gs.Variable:
    top, left, bottom, right = pads
    widths = write.const([0, 0, top, left, 0, 0, bottom, right], np.int64)
    return write("Pad", tensor, widths, write.const(0, np.float32))


def _mapped(
    write: Writer,
    tensor: gs.Tensor,
    factor: NDArray[np.float64] | None,
    offset: NDArray[np.float64] | None,
    axis: int = 1,
) -> gs.Tensor:
    """``factor * x + offset``; None leaves that part out."""
    write = write.of(Origin.CHANNEL_MAP)
    for op, values in (("Mul", factor), ("Add", offset)):
        if values is not None:
            tensor = write(op, tensor, write.const(by_channel(values, axis), np.float32))
    return tensor


def _unmapped(write: Writer, tensor: gs.Tensor, channels: ChannelMap) -> gs.Tensor:
    """The way back, for a reader that is no convolution."""
    inverse = None if channels.scale is None else 1 / channels.scale
    return _mapped(write, tensor, inverse, channels.shift, channels.axis)
