import json
import os

import cv2
import numpy as np
import pytest

from trtdet.demo import shapes
from trtdet.demo.drawing import outline
from trtdet.detection.masks import from_run_lengths
from trtdet.errors import DataError, OutputError


def test_render_depends_only_on_seed_split_and_index():
    first = shapes.render(3, "val", 7)
    for again, expected in zip(shapes.render(3, "val", 7), first, strict=True):
        np.testing.assert_array_equal(again, expected)
    for other in (shapes.render(4, "val", 7), shapes.render(3, "train", 7), shapes.render(3, "val", 8)):
        assert other[0].shape != first[0].shape or (other[0] != first[0]).any()


RENDERED = [
    ((256, 256), [9, 1, 3, 3, 3, 6, 0, 2], [301, 308], [88.56, 92.42, 72.33, 93.18]),
    ((320, 256), [4, 6, 4, 8, 2, 4, 0, 8], [258, 306], [132.63, 143.97, 131.0, 132.23]),
    ((256, 256), [9, 3, 4, 8], [196, 219], [184.73, 165.01, 185.71, 182.61]),
    ((256, 320), [9, 8], [98, 114], [124.11, 118.74, 128.38, 127.69]),
    ((256, 256), [5, 2, 8, 3, 4, 1, 1, 1], [225, 223], [84.51, 86.72, 88.6, 83.4]),
    ((256, 320), [9], [57, 79], [109.18, 107.45, 106.05, 99.45]),
    ((256, 320), [4, 3, 8, 9], [314, 273], [90.26, 101.99, 89.2, 103.6]),
    ((256, 256), [5, 8, 8, 6, 4], [293, 332], [41.76, 49.27, 38.11, 36.52]),
    ((256, 256), [9, 2, 6, 1], [137, 126], [189.42, 192.06, 207.13, 202.92]),
    ((256, 256), [1, 6, 0, 0, 0, 3], [325, 342], [155.65, 151.85, 171.33, 175.89]),
]
"""Of the first images of training: the size, classes, the sum of widths and heights of the boxes, and the mean of each
quarter. What pages say of the shipped detector was measured on images that anybody can make again."""


