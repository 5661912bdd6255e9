from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from trtdet.errors import ConfigError, ModelError
from trtdet.passes import Options, opset, silu
from trtdet.passes.base import PassResult
from trtdet.passes.model import to_graph, to_model


def test_the_arrow_stands_in_the_docstring() -> None:
    arrow = "opset < the oldest that is wanted, or 13 -> that opset; opset > the newest that the backend reads -> "
    assert (opset.__doc__ or "").splitlines()[0] == f"{arrow}that opset"


@pytest.mark.parametrize("version", [13, 17, 21])
def test_a_newer_model_keeps_its_opset(net: Any, configure: Any, version: int) -> None:
    graph = to_graph(net("(float[1,3,8,8] x) => (float[1,3,8,8] y) {y = Relu(x)}", opset=version))
    assert opset.apply(graph, Options(configure())) == PassResult(0)
    assert to_model(graph).opset_import[0].version == version


def test_opset_11_becomes_13_with_the_same_numbers_and_names(net: Any, run: Any, configure: Any, normal: Any) -> None:
    text = """(float[N,3,8,8] x) => (float[N,2,64] y) {
        c = Conv<pads = [1,1,1,1]>(x, w)
        s = Softmax<axis = 3>(c)
        a, b = Split<axis = 1, split = [2,4]>(s)
        u = Unsqueeze<axes = [4]>(a)
        q = Squeeze<axes = [4]>(u)
        p = Pad<mode = "constant">(q, pads)
        r = Slice(p, starts, ends, axes)
        m = ReduceSum<axes = [1], keepdims = 1>(b)
        t = Add(r, m)
        l = Clip(t, low, high)
        y = Reshape(l, shape) }"""
    model = net(
        text,
        opset=11,
        w=normal(6, 3, 3, 3, seed=1),
        pads=np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        starts=np.array([1, 1]),
        ends=np.array([9, 9]),
        axes=np.array([2, 3]),
        low=np.float32(0.1),
        high=np.float32(1.5),
        shape=np.array([0, 2, 64]),
    )
    graph = to_graph(model)
    assert opset.apply(graph, Options(configure())) == PassResult(1)
    after = to_model(graph)
    assert [(entry.domain, entry.version) for entry in after.opset_import] == [("", 13)]
    assert "Conv_0" in [node.name for node in after.graph.node]
    assert "Constant" not in [node.op_type for node in after.graph.node]
    assert [value.name for value in after.graph.input] == ["x"]
    x = normal(2, 3, 8, 8)
    np.testing.assert_allclose(run(after, x=x)["y"], run(model, x=x)["y"], rtol=1e-6)


