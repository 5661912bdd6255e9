from typing import Any

import nets
import numpy as np
import onnx
import pytest

from trtdet.backends import OnnxRunner
from trtdet.config import Config
from trtdet.passes import Options
from trtdet.passes.base import PassResult
from trtdet.passes.model import to_graph, to_model


def run_alone(model: onnx.ModelProto, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    return OnnxRunner(model, alone=True).feed(feeds)


def apply_pass(
    rewriting: Any, model: onnx.ModelProto, config: Config | None = None, **options: Any
) -> tuple[onnx.ModelProto, PassResult]:
    """A model after a pass, and the result of the pass."""
    graph = to_graph(onnx.shape_inference.infer_shapes(model))
    result = rewriting.apply(graph, Options(config or nets.configuration(), **options))
    return to_model(graph), result


def assert_same(after: onnx.ModelProto, before: onnx.ModelProto, rtol: float = 0, atol: float = 0) -> None:
    """Checks that a model gives, for random inputs, what another gives."""
    weights = {weight.name for weight in before.graph.initializer}
    shapes = {value.name: value.type.tensor_type.shape.dim for value in before.graph.input if value.name not in weights}
    feeds = {name: nets.normal(*(dim.dim_value or 2 for dim in dims)) for name, dims in shapes.items()}
    expected, outputs = run_alone(before, **feeds), run_alone(after, **feeds)
    assert outputs.keys() == expected.keys()
    for name, value in outputs.items():
        np.testing.assert_allclose(value, expected[name], rtol=rtol, atol=atol)


net = pytest.fixture(lambda: nets.net, name="net")
normal = pytest.fixture(lambda: nets.normal, name="normal")
configure = pytest.fixture(lambda: nets.configuration, name="configure")
run = pytest.fixture(lambda: run_alone, name="run")
applied = pytest.fixture(lambda: apply_pass, name="applied")
same = pytest.fixture(lambda: assert_same, name="same")
