import numpy as np
import pytest

from trtdet.config import load_config
from trtdet.passes import load_model, rewrite, stem
from trtdet.passes.base import Options, PassResult

INDICES = {"zero": [0], "one": [1], "two": [2], "two_axis": [2], "three": [3], "end": [2**63 - 1]}
INDICES = {name: np.array(values) for name, values in INDICES.items()}
CORNERS = ("zero zero", "one zero", "zero one", "one one")  # rows and columns


def slices(order, source="x"):
    """Text of nodes that cut an image into the four pixels of each block of two by two, and join them to ``m``."""
    text = ""
    for number in order:
        row, column = CORNERS[number].split()
        text += f"r{number} = Slice({source}, {row}, end, two_axis, two) "
        text += f"s{number} = Slice(r{number}, {column}, end, three, two) "
    return text + f"m = Concat<axis = 1>({', '.join(f's{number}' for number in order)}) "


BOTH = {"both": np.array([2, 3]), "ends": np.array([2**63 - 1] * 2), "steps": np.array([2, 2])}
BOTH |= {f"at{row}{column}": np.array([row, column]) for row in (0, 1) for column in (0, 1)}
AT_ONCE = "".join(f"s{at} = Slice(x, at{at}, ends, both, steps) " for at in ("00", "01", "10", "11"))
SHUFFLE = {"six": np.array([0, 3, 4, 2, 5, 2]), "four": np.array([0, 12, 4, 5])}
FORMS = {
    "slices": (slices([0, 1, 2, 3]), {}),
    "slices in another order": (slices([3, 0, 2, 1]), {}),
    "slices of both axes": (f"{AT_ONCE} m = Concat<axis = 1>(s00, s10, s01, s11) ", BOTH),
    "SpaceToDepth": ("m = SpaceToDepth<blocksize = 2>(x) ", {}),
    "channels before pixels": (
        "p = Reshape(x, six) t = Transpose<perm = [0, 1, 3, 5, 2, 4]>(p) m = Reshape(t, four) ",
        SHUFFLE,
    ),
}


def used(text, values):
    """The values that nodes read behind their first input."""
    return {name: value for name, value in values.items() if f", {name}" in text}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "convolution", ["<pads = [1, 1, 1, 1]>(m, w, b)", "<strides = [1, 2], pads = [0, 1, 2, 0]>(m, w)"]
)
def test_the_convolution_reads_the_pixels(net, normal, applied, same, form, convolution):
    text, constants = FORMS[form]
    text += f"c = Conv{convolution} y = Relu(c)"
    weights = {"w": normal(5, 12, 3, 3, seed=1), "b": normal(5, seed=2)}
    model = net(f"(float[1,3,8,10] x) => (y) {{ {text} }}", **used(text, {**INDICES, **weights}), **constants)
    after, result = applied(stem, model)
    assert result == PassResult(1)
    assert [node.op_type for node in after.graph.node] == ["Conv", "Relu"]
    same(after, model, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", ["N", "3"])
def test_several_images(net, normal, applied, same, batch):
    text = "m = SpaceToDepth<blocksize = 4>(x) y = Conv<pads = [1, 1, 1, 1]>(m, w)"
    model = net(f"(float[{batch},2,8,8] x) => (y) {{ {text} }}", w=normal(5, 32, 3, 3))
    after, result = applied(stem, model)
    assert result == PassResult(1)
    (conv,) = after.graph.node
    assert {field.name: list(field.ints) for field in conv.attribute} == {
        "kernel_shape": [12, 12],
        "strides": [4, 4],
        "pads": [4, 4, 4, 4],
    }
    same(after, model, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "channels", "reason"),
    [
        (slices([0, 1, 2, 3]) + "y = Conv<group = 2>(m, half)", 3, "the convolution has groups"),
        (
            slices([0, 1, 2, 3]) + "y = Conv<dilations = [2, 2], pads = [2, 2, 2, 2]>(m, w)",
            3,
            "the convolution has groups, a dilation",
        ),
        (slices([0, 1, 2, 3]) + 'y = Conv<auto_pad = "SAME_UPPER">(m, w)', 3, "padding that depends on its input"),
        (slices([0, 1, 2, 3]) + "c = Conv(m, w) d = ReduceSum(m) y = Add(c, d)", 3, ""),  # the slices would stay
        (slices([0, 1, 2, 3], "m0") + "y = Conv(m, v)", 6, ""),  # deep in the network
        ("a = Slice(x, zero, end, two_axis, two) y = Conv(a, w3)", 3, ""),  # rows are left out
        ("m = Transpose<perm = [0, 1, 3, 2]>(x) y = Conv(m, w3)", 3, ""),
        ("p = Reshape(x, six) m = Reshape(p, four) y = Conv(m, w)", 3, ""),  # other pixels
        ("a = Relu(x) m = Concat<axis = 1>(a, x) y = Conv(m, w6)", 3, ""),
        ("y = Conv(x, w3)", 3, ""),
    ],
)
def test_what_is_something_else_stays(net, normal, applied, same, text, channels, reason):
    shapes = {"half": (6, 6, 3, 3), "w": (5, 12, 3, 3), "v": (5, 24, 3, 3), "w3": (5, 3, 3, 3), "w6": (5, 6, 3, 3)}
    values = {name: normal(*shape, seed=1) for name, shape in shapes.items()}
    values |= {**INDICES, **SHUFFLE}
    if "m0" in text:
        text = "m0 = Relu(x) " + text
    model = net(f"(float[1,{channels},8,10] x) => (y) {{ {text} }}", **used(text, values))
    after, result = applied(stem, model)
    assert result.count == 0 and [reason in skipped for skipped in result.skipped] == [True] * bool(reason)
    assert [node.op_type for node in after.graph.node] == [node.op_type for node in model.graph.node]
    same(after, model)


def test_a_published_model_loses_its_slices(shared_data):
    model = load_model(shared_data / "models" / "yolox_nano.onnx")
    assert sum(node.op_type == "Slice" for node in model.graph.node) == 8
    after = rewrite(model, Options(load_config("yolox")))
    assert after.results["stem"] == PassResult(1)
    assert not [node for node in after.model.graph.node if node.op_type == "Slice"]
