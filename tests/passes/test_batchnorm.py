import numpy as np
import onnx
import pytest

from trtdet.passes import batchnorm
from trtdet.passes.base import PassResult


def statistics(channels: int, seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = {name: rng.normal(0, 1, channels).astype(np.float32) for name in ("scale", "shift", "mean")}
    return {**values, "variance": rng.uniform(0.1, 2, channels).astype(np.float32)}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("epsilon", [1e-5, 1e-3])
def test_the_convolution_takes_the_normalisation_in(net, normal, applied, same, bias, group, epsilon):
    weights = {"w": normal(6, 3 // group, 3, 3, seed=1), **statistics(6), **({"b": normal(6, seed=2)} if bias else {})}
    text = f"""(float[N,3,8,8] x) => (float[N,6,6,6] y) {{
            c = Conv<group = {group}>(x, w{", b" if bias else ""})
            n = BatchNormalization<epsilon = {epsilon}>(c, scale, shift, mean, variance) y = Relu(n) }}"""
    model = net(text, **weights)
    after, result = applied(batchnorm, model)
    assert result == PassResult(1)
    assert [node.op_type for node in after.graph.node] == ["Conv", "Relu"]
    same(after, model, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        ("a = Conv(x, w) y = NORM(a)", "y"),
        ("a = Conv(x, w, b) y = NORM(a) r = Neg(x) c = Conv(r, w, b) z = SWAPPED(c)", "y z"),  # they share weights
        ("a = Conv(x, w) b = NORM(a) y = SWAPPED(b)", "y"),
    ],
)
def test_every_normalisation_is_folded_and_outputs_keep_their_names(net, normal, applied, same, nodes, outputs):
    count = nodes.count("NORM") + nodes.count("SWAPPED")
    for written, parameters in (("NORM", "scale, shift"), ("SWAPPED", "shift, scale")):
        for name in "abc":
            call = f"BatchNormalization({name}, {parameters}, mean, variance)"
            nodes = nodes.replace(f"{written}({name})", call)
    listed = ", ".join(f"float[1,4,8,8] {name}" for name in outputs.split())
    bias = {"b": normal(4)} if "w, b" in nodes else {}
    model = net(f"(float[1,3,8,8] x) => ({listed}) {{ {nodes} }}", w=normal(4, 3, 1, 1), **bias, **statistics(4))
    after, result = applied(batchnorm, model)
    assert result == PassResult(count)
    assert [output.name for output in after.graph.output] == outputs.split()
    same(after, model, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error")
def test_weights_that_would_exceed_float32_are_left_alone(net, normal, applied):
    body = "a = Conv(x, w) y = BatchNormalization(a, scale, shift, mean, variance)"
    text = f"(float[1,3,8,8] x) => (float[1,4,8,8] y) {{ {body} }}"
    given = {**statistics(4), "scale": np.full(4, 1e30, np.float32), "variance": np.full(4, 1e-30, np.float32)}
    model = net(text, w=normal(4, 3, 1, 1), **given)
    model.graph.node[-1].attribute.append(onnx.helper.make_attribute("epsilon", 0.0))
    after, result = applied(batchnorm, model)
    assert result == PassResult(0, ("BatchNormalization_1: the folded weights exceed float32",))
    assert [node.op_type for node in after.graph.node] == ["Conv", "BatchNormalization"]


NORM = "BatchNormalization({}, scale, shift, mean, variance)"


@pytest.mark.parametrize(
    ("text", "opset", "reason"),
    [
        ("(float[1,4,8,8] x) => (float[1,4,8,8] y) {y = NORM(x)}", 13, "comes from the graph input, not Conv"),
        ("(float[1,4,8,8] x) => (float[1,4,8,8] y) {a = Relu(x) y = NORM(a)}", 13, "comes from Relu, not Conv"),
        (
            "(float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z) {a = Conv(x, w) z = Relu(a) y = NORM(a)}",
            13,
            "the Conv's output has another consumer",
        ),
        (
            "(float[1,4,8,8] x) => (float[1,4,8,8] a, float[1,4,8,8] y) {a = Conv(x, w) y = NORM(a)}",
            13,
            "the Conv's output is an output of the model",
        ),
        (
            "(float[1,4,8,8] x) => (float[1,4,8,8] y) {v = Neg(w) u = Mul(x, x) k = ReduceMax<axes = [2,3]>(u) "
            "a = Conv(x, w, k1) k2 = Flatten(k) k3 = Squeeze(k2, zero) "
            "y = BatchNormalization(a, k3, shift, mean, variance)}",
            13,
            "a weight is not constant",
        ),
        ("(float[1,4,8] x) => (float[1,4,8] y) {a = Conv(x, w1) y = NORM(a)}", 13, "the Conv is not two-dimensional"),
        ("(float[1,4,8,8] x) => (float[1,4,8,8] y) {a = Conv(x, w) y, m, v = TRAIN(a)}", 15, "it is in training mode"),
    ],
)
def test_a_near_match_is_left_with_the_reason(net, normal, applied, same, text, opset, reason):
    weights = {"w": normal(4, 4, 1, 1), "w1": normal(4, 4, 1), "k1": normal(4), "zero": np.array([0]), **statistics(4)}
    for of in ("x", "a"):
        text = text.replace(f"NORM({of})", NORM.format(of))
        train = "BatchNormalization<training_mode = 1>({}, scale, shift, mean, variance)"
        text = text.replace(f"TRAIN({of})", train.format(of))
    weights = {name: value for name, value in weights.items() if f" {name}" in text or f"({name}" in text}
    model = net(text, opset=opset, **weights)
    after, result = applied(batchnorm, model)
    assert result.count == 0
    (skipped,) = result.skipped
    assert skipped.startswith("BatchNormalization_") and skipped.endswith(reason)
    if "training" not in reason:
        same(after, model, rtol=1e-4, atol=1e-5)
