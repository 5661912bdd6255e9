"""Images that report on a choice are none of those that it was made with: they are told apart by what is in them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from trtdet.data import CocoDataset, CocoImage
from trtdet.errors import DataError
from trtdet.files import sha256_file


def apart_from(dataset: CocoDataset, chosen: Collection[Path]) -> CocoDataset:
    """The images of a data set that are not among others, by their bytes and not by their names.

    Args:
        dataset: annotated or not.
        chosen: files that have chosen something.

    Raises:
        DataError: none is left, or none of those that are left has a box though others have.
    """
    known = same_files([image.path for image in dataset.images], chosen)
    kept = tuple(image for image in dataset.images if image.path not in known)
    if not kept:
        raise DataError(
            f"all {len(dataset.images)} images of '{dataset.annotations}' are calibration images too, so that none can "
            "report on what these have chosen; give others with --val-images"
        )
    return _of(dataset, kept) if len(kept) < len(dataset.images) else dataset


def same_files(files: Sequence[Path], others: Collection[Path]) -> frozenset[Path]:
    """Those of the files whose bytes another file has; only files of equal sizes are read.

    Raises:
        DataError: a file cannot be read.
    """
    try:
        sizes = {path.stat().st_size for path in others}
        near = [path for path in files if path.stat().st_size in sizes]
        wanted = {path.stat().st_size for path in near}
        hashes = {sha256_file(path) for path in others if near and path.stat().st_size in wanted}
        return frozenset(path for path in near if sha256_file(path) in hashes)
    except OSError as error:
        raise DataError(f"'{error.filename}' cannot be read: {error.strerror or error}; check the file") from None


def _of(dataset: CocoDataset, images: Sequence[CocoImage]) -> CocoDataset:
    return dataset.of(images) if dataset.annotated else replace(dataset, images=tuple(images))
