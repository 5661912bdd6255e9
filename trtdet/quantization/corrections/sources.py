"""The calibration images of corrections, and how models run on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.config import InputConfig
from trtdet.data import ImageCache, ImageStream
from trtdet.errors import ConfigError
from trtdet.passes import Decoded
from trtdet.progress import Progress, silent
from trtdet.quantization.simulator import Load

HELD_BACK = 4
"""One image in so many judges corrections and is not used to compute them."""


@dataclass(frozen=True)
class Sources:
    """Where the numbers come from.

    Attributes:
        images: calibration images, in any order.
        preprocess: how they become the network's input.
        load: makes a model ready to run.
        head: where the model holds its decoded boxes and scores.
        progress: told of every image.
        cache: images that other passes decoded; None decodes them in each pass.
        unfinished: the file that keeps what takes long, so that a run that was stopped goes on; None for none.
    """

    images: Sequence[Path]
    preprocess: InputConfig
    load: Load
    head: Decoded
    progress: Progress = silent
    cache: ImageCache | None = None
    unfinished: Path | None = None

    def split(self) -> tuple[list[Path], list[Path]]:
        """The images that corrections are computed from, and those that judge them: every fourth of the sorted paths.

        Raises:
            ConfigError: there are fewer than two.
        """
        if len(self.images) < 2:
            raise ConfigError(
                f"corrections need at least 2 calibration images, one of them to judge by, got {len(self.images)}: "
                "give more with --images, or build with --correct none"
            )
        held = held_back(self.images)
        return [path for path in sorted(self.images) if path not in set(held)], held

    def outputs(
        self, models: Sequence[onnx.ModelProto], paths: Sequence[Path], stage: str
    ) -> Iterator[list[dict[str, NDArray[Any]]]]:
        """Every image's outputs of each model, without the batch axis, the network's input among them."""
        simulators = [self.load(model) for model in models]
        done = 0
        stream = ImageStream(paths, self.preprocess, batch_size=simulators[0].batch or 1, cache=self.cache)
        for batch in stream:
            found = [{**simulator(batch.images), simulator.input: batch.images} for simulator in simulators]
            for row in range(len(batch)):
                yield [{name: of_image(value, row, len(batch)) for name, value in outputs.items()} for outputs in found]
            done += len(batch)
            self.progress(stage, done, len(paths))

    def batches(self, model: onnx.ModelProto, paths: Sequence[Path], stage: str) -> Iterator[NDArray[np.float32]]:
        """Images as the network takes them, float32 (B, 3, H, W): the model's batch, or 1 where it takes any."""
        size = model.graph.input[0].type.tensor_type.shape.dim[0].dim_value or 1
        done = 0
        for batch in ImageStream(paths, self.preprocess, batch_size=size, cache=self.cache):
            images = batch.images
            missing = size - len(images)
            yield np.concatenate([images, np.repeat(images[-1:], missing, axis=0)]) if missing else images
            done += len(batch)
            self.progress(stage, done, len(paths))


def of_image(value: NDArray[Any], row: int, images: int) -> NDArray[Any]:
    """An image's part of a tensor.

    Args:
        value: (B, ...), or (B * places, ...) where products read the places of all images as the rows of one matrix.
        row: of the image.
        images: B.
    """
    whole = len(value) != images and len(value) % images == 0
    found: NDArray[Any] = value.reshape(images, -1, *value.shape[1:])[row] if whole else value[row]
    return found


def held_back(images: Sequence[Path]) -> list[Path]:
    """The images that judge corrections: every fourth of the sorted paths, or the last of fewer."""
    ordered = sorted(images)
    return ordered[HELD_BACK - 1 :: HELD_BACK] or ordered[-1:]
