"""Models of a few nodes, and a machine that has a version of TensorRT."""

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from trtdet.backends import Backend, choose, cuda
from trtdet.backends.libraries import Library


def net(text: str, opset: int = 13, **constants: Any) -> onnx.ModelProto:
    """A network with these constants, each node named after its operator and its place."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>\nnet {text}')
    for name, value in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    return model


def conv() -> onnx.ModelProto:
    weight = np.random.default_rng(0).normal(size=(8, 3, 3, 3)).astype(np.float32)
    return net("(float[1,3,16,16] x) => (float[1,8,14,14] y) { y = Conv(x, w) }", w=weight)


def install_tensorrt(monkeypatch: pytest.MonkeyPatch, version: str) -> Backend:
    """The backend of a machine with this TensorRT and a GPU of compute capability 9.0."""
    library = type("library", (), {"__version__": version})
    monkeypatch.setattr(Library, "load", lambda row: library)
    monkeypatch.setattr(cuda, "devices", lambda: (cuda.Device("a GPU", 90),))
    return choose("tensorrt")
