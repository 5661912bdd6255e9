"""Q/DQ pairs in the form that TensorRT accepts: symmetric INT8, zero point 0, float bias.

Activations have one scale per tensor. Weights have one scale per output channel, or one per tensor with the channels'
ratios after the layer, see :mod:`trtdet.quantization.weight_forms`. All readers of a tensor share one pair.

With a channel map, ``scale * x - shift`` is quantised. The scale is folded into the layers before, see
:mod:`trtdet.quantization.folding`; the rest is a Mul and an Add before Q, which a builder fuses with the activation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.calibration import Ranges
from trtdet.errors import CalibrationError
from trtdet.passes.base import Writer
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.provenance import Origin
from trtdet.quantization.encoding import ChannelMap, Rounded, by_channel, fp8_map, half_step, nearest, weight_scales
from trtdet.quantization.folding import fold_map
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.precision import Format
from trtdet.quantization.weight_forms import WeightScales, WeightWriter, activation_pair
from trtdet.quantization.weighted import Weighted
from trtdet.quantization.windows import Window


@dataclass(frozen=True, eq=False)
class Corrections:
    """Replaces the plain form: channel maps by tensor, and weights by layer for the mapped input, with biases as if
    nothing were shifted. Every layer that reads a scaled tensor is among ``weights``. ``steps`` are exact scales of
    unmapped tensors, by node and position of the input, instead of those of the ranges."""

    tensors: Mapping[str, ChannelMap] = field(default_factory=dict)
    weights: Mapping[str, Rounded] = field(default_factory=dict)
    steps: Mapping[tuple[str, int], np.float32] = field(default_factory=dict)

    def hash_into(self, digest: hashlib._Hash) -> None:
        """Adds every number to a hash, for keys of dependent results."""
        for name, channels in sorted(self.tensors.items()):
            for part in (np.array([channels.amax, channels.shift]), channels.scale):
                digest.update(name.encode() + (b"" if part is None else np.asarray(part).tobytes()))
        for name, rounded in sorted(self.weights.items()):
            arrays = (rounded.integers, rounded.scales, rounded.bias)
            digest.update(b"".join([name.encode(), *(array.tobytes() for array in arrays)]))
        for place, step in sorted(self.steps.items()):
            digest.update(f"{place}{step!r}".encode())


def insert_qdq(
    model: onnx.ModelProto,
    placement: QdqPlacement,
    ranges: Ranges,
    corrections: Corrections = Corrections(),
    *,
    fold: bool = True,
    weights: WeightScales = WeightScales(),
) -> onnx.ModelProto:
    """Writes the explicit INT8 model; the float model, of opset 13 or newer, is not changed.

    Args:
        ranges: amax of each tensor in ``placement.activations`` that has no channel map.
        corrections: channel maps and weights; those of convolutions that the plan keeps in float are ignored.
        fold: fold channel maps where possible; otherwise the tensors of the float model keep their values.

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
    layers = Weighted.by_name(nodes[name] for name in placement.plan.names("int8"))
    fp8 = placement.plan.fp8
    rounded = {
        name: corrections.weights.get(name) or plain_form(layer) for name, layer in layers.items() if name not in fp8
    }
    for name, map in corrections.tensors.items():
        for reader in {reader for reader, _ in placement.readers.get(name, ()) if map.shift} & rounded.keys():
            window = Window.of(nodes[reader])
            assert window is not None and not any(window.pads), f"'{reader}' pads zeros around shifted '{name}'"
            rounded[reader] = rounded[reader].shifted(map.shift)
    writer = WeightWriter(write, weights, rounded)
    for name in placement.activations:
        readers = [(nodes[reader], position) for reader, position in placement.readers[name]]
        in_fp8 = [(reader, position) for reader, position in readers if reader.name in fp8]
        if in_fp8:
            step = fp8_map(ranges.tensors[name].low, ranges.tensors[name].high).step
            pair = activation_pair(write, tensors[name], step, dtype=ml_dtypes.float8_e4m3fn)
            for reader, position in in_fp8:
                reader.inputs[position] = pair
            readers = [(reader, position) for reader, position in readers if reader.name not in fp8]
        # A sum reads a layer's INT8 copy; if all layers are in FP8 it reads the float tensor.
        if fp8 and not any(reader.name in placement.plan.entries for reader, _ in readers):
            readers = []
        channels = corrections.tensors.get(name)
        if channels is not None:
            _quantize_mapped(write, tensors[name], channels, readers=readers, weights=rounded, fold=fold)
        else:
            step = np.float32(half_step(ranges.tensors[name].scale))
            pairs: dict[np.float32, gs.Variable] = {}
            for reader, position in readers:
                own = corrections.steps.get((reader.name, position), step)
                if own not in pairs:
                    pairs[own] = activation_pair(write, tensors[name], own)
                reader.inputs[position] = pairs[own]
    # Last, since folding a map changes the weights of the convolution before it.
    for name, integers in rounded.items():
        writer.write(layers[name], integers)
    for name in fp8 & layers.keys():
        writer.write(layers[name], corrections.weights.get(name) or plain_form(layers[name], "fp8"))
    graph.cleanup()
    return to_model(graph)


def plain_form(layer: Weighted, format: Format = "int8") -> Rounded:
    """Weights rounded to nearest with the float model's bias; in FP8 with one scale, as for activations."""
    weight = layer.weight.astype(np.float32)
    scales = weight_scales(weight, f"'{layer.node.name}'", format)
    integers = nearest(weight.reshape(len(weight), -1), scales, format).reshape(weight.shape)
    return Rounded(integers, scales, layer.bias)


def _quantize_mapped(
    write: Writer,
    tensor: gs.Tensor,
    channels: ChannelMap,
    readers: list[tuple[gs.Node, int]],
    weights: dict[str, Rounded],
    fold: bool,
) -> None:
    layers = {node.name for node, _ in readers if node.name in weights}
    # Without a layer there is no pair, and sums read the float tensor.
    if not layers:
        return

    def multiplied(tensor: gs.Tensor, factor: NDArray[np.float64] | None) -> gs.Tensor:
        if factor is None:
            return tensor
        values = write.const(by_channel(factor, channels.axis), np.float32)
        return write.of(Origin.CHANNEL_MAP)("Mul", tensor, values)

    factor = channels.scale
    if fold:
        factor = fold_map(write, tensor, [node.name for node, _ in readers], factor=factor, weights=weights)

    def added(tensor: gs.Tensor, shift: float) -> gs.Tensor:
        constant = write.const(shift, np.float32)
        return write.of(Origin.CHANNEL_MAP)("Add", tensor, constant) if shift else tensor

    pair = activation_pair(write, added(multiplied(tensor, factor), -channels.shift), channels.step)
    inverse = None if channels.scale is None else 1 / channels.scale
    for node, position in readers:
        own = pair if node.name in layers else multiplied(added(pair, channels.shift), inverse)
        node.inputs[position] = own
