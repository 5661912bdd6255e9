"""Batches of images, decoded ahead, and a cache of decoded images for several passes over the same files."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trtdet.config import InputConfig
from trtdet.data.ahead import cores
from trtdet.data.folders import first_names
from trtdet.data.images import ImageTransform, normalise, read_image, resize
from trtdet.errors import DataError, TrtdetWarning

_MOST_BAD = 0.1
"""Share of unreadable images above which a set is refused."""

_LARGEST, _SHARE = 1 << 30, 0.25
"""Default budget: this share of the available memory, at most ``_LARGEST`` bytes."""


@dataclass(frozen=True, eq=False)
class ResizedImage:
    """A resized image before normalisation, whose 8-bit pixels take a quarter of the memory of floats."""

    pixels: NDArray[np.uint8]
    """uint8 (H', W', 3), RGB, without the border."""
    transform: ImageTransform
    low: int
    """Lowest value of the file's pixels, 0..255."""
    high: int
    constant: bool
    """All pixels of the file are equal."""

    @classmethod
    def read(cls, path: Path, config: InputConfig) -> ResizedImage:
        """Decodes and resizes a file; raises DataError if it cannot be read."""
        image = read_image(path)
        pixels, transform = resize(image, config)
        # For speed: the whole image is compared only if the first row is constant.
        constant = bool((image[0] == image[0, 0]).all()) and bool((image == image[0, 0]).all())
        return cls(pixels, transform, int(image.min()), high=int(image.max()), constant=constant)


class ImageCache:
    """Decoded images for later passes over the same files; each build has its own cache.

    The first images that fit the budget are kept; the others are decoded in each pass. No image is evicted: passes read
    the files in the same order, so evicting the oldest image would always evict the next one to be read. A file that
    changes is not read again. A pickled cache is empty and stays empty, because each worker of a machine would use the
    whole budget.

    Args:
        budget: maximum bytes of pixels; 0 keeps none. None is a quarter of the memory available when the first image is
            kept, at most 1 GiB.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self._limit = budget
        self._images: dict[tuple[Any, ...], ResizedImage] = {}
        self.bytes = 0
        """Memory of the pixels."""
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Callable[[int | None], ImageCache], tuple[int]]:
        return ImageCache, (0,)

    def __len__(self) -> int:
        return len(self._images)

    def find(self, path: Path, config: InputConfig) -> ResizedImage | None:
        """The kept image of a file, resized for ``config``; None if it is not kept."""
        return self._images.get(self._key(path, config))

    def read(self, path: Path, config: InputConfig) -> ResizedImage:
        """As :meth:`find`, but decodes an image that is not kept, and keeps it if it fits; any thread may call this.

        Errors are those of :func:`trtdet.data.images.read_image`.
        """
        image = self.find(path, config)
        if image is None:
            image = ResizedImage.read(path, config)
            key = self._key(path, config)
            with self._lock:
                if self._limit is None:
                    self._limit = min(_LARGEST, int(_SHARE * available_memory()))
                if key not in self._images and self.bytes + image.pixels.nbytes <= self._limit:
                    image.pixels.flags.writeable = False
                    self._images[key] = image
                    self.bytes += image.pixels.nbytes
        return image

    @staticmethod
    def _key(path: Path, config: InputConfig) -> tuple[Any, ...]:
        """All settings that the pixels depend on; normalisation comes later."""
        return path, config.size, config.resize, config.interpolation


def available_memory(meminfo: Path = Path("/proc/meminfo"), control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still use without swapping; 0 if unknown.

    This is the kernel's estimate (MemAvailable), limited by what is free in a control group (version 2).
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


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Up to ``batch_size`` images as network input; the last batch of a pass may be smaller."""

    images: NDArray[np.float32]
    """float32 (B, 3, h, w)."""
    transforms: tuple[ImageTransform, ...]
    paths: tuple[Path, ...]
    indices: tuple[int, ...]
    """Positions of the images in the stream's ``paths``."""

    def __len__(self) -> int:
        return len(self.paths)


