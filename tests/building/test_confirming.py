"""A guessed configuration is confirmed or corrected by detections on images, or reported as uncertain."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from PIL import Image

from trtdet.building.confirming import confirm
from trtdet.cli import main
from trtdet.config import load_config
from trtdet.demo import shapes
from trtdet.exporter import SHAPES_MODEL

CONFIG = load_config("shapes")
pytestmark = pytest.mark.usefixtures("input_check")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return shapes.generate(tmp_path_factory.mktemp("shapes"), "calibration", 8).images


def of_unit_scale() -> onnx.ModelProto:
    """The shapes detector for pixels of 0..1, which nothing in its shapes tells."""
    model = onnx.load(str(SHAPES_MODEL))
    name = model.graph.input[0].name
    for node in model.graph.node:
        node.input[:] = ["pixels" if read == name else read for read in node.input]
    model.graph.initializer.append(numpy_helper.from_array(np.float32(255), "most"))
    model.graph.node.insert(0, helper.make_node("Mul", [name, "most"], ["pixels"], "scaled"))
    return model


@pytest.mark.slow
def test_a_wrong_guess_is_corrected_and_the_result_is_looked_at_again(images):
    found = confirm(of_unit_scale(), CONFIG, sorted(images.iterdir()))
    assert found.config.input.scale == pytest.approx(1 / 255)
    assert found.config.model_copy(update={"input": CONFIG.input}) == CONFIG
    assert found.evidence["confirmed"] and found.evidence["changed"].keys() == {"input.scale"}
    assert found.note.startswith("with input.scale: 0.00392157 in place of the guess the detections are ")
    assert "the configuration is confirmed on 8 images: of what it finds " in found.note


def test_few_images_and_images_of_nothing_confirm_nothing(images, tmp_path):
    model = onnx.load(str(SHAPES_MODEL))
    few = confirm(model, CONFIG, sorted(images.iterdir())[:2])
    assert few.config == CONFIG and not few.evidence["confirmed"]
    assert few.note == "the configuration is not confirmed: 2 images are too few, give 4 or more"
    for index in range(5):
        Image.new("RGB", (64, 64), (90, 90, 90)).save(tmp_path / f"{index}.png")
    empty = confirm(model, CONFIG, sorted(tmp_path.iterdir()))
    assert not empty.evidence["confirmed"]
    assert "is not confirmed: there is no box over 0.3 in 5 images; give images that show" in empty.note


@pytest.mark.slow
def test_the_command_writes_what_was_confirmed(images, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    onnx.save(of_unit_scale(), "given.onnx")
    assert main(["export", "given.onnx", "-o", "m.onnx", "--images", str(images), "--json"]) == 0
    done = json.loads(capfd.readouterr().out)
    assert done["confirmed"]["confirmed"] and "input.scale" in done["confirmed"]["changed"]
    assert load_config("m.yaml").input.scale == pytest.approx(1 / 255)
    assert json.loads(Path("m.parity.json").read_text())["confirmed"]["images"] == 8
    assert main(["export", "given.onnx", "-o", "n.onnx", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["confirmed"] is None
