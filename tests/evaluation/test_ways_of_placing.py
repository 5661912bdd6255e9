"""Which way of placing an image in the network's input a detector works best with."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trtdet.config import load_config
from trtdet.detection.parts import Float
from trtdet.evaluation.judging import Found
from trtdet.evaluation.placement import FEWEST_IMAGES, Detect, Placement, _looks
from trtdet.evaluation.readings import RESIZE, Reading, input_readings

SIZE = (96, 128)
GIVEN = load_config("yolov5").with_size(SIZE)
READING = Reading(GIVEN, GIVEN)
OTHERS = [other for other in input_readings(READING) if other.question == RESIZE]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """64 grey images of a white square, of several sizes."""
    folder, rng = tmp_path_factory.mktemp("squares"), np.random.default_rng(0)
    for number in range(64):
        height, width = rng.integers(80, 200, 2)
        image = np.full((height, width, 3), 90, np.uint8)
        x, y = rng.integers(20, width - 50), rng.integers(20, height - 50)
        image[y : y + 30, x : x + 30] = 255
        Image.fromarray(image).save(folder / f"{number:02}.png")
    return sorted(folder.glob("*.png"))


def squares(scores: dict[str, float], seen: list[str] | None = None) -> Detect:
    """Finds the white square, with a score that depends on how it is placed and a little on chance."""
    rng = np.random.default_rng(1)

    def detect(images: Sequence[Float], reading: Reading) -> list[Found]:
        found: list[Found] = []
        for image in images:
            rows, columns = np.nonzero(image[0] > 0.8)
            box = np.array([[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]], np.float64)
            score = scores.get(reading.config.input.resize, 0.7) + rng.normal(0, 0.1)
            found.append((box, np.clip([score], 0.1, 1.0), np.zeros(1, np.int64)))
        if seen is not None:
            seen.append(reading.config.input.resize)
        return found

    return detect


def test_the_one_with_surer_detections_wins(pictures):
    contest = Placement(READING, OTHERS, squares({"stretch": 0.85}))
    best = contest.run(pictures)
    assert best is not None and best.config.input.resize == "stretch"
    assert contest.sure(best) >= 0.99 and contest.gain(best) > 1.1


def test_the_given_one_stands_where_others_are_worse_and_those_are_soon_left(pictures):
    seen: list[str] = []
    contest = Placement(READING, OTHERS, squares({"letterbox-centre": 0.85}, seen))
    assert contest.run(pictures) is None
    assert seen.count("stretch") == seen.count("letterbox-topleft") == contest.images == FEWEST_IMAGES
    thorough = Placement(READING, OTHERS, squares({"letterbox-centre": 0.85}), thorough=True)
    assert thorough.run(pictures) is None
    assert all(thorough.sure(other) <= -0.99 for other in OTHERS)


@pytest.mark.parametrize(("behind", "kept"), [(0.01, True), (0.2, False)])
def test_one_that_chance_puts_behind_at_first_is_followed_but_not_one_that_is_clearly_worse(pictures, behind, kept):
    looked: list[str] = []
    by_chance = squares({})

    def detect(images: Sequence[Float], reading: Reading) -> list[Found]:
        found = by_chance(images, reading)
        looked.append(reading.config.input.resize)
        if looked[-1] != "stretch":
            return found
        change = -behind if looked.count("stretch") <= FEWEST_IMAGES else 0.3
        return [(boxes, np.clip(scores + change, 0.1, 1.0), classes) for boxes, scores, classes in found]

    best = Placement(READING, OTHERS, detect).run(pictures)
    assert (best is not None and best.config.input.resize == "stretch") == kept


def test_chance_decides_nothing(pictures):
    for seed_shift in range(5):
        contest = Placement(READING, OTHERS, squares({"stretch": 0.7 + seed_shift / 1000}))
        assert contest.run(pictures) is None


def test_few_images_are_not_compared_and_unreadable_ones_are_left_out(pictures, tmp_path):
    few = Placement(READING, OTHERS, squares({"stretch": 0.9}))
    assert few.run(pictures[:31]) is None
    assert [few.compared(other) for other in OTHERS] == [0] * len(OTHERS)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    contest = Placement(READING, OTHERS, squares({"stretch": 0.9}))
    assert contest.run([broken, *pictures]) is not None
    assert contest.images in (32, 64)
    assert max(contest.compared(other) for other in OTHERS) == contest.images


def test_no_reading_loses_what_another_keeps(pictures):
    """Each is given the same looks, whose boxes are where they are expected."""
    image = np.asarray(Image.open(pictures[0]))
    first, mirror, shifted = _looks(image, GIVEN.input)
    assert {look.pixels.shape for look in (first, mirror, shifted)} == {image.shape}
    rows, columns = np.nonzero(image[..., 0] == 255)
    box = np.array([[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]], np.float64)
    for look in (mirror, shifted):
        (x1, y1, x2, y2) = look.places(box)[0].astype(int)
        assert (look.pixels[y1:y2, x1:x2] == 255).all() and look.pixels[y1:y2, x1:x2].size == 30 * 30 * 3
    assert shifted.shift >= 4 * max(image.shape[1] / 128, image.shape[0] / 96) - 1


def test_a_picture_is_looked_at_once_by_all_contests(pictures):
    cache: dict[tuple[str, Path], float] = {}
    seen: list[str] = []
    for _ in range(2):
        Placement(READING, OTHERS, squares({}, seen), thorough=True, cache=cache).run(pictures[:40])
    assert len(seen) == len(cache) == 3 * 40
