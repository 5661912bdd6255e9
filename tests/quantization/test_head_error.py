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


def test_agreement_is_what_both_detect_of_all_that_either_does() -> None:
    assert HeadError().update((BOXES, SCORES), (BOXES, SCORES)).agreement == pytest.approx(1)
    assert HeadError().agreement == 1
    moved, other = BOXES.copy(), SCORES.copy()
    moved[0, 2] = 5  # IoU 0.5
    other[1, 1] = 0.4
    other[2, 1] = 0.5  # out of nothing
    found = HeadError().update((BOXES, SCORES), (moved, other))
    assert found.agreement == pytest.approx((0.9 * 0.5 + 0.4 + 0.01) / (0.9 + 0.6 + 0.5), rel=1e-5)
    # The third box was no detection: only its score counts as an error.
    assert found.power == pytest.approx((0.6 * 0.2**2 + 0.5 * 0.49**2) / 2 + 0.9 * 0.25 / 1.5, rel=1e-5)


def test_what_is_no_number_is_no_detection() -> None:
    nothing = HeadError().update((BOXES, SCORES), (BOXES, np.zeros_like(SCORES)))
    broken = HeadError().update((BOXES, SCORES), (BOXES, np.full_like(SCORES, np.nan)))
    assert broken.distance == nothing.distance > 0.5
    assert broken.agreement == 0
    lost = HeadError().update((BOXES, SCORES), (np.full_like(BOXES, np.nan), SCORES))
    assert lost.distance == pytest.approx(1)
