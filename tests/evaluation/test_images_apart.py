"""Images that report are none of those that chose: told apart by their bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trtdet.config import load_config
from trtdet.data import CocoDataset
from trtdet.demo import shapes
from trtdet.errors import DataError
from trtdet.evaluation.images_apart import apart_from, same_files

CLASSES = load_config("shapes").classes


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> CocoDataset:
    split = shapes.generate(tmp_path_factory.mktemp("apart"), "val", 4)
    return CocoDataset.load(split.annotations, split.images, CLASSES)


def test_what_nobody_chose_with_stays_as_it_is(dataset: CocoDataset, tmp_path: Path) -> None:
    assert apart_from(dataset, []) is dataset
    other = tmp_path / dataset.images[0].path.name
    other.write_bytes(dataset.images[0].path.read_bytes()[:-1] + b"?")
    assert apart_from(dataset, [other]) is dataset, "a name is no content"


@pytest.mark.parametrize("annotated", [True, False])
def test_the_same_bytes_under_another_name_are_left_out_with_their_boxes(
    dataset: CocoDataset, tmp_path: Path, annotated: bool
) -> None:
    given = dataset if annotated else CocoDataset.unannotated(dataset.images[0].path.parent, CLASSES)
    first = given.images[0]
    shutil.copy(first.path, tmp_path / "renamed.jpg")
    left = apart_from(given, [tmp_path / "renamed.jpg"])
    assert left.images == given.images[1:]
    assert first.id not in left.truth.image_ids
    assert left.annotated is annotated


def test_where_none_is_left_it_is_an_error(dataset: CocoDataset) -> None:
    with pytest.raises(DataError, match="all 4 images of .* are calibration images too"):
        apart_from(dataset, [image.path for image in dataset.images])


def test_a_file_that_cannot_be_read_is_named(dataset: CocoDataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone.jpg' cannot be read: No such file"):
        same_files([image.path for image in dataset.images], [tmp_path / "gone.jpg"])
