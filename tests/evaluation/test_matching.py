"""Matching, held to pycocotools' own results box by box."""

import contextlib
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from trtdet.evaluation.matching import IOU_THRESHOLDS, ClassMatcher, ImageTruth, iou, match


def truth_of(boxes: np.ndarray, crowd: Any = False, areas: np.ndarray | None = None) -> ImageTruth:
    flags = np.broadcast_to(np.asarray(crowd, bool), len(boxes)).copy()
    return ImageTruth(boxes, boxes[:, 2] * boxes[:, 3] if areas is None else areas, flags, np.arange(len(boxes)))


def evaluated(boxes: np.ndarray, scores: np.ndarray, truth: ImageTruth | None) -> COCOeval:
    """pycocotools over one image and one class."""
    header = {"info": {}, "images": [{"id": 1, "width": 400, "height": 300}], "categories": [{"id": 1, "name": "a"}]}
    expected: list[dict[str, Any]] = []
    if truth is not None:
        for box, area, crowd in zip(truth.boxes.tolist(), truth.areas.tolist(), truth.crowd.tolist(), strict=True):
            expected.append({"bbox": box, "area": area, "iscrowd": int(crowd)})
    found = [
        {"bbox": box, "area": box[2] * box[3], "score": score, "iscrowd": 0}
        for box, score in zip(boxes.tolist(), scores.tolist(), strict=True)
    ]
    pair = []
    with contextlib.redirect_stdout(io.StringIO()):
        for rows in (expected, found):
            numbered = [{**row, "id": number + 1, "image_id": 1, "category_id": 1} for number, row in enumerate(rows)]
            coco = COCO()
            coco.dataset = {**header, "annotations": numbered}
            coco.createIndex()
            pair.append(coco)
        evaluation = COCOeval(*pair, iouType="bbox")
        evaluation.params.areaRng = evaluation.params.areaRng[:1]
        evaluation.evaluate()
    return evaluation


def check(boxes: np.ndarray, scores: np.ndarray, truth: ImageTruth | None) -> tuple[np.ndarray, np.ndarray]:
    matcher = ClassMatcher(1)
    matcher.add(0, boxes, scores, truth)
    got = matcher.matches()
    evaluation = evaluated(boxes, scores, truth)
    (expected,) = evaluation.evalImgs
    if expected is None:
        assert got.hits.shape == (10, 0) and got.truths.tolist() == [0]
        return got.hits, got.ignored
    ignored = expected["dtIgnore"].astype(bool)
    np.testing.assert_array_equal(got.ignored, ignored)
    np.testing.assert_array_equal(got.hits, expected["dtMatches"].astype(bool) & ~ignored)
    assert got.truths.tolist() == [np.count_nonzero(expected["gtIgnore"] == 0)]
    return got.hits, got.ignored


def test_the_thresholds_are_pycocotools():
    np.testing.assert_array_equal(IOU_THRESHOLDS, COCOeval(iouType="bbox").params.iouThrs)


# On a coarse grid boxes coincide, and IoUs are equal to each other and to the thresholds.
coordinate = st.integers(0, 12).map(float)
side = st.integers(1, 12).map(float)
boxes_on_a_grid = st.lists(st.tuples(coordinate, coordinate, side, side), max_size=8)


@given(found=boxes_on_a_grid, wanted=boxes_on_a_grid, data=st.data())
@settings(max_examples=200, deadline=None)
def test_every_match_is_pycocotools(found, wanted, data):
    boxes, truths = (np.array(rows, np.float64).reshape(-1, 4) for rows in (found, wanted))
    scores = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(boxes), max_size=len(boxes)))) / 4
    crowd = data.draw(st.lists(st.booleans(), min_size=len(truths), max_size=len(truths)))
    # An area over COCO's largest makes a box that counts for nothing, but is no crowd.
    areas = data.draw(st.lists(st.sampled_from([25.0, 2e10]), min_size=len(truths), max_size=len(truths)))
    truth = truth_of(truths, crowd, np.array(areas, np.float64)) if len(truths) else None
    check(boxes, scores.astype(np.float64), truth)


@pytest.mark.parametrize("seed", range(3))
def test_a_crowded_image_and_more_than_100_detections(seed):
    rng = np.random.default_rng(seed)
    truths = np.concatenate([rng.uniform(0, 200, (30, 2)), rng.uniform(8, 140, (30, 2))], axis=1)
    near = np.repeat(truths, 5, axis=0) + rng.normal(0, 4, (150, 4))
    near[:, 2:] = np.maximum(near[:, 2:], 1)
    hits, ignored = check(near, rng.uniform(0, 1, 150).round(2), truth_of(truths, np.arange(30) % 7 == 6))
    assert hits.shape == (10, 100) and hits.any() and ignored.any()


def test_boxes_outside_of_cocos_areas_are_neither_right_nor_wrong():
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, -10], [0, 0, 1e6, 1e6]], np.float64)
    hits, ignored = check(boxes, np.array([0.9, 0.8, 0.7]), truth_of(np.array([[0, 0, 10, 10.0]])))
    assert hits[:, 0].all() and not ignored[:, 0].any() and ignored[:, 1:].all()
    assert check(boxes, np.array([0.9, 0.8, 0.7]), None)[1].tolist() == [[False, True, True]] * 10


def test_a_crowd_takes_any_number_and_a_box_that_counts_comes_first():
    boxes = np.array([[0, 0, 10, 10.0]] * 3)
    truth = truth_of(np.array([[0, 0, 10, 10.0], [0, 0, 8, 10.0]]), [True, False])
    hits, ignored, found = match(boxes, truth)
    assert found.tolist() == [1, -1, -1], "a crowd is no object"
    # IoU 1 with the crowd, 0.8 with the other, which the first detection takes where that is enough.
    assert hits[:, 0].tolist() == [True] * 7 + [False] * 3
    assert ignored[:, 0].tolist() == [False] * 7 + [True] * 3
    assert ignored[:, 1:].all() and not hits[:, 1:].any()


@pytest.mark.parametrize("turned", [False, True])
def test_of_boxes_of_equal_iou_the_last_is_taken(turned):
    beside, below = [2, 0, 10, 10.0], [0, 2, 10, 10.0]
    truth = truth_of(np.array([below, beside] if turned else [beside, below]))
    hits, _ = check(np.array([[0, 0, 10, 10.0], [4, 0, 10, 10.0]]), np.array([0.9, 0.8]), truth)
    # The second detection overlaps with the box beside only.
    assert hits[0].tolist() == [True, not turned]


def test_iou_is_that_of_pycocotools_to_the_bit():
    from pycocotools import mask

    rng = np.random.default_rng(0)
    found, truths = (np.abs(rng.normal(0, 50, (40, 4))) for _ in range(2))
    crowd = rng.integers(0, 2, 40).astype(bool)
    expected = mask.iou(found, truths, crowd.astype(int).tolist())
    np.testing.assert_array_equal(iou(found, truths, crowd), expected)


def test_images_are_ordered_by_score_and_equal_scores_by_image():
    matcher = ClassMatcher(3)
    square = np.array([[0, 0, 10, 10.0]])
    for image, score in enumerate((0.5, 0.9, 0.5)):
        matcher.add(image, square, np.array([score]), truth_of(square) if image else None)
    got = matcher.matches()
    assert got.images.tolist() == [1, 0, 2] and got.truths.tolist() == [0, 1, 1]
    assert got.hits[0].tolist() == [True, False, True]
