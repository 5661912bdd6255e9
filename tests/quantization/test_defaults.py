import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trtdet.building.graph import host_graph
from trtdet.config import load_config
from trtdet.passes import Options, load_model, rewrite
from trtdet.quantization import Cause, PrecisionPlan, default_plan, place


def planned(model: Any) -> PrecisionPlan:
    return default_plan(model, place(model))


def causes(model: Any) -> dict[str, Cause]:
    return {name: entry.cause for name, entry in planned(model).entries.items()}


def chain(net: Any, normal: Any, **kernels: tuple[int, ...]) -> Any:
    """Convolutions one after the other, the last of which is read by another with 32 channels and gives the output."""
    groups = {name: 32 // shape[1] if shape[1:2] in ((1,), (8,)) else 1 for name, shape in kernels.items()}
    lines, source = [], "x"
    for name in kernels:
        lines.append(f"t_{name} = Conv<group = {groups[name]}>({source}, {name}) r_{name} = Relu(t_{name})")
        source = f"r_{name}"
    text = f"(float[1,N,8,8] x) => (y) {{ {' '.join(lines)} z = Conv({source}, dense) y = Conv(z, dense) }}"
    weights = {name: normal(*shape, seed=index) for index, (name, shape) in enumerate(kernels.items())}
    return net(text, **weights, dense=normal(32, 32, 1, 1))


@pytest.mark.parametrize(
    ("kernel", "cause", "reason"),
    [
        ((32, 1, 1, 1), Cause.DEPTHWISE, "depthwise: .* FP16 kernel is as fast, and INT8 pads its channels to 32"),
        ((64, 1, 1, 1), Cause.DEPTHWISE, "depthwise"),
        ((32, 3, 1, 1), Cause.FEW_CHANNELS, r"^3 input channels: under 16, INT8 kernels pad them$"),
        ((1, 32, 1, 1), Cause.FEW_CHANNELS, r"^1 output channel: under 16"),
        ((15, 32, 1, 1), Cause.FEW_CHANNELS, r"^15 output channels: under 16"),
        ((128, 8, 1, 1), Cause.FEW_CHANNELS, r"^8 input channels a group: under 16"),
        ((16, 16, 1, 1), Cause.QUANTIZABLE, "^convolution$"),
    ],
)
def test_what_int8_makes_no_faster_stays_in_fp16_with_the_reason(net, normal, kernel, cause, reason):
    entry = planned(chain(net, normal, w=kernel)).entries["Conv_0"]
    assert (entry.cause, entry.precision) == (cause, "int8" if cause is Cause.QUANTIZABLE else "fp16")
    assert re.search(reason, entry.reason)


@pytest.mark.parametrize("kernel", [(16, 32, 1, 1), (32, 16, 1, 1), (17, 32, 1, 1)])
def test_where_kernels_write_int8_themselves_16_channels_are_as_many_bytes_as_in_fp16(net, normal, kernel):
    """Vectors of 32 bytes a place: 16 values in FP16, 32 in INT8."""
    model = chain(net, normal, w=kernel)
    entry = default_plan(model, place(model), fused=True).entries["Conv_0"]
    assert (entry.cause is Cause.FEW_CHANNELS) == (16 in kernel)
    assert "under 17, INT8 kernels pad them" in entry.reason or 17 in kernel
    assert planned(model).entries["Conv_0"].precision == "int8"


HEAD = "(float[1,32,8,8] x) => (float[N] y) { a = Conv(x, w) b = Relu(a) c = Conv(b, w) %s }"


@pytest.mark.parametrize(
    "rest",
    [
        "y = Identity(c)",
        "d = Sigmoid(c) y = Flatten(d)",
        "d = Split<axis = 1>(c) e = Exp(d) f = Transpose<perm = [0, 2, 3, 1]>(e) y = Flatten(f)",
        "d = Mul(c, x) e = Concat<axis = 1>(d, d) f = Add(e, e) y = Flatten(f)",
        # The expectation of a softmax, as a convolution and as a product.
        "s = Softmax<axis = 1>(c) y = Conv(s, sum)",
        "t = Transpose<perm = [0, 2, 3, 1]>(c) s = Softmax<axis = 3>(t) y = MatMul(s, bins)",
        # That of the boxes of a decoder's layer, from which the next one goes on (D-FINE).
        "t = Transpose<perm = [0, 2, 3, 1]>(c) s = Softmax<axis = 3>(t) d = MatMul(s, bins) y = MatMul(d, wide)",
        # Centre and size to corners.
        "t = Reshape(c, rows) y = MatMul(t, corners)",
        # What is only asked for its shape is not read.
        "s = Shape(c) d = Expand(bins, s) y = Conv(x, w)",
        # Scores of rows, the best of which a decoder's layer reads (RT-DETR).
        "f = Reshape(c, flat) m = ReduceMax<axes = [1], keepdims = 0>(f) s, i = TopK<axis = 1>(m, best) "
        "r = Reshape(b, flat) g = Gather<axis = 2>(r, i) h = Squeeze(g, first) y = MatMul(h, dense)",
    ],
)
def test_the_outputs_of_a_head_stay_in_fp16(net, normal, rest):
    weights = {
        "w": normal(32, 32, 1, 1),
        "sum": np.ones((1, 32, 1, 1), np.float32),
        "bins": np.ones((32, 1), np.float32),
        "wide": np.ones((1, 32), np.float32),
        "rows": np.array([1, -1, 4], np.int64),
        "corners": np.ones((4, 4), np.float32),
        "flat": np.array([1, 32, 64], np.int64),
        "best": np.array([16], np.int64),
        "first": np.array([0], np.int64),
        "dense": normal(16, 16),
    }
    plan = planned(net(HEAD % rest, **{name: value for name, value in weights.items() if name in HEAD % rest}))
    assert (plan.entries["Conv_2"].precision, plan.entries["Conv_2"].cause) == ("fp16", Cause.HEAD_OUTPUT)
    assert plan.entries["Conv_2"].reason.startswith("head output: gives boxes or scores")
    assert plan.entries["Conv_0"].cause is Cause.QUANTIZABLE


@pytest.mark.parametrize(
    "rest",
    [
        "d = Sigmoid(c) e = Mul(b, d) y = Conv(e, w)",
        # The weights of deformable attention.
        "d = Softmax<axis = 1>(c) e = Mul(b, d) f = Flatten(e) y = MatMul(f, dense)",
        # A transposed convolution is never in INT8, but what comes after it is.
        "d = ConvTranspose(c, w) y = Conv(d, w)",
        # A transformer's layers.
        "d = Flatten(c) y = MatMul(d, dense)",
        "d = MatMul(c, c) e = Softmax<axis = 3>(d) y = Flatten(e)",
        # The best values themselves, and not the rows they are in.
        "f = Reshape(c, flat) s, i = TopK<axis = 2>(f, best) y = MatMul(s, wide)",
    ],
)
def test_what_another_layer_reads_is_no_output_of_a_head(net, normal, rest):
    weights = {
        "w": normal(32, 32, 1, 1),
        "dense": np.ones((2048, 16), np.float32),
        "flat": np.array([1, 32, 64], np.int64),
        "best": np.array([16], np.int64),
        "wide": np.ones((16, 16), np.float32),
    }
    found = causes(net(HEAD % rest, **{name: value for name, value in weights.items() if name in HEAD % rest}))
    assert found["Conv_2"] is Cause.QUANTIZABLE


def test_what_cannot_be_in_int8_keeps_its_own_reason(net, normal):
    text = "(float[1,32,8,8] x) => (float[N] y) { s = Softmax<axis = 1>(x) y = Conv(s, sum) }"
    model = net(text, sum=np.ones((1, 32, 1, 1), np.float32))
    assert planned(model) == place(model).plan
    assert causes(model) == {"Conv_1": Cause.DECODES_BOXES}


def test_a_plan_of_the_defaults_places_pairs_before_the_others_only(net, normal):
    model = chain(net, normal, w=(32, 1, 1, 1), v=(32, 32, 1, 1))
    placement = place(model)
    chosen = placement.following(default_plan(model, placement))
    assert placement.activations == ("x", "r_w", "r_v", "z")
    assert chosen.activations == ("r_w", "r_v")


LEFT = {
    "yolox_nano": ("yolox", 113, {Cause.DEPTHWISE: 30, Cause.FEW_CHANNELS: 1, Cause.HEAD_OUTPUT: 9}),
    "yolov5n": ("yolov5", 60, {Cause.FEW_CHANNELS: 1, Cause.HEAD_OUTPUT: 3}),
    "picodet_s": ("dfl", 133, {Cause.DEPTHWISE: 35, Cause.FEW_CHANNELS: 9, Cause.HEAD_OUTPUT: 4}),
}


@pytest.mark.parametrize("nms", ["host", "native", "efficient"])
@pytest.mark.parametrize("name", LEFT)
def test_what_stays_in_fp16_of_published_models(shared_data, name, nms):
    config, convolutions, left = LEFT[name]
    model = rewrite(load_model(shared_data / "models" / f"{name}.onnx"), Options(load_config(config), nms=nms)).model
    entries = planned(model).entries
    found = [entry.cause for entry in entries.values()]
    assert {cause: found.count(cause) for cause in left} == left
    assert found.count(Cause.QUANTIZABLE) == convolutions - sum(left.values())
    words = {
        Cause.DEPTHWISE: "depthwise: ",
        Cause.FEW_CHANNELS: " channels: under 16",
        Cause.HEAD_OUTPUT: "head output: ",
    }
    for entry in entries.values():
        assert (entry.precision == "fp16") == (entry.cause in words)
        assert words.get(entry.cause, "convolution") in entry.reason


@pytest.mark.parametrize("name", LEFT)
def test_every_convolution_of_published_models_can_be_asked_for(shared_data, name):
    config, convolutions, left = LEFT[name]
    graph = host_graph(shared_data / "models" / f"{name}.onnx", load_config(config))
    assert graph.plan.counts() == {"int8": convolutions - sum(left.values()), "fp16": sum(left.values()), "fp32": 0}
    assert replace(graph, int8_all=True).plan.counts() == {"int8": convolutions, "fp16": 0, "fp32": 0}
