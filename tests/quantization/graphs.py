"""What tests look up in the models that quantisation writes."""

from __future__ import annotations

import numpy as np
import onnx


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Every initializer by name."""
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def makers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """The node that makes each tensor."""
    return {name: node for node in model.graph.node for name in node.output}
