import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import RCNN
from onnx import helper

from trtdet.config import COCO_CLASSES, load_config
from trtdet.demo.shapes import generate
from trtdet.detection import expressions
from trtdet.errors import ModelError, OutputError
from trtdet.exporter import SHAPES_MODEL, ExportOptions, export, onnx_file
from trtdet.tables import counted

TWO_STAGE = Path(__file__).parents[1] / "fixtures" / "two_stage" / "faster_dynamo.onnx"

SIZE = (128, 192)
CELLS = [16 * 24, 8 * 12, 4 * 6]
TOTAL = sum(CELLS)


def _random(*shape: int, low: float = 0.0, high: float = 1.0) -> Any:
    return np.random.default_rng(0).uniform(low, high, shape).astype(np.float32)


def _corners(count: int, scale: float = 100.0) -> Any:
    first = _random(1, count, 2)
    return np.concatenate([first, first + _random(1, count, 2) * 0.3 + 0.01], axis=2) * np.float32(scale)


def _centres(count: int, scale: float = 100.0) -> Any:
    return np.concatenate([_random(1, count, 2) + 0.3, _random(1, count, 2) * 0.2], axis=2) * np.float32(scale)


def _joined(*parts: Any) -> Any:
    return np.concatenate(parts, axis=2)


def _shares(most: int) -> Any:
    """Probabilities of five columns, of which one has most."""
    weights = _random(1, 50, 5, low=0.1)
    weights[..., most] += 2
    return weights / weights.sum(axis=-1, keepdims=True)


def _shipped(family: str) -> Any:
    return load_config(family).head.compute


def _guessed(outputs: dict[str, Any], classes: tuple[str, ...] | None = None) -> Any:
    config, said = onnx_file.guessed(outputs, SIZE, "m", "x", classes)
    guess = f"guessed from shapes and values: decode {config.head.decode}, {counted(len(config.classes), 'class')}"
    assert said.startswith(guess)
    assert (config.name, config.input.size, config.input.name) == ("m", SIZE, "x")
    return config


@pytest.mark.parametrize(
    ("outputs", "head", "classes"),
    [
        (lambda: {"o": _joined(_centres(3 * TOTAL), _random(1, 3 * TOTAL, 8))}, {"decode": "yolov5"}, 7),
        (lambda: {"o": _random(1, TOTAL, 12)}, {"decode": "yolox", "scores": "probabilities"}, 7),
        (lambda: {"o": _random(1, TOTAL, 12, low=-3, high=3)}, {"decode": "yolox", "scores": "logits"}, 7),
        (lambda: {"o": _joined(_centres(TOTAL), _random(1, TOTAL, 8))}, {"decode": "yolov5"}, 7),
        (
            lambda: {"o": _joined(_centres(TOTAL), _random(1, TOTAL, 7)).transpose(0, 2, 1)},
            {"decode": "yolov8", "scores": "probabilities"},
            7,
        ),
        (
            lambda: {"o": _joined(_centres(TOTAL), _random(1, TOTAL, 7, low=-9)).transpose(0, 2, 1)},
            {"decode": "yolov8", "scores": "logits"},
            7,
        ),
        (lambda: {"o": _random(1, TOTAL, 80 + 32)}, {"decode": "dfl", "bins": 8, "strides": (8, 16, 32)}, 80),
        (
            lambda: {f"c{n}": _random(1, n, 7, low=-9) for n in CELLS} | {f"d{n}": _random(1, n, 64) for n in CELLS},
            {"decode": "dfl", "bins": 16, "scores": "logits"},
            7,
        ),
        (
            lambda: {"s": _random(1, 50, 7), "b": _corners(50)},
            {"decode": "boxes", "outputs": ("b", "s"), "boxes": "xyxy", "units": "pixels"},
            7,
        ),
        (
            lambda: {"s": _random(1, 50, 80, low=-9), "b": _centres(50, 1)},
            {"decode": "boxes", "boxes": "cxcywh", "units": "relative", "scores": "logits"},
            80,
        ),
        (
            lambda: {"o": _joined(_corners(300), _random(1, 300, 1), np.round(_random(1, 300, 1) * 50))},
            {"decode": "detections", "boxes": "xyxy", "units": "pixels"},
            80,
        ),
        (
            lambda: {"s": _shares(0), "b": _corners(50, 1)},
            {"decode": "boxes", "background": "first", "scores": "probabilities", "units": "relative"},
            4,
        ),
        (lambda: {"b": _corners(50, 1), "s": _shares(-1)}, {"decode": "boxes", "background": "last"}, 4),
        (lambda: {"b": _corners(50, 1), "s": _shares(2)}, {"decode": "boxes", "background": "none"}, 5),
        (lambda: {"o": _random(1, 12, 8, 12)}, {"decode": "boxes", "compute": _shipped("fastestdet")}, 7),
        (lambda: {"o": _joined(_corners(TOTAL), _random(1, TOTAL, 80))}, {"compute": _shipped("ppyoloe")}, 80),
    ],
)
def test_heads_are_recognised(outputs, head, classes):
    config = _guessed(outputs())
    assert {key: getattr(config.head, key) for key in head} == head
    assert len(config.classes) == classes
    assert config.classes == (COCO_CLASSES if classes == 80 else tuple(f"class {i}" for i in range(classes)))
    assert config.nms.suppresses == (config.head.decode != "detections")


