from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from trtdet.backends import OnnxRunner
from trtdet.calibration import Ranges, collect, expose
from trtdet.config import load_config
from trtdet.data import ImageStream
from trtdet.errors import ConfigError, TrtdetWarning
from trtdet.passes import Decoded
from trtdet.quantization import CORRECTIONS, Corrections, Sources, correct, insert_qdq, lint, place
from trtdet.quantization.corrections.channel_map import ChannelMap
from trtdet.quantization.corrections.rounding import Rounded, nearest, weight_scales

NET = """(float[1,3,32,32] x) => (float[1,64,4] boxes, float[1,64,2] scores) {
    a = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w1, b1) s = Sigmoid(a) c = Mul(a, s)
    d = Conv<group = 8, pads = [1,1,1,1], strides = [2,2]>(c, w2, b2) e = Conv(d, w3) f = Add(d, e)
    g = Conv(f, w4, b4) h = Relu(g) i = Conv(h, w5)
    j = Transpose<perm = [0,2,3,1]>(i) k = Reshape(j, to) l, m = Split<axis = 2>(k, sizes)
    boxes = Mul(l, wide) scores = Sigmoid(m) }"""


@pytest.fixture
def model(net: Any, normal: Any) -> onnx.ModelProto:
    first = normal(8, 3, 3, 3, seed=1, scale=0.3) / 127
    first[0] *= 60  # the outlier that one range a tensor has to cover
    return net(
        NET,
        w1=first,
        b1=normal(8, seed=2, scale=0.1),
        w2=normal(8, 1, 3, 3, seed=3, scale=0.5) / np.array([60, *[1] * 7], np.float32).reshape(8, 1, 1, 1),
        b2=normal(8, seed=4, scale=0.1),
        w3=normal(8, 8, 1, 1, seed=5, scale=0.3),
        w4=normal(16, 8, 3, 3, seed=6, scale=0.3)[:, :, 1:2, 1:2],
        b4=normal(16, seed=7, scale=0.1),
        w5=normal(6, 16, 1, 1, seed=8, scale=0.3),
        to=np.array([1, 64, 6], np.int64),
        sizes=np.array([4, 2], np.int64),
        wide=np.float32(10),
    )


@pytest.fixture
def sources(tmp_path: Path) -> Callable[[int], Sources]:
    def sources(count: int = 8) -> Sources:
        rng = np.random.default_rng(0)
        paths = [tmp_path / f"{index}.png" for index in range(count)]
        for path in paths:
            Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)).save(path)
        preprocess = load_config("shapes").input.model_copy(update={"size": (32, 32)})
        return Sources(paths, preprocess, OnnxRunner, Decoded("boxes", "scores"))

    return sources


def chosen(model: onnx.ModelProto, sources: Sources, *rules: str) -> dict[str, Ranges]:
    tensors = place(model).activations
    runner = OnnxRunner(expose(model, tensors))
    stream = ImageStream(sources.images, sources.preprocess)
    found = collect(runner, runner.input, tensors, stream, key="key", images_sha256="sha")
    return {rule: Ranges.choose(found, rule) for rule in rules}


def error_at_head(summary: tuple[str, ...]) -> tuple[float, float]:
    before, after = summary[-1].removeprefix("error at the head ").split(" -> ")
    return float(before), float(after.split()[0])


def test_a_planted_outlier_is_put_right(model: Any, sources: Any) -> None:
    given, placement = sources(), place(model)
    found = correct(model, placement, chosen(model, given, "minmax"), CORRECTIONS, given)
    before, after = error_at_head(found.summary)
    assert after < before / 3
    assert found.ranges.rule == "minmax"
    for entry in found.plan.entries.values():
        assert entry.precision == "int8"
    outlier = found.plan.entries["Conv_3"].corrections[0]
    assert outlier.name == "smooth, shift"
    assert outlier.error < outlier.without / 10
    int8 = insert_qdq(model, placement, found.ranges, found.corrections)
    assert lint(int8) == ()


