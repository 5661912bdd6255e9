"""Detectors that take images otherwise than is usual: ``init`` gets their pixels right, or says that it is not sure."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from PIL import Image

from trtdet.config import load_config
from trtdet.data import find_images
from trtdet.demo import shapes
from trtdet.evaluation.guessing import Guess, guess_config
from trtdet.exporter import SHAPES_MODEL

pytestmark = pytest.mark.usefixtures("input_check")

SHAPES = load_config("shapes")


@pytest.fixture(scope="module")
def images(once):
    folder = once("newcomers", lambda path: shapes.generate(path, "calibration", 16))
    return find_images(folder / "calibration")


def behind(path: Path, *nodes: onnx.NodeProto, shape: tuple[int, ...] = (1, 3, 256, 256)) -> Path:
    """The shipped detector, which reads BGR of 0..255, behind nodes from ``given`` to ``fed``."""
    model = onnx.load(str(SHAPES_MODEL))
    graph = model.graph
    (image,) = graph.input
    for node in graph.node:
        node.input[:] = ["fed" if name == image.name else name for name in node.input]
    image.CopyFrom(helper.make_tensor_value_info("given", onnx.TensorProto.FLOAT, shape))
    graph.initializer.append(numpy_helper.from_array(np.array([2, 1, 0]), "order"))
    graph.initializer.append(numpy_helper.from_array(np.array(255, np.float32), "most"))
    graph.initializer.append(numpy_helper.from_array(np.array(127.5, np.float32), "middle"))
    for node in reversed(nodes):
        graph.node.insert(0, node)
    onnx.save(model, str(path))
    return path


def swapped(path: Path) -> Path:
    return behind(path, helper.make_node("Gather", ["given", "order"], ["fed"], axis=1))


def scaled(path: Path) -> Path:
    return behind(path, helper.make_node("Mul", ["given", "most"], ["fed"]))


def centred(path: Path) -> Path:
    spread = helper.make_node("Mul", ["given", "middle"], ["spread"])
    return behind(path, spread, helper.make_node("Add", ["spread", "middle"], ["fed"]))


def channels_last(path: Path) -> Path:
    turn = helper.make_node("Transpose", ["given"], ["fed"], perm=[0, 3, 1, 2])
    return behind(path, turn, shape=(1, 256, 256, 3))


def wrong_and_sure(found: Guess, color: str, low: float, high: float) -> list[str]:
    """Questions that are said to be sure and answered wrongly; ``low`` and ``high`` are the values of 0 and 255."""
    given = found.config.input
    ends = [(pixel * given.scale - given.mean[1]) / given.std[1] for pixel in (0, 255)]
    right = {
        "color": given.color == color,
        "normalisation": np.allclose(ends, (low, high), atol=0.05 * (high - low)),
        "resize": given.resize == SHAPES.input.resize,
    }
    return [key for key, good in right.items() if not good and key in found.answers and not found.answers[key].rival]


@pytest.mark.parametrize(
    ("written", "color", "low", "high"),
    [
        pytest.param(centred, "bgr", -1, 1, id="centred"),
        pytest.param(swapped, "rgb", 0, 255, id="swapped", marks=pytest.mark.slow),
        pytest.param(scaled, "bgr", 0, 1, id="scaled", marks=pytest.mark.slow),
        pytest.param(channels_last, "bgr", 0, 255, id="channels last", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_wrong_and_sure(images, tmp_path, written, color, low, high):
    found = guess_config(written(tmp_path / "own.onnx"), images)
    assert found.looks is not None and found.looks.verdict == "working"
    assert wrong_and_sure(found, color, low=low, high=high) == []
    given = found.config.input
    assert (255 * given.scale - given.mean[1]) / given.std[1] == pytest.approx(high, rel=0.05)


def test_of_images_without_its_classes_nothing_is_claimed(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(8):
        grey = np.linspace(60, 180, 160)[None, :, None] + rng.normal(0, 2, (120, 160, 1))
        Image.fromarray(np.repeat(np.clip(grey, 0, 255), 3, axis=2).astype(np.uint8)).save(tmp_path / f"{number}.png")
    found = guess_config(SHAPES_MODEL, find_images(tmp_path))
    assert found.looks is not None and found.looks.verdict != "working"
    assert found.answers == {} and found.open == {}
    assert found.config.input == SHAPES.input.model_copy(update={"name": found.config.input.name})
