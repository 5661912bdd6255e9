"""The images on which two detectors differ most, with boxes drawn."""

import cv2
import numpy as np
import pytest

from trtdet import build, load_config
from trtdet.demo import shapes
from trtdet.exporter import SHAPES_MODEL
from trtdet.options import BuildOptions
from trtdet.report.sections.pictures import Found, _side_by_side, difference, pictures_section


def found(*boxes: tuple[float, float, float, float, float, int]) -> Found:
    values = np.array(boxes, np.float32).reshape(-1, 6)
    return values[:, :4], values[:, 4], values[:, 5].astype(np.int32)


A, B = (0, 0, 10, 10), (20, 20, 40, 40)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (found((*A, 0.5, 0)), found((*A, 0.5, 0)), 0.0),
        (found((*A, 0.5, 0)), found((*A, 0.8, 0)), 0.3),
        (found((*A, 0.5, 0)), found((*A, 0.5, 1)), 1.0),
        (found((*A, 0.5, 0)), found((*B, 0.4, 0)), 0.9),
        (found(), found((*B, 0.4, 0)), 0.4),
        (found(), found(), 0.0),
        # A box that is taken by a better one is not taken again.
        (found((*A, 0.5, 0), (*A, 0.9, 0)), found((*A, 0.9, 0)), 0.5),
    ],
)
def test_the_difference_is_what_only_one_finds_and_the_scores_of_what_both_find(first, second, expected):
    assert difference(first, second) == pytest.approx(expected)


def test_two_pictures_that_are_no_squares_stand_side_by_side():
    tall = np.zeros((200, 100, 3), np.uint8)
    drawn = cv2.imdecode(np.frombuffer(_side_by_side([tall, tall + 255]), np.uint8), cv2.IMREAD_COLOR)
    height, width = drawn.shape[:2]
    assert height == 2 * (width - 6) // 2 and drawn[10, 10].max() < 10 and drawn[10, -10].min() > 245


@pytest.mark.slow
def test_two_detectors_are_drawn_side_by_side(tmp_path):
    images = shapes.generate(tmp_path, "val", 4).images
    strict = load_config("shapes").with_nms(score_threshold=0.8)
    for name, config in (("all", load_config("shapes")), ("few", strict)):
        build(SHAPES_MODEL, config, tmp_path / name, BuildOptions(precision="fp32", backend="onnxruntime"))
    text, *pictures = pictures_section(tmp_path / "few", tmp_path / "all", images).parts
    assert "4 images by 'all' (left) and 'few' (right)" in text.lines[0]
    assert 0 < len(pictures) <= 4
    drawn = cv2.imdecode(np.frombuffer(pictures[0].jpeg, np.uint8), cv2.IMREAD_COLOR)
    assert drawn.shape == (512, 1030, 3)
    (same,) = pictures_section(tmp_path / "all", tmp_path / "all", images).parts
    assert "finds exactly what" in same.lines[0]