class ImageStream:
    """Batches of images in the order of ``paths``, decoded ahead in threads; every iteration is a new pass.

    At most ``2 * workers`` images (8-bit, resized) and one batch are in memory, besides the cache. A pass that ends
    early (exception, ``break`` or Ctrl-C) waits only for the images that are being decoded.

    Args:
        workers: decoding threads; None is the number of cores that this process may use.
        on_bad: ``skip`` leaves out an unreadable image with a TrtdetWarning that names it, unless over 10 % of all are
            unreadable; ``raise`` stops at the first.
        cache: kept images of earlier passes over the same files, to which this pass adds; None keeps none.

    Raises:
        DataError: (when iterating) an image, or too many images, cannot be read.
        ValueError: ``batch_size`` or ``workers`` is below 1.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        config: InputConfig,
        *,
        batch_size: int = 1,
        workers: int | None = None,
        on_bad: Literal["skip", "raise"] = "skip",
        cache: ImageCache | None = None,
    ) -> None:
        workers = cores() if workers is None else workers
        if batch_size < 1 or workers < 1:
            raise ValueError(f"batch_size and workers must be at least 1, got {batch_size} and {workers}")
        self.paths = tuple(Path(path) for path in paths)
        self.config = config
        self.batch_size = batch_size
        self.workers = workers
        self.on_bad = on_bad
        self.cache = cache
        self.skipped: tuple[tuple[Path, str], ...] = ()
        """Images that the latest pass has skipped so far, each with the reason."""
        self.constant: tuple[Path, ...] = ()
        """Images read so far in the latest pass whose pixels are all equal."""
        self._read, self._low, self._high = 0, 255, 0

    @property
    def pixel_range(self) -> tuple[int, int]:
        """Lowest and highest 8-bit value read so far in the latest pass; raises DataError if nothing was read."""
        if not self._read:
            raise DataError("no image has been read yet, so there are no pixel statistics; iterate the stream first")
        return self._low, self._high

    def check_pixels(self) -> None:
        """Checks after a pass that the images look like pictures; warns if some are constant. Raises DataError: every
        image is constant, no pixel exceeds 1 (as if values 0..1 were saved), or nothing was read."""
        low, high = self.pixel_range
        constant = [path.name for path in self.constant]
        if len(self.constant) == self._read:
            raise DataError(
                f"each of the {self._read} images has a single colour "
                f"({first_names(constant)}), expected pictures; check how they were made"
            )
        if high <= 1:
            raise DataError(
                f"all pixels of the {self._read} images lie in {low}..{high}, expected 0..255: they look as if scaled "
                f"to 0..1 before they were saved; save them as 8-bit images (first: {self.paths[0].name})"
            )
        if constant:
            warnings.warn(
                f"{len(constant)} of {self._read} images have a single colour: "
                f"{first_names(constant, 10)}; they add nothing and may be damaged",
                TrtdetWarning,
                stacklevel=2,
            )

    def __iter__(self) -> Iterator[ImageBatch]:
        self.skipped, self.constant = (), ()
        self._read, self._low, self._high = 0, 255, 0
        ahead: deque[tuple[int, Future[ResizedImage] | ResizedImage]] = deque()
        upcoming = iter(enumerate(self.paths))
        read = ResizedImage.read if self.cache is None else self.cache.read
        loaded: list[tuple[int, ResizedImage]] = []
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="trtdet-decode")
        try:
            while True:
                # The length of this queue limits the memory.
                while len(ahead) < 2 * self.workers and (item := next(upcoming, None)) is not None:
                    kept = None if self.cache is None else self.cache.find(item[1], self.config)
                    ahead.append((item[0], kept or pool.submit(read, item[1], self.config)))
                if not ahead:
                    break
                index, coming = ahead.popleft()
                try:
                    image = coming.result() if isinstance(coming, Future) else coming
                except DataError as error:
                    if self.on_bad == "raise":
                        raise
                    self.skipped += ((self.paths[index], str(error)),)
                    bad, total = len(self.skipped), len(self.paths)
                    if bad > _MOST_BAD * total:
                        raise DataError(
                            f"{bad} of {total} images cannot be read so far, allowed are {_MOST_BAD:.0%}: "
                            f"{first_names([path.name for path, _ in self.skipped])}; the first: {self.skipped[0][1]}"
                        ) from None
                    warnings.warn(f"skipped: {error}", TrtdetWarning, stacklevel=2)
                    continue
                self._read += 1
                self._low, self._high = min(self._low, image.low), max(self._high, image.high)
                if image.constant:
                    self.constant += (self.paths[index],)
                loaded.append((index, image))
                if len(loaded) == self.batch_size:
                    batch = self._batch(loaded)
                    loaded = []  # before the yield, to free the images while the caller uses the batch
                    yield batch
            if loaded:
                yield self._batch(loaded)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _batch(self, loaded: list[tuple[int, ResizedImage]]) -> ImageBatch:
        indices = tuple(index for index, _ in loaded)
        images = np.empty((len(loaded), 3, self.config.height, self.config.width), np.float32)
        for output, (_, image) in zip(images, loaded, strict=True):
            normalise(image.pixels, image.transform, self.config, output=output)
        return ImageBatch(
            images=images,
            transforms=tuple(image.transform for _, image in loaded),
            paths=tuple(self.paths[index] for index in indices),
            indices=indices,
        )
