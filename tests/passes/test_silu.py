import nets
import numpy as np
import onnx
import pytest

from trtdet.backends import OnnxRunner
from trtdet.passes import Options, silu, to_graph
from trtdet.passes.base import PassResult

SIX = {"three": np.float32(3), "zero": np.float32(0), "six": np.float32(6), "sixth": np.float32(1 / 6)}
HALF = {"half": np.float32(0.5), "one": np.float32(1), "sixth": np.float32(0.1667)}

SILU = {
    "the usual order": "s = Sigmoid(x) y = Mul(x, s)",
    "the other order": "s = Sigmoid(x) y = Mul(s, x)",
    "through Identity": "i = Identity(x) s = Sigmoid(i) j = Identity(s) k = Identity(x) y = Mul(j, k)",
    "through a Cast that changes nothing": "i = Cast<to = 1>(x) s = Sigmoid(i) y = Mul(s, x)",
    "through a wider type": "i = Cast<to = 11>(x) s = Sigmoid(i) j = Cast<to = 1>(s) y = Mul(x, j)",
}
HARD_SWISH = {
    "Clip, Div after": "a = Add(x, three) c = Clip(a, zero, six) m = Mul(x, c) y = Div(m, six)",
    "Clip, Mul after": "a = Add(three, x) c = Clip(a, zero, six) m = Mul(c, x) y = Mul(m, sixth)",
    "Clip, Div before": "a = Add(x, three) c = Clip(a, zero, six) d = Div(c, six) y = Mul(x, d)",
    "the factor on x": "a = Add(x, three) c = Clip(a, zero, six) d = Mul(sixth, x) y = Mul(d, c)",
    "HardSigmoid": "h = HardSigmoid<alpha = 0.16666667, beta = 0.5>(x) y = Mul(h, x)",
    "Max of Min": "a = Add(x, three) b = Min(a, six) c = Max(zero, b) m = Mul(x, c) y = Div(m, six)",
    "Min of Relu": "a = Add(x, three) b = Relu(a) c = Min(b, six) m = Mul(x, c) y = Div(m, six)",
    "a unit clip": "a = Div(x, six) b = Add(a, half) c = Clip(b, zero, one) y = Mul(x, c)",
}
FORMS = [("SiLU", text) for text in SILU.values()] + [("HardSwish", text) for text in HARD_SWISH.values()]
OPERATORS = {
    ("SiLU", "swish"): ("Swish", 24),
    ("SiLU", "plugin"): ("TRT_SiLU", 13),
    ("HardSwish", "swish"): ("HardSwish", 14),
    ("HardSwish", "plugin"): ("TRT_HardSwish", 13),
}


def model_of(text: str, outputs: str = "y", opset: int = 13) -> onnx.ModelProto:
    """A model from the text of its nodes, with those constants that they name."""
    known = {**SIX, **HALF}
    words = set(text.replace("(", " ").replace(")", " ").replace(",", " ").split())
    listed = ", ".join(f"float[2,4,6,6] {name}" for name in outputs.split())
    return nets.net(
        f"(float[2,4,6,6] x) => ({listed}) {{ {text} }}",
        opset=opset,
        **{name: value for name, value in known.items() if name in words},
    )


written = pytest.fixture(lambda: model_of, name="written")


@pytest.mark.parametrize("form", [pytest.param("swish", marks=pytest.mark.opset(24)), "plugin"])
@pytest.mark.parametrize(("kind", "text"), FORMS, ids=[*SILU, *HARD_SWISH])
def test_every_form_becomes_one_node_of_the_same_numbers(written, normal, applied, kind, text, form):
    model, x = written(text), normal(2, 4, 6, 6, scale=4)
    after, result = applied(silu, model, silu=form)
    assert result == PassResult(1)
    operator, opset = OPERATORS[kind, form]
    assert [node.op_type for node in after.graph.node] == [operator]
    assert after.opset_import[0].version == opset
    assert list(after.graph.node[0].input) == ["x"]
    value = after.graph.output[0]
    assert (value.name, value.type.tensor_type.elem_type) == ("y", onnx.TensorProto.FLOAT)
    # Constants that were rounded to four digits are the activation's own afterwards.
    tolerance = 3e-3 if "sixth" in text else 2e-6
    np.testing.assert_allclose(OnnxRunner(after)(x)["y"], OnnxRunner(model)(x)["y"], rtol=tolerance, atol=tolerance)


def test_the_node_has_the_shape_and_the_type_of_its_input_where_none_was_known(written, configure):
    graph = to_graph(written("s = Sigmoid(x) z = Mul(x, s) y = Neg(z)"))
    assert silu.apply(graph, Options(configure(), silu="plugin")).count == 1
    (made,) = (node.outputs[0] for node in graph.nodes if node.op == "TRT_SiLU")
    assert (list(made.shape), made.dtype) == ([2, 4, 6, 6], np.float32)


@pytest.mark.parametrize(("kind", "text"), FORMS, ids=[*SILU, *HARD_SWISH])
def test_keep_leaves_the_graph_as_it_is(written, applied, kind, text):
    model = written(text)
    after, result = applied(silu, model, silu="keep")
    assert result == PassResult(0)
    assert sorted(node.op_type for node in after.graph.node) == sorted(node.op_type for node in model.graph.node)


