"""The detectors that are timed, and the batches that they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtdet.backends.base import Runner
from trtdet.config import Config, InputConfig
from trtdet.data import ImageStream, evenly, find_images
from trtdet.data.images import preprocess
from trtdet.errors import ConfigError
from trtdet.runtime.detector import Detector


@dataclass(frozen=True, eq=False)
class Target:
    """A detector to time.

    Attributes:
        name: of the target in the results.
        runner: runs it.
        input: its pre-processing.
        file: the engine or model that is run.
        nms: the mode of suppression; with ``host`` the suppression comes after the run and is in none of the times.
    """

    name: str
    runner: Runner
    input: InputConfig
    file: str
    nms: str

    @property
    def on_device(self) -> bool:
        """Whether images are copied to a device and results back."""
        return self.runner.on_device

    def check_batch(self, batch: int) -> None:
        """Raises ConfigError where the target does not take a batch of this size."""
        fixed, largest = self.runner.batch, self.runner.largest_batch
        if fixed is not None and batch != fixed:
            raise ConfigError(
                f"'{self.name}' takes batches of exactly {fixed}, got --batch {batch}",
                f"give --batch {fixed}, or build it from a model with a dynamic batch",
            )
        if largest is not None and batch > largest:
            raise ConfigError(
                f"'{self.name}' takes at most {largest} images at once, got --batch {batch}",
                "build it with a larger --batch MIN:OPT:MAX",
            )

    def pixels(self, count: int, images: Path | None, seed: int) -> NDArray[np.float32]:
        """A batch for the target.

        Args:
            count: images in the batch.
            images: a folder or list of images, evenly spaced and repeated where there are too few; None for noise of
                8-bit pixels.
            seed: of the noise.

        Returns:
            float32 (count, 3, H, W), pre-processed.

        Raises:
            DataError: an image cannot be read.
        """
        if images is None:
            generator = np.random.default_rng(seed)
            noise = generator.integers(0, 256, (count, *self.input.size, 3), dtype=np.uint8)
            return np.stack([preprocess(picture, self.input)[0] for picture in noise])
        stream = ImageStream(evenly(find_images(images), count), self.input, on_bad="raise")
        found = np.concatenate([batch.images for batch in stream])
        return np.ascontiguousarray(found[np.arange(count) % len(found)])


def source_of_pixels(images: Path | None, seed: int) -> str:
    """The images that :meth:`Target.pixels` gives, in words."""
    return f"noise of 8-bit pixels, seed {seed}" if images is None else f"from '{images}'"


def open_targets(paths: Sequence[Path], config: Config | None) -> tuple[Target, ...]:
    """Opens bundles, and models by the configuration; a path that is named twice is opened twice.

    Raises:
        ConfigError: a model without a configuration, or a configuration and no model.
        BundleError, ModelError, BackendError: a target cannot be opened or run.
    """
    if config is not None and all(path.is_dir() for path in paths):
        raise ConfigError("--config is for models, bundles carry their own configuration", "leave --config out")
    opened: list[Target] = []
    for index, path in enumerate(paths):
        detector = Detector.open(path, None if path.is_dir() else config)
        earlier = paths[:index].count(path)
        name = f"{path} #{earlier + 1}" if earlier else str(path)
        opened.append(Target(name, detector.runner, detector.input, str(detector.file), detector.nms_mode))
    return tuple(opened)
