import math

import numpy as np
import pytest

from trtdet.detection.rotated import corners, hulls, polygon_iou, probabilistic_iou


def boxes_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return np.concatenate(
        [rng.uniform(0, 40, (count, 2)), rng.uniform(2, 30, (count, 2)), rng.uniform(-0.78, 2.35, (count, 1))], axis=1
    ).astype(np.float32)


def iou(first, second):
    return polygon_iou(*(corners(np.asarray(boxes, float).reshape(-1, 5)) for boxes in (first, second)))


def test_the_hull_is_that_of_the_corners():
    boxes = boxes_of(50)
    points = corners(boxes)
    expected = np.concatenate([points.min(axis=1), points.max(axis=1)], axis=1)
    np.testing.assert_allclose(hulls(boxes), expected, atol=1e-4)
    np.testing.assert_allclose(hulls([[10, 20, 4, 2, 0]]), [[8, 19, 12, 21]])
    np.testing.assert_allclose(hulls([[10, 20, 4, 2, math.pi / 2]]), [[9, 18, 11, 22]], atol=1e-6)


def test_width_lies_along_the_angle_and_y_points_down():
    points = corners(np.array([0, 0, 4, 0, math.pi / 4], np.float32))
    assert points[0].tolist() == pytest.approx([math.sqrt(2), math.sqrt(2)], abs=1e-6)


def test_probabilistic_iou_is_symmetric_and_one_for_the_same_box():
    boxes = boxes_of(30)
    overlaps = probabilistic_iou(boxes[:, None], boxes)
    np.testing.assert_allclose(overlaps, overlaps.T, atol=1e-5)
    assert np.diag(overlaps).min() > 0.99 and overlaps.min() >= -1e-6 and overlaps.max() <= 1


def test_probabilistic_iou_of_boxes_without_a_size_is_a_number():
    flat = np.array([[5, 5, 0, 0, 0], [5, 5, 4, 0, 0], [9, 5, 0, 0, 1]], np.float32)
    overlaps = probabilistic_iou(flat[:, None], flat)
    assert np.isfinite(overlaps).all() and np.diag(overlaps).min() > 0.99


def test_probabilistic_iou_does_not_change_if_sides_are_swapped():
    boxes = boxes_of(10)
    swapped = boxes[:, [0, 1, 3, 2, 4]] + np.array([0, 0, 0, 0, math.pi / 2], np.float32)
    np.testing.assert_allclose(
        probabilistic_iou(boxes[:, None], boxes), probabilistic_iou(boxes[:, None], swapped), atol=2e-3
    )


def test_polygon_iou_of_upright_boxes_is_the_common_one():
    first, second = np.array([[5, 5, 10, 10, 0]]), np.array([[10, 5, 10, 10, 0], [5, 5, 10, 10, math.pi / 2]])
    np.testing.assert_allclose(iou(first, second), [[1 / 3, 1]], atol=1e-6)
    assert iou(first, [[50, 50, 2, 2, 1]]).tolist() == [[0]]
    assert iou(np.zeros((0, 5)), second).shape == (0, 2)


def test_polygon_iou_is_that_of_the_areas():
    boxes = boxes_of(12, seed=4)
    overlaps = iou(boxes[:6], boxes[6:])
    grid = np.stack(np.meshgrid(np.arange(-30, 80, 0.1), np.arange(-30, 80, 0.1)), axis=-1)

    def inside(box):
        cos, sin = math.cos(box[4]), math.sin(box[4])
        x, y = grid[..., 0] - box[0], grid[..., 1] - box[1]
        return (abs(x * cos + y * sin) <= box[2] / 2) & (abs(y * cos - x * sin) <= box[3] / 2)

    areas = [inside(box) for box in boxes]
    for i in range(6):
        for j in range(6):
            expected = (areas[i] & areas[6 + j]).sum() / (areas[i] | areas[6 + j]).sum()
            assert overlaps[i, j] == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("moved", [0.0, 1e-12, 1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("turned", [0.0, 1e-9, 1e-7])
def test_polygon_iou_of_nearly_the_same_boxes_is_nearly_one(moved, turned):
    """OpenCV's polygons gave 0 for 3 % of those that differ by the rounding to float32."""
    rng = np.random.default_rng(3)
    boxes = np.stack([*rng.uniform(20, 200, (2, 300)), *rng.uniform(3, 80, (2, 300)), rng.uniform(-2, 2, 300)], axis=1)
    for other in (
        np.float64(np.float32(boxes)),
        boxes + rng.choice([-1, 1], boxes.shape) * [moved, moved, moved, moved, turned],
    ):
        found = np.diag(iou(boxes, other))
        # Each side may be moved by the centre's step and half of the size's, and its ends by the turn.
        step = np.abs(boxes - other)[:, :4].sum(axis=1) + 200 * np.abs(boxes - other)[:, 4]
        assert (1 - found <= 1e-12 + 4 * step / boxes[:, 2:4].min(axis=1)).all()


def test_polygon_iou_far_from_the_origin_keeps_its_digits():
    near = np.array([[5, 5, 10, 4, 0.5]])
    far = near + np.array([[4000, 6000, 0, 0, 0]])
    assert iou(far, far)[0, 0] == pytest.approx(1, abs=1e-5)