def test_an_operator_without_conversion_is_an_error_that_says_what_to_do(
    net: Any, configure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
        raise RuntimeError("adapter_lookup:\n No Adapter For Scan")

    monkeypatch.setattr(onnx.version_converter, "convert_version", fail)
    graph = to_graph(net("(float[1,3,8,8] x) => (float[1,3,8,8] y) {y = Relu(x)}", opset=11))
    with pytest.raises(ModelError) as caught:
        opset.apply(graph, Options(configure()))
    assert str(caught.value) == (
        "the model's opset 11 cannot be upgraded to 13: adapter_lookup: No Adapter For Scan; export it with opset 13 "
        "or newer"
    )


FORMS = """(float[1,4,6,6] x) => (float[N,4] y) {
    a, b = Split<axis = 1>(x)
    p = Pad(a, pads)
    m = ReduceMax<axes = [2], keepdims = 1>(p)
    g = ReduceMax<axes = [0,1,2,3], keepdims = 0>(x)
    truth = Greater(g, zero)
    i = If(truth) <then_branch = one () => (float[1,2,1,8] t) { t = ReduceMin<axes = [2]>(p) },
                   else_branch = other () => (float[1,2,1,8] e) { e = ReduceMean<axes = [2]>(p) }>
    d = Add(m, i)
    r = Resize<mode = "nearest">(d, roi, scales)
    s = Softmax<axis = 3>(r)
    v = ReduceMean<axes = [2,3], keepdims = 0>(s)
    w = ReduceMean<axes = [2,3], keepdims = 0>(b)
    c = Concat<axis = 1>(v, w)
    y = Reshape(c, shape) }"""


@pytest.mark.parametrize("version", [11, 13, 17])
def test_a_model_is_raised_to_the_oldest_opset_that_is_wanted_with_the_same_numbers_and_names(
    net: Any, run: Any, configure: Any, normal: Any, version: int
) -> None:
    model = net(
        FORMS,
        opset=version,
        pads=np.array([0, 0, 0, 1, 0, 0, 0, 1]),
        zero=np.float32(0),
        roi=np.zeros(0, np.float32),
        scales=np.array([1, 1, 1, 2], np.float32),
        shape=np.array([-1, 4]),
    )
    graph = to_graph(model)
    before = [node.name for node in graph.nodes]
    assert opset.apply(graph, Options(configure(), min_opset=opset.HALF_SCALES)) == PassResult(1)
    after = to_model(graph)
    assert [(entry.domain, entry.version) for entry in after.opset_import] == [("", 19)]
    assert {node.name for node in after.graph.node} == set(before)
    for sign in (1, -1):
        x = sign * np.abs(normal(1, 4, 6, 6))
        np.testing.assert_array_equal(run(after, x=x)["y"], run(model, x=x)["y"])
    assert opset.apply(graph, Options(configure(), min_opset=opset.HALF_SCALES)) == PassResult(0)


@pytest.mark.parametrize(("newest", "version"), [(17, 17), (18, 18), (19, 19), (24, 19)])
def test_no_model_is_raised_past_what_the_backend_reads(net: Any, configure: Any, newest: int, version: int) -> None:
    graph = to_graph(net("(float[1,3,8,8] x) => (float[1,3,8,8] y) {y = Relu(x)}", opset=14))
    opset.apply(graph, Options(configure(), min_opset=opset.HALF_SCALES, max_opset=newest))
    assert graph.opset == version


@pytest.mark.parametrize(("version", "kept"), [(11, 13), (13, 13), (17, 17)])
def test_a_model_that_cannot_be_raised_keeps_its_opset_with_the_reason(
    net: Any, configure: Any, monkeypatch: pytest.MonkeyPatch, version: int, kept: int
) -> None:
    convert = onnx.version_converter.convert_version

    def fail(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
        if version > opset.MINIMUM:
            raise RuntimeError("No Adapter For Scan")
        return convert(model, version)

    monkeypatch.setattr(onnx.version_converter, "convert_version", fail)
    graph = to_graph(net("(float[1,3,8,8] x) => (float[1,3,8,8] y) {y = Relu(x)}", opset=version))
    done = opset.apply(graph, Options(configure(), min_opset=opset.HALF_SCALES))
    said = f"the opset stays {kept}: the model's opset {version} cannot be upgraded to 19: No Adapter For Scan"
    assert (done.count, len(done.skipped)) == (int(kept > version), 1)
    assert done.skipped[0].startswith(said)
    assert graph.opset == kept


def test_functions_of_the_model_are_written_out_when_it_is_raised(run: Any, configure: Any, normal: Any) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13, "local" : 1]>
        net (float[1,3,8,8] x) => (float[1,3,1,1] y) { y = local.mean(x) }
        <opset_import: ["" : 13], domain: "local"> mean (x) => (y) { y = ReduceMean<axes = [2,3]>(x) }"""
    )
    graph = to_graph(model)
    opset.apply(graph, Options(configure(), min_opset=opset.HALF_SCALES))
    after = to_model(graph)
    assert [node.op_type for node in after.graph.node] == ["ReduceMean"]
    assert all(node.name for node in after.graph.node)
    x = normal(1, 3, 8, 8)
    np.testing.assert_array_equal(run(after, x=x)["y"], run(model, x=x)["y"])


def test_nodes_of_other_domains_stay_as_they_are(net: Any, configure: Any) -> None:
    model = net("(float[1,3,8,8] x) => (float[1,3,8,8] y) {r = Relu(x) y = TRT_SiLU(r)}", opset=13)
    model.graph.node[1].domain = "trt.plugins"
    model.opset_import.append(onnx.helper.make_opsetid("trt.plugins", 1))
    graph = to_graph(model)
    opset.apply(graph, Options(configure(), min_opset=opset.HALF_SCALES))
    after = to_model(graph)
    assert [(node.name, node.domain) for node in after.graph.node] == [("Relu_0", ""), ("TRT_SiLU_1", "trt.plugins")]
    assert {entry.domain: entry.version for entry in after.opset_import} == {"": 19, "trt.plugins": 1}


TORCH = """(float[1,3,8,8] x) => (float[1,3,4] y) {
    c = Conv<pads = [1,1,1,1]>(x, w)
    g = Gelu(c)
    m = ReduceMean<keepdims = 0>(g, axes)
    a, b = Split<axis = 2, num_outputs = 2>(m)
    y = Identity(a) }"""


def torch_like(net: Any, normal: Any) -> onnx.ModelProto:
    return net(TORCH, opset=20, w=normal(3, 3, 3, 3), axes=np.array([2]))  # type: ignore[no-any-return]


def test_a_newer_model_becomes_one_of_the_newest_opset_that_is_read(
    net: Any, run: Any, configure: Any, normal: Any
) -> None:
    model = torch_like(net, normal)
    graph = to_graph(onnx.shape_inference.infer_shapes(model))
    result = opset.apply(graph, Options(configure(), max_opset=17))
    after = to_model(graph)
    assert result == PassResult(3)
    assert [(entry.domain, entry.version) for entry in after.opset_import] == [("", 17)]
    assert {"Conv_0", "ReduceMean_2"} <= {node.name for node in after.graph.node}
    assert not {"Gelu", "CastLike", "Constant"} & {node.op_type for node in after.graph.node}
    x = normal(1, 3, 8, 8, seed=1)
    np.testing.assert_allclose(run(after, x=x)["y"], run(model, x=x)["y"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("newest", [20, 24])
def test_a_model_that_the_backend_reads_is_left(net: Any, configure: Any, normal: Any, newest: int) -> None:
    graph = to_graph(onnx.shape_inference.infer_shapes(torch_like(net, normal)))
    before = list(graph.nodes)
    assert opset.apply(graph, Options(configure(), max_opset=newest)) == PassResult(0)
    assert [id(node) for node in graph.nodes] == [id(node) for node in before]


def test_an_operator_that_the_backend_lacks_is_written_by_others_in_any_opset(
    net: Any, run: Any, configure: Any
) -> None:
    model = net("(float[1,3,8,8] x) => (float[1,3,8,8] y) { a = Mish(x) b = CastLike(a, x) y = Swish(b) }", opset=24)
    graph = to_graph(onnx.shape_inference.infer_shapes(model))
    missing = frozenset({"Swish", "CastLike", "NonZero"})
    assert opset.apply(graph, Options(configure(), max_opset=24, missing_ops=missing)) == PassResult(2)
    after = to_model(graph)
    assert [node.op_type for node in after.graph.node] == ["Mish", "Cast", "Sigmoid", "Mul"]
    assert after.opset_import[0].version == 24
    x = np.linspace(-9, 9, 192, dtype=np.float32).reshape(1, 3, 8, 8)
    np.testing.assert_allclose(run(after, x=x)["y"], run(model, x=x)["y"], rtol=1e-6)


def test_an_operator_that_the_backend_lacks_and_nothing_defines_is_left_to_be_refused(net: Any, configure: Any) -> None:
    graph = to_graph(onnx.shape_inference.infer_shapes(net("(float[9] x) => (int64[1,n] y) { y = NonZero(x) }")))
    assert opset.apply(graph, Options(configure(), missing_ops=frozenset({"NonZero"}))) == PassResult(0)
    assert [node.op for node in graph.nodes] == ["NonZero"]


def test_a_node_that_the_older_opset_cannot_say_is_an_error_that_names_it(net: Any, configure: Any) -> None:
    text = '(float[1,3,8,8] x) => (float[1,3,16,16] y) { y = Resize<mode = "linear", antialias = 1>(x, , s) }'
    graph = to_graph(net(text, opset=18, s=np.array([1, 1, 2, 2], np.float32)))
    with pytest.raises(ModelError) as caught:
        opset.apply(graph, Options(configure(), max_opset=17))
    assert str(caught.value) == (
        "node 'Resize_0' (Resize) cannot be expressed in ONNX opset 17, the newest that the backend reads: its "
        "attribute antialias = 1 exists from opset 18 on; export the model with opset 17 or older, or "
        "choose another --backend"
    )


def test_swish_is_not_written_into_an_opset_that_lacks_it(net: Any, configure: Any) -> None:
    graph = to_graph(net("(float[1,3,8,8] x) => (float[1,3,8,8] y) {y = Relu(x)}"))
    with pytest.raises(ConfigError, match=r"Swish of opset 24, the backend reads opsets up to 20; choose --silu keep$"):
        opset.apply(graph, Options(configure(), max_opset=20, silu="swish"))


@pytest.mark.parametrize("version", [25, 26])
def test_swish_is_written_in_the_opset_that_onnxruntime_runs_it_in(
    net: Any, run: Any, configure: Any, version: int
) -> None:
    text = "(float[1,3,8,8] x) => (float[1,3,8,8] y) {s = Sigmoid(x) y = Mul(x, s)}"
    model = net(text, opset=version)
    graph = to_graph(onnx.shape_inference.infer_shapes(model))
    options = Options(configure(), silu="swish")
    opset.apply(graph, options)
    assert silu.apply(graph, options).count == 1
    made = to_model(graph)
    assert [entry.version for entry in made.opset_import] == [24]
    x = np.linspace(-4, 4, 192, dtype=np.float32).reshape(1, 3, 8, 8)
    np.testing.assert_allclose(run(made, x=x)["y"], run(model, x=x)["y"], rtol=1e-6)


def test_a_model_that_needs_a_newer_opset_keeps_it_though_swish_is_wanted(net: Any, configure: Any) -> None:
    inputs = "(float16[2] x, float16[2] m) => (float16[2] y)"
    graph = to_graph(onnx.shape_inference.infer_shapes(net(f"{inputs} {{y = Mod(x, m)}}", opset=28)))
    result = opset.apply(graph, Options(configure(), silu="swish"))
    assert graph.opset == 28
    assert result.skipped[0].startswith("the opset stays 28: node 'Mod_0' (Mod) cannot be expressed in ONNX opset 24")
