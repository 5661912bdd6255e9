"""Whether a detector looks as if it worked: right configurations are silent, wrong ones are named."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import small_detector
from onnx import numpy_helper
from PIL import Image
from scipy import stats
from scored import written

from trtdet.config import Config, load_config
from trtdet.data import find_images
from trtdet.demo import shapes
from trtdet.errors import ImplausibleDetections
from trtdet.evaluation import plausibility
from trtdet.evaluation.judging import Tally, judged, student_t
from trtdet.evaluation.plausibility import (
    Answer,
    Plausibility,
    examine_detector,
    examine_model,
    examine_target,
    settle_model,
    warn_of,
)
from trtdet.evaluation.readings import IMAGENET, Reading, head_readings, input_readings
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
    assert found.boxes > 2 and found.agreement > 0.6 and found.moved > 0.8 and found.verdict == "working"


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
    assert "far more sure" in found.warning
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
    assert found.verdict == "cannot tell" and found.symptoms == () and found.better == {}
    assert "there is no box over 0.3 in 9 images; give images that show the model's classes (circle, " in found.warning


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
    assert found.boxes == 100 and found.agreement < 0.1 and found.moved < 0.1 and found.verdict == "not working"
    assert any("of its boxes stay where they are, or lie on a grid" in said for said in found.symptoms)
    assert any(said.startswith("over 100 boxes over 0.3 in ") for said in found.symptoms)
    assert "every box is 'star'" in found.symptoms
    assert "does not look like a working detector" in found.warning


def test_boxes_outside_the_image_are_told_of(drawn_images):
    model = everywhere(0.9)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "constant_boxes")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(500), tensor.name))
    found = examine_model(model, Options(BOXES), drawn_images)
    assert "most boxes over 0.3 have no area or lie outside the image" in found.symptoms


def test_boxes_as_large_as_the_image_show_nothing_if_they_are_few(drawn_images):
    model = everywhere(0.9)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor).copy()
        if tensor.name == "constant_scores":
            values[:, 1:] = 0.01
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        if tensor.name == "constant_boxes":
            values[:, 0] = (0, 0, 256, 256)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    found = examine_model(model, Options(BOXES), drawn_images)
    assert found.verdict == "cannot tell" and found.boxes == 1 and found.symptoms == ()
    assert f"{found.images} of the {found.images} boxes over 0.3 fill the whole image" in found.warning
    many = everywhere(0.9)
    boxes = next(tensor for tensor in many.graph.initializer if tensor.name == "constant_boxes")
    whole = np.linspace(0, 2, 400, dtype=np.float32)[:, None] * np.array([1, 1, -1, -1], np.float32) + (0, 0, 256, 256)
    boxes.CopyFrom(numpy_helper.from_array(whole.astype(np.float32)[None], boxes.name))
    scores = next(tensor for tensor in many.graph.initializer if tensor.name == "constant_scores")
    spread = np.full((1, 400, 10), 0.01, np.float32)
    spread[0, np.arange(10), np.arange(10)] = 0.9
    scores.CopyFrom(numpy_helper.from_array(spread, scores.name))
    assert examine_model(many, Options(BOXES), drawn_images).verdict == "not working"


@pytest.mark.parametrize(("share", "what"), [("moved", "stayed"), ("agreed", "score")])
def test_images_that_contradict_each_other_leave_it_open(share, what):
    working = Tally(score=3, agreed=3, confident=3, moved=3, classes=frozenset({0}))
    odd = replace(working, **{share: 0.0, what: 3.0})
    assert judged([working] * 8, SHAPES) == ((), "")
    symptoms, unknown = judged([working] * 2 + [odd] * 6, SHAPES)
    assert symptoms == () and "of what it finds in 8 images only 25% goes with the image" in unknown
    assert judged([odd] * 8, SHAPES)[0] != ()


def test_scores_that_are_no_probabilities_are_told_of(drawn_images):
    found = examine_model(everywhere(3.0), Options(BOXES), drawn_images)
    assert any("head.scores is probabilities" in said for said in found.symptoms)


@pytest.mark.slow
def test_a_few_images_and_unreadable_ones_are_no_trouble(drawn_images, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    wrong = changed(SHAPES, "input", scale=UNIT)
    few = seen(wrong, (broken, *drawn_images[:2]))
    assert few.images == 2 and few.verdict == "cannot tell" and "2 images are too few, give 4 or more" in few.warning
    assert seen(wrong, ()).images == 0
    enough = seen(wrong, (broken, *drawn_images[:8]))
    assert enough.images == 8 and enough.better == {"input.scale": 1.0}


def compared(
    figures: Sequence[float], thorough: bool = False, agreed: float = 3.0, moved: float = 3.0
) -> tuple[Reading | None, Answer | None]:
    """The winner, and the answer of the images, where another reading has these figures and the given one has 1 in each
    image. Both find as much; of the other reading's 3 this part is found again, or goes with the image."""
    given = Reading(SHAPES, SHAPES)
    other = given.other("color", color="rgb")
    cache: dict[tuple[str, Path], Tally] = {}
    for number, figure in enumerate(figures):
        for reading, value in ((given, 1.0), (other, figure)):
            parts = (3.0, 3.0) if reading is given else (agreed, moved)
            tally = Tally(
                value, 3.0, parts[0], confident=3, moved=parts[1], stayed=3.0 - parts[1], classes=frozenset({0, 1})
            )
            cache[plausibility._key(reading), Path(str(number))] = tally
    subject = plausibility._Subject(lambda _: {}, SHAPES, 1)
    contest = plausibility._Contest(subject, given=given, others=[other], cache=cache, thorough=thorough)
    return contest.run([Path(str(number)) for number in range(len(figures))]), contest.answer("color")


