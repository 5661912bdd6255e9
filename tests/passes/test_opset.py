from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from trtdet.errors import ModelError
from trtdet.passes import Options, opset
from trtdet.passes.base import PassResult
from trtdet.passes.model import to_graph, to_model


def test_the_arrow_stands_in_the_docstring() -> None:
    assert (opset.__doc__ or "").splitlines()[0] == "opset < 13 -> opset 13"


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