def test_names_of_the_model_say_how_many_classes_there_are():
    names = tuple(f"kind {i}" for i in range(9))
    assert _guessed({"o": _random(1, TOTAL, 9 + 4 * 8)}, names).classes == names  # not 36 classes of YOLOX
    with pytest.raises(ModelError, match=r"no head of 9 classes that is known has the outputs 'o' \(1, 504, 12\)"):
        onnx_file.guessed({"o": _random(1, TOTAL, 12)}, SIZE, "m", "x", names)


@pytest.mark.parametrize(
    ("family", "widths"),
    [
        *(("scrfd", (1, 4)), ("scrfd-kps", (1, 4, 10)), ("yunet", (1, 1, 4)), ("yunet-kps", (1, 1, 4, 10))),
        *(("retinaface", (4, 2)), ("retinaface-kps", (4, 2, 10))),
    ],
)
def test_a_shipped_head_brings_its_pixels_and_its_class(family, widths):
    anchors = 1 if family.startswith("yunet") else 2
    levels = (TOTAL,) if family.startswith("retinaface") else CELLS
    outputs = {
        f"{at}-{cells}": _random(1, anchors * cells, width) for at, width in enumerate(widths) for cells in levels
    }
    config = _guessed(outputs)
    shipped = load_config(family)
    assert (config.classes, config.head, config.nms) == (("face",), shipped.head, shipped.nms)
    assert config.input == shipped.input.model_copy(update={"size": SIZE, "name": "x"})


def _efficientdet(columns: int) -> dict[str, Any]:
    """Offsets, scores and anchors of nine boxes a cell, for 128 x 128 pixels."""
    count = 9 * (16 * 16 + 8 * 8 + 4 * 4 + 2 * 2 + 1)
    return {"a": _random(1, count, 4), "b": _random(1, count, columns), "c": _corners(count)}


@pytest.mark.parametrize("columns", [90, 7])
def test_efficientdet_is_recognised_by_its_anchors(columns):
    config, _ = onnx_file.guessed(_efficientdet(columns), (128, 128), "m", input_name="x", classes=None)
    shipped = load_config("efficientdet")
    assert config.head == shipped.head.model_copy(update={} if columns == 90 else {"columns": None})
    assert config.classes == (COCO_CLASSES if columns == 90 else onnx_file.placeholders(7))
    assert (config.input.mean, config.input.resize) == (shipped.input.mean, "letterbox-topleft")


def test_efficientdets_boxes_are_those_of_its_own_repository():
    """BBoxTransform of zylo117/Yet-Another-EfficientDet-Pytorch: offsets and anchors are y, x, height, width."""
    outputs = _efficientdet(90)
    offsets, _, anchors = outputs.values()
    y, x = (anchors[..., at] / 2 + anchors[..., at + 2] / 2 for at in (0, 1))
    high, wide = (anchors[..., at + 2] - anchors[..., at] for at in (0, 1))
    y, x = offsets[..., 0] * high + y, offsets[..., 1] * wide + x
    high, wide = np.exp(offsets[..., 2]) * high, np.exp(offsets[..., 3]) * wide
    expected = np.stack([x - wide / 2, y - high / 2, x + wide / 2, y + high / 2], axis=-1)
    np.testing.assert_allclose(expressions.computed(outputs, load_config("efficientdet"))["boxes"], expected, rtol=1e-4)


