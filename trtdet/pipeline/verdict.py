"""Was INT8 worth it? What it cost in mAP and gained in latency, against the same model without it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtdet.backends import EngineFacts, RunInfo, obstacle
from trtdet.bundle import Bundle
from trtdet.config import Config
from trtdet.data import CocoDataset, ImageCache
from trtdet.evaluation.comparison import Comparison, compare
from trtdet.evaluation.scoring import Evaluation, evaluate
from trtdet.files import writing
from trtdet.files.temporaries import Temporary
from trtdet.performance import BenchOptions, Difference, ProfileOptions, Ratio, bench, profile, slower
from trtdet.pipeline.assembly import Job, assemble, timing_cache_of
from trtdet.pipeline.options import BuildOptions, CalibrationOptions, KeepOptions
from trtdet.progress import Progress, silent
from trtdet.runtime.detector import Detector

WORTH = "worth.json"
"""The file of a bundle that keeps the answer."""

_NAMED = 8
"""How many convolutions the sentence names; the file has all."""


@dataclass(frozen=True)
class Worth:
    """The answer.

    Attributes:
        against: precision of the other bundle, ``fp16`` or ``fp32``.
        run_info: where both ran.
        comparison: of their mAP; None where no annotated images were given.
        batch: images at once in ``latency``.
        latency: INT8's as a multiple of the other's, below 1 is faster; None where no engine can be run here.
        unmeasured: why there is no latency; empty where there is.
        slower: the convolutions that INT8 runs slower than the other, the worst first.
    """

    against: str
    run_info: RunInfo
    comparison: Comparison | None
    batch: int = 1
    latency: Ratio | None = None
    unmeasured: str = ""
    slower: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        """One sentence, and a second where convolutions should be moved."""
        accuracy = "mAP not measured (give --val-images and --annotations)"
        if self.comparison is not None:
            found = self.comparison
            difference, low, high = (100 * share for share in (found.difference, found.low, found.high))
            accuracy = f"mAP {difference:+.2f} ({low:+.2f} .. {high:+.2f})"
        other = self.against.upper()
        time = f"latency not measured, as {self.unmeasured}"
        if self.latency is not None:
            ratio = self.latency
            time = f"latency {ratio.value:.2f}x of {other} ({ratio.low:.2f} .. {ratio.high:.2f}) at batch {self.batch}"
        said = f"INT8 against {other}: {accuracy}, {time}; on {self.run_info}"
        if self.latency is not None and self.latency.low > 1:
            said += f". INT8 is slower than {other} here"
        return f"{said}. {self.advice}" if self.advice else said

    @property
    def advice(self) -> str:
        """Which convolutions to move, and how; empty where none is slower."""
        names = [name for layer in self.slower for name in layer.convs]
        if not names:
            return ""
        gain = sum(layer.gain_ms for layer in self.slower)
        listed = ",".join(names[:_NAMED])
        rest = f" and {len(names) - _NAMED} more, see {WORTH}" if len(names) > _NAMED else ""
        return f"Slower in INT8, by {gain:.3f} ms in all: --keep-fp16 {listed}{rest}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = {**asdict(replace(self, comparison=None)), "said": str(self), "advice": self.advice}
        del plain["run_info"]
        plain["ran_on"] = str(self.run_info)
        return {**plain, "comparison": self.comparison.as_dict() if self.comparison is not None else None}


@dataclass(frozen=True)
class Measuring:
    """How two bundles are compared; the batch is the one that the engine was optimised for."""

    timing: BenchOptions = BenchOptions(seconds=2.0)
    profiling: ProfileOptions = ProfileOptions()


def weigh(job: Job, bundle: Bundle, measuring: Measuring = Measuring(), progress: Progress = silent) -> Worth | None:
    """Builds the same model without INT8, runs both, and keeps the answer in the bundle.

    Engines are compared with FP16, in one run, by latency, by layer and, where annotated images are given, by mAP.
    Where no engine can be run the models are compared, on the CPU and with FP32: by mAP alone.

    Args:
        job: the build of the bundle; its ``keep.images`` and ``keep.annotations`` are the annotated images.
        bundle: with INT8.
        measuring: how latency and layers are measured.
        progress: told of every stage.

    Returns:
        None where nothing can be measured: no engine can be run and there are no annotated images.

    Raises:
        TrtdetError: the other bundle cannot be built, or one of both cannot be run.
    """
    # The search for a plan under a bound on mAP has scored the models already.
    annotated = job.options.keep.images is not None and job.options.keep.max_map_drop is None
    reason = "the bundle has no engine" if bundle.engine is None else obstacle(EngineFacts.of(bundle))
    if reason and (not annotated or bundle.manifest.quantization.mode == "implicit"):
        return None
    without = _without_int8(job.options, bundle, bool(reason))
    with _scratch_folder(bundle.path) as folder:
        twin = assemble(replace(job, output=folder / without.precision, options=without), progress).bundle
        pair = (bundle.path, twin.path)
        comparison = _compared(pair, job.config, job.options.keep, progress) if annotated else None
        if reason:
            assert comparison is not None
            found = Worth(without.precision, comparison.reference.run_info, comparison, unmeasured=reason)
        else:
            found = replace(_timed(bundle, twin, measuring, progress), comparison=comparison)
    bundle.add(WORTH, (json.dumps(found.as_dict(), indent=1) + "\n").encode())
    return found


@contextmanager
def _scratch_folder(bundle: Path) -> Iterator[Path]:
    """A folder beside the bundle, which the next writer of the bundle removes where this process is killed."""
    with writing(bundle):
        temporary = Temporary(bundle, folder=True)
    try:
        yield temporary.path
    finally:
        temporary.remove()
        temporary.release()


def _timed(bundle: Bundle, twin: Bundle, measuring: Measuring, progress: Progress) -> Worth:
    """Both engines side by side, by latency and by layer."""
    batch = bundle.manifest.input.shape.opt[0]
    timing = replace(measuring.timing, batches=(batch,))
    timed = bench((bundle.path, twin.path), options=timing, baseline=twin.path, progress=progress)
    profiling = replace(measuring.profiling, batch=batch)
    profiled = profile(bundle.path, options=profiling, against=twin.path, progress=progress)
    assert profiled.against is not None
    return Worth(
        twin.manifest.command["precision"],
        timed.targets[0].run_info,
        None,
        batch=batch,
        latency=timed.targets[0].points[0].ratio,
        slower=tuple(slower(profiled.profile, profiled.against)),
    )


def _without_int8(options: BuildOptions, bundle: Bundle, on_cpu: bool) -> BuildOptions:
    nms = "auto" if bundle.manifest.nms.embedded else bundle.manifest.nms.mode
    if on_cpu:
        return BuildOptions("fp32", nms=nms, backend="onnxruntime", batch=options.batch)
    return replace(
        options,
        precision="fp16",
        backend=bundle.manifest.backend.name,
        nms=nms,
        calibration=CalibrationOptions(),
        keep=KeepOptions(),
        quantization="explicit",
        calibrator="trtdet",
        cache=None,
        timing_cache=options.timing_cache or timing_cache_of(bundle.path),
    )


def _compared(pair: Sequence[Path], config: Config, keep: KeepOptions, progress: Progress) -> Comparison:
    assert keep.images is not None and keep.annotations is not None
    dataset, cache = CocoDataset.load(keep.annotations, keep.images, config.classes), ImageCache()

    def scored(path: Path, stage: str) -> Evaluation:
        return evaluate(Detector.open(path), dataset, lambda done, total: progress(stage, done, total), cache)

    return compare(scored(pair[0], "mAP with INT8"), scored(pair[1], "mAP without INT8"))
