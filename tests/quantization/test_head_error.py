import nets
import numpy as np
import pytest

from trtdet.quantization import HeadError
from trtdet.quantization.head_error import chooses_rows

BOXES = np.array([[0, 0, 10, 10], [20, 20, 40, 40], [0, 0, 5, 5]], np.float32)
SCORES = np.array([[0.9, 0.0], [0.0, 0.6], [0.04, 0.01]], np.float32)


def test_the_same_detections_have_no_error():
    error = HeadError().update((BOXES, SCORES), (BOXES, SCORES))
    assert (error.distance, error.power) == (0, 0)


def test_scores_count_by_their_size():
    other = SCORES.copy()
    other[0, 0] = 0.7  # off by 0.2, weight 0.9
    other[2, 0] = 0.05  # still under what becomes a detection
    error = HeadError().update((BOXES, SCORES), (BOXES, other))
    assert error.power == pytest.approx(0.9 * 0.2**2 / (0.9 + 0.6), rel=1e-5)
    assert error.distance == pytest.approx(np.sqrt(error.power), rel=1e-6)


def test_a_detection_out_of_nothing_counts():
    other = SCORES.copy()
    other[2, 1] = 0.5
    error = HeadError().update((BOXES, SCORES), (BOXES, other))
    assert error.power == pytest.approx(0.5 * 0.49**2 / (0.9 + 0.6 + 0.5), rel=1e-5)


def test_boxes_count_by_their_best_score():
    moved = BOXES.copy()
    moved[0, 2] = 5  # IoU 0.5
    moved[2] = 100  # never seen
    error = HeadError().update((BOXES, SCORES), (moved, SCORES))
    assert error.distance == pytest.approx(0.9 * 0.5 / 1.5, rel=1e-5)
    assert error.power == pytest.approx(0.9 * 0.25 / 1.5, rel=1e-5)


def test_images_add_up_and_an_empty_one_changes_nothing():
    other = np.clip(SCORES + 0.1, 0, 1)
    once = HeadError().update((BOXES, SCORES), (BOXES, other))
    twice = HeadError().update((BOXES, SCORES), (BOXES, other))
    empty = np.zeros_like(SCORES)
    twice.update((BOXES, empty), (BOXES, empty))
    assert twice.distance == pytest.approx(once.distance)
    assert (HeadError().distance, HeadError().power) == (0, 0)


def test_agreement_is_what_both_detect_of_all_that_either_does():
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


def test_what_is_no_number_is_no_detection():
    nothing = HeadError().update((BOXES, SCORES), (BOXES, np.zeros_like(SCORES)))
    broken = HeadError().update((BOXES, SCORES), (BOXES, np.full_like(SCORES, np.nan)))
    assert broken.distance == nothing.distance > 0.5
    assert broken.agreement == 0
    lost = HeadError().update((BOXES, SCORES), (np.full_like(BOXES, np.nan), SCORES))
    assert lost.distance == pytest.approx(1)


def queries(count: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Boxes side by side and scores of which the last is no detection."""
    left = 40.0 * np.arange(count, dtype=np.float32)
    boxes = np.stack([left, np.zeros(count), left + 30, np.full(count, 30)], axis=1).astype(np.float32)
    scores = np.zeros((count, 3), np.float32)
    scores[np.arange(count), np.arange(count) % 3] = np.linspace(0.9, 0.02, count)
    return boxes, scores


def test_rows_that_a_model_chooses_are_compared_with_those_that_detect_the_same():
    boxes, scores = queries()
    order = np.array([3, 1, 5, 0, 2, 4])
    turned = boxes[order], scores[order]
    assert HeadError(chosen=True).update((boxes, scores), turned).distance == 0
    assert HeadError(chosen=True).update((boxes, scores), turned).agreement == 1
    assert HeadError().update((boxes, scores), turned).distance > 1
    moved = boxes + np.float32(3)
    alone = HeadError().update((boxes, scores), (moved, scores))
    both = HeadError(chosen=True).update((boxes, scores), (moved[order], scores[order]))
    np.testing.assert_allclose(both.by_image, alone.by_image)


def test_a_detection_that_only_one_model_has_counts_as_lost():
    boxes, scores = queries()
    fewer = scores.copy()
    fewer[0] = 0
    for first, other in ((scores, fewer), (fewer, scores)):
        error = HeadError(chosen=True).update((boxes, first), (boxes, other))
        assert error.by_image[0, 0] == pytest.approx(0.9**3)  # the squared score, times the score
        assert error.agreement == pytest.approx(1 - 0.9 / scores[scores > 0.05].sum())
    nothing = HeadError(chosen=True).update((boxes, 0 * scores), (boxes, 0 * scores))
    assert (nothing.distance, nothing.agreement) == (0, 1)


def test_a_model_chooses_its_rows_where_a_topk_of_its_own_is_before_them():
    text = """(float[1,8,4] b, float[1,8] s, int64[1] k) => (float[1,3] top, float[1,8,4] scores) {
        top, place = TopK(s, k) scores = Relu(b) }"""
    model = nets.net(text, 17)
    assert chooses_rows(model, ["top"]) and chooses_rows(model, ["scores", "top"])
    assert not chooses_rows(model, ["scores"])