@pytest.mark.parametrize(("index", "expected"), list(enumerate(RENDERED)), ids=map(str, range(len(RENDERED))))
def test_the_images_of_a_seed_stay_the_same(index, expected):
    image, boxes, classes = shapes.render(0, "train", index)
    (height, width), of_classes, sides, means = expected
    assert (image.shape, classes.tolist()) == ((height, width, 3), of_classes)
    np.testing.assert_allclose((boxes[:, 2:] - boxes[:, :2]).sum(axis=0), sides, atol=2)
    quarters = image.reshape(2, height // 2, 2, width // 2, 3).mean(axis=(1, 3, 4))
    np.testing.assert_allclose(
        quarters.ravel(), means, atol=0.03, err_msg="other pixels than those of earlier versions"
    )


def test_render_types_ranges_and_classes():
    seen: set[int] = set()
    areas = []
    for index in range(60):
        image, boxes, classes = shapes.render(0, "val", index)
        assert image.dtype == np.uint8 and image.shape[2] == 3 and set(image.shape[:2]) <= {256, 320}
        assert boxes.dtype == np.float32 and classes.dtype == np.int64
        assert boxes.shape == (len(classes), 4) and 1 <= len(classes) <= 8
        height, width = image.shape[:2]
        assert (boxes[:, :2] >= 0).all() and (boxes[:, 2] <= width).all() and (boxes[:, 3] <= height).all()
        assert (boxes[:, 2:] - boxes[:, :2] >= 4).all()
        seen |= set(classes.tolist())
        areas += (boxes[:, 2:] - boxes[:, :2]).prod(axis=1).tolist()
    assert seen == set(range(len(shapes.CLASSES)))
    small, large = np.mean(np.array(areas) < 32**2), np.mean(np.array(areas) > 96**2)
    assert 0.3 < small < 0.65 and 0.03 < large < 0.2  # all three of COCO's scales occur


@pytest.mark.parametrize("name", shapes.CLASSES)
def test_every_outline_fills_its_box(name):
    contours, width, height = outline(np.random.default_rng(1), name, 80.0)
    points = np.concatenate(contours)
    assert max(np.ptp(points, axis=0)) == pytest.approx(80.0)
    assert points.min() == pytest.approx(1.0)
    assert (points <= (width - 1, height - 1)).all()


FORMS = {
    "circle": (101, 103, 7667, 311),
    "square": (102, 103, 5238, 290),
    "triangle": (103, 86, 3528, 285),
    "star": (99, 103, 3372, 368),
    "pentagon": (88, 103, 5291, 283),
    "cross": (101, 103, 5068, 384),
    "ring": (101, 103, 10246, 491),
    "diamond": (103, 64, 3880, 269),
    "crescent": (98, 103, 3540, 362),
    "arrow": (103, 80, 3588, 323),
}
"""Width and height of the patch, area within the contours (a ring has two) and their length, of an extent of 100."""


@pytest.mark.parametrize("name", shapes.CLASSES)
def test_every_class_has_its_form(name):
    contours, width, height = outline(np.random.default_rng(3), name, 100.0)
    area, length = 0.0, 0.0
    for contour in contours:
        after = np.roll(contour, -1, axis=0)
        area += abs(float((contour[:, 0] * after[:, 1] - after[:, 0] * contour[:, 1]).sum())) / 2
        length += float(np.linalg.norm(after - contour, axis=1).sum())
    assert (width, height, round(area), round(length)) == FORMS[name]


def test_ring_has_a_hole_and_circle_has_none():
    filled = {}
    for name in ("ring", "circle"):
        contours, width, height = outline(np.random.default_rng(2), name, 60.0)
        mask = np.zeros((height, width), np.uint8)
        cv2.fillPoly(mask, [np.round(c).astype(np.int32) for c in contours], 1)
        filled[name] = mask[height // 2, width // 2]
    assert filled == {"ring": 0, "circle": 1}


def test_generate_writes_coco(tmp_path):
    split = shapes.generate(tmp_path, "val", 4, seed=9)
    assert split == shapes.ShapesSplit(tmp_path / "val", tmp_path / "annotations" / "instances_val.json")
    document = json.loads(split.annotations.read_text())
    assert [c["name"] for c in document["categories"]] == list(shapes.CLASSES)
    assert [c["id"] for c in document["categories"]] == list(range(1, 11))
    assert [i["file_name"] for i in document["images"]] == [f"00000{n}.png" for n in (1, 2, 3, 4)]
    for index, entry in enumerate(document["images"]):
        image, boxes, classes = shapes.render(9, "val", index)
        written = cv2.imread(str(split.images / entry["file_name"]))
        assert written is not None
        np.testing.assert_array_equal(written[:, :, ::-1], image)
        assert (entry["height"], entry["width"]) == image.shape[:2]
        rows = [a for a in document["annotations"] if a["image_id"] == entry["id"]]
        assert [a["category_id"] - 1 for a in rows] == classes.tolist()
        for row, (x1, y1, x2, y2) in zip(rows, boxes.tolist(), strict=True):
            assert row["bbox"] == [x1, y1, x2 - x1, y2 - y1]
            assert row["area"] == (x2 - x1) * (y2 - y1) and row["iscrowd"] == 0
            visible = from_run_lengths(row["segmentation"])
            assert visible.shape == image.shape[:2]
            down, across = np.nonzero(visible)
            assert (across.min(), down.min(), across.max() + 1, down.max() + 1) == (x1, y1, x2, y2)
    ids = [a["id"] for a in document["annotations"]]
    assert len(set(ids)) == len(ids)


def test_a_complete_split_is_not_written_again(tmp_path):
    split = shapes.generate(tmp_path, "val", 2)
    image = split.images / "000002.png"
    os.utime(image, (1, 1))
    shapes.generate(tmp_path, "val", 2)
    assert image.stat().st_mtime == 1
    image.unlink()
    shapes.generate(tmp_path, "val", 2)
    assert image.is_file(), "a missing image makes the split incomplete"
    os.utime(image, (1, 1))
    shapes.generate(tmp_path, "val", 2, seed=1)
    assert image.stat().st_mtime > 1, "another seed is another split"


def test_a_stopped_run_leaves_the_older_split(tmp_path, monkeypatch):
    shapes.generate(tmp_path, "val", 2)
    older = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    whole = shapes._render

    def stopped(seed: int, split: str, index: int) -> object:
        if index == 2:
            raise KeyboardInterrupt
        return whole(seed, split, index)

    monkeypatch.setattr(shapes, "_render", stopped)
    with pytest.raises(KeyboardInterrupt):
        shapes.generate(tmp_path, "val", 4, seed=1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == older


def test_refusals(tmp_path):
    with pytest.raises(DataError, match="count is 0, allowed is 1 or more"):
        shapes.generate(tmp_path, "val", 0)
    with pytest.raises(DataError, match=r"split is '../val', expected a plain name"):
        shapes.generate(tmp_path, "../val", 1)
    with pytest.raises(DataError, match="seed is -1"):
        shapes.generate(tmp_path, "val", 1, seed=-1)
    with pytest.raises(DataError, match="index is -1"):
        shapes.render(0, "val", -1)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        shapes.generate(tmp_path / "file", "val", 1)
