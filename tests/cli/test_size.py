"""--size: the height and width of a model that leaves them open, chosen when it is built."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trtdet.backends import OnnxRunner
from trtdet.bundle import Bundle
from trtdet.cli import main

CONFIG = """
name: open
classes: [thing]
input: {size: [32, 32]}
head: {decode: yolox, strides: [8]}
"""


def _open_model(path: Path, height: int | str, width: int | str) -> None:
    """A convolution of stride 8, whose cells are rows of a head of YOLOX with a single class."""
    weights = np.random.default_rng(0).normal(0, 0.1, (6, 3, 8, 8)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["map"], strides=[8, 8], kernel_shape=[8, 8]),
        helper.make_node("Reshape", ["map", "shape"], ["cells"]),
        helper.make_node("Transpose", ["cells"], ["rows"], perm=[0, 2, 1]),
        helper.make_node("Sigmoid", ["rows"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, height, width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, None, 6])],
        [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(np.array([0, 6, -1]), "shape")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), str(path))


@pytest.fixture
def build(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    return ["build", "m.onnx", "--config", "c.yaml", "--fp32", "--backend", "onnxruntime", "-o", "b"]


def test_an_open_size_is_chosen(build):
    _open_model(Path("m.onnx"), "height", "width")
    assert main([*build, "--set", "input.size=64x96"]) == 0
    bundle = Bundle(Path("b"))
    assert bundle.manifest.input.shape.opt == (1, 3, 64, 96)
    assert bundle.manifest.input.preprocess.size == (64, 96)
    shape = onnx.load(str(bundle.model)).graph.input[0].type.tensor_type.shape
    assert [dim.dim_value for dim in shape.dim] == [1, 3, 64, 96]


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (lambda model: _reshaped(model, [1, 6, 16]), "Reshape"),
        (lambda model: _reshaped(model, [1, -1, 16]), "output 'y' has shape (1, 16, 36), that is 36 channels"),
        (lambda model: _added(model, "Mul", np.float32(32)), "Mul 'last' reads the constant 32, which is of the size"),
        (lambda model: _added(model, "Add", np.zeros((1, 16, 1), np.float32)), "Add"),
        (lambda model: _cut(model, 12), "Slice 'cut' cuts 0 to 12 out of 16, which are 96 at that size"),
    ],
)
def test_a_graph_that_holds_its_size_is_refused_with_the_reason(build, mutate, reason, capsys):
    _open_model(Path("m.onnx"), 32, 32)
    model = onnx.load("m.onnx")
    mutate(model)
    onnx.save(model, "m.onnx")
    assert main([*build, "--set", "input.size=64x96"]) == 1
    said = capsys.readouterr().err
    assert "is fixed to 32x32 (height x width) and cannot be changed to 64x96: " in said and reason in said
    assert "export it again for that size, such as with 'trtdet export SOURCE --size 64x96'" in said
    assert not Path("b").exists()


def test_a_graph_that_holds_nothing_of_its_size_takes_another(build, capfd):
    _open_model(Path("open.onnx"), "height", "width")
    _open_model(Path("m.onnx"), 32, 32)
    assert main([*build, "--set", "input.size=64x96"]) == 0
    assert Bundle(Path("b")).manifest.input.shape.opt == (1, 3, 64, 96)
    image = np.random.default_rng(1).uniform(0, 255, (1, 3, 64, 96)).astype(np.float32)
    Path("m.onnx").write_bytes(Path("open.onnx").read_bytes())
    assert main([*build[:-1], "d", "--set", "input.size=64x96"]) == 0
    found = [OnnxRunner(onnx.load(str(Bundle(Path(name)).model)))(image) for name in "bd"]
    for name, expected in found[1].items():
        np.testing.assert_array_equal(found[0][name], expected)
    _open_model(Path("m.onnx"), 32, 32)
    Path("e.yaml").write_text(CONFIG.replace("[32, 32]", "[64, 64]"))
    capfd.readouterr()
    assert main(["build", "m.onnx", "--config", "e.yaml", "--fp32", "--backend", "onnxruntime", "-o", "x"]) == 1
    assert "make them equal" in capfd.readouterr().err  # what nobody asked for is not done
    # A model that is simplified takes another size too.
    assert main(["export", "m.onnx", "--config", "c.yaml", "--size", "64x96", "-o", "n.onnx"]) == 0
    shape = onnx.load("n.onnx").graph.input[0].type.tensor_type.shape
    assert [dim.dim_value for dim in shape.dim] == [1, 3, 64, 96]


def test_a_size_that_the_strides_do_not_divide(build, capsys):
    _open_model(Path("m.onnx"), 32, 32)
    assert main([*build, "--set", "input.size=60x96"]) == 1
    assert "--size 60x96: input.size [60, 96] is not a multiple of stride 8" in capsys.readouterr().err
    assert not Path("b").exists()


def _constant(model: onnx.ModelProto, name: str, value: np.ndarray) -> None:
    for known in [tensor for tensor in model.graph.initializer if tensor.name == name]:
        model.graph.initializer.remove(known)
    model.graph.initializer.append(numpy_helper.from_array(value, name))


def _reshaped(model: onnx.ModelProto, shape: list[int]) -> None:
    _constant(model, "shape", np.array(shape))


def _added(model: onnx.ModelProto, op: str, value: Any) -> None:
    """An operator with a constant behind the last."""
    model.graph.node[-1].output[0] = "before"
    _constant(model, "more", np.asarray(value))
    model.graph.node.append(helper.make_node(op, ["before", "more"], ["y"], "last"))


def _cut(model: onnx.ModelProto, end: int) -> None:
    """Some rows alone, put behind themselves so that none seems to lack."""
    model.graph.node[-1].output[0] = "before"
    for name, value in (("from", [0]), ("to", [end]), ("axis", [1])):
        _constant(model, name, np.array(value))
    model.graph.node.append(helper.make_node("Slice", ["before", "from", "to", "axis"], ["part"], "cut"))
    model.graph.node.append(helper.make_node("ReduceMax", ["part"], ["most"], axes=[1], keepdims=1))
    model.graph.node.append(helper.make_node("Mul", ["before", "most"], ["y"], "scaled"))


@pytest.mark.parametrize("text", ["64x", "x64", "0x64", "64x96x3", "-64", "a"])
def test_a_size_that_is_none(build, text, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*build, "--set", f"input.size={text}"])
    assert caught.value.code == 2 and "must be HEIGHTxWIDTH in pixels, such as 480x640" in capsys.readouterr().err