@pytest.mark.parametrize("names", [*((name,) for name in CORRECTIONS), ("smooth", "bias"), ("shift", "round")])
def test_some_of_the_corrections(model: Any, sources: Any, names: tuple[str, ...]) -> None:
    given, placement = sources(), place(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # of a net this small one alone need not help
        found = correct(model, placement, chosen(model, given, "minmax"), names, given)
    if found.summary[0].startswith("none kept"):
        assert found.plan == placement.plan
        return
    before, after = error_at_head(found.summary)
    assert after <= before
    taken = {name for entry in found.plan.entries.values() for step in entry.corrections for name in [step.name]}
    assert {part for name in taken for part in name.split(", ")} <= set(names)
    assert lint(insert_qdq(model, placement, found.ranges, found.corrections)) == ()


def test_the_best_rule_of_each_tensor(model: Any, sources: Any) -> None:
    given = sources()
    candidates = chosen(model, given, "entropy", "minmax", "percentile")
    found = correct(model, place(model), candidates, (), given)
    assert found.ranges.rule in ("auto", "entropy")
    assert found.corrections.tensors == found.corrections.weights == {}
    for name, entry in found.ranges.tensors.items():
        assert entry.amax in {ranges.tensors[name].amax for ranges in candidates.values()}


def test_it_repeats_itself(model: Any, sources: Any) -> None:
    given, placement = sources(), place(model)
    candidates = chosen(model, given, "percentile")
    one, two = (correct(model, placement, candidates, CORRECTIONS, given) for _ in range(2))
    assert one.plan == two.plan
    for name, rounded in one.corrections.weights.items():
        np.testing.assert_array_equal(rounded.integers, two.corrections.weights[name].integers)
        np.testing.assert_array_equal(rounded.bias, two.corrections.weights[name].bias)


def test_what_does_not_help_is_left_out(model: Any, sources: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("trtdet.quantization.corrections")
    monkeypatch.setattr(module, "_head_errors", lambda *_: [0.1, 0.2, 0.3, 0.4])
    given = sources()
    with pytest.warns(TrtdetWarning, match=r"error at the head 0.1000 -> 0.2000 .* the plain rule 'minmax' stands"):
        found = correct(model, place(model), chosen(model, given, "minmax"), CORRECTIONS, given)
    assert found.corrections.tensors == found.corrections.weights == {}
    assert found.plan == place(model).plan


def test_what_is_refused(model: Any, sources: Any) -> None:
    candidates = chosen(model, sources(2), "minmax")
    with pytest.raises(ConfigError, match="at least 2 calibration images, one of them to judge by, got 1"):
        correct(model, place(model), candidates, CORRECTIONS, sources(1))
    with pytest.raises(ConfigError, match="no correction 'magic'"):
        correct(model, place(model), candidates, ("magic",), sources(2))


def test_images_are_split_once(sources: Any) -> None:
    fit, held = sources(9).split()
    assert [path.name for path in held] == ["3.png", "7.png"]
    assert not set(fit) & set(held)
    assert len(fit) == 7
    assert [len(part) for part in sources(2).split()] == [1, 1]


WRITTEN = {
    "unpadded": "(float[1,4,8,8] x) => (float[1,N,H,W] y) { s = Sigmoid(x) y = Conv(s, w1) }",
    "padded": "(float[1,4,8,8] x) => (float[1,N,H,W] y) { s = Sigmoid(x) y = Conv<pads = [1,1,1,1]>(s, w3) }",
    "both": """(float[1,4,8,8] x) => (float[1,N,H,W] y) {
        s = Sigmoid(x) a = Conv<pads = [1,1,1,1]>(s, w3) b = Conv(s, w1) y = Add(a, b) }""",
    "residual": "(float[1,4,8,8] x) => (float[1,N,H,W] y) { s = Sigmoid(x) a = Conv(s, w1) y = Add(a, s) }",
    "residual of a padded one": """(float[1,4,8,8] x) => (float[1,N,H,W] y) {
        s = Sigmoid(x) a = Conv<pads = [1,1,1,1]>(s, w3) y = Add(a, s) }""",
    "after a product": "(float[1,4,8,8] x) => (float[1,N,H,W] y) { q = Sigmoid(x) s = Div(q, six) y = Conv(q0, w1) }",
    "output": "(float[1,4,8,8] x) => (float[1,N,H,W] y, float[1,4,8,8] s) { s = Mul(x, six) y = Conv(s, w1) }",
}
WRITTEN["after a product"] = WRITTEN["after a product"].replace("q0", "s")


@pytest.mark.parametrize("case", WRITTEN)
def test_a_channel_map_means_the_same(net: Any, normal: Any, case: str) -> None:
    text = WRITTEN[case]
    weights = {"w1": normal(4, 4, 1, 1), "w3": normal(4, 4, 3, 3), "six": np.float32(6)}
    model = net(text, **{name: value for name, value in weights.items() if name in text})
    x = normal(1, 4, 8, 8, seed=1)
    tensor = "s"
    scale, shift = np.array([1.0, 2.0, 0.5, 3.0]), np.array([0.1, -0.2, 0.3, 0.05])
    placement = place(model)
    widest = float(np.abs(OnnxRunner(expose(model, [tensor]))(x)[tensor]).max() + 0.3) * 3
    rounded = {}
    for node in model.graph.node:
        if node.op_type == "Conv":
            weight = weights[node.input[1]]
            inner = weight / scale.reshape(1, 4, 1, 1).astype(np.float32)
            steps = weight_scales(inner)
            integers = nearest(inner.reshape(4, -1), steps).reshape(weight.shape)
            bias = np.einsum("oikl,i->o", weight, shift).astype(np.float32)
            rounded[node.name] = Rounded(integers, steps, bias)
    corrections = Corrections({tensor: ChannelMap(widest, scale, shift)}, rounded)
    int8 = insert_qdq(model, placement, collect_ranges(placement, x, model), corrections)
    assert lint(int8) == ()
    expected, got = OnnxRunner(model)(x), OnnxRunner(int8)(x)
    for name, value in expected.items():
        assert np.abs(got[name] - value).max() < 0.06 * np.abs(value).max(), name
    kinds = [node.op_type for node in int8.graph.node]
    assert kinds.count("Pad") == (1 if "pads" in text else 0)
    assert kinds.count("Mul") - [node.op_type for node in model.graph.node].count("Mul") == {
        "both": 2,
        "residual": 2,
        "after a product": 0,
    }.get(case, 1)


def test_a_map_is_folded_into_the_convolution_before_it(net: Any, normal: Any) -> None:
    model = net(
        "(float[1,4,8,8] x) => (float[1,N,H,W] y) { a = Conv(x, w1) y = Conv(a, w2) }",
        w1=normal(4, 4, 1, 1),
        w2=normal(4, 4, 1, 1, seed=1),
    )
    x = normal(1, 4, 8, 8, seed=2)
    placement = place(model)
    scale, shift = np.array([1.0, 2.0, 0.5, 3.0]), np.array([0.1, -0.2, 0.3, 0.05])
    w2 = onnx.numpy_helper.to_array(model.graph.initializer[1])
    a = OnnxRunner(expose(model, ["a"]))(x)["a"][0]
    amax = float(np.abs(scale[:, None, None] * (a - shift[:, None, None])).max())
    inner = w2 / scale.reshape(1, 4, 1, 1).astype(np.float32)
    steps = weight_scales(inner)
    bias = np.einsum("oikl,i->o", w2, shift).astype(np.float32)
    rounded = Rounded(nearest(inner.reshape(4, -1), steps).reshape(w2.shape), steps, bias)
    corrections = Corrections({"a": ChannelMap(amax, scale, shift)}, {"Conv_1": rounded})
    found = collect_ranges(placement, x, model)
    int8 = insert_qdq(model, placement, found, corrections)
    kinds = {node.op_type for node in int8.graph.node}
    assert kinds == {"QuantizeLinear", "DequantizeLinear", "Conv"}
    expected, got = OnnxRunner(model)(x)["y"], OnnxRunner(int8)(x)["y"]
    assert np.abs(got - expected).max() < 0.08 * np.abs(expected).max()


def collect_ranges(placement: Any, x: np.ndarray, model: onnx.ModelProto) -> Ranges:
    from trtdet.calibration import Range

    found = {**OnnxRunner(expose(model, placement.activations))(x), "x": x}
    tensors = {name: Range(float(np.abs(found[name]).max()), 0.0, 0.0) for name in placement.activations}
    return Ranges("minmax", None, tensors, "key", 1, "sha")
