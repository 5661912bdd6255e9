"""The calibration images of corrections, and how models run on them, whatever library does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.config import InputConfig
from trtdet.data import ImageBatch, ImageCache, ImageStream
from trtdet.errors import ConfigError
from trtdet.passes import Decoded
from trtdet.progress import Progress, silent

HELD_BACK = 4
"""One image in so many judges corrections and is not used to compute them."""


class Simulator(Protocol):
    """A model that computes its outputs: float32 (B, 3, H, W) to arrays (B, ...) by name.

    Attributes:
        input: name of the model's input.
        batch: how many images it takes at a time; None for any number.
    """

    input: str
    batch: int | None

    def __call__(self, images: NDArray[np.float32]) -> Mapping[str, NDArray[Any]]: ...


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
    load: Callable[[onnx.ModelProto], Simulator]
    head: Decoded
    progress: Progress = silent
    cache: ImageCache | None = None
    unfinished: Path | None = None

    def split(self) -> tuple[list[Path], list[Path]]:
        """The images that corrections are computed from, and those that judge them: every fourth of the sorted paths,
        or the last of fewer.

        Raises:
            ConfigError: there are fewer than two.
        """
        if len(self.images) < 2:
            raise ConfigError(
                f"corrections need at least 2 calibration images, one of them to judge by, got {len(self.images)}: "
                "give more with --images, or build with --effort none"
            )
        ordered = sorted(self.images)
        held = ordered[HELD_BACK - 1 :: HELD_BACK] or ordered[-1:]
        return [path for path in ordered if path not in set(held)], held

    def outputs(
        self, models: Sequence[onnx.ModelProto], paths: Sequence[Path], stage: str
    ) -> Iterator[list[dict[str, NDArray[Any]]]]:
        """Every image's outputs of each model, without the batch axis, the network's input among them."""
        simulators = [self.load(model) for model in models]
        for batch in self._stream(paths, stage, simulators[0].batch or 1):
            results = [{**simulator(batch.images), simulator.input: batch.images} for simulator in simulators]
            for row in range(len(batch)):
                yield [{name: _of_image(value, row, len(batch)) for name, value in each.items()} for each in results]

    def batches(self, model: onnx.ModelProto, paths: Sequence[Path], stage: str) -> Iterator[NDArray[np.float32]]:
        """Images as the network takes them, float32 (B, 3, H, W): the model's batch, or 1 where it takes any."""
        size = model.graph.input[0].type.tensor_type.shape.dim[0].dim_value or 1
        for batch in self._stream(paths, stage, size):
            missing = size - len(batch)
            yield np.concatenate([batch.images, np.repeat(batch.images[-1:], missing, axis=0)])

    def _stream(self, paths: Sequence[Path], stage: str, batch_size: int) -> Iterator[ImageBatch]:
        """The decoded images; progress is told of each batch once its reader asks for the next."""
        done = 0
        for batch in ImageStream(paths, self.preprocess, batch_size=batch_size, cache=self.cache):
            yield batch
            done += len(batch)
            self.progress(stage, done, len(paths))


def _of_image(value: NDArray[Any], row: int, images: int) -> NDArray[Any]:
    """One of several images' part of (B, ...), or of (B * places, ...), where products read the places of all images as
    the rows of one matrix."""
    if len(value) != images and len(value) % images == 0:
        value = value.reshape(images, -1, *value.shape[1:])
    part: NDArray[Any] = value[row]
    return part
