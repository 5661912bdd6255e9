"""The detectors to time, their batches, and the state of the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.backends.base import Runner
from trtdet.bundle import Bundle
from trtdet.config import Config, InputConfig, NmsConfig
from trtdet.data import ImageStream, evenly, find_images
from trtdet.data.images import preprocess
from trtdet.errors import BackendError, ConfigError, ModelError
from trtdet.runtime.detector import Detector


@dataclass(frozen=True, eq=False)
class Target:
    """A detector to time, by its ``name`` in the results; ``file`` is the engine or model that runs.

    With the NMS mode ``host``, NMS runs after the engine and is not timed. ``thresholds`` are those of NMS in the
    graph; None if unknown. ``tf32`` says that the target has float32 convolutions, which may run in TF32.
    """

    name: str
    runner: Runner
    input: InputConfig
    file: str
    nms: str
    thresholds: NmsConfig | None = None
    tf32: bool = False

    def unlike(self, other: Target) -> str:
        """How the timed NMS differs from another target's, in words; empty if it does not."""
        if self.nms != other.nms:
            untimed = " (on the host it is not timed)" if "host" in (self.nms, other.nms) else ""
            return f"NMS {self.nms} against {other.nms}{untimed}"
        if self.nms == "host" or self.thresholds is None or other.thresholds is None:
            return ""
        own, theirs = self.thresholds.model_dump(), other.thresholds.model_dump()
        unequal = [f"{key} {own[key]} against {theirs[key]}" for key in own if own[key] != theirs[key]]
        return f"NMS with {', '.join(unequal)}" if unequal else ""

    def check_batch(self, batch: int) -> None:
        """Raises ConfigError if the target does not take a batch of this size."""
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

    def pixels(self, count: int, images: Path | str | None, seed: int) -> NDArray[np.float32]:
        """A pre-processed batch for the target, float32 (count, 3, H, W).

        ``images`` is a folder or list, evenly spaced, and repeated if too few; None for noise of 8-bit pixels from
        ``seed``. Raises DataError if an image cannot be read.
        """
        if images is None:
            generator = np.random.default_rng(seed)
            noise = generator.integers(0, 256, (count, *self.input.size, 3), dtype=np.uint8)
            return np.stack([preprocess(picture, self.input)[0] for picture in noise])
        stream = ImageStream(evenly(find_images(images), count), self.input, on_bad="raise")
        pixels = np.concatenate([batch.images for batch in stream])
        return np.ascontiguousarray(pixels[np.arange(count) % len(pixels)])


def source_of_pixels(images: Path | str | None, seed: int) -> str:
    """Source of the images of :meth:`Target.pixels`, in words."""
    return f"noise of 8-bit pixels, seed {seed}" if images is None else f"from '{images}'"


def unfair(name: str, difference: str) -> str:
    """Warning that the NMS of a target differs from that of the target it is compared with."""
    return (
        f"'{name}' is not timed with the same suppression ({difference}), so it is not the networks that are compared; "
        "build both with the same --nms and thresholds"
    )


@dataclass(frozen=True)
class Machine:
    """State of the machine before or after a measurement.

    ``cores`` are those that this process may use, ``load`` is the mean number of running processes over 1, 5 and 15
    minutes. ``clocks`` are clocks, temperature and throttling of the device; None if unknown.
    """

    cpu: str
    cores: int
    cores_in_all: int
    load: tuple[float, float, float]
    clocks: dict[str, Any] | None

    @staticmethod
    def now(targets: Sequence[Target]) -> Machine:
        """The present state, with the clocks of the device of the targets."""
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        cores = len(os.sched_getaffinity(0))
        runners = [target.runner for target in targets if target.runner.on_device]
        return Machine(
            models[0] if models else platform.machine(),
            cores=cores,
            cores_in_all=os.cpu_count() or cores,
            load=os.getloadavg(),
            clocks=runners[0].clocks() if runners else None,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """One warning if other processes kept half of the cores busy over the last minute."""
        if self.load[0] < self.cores_in_all / 2:
            return ()
        return (
            f"the machine was busy before it began: load {self.load[0]:.2f} on {self.cores_in_all} cores; the times "
            "are longer and scatter more than on an idle one",
        )


def circumstances(before: Machine, after: Machine) -> tuple[str, str]:
    """Two lines about the machine before and after a measurement."""
    clocks = [
        "not known" if state.clocks is None else ", ".join(f"{key} {value}" for key, value in state.clocks.items())
        for state in (before, after)
    ]
    return (
        f"{before.cpu}, {before.cores} of {before.cores_in_all} cores, load {before.load[0]:.2f} before and "
        f"{after.load[0]:.2f} after",
        f"clocks: {clocks[0]} before, {clocks[1]} after" if before.clocks or after.clocks else "clocks not known",
    )


def open_targets(paths: Sequence[Path], config: Config | None) -> tuple[Target, ...]:
    """Opens bundles, and models with the configuration; a repeated path is opened again.

    If all bundles have the same NMS, models get it too, so that the same work is timed. If that fails, or bundles
    differ, a model is opened as if alone, see :meth:`Target.unlike`. Raises ConfigError for a model without a
    configuration, or a configuration without a model; BundleError, ModelError, BackendError if a target cannot be
    opened or run.
    """
    if config is not None and all(path.is_dir() for path in paths):
        raise ConfigError("--config is for models, bundles carry their own configuration", "leave --config out")
    bundles = {index: Detector.open(path) for index, path in enumerate(paths) if path.is_dir()}
    manifests = {index: Bundle(paths[index], verify=False).manifest for index in bundles}
    parts = [manifest.nms for manifest in manifests.values()]
    kinds = [(part.mode, part.embedded, None if part.mode == "host" else part.thresholds) for part in parts]
    shared = parts[0] if parts and all(kind == kinds[0] for kind in kinds) else None
    opened: list[Target] = []
    for index, path in enumerate(paths):
        detector, tf32 = bundles.get(index), False
        if detector is not None:
            manifest = manifests[index]
            # A runner with a model runs the bundle's model, not its engine.
            floats = manifest.backend.tf32 and (manifest.audit or manifest.precision).fp32 > 0
            tf32 = floats and detector.runner.model is None
        # 'auto' keeps NMS that was in the bundle's own model.
        if detector is None and config is not None and shared is not None and not shared.embedded:
            # Opened alone below, the model may work, or raises its own error.
            with suppress(ConfigError, ModelError, BackendError):
                detector = Detector.open(path, config.with_nms(**shared.thresholds.model_dump()), shared.mode)
        detector = detector or Detector.open(path, config)
        earlier = paths[:index].count(path)
        opened.append(
            Target(
                name=f"{path} #{earlier + 1}" if earlier else str(path),
                runner=detector.runner,
                input=detector.input,
                file=str(detector.file),
                nms=detector.nms_mode,
                thresholds=detector.nms,
                tf32=tf32,
            )
        )
    return tuple(opened)
