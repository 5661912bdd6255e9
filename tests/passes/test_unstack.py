import numpy as np
import pytest

from trtdet.passes import unstack
from trtdet.passes.base import PassResult

LAYERS = "a = Relu(x) b = Neg(a) c = Unsqueeze(a, axes) d = Unsqueeze(b, axes) e = Concat<axis = {axis}>(c, d) "


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize(("index", "left"), [(0, ["Relu", "Abs"]), (-1, ["Relu", "Neg", "Abs"])])
def test_what_is_chosen_is_read_and_the_other_layers_are_gone(net, applied, same, axis, index, left):
    text = LAYERS.format(axis=axis) + f"f = Gather<axis = {axis}>(e, i) y = Abs(f)"
    model = net(f"(float[2,3] x) => (float[2,3] y) {{ {text} }}", i=np.int64(index), axes=np.array([axis]))
    after, result = applied(unstack, model)
    assert result == PassResult(1)
    assert [node.op_type for node in after.graph.node] == left
    same(after, model)


def test_outputs_of_the_model_keep_their_names(net, applied, same):
    text = LAYERS.format(axis=0) + "y = Gather(e, i) z = Gather(e, j) f = Gather(e, j) w = Abs(f)"
    outputs = "float[2,3] y, float[2,3] z, float[2,3] w"
    model = net(f"(float[2,3] x) => ({outputs}) {{ {text} }}", i=np.int64(1), j=np.int64(0), axes=np.array([0]))
    after, result = applied(unstack, model)
    assert result == PassResult(3)
    assert [node.op_type for node in after.graph.node] == ["Relu", "Neg", "Abs"]
    assert [output.name for output in after.graph.output] == ["y", "z", "w"]
    same(after, model)


@pytest.mark.parametrize(
    ("axis", "text", "reason"),
    [
        (1, LAYERS.format(axis=1) + "y = Gather<axis = 0>(e, i)", "its axis is not the axis of the Concat"),
        (0, LAYERS.format(axis=0) + "y = Gather(e, two)", "its index is not a single constant"),
        (0, "a = Relu(x) e = Concat<axis = 0>(a, x) y = Gather(e, i)", "do not all come from Unsqueeze"),
        (0, "c = Unsqueeze(x, axes) e = Concat<axis = 0>(c, c) y = Gather(e, i)", "a constant or another output"),
    ],
)
def test_what_is_something_else_stays(net, applied, same, axis, text, reason):
    model = net(f"(float[2,3] x) => (y) {{ {text} }}", i=np.int64(1), two=np.array([0, 1]), axes=np.array([axis]))
    after, result = applied(unstack, model)
    assert result.count == 0
    (skipped,) = result.skipped
    assert reason in skipped
    same(after, model)
