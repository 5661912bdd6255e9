"""Which images choose and which report, told apart by their bytes, and how many would show a bound."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtdet.config import load_config
from trtdet.data import CocoDataset, CocoImage, GroundTruth
from trtdet.demo import shapes
from trtdet.errors import ConfigError, DataError
from trtdet.evaluation.confidence import apart_from, halves, images_needed, same_files


def dataset(numbers: list[int], boxes: list[int]) -> CocoDataset:
    """Images by number, and the number of the image of each box."""
    images = tuple(CocoImage(number, Path(f"{number:04}.jpg"), 10, 10) for number in numbers)
    count = len(boxes)
    truth = GroundTruth(
        np.array(boxes, np.int64), np.zeros(count, np.int64), np.ones((count, 4)), np.ones(count), np.zeros(count, bool)
    )
    return CocoDataset(Path("a.json"), ("thing",), (1,), images, truth)


def numbers(part: CocoDataset) -> list[int]:
    return [image.id for image in part.images]


@settings(deadline=None, max_examples=25)
@given(st.sets(st.integers(1, 9999), min_size=2, max_size=60), st.randoms())
def test_choosing_and_reporting_images_are_disjoint_and_all_are_used(found, rng):
    listed = list(found)
    rng.shuffle(listed)  # type: ignore[attr-defined]
    choosing, reporting = halves(dataset(listed, listed))
    assert set(numbers(choosing)).isdisjoint(numbers(reporting))
    assert set(numbers(choosing)) | set(numbers(reporting)) == found
    assert 0 <= len(choosing.images) - len(reporting.images) <= 1
    for part in (choosing, reporting):
        assert sorted(part.truth.image_ids.tolist()) == numbers(part)
    again = halves(dataset(sorted(found), sorted(found)))
    assert [numbers(part) for part in again] == [numbers(choosing), numbers(reporting)]


def test_neighbours_in_a_video_are_on_both_sides():
    choosing, reporting = halves(dataset(list(range(100)), list(range(100))))
    runs = np.diff(np.isin(np.arange(100), numbers(choosing)).astype(int))
    assert np.count_nonzero(runs) > 30 and len(reporting.images) == 50


def test_too_few_images_are_refused():
    with pytest.raises(ConfigError, match="needs annotated images to choose by and others to report on"):
        halves(dataset([1], [1]))
    with pytest.raises(DataError, match="none of 1 images of 'a.json' has a box"):
        halves(dataset([1, 2], [1]))


def test_how_many_images_would_do():
    assert images_needed(0.1, 0.3, 100, 0.3) == 100
    # Half the width takes four times the images.
    assert images_needed(0.1, 0.5, 100, 0.3) == 400
    assert images_needed(-0.1, 0.5, 94, 0.3) == 212
    assert images_needed(0.3, 0.5, 100, 0.3) is None
    assert images_needed(0.4, 0.5, 100, 0.3) is None


CLASSES = load_config("shapes").classes


@pytest.fixture(scope="module")
def shapes_images(tmp_path_factory):
    split = shapes.generate(tmp_path_factory.mktemp("apart"), "val", 4)
    return CocoDataset.load(split.annotations, split.images, CLASSES)


def test_what_nobody_chose_with_stays_as_it_is(shapes_images, tmp_path):
    assert apart_from(shapes_images, []) is shapes_images
    other = tmp_path / shapes_images.images[0].path.name
    other.write_bytes(shapes_images.images[0].path.read_bytes()[:-1] + b"?")
    assert apart_from(shapes_images, [other]) is shapes_images, "a name is no content"


@pytest.mark.parametrize("annotated", [True, False])
def test_the_same_bytes_under_another_name_are_left_out_with_their_boxes(shapes_images, tmp_path, annotated):
    given = shapes_images if annotated else CocoDataset.unannotated(shapes_images.images[0].path.parent, CLASSES)
    first = given.images[0]
    shutil.copy(first.path, tmp_path / "renamed.jpg")
    left = apart_from(given, [tmp_path / "renamed.jpg"])
    assert left.images == given.images[1:]
    assert first.id not in left.truth.image_ids
    assert left.annotated is annotated


def test_where_none_is_left_it_is_an_error(shapes_images):
    with pytest.raises(DataError, match="all 4 images of .* are calibration images too"):
        apart_from(shapes_images, [image.path for image in shapes_images.images])


def test_a_file_that_cannot_be_read_is_named(shapes_images, tmp_path):
    with pytest.raises(DataError, match="gone.jpg' cannot be read: No such file"):
        same_files([image.path for image in shapes_images.images], [tmp_path / "gone.jpg"])
