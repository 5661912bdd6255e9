from typing import Any

import numpy as np
import pytest

from trtdet.config import Config, NmsConfig
from trtdet.errors import ConfigError, ModelError
from trtdet.exporter import parity
from trtdet.exporter.parity import compare_detections, compare_outputs, compare_selection

BOXES = np.array([[[10, 10, 50, 50], [12, 10, 52, 50], [100, 100, 140, 150], [60, 20, 90, 60]]], np.float32)
SCORES = np.array([[[0.9, 0.1], [0.6, 0.1], [0.1, 0.8], [0.1, 0.1]]], np.float32)

SELECTION = NmsConfig(score_threshold=0.3, iou_threshold=0.5, max_detections=2)


def _config(**nms: Any) -> Config:
    return Config.model_validate(
        {
            "name": "m",
            "classes": ("a", "b"),
            "input": {"size": (160, 160)},
            "head": {"decode": "boxes", "outputs": ("boxes", "scores")},
            "nms": {"score_threshold": 0.3, "iou_threshold": 0.5, **nms},
        }
    )


def _compare(boxes: Any, scores: Any, of: Any = (BOXES, SCORES), **nms: Any) -> Any:
    pairs = [({"boxes": of[0], "scores": of[1]}, {"boxes": boxes, "scores": scores})]
    return compare_detections("m", pairs, _config(**nms), 1e-3)


def _changed(array: Any, place: tuple[int, ...], value: float) -> Any:
    result = array.copy()
    result[place] += np.float32(value)
    return result


def test_equal_detections_match():
    check = _compare(_changed(BOXES, (0, 2, 3), 0.1), _changed(SCORES, (0, 0, 0), 5e-4))
    assert (check.images, check.torch, check.onnx, check.matched, check.ties) == (1, 2, 2, 2, 0)
    assert check.max_score == pytest.approx(5e-4, rel=1e-3) and check.max_box == pytest.approx(0.1, rel=1e-3)


def test_a_score_of_a_mixed_output_is_held_to_its_own_tolerance():
    with pytest.raises(ModelError, match=r"export of 'm': a score differs from torch by 0.02, allowed is 0.001"):
        _compare(BOXES, _changed(SCORES, (0, 0, 0), 0.02))
    with pytest.raises(ModelError, match=r"a corner of a box differs from torch by 0.5, allowed is 0.16"):
        _compare(_changed(BOXES, (0, 2, 0), 0.5), SCORES)
    # A box that is no detection may be anywhere.
    assert _compare(_changed(BOXES, (0, 3, 0), 5.0), SCORES).matched == 2


@pytest.mark.parametrize("threshold", [0.8, 0.9])
def test_a_detection_at_the_score_threshold_is_a_tie(threshold):
    place = (0, 0, 0) if threshold == 0.9 else (0, 2, 1)
    lower, upper = _changed(SCORES, place, -2e-7), _changed(SCORES, place, 2e-7)
    for first, second in ((lower, upper), (upper, lower)):
        check = _compare(BOXES, second, of=(BOXES, first), score_threshold=threshold)
        assert check.ties == 1 and check.matched == min(check.torch, check.onnx)


def test_a_detection_of_one_side_without_a_threshold_near_is_an_error(monkeypatch):
    """Suppression itself goes wrong on one side: equal scores and boxes give other detections."""
    whole, calls = parity.non_max_suppression, iter(range(9))

    def failing(boxes: Any, scores: Any, nms: NmsConfig, **kwargs: Any) -> Any:
        changed = scores * np.float32(0.5) if next(calls) else scores
        return whole(boxes, changed, nms, **kwargs)

    monkeypatch.setattr(parity, "non_max_suppression", failing)
    with pytest.raises(ModelError, match=r"torch alone finds class 0 with score 0.9000 in \[10.0, 10.0, 50.0, 50.0\]"):
        _compare(BOXES, SCORES)


def test_rivals_that_change_places_are_ties():
    """Two boxes that hide each other, of one score but for rounding: each side keeps another."""
    first, second = SCORES.copy(), SCORES.copy()
    first[0, :2, 0] = 0.9, np.nextafter(np.float32(0.9), np.float32(0))
    second[0, :2, 0] = np.nextafter(np.float32(0.9), np.float32(0)), 0.9
    boxes = _changed(BOXES, (0, 1, 0), 2.0)  # the two are farther apart than the tolerance
    check = _compare(boxes, second, of=(boxes, first))
    assert (check.torch, check.onnx, check.matched, check.ties) == (2, 2, 1, 2)


def test_room_that_is_full_is_a_tie():
    scores = SCORES.copy()
    scores[0, :, 0] = 0.9, 0.0, 0.0, np.nextafter(np.float32(0.8), np.float32(0))
    other = scores.copy()
    other[0, 2, 1], other[0, 3, 0] = scores[0, 3, 0], scores[0, 2, 1]
    check = _compare(BOXES, other, of=(BOXES, scores), max_detections=2)
    assert (check.matched, check.ties) == (1, 2)


def test_outputs_of_another_shape_are_an_error():
    with pytest.raises(ConfigError, match="decode rule 'boxes' takes boxes"):
        _compare(BOXES[..., :3], SCORES[:, :2])
    one = {"x": np.zeros((1, 3), np.float32)}
    with pytest.raises(ModelError, match=r"output x is \(1, 2\) in ONNX and \(1, 3\) in torch"):
        compare_outputs("m", [(one, {"x": np.zeros((1, 2), np.float32)})], 1e-3)


def _chosen(*rows: int, scores: tuple[float, ...] = (0.9, 0.8, 0.7)) -> Any:
    """The last box overlaps the first by 0.91."""
    boxes = np.array([[10, 10, 50, 50], [100, 100, 140, 150], [12, 10, 50, 50.5]], np.float32)
    kept = list(rows)
    return {"boxes": boxes[kept], "scores": np.array(scores, np.float32)[kept], "labels": np.zeros(len(kept), np.int64)}


def _compare_selection(*pairs: Any, nms: NmsConfig | None = SELECTION, corner: float = 1e-3) -> Any:
    return compare_selection("m, proposals", pairs, nms, score=1e-3, corner=corner)


def test_a_choice_of_the_same_candidates_is_the_same_but_for_ties():
    same = _compare_selection((_chosen(0, 1), _chosen(0, 1)))
    assert (same.torch, same.onnx, same.matched, same.ties) == (2, 2, 2, 0)
    with pytest.raises(ModelError, match=r"export of 'm, proposals': torch alone finds class 0 with score 0.8000"):
        _compare_selection((_chosen(0, 1), _chosen(0)))
    # Of equal scores, either of two boxes hides the other.
    equal = (0.9, 0.8, 0.9)
    assert _compare_selection((_chosen(0, 1, scores=equal), _chosen(2, 1, scores=equal))).ties == 2
    with pytest.raises(ModelError, match=r"alone finds"):
        _compare_selection((_chosen(0, 1), _chosen(2, 1)))


def test_detections_of_one_side_alone_are_counted():
    count = _compare_selection((_chosen(0, 1), _chosen(1, 2)), (_chosen(0), _chosen(0)), nms=None, corner=0.2)
    assert (count.images, count.torch, count.onnx, count.matched, count.ties) == (2, 3, 3, 2, 2)
