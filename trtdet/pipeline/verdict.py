"""Was INT8 worth it? What it cost in mAP and brought in latency, against the same model without it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtdet.backends import EngineFacts, RunInfo, obstacle
from trtdet.bundle import Bundle
from trtdet.config import Config
from trtdet.data import CocoDataset
from trtdet.evaluation.comparison import Comparison, compare
from trtdet.evaluation.scoring import Evaluation, evaluate
from trtdet.performance.latency import BenchOptions, Ratio, bench
from trtdet.performance.layers import Difference, ProfileOptions, profile, slower
from trtdet.pipeline import BuildOptions, CalibrationOptions, KeepOptions, build, timing_cache_of
from trtdet.progress import Progress, silent
from trtdet.runtime.detector import Detector

WORTH = "worth.json"
"""The file of a bundle that keeps the answer."""

_NAMED = 8
"""So many convolutions are named in the sentence; the file has all."""


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
        """One sentence, and one more where something should be moved."""
        accuracy = "mAP not measured (give --val-images and --annotations)"
        if self.comparison is not None:
            difference, low, high = (
                100 * one for one in (self.comparison.difference, self.comparison.low, self.comparison.high)
            )
            accuracy = f"mAP {difference:+.2f} ({low:+.2f} .. {high:+.2f})"
        other = self.against.upper()
        time = f"latency not measured, as {self.unmeasured}"
        if self.latency is not None:
            one = self.latency
            time = f"latency {one.value:.2f}x of {other} ({one.low:.2f} .. {one.high:.2f}) at batch {self.batch}"
        said = f"INT8 against {other}: {accuracy}, {time}; on {self.run_info}"
        if self.latency is not None and self.latency.low > 1:
            said += f". INT8 is slower than {other} here"
        return f"{said}. {self.advice}" if self.advice else said

    @property
    def advice(self) -> str:
        """Which convolutions to move, and how; empty where none is slower."""
        names = [name for one in self.slower for name in one.convs]
        if not names:
            return ""
        gain = sum(one.gain_ms for one in self.slower)
        listed = ",".join(names[:_NAMED])
        rest = f" and {len(names) - _NAMED} more, see {WORTH}" if len(names) > _NAMED else ""
        return f"Slower in INT8, by {gain:.3f} ms in all: --keep-fp16 {listed}{rest}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = {**asdict(replace(self, comparison=None)), "said": str(self), "advice": self.advice}
        del plain["run_info"]
        plain["ran_on"] = str(self.run_info)
        return {**plain, "comparison": self.comparison.as_dict() if self.comparison is not None else None}


def weigh(
    model: Path,
    config: Config,
    bundle: Bundle,
    options: BuildOptions,
    timing: BenchOptions = BenchOptions(seconds=2.0),
    profiling: ProfileOptions = ProfileOptions(),
    progress: Progress = silent,
) -> Worth | None:
    """Builds the same model without INT8, runs both, and keeps the answer in the bundle.

    Engines are compared with FP16, in one run, by latency, by layer and, where annotated images are given, by mAP.
    Where none can be run the models are, on the CPU and against FP32: by mAP alone.

    Args:
        model: the float ONNX model that the bundle was built from.
        config: as it was built with.
        bundle: with INT8.
        options: as it was built with; ``keep.images`` and ``keep.annotations`` are the annotated images.
        timing: how the latency is measured; its batches are those that the engine was optimised for.
        profiling: how the layers are; likewise.
        progress: told of every stage.

    Returns:
        None where nothing can be measured: no engine can be run and there are no annotated images.

    Raises:
        TrtdetError: the other bundle cannot be built, or one of both cannot be run.
    """
    # The search for a plan under a bound on mAP has scored the models already.
    annotated = options.keep.images is not None and options.keep.max_map_drop is None
    reason = "the bundle has no engine" if bundle.engine is None else obstacle(EngineFacts.of(bundle))
    if reason and (not annotated or bundle.manifest.quantization.mode == "implicit"):
        return None
    without = _without_int8(options, bundle, bool(reason))
    with tempfile.TemporaryDirectory(prefix=f".{bundle.path.name}.", dir=bundle.path.parent) as folder:
        twin = build(model, config, Path(folder) / without.precision, without, progress).bundle
        pair = (bundle.path, twin.path)
        comparison = _compared(pair, config, options.keep, progress) if annotated else None
        if reason:
            assert comparison is not None
            found = Worth(without.precision, comparison.reference.run_info, comparison, unmeasured=reason)
        else:
            batch = bundle.manifest.input.shape.opt[0]
            timed = bench(pair, options=replace(timing, batches=(batch,)), baseline=twin.path, progress=progress)
            profiled = profile(
                bundle.path, options=replace(profiling, batch=batch), against=twin.path, progress=progress
            )
            assert profiled.against is not None
            found = Worth(
                without.precision,
                timed.targets[0].run_info,
                comparison,
                batch=batch,
                latency=timed.targets[0].points[0].ratio,
                slower=tuple(slower(profiled.profile, profiled.against)),
            )
    bundle.add(WORTH, (json.dumps(found.as_dict(), indent=1) + "\n").encode())
    return found


def _without_int8(options: BuildOptions, bundle: Bundle, on_cpu: bool) -> BuildOptions:
    nms = "auto" if bundle.manifest.nms.own else bundle.manifest.nms.where
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
    dataset = CocoDataset.load(keep.annotations, keep.images, config.classes)

    def scored(path: Path, stage: str) -> Evaluation:
        return evaluate(Detector.open(path), dataset, lambda done, total: progress(stage, done, total))

    return compare(scored(pair[0], "mAP with INT8"), scored(pair[1], "mAP without INT8"))
