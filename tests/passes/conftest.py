from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from trtdet.backends import OnnxRunner
from trtdet.config import Config
from trtdet.passes import Options
from trtdet.passes.base import PassResult
from trtdet.passes.model import to_graph, to_model

Net = Callable[..., onnx.ModelProto]


@pytest.fixture
def net():
    """Writes a model: ``net("(float[1,3,8,8] x) => (float[1,4,8,8] y) {y = Conv(x, w)}", w=array)``."""

    def net(text: str, opset: int = 13, named: bool = True, domain: str = "", **weights: Any) -> onnx.ModelProto:
        imports = f'"" : {opset}' + (f', "{domain}" : 1' if domain else "")
        model = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{imports}]>\nnet {text}")
        for name, value in weights.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
        if named:
            for index, node in enumerate(model.graph.node):
                node.name = f"{node.op_type}_{index}"
        return model

    return net


@pytest.fixture
def run():
    def run(model: onnx.ModelProto, **feeds: np.ndarray) -> dict[str, np.ndarray]:
        return OnnxRunner(model, alone=True).feed(feeds)

    return run


@pytest.fixture
def configure():
    def configure(
        decode: str = "yolov5", size: tuple[int, int] = (8, 8), classes: int = 3, nms: Any = None, **head: Any
    ) -> Config:
        return Config.model_validate(
            {
                "name": "test",
                "classes": [f"c{index}" for index in range(classes)],
                "input": {"size": list(size), "name": head.pop("input_name", None)},
                "head": {"decode": decode, **head},
                "nms": nms or {},
            }
        )

    return configure


@pytest.fixture
def normal():
    def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
        return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)

    return normal


@pytest.fixture
def applied(configure):
    """A model after a pass, and the result of the pass."""

    def applied(
        rewriting: Any, model: onnx.ModelProto, config: Config | None = None, **options: Any
    ) -> tuple[onnx.ModelProto, PassResult]:
        graph = to_graph(onnx.shape_inference.infer_shapes(model))
        result = rewriting.apply(graph, Options(config or configure(), **options))
        return to_model(graph), result

    return applied


@pytest.fixture
def same(run, normal):
    """Checks that a model gives, for random inputs, what another gives."""

    def same(after: onnx.ModelProto, before: onnx.ModelProto, rtol: float = 0, atol: float = 0) -> None:
        weights = {weight.name for weight in before.graph.initializer}
        shapes = {value.name: value.type.tensor_type.shape.dim for value in before.graph.input}
        feeds = {
            name: normal(*(dim.dim_value or 2 for dim in dims)) for name, dims in shapes.items() if name not in weights
        }
        expected, outputs = run(before, **feeds), run(after, **feeds)
        assert outputs.keys() == expected.keys()
        for name, value in outputs.items():
            np.testing.assert_allclose(value, expected[name], rtol=rtol, atol=atol)

    return same
