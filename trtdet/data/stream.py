"""Images in batches, decoded ahead.

A pass holds no more than a few decoded images, however many there are, besides the images in its cache.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trtdet.config import InputConfig
from trtdet.data.cache import ImageCache, ResizedImage
from trtdet.data.folders import first_names
from trtdet.data.images import ImageTransform, normalise
from trtdet.errors import DataError, TrtdetWarning

_MOST_BAD = 0.1
"""Share of unreadable images above which a set is refused rather than thinned out."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Up to ``batch_size`` images as the network takes them; the last batch of a pass may be smaller."""

    images: NDArray[np.float32]
    """float32 (B, 3, h, w)."""
    transforms: tuple[ImageTransform, ...]
    """Where each image lies in the network's input."""
    paths: tuple[Path, ...]
    indices: tuple[int, ...]
    """Positions of the images in the stream's ``paths``."""

    def __len__(self) -> int:
        return len(self.paths)


class ImageStream:
    """Batches of images, decoded ahead in threads and in the order given; every iteration is a new pass.

    At most ``2 * workers`` images (8-bit, resized) and one batch are in memory, besides the cache. Ending a pass early,
    by an exception, ``break`` or Ctrl-C, waits only for images that are being decoded at that moment.

    Args:
        paths: the images.
        config: how they become the network's input.
        batch_size: images a batch.
        workers: threads that decode; None for as many as there are cores that this process may use.
        on_bad: ``skip`` leaves an unreadable image out with a TrtdetWarning that names it, unless over 10 %
            of all are unreadable; ``raise`` stops at the first.
        cache: the images that earlier passes over the same files decoded; this pass adds its own. None decodes
            every image and keeps none.

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
        workers = len(os.sched_getaffinity(0)) if workers is None else workers
        if batch_size < 1 or workers < 1:
            raise ValueError(f"batch_size and workers must be at least 1, got {batch_size} and {workers}")
        self.paths = tuple(Path(path) for path in paths)
        self.config = config
        self.batch_size = batch_size
        self.workers = workers
        self.on_bad = on_bad
        self.cache = cache
        self._reset()

    def _reset(self) -> None:
        self._skipped: list[tuple[Path, str]] = []
        self._constant: list[Path] = []
        self._read = 0
        self._low, self._high = 255, 0

    @property
    def skipped(self) -> tuple[tuple[Path, str], ...]:
        """The images that the latest pass left out so far, each with the reason."""
        return tuple(self._skipped)

    @property
    def constant(self) -> tuple[Path, ...]:
        """The images that the latest pass has read so far whose pixels are all equal."""
        return tuple(self._constant)

    @property
    def pixel_range(self) -> tuple[int, int]:
        """The lowest and the highest 8-bit value in all that the latest pass has read so far.

        Raises:
            DataError: nothing has been read yet.
        """
        if not self._read:
            raise DataError("no image has been read yet, so there are no pixel statistics; iterate the stream first")
        return self._low, self._high

    def check_pixels(self) -> None:
        """Checks, after a pass, that the images look like pictures with values of 0 to 255.

        Warns (TrtdetWarning) where some images are constant.

        Raises:
            DataError: every image is constant, or no pixel of any image exceeds 1, as where values of 0 to 1
                were saved; or nothing has been read.
        """
        low, high = self.pixel_range
        if len(self._constant) == self._read:
            raise DataError(
                f"each of the {self._read} images has a single colour "
                f"({first_names([p.name for p in self._constant])}), expected pictures; check how they were made"
            )
        if high <= 1:
            raise DataError(
                f"all pixels of the {self._read} images lie in {low}..{high}, expected 0..255: they look as "
                "if scaled to 0..1 before they were saved; save them as 8-bit images (first: "
                f"{first_names([p.name for p in self.paths], 1)})"
            )
        if self._constant:
            warnings.warn(
                f"{len(self._constant)} of {self._read} images have a single colour: "
                f"{first_names([p.name for p in self._constant], 10)}; they add nothing and may be damaged",
                TrtdetWarning,
                stacklevel=2,
            )

    def __iter__(self) -> Iterator[Batch]:
        self._reset()
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="trtdet-decode")
        try:
            yield from self._batches(pool)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _batches(self, pool: ThreadPoolExecutor) -> Iterator[Batch]:
        ahead: deque[tuple[int, Future[ResizedImage] | ResizedImage]] = deque()
        upcoming = iter(enumerate(self.paths))
        read = ResizedImage.read if self.cache is None else self.cache.read
        loaded: list[tuple[int, ResizedImage]] = []
        while True:
            # The length of this queue bounds the memory.
            while len(ahead) < 2 * self.workers and (item := next(upcoming, None)) is not None:
                kept = None if self.cache is None else self.cache.find(item[1], self.config)
                ahead.append((item[0], kept or pool.submit(read, item[1], self.config)))
            if not ahead:
                break
            index, coming = ahead.popleft()
            try:
                image = coming.result() if isinstance(coming, Future) else coming
            except DataError as error:
                self._reject(self.paths[index], error)
                continue
            self._note(self.paths[index], image)
            loaded.append((index, image))
            if len(loaded) == self.batch_size:
                batch = self._batch(loaded)
                loaded = []  # before the pause, so that the images are not held beside the batch
                yield batch
        if loaded:
            yield self._batch(loaded)

    def _reject(self, path: Path, error: DataError) -> None:
        if self.on_bad == "raise":
            raise error
        self._skipped.append((path, str(error)))
        bad, total = len(self._skipped), len(self.paths)
        if bad > _MOST_BAD * total:
            raise DataError(
                f"{bad} of {total} images cannot be read so far, allowed are {_MOST_BAD:.0%}: "
                f"{first_names([p.name for p, _ in self._skipped])}; the first: {self._skipped[0][1]}"
            )
        warnings.warn(f"skipped: {error}", TrtdetWarning, stacklevel=4)

    def _note(self, path: Path, image: ResizedImage) -> None:
        self._read += 1
        self._low, self._high = min(self._low, image.low), max(self._high, image.high)
        if image.constant:
            self._constant.append(path)

    def _batch(self, loaded: list[tuple[int, ResizedImage]]) -> Batch:
        indices = tuple(index for index, _ in loaded)
        images = np.empty((len(loaded), 3, self.config.height, self.config.width), np.float32)
        for output, (_, image) in zip(images, loaded, strict=True):
            normalise(image.pixels, image.transform, self.config, output)
        return Batch(
            images=images,
            transforms=tuple(image.transform for _, image in loaded),
            paths=tuple(self.paths[index] for index in indices),
            indices=indices,
        )
