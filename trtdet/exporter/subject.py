"""What is exported: a detector in torch with the configuration of its input and its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from trtdet.config import Config, InputConfig
from trtdet.errors import ConfigError, ModelError, one_line

Float = NDArray[np.float32]


@dataclass(frozen=True)
class Subject:
    """A detector in torch.

    Attributes:
        source: as the user named it, for messages.
        reference: the result is compared with it; in evaluation mode, takes float32 (B, 3, H, W) and gives a tensor, a
            tuple or list of tensors, or a dict of tensors, each with the batch first.
        config: size and name of the input, and what the outputs mean.
        traced: computes the same in the form that is exported, with batch normalisation folded where that is known to
            be right; None for the reference itself.
        unordered: the rows of all outputs are in no order that means anything: a choice of the best among nearly equal
            scores made it, and another rounding makes another.
    """

    source: str
    reference: nn.Module
    config: Config
    traced: nn.Module | None = None
    unordered: bool = False

    @property
    def input_name(self) -> str:
        """Of the ONNX model's input."""
        return self.config.input.name or "images"


def resized(config: Config, size: tuple[int, int] | None, multiple: int = 1) -> Config:
    """The configuration with another input size (height, width), rounded up to a multiple; None keeps its own.

    Raises:
        ConfigError: the strides do not divide the size.
    """
    size = size or config.input.size
    data = config.model_dump()
    data["input"]["size"] = tuple(-(-side // multiple) * multiple for side in size)
    try:
        return Config.model_validate(data)
    except ValueError as error:
        raise ConfigError(f"--size {size[0]}x{size[1]}: {_reason(error)}") from None


def _reason(error: ValueError) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line.removeprefix("Value error, ").split(" [type=")[0] for line in lines if "alue error" in line), "")


def tensors(outputs: Any) -> dict[str, Tensor]:
    """The outputs of a module by name; a name that begins with a colon is a position.

    Raises:
        ModelError: there is none, or an output is no tensor.
    """
    if isinstance(outputs, Tensor):
        named: dict[str, Any] = {":0": outputs}
    elif isinstance(outputs, Mapping):
        named = {str(key): value for key, value in outputs.items()}
    elif isinstance(outputs, (tuple, list)):
        named = {f":{index}": value for index, value in enumerate(outputs)}
    else:
        raise ModelError(f"the module gives {type(outputs).__name__}, expected a tensor, a tuple, a list or a dict")
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"output {name.lstrip(':')} of the module is {type(value).__name__}, expected a tensor; "
                "flatten nested outputs in the factory"
            )
    if not named:
        raise ModelError("the module gives no outputs, expected at least one tensor")
    return named


def picture(given: InputConfig, seed: int) -> Float:
    """float32 (3, H, W) with the statistics of a picture, in the network's values: areas of like colour, some noise,
    full range."""
    rng = np.random.default_rng(seed)
    cell = 16
    rows, columns = -(-given.height // cell), -(-given.width // cell)
    coarse = rng.uniform(0, 1, (3, rows, columns)).repeat(cell, axis=1).repeat(cell, axis=2)
    noisy = coarse[:, : given.height, : given.width] + rng.normal(0, 0.05, (3, given.height, given.width))
    mean, std = np.array(given.mean), np.array(given.std)
    low = ((0 - mean) / std).astype(np.float32)[:, None, None]
    high = ((255 * given.scale - mean) / std).astype(np.float32)[:, None, None]
    return np.asarray(low + np.clip(noisy, 0, 1) * (high - low), np.float32)


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, or its type."""
    lines = str(error).strip().splitlines()
    return one_line(lines[0]) if lines else type(error).__name__
