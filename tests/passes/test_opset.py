from typing import Any

import numpy as np
import onnx
import pytest

from trtdet.errors import ConfigError, ModelError
from trtdet.passes import Options, opset, silu
from trtdet.passes.base import PassResult
from trtdet.passes.model import to_graph, to_model

RELU = "(float[1,3,8,8] x) => (float[1,3,8,8] y) {y = Relu(x)}"


@pytest.mark.parametrize("version", [13, 17, 21])
def test_a_newer_model_keeps_its_opset(net, applied, version):
    after, result = applied(opset, net(RELU, opset=version))
    assert result == PassResult(0)
    assert after.opset_import[0].version == version


def test_opset_11_becomes_13_with_the_same_numbers_and_names(net, normal, applied, same):
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
    after, result = applied(opset, model)
    assert result == PassResult(1)
    assert [(entry.domain, entry.version) for entry in after.opset_import] == [("", 13)]
    assert "Conv_0" in [node.name for node in after.graph.node]
    assert "Constant" not in [node.op_type for node in after.graph.node]
    assert [value.name for value in after.graph.input] == ["x"]
    same(after, model, rtol=1e-6)


def test_an_operator_without_conversion_is_an_error_that_says_what_to_do(net, applied, monkeypatch):
    def fail(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
        raise RuntimeError("adapter_lookup:\n No Adapter For Scan")

    monkeypatch.setattr(onnx.version_converter, "convert_version", fail)
    with pytest.raises(ModelError) as caught:
        applied(opset, net(RELU, opset=11))
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
    net, run, configure, normal, version
):
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
def test_no_model_is_raised_past_what_the_backend_reads(net, applied, newest, version):
    after, _ = applied(opset, net(RELU, opset=14), min_opset=opset.HALF_SCALES, max_opset=newest)
    assert after.opset_import[0].version == version


