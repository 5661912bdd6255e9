"""Compares an INT8 bundle with the same model in FP16; ``--guard X`` ships FP16 if INT8 is too slow."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trtdet.audit import Audit
from trtdet.audit.gpus import Gpu
from trtdet.audit.roofline import RATIO_WITHIN, estimate, flow_of
from trtdet.backends import EngineFacts, RunInfo, choose, obstacle
from trtdet.building.assembly import assemble
from trtdet.building.bundle import AUDIT, command_of
from trtdet.building.costs import gpu_of, named_gpu
from trtdet.building.job import CheckedBuild, Job, checked_build
from trtdet.building.plan import RANKING
from trtdet.building.ranges import HISTOGRAMS, select_images
from trtdet.building.validation import scored_images
from trtdet.building.worth import WORTH, read_worth
from trtdet.bundle import Bundle, BundleWriter, GuardPart, Manifest, QuantizationPart
from trtdet.config import NmsMode
from trtdet.data import CocoDataset, ImageCache
from trtdet.errors import TrtdetWarning
from trtdet.evaluation.comparison import Comparison, compare, spread_text
from trtdet.evaluation.confidence import apart_from
from trtdet.evaluation.parts import NAMES
from trtdet.evaluation.scoring import evaluate
from trtdet.files import scratch_folder
from trtdet.options import BuildOptions, CalibrationOptions, NmsOptions, PlanOptions
from trtdet.performance import BenchOptions, Difference, ProfileOptions, Ratio, bench, profile, slower
from trtdet.progress import Progress, silent, titled
from trtdet.quantization import Cause, PrecisionPlan
from trtdet.runtime.detector import Detector

GUARD = 1.02
"""Suggested X of ``--guard X``, the smallest speed-up of INT8 over FP16. NVIDIA's Q/DQ autotuner returns the model
without Q/DQ below the same value (Model Optimizer 0.47, github.com/NVIDIA/Model-Optimizer, pull request 2318)."""

_NAMED = 8
"""Number of convolutions that the sentence names; the file lists all."""


@dataclass(frozen=True)
class EngineFigures:
    """Estimate of an engine: time, memory traffic and kernel launches of one run, and the size of the file.

    ``bound_ms`` splits ``ms`` by what limits the kernels: ``memory``, ``arithmetic`` or ``launch``.
    """

    ms: float
    bound_ms: Mapping[str, float]
    bytes: int
    kernels: int
    file_bytes: int


@dataclass(frozen=True)
class Estimated:
    """Estimates of both engines from a GPU's published rates, without a measurement; see :mod:`trtdet.audit.roofline`.

    ``fp16`` uses the SiLU form that is best for FP16. Without ``cuda_graph`` launches take longer.
    """

    gpu: str
    batch: int
    int8: EngineFigures
    fp16: EngineFigures
    cuda_graph: bool = True

    @property
    def ratio(self) -> float:
        """Time of INT8 divided by that of FP16; below 1, INT8 is faster."""
        return self.int8.ms / self.fp16.ms

    @property
    def interval(self) -> tuple[float, float]:
        """Least and most that a measurement of ``ratio`` may show, at 90 % confidence."""
        return self.ratio / RATIO_WITHIN, self.ratio * RATIO_WITHIN

    @property
    def verdict(self) -> str:
        """Which of both is faster, as far as the estimate can tell."""
        low, high = self.interval
        return "INT8 is faster" if high < 1 else "FP16 is faster" if low > 1 else "cannot tell which is faster"

    def __str__(self) -> str:
        return f"INT8 against FP16 ({self.basis}): {self.times}: {self.verdict}; {self.sizes}"

    @property
    def times(self) -> str:
        """The ratio with its interval, as text."""
        low, high = self.interval
        return f"{self.ratio:.2f}x the time ({low:.2f} .. {high:.2f})"

    @property
    def basis(self) -> str:
        """GPU and batch of the estimate, as text for brackets."""
        return f"estimate for {self.gpu}, batch {self.batch}{'' if self.cuda_graph else ', without CUDA graphs'}"

    @property
    def sizes(self) -> str:
        """Memory traffic and file sizes of both engines."""
        int8, fp16 = self.int8, self.fp16
        moved = f"{int8.bytes / 1e6:.1f} MB moved against {fp16.bytes / 1e6:.1f} MB"
        return f"{moved}, engine {int8.file_bytes / 1e6:.1f} MB against {fp16.file_bytes / 1e6:.1f} MB"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = {"ratio": self.ratio, "interval": list(self.interval), "verdict": self.verdict, "said": str(self)}
        return {**asdict(self), **plain}


@dataclass(frozen=True)
class Worth:
    """Comparison of INT8 with the same model in another precision."""

    against: str  # the other precision, ``fp16`` or ``fp32``
    run_info: RunInfo | None = None  # machine of the runs; None if nothing was run
    comparison: Comparison | None = None  # difference of mAP; None without annotated images
    parts: tuple[Comparison, ...] = ()  # the same of masks, keypoints and rotated boxes
    batch: int = 1
    latency: Ratio | None = None  # of INT8 divided by the other's, below 1 is faster; None if engines cannot run here
    unmeasured: str = ""  # reason for a missing latency, else empty
    slower: tuple[Difference, ...] = ()  # convolutions that are slower in INT8, the worst first
    estimate: Estimated | None = None  # None if the engines' layers are unknown
    guard: GuardPart | None = None  # decision of ``--guard X``; None without it

    def __str__(self) -> str:
        """The measurement or the estimate in a sentence, and advice on convolutions that are slower in INT8."""
        if self.run_info is None:
            return str(self.estimate or f"INT8 not compared with FP16, as {self.unmeasured}")
        other, ratio, estimate = self.against.upper(), self.latency, self.estimate
        accuracy = "mAP not measured (give --val-images and --annotations)"
        if self.comparison is not None:
            measured = [f"{NAMES[part.of]} {spread_text(part.score)}" for part in (self.comparison, *self.parts)]
            accuracy = ", ".join(measured)
        if ratio is None:
            sentences = [f"INT8 against {other}: {accuracy}, latency not measured, as {self.unmeasured}"]
        else:
            interval = f"({ratio.low:.2f} .. {ratio.high:.2f}) at batch {self.batch}"
            sizes = f", {estimate.sizes}" if estimate is not None else ""
            sentences = [f"INT8 against {other}: {accuracy}, latency {ratio.value:.2f}x of {other} {interval}{sizes}"]
        sentences[0] += f"; on {self.run_info}"
        if ratio is not None and ratio.low > 1:
            sentences.append(f"INT8 is slower than {other} here")
        if ratio is None and estimate is not None:
            sentences.append(str(estimate))
        return ". ".join((*sentences, *filter(None, [self.advice])))

    @property
    def advice(self) -> str:
        """Option that moves slower convolutions to FP16; empty if none is slower."""
        names = [name for layer in self.slower for name in layer.convs]
        if not names:
            return ""
        gain = sum(layer.gain_ms for layer in self.slower)
        listed = ",".join(names[:_NAMED])
        rest = f" and {len(names) - _NAMED} more, see {WORTH}" if len(names) > _NAMED else ""
        return f"Slower in INT8, by {gain:.3f} ms in all: --keep-fp16 {listed}{rest}"

    @property
    def speedup(self) -> float | None:
        """Speed of INT8 divided by that of FP16, measured or else estimated; None if unknown."""
        if self.latency is not None:
            return 1 / self.latency.value
        return None if self.estimate is None else 1 / self.estimate.ratio

    @property
    def basis(self) -> str:
        """Source of ``speedup``, as text for brackets."""
        if self.latency is not None and self.run_info is not None:
            return f"measured on {self.run_info.device}, batch {self.batch}"
        return "" if self.estimate is None else self.estimate.basis

    def guarded(self, least: float, whose: str = "--guard") -> Worth:
        """Adds the decision of ``--guard X``, or of the default plan: INT8 is shipped if its speed-up over FP16 is at
        least ``least``."""
        speedup = self.speedup
        if speedup is None:
            reason = f"INT8 could not be compared with FP16, as {self.unmeasured}"
            return replace(self, guard=GuardPart(shipped="int8", least=least, reason=reason))
        gpu = "" if self.estimate is None else self.estimate.gpu
        times = f"{speedup:.2f} times"
        if self.latency is None and self.estimate is not None:
            low, high = (1 / bound for bound in reversed(self.estimate.interval))
            times += f" ({low:.2f} .. {high:.2f})"
        guard = GuardPart(
            shipped="int8" if speedup >= least else "fp16",
            least=least,
            speedup=speedup,
            how="estimated" if self.latency is None else "measured",
            on=self.run_info.device if self.latency is not None and self.run_info is not None else gpu,
            batch=self.batch,
            reason=f"INT8 is {times} as fast as FP16 ({self.basis}), and {whose} asks for {least:g}",
        )
        return replace(self, guard=guard)

    @property
    def warning(self) -> str:
        """Advice if INT8 is not faster than FP16; empty if ``--guard X`` decided, or the speed-up is unknown."""
        if self.guard is not None or self.speedup is None or self.speedup > 1:
            return ""
        times, what = f"{1 / self.speedup:.2f}x the time", "INT8 is not faster than FP16"
        if self.latency is None and self.estimate is not None:
            times = self.estimate.times
            if self.estimate.interval[0] <= 1:
                what = "cannot tell whether INT8 is faster than FP16"
        return (
            f"{what} ({self.basis}: {times}); --guard {GUARD:g} ships "
            "FP16 where INT8 does not pay; 'trtdet audit --gpu NAME' shows what bounds it and what gets in its way"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(replace(self, comparison=None, parts=(), estimate=None, guard=None))
        del plain["run_info"]
        return {
            **plain,
            "said": str(self),
            "advice": self.advice,
            "ran_on": str(self.run_info) if self.run_info is not None else None,
            "comparison": None
            if self.comparison is None
            else self.comparison.as_dict() | {part.of: part.as_dict() for part in self.parts},
            "speedup": self.speedup,
            "estimate": self.estimate.as_dict() if self.estimate is not None else None,
            "guard": self.guard.model_dump() if self.guard is not None else None,
        }


def compare_with_fp16(job: Job, bundle: Bundle, progress: Progress = silent, estimated: bool = False) -> Worth | None:
    """Builds the same model without INT8, compares both, and stores the comparison in the bundle.

    If engines can run here, latency, layers and mAP are measured against FP16. Otherwise times are estimated from the
    layers, and mAP is measured against FP32 on the CPU. mAP needs annotated images. With ``--guard X`` the shipped
    bundle, INT8 or FP16, is written to the job's output.

    ``bundle`` has INT8 and is at the output of its build ``job``, or in its :func:`staging_folder`; the annotated
    images are those of the job's plan. Engines are timed at their optimal batch. If estimates have chosen the plan,
    FP16 is shipped if INT8 turns out slower, as with ``--guard 1``. Returns None if no engine can be run or estimated,
    no images are annotated, and there is no ``--guard X``. Raises TrtdetError: the other bundle cannot be built, or one
    of the two cannot be run.
    """
    options, batch = job.options, bundle.manifest.input.shape.opt[0]
    # The search for a plan under a limit on mAP has already scored the models.
    annotated = options.plan.annotations is not None and options.plan.max_map_drop is None
    reason = "the bundle has no engine" if bundle.engine is None else obstacle(EngineFacts.of(bundle))
    scored = annotated and not (reason and bundle.manifest.quantization.mode == "implicit")
    engines = bundle.engine is not None and (not reason or AUDIT in bundle.manifest.files)
    if not (engines or scored or options.least_speedup is not None):
        return None
    worth = Worth("fp16", batch=batch, unmeasured=reason)
    nms: NmsMode | Literal["auto"] = "auto" if bundle.manifest.nms.embedded else bundle.manifest.nms.mode
    with scratch_folder(bundle.path) as folder:
        own = fp16_options(job, bundle.manifest.backend.name, nms=nms, shipped=estimated)
        twin = _built(job, folder, own, progress=progress) if engines else None
        if twin is not None:
            worth = replace(worth, estimate=_estimated(bundle, twin, named_gpu(options), batch=batch))
        if twin is not None and not reason:
            timing, paths = BenchOptions((batch,), seconds=2.0), (bundle.path, twin.path)
            timed = bench(paths, options=timing, baseline=twin.path, progress=progress).targets[0]
            profiled = profile(bundle.path, options=ProfileOptions(batch), against=twin.path, progress=progress)
            assert profiled.against is not None
            worse = tuple(slower(profiled.profile, profiled.against))
            worth = replace(worth, run_info=timed.run_info, latency=timed.points[0].ratio, slower=worse)
        if scored:
            fp32 = BuildOptions(precision="fp32", nms=NmsOptions(mode=nms), backend="onnxruntime", batch=options.batch)
            run = twin if twin is not None and not reason else None
            other = run or _built(job, folder, fp32, progress=progress)
            dataset, cache = comparison_images(job), ImageCache()
            int8_score, other_score = (
                evaluate(Detector.open(path), dataset, lambda *step, stage=stage: progress(stage, *step), cache=cache)
                for path, stage in ((bundle.path, "mAP with INT8"), (other.path, "mAP without INT8"))
            )
            # The other is in a temporary folder, whose name would be another in each build.
            other_score = replace(other_score, file=Path(other_score.file).name)
            comparison = compare(int8_score, other_score)
            parts = tuple(compare(int8_score, other_score, of=part) for part in int8_score.scored_parts)
            ran_on = worth.run_info or comparison.reference.run_info
            worth = replace(worth, against=other.manifest.shipped, run_info=ran_on, comparison=comparison, parts=parts)
        if options.least_speedup is not None:
            worth = worth.guarded(options.least_speedup)
        elif estimated and worth.speedup is not None and worth.speedup < 1:
            worth = worth.guarded(1.0, whose="the default plan")
        _keep(worth, bundle, twin, output=job.output)
    return worth


def comparison_images(job: Job) -> CocoDataset:
    """The annotated images. A latency limit excludes the calibration images, as they chose the plan."""
    dataset = scored_images(job.options.plan, job.config)
    assert dataset is not None
    if job.options.plan.max_latency is None:
        return dataset
    return apart_from(dataset, select_images(job.options.calibration).paths)


@contextmanager
def staging_folder(job: Job) -> Iterator[Path]:
    """Folder of the new bundle: the output itself, or with ``--guard X`` a temporary folder beside it. Raises
    OutputError if the output is not a bundle, or cannot be written."""
    if job.options.least_speedup is None:
        yield job.output
        return
    with BundleWriter(job.output):
        pass  # an unwritable output fails before the work
    with scratch_folder(job.output) as folder:
        yield folder / "int8"


def has_comparison(bundle: Bundle, options: BuildOptions) -> bool:
    """Whether a bundle has a comparison for the requested GPU, or needs none, as the default plan is FP16 alone."""
    if bundle.manifest.guard is not None and WORTH not in bundle.manifest.files:
        return True
    if WORTH not in bundle.manifest.files or (options.least_speedup is not None and bundle.manifest.guard is None):
        return False
    gpu = named_gpu(options)
    if gpu is None:
        return True
    estimated = read_worth(bundle)["estimate"]
    return estimated is None or estimated["gpu"] == gpu.name


def fp16_options(job: Job, backend: str, nms: NmsMode | Literal["auto"], shipped: bool = False) -> BuildOptions:
    """Options for the same model in FP16, which may be ``shipped`` also without ``--guard X``.

    SiLU has the backend's default form: the plugin helps INT8, but FP16 computes SiLU in the kernel of the convolution
    before it. If FP16 may be shipped, the calibration images find values that exceed FP16.
    """
    options, calibration = job.options, CalibrationOptions()
    timings = options.engine.timing_cache or job.beside("timing-cache")
    if shipped or options.least_speedup is not None:
        calibration = replace(options.calibration.images_alone(), check_input=False)
    return replace(
        options,
        precision="fp16",
        backend=backend,
        nms=replace(options.nms, mode=nms),
        calibration=calibration,
        plan=PlanOptions(),
        silu="auto",
        quantization="explicit",
        engine=replace(options.engine, embed_plugins=False, plugins=(), gpu=None, timing_cache=timings),
        guard="warn",
        from_=None,
        tuned=None,
    )


def _built(job: Job, folder: Path, options: BuildOptions, progress: Progress) -> Bundle:
    """Builds the same model in another precision, without repeating the warnings of the INT8 build."""
    tell = titled(progress, f"{options.precision.upper()} to compare with")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)
        twin = checked_build(replace(job, output=folder / options.precision, options=options), tell)
        return assemble(twin, progress=tell)[0]


def _estimated(bundle: Bundle, twin: Bundle, gpu: Gpu | None, batch: int) -> Estimated | None:
    """Roofline estimates of both engines; None if their layers are unknown."""
    if not all(AUDIT in each.manifest.files for each in (bundle, twin)):
        return None
    row, nms = gpu or gpu_of(None, bundle.manifest.backend.sms), bundle.manifest.nms
    graph = not choose(bundle.manifest.backend.name).capabilities.uncaptured(nms.mode, nms.thresholds)
    figures = []
    for each in (bundle, twin):
        line, size = estimate(flow_of(each), row, batch, graph=graph), each.file("model.engine").stat().st_size
        bound, kernels = line.as_dict()["bound_ms"], len(line.layers)
        figures.append(EngineFigures(line.ms, bound_ms=bound, bytes=line.bytes, kernels=kernels, file_bytes=size))
    int8, fp16 = figures
    return Estimated(row.name, batch=batch, int8=int8, fp16=fp16, cuda_graph=graph) if int8.ms and fp16.ms else None


def _keep(worth: Worth, bundle: Bundle, twin: Bundle | None, output: Path) -> None:
    """Stores the comparison in the bundle; with ``--guard X`` writes the chosen bundle to the output.

    A shipped FP16 bundle keeps the command and content hash of INT8, so that the same build finds it up to date. It
    keeps the histograms too, so that another build can reuse them.
    """
    answer = (json.dumps(worth.as_dict(), indent=1) + "\n").encode()
    if worth.guard is None:
        bundle.add(WORTH, answer)
        return
    shipped, int8 = bundle, bundle.manifest
    files: dict[str, bytes] = {}
    changes: dict[str, Any] = {}
    if worth.guard.shipped != int8.shipped:
        assert twin is not None, "nothing is shipped in the place of INT8 without having been compared"
        shipped, silu = twin, twin.manifest.silu
        if silu is not None and int8.silu is not None:
            silu = silu.model_copy(update={"asked": int8.silu.asked})
        changes = {
            "quantization": QuantizationPart(mode="none", histograms_key=int8.quantization.histograms_key),
            "silu": silu,
            "input_check": int8.input_check,
            "nms": twin.manifest.nms.model_copy(update={"reason": int8.nms.reason}),
            "command": int8.command,
            "content_hash": int8.content_hash,
        }
        files = {name: bundle.file(name).read_bytes() for name in (HISTOGRAMS, RANKING) if name in int8.files}
    rewritten(output, shipped, files={**files, WORTH: answer}, changes={**changes, "guard": worth.guard})


def rewritten(output: Path, shipped: Bundle, files: Mapping[str, bytes], changes: Mapping[str, Any]) -> Bundle:
    """Writes ``shipped`` again, with these files added or replaced by name, and some parts of the manifest changed."""
    manifest = shipped.manifest.model_copy(update=dict(changes))
    with BundleWriter(output) as writer:
        for name in dict.fromkeys((*manifest.files, *files)):
            writer.add(name, files[name] if name in files else shipped.file(name).read_bytes())
        return writer.commit({name: getattr(manifest, name) for name in Manifest.model_fields})


def fp16_alone(build: CheckedBuild, progress: Progress = silent) -> tuple[Bundle, Audit | None]:
    """Builds FP16 in place of a default plan in which INT8 gains no time; nothing is calibrated or corrected.

    The bundle keeps the command and the content hash of the INT8 build, so that the same build finds it up to date. Its
    plan has the reasons of the default plan. Raises TrtdetError: a step failed; its subclass names the kind of failure.
    The previous bundle is unchanged.
    """
    job, options, graph, default = build.job, build.options, build.graph, build.default
    assert default is not None and default.fp16_alone
    nms: NmsMode | Literal["auto"] = "auto" if graph.passes.keep_embedded else graph.nms_mode
    fp16 = fp16_options(job, build.backend.capabilities.name, nms=nms, shipped=True)
    fp16 = replace(fp16, calibration=options.calibration.images_alone())
    with BundleWriter(job.output):
        pass  # an unwritable output fails before the work
    with scratch_folder(job.output) as folder:
        twin, audit, _ = assemble(checked_build(replace(job, output=folder / "fp16", options=fp16)), progress=progress)
        entries = dict(PrecisionPlan.load(twin.file("plan.json")).entries)
        for name, entry in entries.items():
            entries[name] = default.plan.entries[name] if entry.cause is Cause.REQUESTED else entry
        guard = GuardPart(
            shipped="fp16",
            least=default.least,
            speedup=default.speedup,
            how=None if default.speedup is None else "estimated",
            on=default.gpu,
            batch=default.batch,
            reason=default.reason,
        )
        silu = twin.manifest.silu
        changes = {
            "silu": None if silu is None else silu.model_copy(update={"asked": options.silu}),
            "nms": twin.manifest.nms.model_copy(update={"reason": graph.nms_reason}),
            "command": command_of(build),
            "content_hash": build.key,
            "guard": guard,
        }
        plan = PrecisionPlan(entries).to_json().encode()
        return rewritten(job.output, twin, files={"plan.json": plan}, changes=changes), audit
