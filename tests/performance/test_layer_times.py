"""Profiles of simulated layers with known times, and onnxruntime's trace."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trtdet.backends import OnnxRunner
from trtdet.backends.base import LayerTime, RunInfo
from trtdet.backends.onnxruntime import layer_times
from trtdet.backends.tensorrt.engine import onnx_nodes
from trtdet.config import load_config
from trtdet.errors import BackendError, ConfigError
from trtdet.exporter import SHAPES_MODEL
from trtdet.passes.provenance import Origin
from trtdet.performance import OnnxNodes, Profile, ProfileOptions, Target, differences, profile, profile_targets, slower
from trtdet.performance.profiles import joined, part_of
from trtdet.runtime.detector import Detector
from trtdet.tables import Table

CONFIG = load_config("shapes")
NODES = OnnxNodes(("a",))
ORIGINS = {
    "trtdet/qdq/QuantizeLinear_1": Origin.QDQ,
    "trtdet/nms/TopK_7": Origin.NMS,
    "trtdet/nms/step/MatMul_1": Origin.NMS,
    "/neck/up/Conv_output_0/float": Origin.FP16,
    "/neck/act/Mul/TRT_SiLU": Origin.ACTIVATION,
}
"""What trtdet wrote into the models of these tests."""


def layer(name: str, kind: str, ms: float | Sequence[float], onnx: Sequence[str] = (), count: int = 1) -> LayerTime:
    return LayerTime(name, kind, tuple(onnx), (ms, ms) if isinstance(ms, (int, float)) else tuple(ms), count)


def made(*layers: LayerTime, convs: Sequence[str] = ("a", "b"), name: str = "net", plain: float = 10.0) -> Profile:
    info, nodes = RunInfo("a device of paper", "a library of paper"), OnnxNodes(tuple(convs), ORIGINS)
    return Profile(name, "engine", info, 1, layers, nodes, (plain, plain))


def test_time_by_kind_of_operator():
    found = made(
        layer("c1", "Conv", [4.0, 6.0]),
        layer("p", "Pointwise", [1.0, 1.0], count=3),
        layer("c2", "Conv", [2.0, 4.0]),
        plain=8.0,
    )
    conv, pointwise = found.by_type
    assert (conv.name, conv.ms, conv.count, conv.share) == ("Conv", 8.0, 2, pytest.approx(8 / 9))
    # The sums of the runs are 6 and 10.
    assert conv.stddev == pytest.approx(np.sqrt(8))
    assert (pointwise.name, pointwise.ms, pointwise.stddev, pointwise.count) == ("Pointwise", 1.0, 0.0, 3)
    assert found.sum_ms == 9.0
    assert found.overhead == pytest.approx(1 / 8)
    table = found.table(5).markdown()
    assert "| Conv | 8.000 | 2.828 | 2 | 88.9% | 88.9% |" in table
    assert "| Pointwise | 1.000 | 0.000 | 3 | 11.1% | 100.0% |" in table
    assert "9.000 ms; without the profiler a run takes 8.000 ms (stddev 0.000): +12.5% with it" in table


def test_names_that_are_numbers_stand_at_the_left():
    tables = [part for part in made(layer("c1", "7", [4.0, 6.0])).table(5).parts if isinstance(part, Table)]
    assert "\n|---|---:|---:|" in tables[0].markdown()


def test_the_longest_layers_come_first_with_their_place():
    found = made(*(layer(f"l{index}", "Conv", ms) for index, ms in enumerate((1.0, 5.0, 3.0))))
    longest = found.table(2).parts[-1]
    assert isinstance(longest, Table)
    assert longest.title.startswith("The 2 longest of 3 layers")
    assert [row[:2] for row in longest.rows] == [(2, "l1"), (3, "l2")]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["/backbone/backbone/dark2/dark2.1/conv/Conv"], "backbone/dark2"),
        (["model.24.m.0/Conv"], "model.24"),
        (["/model.24/cv2.0/conv/Conv"], "model/24"),
        (["trtdet/qdq/QuantizeLinear_1", "/head/stems.0/conv/Conv"], "head/stems"),
        (["trtdet/nms/TopK_7"], "trtdet/nms"),
        (["trtdet/nms/step/MatMul_1"], "trtdet/nms"),
        (["/neck/up/Conv_output_0/float"], "trtdet/fp16"),
        (["/neck/up/Conv_output_0/float", "/head/stems.0/conv/Conv"], "head/stems"),
        (["/neck/act/Mul/TRT_SiLU"], "neck/act"),
        (["trtdet/nms/brought_along"], "trtdet/nms"),
        (["Conv_41"], ""),
        (["trtdet/qdq/QuantizeLinear_1", "Conv_41"], ""),
        (["Conv_41", "/neck/Conv"], "neck"),
        ([], ""),
    ],
)
def test_the_part_of_the_network_is_the_path_of_a_node_or_the_step_that_wrote_all_of_them(nodes, expected):
    assert part_of(layer("l", "Conv", 1.0, nodes), OnnxNodes((), ORIGINS)) == expected


def test_parts_are_left_out_where_no_name_tells_one():
    assert made(layer("l", "Conv", 1.0, ["Conv_41"])).by_part == ()
    found = made(layer("l", "Conv", 3.0, ["/neck/up/Conv"]), layer("r", "Reorder", 1.0)).by_part
    assert [(one.name, one.share) for one in found] == [("neck/up", 0.75), ("", 0.25)]


def test_profiles_of_one_target_are_joined():
    first, second = (layer("a", "Conv", [1.0, 2.0], ["x"], 2),), (layer("a", "Conv", [3.0], ["x"], 2),)
    assert joined("net", [first, second]) == (layer("a", "Conv", [1.0, 2.0, 3.0], ["x"], 2),)
    with pytest.raises(BackendError, match="'net' ran other layers from one profile to the next"):
        joined("net", [first, (layer("b", "Conv", [3.0]),)])
    with pytest.raises(BackendError, match="other layers"):
        joined("net", [first, (*second, *second)])


@pytest.mark.parametrize(
    ("name", "metadata", "nodes"),
    [
        ("Conv_41", "", ("Conv_41",)),
        ("Conv_41 + Relu_42", "", ("Conv_41", "Relu_42")),
        ("/a/Conv + PWN(PWN(/a/Sigmoid), /a/Mul)", "", ("/a/Conv", "/a/Sigmoid", "/a/Mul")),
        ("a(1)/Conv + PWN(a(1)/Relu)", "", ("a(1)/Conv", "a(1)/Relu")),
        ("{ForeignNode[/a/Concat.../b/TopK]}", "", ("/a/Concat", "/b/TopK")),
        ("Reformatting CopyNode for Input Tensor 0 to Conv_41", "", ()),
        ("__myl_ConvSilu_myl0_12", "", ()),
        ("__myl_ConvSilu_myl0_12", "[ONNX Layer: /a/Conv]\x1e[ONNX Layer: /a/Mul]", ("/a/Conv", "/a/Mul")),
        ("anything", "[ONNX Layer: Conv_41][ONNX Layer: Conv_41]", ("Conv_41",)),
        ("Conv_41", "something else", ("Conv_41",)),
    ],
)
def test_a_layer_of_an_engine_is_traced_to_its_nodes(name, metadata, nodes):
    assert onnx_nodes(name, metadata) == nodes


def test_a_convolution_is_compared_with_all_that_runs_between_it_and_the_next():
    int8 = made(
        layer("quantise", "kgen", 0.1, ["a"]),
        layer("conv a", "CaskConvolution", 1.0, ["a"]),
        layer("scale a", "kgen", 0.5, ["a", "act a", "b"]),
        layer("reformat", "Reformat", 0.2),
        layer("conv b", "CaskConvolution", 1.0, ["b"]),
    )
    fp16 = made(
        layer("conv a + act", "CaskConvolution", 1.2, ["a", "act a"]), layer("conv b", "CaskConvolution", 2.0, ["b"])
    )
    a, b = differences(int8, fp16)
    assert (a.convs, a.first_layers) == (("a",), ("quantise", "conv a", "scale a", "reformat"))
    assert (a.first_ms, a.second_ms, a.gain_ms) == (pytest.approx(1.8), 1.2, pytest.approx(0.6))
    assert (b.convs, b.first_layers, b.gain_ms) == (("b",), ("conv b",), -1.0)
    assert slower(int8, fp16) == [a]
    assert [one.convs for one in slower(fp16, int8)] == [("b",)]


def test_the_convolution_itself_is_never_a_pointwise_kernel_that_names_it():
    first = made(layer("point", "kgen", 0.5, ["a", "b"]), layer("gemm", "gemm", 1.0, ["b"]), convs=("a", "b"))
    second = made(layer("ca", "Conv", 0.1, ["a"]), layer("cb", "Conv", 0.1, ["b"]))
    found = {one.convs: one.first_layers for one in differences(first, second)}
    # Nothing else names a, so its kernel is the one that does; b has one of its own.
    assert found == {("a",): ("point",), ("b",): ("gemm",)}


def test_a_kernel_that_names_several_belongs_to_the_last_that_ran_before_it():
    convs = [layer(name, "Conv", 1.0, [name]) for name in "abc"]
    before, after = layer("before", "kgen", 0.5, ["b", "a"]), layer("after", "kgen", 0.25, ["b", "a", "c"])
    first = made(before, *convs[:2], after, convs[2], convs="abc")
    found = {one.convs: one.first_layers for one in differences(first, made(*convs, convs="abc"))}
    assert found == {("a",): ("before", "a"), ("b",): ("b", "after"), ("c",): ("c",)}


def test_convolutions_that_either_computes_together_stay_together():
    first = made(layer("ab", "Conv", 3.0, ["a", "b"]), layer("c", "Conv", 1.0, ["c"]), convs="abc")
    second = made(*(layer(name, "Conv", 1.0, [name]) for name in "abc"), convs="abc")
    ab, c = differences(first, second)
    assert (ab.convs, ab.gain_ms, c.convs, c.gain_ms) == (("a", "b"), 1.0, ("c",), 0.0)
    assert [one.convs for one in differences(second, first)] == [("a", "b"), ("c",)]


def test_another_order_of_execution_moves_no_layer_that_names_its_nodes():
    a, b = layer("a", "Conv", 1.0, ["a"]), layer("b", "Conv", 1.0, ["b"])
    add = layer("add", "Add", 5.0, ["add"])
    assert slower(made(a, b, add), made(b, a, add)) == []
    assert slower(made(b, a, add), made(a, b, add)) == []


def test_decoding_and_suppression_belong_to_no_convolution():
    conv = layer("a", "Conv", 1.0, ["a"])
    nms = layer("nms", "TopK", 9.0, ["trtdet/nms/TopK_7"])
    copy = layer("copy", "Reformat", 2.0)
    found = differences(made(layer("in", "Reformat", 0.5), conv, nms, copy), made(conv))
    assert [(one.convs, one.part, one.gain_ms) for one in found] == [
        ((), "", 0.5),
        (("a",), "", 0.0),
        ((), "trtdet/nms", 11.0),
    ]
    assert slower(made(conv, nms), made(conv)) == []


def test_a_node_that_only_is_named_like_suppression_belongs_to_the_convolution_before_it():
    conv = layer("a", "Conv", 1.0, ["a"])
    named = layer("own", "TopK", 9.0, ["trtdet/nms/TopK_8"])
    (found,) = differences(made(conv, named), made(conv))
    assert (found.convs, found.gain_ms) == (("a",), 9.0)


def test_what_the_scatter_explains_is_not_called_slower():
    generator = np.random.default_rng(0)
    steady = generator.normal(1.0, 0.01, 50)
    first = made(
        layer("a", "Conv", list(steady + 0.1), ["a"]), layer("b", "Conv", list(generator.normal(1, 1, 50)), ["b"])
    )
    second = made(
        layer("a", "Conv", list(steady[::-1]), ["a"]), layer("b", "Conv", list(generator.normal(0.9, 1, 50)), ["b"])
    )
    (found,) = slower(first, second)
    assert found.convs == ("a",)
    assert found.low_ms < 0.1 < found.high_ms


def test_networks_with_no_convolution_in_common_are_refused():
    with pytest.raises(ConfigError, match="'one' and 'two' run no convolution of the same name"):
        differences(
            made(layer("a", "Conv", 1.0, ["a"]), name="one", convs="a"),
            made(layer("b", "Conv", 1.0, ["b"]), name="two", convs="b"),
        )


@st.composite
def networks(draw: st.DrawFn) -> Profile:
    """Layers in any order that name any convolutions, other nodes or none, but the first convolution at least."""
    names = st.lists(st.sampled_from(["a", "b", "c", "act", "add", "trtdet/nms/TopK_7"]), max_size=3, unique=True)
    kinds = st.sampled_from(["Conv", "kgen", "Reformat"])
    times = st.lists(st.integers(0, 50).map(float), min_size=3, max_size=3)
    found = draw(st.lists(st.builds(layer, st.uuids().map(str), kinds, times, names), max_size=8))
    place = draw(st.integers(0, len(found)))
    return made(*found[:place], layer("first", "Conv", [1.0, 2.0, 3.0], ["a"]), *found[place:], convs="abc")


@given(networks(), networks())
def test_differences_hold_every_layer_once_and_add_up(first, second):
    found = differences(first, second)
    for index, one in enumerate((first, second)):
        layers = [name for row in found for name in (row.first_layers, row.second_layers)[index]]
        assert sorted(layers) == sorted(layer.name for layer in one.layers)
    assert sum(one.gain_ms for one in found) == pytest.approx(first.sum_ms - second.sum_ms, abs=1e-9)
    convs = [name for one in found for name in one.convs]
    assert len(set(convs)) == len(convs)


class Scripted:
    """A runner that notes what it is asked, and whose layers take as long as it has been profiled often."""

    input, outputs, largest_batch = "images", ("boxes",), None
    on_device = True
    run_info = RunInfo("a device of paper", "a library of paper")

    def __init__(self, name: str, log: list[tuple[Any, ...]], batch: int | None = None) -> None:
        self.name, self.log, self.batch = name, log, batch

    def clocks(self) -> None:
        """Not known."""

    def new_context(self, images: NDArray[np.float32]) -> Scripted:
        return self

    def run(self, transfers: bool = True) -> float:
        self.log.append((self.name, "run", transfers))
        return 2.0

    def compute(self) -> float:
        self.log.append((self.name, "compute"))
        return 2.0

    def profile(self, images: NDArray[np.float32], runs: int, warm_up: int) -> tuple[LayerTime, ...]:
        self.log.append((self.name, "profile", len(images), runs, warm_up))
        return (layer("a", "Conv", [float(len(self.log))] * runs, ["a"]),)


def target(runner: Any) -> Target:
    return Target(runner.name, runner, CONFIG.input, "engine", "native")


def test_two_targets_are_profiled_in_turns_with_plain_runs_between():
    log: list[tuple[Any, ...]] = []
    pair = [target(Scripted(name, log)) for name in "ab"]
    done = profile_targets(pair, [NODES, NODES], ProfileOptions(batch=2, runs=12, warm_up=3))
    profiled = [entry for entry in log if entry[1] == "profile"]
    assert [entry[0] for entry in profiled] == list("ababababab")
    assert [entry[3] for entry in profiled if entry[0] == "a"] == [3, 3, 2, 2, 2]
    assert all(entry[2] == 2 and entry[4] == 3 for entry in profiled)
    # After each part, 3 runs to warm up and then as many as were profiled, the work alone.
    assert log[1:7] == [("a", "run", True)] * 3 + [("a", "compute")] * 3
    assert done.against is not None
    for one in (done.profile, done.against):
        assert len(one.layers[0].ms) == len(one.latency_ms) == 12
        assert one.latency_ms == (2.0,) * 12


def test_one_target_alone_has_nothing_slower():
    done = profile_targets([target(Scripted("a", []))], [NODES], ProfileOptions(runs=2))
    assert done.against is None
    assert done.slower == []
    assert json.loads(json.dumps(done.as_dict()))["against"] is None


def test_a_batch_that_the_other_does_not_take_is_refused_before_anything_runs():
    log: list[tuple[Any, ...]] = []
    pair = [target(Scripted("a", log)), target(Scripted("b", log, batch=1))]
    with pytest.raises(ConfigError, match="'b' takes batches of exactly 1, got --batch 4"):
        profile_targets(pair, [NODES, NODES], ProfileOptions(batch=4))
    assert log == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 0}, "--batch must be at least 1, got 0"),
        ({"runs": 1}, "--runs must be at least 2, got 1"),
        ({"warm_up": 0}, "--warm-up must be at least 1, got 0"),
    ],
)
def test_options_out_of_range(options, said):
    with pytest.raises(ConfigError, match=said):
        ProfileOptions(**options)  # type: ignore[arg-type]


def event(name: str, start: int, duration: int, kind: str = "Conv", category: str = "Node") -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start, "dur": duration, "args": {"op_name": kind}}


def frame(start: int, duration: int) -> dict[str, Any]:
    return event("model_run", start, duration, "", "Session")


def kernels(*names: str) -> list[dict[str, Any]]:
    return [frame(0, 1000), *(event(f"{name}_kernel_time", 10 * i, 5) for i, name in enumerate(names, 1))]


def net(text: str, *names: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\nnet {text}')
    for node, name in zip(model.graph.node, names, strict=False):
        node.name = name
    return model


def test_a_trace_is_split_into_runs_and_the_warm_up_left_out():
    events = []
    for run in range(3):
        start = 1000 * run
        events += [
            event("relu_kernel_time", start + 420, 10 + run, "Relu"),
            event("conv_kernel_time", start + 10, 100 * (run + 1)),
            event("conv_fence_before", start + 9, 1),
            frame(start, 900),
            event("SequentialExecutor::Execute", start + 1, 890, "", "Session"),
        ]
    model = net("(float[1] x) => (float[1] z) { y = Relu(x)  z = Neg(y) }", "conv", "relu")
    conv, relu = layer_times(events, model, 3, 1)
    assert (conv.name, conv.type, conv.ms, conv.count, conv.onnx) == ("conv", "Conv", (0.2, 0.3), 1, ("conv",))
    assert (relu.name, relu.ms) == ("relu", (0.011, 0.012))


def test_a_loop_is_charged_for_what_its_body_does_not():
    events = [
        frame(0, 1000),
        event("loop_kernel_time", 10, 500, "Loop"),
        event("body_kernel_time", 20, 100, "MatMul"),
        event("body_kernel_time", 130, 150, "MatMul"),
        event("inner_kernel_time", 140, 50, "Add"),
        event("after_kernel_time", 510, 7, "Add"),
    ]
    found = {one.name: one for one in layer_times(events, net("(float[1] x) => (float[1] y) { y = Neg(x) }"), 1, 0)}
    assert {name: one.ms[0] for name, one in found.items()} == pytest.approx(
        {"loop": 0.25, "body": 0.2, "inner": 0.05, "after": 0.007}
    )
    assert found["body"].count == 2


def test_a_trace_that_was_cut_is_refused():
    with pytest.raises(BackendError, match="kept 1 of 5 runs"):
        layer_times([frame(0, 10)], net("(float[1] x) => (float[1] y) { y = Neg(x) }"), 5, 1)


def test_fused_kernels_name_the_nodes_that_went_into_them():
    text = """(float[1,8,4,4] x, float[8,8,1,1] w) => (float[1,8,4,4] out) {
        q = Neg(w) c = Conv(x, q) s = Sigmoid(c) m = Mul(c, s) r = Relu(m) out = Abs(r) }"""
    model = net(text, "weights", "conv", "sigmoid", "mul", "relu", "abs")
    events = kernels("ReorderInput", "c_nchwc", "mul/QuickGeluFusion/", "r_nchwc", "ReorderOutput", "abs")
    found = {one.name: one.onnx for one in layer_times(events, model, 1, 0)}
    assert found == {
        "ReorderInput": (),
        "c_nchwc": ("weights", "conv"),
        "mul/QuickGeluFusion/": ("sigmoid", "mul"),
        "r_nchwc": ("relu",),
        "ReorderOutput": (),
        "abs": ("abs",),
    }


def test_an_activation_that_the_convolution_computes_belongs_to_it():
    text = "(float[1] x) => (float[1] a, float[1] b) { c = Neg(x)  r = Relu(c)  a = Abs(r)  b = Exp(r) }"
    model = net(text, "conv", "relu", "abs", "exp")
    assert layer_times(kernels("conv", "abs", "exp"), model, 1, 0)[0].onnx == ("conv", "relu")


def test_every_node_of_the_shipped_model_is_in_one_kernel_and_nothing_is_left_behind(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert isinstance(shapes.runner, OnnxRunner)
    first, second = (shapes.runner.profile(shapes.pixels(1, None, 0), 2, 1) for _ in range(2))
    assert list(tmp_path.iterdir()) == []
    assert [(one.name, one.type, one.onnx) for one in first] == [(one.name, one.type, one.onnx) for one in second]
    convs = [node.name for node in onnx.load(str(SHAPES_MODEL)).graph.node if node.op_type == "Conv"]
    nodes = [name for one in first for name in one.onnx]
    assert len(set(nodes)) == len(nodes)
    assert set(convs) <= set(nodes)
    assert [one.type for one in first if set(convs) & set(one.onnx)] == ["Conv"] * len(convs)
    assert all(len(one.ms) == 2 and min(one.ms) >= 0 and one.count == 1 for one in first)
    assert sum(one.ms[0] for one in first) > 0


def test_a_profile_that_is_stopped_leaves_nothing_behind(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def stopped(self: OnnxRunner, model: bytes, options: Any) -> Any:
        session = load(self, model, options)
        if options.enable_profiling:
            monkeypatch.setattr(session, "run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        return session

    load = OnnxRunner._load
    monkeypatch.setattr(OnnxRunner, "_load", stopped)
    with pytest.raises(KeyboardInterrupt):
        shapes.runner.profile(shapes.pixels(1, None, 0), 2, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_a_loop_is_profiled_with_its_body():
    detector = Detector.open(SHAPES_MODEL, CONFIG, "native")
    images = Target("a", detector.runner, CONFIG.input, "", "native").pixels(1, None, 0)
    found = detector.runner.profile(images, 2, 1)
    (loop,) = [one for one in found if one.type == "Loop"]
    assert isinstance(detector.runner, OnnxRunner)
    nodes = OnnxNodes.of(detector.runner.model)
    body = [one for one in found if one.onnx and one.onnx[0].startswith("trtdet/nms/step/")]
    assert body
    assert all(one.onnx == (one.name,) and part_of(one, nodes) == "trtdet/nms" for one in body)
    assert min(loop.ms) >= 0


def test_a_model_against_itself():
    done = profile(SHAPES_MODEL, CONFIG, ProfileOptions(runs=3, warm_up=1), SHAPES_MODEL)
    assert done.against is not None
    found = differences(done.profile, done.against)
    assert [name for one in found for name in one.convs] == list(done.profile.nodes.convs)
    assert len(done.profile.nodes.convs) == 95
    # onnxruntime numbers the copies between layouts anew each time.
    for row in found:
        first, second = (
            sorted(re.sub(r"_token_\d+", "", name) for name in layers)
            for layers in (row.first_layers, row.second_layers)
        )
        assert first == second
