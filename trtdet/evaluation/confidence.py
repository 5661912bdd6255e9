"""A bound on the loss that holds with confidence: on images that chose nothing, at the upper end of its interval.

A plan that was chosen because it lost least on some images loses more on others: the images that choose and those that
report are disjoint, told apart by what is in them. And a loss that was measured on few images may be larger: a bound is
kept where the upper end of the interval keeps it, see :func:`trtdet.evaluation.comparison.compare`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from trtdet.data import CocoDataset
from trtdet.errors import ConfigError, DataError
from trtdet.files import sha256_file


def halves(dataset: CocoDataset) -> tuple[CocoDataset, CocoDataset]:
    """The images that choose and the images that report, as many of each, or one more to choose.

    They are dealt out by the SHA-256 of their file names: neither the order of a file nor other images put two that
    follow each other in a video on the same side, and the same images always fall alike.

    Raises:
        ConfigError: there are fewer than two images.
        DataError: none of a half has a box.
    """
    if len(dataset.images) < 2:
        raise ConfigError("a bound on the loss needs annotated images to choose by and others to report on: give more")
    order = sorted(dataset.images, key=lambda image: (hashlib.sha256(image.path.name.encode()).digest(), image.id))
    middle = (len(order) + 1) // 2
    return dataset.of(order[:middle]), dataset.of(order[middle:])


def images_needed(loss: float, worst: float, images: int, bound: float) -> int | None:
    """How many images would show that a loss is within a bound, were it what these images say.

    The width of an interval falls with the root of the number of images.

    Args:
        loss: measured.
        worst: the upper end of its interval, in the same unit; no less than the loss.
        images: that it was measured on.
        bound: that the upper end is to keep.

    Returns:
        None where no number would do: the loss itself is over the bound, or at it.
    """
    if worst <= bound:
        return images
    if loss >= bound:
        return None
    # Rounded first: the last digits of a quotient are no image.
    return math.ceil(round(images * ((worst - loss) / (bound - loss)) ** 2, 6))


def apart_from(dataset: CocoDataset, chosen: Collection[Path]) -> CocoDataset:
    """The images of a data set, annotated or not, that have chosen nothing, by their bytes and not by their names.

    Raises:
        DataError: none is left, or none of those that are left has a box though others have.
    """
    same = same_files([image.path for image in dataset.images], chosen)
    kept = tuple(image for image in dataset.images if image.path not in same)
    if not kept:
        raise DataError(
            f"all {len(dataset.images)} images of '{dataset.annotations}' are calibration images too, so that none can "
            "report on what these have chosen; give others with --val-images"
        )
    if len(kept) == len(dataset.images):
        return dataset
    return dataset.of(kept) if dataset.annotated else replace(dataset, images=kept)


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
