"""Profiles one target layer by layer, or two in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtdet.backends.base import LayerTime
from trtdet.bundle import Bundle
from trtdet.config import Config
from trtdet.passes import load_model
from trtdet.performance.options import ProfileOptions
from trtdet.performance.profiles import Difference, OnnxNodes, Profile, Share, differences, joined, shortened, slower
from trtdet.performance.targets import Machine, Target, circumstances, open_targets, source_of_pixels, unfair
from trtdet.progress import Progress, silent
from trtdet.runtime.detector import Detector
from trtdet.tables import Column, Table, Tables

_TURNS = 5
"""Number of parts of the runs; profiled and plain runs, and the two targets, take turns between parts."""


@dataclass(frozen=True)
class Profiling:
    """Result of :func:`profile`, against another target's profile if there is one.

    ``images`` is the source of the images, in words; ``before`` and ``after`` are states of the machine. ``warnings``
    are one sentence each. ``nms_differs`` says how the NMS of the two differs; empty if it does not.
    """

    profile: Profile
    against: Profile | None
    images: str
    before: Machine
    after: Machine
    warnings: tuple[str, ...]
    nms_differs: str = ""

    @property
    def slower(self) -> list[Difference]:
        """The convolutions that the target runs slower than the other; empty without another."""
        return [] if self.against is None else slower(self.profile, self.against)

    @property
    def circumstances(self) -> tuple[str, ...]:
        """Source of the images and state of the machine, one sentence each."""
        return (f"images: {self.images}", *circumstances(self.before, self.after))

    def as_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            **self.profile.as_dict(),
            "images": self.images,
            "machine": {"before": asdict(self.before), "after": asdict(self.after)},
            "warnings": list(self.warnings),
            "against": None,
        }
        if self.against is not None:
            result["against"] = {
                **self.against.as_dict(),
                "nms_differs": self.nms_differs,
                "differences": [asdict(difference) for difference in differences(self.profile, self.against)],
                "slower": [asdict(difference) for difference in self.slower],
            }
        return result

    def table(self, top: int = 20) -> Tables:
        """Tables of each target, the comparison, and the circumstances; ``top`` layers and convolutions of each."""
        parts = [*self.profile.table(top).parts]
        if self.against is not None:
            parts += [*self.against.table(top).parts, *self.compared(top).parts]
        return Tables((*parts, "\n".join(self.circumstances)))

    def compared(self, top: int = 20) -> Tables:
        """The differences by type of operator, and the ``top`` convolutions that the first runs slower. Raises
        ValueError without ``against``."""
        if self.against is None:
            raise ValueError("one profile alone has nothing to be compared with")
        mine, others = ({share.name: share for share in part.by_type} for part in (self.profile, self.against))
        nothing = Share("", ms=0.0, stddev=0.0, count=0, share=0.0)
        kinds = [(kind, mine.get(kind, nothing), others.get(kind, nothing)) for kind in dict.fromkeys((*mine, *others))]
        kinds.sort(key=lambda row: -abs(row[1].ms - row[2].ms))
        types = Table(
            (
                *(Column("op type", align="left"), Column("first ms", ".3f"), Column("second ms", ".3f")),
                *(Column("difference", "+.3f"), "first count", "second count"),
            ),
            [(kind, own.ms, other.ms, own.ms - other.ms, own.count, other.count) for kind, own, other in kinds],
        )
        slow = self.slower
        gain = sum(difference.gain_ms for difference in slow)
        summary = f"{len(slow)} groups, {gain:.3f} ms in all if they were as in the second" if slow else "none"
        title = f"Slower in the first, beyond the scatter of the runs: {summary}"
        rows = [
            (
                shortened(difference.convs),
                *(difference.first_ms, difference.second_ms, difference.gain_ms),
                f"{difference.low_ms:.4f} .. {difference.high_ms:.4f}",
                shortened(difference.first_layers),
            )
            for difference in slow[:top]
        ]
        convolutions = Table(
            (
                Column("convolutions", align="left"),
                *(Column("first ms", ".4f"), Column("second ms", ".4f"), Column("gain ms", ".4f")),
                *(Column("90% interval", align="right"), Column("layers in the first", align="left")),
            ),
            rows,
            title,
        )
        heading = f"{self.profile.name} (first) against {self.against.name} (second)"
        if self.nms_differs:
            heading += f": {self.nms_differs}"
        return Tables((heading, types, convolutions if slow else title))


def profile(
    path: Path | str,
    config: Config | None = None,
    options: ProfileOptions = ProfileOptions(),
    against: Path | str | None = None,
    progress: Progress = silent,
) -> Profiling:
    """Profiles a bundle or an ONNX model, or two in turns.

    Args:
        config: of the ONNX models; bundles carry their own.
        against: another target of the same network.

    Raises:
        ConfigError: a target does not take the batch, or the two have no convolution in common.
        BundleError, ModelError, BackendError, DataError: a target cannot be opened or run, or an image cannot be read.
    """
    paths = [Path(each) for each in (path, against) if each is not None]
    targets = open_targets(paths, config)
    nodes = [nodes_behind(path, target) for path, target in zip(paths, targets, strict=True)]
    profiling = profile_targets(targets, nodes, options, progress=progress)
    if profiling.against is not None:
        differences(profiling.profile, profiling.against)  # raises if the two cannot be compared
    return profiling


def profile_targets(
    targets: Sequence[Target],
    nodes: Sequence[OnnxNodes],
    options: ProfileOptions = ProfileOptions(),
    progress: Progress = silent,
) -> Profiling:
    """Profiles one or two targets that are open; ``nodes`` are those of the ONNX model of each.

    The runs are cut into parts. In each part every target is profiled and then runs as often without the profiler, so
    that all series see the same state of the machine. Raises ConfigError if a target does not take the batch;
    BackendError if a target fails, or its layers change from one part to the next; DataError if an image cannot be
    read.
    """
    batch = options.batch or targets[0].runner.batch or 1
    for target in targets:
        target.check_batch(batch)
    before = Machine.now(targets)
    images = [target.pixels(batch, options.images, options.seed) for target in targets]
    contexts = [target.runner.new_context(pixels) for target, pixels in zip(targets, images, strict=True)]
    parts = [len(part) for part in np.array_split(range(options.runs), min(_TURNS, options.runs))]
    layers: list[list[tuple[LayerTime, ...]]] = [[] for _ in targets]
    latencies: list[list[float]] = [[] for _ in targets]
    for number, runs in enumerate(parts):
        for index, target in enumerate(targets):
            progress("profiling", number * len(targets) + index, len(parts) * len(targets))
            layers[index].append(target.runner.profile(images[index], runs, options.warm_up))
            for _ in range(options.warm_up):
                contexts[index].run()
            # Transfers and launches are in no layer.
            latencies[index].extend(contexts[index].compute() for _ in range(runs))
    progress("profiling", len(parts) * len(targets), len(parts) * len(targets))
    profiles = [
        Profile(
            name=target.name,
            file=target.file,
            run_info=target.runner.run_info,
            batch=batch,
            layers=joined(target.name, layers[index]),
            nodes=nodes[index],
            latency_ms=tuple(latencies[index]),
        )
        for index, target in enumerate(targets)
    ]
    nms_differs = targets[0].unlike(targets[1]) if len(targets) > 1 else ""
    return Profiling(
        profile=profiles[0],
        against=profiles[1] if len(profiles) > 1 else None,
        images=source_of_pixels(options.images, options.seed),
        before=before,
        after=Machine.now(targets),
        warnings=(*before.warnings, *([unfair(targets[0].name, nms_differs)] if nms_differs else [])),
        nms_differs=nms_differs,
    )


def layer_means(path: Path, progress: Progress = silent) -> dict[str, float]:
    """Mean milliseconds of each layer of a bundle's engine, by layer name. Raises BackendError if the bundle has no
    engine, or the engine cannot run here."""
    detector = Detector.open(path, runtime="engine")
    target = Target(
        str(path), runner=detector.runner, input=detector.input, file=str(detector.file), nms=detector.nms_mode
    )
    options = ProfileOptions()
    images = target.pixels(detector.batch, None, options.seed)
    progress("profiling", 0, 1)
    layers = target.runner.profile(images, options.runs, options.warm_up)
    progress("profiling", 1, 1)
    return {layer.name: float(np.mean(layer.ms)) for layer in layers}


def nodes_behind(path: Path, target: Target) -> OnnxNodes:
    """Nodes of the model that runs, or that the engine of the bundle at ``path`` was built from."""
    if (model := target.runner.model) is not None:
        return OnnxNodes.of(model)
    return OnnxNodes.of(load_model(Bundle(path, verify=False).model, allow_quantized=True))
