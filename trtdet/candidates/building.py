"""Builds a bundle; where a GPU runs the engine, the default plan is the fastest of candidates that are timed on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trtdet.building import BuildResult
from trtdet.building.bundle import command_of
from trtdet.building.comparison import rewritten
from trtdet.building.job import CheckedBuild, job_of
from trtdet.building.ranges import HISTOGRAMS
from trtdet.building.validation import check_measured
from trtdet.building.verbs import build_job
from trtdet.bundle import BundleWriter, GuardPart, QuantizationPart
from trtdet.candidates.finishing import FP16, Finished, finish
from trtdet.candidates.preparing import Preparing
from trtdet.config import Config
from trtdet.files import scratch_folder
from trtdet.options import BuildOptions, FinishOptions, PrepareOptions
from trtdet.progress import Expect, Progress, silent, unheard


def build(
    model: Path | str,
    config: Config,
    output: Path | str,
    options: BuildOptions = BuildOptions(),
    progress: Progress = silent,
    expect: Expect = unheard,
) -> BuildResult:
    """Builds a bundle from a float ONNX model.

    If a GPU of this machine runs the engine and the options ask for INT8 without a plan, this is
    :func:`trtdet.prepare` and :func:`trtdet.finish` in a row: candidates are scored on images that calibrate nothing,
    timed side by side, and the fastest within the bound on accuracy ships. Otherwise the plan of the options is built
    and compared with FP16, see :func:`trtdet.building.build`, which has the arguments and errors.
    """
    job = job_of(Path(model), config, Path(output), options=options, repeatable=True)
    return build_job(job, progress, expect, fastest=_fastest)


def _fastest(checked: CheckedBuild, progress: Progress) -> BuildResult:
    """Writes the bundle of the candidate that is the fastest on this machine's GPU."""
    job, options = checked.job, checked.options
    check_measured(options.plan)
    with BundleWriter(job.output):
        pass  # an unwritable output fails before the work
    with scratch_folder(job.output) as folder:
        part = replace(options, plan=options.plan.formats_alone(), force=True, guard="warn")
        preparing = Preparing(
            replace(job, output=folder / "prepared", options=part),
            checked.backend,
            PrepareOptions(build=options),
            previous=checked.previous,
            progress=progress,
        )
        timings = options.engine.timing_cache or job.beside("timing-cache")
        finished = finish(
            preparing.folder().path,
            folder / "finished",
            FinishOptions(engine=replace(options.engine, timing_cache=timings), force=True),
            progress=progress,
            least_speedup=options.least_speedup,
        )
        shipped = finished.bundle.manifest
        files: dict[str, bytes] = {}
        changes = {"command": command_of(checked), "content_hash": checked.key, "guard": _decision(finished, options)}
        if preparing.collection is not None:
            files[HISTOGRAMS] = preparing.collection.to_bytes()
            if not shipped.precision.int8:
                changes["quantization"] = QuantizationPart(mode="none", histograms_key=preparing.collection.key)
        bundle = rewritten(job.output, finished.bundle, files=files, changes=changes)
    return BuildResult(bundle, finished.audit)


def _decision(finished: Finished, options: BuildOptions) -> GuardPart:
    """Why the candidate ships, and the speed of the fastest with INT8 layers against FP16."""
    manifest = finished.bundle.manifest
    best = next(candidate for candidate in finished.candidates if candidate.shipped)
    ratios = [candidate.ratio for candidate in finished.candidates if candidate.ratio and candidate.name != FP16]
    ratio = min(ratios, default=None) if best.name == FP16 else best.ratio
    return GuardPart(
        shipped="int8" if manifest.precision.int8 else "fp16",
        least=options.least_speedup or 1.0,
        speedup=None if ratio is None else 1 / ratio,
        how=best.how,
        on=best.on,
        batch=manifest.input.shape.opt[0],
        reason=finished.reason,
    )
