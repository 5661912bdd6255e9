"""scale * f(conv(x)) -> f((scale W) x + scale b): a channel map goes into what makes its tensor

On the way back from the tensor a factor a channel, over 0, passes everything that is positively homogeneous and keeps
channels apart: ReLU and its leaky forms, pooling, Resize, Pad with zeros, Slice along rows and columns. A Concat along
channels cuts the factor into its inputs' channels, and a Split joins it with 1 for the channels that go elsewhere.
Clip (ReLU6), HardSwish and SiLU stop it: they scale what they give by where their input lies.

A convolution of any precision, a BatchNormalization or a product with a constant takes the factor, exactly but for the
rounding of floats. Where some inputs of a Concat lead to none of these, each of them gets a Mul of its own part, which
moves fewer bytes than a Mul after the Concat. Every tensor on the way must have no other reader and be no output.

An offset (the map's shift) is no factor: only an INT8 convolution right before the tensor takes it, in its bias.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.passes.base import Writer
from trtdet.passes.plugin_ops import PLUGIN_ACTIVATIONS
from trtdet.passes.provenance import Origin
from trtdet.quantization.encoding import Rounded
from trtdet.quantization.placement import CONVOLUTIONS

Factor = NDArray[np.float64]

_PASSING = (
    *("Relu", "LeakyRelu", "PRelu", "Identity"),
    *("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Resize", "Pad", "Slice"),
)
_CHANNELS = (1, -3)
"""The channel axis of a feature map (N, C, H, W)."""

_HALF = (2.0**-14, 65504.0)
"""The least normal and the largest magnitude of FP16 (IEEE 754 binary16)."""


def fold_map(
    write: Writer,
    tensor: gs.Tensor,
    factor: Factor | None,
    offset: Factor | None,
    weights: MutableMapping[str, Rounded],
) -> tuple[Factor | None, Factor | None]:
    """Changes the graph so that it makes ``factor * x + offset`` in the place of x, as far as that takes no node.

    Args:
        write: to the graph of the tensor.
        tensor: (N, C, H, W), all of whose readers want it mapped.
        factor: float64 (C,), over 0; None for 1.
        offset: float64 (C,); None for 0.
        weights: of the INT8 convolutions, which are written from it later; those that take the map are changed.

    Returns:
        The factor and the offset that are left to be written after the tensor, None each where nothing is left.
    """
    maker = _maker(tensor)
    if maker is not None and maker.op == "Conv" and maker.name in weights:
        before = weights[maker.name]
        scale = np.ones(len(before.scales)) if factor is None else factor
        shift = 0.0 if offset is None else offset
        weights[maker.name] = _scaled(before, scale, shift)
        return None, None
    parts = None if factor is None else _parts(tensor, factor, weights, write.graph.outputs)
    if parts is None:
        return factor, offset
    for part in parts:
        _apply(write, part, weights)
    return None, offset


def read_mapped(graph: gs.Graph, tensor: gs.Tensor, readers: int) -> bool:
    """Whether as many readers as want a tensor mapped are all that it has, so that a map may come before it."""
    return len(tensor.outputs) == readers and not any(tensor is output for output in graph.outputs)


def channels_left(graph: gs.Graph, tensor: gs.Tensor, channels: int, readers: int, int8: Collection[str]) -> int:
    """For how many of the channels of a tensor (N, C, H, W) of a float model a factor would need a Mul.

    An activation of the plugin library has a factor a channel of its own and needs none.

    Args:
        graph: of the model.
        tensor: of the graph.
        channels: C.
        readers: how many of the tensor's readers read it mapped.
        int8: names of the convolutions that run in INT8.
    """
    if _by_plugin(tensor):
        return 0
    if not read_mapped(graph, tensor, readers):
        return channels
    parts = _parts(tensor, np.ones(channels), int8, graph.outputs)
    return channels if parts is None else sum(len(part.factor) for part in parts if part.position is not None)


@dataclass(frozen=True, eq=False)
class _Part:
    """Where a part of a factor goes.

    Attributes:
        node: that takes it, or reads its product.
        factor: float64, of the channels that the node makes or reads.
        position: of the node's input that a Mul is put before; None where the node takes the factor.
    """

    node: gs.Node
    factor: Factor
    position: int | None = None


def _parts(
    tensor: gs.Tensor, factor: Factor, int8: Collection[str], outputs: Collection[gs.Tensor]
) -> list[_Part] | None:
    """Where the factor of a tensor can go; None where it cannot go anywhere but after the tensor."""
    maker = _maker(tensor)
    if maker is None:
        return None

    def before(position: int, part: Factor) -> list[_Part] | None:
        source = maker.inputs[position]
        if isinstance(source, gs.Constant) or any(source is output for output in outputs):
            return None
        # The shape of a tensor does not change.
        readers = [reader for reader in source.outputs if reader.op != "Shape"]
        return _parts(source, part, int8, outputs) if len(readers) == 1 else None

    if maker.op in _PASSING:
        return before(0, factor) if _passes(maker, tensor) else None
    if maker.op == "Split" and maker.attrs.get("axis", 0) in _CHANNELS:
        sizes = _sizes(maker.outputs)
        if sizes is None:
            return None
        start = sum(sizes[: next(index for index, output in enumerate(maker.outputs) if output is tensor)])
        whole = np.ones(sum(sizes))
        whole[start : start + len(factor)] = factor
        return before(0, whole)
    if maker.op == "Concat" and maker.attrs["axis"] in _CHANNELS:
        sizes = _sizes(maker.inputs)
        if sizes is None:
            return None
        cut = np.split(factor, np.cumsum(sizes)[:-1])
        found = [before(position, part) for position, part in enumerate(cut)]
        return _joined(maker, cut, found)
    return [_Part(maker, factor)] if _takes(maker, factor, int8) else None


def _joined(concat: gs.Node, cut: list[Factor], found: list[list[_Part] | None]) -> list[_Part] | None:
    """The parts of a Concat's inputs, of which at least one must fold."""
    left = [position for position, parts in enumerate(found) if parts is None]
    if len(left) == len(found) or any(_by_plugin(concat.inputs[position]) for position in left):
        return None
    folded = [part for parts in found if parts is not None for part in parts]
    return [*folded, *(_Part(concat, cut[position], position) for position in left)]


