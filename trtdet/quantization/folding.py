"""scale * f(conv(x)) -> f((scale W) x + scale b): a channel map goes into what makes its tensor

On the way back from the tensor a factor a channel, over 0, passes everything that is positively homogeneous and keeps
channels apart: ReLU and its leaky forms, pooling, Resize, Pad with zeros, Slice along rows and columns. A Concat along
channels cuts the factor into its inputs' channels, and a Split joins it with 1 for the channels that go elsewhere.
Clip (ReLU6), HardSwish and SiLU stop it: they scale what they give by where their input lies.

A convolution of any precision, a BatchNormalization or a product with a constant takes the factor, exactly but for the
rounding of floats. Where some inputs of a Concat lead to none of these, each of them gets a Mul of its own part, which
moves fewer bytes than a Mul after the Concat. The tensor and those on the way must be no output and have no other
reader, except for convolutions in float, whose weights undo the factor.

An offset (the map's shift) is no factor: only an INT8 convolution right before the tensor takes it, in its bias.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.passes.base import Writer
from trtdet.passes.plugin_ops import PLUGIN_ACTIVATIONS
from trtdet.passes.provenance import Origin
from trtdet.quantization.encoding import LARGEST, SMALLEST_NORMAL, Rounded
from trtdet.quantization.placement import CONVOLUTIONS

Factor = NDArray[np.float64]

_PASSING = (
    *("Relu", "LeakyRelu", "PRelu", "Identity"),
    *("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Resize", "Pad", "Slice"),
)
_CHANNELS = (1, -3)
"""The channel axis of a feature map (N, C, H, W)."""


def fold_map(
    write: Writer,
    tensor: gs.Tensor,
    readers: Sequence[str],
    factor: Factor | None,
    offset: Factor | None,
    weights: MutableMapping[str, Rounded],
) -> tuple[Factor | None, Factor | None]:
    """Changes the graph so that it makes ``factor * x + offset`` in the place of x, as far as that takes no node.

    Args:
        write: to the graph of the tensor.
        tensor: (N, C, H, W).
        readers: names of the nodes that want it mapped, one for each input that reads it.
        factor: float64 (C,), over 0; None for 1.
        offset: float64 (C,); None for 0.
        weights: of the INT8 convolutions, which are written from it later; those that take the map are changed.

    Returns:
        The factor and the offset that are left to be written after the tensor, None each where nothing is left.
    """
    search = _Search(weights, write.graph.outputs)
    maker = _maker(tensor)
    if maker is not None and maker.op == "Conv" and maker.name in weights and search.others(tensor, readers) == []:
        before = weights[maker.name]
        scale = np.ones(len(before.scales)) if factor is None else factor
        shift = 0.0 if offset is None else offset
        weights[maker.name] = _scaled(before, scale, shift)
        return None, None
    parts = None if factor is None else search.parts(tensor, readers, factor)
    if parts is None:
        return factor, offset
    for part in parts:
        _apply(write, part, weights)
    return None, offset


def channels_left(
    graph: gs.Graph, tensor: gs.Tensor, channels: int, readers: Sequence[str], int8: Collection[str]
) -> int:
    """For how many of the channels of a tensor (N, C, H, W) of a float model a factor would need a Mul.

    An activation of the plugin library has a factor a channel of its own and needs none.

    Args:
        graph: of the model.
        tensor: of the graph.
        channels: C.
        readers: names of the nodes that want it mapped, one for each input that reads it.
        int8: names of the convolutions that run in INT8.
    """
    if _by_plugin(tensor):
        return 0
    parts = _Search(int8, graph.outputs).parts(tensor, readers, np.ones(channels))
    return channels if parts is None else sum(len(part.factor) for part in parts if part.how == "multiply")


@dataclass(frozen=True, eq=False)
class _Part:
    """Where a part of a factor goes.

    Attributes:
        node: that takes it into what it makes, undoes it in what it reads, or reads what a Mul multiplies.
        factor: float64, of the channels that the node makes or reads.
        how: which of these.
        position: of the node's input that is multiplied.
    """

    node: gs.Node
    factor: Factor
    how: Literal["take", "undo", "multiply"]
    position: int = 0


@dataclass(frozen=True, eq=False)
class _Search:
    """For where factors can go.

    Attributes:
        int8: names of the convolutions that run in INT8.
        outputs: of the graph.
    """

    int8: Collection[str]
    outputs: Collection[gs.Tensor]

    def parts(self, tensor: gs.Tensor, readers: Sequence[str], factor: Factor) -> list[_Part] | None:
        """Where the factor of a tensor can go; None where it cannot go anywhere but after the tensor."""
        others = self.others(tensor, readers)
        before = None if others is None else self._made(tensor, factor)
        if others is None or before is None:
            return None
        if not all(_stays_half(conv, factor, "undo") for conv in others):
            return None
        return [*before, *(_Part(conv, factor, "undo") for conv in others)]

    def others(self, tensor: gs.Tensor, readers: Sequence[str]) -> list[gs.Node] | None:
        """The convolutions in float that read the tensor beside those named; None where anything else does."""
        # The shape of a tensor does not change.
        found = [reader for reader in tensor.outputs if reader.op != "Shape"]
        others = [reader for reader in found if reader.name not in readers]
        if len(found) - len(others) != len(readers) or any(tensor is output for output in self.outputs):
            return None
        convs = all(self._in_float(reader) and reader.op == "Conv" and reader.inputs[0] is tensor for reader in others)
        return others if convs else None

    def _in_float(self, conv: gs.Node) -> bool:
        """Whether a node is a convolution in float with weights of its own, which can be changed."""
        constant = all(isinstance(tensor, gs.Constant) for tensor in conv.inputs[1:])
        known = conv.op in CONVOLUTIONS and conv.name not in self.int8
        return known and constant and len(conv.inputs[1].outputs) == 1

    def _made(self, tensor: gs.Tensor, factor: Factor) -> list[_Part] | None:
        """Where the factor can go before the tensor."""
        maker = _maker(tensor)
        if maker is None:
            return None

        def read(position: int, part: Factor) -> list[_Part] | None:
            source = maker.inputs[position]
            return None if isinstance(source, gs.Constant) else self.parts(source, [maker.name], part)

        if maker.op in _PASSING:
            return read(0, factor) if _passes(maker, tensor) else None
        if maker.op == "Split" and maker.attrs.get("axis", 0) in _CHANNELS:
            sizes = _sizes(maker.outputs)
            if sizes is None:
                return None
            start = sum(sizes[: next(index for index, output in enumerate(maker.outputs) if output is tensor)])
            whole = np.ones(sum(sizes))
            whole[start : start + len(factor)] = factor
            return read(0, whole)
        if maker.op == "Concat" and maker.attrs["axis"] in _CHANNELS:
            sizes = _sizes(maker.inputs)
            if sizes is None:
                return None
            cut = np.split(factor, np.cumsum(sizes)[:-1])
            return _joined(maker, cut, [read(position, part) for position, part in enumerate(cut)])
        return [_Part(maker, factor, "take")] if self._takes(maker, factor) else None

    def _takes(self, node: gs.Node, factor: Factor) -> bool:
        """Whether a node can make its output times the factor without another node."""
        if node.op in CONVOLUTIONS:
            return node.name in self.int8 or (self._in_float(node) and _stays_half(node, factor, "take"))
        if node.op == "BatchNormalization":
            return not node.attrs.get("training_mode", 0) and all(
                _constant(node, index) is not None for index in (1, 2)
            )
        return _has_constant(node, len(factor))


def _joined(concat: gs.Node, cut: list[Factor], found: list[list[_Part] | None]) -> list[_Part] | None:
    """The parts of a Concat's inputs, of which at least one must fold."""
    left = [position for position, parts in enumerate(found) if parts is None]
    if len(left) == len(found) or any(_by_plugin(concat.inputs[position]) for position in left):
        return None
    folded = [part for parts in found if parts is not None for part in parts]
    return [*folded, *(_Part(concat, cut[position], "multiply", position) for position in left)]


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


