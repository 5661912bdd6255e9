import pytest

from trtdet.config import load_config
from trtdet.passes import load_model, pooling, rewrite
from trtdet.passes.base import Options, PassResult

PYRAMID = """b = MaxPool<kernel_shape = [9, 9], pads = [4, 4, 4, 4]>(a)
    c = MaxPool<kernel_shape = [5, 5], pads = [2, 2, 2, 2], strides = [1, 1], ceil_mode = 0>(a)
    d = MaxPool<kernel_shape = [13, 13], pads = [6, 6, 6, 6], dilations = [1, 1]>(a) """


def windows(model):
    return {
        node.output[0]: next(list(field.ints) for field in node.attribute if field.name == "kernel_shape")
        for node in model.graph.node
        if node.op_type == "MaxPool"
    }


@pytest.mark.parametrize(("height", "width"), [(20, 13), (3, 7), (1, 1)])
def test_a_pyramid_becomes_a_chain_with_the_same_numbers(net, applied, same, height, width):
    text = "a = Neg(x) " + PYRAMID + "y = Concat<axis = 1>(a, b, c, d)"
    model = net(f"(float[N,3,{height},{width}] x) => (y) {{ {text} }}")
    after, result = applied(pooling, model)
    assert result == PassResult(2)
    assert windows(after) == {"b": [5, 5], "c": [5, 5], "d": [5, 5]}
    assert {node.output[0]: node.input[0] for node in after.graph.node if node.op_type == "MaxPool"} == {
        "c": "a",
        "b": "c",
        "d": "b",
    }
    same(after, model)


def test_outputs_of_the_model_stay(net, applied, same):
    text = "y = MaxPool<kernel_shape = [7, 7], pads = [3, 3, 3, 3]>(x)"
    text += "c = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x)"
    model = net(f"(float[1,3,8,8] x) => (float[1,3,8,8] y, float[1,3,8,8] c) {{ {text} }}")
    after, result = applied(pooling, model)
    assert result == PassResult(1) and windows(after) == {"c": [3, 3], "y": [5, 5]}
    assert [output.name for output in after.graph.output] == ["y", "c"]
    same(after, model)


@pytest.mark.parametrize(
    "larger",
    [
        "kernel_shape = [9, 9]",
        "kernel_shape = [9, 9], pads = [4, 4, 4, 4], strides = [2, 2]",
        "kernel_shape = [9, 9], pads = [4, 4, 4, 4], dilations = [2, 2]",
        "kernel_shape = [9, 9], pads = [3, 4, 4, 4]",
        "kernel_shape = [9, 7], pads = [4, 3, 4, 3]",
        'kernel_shape = [9, 9], auto_pad = "SAME_UPPER"',
        "kernel_shape = [8, 8], pads = [4, 4, 4, 4]",
        "kernel_shape = [5, 5], pads = [2, 2, 2, 2]",
    ],
)
def test_what_is_something_else_stays(net, applied, same, larger):
    text = f"c = MaxPool<kernel_shape = [5, 5], pads = [2, 2, 2, 2]>(x) y = MaxPool<{larger}>(x)"
    model = net(f"(float[1,3,20,20] x) => (c, y) {{ {text} }}")
    after, result = applied(pooling, model)
    assert result == PassResult(0) and windows(after) == windows(model)
    same(after, model)


def test_a_published_model_has_no_large_window(shared_data):
    model = load_model(shared_data / "models" / "yolox_nano.onnx")
    after = rewrite(model, Options(load_config("yolox")))
    assert after.results["pooling"] == PassResult(2)
    assert list(windows(after.model).values()) == [[5, 5]] * 3
