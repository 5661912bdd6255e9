"""Multiply-adds of convolutions and matrix products, from the shapes in the model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx

from trtdet.passes.protobuf import attribute, sizes_of

DEPTHWISE = "depthwise"  # the group of all depthwise convolutions


@dataclass(frozen=True)
class Macs:
    """The work of a convolution, or of a product with a constant matrix."""

    count: int  # multiply-adds for one image; 0 if a size is unknown
    depthwise: bool  # each input channel is a group of its own
    inputs: int = 0  # channels, all groups together
    outputs: int = 0
    groups: int = 1
    kernel: tuple[int, ...] = ()  # its sizes, such as (3, 3)


def multiply_adds(model: onnx.ModelProto) -> dict[str, Macs]:
    """Multiply-adds by convolution and product. Weights may stand behind Q/DQ pairs and casts. Convolutions whose
    weights are not constant count 0. A product of two activations has no channels of its own."""
    graph = model.graph
    shapes = _shapes(graph)
    weights = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    counted = products(model)
    batch = max(1, shapes.get(graph.input[0].name, (1,))[0]) if graph.input else 1
    work = {}
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gemm", "Conv", "ConvTranspose"):
            continue
        constant = node.input[1]
        while constant not in weights and constant in makers and makers[constant].input:
            constant = makers[constant].input[0]
        kernel = weights.get(constant, ())
        if node.op_type in ("MatMul", "Gemm"):
            turned = attribute(node, "transB", 0)
            first, second = (kernel[::-1] if turned else kernel) if len(kernel) == 2 else (0, 0)
            work[node.name] = Macs(counted.get(node.name, 0) // batch, depthwise=False, inputs=first, outputs=second)
            continue
        if not kernel:
            work[node.name] = Macs(0, False)
            continue
        groups = attribute(node, "group", 1)
        # A transposed convolution uses each weight once per place of its input.
        places = shapes.get(node.output[0] if node.op_type == "Conv" else node.input[0], (0, 0, 0))[2:]
        first, second = kernel[0], kernel[1] * groups
        inputs, outputs = (second, first) if node.op_type == "Conv" else (first, second)
        work[node.name] = Macs(
            count=math.prod(kernel) * math.prod(places),
            depthwise=groups > 1 and groups == inputs,
            inputs=inputs,
            outputs=outputs,
            groups=groups,
            kernel=kernel[2:],
        )
    return work


def products(model: onnx.ModelProto) -> dict[str, int]:
    """Multiply-adds by matrix product, for the model's batch. Open sizes count as 1; products without shapes are
    omitted."""
    shapes = _shapes(model.graph) | {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    counts = {}
    for node in model.graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.input[0] in shapes and node.output[0] in shapes:
            turned = attribute(node, "transA", 0)
            summed = shapes[node.input[0]][0 if turned else -1]
            counts[node.name] = math.prod(max(size, 1) for size in (*shapes[node.output[0]], summed))
    return counts


def _shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Sizes of every tensor of known rank; 0 for an open size."""
    return {
        value.name: sizes_of(value)
        for value in (*graph.value_info, *graph.input, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }
