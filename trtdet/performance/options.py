"""What is measured, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtdet.errors import ConfigError


@dataclass(frozen=True)
class BenchOptions:
    """What :func:`trtdet.bench` measures, and for how long.

    Attributes:
        batches: images at once; empty for the fixed batch that all targets have, else 1.
        streams: for the throughput, how many execution contexts run side by side.
        seconds: each target is measured for at least so long at each point, above 0.
        warm_up: each target runs for at least so long before that, in seconds, 0 or more.
        min_runs: each point has at least so many runs, 2 or more.
        transfers: also time the copies to the device and back, and run them for the throughput.
        images: a folder or list of images to run; None for noise.
        seed: of the noise.

    Raises:
        ConfigError: a value is out of range.
    """

    batches: tuple[int, ...] = ()
    streams: tuple[int, ...] = (1,)
    seconds: float = 3.0
    warm_up: float = 1.0
    min_runs: int = 50
    transfers: bool = True
    images: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values in (("--batch", self.batches), ("--streams", self.streams)):
            if any(value < 1 for value in values) or len(set(values)) != len(values):
                raise ConfigError(f"{name} takes distinct numbers from 1 up, got {' '.join(map(str, values))}")
        if not self.streams:
            raise ConfigError("--streams takes at least one number, got none")
        if not self.seconds > 0:
            raise ConfigError(f"--seconds must be above 0, got {self.seconds:g}")
        if not self.warm_up >= 0:
            raise ConfigError(f"--warm-up must be 0 or more seconds, got {self.warm_up:g}")
        if self.min_runs < 2:
            raise ConfigError(f"--min-runs must be at least 2, got {self.min_runs}")


@dataclass(frozen=True)
class ProfileOptions:
    """What :func:`trtdet.profile` runs.

    Attributes:
        batch: images at once; None for the target's fixed batch, else 1.
        runs: how many are measured, 2 or more.
        warm_up: how many runs precede each part of the measured runs, 1 or more.
        images: a folder or list of images to run; None for noise.
        seed: of the noise.

    Raises:
        ConfigError: a value is out of range.
    """

    batch: int | None = None
    runs: int = 50
    warm_up: int = 5
    images: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--batch", self.batch, 1),
            ("--runs", self.runs, 2),
            ("--warm-up", self.warm_up, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
