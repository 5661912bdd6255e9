"""The detectors that are timed, the batches that they run, and the machine around them."""

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
    """A detector to time.

    Attributes:
        name: of the target in the results.
        runner: runs it.
        input: its pre-processing.
        file: the engine or model that is run.
        nms: the mode of suppression; with ``host`` the suppression comes after the run and is in none of the times.
        thresholds: of the suppression in the graph; None where they are not known.
        tf32: it has float32 convolutions, which may run in TF32.
    """

    name: str
    runner: Runner
    input: InputConfig
    file: str
    nms: str
    thresholds: NmsConfig | None = None
    tf32: bool = False

    def unlike(self, other: Target) -> str:
        """What suppression is in this target's times and in another's, where it is not the same; else empty."""
        if self.nms != other.nms:
            untimed = " (on the host it is not timed)" if "host" in (self.nms, other.nms) else ""
            return f"NMS {self.nms} against {other.nms}{untimed}"
        if self.nms == "host" or self.thresholds is None or other.thresholds is None:
            return ""
        own, theirs = self.thresholds.model_dump(), other.thresholds.model_dump()
        unequal = [f"{key} {own[key]} against {theirs[key]}" for key in own if own[key] != theirs[key]]
        return f"NMS with {', '.join(unequal)}" if unequal else ""

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
        pixels = np.concatenate([batch.images for batch in stream])
        return np.ascontiguousarray(pixels[np.arange(count) % len(pixels)])


def source_of_pixels(images: Path | None, seed: int) -> str:
    """The images that :meth:`Target.pixels` gives, in words."""
    return f"noise of 8-bit pixels, seed {seed}" if images is None else f"from '{images}'"


def unfair(name: str, difference: str) -> str:
    """The warning about a target whose suppression differs from that of the target it is compared with."""
    return (
        f"'{name}' is not timed with the same suppression ({difference}), so it is not the networks that are compared; "
        "build both with the same --nms and thresholds"
    )


@dataclass(frozen=True)
class Machine:
    """The state of the machine before or after a measurement.

    Attributes:
        cpu: its model, as the system calls it.
        cores: how many this process may use.
        cores_in_all: how many there are.
        load: mean number of running processes over 1, 5 and 15 minutes.
        clocks: the device's clocks, temperature and throttling; None where they are not known.
    """

    cpu: str
    cores: int
    cores_in_all: int
    load: tuple[float, float, float]
    clocks: dict[str, Any] | None

    @staticmethod
    def now(targets: Sequence[Target]) -> Machine:
        """The present state, with the clocks of the device that the targets run on."""
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        cores = len(os.sched_getaffinity(0))
        runners = [target.runner for target in targets if target.on_device]
        return Machine(
            models[0] if models else platform.machine(),
            cores=cores,
            cores_in_all=os.cpu_count() or cores,
            load=os.getloadavg(),
            clocks=runners[0].clocks() if runners else None,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """One warning where other processes kept half of the cores or more busy over the last minute."""
        if self.load[0] < self.cores_in_all / 2:
            return ()
        return (
            f"the machine was busy before it began: load {self.load[0]:.2f} on {self.cores_in_all} cores; the times "
            "are longer and scatter more than on an idle one",
        )


def circumstances(before: Machine, after: Machine) -> tuple[str, str]:
    """The machine before and after a measurement, in two lines."""
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
    """Opens bundles, and models by the configuration; a path that is named twice is opened twice.

    Beside bundles that all have the same suppression a model is given that too, so that times are those of the same
    work; where it cannot be, and beside bundles that differ, the model is opened as if it were alone, see
    :meth:`Target.unlike`.

    Raises:
        ConfigError: a model without a configuration, or a configuration and no model.
        BundleError, ModelError, BackendError: a target cannot be opened or run.
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
            # A bundle whose model runs in place of its engine has a runner with a model.
            floats = manifest.backend.tf32 and (manifest.audit or manifest.precision).fp32 > 0
            tf32 = floats and detector.runner.model is None
        # The suppression that a bundle's model brought along is what 'auto' leaves in the model.
        if detector is None and config is not None and shared is not None and not shared.embedded:
            # Opened by itself the model may work, or fail with the error that is its own.
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
