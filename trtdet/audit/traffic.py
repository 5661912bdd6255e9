"""What an engine's layers move through memory, and what they would move if convolutions were in FP16 instead."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx

from trtdet.audit.layers import Layer, Tensor
from trtdet.passes.plugin_ops import ACTIVATIONS as PLUGIN_ACTIVATIONS
from trtdet.quantize import PrecisionPlan

POINTWISE = ("kgen", "PointWise", "PointWiseV2", "Reformat", "Scale", "NoOp", "Constant", "ElementWise", "Cast")
"""Layer types that are never a convolution, though they may name the convolutions around them."""

ACTIVATIONS = (
    *("Clip", "Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "PRelu", "Relu", "Sigmoid", "Softplus", "Swish", "Tanh"),
    *PLUGIN_ACTIVATIONS,
)
TYPE_CHANGES = ("QuantizeLinear", "DequantizeLinear", "Cast")
_PART_OF_ACTIVATIONS = ("Add", "Div", "Max", "Min", "Mul", "Sub")
_FUSES = frozenset((*ACTIVATIONS, *TYPE_CHANGES, *_PART_OF_ACTIVATIONS, "Concat", "Conv", "ConvTranspose", "Identity"))
"""Operators that a builder takes into the kernel of an FP16 convolution; Concat, because its parts become views."""


@dataclass(frozen=True)
class Convolution:
    """A convolution of the plan and the layer that runs it.

    Attributes:
        name: of the ONNX node.
        layer: index of its layer.
        channels: that it reads, by the shape of its weights.
        depthwise: each of its channels is a group of its own.
    """

    name: str
    layer: int
    channels: int
    depthwise: bool


class Flow:
    """The layers of an engine joined by the tensors between them.

    Args:
        layers: in the order of the builder.
        plan: its entries are the convolutions.
        model: that the engine was built from: what its node names are.
    """

    def __init__(self, layers: Sequence[Layer], plan: PrecisionPlan, model: onnx.ModelProto) -> None:
        self.layers = tuple(layers)
        self.nodes: dict[str, onnx.NodeProto] = {node.name: node for node in model.graph.node}
        self.maker: dict[str, onnx.NodeProto] = {name: node for node in model.graph.node for name in node.output}
        self._shapes = {one.name: tuple(one.dims) for one in model.graph.initializer}
        self.writers: dict[str, list[int]] = defaultdict(list)
        self.readers: dict[str, list[int]] = defaultdict(list)
        for index, layer in enumerate(self.layers):
            for tensor in layer.outputs:
                self.writers[tensor.name].append(index)
            for tensor in layer.inputs:
                self.readers[tensor.name].append(index)
        kernels: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            for node in layer.onnx:
                # A pointwise kernel also names the convolutions around it; the convolution itself is never one.
                if node in plan.entries and (node not in kernels or self.layers[kernels[node]].type in POINTWISE):
                    kernels[node] = index
        self.kernels: Mapping[str, int] = kernels

    @property
    def bytes(self) -> int:
        """What one run of every layer moves; what a loop repeats is counted once."""
        return sum(layer.bytes for layer in self.layers)

    @cached_property
    def convolutions(self) -> Mapping[str, Convolution]:
        """Those that a layer of their own runs, by name."""
        found = {}
        for name, index in self.kernels.items():
            node = self.nodes.get(name)
            if node is None or self.layers[index].type in POINTWISE:
                continue
            shape = self._weight_shape(node.input[1])
            groups = next((one.i for one in node.attribute if one.name == "group"), 1)
            inputs = shape[0] if node.op_type == "ConvTranspose" else shape[1] * groups
            found[name] = Convolution(name, index, inputs, groups > 1 and groups == inputs)
        return found

    @cached_property
    def runs(self) -> Mapping[int, tuple[Convolution, ...]]:
        """The convolutions by index of their layer: full TensorRT runs some side by side in one."""
        found: dict[int, tuple[Convolution, ...]] = {}
        for one in self.convolutions.values():
            found[one.layer] = (*found.get(one.layer, ()), one)
        return found

    def operators(self, layer: Layer) -> frozenset[str]:
        """The operators that a layer computes, as far as the builder names them and the model has them."""
        return frozenset(self.nodes[name].op_type for name in layer.onnx if name in self.nodes)

    def before(self, tensor: str) -> onnx.NodeProto | None:
        """What makes an ONNX tensor, Q/DQ pairs, casts and identities looked through."""
        node = self.maker.get(tensor)
        while node is not None and node.op_type in (*TYPE_CHANGES, "Identity"):
            node = self.maker.get(node.input[0])
        return node

    def padding(self, convolution: Convolution) -> float:
        """How many channels the layer of a convolution reads for each that there is, 1 or more."""
        data = self.layers[convolution.layer].inputs[0]
        if len(data.dims) < 3 or not data.elements:
            return 1.0
        there = math.prod(max(one, 1) for one in (data.dims[0], *data.dims[2:])) * convolution.channels
        return max(1.0, data.elements / there)

    def _undone(self, convolution: Convolution) -> float:
        """The padding that FP16 would not have: that of few channels as a whole it has as well."""
        return self.padding(convolution) if convolution.depthwise else 1.0

    def in_fp16(self, names: Collection[str]) -> int:
        """What the engine would move, were these convolutions in FP16; an estimate from the layers as they are.

        It takes for granted what builders do: an FP16 convolution reads and writes FP16, has its activation in its own
        kernel where nothing quantises the result, and pads no channels. What else reads INT8 keeps its INT8 tensor.

        Args:
            names: convolutions that the engine runs now in INT8.

        Returns:
            Bytes of all layers.
        """
        half = {self.convolutions[name].layer: self.convolutions[name] for name in names}
        stays = self._needed_in_int8(half)
        fused = {index for index in range(len(self.layers)) if self._fuses(index, half, stays)}
        total = 0
        for index, layer in enumerate(self.layers):
            if index in half:
                total += self._half_convolution(layer, half[index], fused)
            elif layer.bytes:
                total += self._neighbour(index, layer, half, stays, fused)
        return total

    def _needed_in_int8(self, half: Collection[int]) -> set[str]:
        """INT8 tensors that an INT8 convolution reads still, itself or after layers that hand INT8 on."""
        stays: set[str] = set()
        for index in reversed(range(len(self.layers))):
            layer = self.layers[index]
            needed = any(tensor.name in stays for tensor in layer.outputs)
            if (index in self.runs and index not in half) or (needed and self._hands_on(index)):
                stays |= {tensor.name for tensor in layer.inputs if tensor.type == "Int8"}
        return stays

    def _fuses(self, index: int, half: Collection[int], stays: Collection[str]) -> bool:
        """Whether a layer would become part of the FP16 convolutions before it."""
        layer = self.layers[index]
        if index in self.runs or not self.operators(layer) <= _FUSES or any(one.name in stays for one in layer.outputs):
            return False
        makers = {maker for tensor in layer.inputs for maker in self.writers[tensor.name] if maker in self.runs}
        return bool(makers) and makers <= set(half) and "Slic" not in layer.name

    def _half_convolution(self, layer: Layer, convolution: Convolution, fused: Collection[int]) -> int:
        data, *others = layer.inputs
        values = data.elements / self._undone(convolution) + sum(tensor.elements for tensor in others)
        weights = sum(tensor.elements for tensor in layer.constants if tensor.type == "Int8")
        values += sum(
            tensor.elements
            for tensor in layer.outputs
            if not self.readers[tensor.name] or not set(self.readers[tensor.name]) <= set(fused)
        )
        return 2 * int(values + weights)

    def _neighbour(
        self, index: int, layer: Layer, half: Mapping[int, Convolution], stays: Collection[str], fused: Collection[int]
    ) -> int:
        if self._hands_on(index) and any(tensor.name in stays for tensor in layer.inputs):
            takers = [half[one] for tensor in layer.outputs for one in self.readers[tensor.name] if one in half]
            if takers:
                values = int(layer.outputs[0].elements / self._undone(takers[0]))
                kept = layer.bytes if layer.outputs[0].name in stays else 0
                # The INT8 tensor has other readers: what is cast to FP16 is a float copy.
                return kept + self._float_copy(index, values) + 6 * values
        inside = index in fused
        total = 0 if inside else sum(tensor.bytes for tensor in dict.fromkeys(layer.constants))
        for tensor in dict.fromkeys(layer.inputs):
            makers = set(self.writers[tensor.name])
            if inside and makers <= set(half):
                continue  # it never leaves the kernel
            total += tensor.elements * 2 if self._turns_half(tensor, half, stays, fused) else tensor.bytes
        written: set[int] = set()
        for tensor in layer.outputs:
            readers = [half[reader] for reader in self.readers[tensor.name] if reader in half]
            values = tensor.elements
            if readers and tensor.name not in stays:
                share = self._undone(readers[0])
                total -= 0 if inside else self.filling(layer, tensor, share)
                values = int(values / share)
            if not self._turns_half(tensor, half, stays, fused):
                total += tensor.bytes
                total += 2 * int(values / self._undone(readers[0])) if readers and tensor.type != "Half" else 0
            elif values not in written:  # an INT8 and a float copy become one
                written.add(values)
                total += 2 * values
        return total

    def _turns_half(
        self, tensor: Tensor, half: Collection[int], stays: Collection[str], fused: Collection[int]
    ) -> bool:
        if tensor.type == "Int8":
            readers = set(self.readers[tensor.name])
            touched = readers & set(half) or readers & set(fused) or set(self.writers[tensor.name]) & set(fused)
            return tensor.name not in stays and bool(touched)
        writers = set(self.writers[tensor.name])
        return tensor.type == "Float" and bool(writers) and (writers <= set(half) or writers <= set(fused))

    def _hands_on(self, index: int) -> bool:
        """Whether a layer only passes INT8 on: pooling, joining, moving, filling up."""
        layer = self.layers[index]
        types = {tensor.type for tensor in (*layer.inputs, *layer.outputs)}
        return bool(layer.inputs) and index not in self.runs and types == {"Int8"}

    def _float_copy(self, index: int, values: int) -> int:
        """Bytes of having in float what a layer hands on in INT8: the layers before it that compute run again."""
        layer = self.layers[index]
        source = layer.inputs[0]
        total = 4 * (source.elements + values) if self.operators(layer) - _FUSES else 0
        makers = [one for one in self.writers[source.name] if self._hands_on(one)]
        return total + (self._float_copy(makers[0], source.elements) if makers else 4 * source.elements)

    def filling(self, layer: Layer, tensor: Tensor, padding: float) -> int:
        """Bytes of the constant that fills the channels of an output up, where the layer reads one."""
        filling = tensor.elements * (1 - 1 / padding)
        return sum(one.bytes for one in layer.constants if padding > 1 and math.isclose(one.elements, filling))

    def _weight_shape(self, tensor: str) -> tuple[int, ...]:
        node = self.maker.get(tensor)
        while node is not None and tensor not in self._shapes:
            tensor = node.input[0]
            node = self.maker.get(tensor)
        return self._shapes[tensor]