def _by_plugin(tensor: gs.Tensor) -> bool:
    """Whether an activation of the plugin library takes over a Mul after the tensor, together with the rounding."""
    maker = _maker(tensor)
    if maker is not None and maker.op == "Concat":
        return any(_by_plugin(joined) for joined in maker.inputs)
    return maker is not None and maker.op in PLUGIN_ACTIVATIONS


def _maker(tensor: gs.Tensor) -> gs.Node | None:
    return tensor.inputs[0] if tensor.inputs else None


def _sizes(tensors: Collection[gs.Tensor]) -> list[int] | None:
    """The numbers of channels, None where one is unknown."""
    shapes = [
        list(tensor.values.shape if isinstance(tensor, gs.Constant) else tensor.shape or ()) for tensor in tensors
    ]
    if not all(len(shape) == 4 and isinstance(shape[1], int) for shape in shapes):
        return None
    return [shape[1] for shape in shapes]


def _passes(node: gs.Node, tensor: gs.Tensor) -> bool:
    """Whether a factor a channel may as well come before the node whose first output the tensor is."""
    if tensor is not node.outputs[0]:
        return False
    if node.op == "Resize":
        # What is outside has a value of its own, which is no part of the input.
        inside = node.attrs.get("coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize"
        sizes = _sizes([node.inputs[0], tensor])
        return inside and sizes is not None and sizes[0] == sizes[1]
    if node.op == "Pad":
        widths = _constant(node, 1)
        zeros = node.attrs.get("mode", "constant") != "constant" or _is_zero(node, 2)
        every = len(node.inputs) < 4 or node.inputs[3].is_empty()  # otherwise the axes are listed
        return zeros and every and widths is not None and len(widths) == 8 and not (widths[1] or widths[5])
    if node.op == "Slice":
        axes = _constant(node, 3)
        return axes is not None and not any(axis in _CHANNELS for axis in axes.reshape(-1).tolist())
    return True


def _constant(node: gs.Node, position: int) -> NDArray[np.generic] | None:
    given = node.inputs[position] if len(node.inputs) > position else None
    return given.values if isinstance(given, gs.Constant) else None


def _is_zero(node: gs.Node, position: int) -> bool:
    value = _constant(node, position)
    absent = len(node.inputs) <= position or node.inputs[position].is_empty()
    return absent if value is None else not np.any(value)


def _takes(node: gs.Node, factor: Factor, int8: Collection[str]) -> bool:
    """Whether a node can make its output times the factor without another node."""
    if node.op in CONVOLUTIONS:
        return node.name in int8 or _float_takes(node, factor)
    if node.op == "BatchNormalization":
        return not node.attrs.get("training_mode", 0) and all(_constant(node, index) is not None for index in (1, 2))
    return _has_constant(node, len(factor))


def _float_takes(conv: gs.Node, factor: Factor) -> bool:
    """Whether the weights and the bias of a convolution in float can be multiplied and still be FP16."""
    constants = conv.inputs[1:]
    if not all(isinstance(tensor, gs.Constant) for tensor in constants) or len(constants[0].outputs) != 1:
        return False
    least, most = _HALF
    for tensor in constants:
        # A channel is as exact as its largest weight.
        before, after = (
            np.abs(values).max(axis=(1, 3)) for values in _by_output(conv, tensor.values.astype(np.float64), factor)
        )
        if np.any((before <= most) & (after > most)):
            return False
        if tensor is constants[0] and np.any((before >= least) & (after < least)):
            return False
    return True


def _by_output(conv: gs.Node, values: NDArray[np.float64], factor: Factor) -> tuple[Factor, Factor]:
    """Weights or bias, and their product, as (groups, rows, outputs / groups, taps) with a factor an output."""
    transposed = conv.op == "ConvTranspose"
    groups = int(conv.attrs.get("group", 1)) if transposed else 1
    rows = len(values) // groups if transposed and values.ndim > 1 else 1
    before = values.reshape(groups, rows, len(factor) // groups, -1)
    return before, before * factor.reshape(groups, 1, -1, 1)


def _has_constant(node: gs.Node, channels: int) -> bool:
    """Whether a node multiplies or divides by a constant, one value or one a channel."""
    positions = [index for index, tensor in enumerate(node.inputs) if isinstance(tensor, gs.Constant)]
    if len(positions) != 1 or not (node.op == "Mul" or (node.op == "Div" and positions == [1])):
        return False
    values = node.inputs[positions[0]].values
    shape = (*[1] * (4 - values.ndim), *values.shape)
    return values.size == 1 or shape == (1, channels, 1, 1)


def _apply(write: Writer, part: _Part, weights: MutableMapping[str, Rounded]) -> None:
    node, factor = part.node, part.factor
    by_channel = factor.reshape(1, -1, 1, 1)
    if part.position is not None:
        source = node.inputs[part.position]
        node.inputs[part.position] = write.of(Origin.CHANNEL_MAP)("Mul", source, write.const(by_channel, np.float32))
    elif node.name in weights:
        weights[node.name] = _scaled(weights[node.name], factor, 0.0)
    elif node.op in CONVOLUTIONS:
        for index, tensor in enumerate(node.inputs[1:], 1):
            _, after = _by_output(node, tensor.values.astype(np.float64), factor)
            node.inputs[index] = write.const(after.reshape(tensor.values.shape), np.float32)
    elif node.op == "BatchNormalization":
        for index in (1, 2):
            node.inputs[index] = write.const(node.inputs[index].values * factor, np.float32)
    else:
        index = next(index for index, tensor in enumerate(node.inputs) if isinstance(tensor, gs.Constant))
        values = node.inputs[index].values
        node.inputs[index] = write.const(values * by_channel if node.op == "Mul" else values / by_channel, np.float32)


def _scaled(before: Rounded, factor: Factor, offset: Factor | float) -> Rounded:
    scales, bias = before.scales * factor, before.bias * factor + offset
    return Rounded(before.integers, scales.astype(np.float32), bias.astype(np.float32))
