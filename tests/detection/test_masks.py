import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from trtdet.detection.masks import from_run_lengths, paste, run_lengths
from trtdet.detection.parts import Parts
from trtdet.detection.suppression import Detections

FIXTURE = Path(__file__).parents[1] / "fixtures" / "torchvision_masks.json"


def test_masks_are_pasted_as_torchvision_pastes_them():
    stored = json.loads(FIXTURE.read_text())
    masks = np.array(stored["masks"], np.float32).reshape(-1, 28, 28) / np.float32(255)
    filled = 0
    for case in stored["cases"]:
        want = from_run_lengths(case)
        got = paste(masks[case["mask"]], np.array(case["box"], np.float32), *want.shape)
        # Differing pixels lie on the edge: of any pixel and its neighbours, one is the object's and one is not.
        inside, outside = (cv2.erode(part.astype(np.uint8), np.ones((3, 3))) > 0 for part in (want, ~want))
        assert got[inside].all() and not got[outside].any()
        assert (got != want).mean() < 0.001
        filled += want.any()
    assert filled > 30


def test_a_higher_threshold_leaves_less():
    rising = np.tile(np.linspace(0, 1, 28, dtype=np.float32), (28, 1))
    box = np.array([10, 10, 66, 66], np.float32)
    counts = [paste(rising, box, 80, 80, threshold).sum() for threshold in (0.1, 0.5, 0.9)]
    assert counts[0] > counts[1] > counts[2] > 0
    half = paste(rising, box, 80, 80)
    assert half[40, 12:37].sum() == 0 and half[40, 40:64].all()


@pytest.mark.parametrize("box", [(200, 200, 220, 220), (-50, -50, -20, -20), (np.nan, 0, 10, 10), (0, 0, np.inf, 10)])
def test_a_box_beyond_the_picture_pastes_nothing(box):
    assert not paste(np.ones((28, 28), np.float32), np.array(box, np.float32), 100, 100).any()


def test_run_lengths_are_those_of_coco():
    coco = pytest.importorskip("pycocotools.mask")
    masks = np.random.default_rng(1).random((20, 31, 17)) > np.linspace(0, 1, 20)[:, None, None]
    for mask in masks:
        expected = coco.encode(np.asfortranarray(mask, np.uint8))
        encoded = run_lengths(mask)
        assert encoded == {"size": [31, 17], "counts": expected["counts"].decode()}
        np.testing.assert_array_equal(from_run_lengths(encoded), mask)


def test_detections_may_have_masks():
    count = np.array([[2]], np.int32)
    arrays = (np.zeros((1, 5, 4), np.float32), np.zeros((1, 5), np.float32), np.zeros((1, 5), np.int32))
    assert not Detections(count, *arrays).image_parts(0).items()
    masks = np.random.default_rng(0).random((1, 5, 28, 28), np.float32)
    got = Detections(count, *arrays, Parts(masks=masks)).image_parts(0).masks
    assert got is not None
    np.testing.assert_array_equal(got, masks[0, :2])
