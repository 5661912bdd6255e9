"""A bound on the loss that holds with confidence: on images that chose nothing, at the upper end of its interval.

A plan that was chosen because it lost least on some images loses more on others: the images that choose and those that
report are disjoint. And a loss that was measured on few images may be larger: a bound is kept where the upper end of
the interval keeps it, see :func:`trtdet.evaluation.comparison.compare`.
"""

from __future__ import annotations

import hashlib
import math

from trtdet.data import CocoDataset
from trtdet.errors import ConfigError


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
