"""The torch form of a model gives onnxruntime's results, for each operator and for whole models."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'trtdet[correct]'")

from models import small_detector  # noqa: E402
from operator_nodes import NODES, READ, SHAPE, model_of  # noqa: E402

from trtdet.backends import OnnxRunner  # noqa: E402
from trtdet.errors import ModelError  # noqa: E402
from trtdet.quantization.encoding import ChannelMap  # noqa: E402
from trtdet.quantization.gradients.network import TorchNetwork, factors  # noqa: E402


@pytest.mark.parametrize("node", NODES)
def test_an_operator_computes_what_onnxruntime_does(node, net, normal):
    model, x = model_of(node, net, normal), normal(*SHAPE, seed=3)
    (expected,) = OnnxRunner(model)(x).values()
    got = TorchNetwork(model, ["y"], {})(torch.from_numpy(x), lambda name, value: value)["y"]
    np.testing.assert_allclose(got.numpy(), expected, rtol=2e-5, atol=2e-5)
    if node not in READ:
        # On the device that computes shapes alone, what is there with what is not is an error, as on a GPU.
        made = TorchNetwork(model, ["y"], {}, "meta")(torch.from_numpy(x), lambda name, value: value)["y"]
        assert (str(made.device), tuple(made.shape)) == ("meta", expected.shape)


def test_a_detector_computes_what_onnxruntime_does_and_reads_what_it_is_given(normal):
    model = small_detector()
    names = [output.name for output in model.graph.output]
    size = [dim.dim_value or 1 for dim in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.abs(normal(*size))
    expected = OnnxRunner(model)(x)
    got = TorchNetwork(model, names, {})(torch.from_numpy(x), lambda name, value: value)
    for name in names:
        np.testing.assert_allclose(got[name].numpy(), expected[name], rtol=1e-3, atol=1e-4)
    source = model.graph.input[0].name
    conv = next(node for node in model.graph.node if node.op_type == "Conv" and node.input[0] != source)
    silent = TorchNetwork(model, names, {conv.input[0]: [(conv.name, 0)]})(
        torch.from_numpy(x), lambda name, value: 0 * value
    )
    assert any(not np.allclose(silent[name].numpy(), expected[name]) for name in names)


def test_outputs_that_other_operators_read_are_given_as_well(net, normal):
    model, x = net("(float[1,4,6,8] x) => (float a, float y) { a = Relu(x) y = Sigmoid(a) }"), normal(1, 4, 6, 8)
    expected = OnnxRunner(model)(x)
    got = TorchNetwork(model, ["a", "y"], {})(torch.from_numpy(x), lambda name, value: value)
    for name in ("a", "y"):
        np.testing.assert_allclose(got[name].numpy(), expected[name], rtol=1e-6)


@pytest.mark.parametrize(("axis", "shape"), [(1, (2, 3, 5, 5)), (1, (2, 3)), (-1, (2, 5, 3)), (-1, (4, 3))])
def test_the_scale_of_a_channel_map_is_laid_along_the_channels(axis, shape):
    scale, like = np.array([1.0, 2.0, 0.5]), torch.ones(shape)
    scaled = like * factors(ChannelMap(1.0, scale, axis), like)
    assert scaled.shape == shape
    np.testing.assert_array_equal(scaled.movedim(axis, -1).reshape(-1, 3).unique(dim=0).numpy(), [scale])
    assert factors(ChannelMap(1.0), like) == factors(None, like) == 1


def test_an_operator_without_a_gradient_is_named(net, normal):
    model = net("(float[1,4,6,8] x) => (float y) { a = CumSum(x, k) y = Relu(a) }", k=np.array(2, np.int64))
    model.graph.node[0].name = "best"
    network = TorchNetwork(model, ["y"], {})
    with pytest.raises(ModelError, match="'best' has no gradient here: the operator CumSum"):
        network(torch.from_numpy(normal(1, 4, 6, 8)).requires_grad_(), lambda name, value: value)
    # Without one it is computed: shapes and anchors need none.
    got = network(torch.from_numpy(normal(1, 4, 6, 8)), lambda name, value: value)["y"]
    expected = OnnxRunner(model)(normal(1, 4, 6, 8))["y"]
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5)
