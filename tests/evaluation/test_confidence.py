"""Which images choose and which report, and how many would show a bound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtdet.data import CocoDataset, CocoImage, GroundTruth
from trtdet.errors import ConfigError, DataError
from trtdet.evaluation.confidence import halves, images_needed


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
def test_choosing_and_reporting_images_are_disjoint_and_all_are_used(found: set[int], rng: object) -> None:
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


def test_neighbours_in_a_video_are_on_both_sides() -> None:
    choosing, reporting = halves(dataset(list(range(100)), list(range(100))))
    runs = np.diff(np.isin(np.arange(100), numbers(choosing)).astype(int))
    assert np.count_nonzero(runs) > 30 and len(reporting.images) == 50


def test_too_few_images_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs annotated images to choose by and others to report on"):
        halves(dataset([1], [1]))
    with pytest.raises(DataError, match="none of 1 images of 'a.json' has a box"):
        halves(dataset([1, 2], [1]))


def test_how_many_images_would_do() -> None:
    assert images_needed(0.1, 0.3, 100, 0.3) == 100
    # Half the width takes four times the images.
    assert images_needed(0.1, 0.5, 100, 0.3) == 400
    assert images_needed(-0.1, 0.5, 94, 0.3) == 212
    assert images_needed(0.3, 0.5, 100, 0.3) is None
    assert images_needed(0.4, 0.5, 100, 0.3) is None