def _changed(conv: gs.Node, factor: Factor, how: Literal["take", "undo"]) -> list[Factor]:
    """Weights and bias of a convolution, times the factor of its outputs, or over that of its inputs."""
    weights, *bias = (tensor.values.astype(np.float64) for tensor in conv.inputs[1:])
    groups = int(conv.attrs.get("group", 1))
    # Rows by groups: outputs of a Conv, inputs of a ConvTranspose; columns within the row's group.
    rows, columns = weights.shape[:2]
    across = (how == "take") == (conv.op == "ConvTranspose")
    by_channel = factor if how == "take" else 1 / factor
    spread = np.repeat(by_channel.reshape(groups, columns), rows // groups, axis=0) if across else by_channel[:, None]
    changed = weights * spread.reshape(rows, -1, *[1] * (weights.ndim - 2))
    return [changed, *(values * factor if how == "take" else values for values in bias)]


def _stays_half(conv: gs.Node, factor: Factor, how: Literal["take", "undo"]) -> bool:
    """Whether changed weights and bias are normal numbers of FP16 where they were before.

    An output channel is as exact as its largest weight, and a bias too small for FP16 is nothing beside the products.
    """
    for index, after in enumerate(_changed(conv, factor, how)):
        before = conv.inputs[1 + index].values
        if index == 0:
            was, becomes = _largest(conv, before), _largest(conv, after)
            if np.any((was >= SMALLEST_NORMAL) & (becomes < SMALLEST_NORMAL)):
                return False
        else:
            was, becomes = np.abs(before), np.abs(after)
        if np.any((was <= LARGEST) & (becomes > LARGEST)):
            return False
    return True


def _largest(conv: gs.Node, weights: NDArray[np.floating]) -> Factor:
    """The largest magnitude of each output channel's weights, float64 (outputs,)."""
    rows, columns = weights.shape[:2]
    transposed = conv.op == "ConvTranspose"
    groups = int(conv.attrs.get("group", 1)) if transposed else rows
    by_output = np.abs(weights.astype(np.float64)).reshape(groups, rows // groups, columns if transposed else 1, -1)
    largest: Factor = by_output.max(axis=(1, 3)).reshape(-1)
    return largest


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
    if part.how == "multiply":
        source = node.inputs[part.position]
        node.inputs[part.position] = write.of(Origin.CHANNEL_MAP)("Mul", source, write.const(by_channel, np.float32))
    elif node.name in weights:
        weights[node.name] = _scaled(weights[node.name], factor, 0.0)
    elif node.op in CONVOLUTIONS:
        for index, values in enumerate(_changed(node, factor, part.how), 1):
            node.inputs[index] = write.const(values, np.float32)
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