@pytest.mark.parametrize(("version", "kept"), [(11, 13), (13, 13), (17, 17)])
def test_a_model_that_cannot_be_raised_keeps_its_opset_with_the_reason(net, applied, monkeypatch, version, kept):
    convert = onnx.version_converter.convert_version

    def fail(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
        if version > opset.MINIMUM:
            raise RuntimeError("No Adapter For Scan")
        return convert(model, version)

    monkeypatch.setattr(onnx.version_converter, "convert_version", fail)
    after, result = applied(opset, net(RELU, opset=version), min_opset=opset.HALF_SCALES)
    reason = f"the opset stays {kept}: the model's opset {version} cannot be upgraded to 19: No Adapter For Scan"
    assert (result.count, len(result.skipped)) == (int(kept > version), 1)
    assert result.skipped[0].startswith(reason)
    assert after.opset_import[0].version == kept


def test_functions_of_the_model_are_written_out_when_it_is_raised(applied, same):
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13, "local" : 1]>
        net (float[1,3,8,8] x) => (float[1,3,1,1] y) { y = local.mean(x) }
        <opset_import: ["" : 13], domain: "local"> mean (x) => (y) { y = ReduceMean<axes = [2,3]>(x) }"""
    )
    after, _ = applied(opset, model, min_opset=opset.HALF_SCALES)
    assert [node.op_type for node in after.graph.node] == ["ReduceMean"]
    assert all(node.name for node in after.graph.node)
    same(after, model)


def test_nodes_of_other_domains_stay_as_they_are(net, applied):
    model = net("(float[1,3,8,8] x) => (float[1,3,8,8] y) {r = Relu(x) y = TRT_SiLU(r)}", opset=13)
    model.graph.node[1].domain = "trt.plugins"
    model.opset_import.append(onnx.helper.make_opsetid("trt.plugins", 1))
    after, _ = applied(opset, model, min_opset=opset.HALF_SCALES)
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


def test_a_newer_model_becomes_one_of_the_newest_opset_that_is_read(net, normal, applied, same):
    model = torch_like(net, normal)
    after, result = applied(opset, model, max_opset=17)
    assert result == PassResult(3)
    assert [(entry.domain, entry.version) for entry in after.opset_import] == [("", 17)]
    assert {"Conv_0", "ReduceMean_2"} <= {node.name for node in after.graph.node}
    assert not {"Gelu", "CastLike", "Constant"} & {node.op_type for node in after.graph.node}
    same(after, model, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("newest", [20, 24])
def test_a_model_that_the_backend_reads_is_left(net, configure, normal, newest):
    graph = to_graph(onnx.shape_inference.infer_shapes(torch_like(net, normal)))
    before = list(graph.nodes)
    assert opset.apply(graph, Options(configure(), max_opset=newest)) == PassResult(0)
    assert [id(node) for node in graph.nodes] == [id(node) for node in before]


@pytest.mark.opset(24)
def test_an_operator_that_the_backend_lacks_is_written_by_others_in_any_opset(net, applied, same):
    model = net("(float[1,3,8,8] x) => (float[1,3,8,8] y) { a = Mish(x) b = CastLike(a, x) y = Swish(b) }", opset=24)
    missing = frozenset({"Swish", "CastLike", "NonZero"})
    after, result = applied(opset, model, max_opset=24, missing_ops=missing)
    assert result == PassResult(2)
    assert [node.op_type for node in after.graph.node] == ["Mish", "Cast", "Sigmoid", "Mul"]
    assert after.opset_import[0].version == 24
    same(after, model, rtol=1e-6)


def test_an_operator_that_the_backend_lacks_and_nothing_defines_is_left_to_be_refused(net, applied):
    model = net("(float[9] x) => (int64[1,n] y) { y = NonZero(x) }")
    after, result = applied(opset, model, missing_ops=frozenset({"NonZero"}))
    assert result == PassResult(0)
    assert [node.op_type for node in after.graph.node] == ["NonZero"]


def test_a_node_that_the_older_opset_cannot_say_is_an_error_that_names_it(net, applied):
    text = '(float[1,3,8,8] x) => (float[1,3,16,16] y) { y = Resize<mode = "linear", antialias = 1>(x, , s) }'
    with pytest.raises(ModelError) as caught:
        applied(opset, net(text, opset=18, s=np.array([1, 1, 2, 2], np.float32)), max_opset=17)
    assert str(caught.value) == (
        "node 'Resize_0' (Resize) cannot be expressed in ONNX opset 17, the newest that the backend reads: its "
        "attribute antialias = 1 exists from opset 18 on; export the model with opset 17 or older, or "
        "choose another --backend"
    )


def test_swish_is_not_written_into_an_opset_that_lacks_it(net, applied):
    with pytest.raises(ConfigError, match=r"Swish of opset 24, the backend reads opsets up to 20; choose --silu keep$"):
        applied(opset, net(RELU), max_opset=20, silu="swish")


@pytest.mark.opset(26)
@pytest.mark.parametrize("version", [25, 26])
def test_swish_is_written_in_the_opset_that_onnxruntime_runs_it_in(net, applied, same, version):
    text = "(float[1,3,8,8] x) => (float[1,3,8,8] y) {s = Sigmoid(x) y = Mul(x, s)}"
    model = net(text, opset=version)
    lowered, _ = applied(opset, model, silu="swish")
    after, result = applied(silu, lowered, silu="swish")
    assert result.count == 1
    assert [entry.version for entry in after.opset_import] == [24]
    same(after, model, rtol=1e-6)


@pytest.mark.opset(28)
def test_a_model_that_needs_a_newer_opset_keeps_it_though_swish_is_wanted(net, applied):
    inputs = "(float16[2] x, float16[2] m) => (float16[2] y)"
    after, result = applied(opset, net(f"{inputs} {{y = Mod(x, m)}}", opset=28), silu="swish")
    assert after.opset_import[0].version == 28
    assert result.skipped[0].startswith("the opset stays 28: node 'Mod_0' (Mod) cannot be expressed in ONNX opset 24")
