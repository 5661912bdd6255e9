from __future__ import annotations

import numpy as np
import pytest

from trtdet.quantization import HeadError

BOXES = np.array([[0, 0, 10, 10], [20, 20, 40, 40], [0, 0, 5, 5]], np.float32)
SCORES = np.array([[0.9, 0.0], [0.0, 0.6], [0.04, 0.01]], np.float32)


def test_the_same_detections_have_no_error() -> None:
    error = HeadError().update((BOXES, SCORES), (BOXES, SCORES))
    assert (error.distance, error.power) == (0, 0)


def test_scores_count_by_their_size() -> None:
    other = SCORES.copy()
    other[0, 0] = 0.7  # off by 0.2, weight 0.9
    other[2, 0] = 0.05  # still under what becomes a detection
    error = HeadError().update((BOXES, SCORES), (BOXES, other))
    assert error.power == pytest.approx(0.9 * 0.2**2 / (0.9 + 0.6), rel=1e-5)
    assert error.distance == pytest.approx(np.sqrt(error.power), rel=1e-6)


def test_a_detection_out_of_nothing_counts() -> None:
    other = SCORES.copy()
    other[2, 1] = 0.5
    error = HeadError().update((BOXES, SCORES), (BOXES, other))
    assert error.power == pytest.approx(0.5 * 0.49**2 / (0.9 + 0.6 + 0.5), rel=1e-5)


def test_boxes_count_by_their_best_score() -> None:
    moved = BOXES.copy()
    moved[0, 2] = 5  # IoU 0.5
    moved[2] = 100  # never seen
    error = HeadError().update((BOXES, SCORES), (moved, SCORES))
    assert error.distance == pytest.approx(0.9 * 0.5 / 1.5, rel=1e-5)
    assert error.power == pytest.approx(0.9 * 0.25 / 1.5, rel=1e-5)


def test_images_add_up_and_an_empty_one_changes_nothing() -> None:
    other = np.clip(SCORES + 0.1, 0, 1)
    once = HeadError().update((BOXES, SCORES), (BOXES, other))
    twice = HeadError().update((BOXES, SCORES), (BOXES, other))
    empty = np.zeros_like(SCORES)
    twice.update((BOXES, empty), (BOXES, empty))
    assert twice.distance == pytest.approx(once.distance)
    assert (HeadError().distance, HeadError().power) == (0, 0)
