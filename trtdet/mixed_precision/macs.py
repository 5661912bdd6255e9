"""The work of convolutions: multiply-adds, counted from the shapes in the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

DEPTHWISE = "depthwise"
"""The group of all depthwise convolutions: padded to whole vectors, they are often no faster in INT8 than in FP16."""


@dataclass(frozen=True)
class Macs:
    """Multiply-adds of a convolution for one image, and whether it is depthwise."""

    count: int
    depthwise: bool


def multiply_adds(model: onnx.ModelProto) -> dict[str, Macs]:
    """By convolution, from the shapes in the model; 0 where a size is not known."""
    graph = model.graph
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
    weights = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    found = {}
    for node in graph.node:
        if node.op_type not in ("Conv", "ConvTranspose"):
            continue
        group = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
        kernel = weights.get(node.input[1], [0])
        # A transposed convolution uses each weight once for every place of its input.
        places = shapes.get(node.output[0] if node.op_type == "Conv" else node.input[0], [0])[2:]
        count = int(np.prod(kernel, dtype=np.int64) * np.prod(places, dtype=np.int64))
        found[node.name] = Macs(count, group > 1 and node.op_type == "Conv" and kernel[1:2] == [1])
    return found
