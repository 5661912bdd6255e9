"""How a model repository serves, and how many images its engine takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trtdet.bundle import Manifest
from trtdet.errors import ConfigError


@dataclass(frozen=True)
class TritonOptions:
    """How a repository serves.

    Attributes:
        input: the client's input: ``encoded`` image files, one in each element, or ``pixels``, uint8 RGB.
        queue_delay_us: how long a request waits for others to fill a batch, in microseconds.
        cpu_instances: processes for pre-processing, and as many for post-processing.
    """

    input: Literal["encoded", "pixels"] = "encoded"
    queue_delay_us: int = 500
    cpu_instances: int = 2

    def __post_init__(self) -> None:
        if self.queue_delay_us < 0 or self.cpu_instances < 1:
            raise ConfigError(
                f"got a queue delay of {self.queue_delay_us} us and {self.cpu_instances} processes; the delay must be "
                "at least 0, and the processes at least 1"
            )


class Batch:
    """How many images the engine takes at once, and the first dimension of tensors that follows from it."""

    def __init__(self, manifest: Manifest) -> None:
        shape = manifest.input.shape
        self.least, self.usual, self.most = shape.min[0], shape.opt[0], shape.max[0]
        self.shared = self.least == 1 < self.most
        """Triton's batcher can fill it from several requests."""
        self.limit = self.most if self.shared else 0
        """``max_batch_size``."""

    def engine(self, *dims: int) -> list[int]:
        """Dimensions of a tensor of the engine."""
        return list(dims) if self.shared else [self.most if self.least == self.most else -1, *dims]

    def client(self, *dims: int) -> list[int]:
        """Dimensions of a tensor with a row for each image of a request."""
        return list(dims) if self.shared else [-1, *dims]