def test_four_images_are_enough_to_prefer_a_reading_that_is_far_surer():
    winner, _ = compared([30.0, 31.0, 32.0, 31.0])
    assert winner is not None and winner.changes == {"input.color": "rgb"}
    assert compared([30.0, 31.0, 32.0])[0] is None


def test_a_worse_reading_is_left_after_few_images_and_a_hardly_worse_one_after_many():
    _, worse = compared([0.9, 0.901] * 20, thorough=True)
    assert worse is not None and (worse.images, worse.rival) == (8, None)
    _, hardly = compared([0.98, 0.981] * 20, thorough=True)
    assert hardly is not None and (hardly.images, hardly.same) == (32, True)


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("lost", ["agreed", "moved"])
def test_a_reading_that_finds_more_but_less_of_it_again_is_no_better(lost, thorough):
    """Raised contrast makes a network see objects in the background, surer than those that are there."""
    figures = [1.6, 1.7] * 8
    assert compared(figures, thorough)[0] is not None
    sound, _ = compared(figures, thorough, **{lost: 2.8})
    assert sound is not None
    winner, answer = compared(figures, thorough, **{lost: 2.4})
    assert winner is None
    assert answer is not None and answer.rival is None


NOTHING, STUCK = Tally(), Tally(-1.0, score=3.0, agreed=3.0, confident=3, stayed=3.0, classes=frozenset({0}))
FOUND = Tally(1.0, score=3.0, agreed=3.0, confident=3, moved=3.0, classes=frozenset({0}))


@pytest.mark.parametrize(
    ("given", "other", "looked_at"),
    [
        ([NOTHING] * 64, [NOTHING] * 64, 32),
        ([STUCK] * 64, [STUCK] * 64, 16),
        ([STUCK] * 64, [NOTHING] * 64, 32),
        ([NOTHING] * 20 + [FOUND] * 44, [NOTHING] * 64, 64),
        ([NOTHING] * 64, [NOTHING] * 31 + [FOUND] * 33, 64),
    ],
)
def test_where_no_reading_works_a_thorough_contest_ends(given, other, looked_at):
    readings = Reading(SHAPES, SHAPES), Reading(SHAPES, SHAPES).other("color", color="rgb")
    paths = [Path(str(number)) for number in range(64)]
    cache = {
        (plausibility._key(reading), path): tally
        for reading, tallies in zip(readings, (given, other), strict=True)
        for path, tally in zip(paths, tallies, strict=True)
    }
    told: list[tuple[str, int, int]] = []
    subject = plausibility._Subject(lambda _: {}, SHAPES, 1, progress=lambda *step: told.append(step))
    contest = plausibility._Contest(subject, readings[0], readings[1:], cache=cache, thorough=True)
    winner = contest.run(paths)
    assert len(contest.tallies[id(readings[0])]) == looked_at
    assert (winner is readings[1]) == (FOUND in other)
    assert told == [("comparing 2 readings", number, 64) for number in range(looked_at)]


def test_students_t_is_that_of_the_paired_test():
    differences = np.array([0.3, -0.1, 0.4, 0.2, 0.1])
    expected = stats.ttest_1samp(differences, 0).statistic
    assert student_t(differences) == pytest.approx(expected)
    assert student_t(-differences[:2]) == pytest.approx(stats.ttest_1samp(-differences[:2], 0).statistic)
    assert student_t(differences[:1]) == 0


def test_a_failure_is_said_and_not_raised(drawn_images):
    found = seen(changed(SHAPES, "head", outputs=("nowhere",)), drawn_images)
    assert found.images == 0 and found.verdict == "not done"
    assert "the input check could not be done" in found.warning and "nowhere" in found.warning
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
    turned = "input.mean: [0.406, 0.456, 0.485], input.std: [0.225, 0.224, 0.229]"
    # With the colours turn mean and standard deviation; no reading has them in the order of the other colour.
    assert f"input.color: bgr, {turned}" in texts and "input.color: bgr" not in texts and turned not in texts
    assert "input.resize: letterbox-topleft" in texts
    assert "input.scale: 1, input.mean: [0, 0, 0], input.std: [1, 1, 1]" in texts
    # ImageNet's normalisation, which it has, is not offered, in either order of magnitude.
    assert len(texts) == 3 + 4
    assert [reading.text for reading in head_readings(given)] == ["head.cell_offset: 0", "head.scores: logits"]
    fine = [reading.text for reading in input_readings(given, fine=True)][len(texts) :]
    levels = ["input.pad_value: 0", "input.pad_value: 128"]
    assert [text for text in fine if text not in levels] == [f"input.interpolation: {way}" for way in WAYS]


