"""--size: the height and width of a model that leaves them open, chosen when it is built."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

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
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    return ["build", "m.onnx", "--config", "c.yaml", "--fp32", "--backend", "onnxruntime", "-o", "b"]


def test_an_open_size_is_chosen(build: list[str]) -> None:
    _open_model(Path("m.onnx"), "height", "width")
    assert main([*build, "--size", "64x96"]) == 0
    bundle = Bundle(Path("b"))
    assert bundle.manifest.input.shape.opt == (1, 3, 64, 96)
    assert bundle.manifest.input.preprocess.size == (64, 96)
    shape = onnx.load(str(bundle.model)).graph.input[0].type.tensor_type.shape
    assert [dim.dim_value for dim in shape.dim] == [1, 3, 64, 96]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("64x96", "is 32x32 (height x width) but key 'input.size' is 64x96; make them equal, or export the model for"),
        ("60x96", "--size 60x96: input.size [60, 96] is not a multiple of stride 8"),
    ],
)
def test_a_size_that_does_not_fit(
    build: list[str], size: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _open_model(Path("m.onnx"), 32, 32)
    assert main([*build, "--size", size]) == 1
    assert message in capsys.readouterr().err
    assert not Path("b").exists()


@pytest.mark.parametrize("text", ["64x", "x64", "0x64", "64x96x3", "-64", "a"])
def test_a_size_that_is_none(build: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*build, f"--size={text}"])
    assert caught.value.code == 2 and "must be HEIGHTxWIDTH in pixels, such as 480x640" in capsys.readouterr().err
