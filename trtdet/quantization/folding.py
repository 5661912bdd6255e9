"""scale * f(conv(x)) -> f((scale W) x + scale b): a channel map goes into what makes its tensor

On the way back from the tensor a factor a channel, over 0, passes everything that is positively homogeneous and keeps
channels apart: ReLU and its leaky forms, pooling, Resize, Pad with zeros, Slice along rows and columns. A Concat along
channels cuts the factor into its inputs' channels, and a Split joins it with 1 for the channels that go elsewhere.
Clip (ReLU6), HardSwish and SiLU stop it: they scale what they give by where their input lies.

A convolution of any precision, a BatchNormalization or a product with a constant takes the factor, exactly but for the
rounding of floats. Between products with matrices, whose channels are on the last axis, the products do, a
LayerNormalization and a constant factor, and a constant that is added on the way takes it as well: what Xiao et al.
2023, "SmoothQuant", arXiv:2211.10438, section 4.2 folds scales into. Where some inputs of a Concat lead to none of
these, each of them gets a Mul of its own part, which moves fewer bytes than a Mul after the Concat. The tensor and
those on the way must be no output and have no other reader, except for layers in float, whose weights undo the factor.

An offset (the map's shift) is no factor: only an INT8 layer right before the tensor takes it, in its bias.
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
from trtdet.quantization.weighted import CONVOLUTIONS, PRODUCTS, Weighted, obstacle

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
        tensor: (N, C, H, W), or (..., C) where products read it.
        readers: names of the nodes that want it mapped, one for each input that reads it.
        factor: float64 (C,), over 0; None for 1.
        offset: float64 (C,); None for 0.
        weights: of the INT8 layers, which are written from it later; those that take the map are changed.

    Returns:
        The factor and the offset that are left to be written after the tensor, None each where nothing is left.
    """
    search = _Search(weights, write.graph.outputs, _axis(tensor, readers))
    layer = search.layer(tensor)
    if layer is not None and layer.name in weights and search.others(tensor, readers) == []:
        before = weights[layer.name]
        scale = np.ones(len(before.scales)) if factor is None else factor
        shift = 0.0 if offset is None else offset
        weights[layer.name] = _scaled(before, scale, shift)
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
        int8: names of the layers that run in INT8.
    """
    if _by_plugin(tensor):
        return 0
    parts = _Search(int8, graph.outputs, _axis(tensor, readers)).parts(tensor, readers, np.ones(channels))
    return channels if parts is None else sum(len(part.factor) for part in parts if part.how == "multiply")


@dataclass(frozen=True, eq=False)
class _Part:
    """Where a part of a factor goes.

    Attributes:
        node: that takes it into what it makes, undoes it in what it reads, or reads what a Mul multiplies.
        factor: float64, of the channels that the node makes or reads.
        how: which of these.
        position: of the node's input that is multiplied.
        axis: of the channels.
    """

    node: gs.Node
    factor: Factor
    how: Literal["take", "undo", "multiply"]
    position: int = 0
    axis: int = 1


@dataclass(frozen=True, eq=False)
class _Search:
    """For where factors can go.

    Attributes:
        int8: names of the layers that run in INT8.
        outputs: of the graph.
        axis: of the channels, 1 or -1.
    """

    int8: Collection[str]
    outputs: Collection[gs.Tensor]
    axis: int = 1

    def layer(self, tensor: gs.Tensor) -> gs.Node | None:
        """The convolution or product with weights whose result, bias included, a tensor is."""
        layer = Weighted.making(tensor)
        known = layer is not None and (-1 if layer.node.op in PRODUCTS else 1) == self.axis
        return layer.node if layer is not None and known and layer.node.op != "ConvTranspose" else None

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
        """The layers in float that read the tensor beside those named; None where anything else does."""
        # The shape of a tensor does not change.
        found = [reader for reader in tensor.outputs if reader.op != "Shape"]
        others = [reader for reader in found if reader.name not in readers]
        if len(found) - len(others) != len(readers) or any(tensor is output for output in self.outputs):
            return None
        convs = all(self._in_float(reader) and reader.op == "Conv" and reader.inputs[0] is tensor for reader in others)
        return others if convs else None

    def _in_float(self, conv: gs.Node) -> bool:
        """Whether a node is a layer in float with weights of its own, which can be changed."""
        constant = all(isinstance(tensor, gs.Constant) for tensor in conv.inputs[1:])
        known = conv.op in (CONVOLUTIONS if self.axis == 1 else PRODUCTS) and conv.name not in self.int8
        own = known and constant and len(conv.inputs[1].outputs) == 1
        return own and (conv.op not in PRODUCTS or not obstacle(conv))

    def _made(self, tensor: gs.Tensor, factor: Factor) -> list[_Part] | None:
        """Where the factor can go before the tensor."""
        maker = _maker(tensor)
        if maker is None:
            return None
        if self.axis == -1:
            return self._made_last(maker, tensor, factor)

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

    def _made_last(self, maker: gs.Node, tensor: gs.Tensor, factor: Factor) -> list[_Part] | None:
        """The same where the channels are on the last axis."""
        product = self.layer(tensor)
        if product is not None:
            able = product.name in self.int8 or (self._in_float(product) and _stays_half(product, factor, "take"))
            return [_Part(product, factor, "take")] if able else None
        if maker.op == "LayerNormalization":
            constants = all(isinstance(given, gs.Constant) for given in maker.inputs[1:])
            able = constants and maker.inputs[1].values.shape == factor.shape and tensor is maker.outputs[0]
            return [_Part(maker, factor, "take")] if able else None
        if maker.op in ("Relu", "LeakyRelu", "Identity"):
            return self.parts(maker.inputs[0], [maker.name], factor)
        if not _has_constant(maker, len(factor), -1):
            return None
        if maker.op != "Add":
            return [_Part(maker, factor, "take", axis=-1)]
        (source,) = (given for given in maker.inputs if not isinstance(given, gs.Constant))
        before = self.parts(source, [maker.name], factor)
        return None if before is None else [_Part(maker, factor, "take", axis=-1), *before]

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
    """Weights and bias of a layer, times the factor of its outputs, or over that of its inputs."""
    layer = Weighted.of(conv)
    if layer is not None and conv.op in PRODUCTS:
        weight, added = layer.weight.astype(np.float64), [layer.bias.astype(np.float64)] if layer.has_bias else []
        weight = weight * factor[:, None] if how == "take" else weight / factor
        return [weight, *(values * factor if how == "take" else values for values in added)]
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
    layer = Weighted.of(conv)
    assert layer is not None, "only a layer with weights of its own is asked about"
    for index, after in enumerate(_changed(conv, factor, how)):
        before = layer.bias if index else layer.weight
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


def _has_constant(node: gs.Node, channels: int, axis: int = 1) -> bool:
    """Whether a node multiplies or divides by a constant, one value or one a channel; on the last axis, or adds one."""
    positions = [index for index, tensor in enumerate(node.inputs) if isinstance(tensor, gs.Constant)]
    operators = ("Mul",) if axis == 1 else ("Mul", "Add")
    if len(positions) != 1 or not (node.op in operators or (node.op == "Div" and positions == [1])):
        return False
    values = node.inputs[positions[0]].values
    if axis == -1:
        return bool(values.size == 1 or values.shape[-1] == values.size == channels)
    shape = (*[1] * (4 - values.ndim), *values.shape)
    return values.size == 1 or shape == (1, channels, 1, 1)


def _axis(tensor: gs.Tensor, readers: Sequence[str]) -> int:
    """The axis of the channels in a tensor, by the layers that want it mapped."""
    return -1 if any(node.op in PRODUCTS and node.name in readers for node in tensor.outputs) else 1


def _apply(write: Writer, part: _Part, weights: MutableMapping[str, Rounded]) -> None:
    node, factor = part.node, part.factor
    by_channel = factor.reshape(1, -1, 1, 1) if part.axis == 1 else factor
    layer = Weighted.of(node)
    if part.how == "multiply":
        source = node.inputs[part.position]
        node.inputs[part.position] = write.of(Origin.CHANNEL_MAP)("Mul", source, write.const(by_channel, np.float32))
    elif node.name in weights:
        weights[node.name] = _scaled(weights[node.name], factor, 0.0)
    elif layer is not None and node.op in PRODUCTS:
        weight, *bias = _changed(node, factor, part.how)
        if bias:
            layer.set_bias(write.const(bias[0], np.float32))
        node.inputs[1] = write.const(weight.T if layer.turned else weight, np.float32)
    elif node.op in CONVOLUTIONS:
        for index, values in enumerate(_changed(node, factor, part.how), 1):
            node.inputs[index] = write.const(values, np.float32)
    elif node.op in ("BatchNormalization", "LayerNormalization"):
        for index in range(1, min(len(node.inputs), 3)):
            node.inputs[index] = write.const(node.inputs[index].values * factor, np.float32)
    else:
        index = next(index for index, tensor in enumerate(node.inputs) if isinstance(tensor, gs.Constant))
        values = node.inputs[index].values
        node.inputs[index] = write.const(values / by_channel if node.op == "Div" else values * by_channel, np.float32)


def _scaled(before: Rounded, factor: Factor, offset: Factor | float) -> Rounded:
    scales, bias = before.scales * factor, before.bias * factor + offset
    return Rounded(before.integers, scales.astype(np.float32), bias.astype(np.float32))