@pytest.mark.parametrize(("family", "columns"), [("yolov5-face", 16), ("yolov5-plate", 15), ("yolov5-plate", 14)])
def test_landmarks_in_pixels_are_no_classes(family, columns):
    rows = _random(1, 3 * TOTAL, columns)
    rows[..., :4] *= 100
    assert onnx_file.guessed({"o": rows}, SIZE, "m", "x", None)[0].head.decode == "yolov5"
    points = 8 if family == "yolov5-plate" else 10
    rows[..., 5 : 5 + points] *= 100
    config, _ = onnx_file.guessed({"o": rows}, SIZE, "m", "x", None)
    assert (config.head, len(config.classes)) == (load_config(family).head, columns - 5 - points)


@pytest.mark.parametrize(
    "shape",
    [(1, TOTAL + 1, 12), (1, 84), (1, 3, 24, 24, 85), pytest.param((1, 3 * TOTAL, 13), id="boxes that need anchors")],
)
def test_outputs_that_fit_nothing(shape):
    with pytest.raises(ModelError, match="no head that is known has the outputs 'o' .* give it with --config"):
        onnx_file.guessed({"o": _random(*shape)}, SIZE, "m", "x", None)


@pytest.mark.parametrize(
    ("family", "shape"),
    [("yolov8-seg", (4 + 7 + 32, TOTAL)), ("yolov5-seg", (3 * TOTAL, 5 + 7 + 32)), ("yolov8-pose", (5 + 51, TOTAL))],
)
@pytest.mark.parametrize("named", [False, True])
def test_masks_and_poses_are_recognised_by_their_shapes(family, shape, named):
    outputs = {"o": _random(1, *shape)}
    count = 1 if family.endswith("pose") else 7
    if count == 7:
        outputs["p"] = _random(1, 32, SIZE[0] // 4, SIZE[1] // 4)
    names = tuple(map(str, range(count))) if named else None
    config, _ = onnx_file.guessed(outputs, SIZE, "m", "x", names)
    assert config.head == load_config(family).head and len(config.classes) == count


TASK = {"task": "pose", "names": "{0: 'cat', 1: 'dog'}", "kpt_shape": "[4, 3]"}


@pytest.mark.parametrize(
    ("metadata", "shapes", "head"),
    [
        (TASK, [(6 + 12, TOTAL)], {"decode": "yolov8"}),
        (TASK | {"kpt_names": "{0: ['a', 'b', 'c', 'd']}"}, [(6 + 12, TOTAL)], {"decode": "yolov8"}),
        (TASK, [(300, 6 + 12)], {"decode": "detections"}),
        (TASK | {"task": "obb"}, [(6 + 1, TOTAL)], {"decode": "yolov8", "rotated": True}),
        (TASK | {"task": "obb"}, [(300, 6 + 1)], {"decode": "detections", "boxes": "cxcywh", "rotated": True}),
        (TASK | {"task": "segment"}, [(6 + 8, TOTAL), (8, 24, 24)], {"decode": "yolov8", "masks": True}),
        (TASK | {"task": "segment"}, [(300, 6 + 8), (8, 24, 24)], {"decode": "detections", "masks": True}),
    ],
)
def test_tasks_are_recognised_by_their_metadata(metadata, shapes, head):
    outputs = {f"o{at}": _random(1, *shape) for at, shape in enumerate(shapes)}
    config, note = onnx_file.guessed_task(metadata, outputs, SIZE, path=Path("m.onnx"), input_name="x")
    assert config.classes == ("cat", "dog") and "2 classes" in note
    assert {key: getattr(config.head, key) for key in head} == head
    assert config.nms.suppresses == (head["decode"] == "yolov8")
    if metadata["task"] == "pose":
        names = ("a", "b", "c", "d") if "kpt_names" in metadata else tuple(f"keypoint {at}" for at in range(4))
        assert config.head.keypoints is not None and config.head.keypoints.names == names


def test_metadata_that_do_not_fit_the_outputs_are_named():
    with pytest.raises(ModelError, match="channels; .* were expected"):
        onnx_file.guessed_task(TASK, {"o": _random(1, 9, TOTAL)}, SIZE, path=Path("m.onnx"), input_name="x")


def test_scores_that_numbers_cannot_explain_are_refused():
    outputs = {"s": _random(1, 50, 92, low=-9), "b": _centres(50, 1)}
    with pytest.raises(ModelError, match=r"'s' has 92 columns of logits, and numbers cannot say .* head.background"):
        onnx_file.guessed(outputs, SIZE, "m", "x", None)


@pytest.mark.parametrize(
    ("key", "text", "names"),
    [
        ("names", "{0: 'cat', 1: 'dog'}", ("cat", "dog")),
        ("names", "['cat', 'dog']", ("cat", "dog")),
        ("character", "cat\nbig dog\n", ("cat", "big dog")),
        ("classes", "cat, dog", ("cat", "dog")),
        ("names", "{0: 'cat', 1: 'cat'}", None),
        ("names", "__import__('os')", None),
        ("names", "[", None),
        ("names", "{}", None),
        ("classes", "80", None),
        ("author", "cat, dog", None),
    ],
)
def test_names_in_the_metadata(key, text, names):
    model = helper.make_model(helper.make_graph([], "g", [], []))
    helper.set_model_props(model, {key: text})
    assert onnx_file.class_names(model) == names


@pytest.mark.parametrize(
    ("text", "size"),
    [("[320, 416]", (320, 416)), ("320", (320, 320)), ("[320]", None), ("wide", None), ("[0, 1]", None)],
)
def test_a_size_in_the_metadata(text, size):
    model = helper.make_model(helper.make_graph([], "g", [], []))
    helper.set_model_props(model, {"imgsz": text})
    assert onnx_file.input_size(model) == size


def test_a_model_is_simplified_described_and_compared(tmp_path):
    images = generate(tmp_path / "shapes", "val", 2).images
    named = onnx.load(str(SHAPES_MODEL))
    shipped = load_config("shapes")
    helper.set_model_props(named, {"names": str(dict(enumerate(shipped.classes)))})
    onnx.save(named, str(tmp_path / "named.onnx"))
    options = ExportOptions(images=images, dynamic_batch=True)
    report = export(str(tmp_path / "named.onnx"), tmp_path / "m.onnx", options)
    config = load_config(tmp_path / "m.yaml")
    assert config.classes == shipped.classes and config.head == shipped.head and config.nms == shipped.nms
    assert config.input.model_dump(exclude={"name"}) == shipped.input.model_dump(exclude={"name"})
    model = onnx.load(str(tmp_path / "m.onnx"))
    assert len(model.graph.node) < len(named.graph.node)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert onnx_file.class_names(model) == shipped.classes, "metadata is kept"
    assert report.notes[0] == f"{len(named.graph.node)} nodes became {len(model.graph.node)}"
    assert report.detections is not None and report.detections.images == 4
    assert report.detections.matched == report.detections.torch > 10
    with pytest.raises(OutputError, match="is the model that is read"):
        export(str(tmp_path / "m.onnx"), tmp_path / "m.onnx", options)


def test_a_size_that_is_not_the_models(tmp_path):
    with pytest.raises(ModelError, match="is fixed to 256x256 .* cannot be changed to 64x64: .*Reshape"):
        export(str(SHAPES_MODEL), tmp_path / "m.onnx", ExportOptions(size=(64, 64)))
    with pytest.raises(ModelError, match="'absent.onnx' does not exist"):
        export("absent.onnx", tmp_path / "m.onnx")


def test_a_two_stage_model_keeps_its_batch_of_one(tmp_path):
    options = ExportOptions(config=RCNN, dynamic_batch=True)
    with pytest.raises(ModelError, match="a two-stage model is of one image: .*; leave --dynamic-batch out"):
        export(str(TWO_STAGE), tmp_path / "m.onnx", options)


def test_a_configuration_given_takes_the_place_of_the_guess(tmp_path):
    report = export(str(SHAPES_MODEL), tmp_path / "m.onnx", ExportOptions(config=load_config("shapes")))
    assert report.config is None and len(report.notes) == 1
    versions = json.loads((tmp_path / "m.parity.json").read_text())["versions"]
    assert list(versions) == ["trtdet", "onnxruntime"], "torch had no part in it, loaded or not"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.parity.json"]
