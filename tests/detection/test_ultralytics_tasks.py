"""Masks, keypoints and rotated boxes against the package ultralytics, recorded by
benchmarks/fixtures/ultralytics_tasks.py."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trtdet.config import Config, InputConfig
from trtdet.data.images import resize
from trtdet.detection.heads import decode_all
from trtdet.detection.placing import place
from trtdet.detection.rotated import probabilistic_iou
from trtdet.detection.suppression import non_max_suppression

FOLDER = Path(__file__).parent.parent / "fixtures" / "ultralytics_tasks"
RECORDED = sorted(path.stem for path in FOLDER.glob("*.npz"))
SIZE, PICTURE, ALIGNED, MOST = (96, 128), (75, 110), (54, 96), 40
PARTS = {
    "seg": {"masks": True},
    "pose": {"keypoints": {"names": ["a", "b", "c", "d"]}},
    "obb": {"rotated": True},
}


def config_of(name, **nms):
    family, task = name.split("-")
    head = {"decode": "yolov8", **PARTS[task]}
    if family == "yolo26":
        head |= {"decode": "detections", "boxes": "cxcywh" if task == "obb" else "xyxy"}
        nms = {"iou_threshold": 1.0, **nms}
    return Config.model_validate(
        {
            "name": name,
            "classes": ["a", "b", "c"],
            "input": {"size": SIZE},
            "head": head,
            "nms": {"score_threshold": 0.05, "iou_threshold": 0.6, "max_detections": MOST, **nms},
        }
    )


def detected(name):
    with np.load(FOLDER / f"{name}.npz") as file:
        recorded = dict(file)
    config = config_of(name)
    raw = [recorded[key] for key in ("output0", "output1") if key in recorded]
    boxes, scores, parts = decode_all(raw, config)
    found = non_max_suppression(boxes, scores, config.nms, parts=parts)
    picture = ALIGNED if name.endswith("obb") else PICTURE
    _, transform = resize(np.zeros((*picture, 3), np.uint8), InputConfig(size=SIZE))
    corners = transform.to_image(found.image(0)[0])
    return recorded, found, place(found.image_parts(0), corners, transform, SIZE), corners


def test_each_family_and_task_was_recorded():
    assert sorted(f"{family}-{task}" for family in ("yolov8", "yolo11", "yolo26") for task in PARTS) == RECORDED


@pytest.mark.parametrize("name", [name for name in RECORDED if not name.endswith("obb")])
def test_boxes_masks_and_keypoints_are_those_of_the_package(name):
    recorded, found, placed, corners = detected(name)
    _, scores, classes = found.image(0)
    count = len(recorded["scores"])
    assert len(scores) == count
    np.testing.assert_allclose(scores, recorded["scores"], atol=1e-6)
    np.testing.assert_array_equal(classes, recorded["classes"])
    np.testing.assert_allclose(corners, recorded["boxes"], atol=0.01)
    if name.endswith("pose"):
        np.testing.assert_allclose(placed.keypoints, recorded["keypoints"], atol=0.01)
        return
    for key, size, prototypes in (("masks", PICTURE, "smooth"), ("aligned", ALIGNED, "output1")):
        expected = np.unpackbits(recorded[key], axis=-1)[..., : size[1]].astype(bool)
        _, transform = resize(np.zeros((*size, 3), np.uint8), InputConfig(size=SIZE))
        parts = replace(found.image_parts(0), prototypes=recorded[prototypes][0])
        placed = place(parts, transform.to_image(found.image(0)[0]), transform, SIZE)
        mine = np.stack(placed.masks)
        shared, joined = (mine & expected).sum(), (mine | expected).sum()
        assert expected.sum() > 1000 and shared / joined > 0.999


def greedy(scores, classes, overlaps, threshold):
    kept = []
    for i in range(len(scores)):
        if all(classes[i] != classes[j] or overlaps[i, j] <= threshold for j in kept):
            kept.append(i)
    return kept


@pytest.mark.parametrize("name", [name for name in RECORDED if name.endswith("obb")])
def test_rotated_boxes_are_those_of_the_package(name):
    recorded, found, placed, _ = detected(name)
    rotated, (_, scores, classes) = found.image_parts(0).rotated_boxes, found.image(0)
    # The package's "fast NMS" also lets suppressed boxes suppress, so it keeps some of those that are kept here.
    facts = np.concatenate([rotated, 100 * scores[:, None], 100 * classes[:, None]], axis=1)
    theirs = [recorded["input_rotated"], 100 * recorded["scores"][:, None], 100 * recorded["classes"][:, None]]
    rows = [int(np.argmin(np.abs(facts - row).sum(axis=1))) for row in np.concatenate(theirs, axis=1)]
    np.testing.assert_allclose(rotated[rows, :4], recorded["input_rotated"][:, :4], atol=0.01)
    np.testing.assert_allclose(rotated[rows, 4], recorded["input_rotated"][:, 4], atol=1e-4)
    np.testing.assert_allclose(scores[rows], recorded["scores"], atol=1e-6)
    np.testing.assert_array_equal(classes[rows], recorded["classes"])
    expected = recorded["rotated_boxes"]
    np.testing.assert_allclose(placed.rotated_boxes[rows, :4], expected[:, :4], atol=0.01)
    turned = placed.rotated_boxes[rows, 4] - expected[:, 4]
    assert np.abs(np.arctan2(np.sin(turned), np.cos(turned))).max() < 1e-4  # YOLO26's angles are any number
    if not name.startswith("yolo26"):
        kept = greedy(scores, classes, probabilistic_iou(rotated[:, None], rotated), 0.6)
        assert kept == list(range(len(scores)))


@pytest.mark.parametrize("name", [name for name in RECORDED if name.endswith("obb")])
def test_probabilistic_iou_is_that_of_the_package(name):
    with np.load(FOLDER / f"{name}.npz") as recorded:
        boxes, expected = recorded["input_rotated"][:20], recorded["probabilistic_iou"]
    assert len(boxes) > 5
    np.testing.assert_allclose(probabilistic_iou(boxes[:, None], boxes), expected, atol=1e-4)
