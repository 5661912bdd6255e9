from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from trtdet.passes import Options, unstack
from trtdet.passes.base import PassResult
from trtdet.passes.model import to_graph, to_model

LAYERS = "a = Relu(x) b = Neg(a) c = Unsqueeze(a, axes) d = Unsqueeze(b, axes) e = Concat<axis = {axis}>(c, d) "


def unstacked(model: onnx.ModelProto, config: Any) -> tuple[onnx.ModelProto, PassResult]:
    graph = to_graph(onnx.shape_inference.infer_shapes(model))
    result = unstack.apply(graph, Options(config))
    return to_model(graph), result


def test_the_arrow_stands_in_the_docstring() -> None:
    assert " -> x" in (unstack.__doc__ or "").splitlines()[0]


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize(("index", "left"), [(0, ["Relu", "Abs"]), (-1, ["Relu", "Neg", "Abs"])])
def test_what_is_chosen_is_read_and_the_other_layers_are_gone(
    net: Any, run: Any, configure: Any, normal: Any, axis: int, index: int, left: list[str]
) -> None:
    text = LAYERS.format(axis=axis) + f"f = Gather<axis = {axis}>(e, i) y = Abs(f)"
    model = net(f"(float[2,3] x) => (float[2,3] y) {{ {text} }}", i=np.int64(index), axes=np.array([axis]))
    after, result = unstacked(model, configure())
    assert result == PassResult(1)
    assert [node.op_type for node in after.graph.node] == left
    x = normal(2, 3)
    np.testing.assert_array_equal(run(after, x=x)["y"], run(model, x=x)["y"])


def test_outputs_of_the_model_keep_their_names(net: Any, run: Any, configure: Any, normal: Any) -> None:
    text = LAYERS.format(axis=0) + "y = Gather(e, i) z = Gather(e, j) f = Gather(e, j) w = Abs(f)"
    outputs = "float[2,3] y, float[2,3] z, float[2,3] w"
    model = net(f"(float[2,3] x) => ({outputs}) {{ {text} }}", i=np.int64(1), j=np.int64(0), axes=np.array([0]))
    after, result = unstacked(model, configure())
    assert result == PassResult(3)
    assert [node.op_type for node in after.graph.node] == ["Relu", "Neg", "Abs"]
    x = normal(2, 3)
    before = run(model, x=x)
    assert before.keys() == {"y", "z", "w"}
    for name, value in run(after, x=x).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize(
    ("axis", "text", "reason"),
    [
        (
            1,
            LAYERS.format(axis=1) + "y = Gather<axis = 0>(e, i)",
            "along another dimension than tensors are joined along",
        ),
        (0, LAYERS.format(axis=0) + "y = Gather(e, two)", "no single constant index"),
        (0, "a = Relu(x) e = Concat<axis = 0>(a, x) y = Gather(e, i)", "no tensors that were given a dimension"),
        (0, "c = Unsqueeze(x, axes) e = Concat<axis = 0>(c, c) y = Gather(e, i)", "a constant or another output"),
    ],
)
def test_what_is_something_else_stays(
    net: Any, run: Any, configure: Any, normal: Any, axis: int, text: str, reason: str
) -> None:
    model = net(f"(float[2,3] x) => (y) {{ {text} }}", i=np.int64(1), two=np.array([0, 1]), axes=np.array([axis]))
    after, result = unstacked(model, configure())
    assert result.count == 0
    (told,) = result.skipped
    assert reason in told
    x = normal(2, 3)
    np.testing.assert_array_equal(run(after, x=x)["y"], run(model, x=x)["y"])
