"""Whether a detector looks as if it worked: right configurations are silent, wrong ones are named."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import small_detector
from onnx import numpy_helper
from PIL import Image
from scored import written

from trtdet.config import Config, load_config
from trtdet.data import find_images
from trtdet.demo import shapes
from trtdet.errors import ImplausibleDetections
from trtdet.evaluation import plausibility
from trtdet.evaluation.plausibility import (
    IMAGENET,
    Plausibility,
    Reading,
    examine_detector,
    examine_model,
    examine_target,
    head_readings,
    input_readings,
    warn_of,
)
from trtdet.exporter import SHAPES_MODEL
from trtdet.passes import Options, load_model, raw_outputs
from trtdet.runtime.detector import Detector

pytestmark = pytest.mark.usefixtures("input_check")

SHAPES = load_config("shapes")
UNIT = 1 / 255


@pytest.fixture(scope="module")
def drawn_images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    shapes.generate(folder, "calibration", 9)
    return find_images(folder / "calibration")


def changed(config: Config, section: str, **keys: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=keys)})


def seen(config: Config, images: tuple[Path, ...], **options: Any) -> Plausibility:
    return examine_model(load_model(SHAPES_MODEL), Options(config, **options), images)


@pytest.mark.parametrize("batch", [1, 4, None])
def test_the_right_configuration_is_silent(drawn_images, batch):
    model, _ = raw_outputs(load_model(SHAPES_MODEL), Options(SHAPES, batch="n"))
    found = examine_model(model, Options(SHAPES, batch=batch), drawn_images)
    assert found.warning == "" and found.obstacle == ""
    assert 8 <= found.images <= 9 and found.empty == 0
    assert found.boxes > 2 and found.agreement > 0.6


MISTAKES: list[tuple[Config, dict[str, Any]]] = [
    (changed(SHAPES, "input", scale=UNIT), {"input.scale": 1.0}),
    (
        changed(SHAPES, "input", scale=UNIT, mean=IMAGENET[0], std=IMAGENET[1]),
        {"input.scale": 1.0, "input.mean": [0.0, 0.0, 0.0], "input.std": [1.0, 1.0, 1.0]},
    ),
    (changed(SHAPES, "head", decode="yolov5"), {"head.decode": "yolox"}),
    (changed(SHAPES, "head", scores="logits"), {"head.scores": "probabilities"}),
    (
        changed(changed(SHAPES, "head", decode="yolov5"), "input", scale=UNIT),
        {"input.scale": 1, "head.decode": "yolox"},
    ),
]


@pytest.mark.parametrize(
    ("wrong", "right"),
    # The first two stand for all where minutes count.
    [
        pytest.param(wrong, right, id=", ".join(right), marks=[pytest.mark.slow] if number > 1 else [])
        for number, (wrong, right) in enumerate(MISTAKES)
    ],
)
def test_a_mistake_is_named(drawn_images, wrong, right):
    found = seen(wrong, drawn_images)
    assert found.better == right
    assert found.gain > 20
    assert all(f"{key}: " in found.warning for key in right)
    assert "far more sure" in found.warning and "--set", "calibration.check_input=false" in found.warning
    assert "\n" not in found.warning
    with pytest.warns(ImplausibleDetections, match=next(iter(right))):
        warn_of(found.warning)


def test_no_image_is_looked_at_twice_in_the_same_way(drawn_images, monkeypatch):
    looked: Counter[tuple[str, bytes]] = Counter()
    found = plausibility._Subject.found

    def counted(self: Any, outputs: Any, config: Config) -> Any:
        raw = b"".join(outputs[name].tobytes() for name in sorted(outputs))
        looked[config.model_dump_json(), raw] += 1
        return found(self, outputs, config)

    monkeypatch.setattr(plausibility._Subject, "found", counted)
    wrong = changed(SHAPES, "input", scale=UNIT)
    assert seen(wrong, drawn_images).better == {"input.scale": 1.0}
    # Two contests, of which the second is of the better configuration against what the first had too.
    assert len(looked) > 2 * 9 and set(looked.values()) == {1}


def test_a_model_that_finds_nothing_is_told_of(drawn_images):
    model = small_detector()
    for tensor in model.graph.initializer:
        if tensor.name.startswith("/head") and tensor.name.endswith(".bias") and "boxes" not in tensor.name:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) - 20, tensor.name))
    found = examine_model(model, Options(SHAPES), drawn_images)
    assert found.empty == found.images == 9
    assert found.symptoms == ("no box over 0.3 in 9 of 9 images",)
    assert "does not look like a working detector" in found.warning and "input.scale" in found.warning
    assert found.better == {}


def everywhere(score: float) -> onnx.ModelProto:
    """The same 400 boxes of the same class in every image, each of a place of its own, in the form ``boxes``."""
    corners = np.stack(np.meshgrid(np.arange(20), np.arange(20)), axis=-1).reshape(-1, 2) * 10.0 + 3
    boxes = np.concatenate([corners, corners + 6], axis=1).astype(np.float32)[None]
    scores = np.full((1, 400, 10), 0.01, np.float32)
    scores[0, :-1, 3] = score - np.arange(399) / 2000
    text = """(float[1,3,256,256] images) => (float[1,400,4] boxes, float[1,400,10] scores) {
        mean = ReduceMean<keepdims = 0>(images) nothing = Mul(mean, zero)
        boxes = Add(constant_boxes, nothing) scores = Add(constant_scores, nothing) }"""
    return written(text, zero=np.float32(0), constant_boxes=boxes, constant_scores=scores)


BOXES = changed(SHAPES, "head", decode="boxes", outputs=("boxes", "scores"))


def test_a_model_that_finds_all_its_boxes_everywhere_is_told_of(drawn_images):
    found = examine_model(everywhere(0.9), Options(BOXES), drawn_images)
    assert found.boxes == 100 and found.agreement < 0.1
    assert "in mirror images it finds 0% of the same" in found.symptoms
    assert any(said.startswith("over 100 boxes over 0.3 in ") for said in found.symptoms)
    assert "every box is 'star'" in found.symptoms
    assert "does not look like a working detector" in found.warning


def test_boxes_outside_the_image_are_told_of(drawn_images):
    model = everywhere(0.9)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "constant_boxes")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(500), tensor.name))
    found = examine_model(model, Options(BOXES), drawn_images)
    assert "most boxes over 0.3 have no area or lie outside the image" in found.symptoms


def test_scores_that_are_no_probabilities_are_told_of(drawn_images):
    found = examine_model(everywhere(3.0), Options(BOXES), drawn_images)
    assert any("head.scores is probabilities" in said for said in found.symptoms)


@pytest.mark.slow
def test_a_few_images_and_unreadable_ones_are_no_trouble(drawn_images, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    wrong = changed(SHAPES, "input", scale=UNIT)
    few = seen(wrong, (broken, *drawn_images[:2]))
    assert few.images == 2 and few.warning == "" and few.obstacle == ""
    assert seen(wrong, ()).images == 0
    enough = seen(wrong, (broken, *drawn_images[:8]))
    assert enough.images == 8 and enough.better == {"input.scale": 1.0}


def test_a_failure_is_said_and_not_raised(drawn_images):
    found = seen(changed(SHAPES, "head", outputs=("nowhere",)), drawn_images)
    assert found.images == 0 and found.warning == ""
    assert "nowhere" in found.obstacle
    assert found.as_dict()["obstacle"] == found.obstacle


@pytest.mark.slow
def test_of_a_decoded_detector_the_input_alone_is_read_in_other_ways(drawn_images):
    wrong = changed(SHAPES, "input", scale=UNIT)
    detector = Detector.open(SHAPES_MODEL, wrong, "native")
    assert examine_detector(detector, wrong, drawn_images).better == {"input.scale": 1.0}
    right = Detector.open(SHAPES_MODEL, SHAPES)
    assert examine_detector(right, SHAPES, drawn_images).warning == ""


@pytest.mark.slow
def test_what_is_evaluated_is_looked_at(drawn_images):
    wrong = changed(SHAPES, "head", decode="yolov5")
    with pytest.warns(ImplausibleDetections, match="head.decode: yolox"):
        found = examine_target(SHAPES_MODEL, Detector.open(SHAPES_MODEL, wrong), wrong, drawn_images)
    assert found["better"] == {"head.decode": "yolox"} and found["gain"] is None


def test_one_key_at_a_time_is_read_otherwise():
    given = Reading(load_config("dfl"), load_config("dfl"))
    assert given.changes == {}
    texts = [reading.text for reading in input_readings(given)]
    assert "input.color: bgr" in texts
    assert "input.resize: letterbox-topleft" in texts
    assert "input.scale: 1, input.mean: [0, 0, 0], input.std: [1, 1, 1]" in texts
    # ImageNet's normalisation, which it has, is not offered, in either order of magnitude.
    assert len(texts) == 3 + 4
    assert [reading.text for reading in head_readings(given)] == ["head.cell_offset: 0", "head.scores: logits"]


def test_mean_and_standard_deviation_follow_the_order_of_the_channels():
    given = load_config("yolox")
    texts = [reading.text for reading in input_readings(Reading(given, given))]
    assert f"input.scale: {UNIT:.6g}, input.mean: [0.406, 0.456, 0.485], input.std: [0.225, 0.224, 0.229]" in texts


def test_images_of_one_colour_are_no_trouble(tmp_path):
    for number in range(8):
        Image.new("RGB", (40, 30), (number, 0, 0)).save(tmp_path / f"{number}.png")
    found = seen(SHAPES, find_images(tmp_path))
    assert found.empty == 8 and found.better == {}
    assert "no box over 0.3" in found.warning
