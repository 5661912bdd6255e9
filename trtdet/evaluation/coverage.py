"""Describes a set of images by a detector's detections: classes, object sizes, brightness and near-duplicates.

No annotations are needed: the float model's own detections count, so a class that the model misses counts as absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from trtdet.data.folders import first_names
from trtdet.tables import Table

SURE = 0.25
"""A detection counts if its score exceeds this."""

_SIZES = {"small": 0.0, "medium": 32.0**2, "large": 96.0**2}
"""COCO's names of sizes, each from an area in pixels of the image on; here of the box, in COCO of the outline."""

_SIDE = 16  # an image's hash has this many rows of as many bits
_REPEATED = 48
"""Images whose hashes differ in at most this many of 256 bits nearly repeat each other. In 128 images of COCO every
pair differs in 72 or more, in frames that are shifted by 1 % of the width or compressed anew in 41 or fewer."""

_FEW = 0.05  # share of the objects below which a size is rare
_MANY = 0.2  # share of the images from which on empty or repeated ones are reported
_DIM = 32.0  # grey levels below which brightness hardly varies between images
_SEEN = 3  # images that show a class often enough


@dataclass(frozen=True)
class Coverage:
    """Result of :class:`CoverageCounter`."""

    images: int
    empty: int  # images without a detection
    repeated: int  # images that nearly repeat an earlier one
    shown: dict[str, int]  # number of images with a detection of each class, in the order of the classes
    objects: int  # number of detections
    sizes: dict[str, int]  # of the detections, by COCO's names
    brightness: tuple[float, float]  # 10 and 90 % of the images' mean grey levels, 0..255
    contrast: tuple[float, float]  # the same of the standard deviations of an image's grey levels

    @property
    def thin(self) -> tuple[str, ...]:
        """Gaps of the image set, a sentence each, such as rare classes or many near-duplicates."""
        found = []
        never = [name for name, images in self.shown.items() if not images]
        seldom = [name for name, images in self.shown.items() if 0 < images < _SEEN]
        if never:
            found.append(f"never detected: {len(never)} of {len(self.shown)} classes ({first_names(never, 8)})")
        if seldom:
            found.append(
                f"detected in fewer than {_SEEN} images: {len(seldom)} of {len(self.shown)} classes "
                f"({first_names(seldom, 8)})"
            )
        if self.empty >= _MANY * self.images:
            found.append(f"{self.empty} of {self.images} images show nothing to the model")
        if self.repeated >= _MANY * self.images:
            found.append(
                f"{self.repeated} of {self.images} images nearly repeat another one, like frames of a video: they add "
                "little, and make the images that judge too similar to the others"
            )
        found += [f"few {size} objects: {n} of {self.objects}" for size, n in self.sizes.items() if n < self._least]
        low, high = self.brightness
        if high - low < _DIM:
            found.append(f"the images are about equally bright: 80 % have a mean of {low:.0f} to {high:.0f} of 255")
        return tuple(found)

    @property
    def _least(self) -> float:
        return _FEW * self.objects

    def table(self) -> Table:
        common = sorted((name for name in self.shown if self.shown[name]), key=lambda name: -self.shown[name])
        most = first_names([f"{name} in {self.shown[name]}" for name in common], 5)
        rows = [
            ("classes detected", f"{len(common)} of {len(self.shown)}: {most}" if common else "none"),
            ("objects", f"{self.objects}: {', '.join(f'{count} {size}' for size, count in self.sizes.items())}"),
            ("images without a detection", str(self.empty)),
            ("images that nearly repeat another", str(self.repeated)),
            ("brightness", "{:.0f} .. {:.0f} of 255 (10 .. 90 % of the images)".format(*self.brightness)),
            ("contrast", "{:.0f} .. {:.0f}".format(*self.contrast)),
        ]
        title = f"what {self.images} images show to the float model, detections over {SURE}"
        return Table(("figure", "value"), rows, title=title, notes=[f"thin: {text}" for text in self.thin])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "thin": list(self.thin)}


@dataclass(eq=False)
class CoverageCounter:
    """Counts image by image; ``classes`` are the model's class names. 32 bytes are kept of each image's pixels."""

    classes: Sequence[str]
    _shown: Counter[int] = field(default_factory=Counter)
    _sizes: Counter[str] = field(default_factory=Counter)
    _empty: int = 0
    _light: list[tuple[float, float]] = field(default_factory=list)
    _hashes: list[NDArray[np.uint8]] = field(default_factory=list)

    def update(
        self, pixels: NDArray[np.uint8], boxes: NDArray[np.float32], classes: NDArray[np.integer]
    ) -> CoverageCounter:
        """Adds an image: its pixels uint8 (H, W, 3), RGB, at any size, and its detections: boxes (N, 4), x1 y1 x2 y2 in
        pixels of the original image, and class indices (N,)."""
        grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
        self._light.append((float(grey.mean()), float(grey.std())))
        self._hashes.append(_difference_hash(grey))
        areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
        names, starts = list(_SIZES), list(_SIZES.values())
        self._sizes.update(names[place] for place in np.searchsorted(starts[1:], areas, side="right"))
        self._shown.update(set(classes.tolist()))
        self._empty += not len(classes)
        return self

    def compute(self) -> Coverage:
        """The counts so far, of at least one image."""
        low, high = np.percentile(np.array(self._light), [10, 90], axis=0).round(1).tolist()
        return Coverage(
            images=len(self._light),
            empty=self._empty,
            repeated=_repeated(np.array(self._hashes)),
            shown={name: self._shown[index] for index, name in enumerate(self.classes)},
            objects=self._sizes.total(),
            sizes={name: self._sizes[name] for name in _SIZES},
            brightness=(low[0], high[0]),
            contrast=(low[1], high[1]),
        )


def _difference_hash(grey: NDArray[Any]) -> NDArray[np.uint8]:
    """uint8 (32,): for 16 rows of 17 pixels, whether each pixel is darker than its right neighbour. Source: Krawetz,
    "Kind of Like That", hackerfactor.com, 2013."""
    small = cv2.resize(grey, (_SIDE + 1, _SIDE), interpolation=cv2.INTER_AREA)
    return np.packbits(small[:, 1:] > small[:, :-1])


def _repeated(hashes: NDArray[np.uint8]) -> int:
    """Number of images that nearly repeat an earlier one."""
    signs = np.unpackbits(hashes, axis=1).astype(np.float32) * 2 - 1
    # The product of two rows of signs is the number of equal bits less that of different ones.
    alike = _SIDE * _SIDE - 2 * _REPEATED
    return sum(bool((signs[:place] @ signs[place] >= alike).any()) for place in range(1, len(signs)))
