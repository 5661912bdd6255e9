"""Compares ways of placing an image in the network's input (letterbox or stretch), for a detector that works with each.

They change the detections little, so that many images are needed, and every way must get the same image. The images to
compare with are therefore made from the image before it is resized: its mirror image, and the image shifted right and
down by half a stride of 8 of a letterboxed input, with its edge repeated.

The figure of an image (:mod:`trtdet.evaluation.judging`) is the mean over both looks. Differences of two readings are
divided by the square root of their magnitude, as a sum over n detections varies by the square root of n. One reading is
better where Student's t of these is over the boundary of O'Brien and Fleming (1979) for the share of all images that
were looked at: nearly all of the chance to err is kept for the last look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from trtdet.config import InputConfig
from trtdet.data.images import ImageTransform, preprocess, read_image
from trtdet.detection.parts import Float
from trtdet.errors import DataError
from trtdet.evaluation.judging import Found, figure_of, normal_of, student_t
from trtdet.evaluation.readings import Reading
from trtdet.progress import Progress, silent

FEWEST_IMAGES = 32
MOST_IMAGES = 1024
_LOOKS = (32, 64, 128, 256, 512)
"""Numbers of images after which readings are compared, besides all of them."""
_COSTLY = 0.15
"""Mean difference of an image's figures, in standard deviations, by which the right reading is better than one that
costs half a point of mAP or more; measured: 0.12 to 0.30, see docs/results/init.md."""
_RULED_OUT = 2.3
"""A check drops an alternative whose Student's t is this much under that of such a difference: 99 % sure."""
_SHIFT = 4
"""Pixels of the network's input by which the image is shifted."""
SURE = 0.99
"""Least probability at which a reading counts as better than another."""
_LIKELY = 0.9
"""Least probability at which a thorough contest takes an alternative once all images are looked at."""

Detect = Callable[[Sequence[Float], Reading], Sequence[Found]]
"""Detections of images float32 (3, H, W), in pixels of the network's input, by a reading."""


@dataclass
class Placement:
    """Compares a reading with others that place images in another way.

    Attributes:
        given: the reading that the others are compared with.
        others: alternatives, in the order of the question's values.
        thorough: whether each is followed until it is surely better or worse; else only while it may be better.
        cache: figures by the keys of the input and the image; contests of one detector share it.
        images: number of images that were compared.
        progress: gets the images that were looked at.
    """

    given: Reading
    others: Sequence[Reading]
    detect: Detect
    thorough: bool = False
    cache: dict[tuple[str, Path], float] = field(default_factory=dict)
    images: int = 0
    progress: Progress = silent
    _figures: dict[int, list[float]] = field(default_factory=dict)
    _total: int = 0

    def run(self, paths: Sequence[Path]) -> Reading | None:
        """Looks at up to :data:`MOST_IMAGES`; returns the best of the surely better readings, None if there is none."""
        paths = paths[:MOST_IMAGES]
        if len(paths) < FEWEST_IMAGES:
            return None
        self._total = len(paths)
        self._figures = {id(reading): [] for reading in (self.given, *self.others)}
        live = list(self.others)
        for number, path in enumerate(paths):
            self.progress("comparing ways to place images in the input", number, len(paths))
            try:
                self._look_at(path, [self.given, *live])
            except DataError:
                self._total -= 1  # code that runs all images reports unreadable ones
                continue
            self.images += 1
            if self.images in _LOOKS and self.images < self._total:
                better = self._best(live)
                if better is not None:
                    return better
                live = [other for other in live if not self._decided(other)]
                if not live:
                    return None
        return self._best(live, _LIKELY if self.thorough else SURE)

    def gain(self, other: Reading) -> float:
        """Figure of a reading divided by that of the given one, on the same images."""
        theirs = np.array(self._figures[id(other)])
        ours = np.array(self._figures[id(self.given)])[: len(theirs)]
        return float(theirs.sum() / ours.sum()) if ours.sum() > 1e-9 else math.inf

    def sure(self, other: Reading) -> float:
        """Probability, -1..1, that a reading is better than the given one, and not by chance; below 0 that it is worse,
        negated."""
        theirs = self._figures.get(id(other), [])
        degrees, t = len(theirs) - 1, self._t(other)
        if degrees < 1:
            return 0.0
        normal = normal_of(abs(t), degrees) * math.sqrt(len(theirs) / self._total)
        return math.copysign(NormalDist().cdf(normal), t)

    def compared(self, other: Reading) -> int:
        """Number of images on which a reading was compared."""
        return len(self._figures.get(id(other), []))

    def _best(self, live: Sequence[Reading], least: float = SURE) -> Reading | None:
        better = [other for other in live if self.sure(other) >= least]
        return max(better, key=self._t, default=None)

    def _decided(self, other: Reading) -> bool:
        if self.thorough:
            return self.sure(other) <= -SURE
        return self._t(other) < _COSTLY * math.sqrt(self.images) - _RULED_OUT

    def _t(self, other: Reading) -> float:
        theirs = np.array(self._figures.get(id(other), []))
        ours = np.array(self._figures[id(self.given)])[: len(theirs)]
        return student_t((theirs - ours) / np.sqrt(1 + np.abs(theirs) + np.abs(ours)))

    def _look_at(self, path: Path, readings: Sequence[Reading]) -> None:
        keys = [(reading.config.input.model_dump_json(), path) for reading in readings]
        missing = [reading for reading, key in zip(readings, keys, strict=True) if key not in self.cache]
        looks = _looks(read_image(path), self.given.config.input) if missing else ()
        for reading in missing:
            self.cache[reading.config.input.model_dump_json(), path] = self._figure(looks, reading)
        for reading, key in zip(readings, keys, strict=True):
            self._figures[id(reading)].append(self.cache[key])

    def _figure(self, looks: Sequence[_Look], reading: Reading) -> float:
        """Mean figure of an image over its other looks; the first look is the image itself."""
        placed = [preprocess(look.pixels, reading.config.input) for look in looks]
        found = self.detect([array for array, _ in placed], reading)
        first, *others = (_in_image(one, transform) for one, (_, transform) in zip(found, placed, strict=True))
        height, width = looks[0].pixels.shape[:2]
        return float(
            np.mean(
                [
                    figure_of((first, other), look.places(first[0]), (height, width))
                    for look, other in zip(looks[1:], others, strict=True)
                ]
            )
        )


@dataclass(frozen=True, eq=False)
class _Look:
    """An image, uint8 (H, W, 3), mirrored or shifted right and down by some pixels."""

    pixels: NDArray[np.uint8]
    mirrored: bool = False
    shift: int = 0

    def places(self, boxes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Where boxes (N, 4) of the image are in this look."""
        width = self.pixels.shape[1]
        if self.mirrored:
            boxes = np.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], axis=1)
        return boxes + self.shift


def _looks(image: NDArray[np.uint8], config: InputConfig) -> tuple[_Look, _Look, _Look]:
    """The image, its mirror image, and the shifted one, for every way of placing the same."""
    height, width = image.shape[:2]
    shift = max(1, round(_SHIFT * max(width / config.width, height / config.height)))
    shifted = np.pad(image, ((shift, 0), (shift, 0), (0, 0)), mode="edge")[:height, :width]
    mirror = np.ascontiguousarray(image[:, ::-1])
    return _Look(image), _Look(mirror, mirrored=True), _Look(np.ascontiguousarray(shifted), shift=shift)


def _in_image(found: Found, transform: ImageTransform) -> Found:
    boxes, scores, classes = found
    return transform.to_image(boxes).astype(np.float64), scores, classes
