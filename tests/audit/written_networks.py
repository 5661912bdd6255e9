"""Networks written as text."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser


def parsed(text: str, constants: Mapping[str, Any], typed: bool = True) -> onnx.ModelProto:
    """A network with these constants, each node named after its operator and its place; ``typed`` with all shapes."""
    model = onnx.parser.parse_model(text)
    for name, value in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    return onnx.shape_inference.infer_shapes(model) if typed else model


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Small float32 weights at random."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
