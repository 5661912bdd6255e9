"""The calibration images of corrections, and how models run on them."""

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
from trtdet.passes.batch import filled
from trtdet.progress import Progress, silent

HELD_BACK = 4  # one image in this many is held back: it judges corrections and takes no part in computing them


def held_back(images: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Images to compute corrections from, and held-back ones: every fourth of the sorted paths, or the last of fewer.
    Raises ConfigError if there are fewer than two."""
    if len(images) < 2:
        raise ConfigError(
            f"corrections need at least 2 calibration images, one of them to judge by, got {len(images)}: "
            "give more with --images, or build with --effort none"
        )
    ordered = sorted(images)
    judging = ordered[HELD_BACK - 1 :: HELD_BACK] or ordered[-1:]
    return [path for path in ordered if path not in set(judging)], judging


class Simulator(Protocol):
    """Computes a model's outputs: float32 (B, 3, H, W) to arrays (B, ...) by name. ``input`` is the name of the model's
    input; ``batch`` is the number of images per call, None for any."""

    input: str
    batch: int | None

    def __call__(self, images: NDArray[np.float32]) -> Mapping[str, NDArray[Any]]: ...


@dataclass(frozen=True)
class Sources:
    """Calibration images, and how models run on them."""

    images: Sequence[Path]  # calibration images, in any order
    preprocess: InputConfig
    load: Callable[[onnx.ModelProto], Simulator]  # makes a model ready to run
    head: Decoded  # names of the decoded boxes and scores
    progress: Progress = silent
    cache: ImageCache | None = None  # images that other passes decoded; None decodes them in each pass
    # File with the state of long work, so that an interrupted run can continue; None for none.
    unfinished: Path | None = None

    def outputs(
        self, models: Sequence[onnx.ModelProto], paths: Sequence[Path], stage: str
    ) -> Iterator[list[dict[str, NDArray[Any]]]]:
        """Every image's outputs of each model, without the batch axis, including the network's input."""
        simulators = [self.load(model) for model in models]
        for batch in self._stream(paths, stage, simulators[0].batch or 1):
            results = [{**simulator(batch.images), simulator.input: batch.images} for simulator in simulators]
            for each in results:
                for name, value in each.items():
                    if value.ndim == 4 and len(value) != len(batch) == 1:
                        each[name] = _stacked(value)
                    # Where products read the places of all images as rows: (B * places, ...).
                    elif len(value) != len(batch) and len(value) % len(batch) == 0:
                        each[name] = value.reshape(len(batch), -1, *value.shape[1:])
            for row in range(len(batch)):
                yield [{name: value[row] for name, value in each.items()} for each in results]

    def batches(self, model: onnx.ModelProto, paths: Sequence[Path], stage: str) -> Iterator[NDArray[np.float32]]:
        """Images as float32 (B, 3, H, W), with the model's batch, or 1 for a dynamic batch."""
        size = model.graph.input[0].type.tensor_type.shape.dim[0].dim_value or 1
        for batch in self._stream(paths, stage, size):
            yield filled(batch.images, size)

    def _stream(self, paths: Sequence[Path], stage: str, batch_size: int) -> Iterator[ImageBatch]:
        """The decoded images; reports a batch as done when its reader requests the next."""
        count = 0
        for batch in ImageStream(paths, self.preprocess, batch_size=batch_size, cache=self.cache):
            yield batch
            count += len(batch)
            self.progress(stage, count, len(paths))


def _stacked(regions: NDArray[Any]) -> NDArray[Any]:
    """The regions of one image (n, C, h, w), below each other: (1, C, n * h, w); zeros if there are none."""
    count, channels, rows, columns = regions.shape
    if not count:
        return np.zeros((1, channels, rows, columns), regions.dtype)
    return regions.transpose(1, 0, 2, 3).reshape(1, channels, count * rows, columns)
