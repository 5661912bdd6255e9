"""scale * f(conv(x)) -> f((scale W) x + scale b): folds a channel map into the layers that make its tensor

A positive factor per channel moves backwards through operators that are positively homogeneous and keep channels apart:
ReLU and its leaky forms, pooling, Resize, Pad with zeros, Slice along rows and columns. A Concat along channels splits
the factor between its inputs. A Split joins it with 1 for the other channels. Clip (ReLU6), HardSwish and SiLU stop it,
since they are not homogeneous.

A convolution of any precision, a BatchNormalization or a product with a constant takes the factor, exactly but for
float rounding. Between matrix products the channels are on the last axis. There products, LayerNormalization and
constant factors take it, and added constants on the way are scaled too (Xiao et al. 2023, "SmoothQuant",
arXiv:2211.10438, section 4.2). If some inputs of a Concat lead to none of these, each of them gets a Mul, which moves
fewer bytes than one after the Concat. The tensor and those on the way must not be outputs or have other readers, except
for float layers, whose weights undo the factor.
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
from trtdet.passes.walk import maker
from trtdet.quantization.encoding import LARGEST, SMALLEST_NORMAL, Rounded, by_channel
from trtdet.quantization.weighted import CONVOLUTIONS, PRODUCTS, Weighted, is_layer

Factor = NDArray[np.float64]

_PASSING = (
    *("Relu", "LeakyRelu", "PRelu", "Identity"),
    *("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Resize", "Pad", "Slice"),
)
_CHANNELS = (1, -3)  # the channel axis of a feature map (N, C, H, W)


def fold_map(
    write: Writer,
    tensor: gs.Tensor,
    readers: Sequence[str],
    factor: Factor | None,
    weights: MutableMapping[str, Rounded],
) -> Factor | None:
    """Changes the graph to compute ``factor * x`` instead of x, without new nodes after the tensor where possible.

    Args:
        tensor: (N, C, H, W), or (..., C) if products read it.
        readers: names of the nodes that read ``factor * x``, one for each input.
        factor: float64 (C,), over 0; None for 1.
        weights: weights of the INT8 layers, which are written later; those that take the map are changed.

    Returns:
        The factor that remains to be applied after the tensor; None if nothing remains.
    """
    search = _Search.of(tensor, readers, write.graph, int8=weights)
    parts = None if factor is None else search.parts(tensor, readers, factor)
    if parts is None:
        return factor
    for part in parts:
        _apply(write, part, weights=weights, axis=search.axis)
    return None


def channels_left(
    graph: gs.Graph, tensor: gs.Tensor, channels: int, readers: Sequence[str], int8: Collection[str]
) -> int:
    """Number of channels of a tensor (N, C, H, W) of a float model whose factor would need a Mul. An activation of the
    plugin library applies a factor per channel itself and needs none. ``readers`` are as in :func:`fold_map`, ``int8``
    the names of the INT8 layers."""
    if _by_plugin(tensor):
        return 0
    parts = _Search.of(tensor, readers, graph, int8=int8).parts(tensor, readers, np.ones(channels))
    return channels if parts is None else sum(len(part.factor) for part in parts if part.how == "multiply")


@dataclass(frozen=True, eq=False)
class _Part:
    """A part of a factor and its place: a node's outputs (take), its inputs (undo), or a Mul before one input."""

    node: gs.Node
    factor: Factor
    how: Literal["take", "undo", "multiply"]
    position: int = 0