WAYS = ("nearest", "linear", "area")


def test_mean_and_deviation_in_the_order_of_the_other_colour_are_put_right():
    usual = load_config("dfl")
    wrong = changed(usual, "input", color="bgr")
    texts = [reading.text for reading in input_readings(Reading(wrong, wrong))]
    assert "input.color: rgb" in texts
    assert "input.mean: [0.406, 0.456, 0.485], input.std: [0.225, 0.224, 0.229]" in texts


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


def saturated() -> onnx.ModelProto:
    """A box and a score of 1 at each of 64 cells, wherever the image is bright."""
    centres = np.stack(np.meshgrid(np.arange(8), np.arange(8)), axis=-1).reshape(-1, 2) * 32.0 + 16
    boxes = np.concatenate([centres - 15, centres + 15], axis=1).astype(np.float32)[None]
    text = """(float[1,3,256,256] images) => (float[1,64,4] boxes, float[1,64,1] scores) {
        cells = AveragePool<kernel_shape = [32, 32], strides = [32, 32]>(images) grey = ReduceMean<axes = [1]>(cells)
        rows = Reshape(grey, shape) bright = Sub(rows, threshold) raw = Mul(bright, steep) scores = Sigmoid(raw)
        mean = ReduceMean<keepdims = 0>(images) nothing = Mul(mean, zero) boxes = Add(constant_boxes, nothing) }"""
    return written(
        text,
        zero=np.float32(0),
        constant_boxes=boxes,
        shape=np.array([1, 64, 1]),
        threshold=np.float32(100),
        steep=np.float32(100),
    )


def test_a_grid_of_saturated_scores_is_no_working_detector(drawn_images):
    """Its scores follow the image, and are of the surest: only its places give it away."""
    config = BOXES.model_copy(update={"classes": ("bright",)})
    found = examine_model(saturated(), Options(config), drawn_images)
    assert found.verdict == "not working" and found.moved < 0.2 and found.better == {}
    assert any("scores an image are 1" in said for said in found.symptoms)
    settled = settle_model(saturated(), Options(config), drawn_images)
    assert settled.config == config and settled.answers == {} and settled.looks.verdict == "not working"


def test_an_output_without_a_batch_dimension_is_looked_at(drawn_images):
    model, config = raw_outputs(load_model(SHAPES_MODEL), Options(SHAPES))
    output = model.graph.output[0]
    shape = [dim.dim_value for dim in output.type.tensor_type.shape.dim]
    name = output.name
    for node in model.graph.node:
        node.output[:] = ["with_batch" if made == name else made for made in node.output]
    model.graph.node.append(onnx.helper.make_node("Squeeze", ["with_batch", "first"], [name]))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "first"))
    del output.type.tensor_type.shape.dim[0]
    compute = {"rows": f"reshape(output0, 1, -1, {shape[-1]})", "scores": "rows[..., 4:5] * rows[..., 5:]"}
    compute["boxes"] = (
        "concat((rows[..., :2] + points(0) / strides() - 0.5) * strides(), exp(rows[..., 2:4]) * strides())"
    )
    head = {"decode": "boxes", "boxes": "cxcywh", "strides": SHAPES.head.strides, "compute": compute}
    data = config.model_dump() | {"head": head}
    found = examine_model(model, Options(Config.model_validate(data)), drawn_images)
    assert found.obstacle == "" and found.images >= 8


def test_the_number_of_images_on_which_ways_of_placing_were_compared_is_given(drawn_images, tmp_path):
    shapes.generate(tmp_path, "calibration", 32)
    found = seen(SHAPES, find_images(tmp_path / "calibration"))
    assert found.verdict == "working" and found.as_dict()["images_placed"] == found.placed == 32
    assert seen(SHAPES, drawn_images).placed == 0


def test_each_question_is_answered_or_left_open_with_what_it_would_mean(drawn_images):
    wrong = changed(SHAPES, "input", scale=UNIT)
    settled = settle_model(load_model(SHAPES_MODEL), Options(wrong), drawn_images)
    assert settled.config.input.scale == 1.0 and settled.looks.verdict == "working"
    assert settled.answers["scores"].rival is None and settled.answers["scores"].sure >= 0.99
    assert settled.answers["normalisation"].same or settled.answers["normalisation"].rival is None
    for answer in settled.answers.values():
        assert 0 <= answer.sure <= 1 and 4 <= answer.images <= 9
        if answer.rival is not None:
            assert answer.sure < 0.99 and " or " in answer.rival.meant
