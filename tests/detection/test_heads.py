from typing import Any

import numpy as np
import pytest

from trtdet.config import Config
from trtdet.detection.heads import decode
from trtdet.errors import ModelError

# Decoding


def make(rule: str, size: tuple[int, int] = (64, 96), classes: int = 3, **head: Any) -> Config:
    return Config.model_validate(
        {
            "name": "test",
            "classes": [f"c{i}" for i in range(classes)],
            "input": {"size": list(size)},
            "head": {"decode": rule, **head},
        }
    )


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, shape).astype(np.float32)


@pytest.mark.parametrize("scores", ["probabilities", "logits"])
def test_yolox(scores):
    config = make("yolox", scores=scores)
    raw = noise(2, 8 * 12 + 4 * 6 + 2 * 3, 8)
    boxes, found = decode({"output": raw}, config)
    assert boxes.dtype == found.dtype == np.float32 and boxes.shape == (2, 126, 4) and found.shape == (2, 126, 3)
    for index, stride, row, column in ((0, 8, 0, 0), (13, 8, 1, 1), (96 + 7, 16, 1, 1), (125, 32, 1, 2)):
        x, y, w, h, *rest = raw[1, index].astype(np.float64)
        x, y, w, h = (x + column) * stride, (y + row) * stride, np.exp(w) * stride, np.exp(h) * stride
        np.testing.assert_allclose(boxes[1, index], [x - w / 2, y - h / 2, x + w / 2, y + h / 2], rtol=1e-5, atol=1e-3)
        rest = np.array(rest) if scores == "probabilities" else sigmoid(np.array(rest))
        np.testing.assert_allclose(found[1, index], rest[0] * rest[1:], rtol=1e-5)


def test_yolov5_and_yolov8():
    row = np.array([50, 40, 20, 10, 0.5, 0.2, 0.4, 0.6], np.float32)
    boxes, scores = decode([row.reshape(1, 1, 8)], make("yolov5"))
    np.testing.assert_allclose(boxes[0, 0], [40, 35, 60, 45])
    np.testing.assert_allclose(scores[0, 0], [0.1, 0.2, 0.3], rtol=1e-6)
    raw = np.stack([np.delete(row, 4), np.delete(row, 4) * 2], axis=-1)[None]
    boxes, scores = decode([raw], make("yolov8"))
    np.testing.assert_allclose(boxes[0], [[40, 35, 60, 45], [80, 70, 120, 90]])
    np.testing.assert_allclose(scores[0, 0], [0.2, 0.4, 0.6])


@pytest.mark.parametrize(
    ("order", "row"), [("xyxy", [40, 35, 60, 45]), ("yxyx", [35, 40, 45, 60]), ("cxcywh", [50, 40, 20, 10])]
)
@pytest.mark.parametrize("first", ["boxes", "scores"])
def test_decoded_boxes_in_every_order_of_coordinates(order, row, first):
    raw = {"boxes": np.array([[row]], np.float32), "scores": np.array([[[0.1, 0.2, 0.3]]], np.float32)}
    boxes, scores = decode({name: raw[name] for name in sorted(raw, key=first.__ne__)}, make("boxes", boxes=order))
    np.testing.assert_array_equal(boxes, [[[40, 35, 60, 45]]])
    np.testing.assert_array_equal(scores, raw["scores"])


@pytest.mark.parametrize("order", ["xyxy", "cxcywh"])
def test_relative_boxes_are_shares_of_the_input(order):
    row = [0.25, 0.25, 0.75, 0.5] if order == "xyxy" else [0.5, 0.375, 0.5, 0.25]
    raw = [np.array([[row]], np.float32), np.array([[[0.1, 0.2, 0.3]]], np.float32)]
    boxes, _ = decode(raw, make("boxes", boxes=order, units="relative"))  # 64 high, 96 wide
    np.testing.assert_allclose(boxes, [[[24, 16, 72, 32]]])


@pytest.mark.parametrize("background", ["first", "last"])
def test_a_background_class_is_left_out_after_the_softmax(background):
    logits = noise(2, 5, 4)
    raw = [noise(2, 5, 4, seed=1), logits]
    scores = decode(raw, make("boxes", scores="softmax", background=background))[1]
    expected = np.exp(logits.astype(np.float64))
    expected /= expected.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(scores, expected[..., 1:] if background == "first" else expected[..., :3], rtol=1e-5)
    plain = decode(raw, make("boxes", background=background))[1]
    np.testing.assert_array_equal(plain, logits[..., 1:] if background == "first" else logits[..., :3])
    with pytest.raises(ModelError, match=r"scores \(B, N, 3\), got .*that of no object \(head.background: last\)\?"):
        decode([noise(2, 5, 4), noise(2, 6, 4)[:, :5]], make("boxes", classes=3))


