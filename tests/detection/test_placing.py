"""Masks, keypoints and rotated boxes in the picture, against slow reference forms."""

import math

import numpy as np
import pytest

from trtdet.config import InputConfig
from trtdet.data.images import resize
from trtdet.detection.parts import Parts
from trtdet.detection.placing import place, place_keypoints, place_rotated, prototype_mask
from trtdet.detection.rotated import corners


def transform_of(height, width, resize_mode="letterbox-centre", size=(64, 96)):
    config = InputConfig(size=size, resize=resize_mode)
    return resize(np.zeros((height, width, 3), np.uint8), config)[1]


def slow_mask(coefficients, prototypes, box, transform, size, threshold):
    """The rule of :func:`prototype_mask`, pixel by pixel."""
    mask = np.zeros((transform.height, transform.width), bool)
    logits = sum(c * p.astype(np.float64) for c, p in zip(coefficients.astype(np.float64), prototypes, strict=True))
    rows, columns = logits.shape
    for v in range(transform.height):
        for u in range(transform.width):
            if not (math.ceil(box[0]) <= u < math.ceil(box[2]) and math.ceil(box[1]) <= v < math.ceil(box[3])):
                continue
            rx, ry = columns / size[1], rows / size[0]
            x = ((u + 0.5) * transform.scale_x + transform.pad_x) * rx - 0.5
            y = ((v + 0.5) * transform.scale_y + transform.pad_y) * ry - 0.5
            x = max(min(x, (transform.pad_x + transform.scale_x * transform.width) * rx - 1), transform.pad_x * rx)
            y = max(min(y, (transform.pad_y + transform.scale_y * transform.height) * ry - 1), transform.pad_y * ry)
            x0, y0 = int(x), int(y)
            x1, y1, a, b = min(x0 + 1, columns - 1), min(y0 + 1, rows - 1), x - x0, y - y0
            left = logits[y0, x0] * (1 - b) + logits[y1, x0] * b
            right = logits[y0, x1] * (1 - b) + logits[y1, x1] * b
            mask[v, u] = left * (1 - a) + right * a > math.log(threshold / (1 - threshold))
    return mask


@pytest.mark.parametrize("mode", ["letterbox-centre", "letterbox-topleft", "stretch"])
@pytest.mark.parametrize(("height", "width"), [(48, 50), (31, 97), (200, 90), (3, 70)])
@pytest.mark.parametrize("threshold", [0.5, 0.7])
def test_a_mask_is_sampled_as_its_docstring_says(mode, height, width, threshold):
    rng, size = np.random.default_rng(height), (64, 96)
    transform = transform_of(height, width, mode, size)
    prototypes = rng.normal(size=(8, 16, 24)).astype(np.float32)
    for _ in range(3):
        coefficients = rng.normal(size=8).astype(np.float32)
        ends = np.sort(rng.uniform(0, 1, (2, 2)), axis=0) * [width, height]
        box = np.concatenate(ends).astype(np.float32)
        mask = prototype_mask(coefficients, prototypes, box, transform=transform, size=size, threshold=threshold)
        expected = slow_mask(coefficients, prototypes, box, transform, size, threshold)
        assert mask.dtype == bool and mask.shape == (height, width)
        assert (mask != expected).sum() <= 1  # a logit may round across the threshold


@pytest.mark.parametrize("box", [[5, 5, 5, 9], [np.nan, 0, 3, 3], [9, 9, 4, 4], [0, 0, np.inf, 9]])
def test_a_box_without_area_has_no_mask(box):
    transform = transform_of(20, 20)
    ones = np.ones((1, 16, 24), np.float32)
    box = np.array(box, np.float32)
    assert not prototype_mask(ones[0, 0, :1], ones, box, transform=transform, size=(64, 96)).any()


def test_a_mask_fills_its_box_where_logits_are_above_the_threshold():
    transform = transform_of(48, 50)
    box = np.array([3.2, 4.0, 20.9, 30.0], np.float32)
    mask = prototype_mask(
        np.ones(1, np.float32), np.ones((1, 16, 24), np.float32), box, transform=transform, size=(64, 96)
    )
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    assert (rows[0], rows[-1], columns[0], columns[-1]) == (4, 29, 4, 20) and mask.sum() == 26 * 17


def test_keypoints_are_placed_and_clipped():
    transform = transform_of(32, 64)  # 64 x 96: scale 1.5, 8 rows of border
    points = np.array([[[15, 23, 0.5], [-10, 200, 0.9]]], np.float32)
    np.testing.assert_allclose(place_keypoints(points, transform), [[[10, 10, 0.5], [0, 32, 0.9]]], rtol=1e-6)


@pytest.mark.parametrize("mode", ["letterbox-centre", "stretch"])
def test_rotated_boxes_are_placed_by_their_sides(mode):
    transform = transform_of(30, 90, mode)
    rng = np.random.default_rng(3)
    boxes = np.concatenate([rng.uniform(5, 60, (20, 4)), rng.uniform(-0.7, 2.3, (20, 1))], axis=1).astype(np.float32)
    placed = place_rotated(boxes, transform)
    scale = np.array([transform.scale_x, transform.scale_y])
    sides = [(corners(boxes)[:, a] - corners(boxes)[:, b]) / scale for a, b in ((0, 3), (0, 1))]
    for column, side in zip((2, 3), sides, strict=True):
        np.testing.assert_allclose(placed[:, column], np.linalg.norm(side, axis=1), rtol=1e-4)
    np.testing.assert_allclose(placed[:, 4], np.arctan2(sides[0][:, 1], sides[0][:, 0]), atol=1e-4)
    if mode != "stretch":
        np.testing.assert_allclose(placed[:, 4], boxes[:, 4], atol=1e-3)


def test_parts_are_placed_together():
    transform = transform_of(32, 64)
    parts = Parts(
        mask_coefficients=np.ones((1, 2, 1), np.float32),
        prototypes=np.ones((1, 1, 16, 24), np.float32),
        keypoints=np.zeros((1, 2, 4, 3), np.float32),
        rotated_boxes=np.ones((1, 2, 5), np.float32),
    )
    boxes = np.array([[0, 0, 10, 10], [5, 5, 9, 9]], np.float32)
    placed = place(parts.image(0), boxes, transform, (64, 96))
    assert placed.masks is not None and [int(mask.sum()) for mask in placed.masks] == [100, 16]
    assert placed.keypoints is not None and placed.keypoints.shape == (2, 4, 3)
    assert placed.rotated_boxes is not None and placed.rotated_boxes.shape == (2, 5)
    one = parts.image(0, [1])
    assert one.prototypes is not None and one.prototypes.shape == (1, 16, 24) and len(one.items()["keypoints"]) == 1
    nothing = place(Parts(), boxes, transform, (64, 96))
    assert (nothing.masks, nothing.keypoints, nothing.rotated_boxes) == (None, None, None)


def test_parts_are_gathered_with_zeros_past_the_last():
    parts = Parts(keypoints=np.arange(12, dtype=np.float32).reshape(2, 2, 1, 3), prototypes=np.ones((2, 1, 4, 4)))
    chosen = parts.gathered([np.array([1]), np.array([], np.intp)], room=3)
    assert chosen.keypoints is not None and chosen.keypoints.shape == (2, 3, 1, 3)
    assert chosen.keypoints[0, 0].tolist() == [[3, 4, 5]] and not chosen.keypoints[:, 1:].any()
    assert chosen.prototypes is not None and chosen.prototypes.shape == (2, 1, 4, 4)