@dataclass(frozen=True, eq=False)
class _Search:
    """Searches where factors can go; knows the INT8 layers, the graph's outputs and the channel axis."""

    int8: Collection[str]
    outputs: Collection[gs.Tensor]
    axis: int

    @staticmethod
    def of(tensor: gs.Tensor, readers: Sequence[str], graph: gs.Graph, int8: Collection[str]) -> _Search:
        """A search for a tensor's factor; the layers that read the tensor determine its channel axis."""
        products = any(node.op in PRODUCTS and node.name in readers for node in tensor.outputs)
        return _Search(int8, graph.outputs, axis=-1 if products else 1)

    def parts(self, tensor: gs.Tensor, readers: Sequence[str], factor: Factor) -> list[_Part] | None:
        """The places for a tensor's factor; None if it can only go after the tensor."""
        # Factors do not change shapes.
        reading = [reader for reader in tensor.outputs if reader.op != "Shape"]
        others = [reader for reader in reading if reader.name not in readers]
        if len(reading) - len(others) != len(readers) or tensor in self.outputs:
            return None
        # Besides the readers, only float layers may read the tensor.
        if not all(self._in_float(each) and each.op == "Conv" and each.inputs[0] is tensor for each in others):
            return None
        before = self._made(tensor, factor)
        if before is None or not all(_stays_half(conv, factor, "undo") for conv in others):
            return None
        return [*before, *(_Part(conv, factor, "undo") for conv in others)]

    def _in_float(self, layer: gs.Node) -> bool:
        """Whether a node is a float layer with weights of its own, which can be changed."""
        constant = all(isinstance(tensor, gs.Constant) for tensor in layer.inputs[1:])
        layers = CONVOLUTIONS if self.axis == 1 else PRODUCTS
        own = layer.op in layers and layer.name not in self.int8 and constant and len(layer.inputs[1].outputs) == 1
        return own and (layer.op not in PRODUCTS or is_layer(layer))

    def _able(self, layer: gs.Node, factor: Factor) -> bool:
        return layer.name in self.int8 or (self._in_float(layer) and _stays_half(layer, factor, "take"))

    def _made(self, tensor: gs.Tensor, factor: Factor) -> list[_Part] | None:
        """The places for the factor before the tensor; None if there are none."""
        node = maker(tensor)
        if node is None:
            return None
        if self.axis == -1:
            return self._made_last(node, tensor, factor)

        def read(position: int, part: Factor) -> list[_Part] | None:
            source = node.inputs[position]
            return None if isinstance(source, gs.Constant) else self.parts(source, [node.name], part)

        if node.op in _PASSING:
            return read(0, factor) if _passes(node, tensor) else None
        if node.op in ("Split", "Concat") and node.attrs.get("axis", 0) in _CHANNELS:
            sizes = _sizes(node.outputs if node.op == "Split" else node.inputs)
            if sizes is None:
                return None
            if node.op == "Split":
                start = sum(sizes[: node.outputs.index(tensor)])
                joined = np.ones(sum(sizes))
                joined[start : start + len(factor)] = factor
                return read(0, joined)
            cut = np.split(factor, np.cumsum(sizes)[:-1])
            before = [read(position, part) for position, part in enumerate(cut)]
            unfolded = [position for position, parts in enumerate(before) if parts is None]
            # At least one of the inputs must fold.
            if len(unfolded) == len(before) or any(_by_plugin(node.inputs[position]) for position in unfolded):
                return None
            folded = [part for parts in before if parts is not None for part in parts]
            muls = [_Part(node, cut[position], how="multiply", position=position) for position in unfolded]
            return [*folded, *muls]
        if node.op in CONVOLUTIONS:
            able = self._able(node, factor)
        elif node.op == "BatchNormalization":
            constants = all(isinstance(tensor, gs.Constant) for tensor in node.inputs[1:3])
            able = not node.attrs.get("training_mode", 0) and constants
        else:
            able = _has_constant(node, len(factor))
        return [_Part(node, factor, "take")] if able else None

    def _made_last(self, node: gs.Node, tensor: gs.Tensor, factor: Factor) -> list[_Part] | None:
        """The same with channels on the last axis."""
        layer = Weighted.making(tensor)
        if layer is not None and layer.node.op in PRODUCTS:
            return [_Part(layer.node, factor, "take")] if self._able(layer.node, factor) else None
        if node.op == "LayerNormalization":
            constants = all(isinstance(tensor, gs.Constant) for tensor in node.inputs[1:])
            able = constants and node.inputs[1].values.shape == factor.shape and tensor is node.outputs[0]
            return [_Part(node, factor, "take")] if able else None
        if node.op in ("Relu", "LeakyRelu", "Identity"):
            return self.parts(node.inputs[0], [node.name], factor)
        if not _has_constant(node, len(factor), -1):
            return None
        if node.op != "Add":
            return [_Part(node, factor, "take")]
        (source,) = (source for source in node.inputs if not isinstance(source, gs.Constant))
        before = self.parts(source, [node.name], factor)
        return None if before is None else [_Part(node, factor, "take"), *before]


def _by_plugin(tensor: gs.Tensor) -> bool:
    """Whether an activation of the plugin library applies a Mul after the tensor, together with the rounding."""
    node = maker(tensor, "Concat", *PLUGIN_ACTIVATIONS)
    return node is not None and (node.op != "Concat" or any(_by_plugin(joined) for joined in node.inputs))


def _sizes(tensors: Collection[gs.Tensor]) -> list[int] | None:
    """Numbers of channels; None if one is unknown."""
    shapes = [list(each.values.shape if isinstance(each, gs.Constant) else each.shape or ()) for each in tensors]
    known = all(len(shape) == 4 and isinstance(shape[1], int) for shape in shapes)
    return [shape[1] for shape in shapes] if known else None


