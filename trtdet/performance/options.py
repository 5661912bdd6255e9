"""Options of `bench` and `profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtdet.errors import ConfigError


@dataclass(frozen=True)
class BenchOptions:
    """Options of :func:`trtdet.bench`.

    Attributes:
        batches: images per run; empty for the fixed batch that all targets have, else 1.
        streams: numbers of execution contexts that run side by side for the throughput.
        seconds: minimum time of each target at each point, above 0.
        warm_up: minimum time of each target before that, in seconds, 0 or more.
        min_runs: minimum number of runs of each point, 2 or more.
        transfers: also time the copies to the device and back, and include them in the throughput.
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
    images: Path | str | None = None
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
    """Options of :func:`trtdet.profile`.

    Attributes:
        batch: images per run; None for the target's fixed batch, else 1.
        runs: number of measured runs, 2 or more.
        warm_up: number of runs before each part of the measured runs, 1 or more.
        images: a folder or list of images to run; None for noise.
        seed: of the noise.

    Raises:
        ConfigError: a value is out of range.
    """

    batch: int | None = None
    runs: int = 50
    warm_up: int = 5
    images: Path | str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--batch", self.batch, 1),
            ("--runs", self.runs, 2),
            ("--warm-up", self.warm_up, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
