"""Models, weights and ranges for the tests of quantisation, and searches in quantised models."""

from typing import Any

import nets
import numpy as np
import onnx
import onnx.version_converter

from trtdet.backends import OnnxRunner
from trtdet.calibration import Range, Ranges, expose
from trtdet.quantization import QdqPlacement, place
from trtdet.quantization.encoding import Rounded, nearest, weight_scales


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Every initializer by name."""
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def makers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """The node that makes each tensor."""
    return {name: node for node in model.graph.node for name in node.output}


def undone_weights(weight: np.ndarray, scale: np.ndarray, bias: np.ndarray | None = None) -> Rounded:
    """Weights (out, in, kh, kw), rounded to nearest, for an input that is multiplied by the scale, float (in,)."""
    inner = (weight / scale.reshape(1, -1, 1, 1)).astype(np.float32)
    steps = weight_scales(inner)
    integers = nearest(inner.reshape(len(inner), -1), steps).reshape(inner.shape)
    return Rounded(integers, steps, np.zeros(len(inner), np.float32) if bias is None else bias)


def measured_ranges(model: onnx.ModelProto, x: np.ndarray) -> tuple[QdqPlacement, Ranges]:
    """The placement of a model and the ranges that one input gives: nothing saturates."""
    placement = place(model)
    values = {**OnnxRunner(expose(model, placement.activations))(x), model.graph.input[0].name: x}
    tensors = {
        name: Range(float(np.abs(values[name]).max()), float(values[name].min()), float(values[name].max()))
        for name in placement.activations
    }
    return placement, Ranges("minmax", None, tensors, "key", 1, "sha")


def inferred(text: str, **weights: Any) -> onnx.ModelProto:
    """Writes a model with named nodes and inferred shapes, as the passes leave one."""
    return onnx.shape_inference.infer_shapes(nets.net(text, **weights))


def raised(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model of opset 19, from which on scales may be FP16."""
    newer = onnx.version_converter.convert_version(model, 19)
    newer.ir_version = 10
    return onnx.shape_inference.infer_shapes(newer)
