from __future__ import annotations

from typing import Any

import nets
import numpy as np
import onnx
import pytest

from trtdet.backends import OnnxRunner
from trtdet.calibration import Range, Ranges, expose
from trtdet.quantization import QdqPlacement, place
from trtdet.quantization.encoding import Rounded, nearest, weight_scales


def inferred(text: str, **weights: Any) -> onnx.ModelProto:
    """Writes a model with named nodes and inferred shapes, as the passes leave one."""
    return onnx.shape_inference.infer_shapes(nets.net(text, **weights))


net = pytest.fixture(lambda: inferred, name="net")
normal = pytest.fixture(lambda: nets.normal, name="normal")


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
