"""Decoded images that several passes over the same files share, as far as memory allows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.config import InputConfig
from trtdet.data.images import ImageTransform, read_image, resize

_LARGEST = 1 << 30
_SHARE = 0.25
"""The default budget: this share of the memory that is available, and never more than ``_LARGEST`` bytes."""


@dataclass(frozen=True, eq=False)
class ResizedImage:
    """An image as 8-bit pixels in the size that it has in the network's input: a quarter of the memory of the floats,
    which normalisation computes from them exactly."""

    pixels: NDArray[np.uint8]
    """uint8 (H', W', 3), RGB, without the border."""
    transform: ImageTransform
    low: int
    """The lowest value of the file's pixels, 0..255."""
    high: int
    constant: bool
    """All pixels of the file are equal."""

    @classmethod
    def read(cls, path: Path, config: InputConfig) -> ResizedImage:
        """Decodes and resizes a file.

        Raises:
            DataError: as of :func:`trtdet.data.images.read_image`.
        """
        image = read_image(path)
        pixels, transform = resize(image, config)
        # The first row decides nearly always, so the whole image is rarely compared.
        constant = bool((image[0] == image[0, 0]).all()) and bool((image == image[0, 0]).all())
        return cls(pixels, transform, int(image.min()), int(image.max()), constant)


class ImageCache:
    """Images that were decoded, kept for later passes over the same files; each build has a cache of its own.

    The first images that fit the budget stay, and all others are decoded again in each pass: passes go through the
    files in the same order, so that dropping the oldest image would drop every image just before it is needed.
    A file that changes meanwhile is not read again. Results do not depend on the budget. A pickled cache is empty and
    stays so: the workers of a machine would each take the budget.

    Args:
        budget: bytes of pixels at most, 0 for none; None for a quarter of the memory that is available when the first
            image is kept, and 1 GiB at most.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self._limit = budget
        self._images: dict[tuple[Any, ...], ResizedImage] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Callable[[int | None], ImageCache], tuple[int]]:
        return ImageCache, (0,)

    def __len__(self) -> int:
        return len(self._images)

    @property
    def bytes(self) -> int:
        """How much memory the pixels take."""
        return self._bytes

    def find(self, path: Path, config: InputConfig) -> ResizedImage | None:
        """The image of a file, resized as ``config`` says, if it is kept."""
        return self._images.get(_key(path, config))

    def read(self, path: Path, config: InputConfig) -> ResizedImage:
        """The same, decoded where it is not kept, and then kept where it fits. Any thread may call this.

        Raises:
            DataError: as of :func:`trtdet.data.images.read_image`.
        """
        image = self.find(path, config)
        if image is None:
            image = ResizedImage.read(path, config)
            self._keep(_key(path, config), image)
        return image

    def _keep(self, key: tuple[Any, ...], image: ResizedImage) -> None:
        with self._lock:
            if self._limit is None:
                self._limit = min(_LARGEST, int(_SHARE * available_memory()))
            if key not in self._images and self._bytes + image.pixels.nbytes <= self._limit:
                image.pixels.flags.writeable = False
                self._images[key] = image
                self._bytes += image.pixels.nbytes


def _key(path: Path, config: InputConfig) -> tuple[Any, ...]:
    """All that the pixels depend on; normalisation comes later."""
    return path, config.size, config.resize, config.interpolation


def available_memory(meminfo: Path = Path("/proc/meminfo"), control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take without swapping; 0 where the system does not tell.

    The kernel's estimate (MemAvailable), and within a control group (version 2) no more than its limit leaves.
    """
    try:
        lines = (line.split() for line in meminfo.read_text().splitlines())
        free = next(1024 * int(words[1]) for words in lines if words[0] == "MemAvailable:")
    except (OSError, ValueError, IndexError, StopIteration):
        return 0
    try:
        limit = int((control_group / "memory.max").read_text())
        used = int((control_group / "memory.current").read_text())
    except (OSError, ValueError):  # no group, or "max"
        return free
    return max(0, min(free, limit - used))
