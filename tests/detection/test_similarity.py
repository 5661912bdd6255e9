import numpy as np
import pytest

from trtdet.detection.parts import Parts
from trtdet.detection.similarity import similarities
from trtdet.quantization.head_error import HeadError

SIZE = (64, 96)
BOXES = np.array([[10, 10, 50, 40], [0, 0, 96, 64]], np.float32)


def of_all(**parts):
    return Parts(**{name: np.asarray(value, np.float32) for name, value in parts.items()})


def masks(rng, moved=0.0):
    prototypes = np.random.default_rng(1).normal(size=(4, 16, 24))
    return of_all(mask_coefficients=np.eye(2, 4) + moved * rng.normal(size=(2, 4)), prototypes=prototypes)


def test_the_same_parts_are_alike():
    rng = np.random.default_rng(0)
    both = of_all(keypoints=rng.uniform(0, 60, (2, 5, 3)), rotated_boxes=[[30, 30, 20, 9, 0.4], [50, 30, 9, 40, 2]])
    for values in [*similarities(masks(rng), masks(rng), BOXES, SIZE), *similarities(both, both, BOXES, SIZE)]:
        assert values.shape == (2,) and values.min() > 0.99


def test_masks_are_compared_inside_the_box():
    rng = np.random.default_rng(0)
    (near,), (far,) = (similarities(masks(rng), masks(rng, moved), BOXES, SIZE) for moved in (0.05, 2.0))
    assert near.min() > 0.9 and far.max() < 0.8 and (near > far).all()
    nothing = of_all(mask_coefficients=np.zeros((2, 4)), prototypes=np.ones((4, 16, 24)))
    assert similarities(nothing, nothing, BOXES, SIZE)[0].tolist() == [1, 1]
    assert similarities(masks(rng), nothing, BOXES, SIZE)[0].tolist() == [0, 0]


def test_keypoints_count_by_the_size_of_the_object():
    still = np.full((2, 1, 3), 20.0)
    moved = still + np.array([3.0, 4.0, 0.9])
    (values,) = similarities(of_all(keypoints=still), of_all(keypoints=moved), BOXES, SIZE)
    np.testing.assert_allclose(values, np.exp(-25 / (2 * 0.01 * np.array([40 * 30, 96 * 64]))), rtol=1e-6)
    broken = np.full((2, 1, 3), np.nan)
    assert similarities(of_all(keypoints=still), of_all(keypoints=broken), BOXES, SIZE)[0].tolist() == [0, 0]


@pytest.mark.parametrize("chosen", [False, True])
def test_the_error_at_the_head_sees_what_boxes_hide(chosen):
    scores = np.array([[0.9], [0.8]], np.float32)
    still = of_all(keypoints=np.full((2, 2, 3), 20.0))
    moved = of_all(keypoints=np.full((2, 2, 3), 40.0))
    exact = HeadError(chosen, SIZE).update((BOXES, scores), (BOXES, scores), (still, still))
    rough = HeadError(chosen, SIZE).update((BOXES, scores), (BOXES, scores), (still, moved))
    assert exact.distance < 1e-6 and exact.agreement == pytest.approx(1)
    assert rough.distance > 0.2 and rough.agreement < 0.8


def test_rows_that_a_model_chooses_are_paired_with_their_parts():
    scores = np.array([[0.9], [0.8]], np.float32)
    points = np.stack([np.full((2, 3), 20.0), np.full((2, 3), 40.0)]).astype(np.float32)
    first, second = of_all(keypoints=points), of_all(keypoints=points[::-1])
    error = HeadError(True, SIZE).update((BOXES, scores), (BOXES[::-1], scores[::-1]), (first, second))
    assert error.distance < 1e-6
