"""Models of a few nodes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser


def net(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 13]>\nnet {text}')
    for name, value in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def conv() -> onnx.ModelProto:
    weight = np.random.default_rng(0).normal(size=(8, 3, 3, 3)).astype(np.float32)
    return net("(float[1,3,16,16] x) => (float[1,8,14,14] y) { y = Conv(x, w) }", w=weight)
