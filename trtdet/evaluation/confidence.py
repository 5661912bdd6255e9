"""Images for a limit on the accuracy loss that holds with confidence.

A plan that lost least on some images loses more on others, so the images that choose a plan must not score it. A loss
measured on few images may be larger, so the upper end of its interval must be within the limit, see
:func:`trtdet.evaluation.comparison.compare`.
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
    """Splits the images into two halves: the first chooses (one more if odd), the second scores.

    Images are ordered by the SHA-256 of their file names: the split separates neighbouring frames of a video at random,
    and is the same whatever the order of the images. Raises ConfigError if there are fewer than two images; DataError
    if a half has no box.
    """
    if len(dataset.images) < 2:
        raise ConfigError("a bound on the loss needs annotated images to choose by and others to report on: give more")
    order = sorted(dataset.images, key=lambda image: (hashlib.sha256(image.path.name.encode()).digest(), image.id))
    middle = (len(order) + 1) // 2
    return dataset.of(order[:middle]), dataset.of(order[middle:])


def images_needed(loss: float, worst: float, images: int, bound: float) -> int | None:
    """Estimates how many images would bring ``worst``, the upper end of a loss's interval, within a bound.

    The loss is assumed to stay the same, and the width of its interval to fall with the square root of the number of
    images. The unit of the three is the same. None if no number is enough, because the loss is at least the bound.
    """
    if worst <= bound:
        return images
    if loss >= bound:
        return None
    # Rounding first prevents one image too many from a floating-point error.
    return math.ceil(round(images * ((worst - loss) / (bound - loss)) ** 2, 6))


def apart_from(dataset: CocoDataset, chosen: Collection[Path]) -> CocoDataset:
    """Leaves out the images whose bytes equal those of a ``chosen`` file; names do not matter. Raises DataError if no
    image is left, or only images without a box are left of an annotated set."""
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
    """The files whose bytes equal those of one of the others; raises DataError if a file cannot be read."""
    try:
        # Only files of equal size are read.
        sizes = {path.stat().st_size for path in others}
        candidates = [path for path in files if path.stat().st_size in sizes]
        sizes = {path.stat().st_size for path in candidates}
        hashes = {sha256_file(path) for path in others if candidates and path.stat().st_size in sizes}
        return frozenset(path for path in candidates if sha256_file(path) in hashes)
    except OSError as error:
        raise DataError(f"'{error.filename}' cannot be read: {error.strerror or error}; check the file") from None