def test_the_columns_of_the_classes_are_chosen_after_the_softmax():
    logits = noise(2, 5, 7)
    raw = [noise(2, 5, 4, seed=1), logits]
    scores = decode(raw, make("boxes", scores="softmax", columns=[5, 1, 2]))[1]
    expected = np.exp(logits.astype(np.float64))
    expected /= expected.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(scores, expected[..., [5, 1, 2]], rtol=1e-5)
    with pytest.raises(ModelError, match=r"scores \(B, N, 8 or more\), got .*\(2, 5, 7\)"):
        decode(raw, make("boxes", columns=[7, 1, 2]))


def test_columns_that_cannot_be_those_of_the_classes():
    with pytest.raises(ValueError, match=r"head.columns names 2 columns, 'classes' lists 3"):
        make("boxes", columns=[1, 2])
    with pytest.raises(ValueError, match="head.columns has a column twice"):
        make("boxes", columns=[1, 2, 1])
    with pytest.raises(ValueError, match="so the background's is not among them"):
        make("boxes", columns=[1, 2, 3], background="last")
    with pytest.raises(ValueError, match="head.columns belongs to head.decode boxes, not yolov8"):
        make("yolov8", columns=[1, 2, 3])


def test_rows_of_detections():
    rows = np.array([[[40, 35, 60, 45, 0.9, 2], [1, 2, 3, 4, 0.5, 0], [1, 2, 3, 4, 0.4, -1]]], np.float32)
    boxes, scores = decode([rows], make("detections"))
    np.testing.assert_array_equal(boxes, rows[..., :4])
    np.testing.assert_array_equal(scores[0], np.array([[0, 0, 0.9], [0.5, 0, 0], [0, 0, 0]], np.float32))
    with pytest.raises(ModelError, match=r"; is head.decode 'detections' \(with nms: none\)\?"):
        decode([rows], make("yolov8"))
    with pytest.raises(ModelError, match=r"expects \(B, N, 6\): a box, its score and its class"):
        decode([rows[..., :5]], make("detections"))


@pytest.mark.parametrize(
    ("rule", "head", "said"),
    [
        ("yolov8", {"scores": "softmax"}, "head.scores softmax belongs to head.decode boxes, not yolov8"),
        ("detections", {"background": "last"}, "head.background belongs to head.decode boxes, not detections"),
        ("yolox", {"units": "relative"}, "head.units belongs to head.decode boxes and detections, not yolox"),
        ("detections", {"scores": "logits"}, "head.decode detections takes probabilities"),
    ],
)
def test_keys_that_do_not_go_together(rule, head, said):
    with pytest.raises(ValueError, match=said):
        make(rule, **head)


