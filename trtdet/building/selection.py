"""Which images calibrate."""

from __future__ import annotations

import warnings
from pathlib import Path

from trtdet.data.folders import evenly, find_images
from trtdet.errors import TrtdetWarning
from trtdet.options import DEFAULT_IMAGES, CalibrationOptions


def calibration_images(options: CalibrationOptions) -> list[Path]:
    """All images of the options, sorted; raises DataError if the source does not exist or has no images."""
    return [] if options.images is None else sorted(find_images(options.images, options.root))


def chosen_images(options: CalibrationOptions) -> tuple[Path, ...]:
    """Calibration images at equal steps over the sorted names, so that they cover a whole video or data set.

    Names are sorted because every fourth image judges the corrections: the order of a list must not matter. Raises
    DataError: the source does not exist, or has no images. Warns if there are fewer than were asked for.
    """
    images = calibration_images(options)
    if images and options.num_images is not None and len(images) < options.num_images:
        warnings.warn(
            f"--num-images {options.num_images} but '{options.images}' has {len(images)}: all of them are used",
            TrtdetWarning,
            stacklevel=4,
        )
    return evenly(images, options.num_images or DEFAULT_IMAGES)
