"""Was INT8 worth it? The same model is built without INT8 and compared; a bound on the speed may ship FP16."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trtdet.audit.gpus import gpu_named
from trtdet.audit.roofline import Estimate, estimate, flow_of
from trtdet.backends import EngineFacts, choose, obstacle
from trtdet.bundle import Bundle, BundleWriter, Manifest, QuantizationPart
from trtdet.config import NmsMode
from trtdet.data import CocoDataset, ImageCache
from trtdet.errors import TrtdetWarning
from trtdet.evaluation.comparison import Comparison, compare
from trtdet.evaluation.images_apart import apart_from
from trtdet.evaluation.scoring import Evaluation, evaluate
from trtdet.files import writing
from trtdet.files.temporaries import Temporary
from trtdet.performance import BenchOptions, ProfileOptions, bench, profile, slower
from trtdet.pipeline.assembly import Job, assemble, timing_cache_of
from trtdet.pipeline.options import BuildOptions, CalibrationOptions, KeepOptions
from trtdet.pipeline.stages.bundles import AUDIT
from trtdet.pipeline.stages.calibrating import HISTOGRAMS, select_images
from trtdet.pipeline.stages.costs import default_gpu
from trtdet.pipeline.stages.planning import RANKING
from trtdet.pipeline.worth import WORTH, EngineFigures, Estimated, Worth
from trtdet.progress import Progress, silent
from trtdet.runtime.detector import Detector


@dataclass(frozen=True)
class Measuring:
    """How two bundles are compared; the batch is the one that the engine was optimised for."""

    timing: BenchOptions = BenchOptions(seconds=2.0)
    profiling: ProfileOptions = ProfileOptions()


def weigh(job: Job, bundle: Bundle, measuring: Measuring = Measuring(), progress: Progress = silent) -> Worth | None:
    """Builds the same model without INT8, compares both, and keeps the answer in the bundle.

    Engines are compared with FP16 in the form that suits FP16 best. Where they can be run here they are measured in one
    run, by latency, by layer and, where annotated images are given, by mAP; elsewhere their time is estimated from
    their layers for a GPU, and the models are compared on the CPU and with FP32, by mAP alone.

    Where the job bounds INT8's speed the bundle that is shipped, INT8's or FP16's, is put at the job's output.

    Args:
        job: the build of the bundle; its ``keep.images`` and ``keep.annotations`` are the annotated images.
        bundle: with INT8, at the job's output or at :func:`place_of` it.
        measuring: how latency and layers are measured.
        progress: told of every stage.

    Returns:
        None where nothing can be compared: the layers of the bundle's engine are not known, or it has none, it cannot
        be run, there are no annotated images, and no bound is asked for.

    Raises:
        TrtdetError: the other bundle cannot be built, or one of both cannot be run.
    """
    options = job.options
    # The search for a plan under a bound on mAP has scored the models already.
    annotated = options.keep.annotations is not None and options.keep.max_map_drop is None
    reason = "the bundle has no engine" if bundle.engine is None else obstacle(EngineFacts.of(bundle))
    scored = annotated and not (reason and bundle.manifest.quantization.mode == "implicit")
    engines = bundle.engine is not None and (not reason or AUDIT in bundle.manifest.files)
    if not (engines or scored or options.guard is not None):
        return None
    found = Worth("fp16", batch=bundle.manifest.input.shape.opt[0], unmeasured=reason)
    with _scratch_folder(bundle.path) as folder:
        twin = _built(job, folder, fp16_twin(options, bundle), progress) if engines else None
        if twin is not None:
            found = replace(found, estimate=_estimated(bundle, twin, options.gpu, found.batch))
            found = found if reason else _timed(found, bundle, twin, measuring, progress)
        if scored:
            run = twin if twin is not None and not reason else None
            other = run or _built(job, folder, _fp32_twin(options, bundle), progress)
            dataset = _reporting(job)
            comparison = _compared((bundle.path, other.path), dataset, progress)
            ran_on = found.run_info or comparison.reference.run_info
            found = replace(found, against=other.manifest.shipped, run_info=ran_on, comparison=comparison)
        if options.guard is not None:
            found = found.guarded(options.guard)
        _keep(found, bundle, twin, job.output)
    return found


@contextmanager
def place_of(job: Job) -> Iterator[Path]:
    """Where the bundle of a build goes first: a folder beside its output while a bound on the speed may replace it.

    Raises:
        OutputError: the output's place holds something else, or cannot be written.
    """
    if job.options.guard is None:
        yield job.output
        return
    with BundleWriter(job.output):
        pass  # a place that cannot be written is found out now, not after the work
    with _scratch_folder(job.output) as folder:
        yield folder / "int8"


def answered(bundle: Bundle, options: BuildOptions) -> bool:
    """Whether a bundle has the answer already, for the GPU that is asked for."""
    if WORTH not in bundle.manifest.files or (options.guard is not None and bundle.manifest.guard is None):
        return False
    if options.gpu is None:
        return True
    try:
        estimated = json.loads(bundle.file(WORTH).read_text())["estimate"]
    except (KeyError, ValueError):
        return False  # of an earlier version
    return estimated is None or estimated["gpu"] == gpu_named(options.gpu).name


def fp16_twin(options: BuildOptions, bundle: Bundle) -> BuildOptions:
    """How the same model is built in FP16 for a comparison.

    The form of SiLU is the backend's own best and not the one that INT8 was asked for: a plugin, which serves INT8, is
    a kernel of its own, where FP16 has SiLU in the kernel of the convolution before it.
    """
    return replace(
        options,
        precision="fp16",
        backend=bundle.manifest.backend.name,
        nms=_suppression(bundle),
        calibration=_images_alone(options.calibration) if options.guard is not None else CalibrationOptions(),
        keep=KeepOptions(),
        silu="auto",
        plugins=(),
        quantization="explicit",
        calibrator="trtdet",
        cache=None,
        engine=replace(options.engine, embed_plugins=False),
        timing_cache=options.timing_cache or timing_cache_of(bundle.path),
        guard=None,
        gpu=None,
        int8_all=False,
        int8_attention=False,
        fp8=False,
        best=False,
        tuned=None,
        accuracy_report=False,
    )


def _images_alone(options: CalibrationOptions) -> CalibrationOptions:
    """The calibration images, which show what exceeds FP16 in an engine that may be shipped."""
    return CalibrationOptions(
        images=options.images, root=options.root, num_images=options.num_images, check_input=False
    )


def _fp32_twin(options: BuildOptions, bundle: Bundle) -> BuildOptions:
    """How the same model is built to be scored on the CPU."""
    return BuildOptions("fp32", nms=_suppression(bundle), backend="onnxruntime", batch=options.batch)


def _suppression(bundle: Bundle) -> NmsMode | Literal["auto"]:
    return "auto" if bundle.manifest.nms.embedded else bundle.manifest.nms.mode


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


def _built(job: Job, folder: Path, options: BuildOptions, progress: Progress) -> Bundle:
    """The same model in another precision; what the model and the configuration warn of was said for INT8."""
    title = f"{options.precision.upper()} to compare with"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)
        return assemble(
            replace(job, output=folder / options.precision, options=options),
            lambda stage, done, total: progress(f"{title}: {stage}", done, total),
        ).bundle


def _estimated(bundle: Bundle, twin: Bundle, gpu: str | None, batch: int) -> Estimated | None:
    """Both engines by the roofline; None where their layers are not known."""
    if not all(AUDIT in one.manifest.files for one in (bundle, twin)):
        return None
    row = gpu_named(gpu) if gpu is not None else default_gpu(bundle.manifest.backend.sms)
    backend = choose(bundle.manifest.backend.name)
    nms = bundle.manifest.nms
    graph = not backend.capabilities.uncaptured(nms.mode, nms.thresholds)
    int8, fp16 = (_figures(one, estimate(flow_of(one), row, batch, graph=graph)) for one in (bundle, twin))
    return Estimated(row.name, batch, int8, fp16, graph) if int8.ms and fp16.ms else None


def _figures(bundle: Bundle, found: Estimate) -> EngineFigures:
    plain = found.as_dict()
    size = bundle.file("model.engine").stat().st_size
    return EngineFigures(found.ms, plain["bound_ms"], found.bytes, len(found.layers), size)


def _timed(found: Worth, bundle: Bundle, twin: Bundle, measuring: Measuring, progress: Progress) -> Worth:
    """Both engines side by side, by latency and by layer."""
    timing = replace(measuring.timing, batches=(found.batch,))
    timed = bench((bundle.path, twin.path), options=timing, baseline=twin.path, progress=progress)
    profiling = replace(measuring.profiling, batch=found.batch)
    profiled = profile(bundle.path, options=profiling, against=twin.path, progress=progress)
    assert profiled.against is not None
    return replace(
        found,
        run_info=timed.targets[0].run_info,
        latency=timed.targets[0].points[0].ratio,
        slower=tuple(slower(profiled.profile, profiled.against)),
    )


def _keep(found: Worth, bundle: Bundle, twin: Bundle | None, output: Path) -> None:
    """Writes the answer into the bundle; where a bound has decided, ships the bundle that it decided for."""
    answer = (json.dumps(found.as_dict(), indent=1) + "\n").encode()
    if found.guard is None:
        bundle.add(WORTH, answer)
        return
    shipped, lent, changes = bundle, [], {}
    if found.guard.shipped != bundle.manifest.shipped:
        assert twin is not None, "nothing is shipped in the place of INT8 without having been compared"
        shipped, changes = twin, _asked(bundle.manifest, twin.manifest)
        lent = [name for name in (HISTOGRAMS, RANKING) if name in bundle.manifest.files]
    manifest = shipped.manifest.model_copy(update={**changes, "guard": found.guard})
    with BundleWriter(output) as writer:
        for source, names in ((shipped, shipped.manifest.files), (bundle, lent)):
            for name in names:
                writer.add(name, source.file(name).read_bytes())
        writer.add(WORTH, answer)
        writer.commit({name: getattr(manifest, name) for name in Manifest.model_fields})


def _asked(int8: Manifest, done: Manifest) -> dict[str, Any]:
    """What the manifest of a shipped FP16 bundle takes over from INT8's.

    It keeps what INT8 was asked for, and the hash of that, so that the same build again finds it up to date; and the
    key of the histograms, so that another build begins with them.
    """
    silu = done.silu
    if silu is not None and int8.silu is not None:
        silu = silu.model_copy(update={"asked": int8.silu.asked})
    return {
        "quantization": QuantizationPart(mode="none", histograms_key=int8.quantization.histograms_key),
        "silu": silu,
        "input_check": int8.input_check,
        "nms": done.nms.model_copy(update={"reason": int8.nms.reason}),
        "command": int8.command,
        "content_hash": int8.content_hash,
    }


def _reporting(job: Job) -> CocoDataset:
    """The annotated images; where a plan was chosen by its error, none of those that it was chosen by."""
    keep = job.options.keep
    assert keep.images is not None and keep.annotations is not None
    dataset = CocoDataset.load(keep.annotations, keep.images, job.config.classes)
    return dataset if keep.max_latency is None else apart_from(dataset, select_images(job.options.calibration).paths)


def _compared(pair: Sequence[Path], dataset: CocoDataset, progress: Progress) -> Comparison:
    cache = ImageCache()

    def scored(path: Path, stage: str) -> Evaluation:
        return evaluate(Detector.open(path), dataset, lambda done, total: progress(stage, done, total), cache)

    return compare(scored(pair[0], "mAP with INT8"), scored(pair[1], "mAP without INT8"))