def dfl_maps(config: Config, seed: int = 3) -> tuple[list[np.ndarray], list[np.ndarray]]:
    height, width = config.input.size
    cells = [-(-height // s) * -(-width // s) for s in config.head.strides]
    scores = [sigmoid(noise(2, n, len(config.classes), seed=seed + n)) for n in cells]
    return scores, [noise(2, n, 4 * config.head.bins, seed=seed + 2 * n) for n in cells]


@pytest.mark.parametrize("offset", [0.5, 0.0])
def test_dfl_single_and_pairs_in_any_order(offset):
    config = make("dfl", strides=[8, 16, 64], bins=4, cell_offset=offset)  # 64 does not divide 96: the grid is 1 x 2
    scores, sides = dfl_maps(config)
    joined = np.concatenate([np.concatenate(pair, axis=2) for pair in zip(scores, sides, strict=True)], axis=1)
    boxes, found = decode([joined], config)
    assert boxes.shape == (2, 96 + 24 + 2, 4)
    np.testing.assert_array_equal(found, np.concatenate(scores, axis=1))
    weights = np.exp(sides[2][1, 1].reshape(4, 4).astype(np.float64))
    distance = (weights / weights.sum(axis=1, keepdims=True) @ np.arange(4)) * 64
    point = np.array([(1 + offset) * 64, offset * 64] * 2)
    np.testing.assert_allclose(boxes[1, -1], point + distance * [-1, -1, 1, 1], rtol=1e-5)
    for order in (scores + sides, sides + scores, [sides[1], scores[0], scores[2], sides[2], scores[1], sides[0]]):
        other_boxes, other = decode({f"o{i}": array for i, array in enumerate(order)}, config)
        np.testing.assert_array_equal(other_boxes, boxes)
        np.testing.assert_array_equal(other, found)


@pytest.mark.parametrize("interleaved", [False, True])
def test_dfl_with_as_many_classes_as_sides_goes_by_order(interleaved):
    config = make("dfl", classes=16, strides=[8, 16], bins=4)
    scores, sides = dfl_maps(config)
    order = [scores[0], sides[0], scores[1], sides[1]] if interleaved else scores + sides
    np.testing.assert_array_equal(decode(order, config)[1], np.concatenate(scores, axis=1))


def test_outputs_are_chosen_by_name():
    raw = noise(1, 5, 8)
    outputs = {"other": noise(1, 7, 9), "wanted": raw}
    config = make("yolov5", outputs=["wanted"])
    np.testing.assert_array_equal(decode(outputs, config)[0], decode([raw], config)[0])
    for rule in ("yolox", "yolov5", "yolov8"):
        listed = r"'other' \(1, 7, 9\), 'wanted' \(1, 5, 8\); name the one to read with head\.outputs"
        with pytest.raises(ModelError, match=f"decode rule '{rule}' reads one output, the model gives 2: {listed}"):
            decode(outputs, make(rule))
    missing = "head.outputs names 'gone', which the model does not give; its outputs are 'other', 'wanted'"
    with pytest.raises(ModelError, match=missing):
        decode(outputs, make("yolov5", outputs=["gone"]))
    with pytest.raises(ModelError, match=r"head.outputs names 1 outputs, got 2"):
        decode(list(outputs.values()), config)
    with pytest.raises(ModelError, match="got no outputs"):
        decode({}, make("yolov5"))


def test_half_precision_outputs_are_taken():
    boxes, scores = decode([noise(1, 5, 8).astype(np.float16)], make("yolov5"))
    assert boxes.dtype == scores.dtype == np.float32


@pytest.mark.filterwarnings("error")
def test_overflow_is_quiet():
    raw = np.full((1, 126, 8), 500, np.float32)
    decode([raw], make("yolox"))
    decode([-raw], make("yolox", scores="logits"))
    decode([np.full((1, 126, 19), np.inf, np.float32)], make("dfl", bins=4))


@pytest.mark.parametrize(
    ("rule", "shape", "match"),
    [
        (
            "yolox",
            (1, 126, 85),
            r"'out' has shape \(1, 126, 85\), that is 85 channels; decode rule 'yolox' expects \(B, N, 8\), 5 \+ 3 "
            r"classes; does 'classes'.*for 80\)",
        ),
        ("yolox", (1, 126, 4), r"4 channels.*does 'classes' list the model's classes\?$"),
        (
            "yolox",
            (1, 8400, 8),
            r"8400 cells; input.size \[64, 96\] with head.strides \[8, 16, 32\] gives 126; set input.size to the size "
            r"the model was exported for, or head.strides to its strides",
        ),
        ("yolox", (126, 8), r"\(126, 8\), decode rule 'yolox' expects three dimensions with the batch.*head.decode"),
        (
            "yolov8",
            (3, 8, 8, 8),
            r"rule 'yolov8' expects three dimensions with the batch first; choose the raw outputs",
        ),
        ("yolox", (1, 7, 126), r"is head.decode 'yolov8'\?"),
        ("yolov5", (1, 7, 126), r"is head.decode 'yolov8'\?"),
        ("yolov5", (1, 9, 35), r"is head.decode 'dfl'\?"),
        ("yolov5", (1, 9, 84), r"does 'classes' .*for 79\)"),
        ("yolov8", (1, 126, 8), r"is head.decode 'yolox' or 'yolov5'\?"),
        ("yolov8", (1, 126, 7), r"transposed, it must be \(B, 4 \+ C, N\)"),
        ("yolov8", (1, 84, 126), r"84 channels.*\(B, 7, N\), 4 \+ 3 classes; does 'classes' .*for 80\)"),
        ("dfl", (1, 126, 112), r"112 channels.*\(B, N, 35\), 4 \* 8 head.bins \+ 3 classes; does 'classes' .*for 80\)"),
        ("dfl", (1, 100, 35), r"100 cells"),
        ("dfl", (1, 126, 8), r"is head.decode 'yolox' or 'yolov5'\?"),
    ],
)
def test_wrong_shapes_name_the_likely_key(rule, shape, match):
    with pytest.raises(ModelError, match=match):
        decode({"out": np.zeros(shape, np.float32)}, make(rule))


def test_dfl_pairs_that_do_not_fit():
    config = make("dfl", strides=[8, 16], bins=4)
    scores, sides = dfl_maps(config)
    pair = r"takes one output or a class map and a distance map for each of head.strides \[8, 16\], got 3 outputs: '#0'"
    with pytest.raises(ModelError, match=f"{pair}.*; set head.strides, or head.outputs"):
        decode([*scores, sides[0]], config)
    wrong = r"no output is the class map \(B, 96, 3\) of stride 8, got '#0' \(2, 95, 3\)"
    keys = r"check input.size \[64, 96\], head.strides, head.bins and the 3 classes"
    with pytest.raises(ModelError, match=f"{wrong}.*{keys}"):
        decode([scores[0][:, 1:], scores[1], *sides], config)
    with pytest.raises(ModelError, match=r"no output is the distance map \(B, 24, 16\) of stride 16"):
        decode([*scores, sides[0], sides[1][..., 1:]], config)
