"""The graph of an engine's layers and tensors, and the bytes that the layers move."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import onnx

from trtdet.audit.layers import Layer, Tensor
from trtdet.passes.plugin_ops import PLUGIN_ACTIVATIONS
from trtdet.passes.provenance import Origin, origin_of
from trtdet.quantization import PrecisionPlan
from trtdet.quantization.macs import Macs, multiply_adds, products
from trtdet.quantization.weighted import CONVOLUTIONS, PRODUCTS

POINTWISE = ("kgen", "PointWise", "PointWiseV2", "Reformat", "Scale", "NoOp", "Constant", "ElementWise", "Cast")
"""Layer types that are never a convolution, although they may name the convolutions around them."""

ACTIVATION_FUNCTIONS = (
    *("Clip", "Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "PRelu", "Relu", "Sigmoid", "Softplus", "Swish", "Tanh"),
    *PLUGIN_ACTIVATIONS,
)

TYPE_CHANGES = ("QuantizeLinear", "DequantizeLinear", "Cast")
"""Operators that only change the data type."""

PRECISIONS: Mapping[str, str] = {"Int8": "int8", "FP8": "fp8", "Half": "fp16", "Float": "fp32"}
"""Precision of a convolution by the data type that its layer reads."""

_WRITTEN: Mapping[int, str] = {int(onnx.TensorProto.FLOAT16): "fp16", int(onnx.TensorProto.FLOAT): "fp32"}

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Convolution:
    """A convolution of the plan, or a matrix product with weights, and the index of the layer that runs it.

    ``channels`` are input channels, from the shape of the weights. Kernels of a ``product`` pad no channels.
    """

    name: str
    layer: int
    channels: int
    depthwise: bool
    product: bool = False


class Flow:
    """The graph of an engine's layers, in the order of the builder, and of the tensors between them.

    The entries of ``plan`` are the convolutions; ``model`` is the ONNX model that the engine was built from, with its
    metadata on the origin of each node.
    """

    def __init__(self, layers: Sequence[Layer], plan: PrecisionPlan, model: onnx.ModelProto) -> None:
        self.layers = tuple(layers)
        self.plan = plan
        self.nodes = {node.name: node for node in model.graph.node}
        self.maker: dict[str, onnx.NodeProto] = {name: node for node in model.graph.node for name in node.output}
        self.origins: Mapping[str, Origin] = origin_of(model)
        self.model = model
        self.writers: dict[str, list[int]] = defaultdict(list)
        self.readers: dict[str, list[int]] = defaultdict(list)
        for index, layer in enumerate(self.layers):
            # A copy without a kernel gives the same memory another name; builders list it after what writes the tensor.
            if layer.type == "NoOp":
                for name in (tensor.name for tensor in layer.outputs):
                    self.writers[name] = [writer for tensor in layer.inputs for writer in self.writers[tensor.name]]
                continue
            for tensor in layer.outputs:
                self.writers[tensor.name].append(index)
            for tensor in layer.inputs:
                self.readers[tensor.name].append(index)
        for layer in reversed(self.layers):
            if layer.type == "NoOp":
                for tensor in layer.inputs:
                    self.readers[tensor.name] += [
                        reader for output in layer.outputs for reader in self.readers[output.name]
                    ]
        self.kernels: Mapping[str, int] = self._run_by(plan.entries)
        self.bytes = sum(layer.bytes for layer in self.layers)
        """Bytes that all layers move per run; the body of a loop counts once."""
        graph = model.graph
        values = (*graph.value_info, *graph.output)
        self.types: Mapping[str, int] = {value.name: value.type.tensor_type.elem_type for value in values}
        """Type of each tensor with a type in the model, an ``onnx.TensorProto.DataType``."""
        self.elements: Mapping[str, int] = {
            value.name: math.prod(max(dim.dim_value, 1) for dim in value.type.tensor_type.shape.dim)
            for value in values
            if value.type.tensor_type.HasField("shape")
        }
        """Number of values of each tensor with a shape in the model; a dynamic size counts as 1."""
        self.constants: Mapping[str, tuple[int, ...]] = {one.name: tuple(one.dims) for one in graph.initializer}
        """Shapes of the model's constants, () for a scalar."""
        self.int8_readers = tuple(
            (index, read, frozenset(tensor.name for tensor in layer.outputs))
            for index, layer in reversed(list(enumerate(self.layers)))
            if (read := frozenset(tensor.name for tensor in layer.inputs if tensor.type == "Int8"))
        )
        """Layers that read INT8, the last first: index, INT8 tensors read, all tensors written."""
        self.node_readers = _grouped((name, node) for node in graph.node for name in dict.fromkeys(node.input))

    def _run_by(self, names: Collection[str]) -> dict[str, int]:
        """Index of the layer that runs each node."""
        indices: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            for node in layer.onnx:
                # A pointwise kernel also names the convolutions around it, but never runs them.
                if node in names and (node not in indices or self.layers[indices[node]].type in POINTWISE):
                    indices[node] = index
        places = {node: place for place, node in enumerate(self.nodes)}
        for index, layer in enumerate(self.layers):
            # What runs on a DLA is one layer, which names its first and its last node.
            if layer.type == "DLA" and layer.onnx and places.keys() >= set(layer.onnx):
                inside = range(places[layer.onnx[0]], places[layer.onnx[-1]] + 1)
                within = (name for name in names if places.get(name, -1) in inside)
                indices.update({name: index for name in within if name not in indices})
        return indices

    @cached_property
    def precisions(self) -> Mapping[str, str]:
        """Precision of each convolution of the plan as built, by name; those without a layer are absent.

        It is usually the type of its layer's first input. That may belong to another step of a generated kernel, or be
        a float32 term of a sum in the same kernel. Generated kernels compute products in the type that the model has;
        so do other kernels with an input of it.
        """
        precisions = {}
        for name, index in self.kernels.items():
            layer, node = self.layers[index], self.nodes.get(name)
            precisions[name] = PRECISIONS.get(layer.input, layer.input.lower())
            if node is not None and layer.input not in ("Int8", "FP8"):
                written, product = _WRITTEN.get(self.types.get(node.output[0], 0), ""), node.op_type in PRODUCTS
                read = written in {PRECISIONS.get(tensor.type) for tensor in layer.inputs}
                # A builder without strong typing may run convolutions of a float32 model in FP16.
                if (read and (product or written == "fp16")) or (written and product and layer.type in POINTWISE):
                    precisions[name] = written
        return precisions

    @cached_property
    def convolutions(self) -> Mapping[str, Convolution]:
        """The convolutions and products with constant weights that have their own layer, by name."""
        convolutions = {}
        for name, index in self.kernels.items():
            layer, work = self.layers[index], self.work.get(name)
            if work is not None and work.inputs and layer.type not in POINTWISE and layer.inputs:
                product = self.nodes[name].op_type in PRODUCTS
                convolutions[name] = Convolution(
                    name, layer=index, channels=work.inputs, depthwise=work.depthwise, product=product
                )
        return convolutions

    @cached_property
    def work(self) -> Mapping[str, Macs]:
        """Multiply-adds of the model's convolutions and products for one image, by name."""
        return multiply_adds(self.model)

    @cached_property
    def products(self) -> Mapping[str, int]:
        """Multiply-adds of the model's matrix products for the batch of the engine, by name."""
        return products(self.model)

    @cached_property
    def workers(self) -> Mapping[int, tuple[str, ...]]:
        """The convolutions and matrix products of each layer, by index."""
        return _grouped((index, name) for name, index in self.layer_of.items())

    @cached_property
    def layer_of(self) -> Mapping[str, int]:
        """Index of the layer that multiplies, by name of the convolution or product, also of two activations."""
        return self._run_by(self.work.keys() | self.products.keys())

    @cached_property
    def batch(self) -> int:
        """Images per run by the layers' dimensions; a dynamic batch counts as 1."""
        images = self.model.graph.input[0]
        dims = [tensor.dims for layer in self.layers for tensor in layer.inputs if tensor.name == images.name]
        declared = tuple(dim.dim_value for dim in images.type.tensor_type.shape.dim)
        return max(1, next((sizes[0] for sizes in (*dims, declared) if sizes), 1))

    @cached_property
    def float_bytes(self) -> int:
        """Bytes of a value that is not quantised: 2 if the model dequantises activations to FP16, otherwise 4."""
        dequantised = (self.nodes[name] for name in self.live if self.nodes[name].op_type == "DequantizeLinear")
        half = any(self.types.get(node.output[0]) == onnx.TensorProto.FLOAT16 for node in dequantised)
        return 2 if half else 4

    @cached_property
    def live(self) -> frozenset[str]:
        """The nodes whose results depend on the image; a builder computes all others once."""
        tensors = {value.name for value in self.model.graph.input} - self.constants.keys()
        nodes = set()
        for node in self.model.graph.node:
            if not tensors.isdisjoint(node.input):
                tensors.update(node.output)
                nodes.add(node.name)
        return frozenset(nodes)

    @cached_property
    def runs(self) -> Mapping[int, tuple[Convolution, ...]]:
        """The convolutions of each layer, by index; full TensorRT runs some side by side in one layer."""
        return _grouped((convolution.layer, convolution) for convolution in self.convolutions.values())

    @cached_property
    def hands_on(self) -> frozenset[int]:
        """Indices of the layers that only pass INT8 on, such as pooling, concatenation, copies and padding."""
        return frozenset(
            index
            for index, layer in enumerate(self.layers)
            if layer.inputs
            and index not in self.runs
            and {tensor.type for tensor in (*layer.inputs, *layer.outputs)} == {"Int8"}
        )

    def operators(self, layer: Layer) -> frozenset[str]:
        """The operators that a layer computes, as far as builder and model name them."""
        return frozenset(self.nodes[name].op_type for name in layer.onnx if name in self.nodes)

    def named(self, layer: Layer) -> tuple[str, ...]:
        """Names of a layer for users: its convolutions, else nodes of the user's model, else others, else its own."""
        convolutions = tuple(name for name in layer.onnx if name in self.convolutions and layer.type not in POINTWISE)
        if convolutions:
            return convolutions
        nodes = [name for name in layer.onnx if name in self.nodes]
        around = [name for name in nodes if name in self.kernels or self.nodes[name].op_type in CONVOLUTIONS]
        work = [name for name in nodes if name not in around and self.nodes[name].op_type not in TYPE_CHANGES]
        own = [name for name in work if name not in self.origins or self.origins[name].replaces]
        return tuple(own or work or around) or (layer.name,)

    def work_of(self, layer: Layer) -> frozenset[str]:
        """The operators of a layer without the convolutions and products of the plan, which it may only name."""
        own = (name for name in layer.onnx if name in self.nodes and name not in self.kernels)
        return frozenset(self.nodes[name].op_type for name in own) - set(CONVOLUTIONS)

    def before(self, tensor: str) -> onnx.NodeProto | None:
        """The node that computes an ONNX tensor, skipping Q/DQ pairs, casts and identities."""
        node = self.maker.get(tensor)
        while node is not None and node.op_type in (*TYPE_CHANGES, "Identity"):
            node = self.maker.get(node.input[0])
        return node

    def padding(self, convolution: Convolution) -> float:
        """Channels that the layer of a convolution reads per channel of the model, 1 or more."""
        data = self.layers[convolution.layer].inputs[0]
        if len(data.dims) < 3 or not data.elements or convolution.product:
            return 1.0
        unpadded = math.prod(max(size, 1) for size in (data.dims[0], *data.dims[2:])) * convolution.channels
        return max(1.0, data.elements / unpadded)

    def filling(self, layer: Layer, tensor: Tensor, padding: float) -> int:
        """Bytes of the constant that pads the channels of an output; 0 if the layer reads none."""
        values = tensor.elements * (1 - 1 / padding) if padding > 1 else math.nan
        return sum(constant.bytes for constant in layer.constants if math.isclose(constant.elements, values))


def _grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, tuple[_Value, ...]]:
    groups: dict[_Key, list[_Value]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return {key: tuple(values) for key, values in groups.items()}
