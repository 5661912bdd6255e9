from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from trtdet.backends import OnnxRunner
from trtdet.calibration import Range, Ranges, expose
from trtdet.quantization import QdqPlacement, place
from trtdet.quantization.encoding import Rounded, nearest, weight_scales


@pytest.fixture
def net():
    """Writes a model with named nodes and inferred shapes, as the passes leave one."""

    def net(text: str, **weights: Any) -> onnx.ModelProto:
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 13]>\nnet {text}')
        for name, value in weights.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
        for index, node in enumerate(model.graph.node):
            node.name = f"{node.op_type}_{index}"
        return onnx.shape_inference.infer_shapes(model)

    return net


@pytest.fixture
def normal():
    def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
        return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)

    return normal


@pytest.fixture
def undone():
    """Weights (out, in, kh, kw), rounded to nearest, for an input that is multiplied by the scale, float (in,)."""

    def undone(weight: np.ndarray, scale: np.ndarray, bias: np.ndarray | None = None) -> Rounded:
        inner = (weight / scale.reshape(1, -1, 1, 1)).astype(np.float32)
        steps = weight_scales(inner)
        integers = nearest(inner.reshape(len(inner), -1), steps).reshape(inner.shape)
        return Rounded(integers, steps, np.zeros(len(inner), np.float32) if bias is None else bias)

    return undone


@pytest.fixture
def measured():
    """The placement of a model and the ranges that one input gives: nothing saturates."""

    def measured(model: onnx.ModelProto, x: np.ndarray) -> tuple[QdqPlacement, Ranges]:
        placement = place(model)
        values = {**OnnxRunner(expose(model, placement.activations))(x), model.graph.input[0].name: x}
        tensors = {
            name: Range(float(np.abs(values[name]).max()), float(values[name].min()), float(values[name].max()))
            for name in placement.activations
        }
        return placement, Ranges("minmax", None, tensors, "key", 1, "sha")

    return measured