def _passes(node: gs.Node, tensor: gs.Tensor) -> bool:
    """Whether a channel factor may move before the node whose first output is the tensor."""
    if tensor is not node.outputs[0]:
        return False
    inputs = [None if each.is_empty() else each for each in node.inputs]
    if node.op == "Resize":
        # tf_crop_and_resize fills places outside of the input with a fixed value, which the factor would not scale.
        inside = node.attrs.get("coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize"
        sizes = _sizes([node.inputs[0], tensor])
        return inside and sizes is not None and sizes[0] == sizes[1]
    if node.op == "Pad":
        _, sides, value, axes = (*inputs, None, None)[:4]
        if not isinstance(sides, gs.Constant) or axes is not None:
            return False
        zeros = value is None or (isinstance(value, gs.Constant) and not np.any(value.values))
        beside = len(sides.values) != 8 or sides.values[1] or sides.values[5]
        return (zeros or node.attrs.get("mode", "constant") != "constant") and not beside
    if node.op == "Slice":
        axes = inputs[3] if len(inputs) > 3 else None
        return isinstance(axes, gs.Constant) and not np.isin(axes.values, _CHANNELS).any()
    return True


def _changed(node: gs.Node, factor: Factor, how: Literal["take", "undo"]) -> list[Factor]:
    """Weights and bias of a layer, times the factor of its outputs, or divided by that of its inputs."""
    layer = Weighted.of(node)
    if layer is not None and node.op in PRODUCTS:
        weights, bias = layer.weight.astype(np.float64), [layer.bias.astype(np.float64)] if layer.has_bias else []
        changed = weights * factor[:, None] if how == "take" else weights / factor
    else:
        weights, *bias = (tensor.values.astype(np.float64) for tensor in node.inputs[1:])
        groups = int(node.attrs.get("group", 1))
        # Rows by groups: outputs of a Conv, inputs of a ConvTranspose; columns within the row's group.
        rows, columns = weights.shape[:2]
        across = (how == "take") == (node.op == "ConvTranspose")
        spread = factor if how == "take" else 1 / factor
        spread = np.repeat(spread.reshape(groups, columns), rows // groups, axis=0) if across else spread[:, None]
        changed = weights * spread.reshape(rows, -1, *[1] * (weights.ndim - 2))
    return [changed, *(values * factor if how == "take" else values for values in bias)]


def _stays_half(node: gs.Node, factor: Factor, how: Literal["take", "undo"]) -> bool:
    """Whether changed weights and bias remain normal FP16 numbers. Only each output channel's largest weight counts. A
    bias too small for FP16 is negligible against the products."""
    layer = Weighted.of(node)
    assert layer is not None, "only a layer with weights of its own is asked about"
    weights, *bias = _changed(node, factor, how)
    rows, columns = weights.shape[:2]
    transposed = node.op == "ConvTranspose"
    groups = int(node.attrs.get("group", 1)) if transposed else rows
    shape = (groups, rows // groups, columns if transposed else 1, -1)
    magnitudes = (np.abs(values.astype(np.float64)).reshape(shape) for values in (layer.weight, weights))
    was, becomes = (values.max(axis=(1, 3)).reshape(-1) for values in magnitudes)
    pairs = [(was, becomes), *((np.abs(layer.bias), np.abs(after)) for after in bias)]
    lost = np.any((was >= SMALLEST_NORMAL) & (becomes < SMALLEST_NORMAL))
    return not lost and not any(np.any((before <= LARGEST) & (after > LARGEST)) for before, after in pairs)


def _has_constant(node: gs.Node, channels: int, axis: int = 1) -> bool:
    """Whether a node multiplies or divides by one constant, or one per channel; on the last axis it may also add it."""
    positions = [index for index, tensor in enumerate(node.inputs) if isinstance(tensor, gs.Constant)]
    operators = ("Mul",) if axis == 1 else ("Mul", "Add")
    if len(positions) != 1 or not (node.op in operators or (node.op == "Div" and positions == [1])):
        return False
    values = node.inputs[positions[0]].values
    if axis == -1:
        return bool(values.size == 1 or values.shape[-1] == values.size == channels)
    shape = (*[1] * (4 - values.ndim), *values.shape)
    return values.size == 1 or shape == (1, channels, 1, 1)


def _apply(write: Writer, part: _Part, weights: MutableMapping[str, Rounded], axis: int) -> None:
    node, factor = part.node, part.factor
    spread = by_channel(factor, axis)
    layer = Weighted.of(node)
    if part.how == "multiply":
        source = node.inputs[part.position]
        node.inputs[part.position] = write.of(Origin.CHANNEL_MAP)("Mul", source, write.const(spread, np.float32))
    elif node.name in weights:
        before = weights[node.name]
        scales, biases = (values.astype(np.float32) for values in (before.scales * factor, before.bias * factor))
        weights[node.name] = Rounded(before.integers, scales, biases)
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
        node.inputs[index] = write.const(values / spread if node.op == "Div" else values * spread, np.float32)
