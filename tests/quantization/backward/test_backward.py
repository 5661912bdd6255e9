"""Gradients written as ONNX nodes equal those of torch, for each operator and for a whole detector."""

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from operator_nodes import NODES, SHAPE, model_of

from trtdet.backends import OnnxRunner
from trtdet.errors import ModelError
from trtdet.passes.model import to_graph, to_model
from trtdet.quantization import backward
from trtdet.quantization.backward.sampling import written_out

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'trtdet[correct]'")

from trtdet.quantization.gradients.network import TorchNetwork  # noqa: E402

FLAT = ("suppression", "suppression of centres")
"""Nodes that the gradient does not pass."""


def differentiated(model: onnx.ModelProto, seed: np.ndarray) -> onnx.ModelProto:
    """The model that computes the gradient of ``sum(seed * y)`` by its input."""
    model.graph.output[0].type.tensor_type.ClearField("shape")
    graph = to_graph(onnx.shape_inference.infer_shapes(model))
    written_out(graph)
    graph = to_graph(to_model(graph))
    found = backward.gradients(graph, graph.inputs, {"y": gs.Constant("seed", seed)})
    (slope,) = found.values()
    slope.dtype, slope.shape = np.float32, graph.inputs[0].shape
    graph.outputs = [slope]
    graph.cleanup()
    return to_model(graph)


def compared(model: onnx.ModelProto, x: np.ndarray, normal: Any) -> tuple[np.ndarray, np.ndarray]:
    """The gradient that onnxruntime computes, and that of torch."""
    given = torch.from_numpy(x).requires_grad_()
    y = TorchNetwork(model, ["y"], {})(given, lambda name, value: value)["y"]
    seed = normal(*y.shape, seed=5)
    (y * torch.from_numpy(seed)).sum().backward()
    (got,) = OnnxRunner(differentiated(model, seed))(x).values()
    return got, given.grad.numpy()


@pytest.mark.parametrize("node", [node for node in NODES if node not in FLAT])
def test_the_gradient_of_an_operator_is_that_of_torch(node, net, normal):
    model, x = model_of(node, net, normal), normal(*SHAPE, seed=3)
    np.testing.assert_allclose(*compared(model, x, normal), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("node", FLAT)
def test_a_choice_has_no_gradient(node, net, normal):
    graph = to_graph(onnx.shape_inference.infer_shapes(model_of(node, net, normal)))
    assert not backward.gradients(graph, graph.inputs, {"y": gs.Constant("seed", np.ones(1, np.float32))})


def test_factors_that_are_broadcast_get_the_sum(net, normal):
    """Also where a size is known only when the model runs."""
    model = net(
        "(float[N,4,6,8] x) => (float y) { a = GlobalAveragePool(x) b = Mul(x, a) c = ReduceMax(x, axes) "
        "d = Squeeze(c, axes) e = Add(b, d) y = Div(e, a) }",
        axes=np.array([1], np.int64),
    )
    model.opset_import[0].version, model.ir_version = 21, 10
    x = normal(1, 4, 6, 8, seed=3)
    np.testing.assert_allclose(*compared(model, x, normal), rtol=2e-3, atol=1e-2)


def test_a_condition_gets_no_gradient_however_often_it_is_read(net, normal):
    model = net(
        "(float[2,4,6,8] x) => (float y) { a = Cast<to = 6>(x) b = Cast<to = 9>(a) c = Sin(x) d = Where(b, c, x) "
        "e = Exp(x) y = Where(b, d, e) }"
    )
    np.testing.assert_allclose(*compared(model, normal(*SHAPE, seed=3), normal), rtol=1e-4, atol=1e-5)


def test_an_operator_without_a_gradient_is_named(net, normal):
    model = net("(float[1,4,6,8] x) => (float y) { a = CumSum(x, k) y = Relu(a) }", k=np.array(2, np.int64))
    model.graph.node[0].name = "best"
    graph = to_graph(onnx.shape_inference.infer_shapes(model))
    with pytest.raises(ModelError, match="'best' has no gradient here: the operator CumSum"):
        backward.gradients(graph, graph.inputs, {"y": gs.Constant("seed", np.ones(1, np.float32))})
    model = net('(float[1,4,6,8] x) => (float y) { y = Pad<mode = "edge">(x, w) }', w=np.zeros(8, np.int64))
    model.graph.node[0].name = "edge"
    graph = to_graph(onnx.shape_inference.infer_shapes(model))
    with pytest.raises(ModelError, match="'edge' has no gradient here: a Pad that repeats values"):
        backward.gradients(graph, graph.inputs, {"y": gs.Constant("seed", np.ones(1, np.float32))})