def test_bounds_that_are_attributes_are_read(net, applied):
    text = "a = Add(x, three) c = Clip<min = 0.0, max = 6.0>(a) m = Mul(x, c) y = Div(m, six)"
    model = net(f"(float[2,4,6,6] x) => (float[2,4,6,6] y) {{ {text} }}", opset=10, three=SIX["three"], six=SIX["six"])
    after, result = applied(silu, model, silu="plugin")
    assert result == PassResult(1)
    assert [node.op_type for node in after.graph.node] == ["TRT_HardSwish"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("s = Sigmoid(x) m = Mul(x, s) y = Add(m, s)", "Mul_1: 's' in between is read by 'Add_2' as well"),
        ("s = Sigmoid(x) y = Mul(x, s)", "Mul_1: 's' in between is an output of the model"),
        ("c = Cast<to = 10>(x) s = Sigmoid(c) d = Cast<to = 1>(s) y = Mul(x, d)", "Mul_3: a Cast in between rounds"),
        ("s = Sigmoid(x) c = Cast<to = 10>(s) d = Cast<to = 1>(c) y = Mul(x, d)", "Mul_3: a Cast in between rounds"),
        ("s = Sigmoid(x) c = Cast<to = 10>(x) d = Cast<to = 1>(c) y = Mul(d, s)", "Mul_3: a Cast in between rounds"),
        ("r = Relu(x) s = Sigmoid(r) y = Mul(x, s)", "Mul_2: its Sigmoid reads another tensor than it multiplies"),
        ("d = Mul(x, half) s = Sigmoid(d) y = Mul(x, s)", "Mul_2: it is 1 x * Sigmoid(0.5 x + 0), not SiLU"),
        ("h = HardSigmoid(x) y = Mul(h, x)", "Mul_1: it is 1 x * clip(0.2 x + 0.5, 0, 1), not HardSwish"),
        (
            "a = Add(x, three) c = Clip(a, zero, six) y = Mul(x, c)",
            "Mul_2: it is 1 x * clip(1 x + 3, 0, 6), not HardSwish",
        ),
        (
            "a = Add(x, three) c = Clip(a, zero, six) m = Mul(x, c) d = Div(m, six) y = Add(d, a)",
            "Mul_2: 'a' in between is read by 'Add_4' as well",
        ),
    ],
)
@pytest.mark.parametrize("form", ["keep", "swish", "plugin"])
def test_a_near_match_is_left_with_its_reason(written, applied, text, reason, form):
    model = written(text, "y s" if "output" in reason else "y")
    after, result = applied(silu, model, silu=form)
    assert result == PassResult(0, (reason,))
    assert [node.op_type for node in after.graph.node] == [node.op_type for node in model.graph.node]
    assert after.opset_import[0].version == 13


@pytest.mark.parametrize("text", ["s = Sigmoid(x) y = Mul(s, half)", "a = Relu(x) y = Mul(a, x)", "y = Sigmoid(x)"])
def test_products_unlike_an_activation_are_not_mentioned(written, applied, text):
    assert applied(silu, written(text), silu="plugin")[1] == PassResult(0)


@pytest.mark.opset(24)
def test_nodes_that_a_model_has_already_are_understood(net, normal, applied):
    text = """(float[2,4,6,6] x) => (float[2,4,6,6] y) {
        a = Swish(x) b = HardSwish(a) c = trt.plugins.TRT_SiLU(b) d = Swish<alpha = 2.0>(c) y = Neg(d) }"""
    model = net(text, opset=24, domain="trt.plugins")
    reason = "Swish_3: it is x * Sigmoid(2 x), not SiLU"
    expected = OnnxRunner(model)(normal(2, 4, 6, 6))["y"]
    for form, count, operators in (
        ("keep", 0, ["Swish", "HardSwish", "TRT_SiLU", "Swish", "Neg"]),
        ("swish", 1, ["Swish", "HardSwish", "Swish", "Swish", "Neg"]),
        ("plugin", 2, ["TRT_SiLU", "TRT_HardSwish", "TRT_SiLU", "Swish", "Neg"]),
    ):
        after, result = applied(silu, model, silu=form)
        assert result == PassResult(count, (reason,))
        assert [node.op_type for node in after.graph.node] == operators
        np.testing.assert_allclose(OnnxRunner(after)(normal(2, 4, 6, 6))["y"], expected, atol=2e-6)


@pytest.mark.opset(24)
def test_several_in_a_row_and_side_by_side(written, normal, applied):
    text = """s = Sigmoid(x) a = Mul(x, s) t = Sigmoid(a) b = Mul(t, a)
        h = HardSigmoid<alpha = 0.166667>(a) c = Mul(a, h) y = Add(b, c)"""
    model, x = written(text), normal(2, 4, 6, 6, scale=4)
    for form in ("swish", "plugin"):
        after, result = applied(silu, model, silu=form)
        assert result == PassResult(3)
        assert len({node.name for node in after.graph.node}) == 4
        np.testing.assert_allclose(OnnxRunner(after)(x)["y"], OnnxRunner(model)(x)["y"], rtol=2e-5, atol=2e-5)


def test_the_decoders_own_sigmoids_are_no_activations(net, configure, normal):
    from trtdet.passes import rewrite

    text = "(float[1,3,64,64] x) => (float[1,64,9] raw) { c = Conv<strides = [8,8]>(x, w) raw = Reshape(c, n) }"
    model = net(text, w=normal(9, 3, 8, 8), n=np.array([1, 64, 9]))
    config = configure("yolov5", (64, 64), 4, strides=[8], scores="logits")
    done = rewrite(model, Options(config, silu="plugin"))
    assert done.results["silu"] == PassResult(0)
    assert "Sigmoid" in [node.op_type for node in done.model.graph.node]
