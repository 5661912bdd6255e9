"""Running float and INT8 models on calibration images, whatever library does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray


class Simulator(Protocol):
    """A model that computes its outputs: float32 (B, 3, H, W) to arrays (B, ...) by name.

    Attributes:
        input: name of the model's input.
        batch: how many images it takes at a time; None for any number.
    """

    input: str
    batch: int | None

    def __call__(self, images: NDArray[np.float32]) -> Mapping[str, NDArray[Any]]: ...


Load = Callable[[onnx.ModelProto], Simulator]
"""Makes a model ready to run."""
