"""The public functions for Python and the command line: build a bundle, calibrate a model, rank its convolutions."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trtdet.audit import Audit
from trtdet.building.assembly import assemble
from trtdet.building.bundle import AUDIT, BUILD_LOG, log_kept
from trtdet.building.comparison import Worth, compare_with_fp16, fp16_alone, has_comparison, staging_folder
from trtdet.building.corrections import prepared
from trtdet.building.default_plan import images_to_score, timeable
from trtdet.building.forecasts import foresee
from trtdet.building.graph import host_graph
from trtdet.building.job import CheckedBuild, Job, checked_build, job_of
from trtdet.building.plan import Planned, ranking
from trtdet.building.ranges import Calibrated, calibrated, check_detections, select_images
from trtdet.building.validation import check_annotated, check_calibration, check_ray, scored_images, warn_of_percentile
from trtdet.bundle import Bundle
from trtdet.config import Config
from trtdet.data import ImageCache
from trtdet.errors import TrtdetWarning
from trtdet.evaluation.plausibility import warn_of
from trtdet.files import remove_stale
from trtdet.options import BuildOptions, CalibrationOptions, PlanOptions, SensitivityOptions, spelled
from trtdet.plans.front import LatencyPlan, TradeOff
from trtdet.plans.measuring import Method
from trtdet.plans.ranking import check_rankable
from trtdet.plans.scores import Sensitivity
from trtdet.progress import Expect, Progress, silent, unheard

_INT8 = spelled(BuildOptions, "plan.int8_all")


@dataclass(frozen=True, repr=False)
class BuildResult:
    """A finished bundle. If it was up to date, ``audit``, ``trade_off`` and ``within`` are None."""

    bundle: Bundle
    audit: Audit | None = None  # also None if the backend lists no layers
    up_to_date: bool = False
    trade_off: TradeOff | None = None  # plans scored for a limit on accuracy loss
    worth: Worth | None = None  # accuracy and speed of INT8 against FP16
    within: LatencyPlan | None = None  # the plan for a latency limit

    def __repr__(self) -> str:
        """A few lines: the bundle, and what INT8 is worth."""
        lines = [repr(self.bundle)]
        if self.up_to_date:
            lines.append("it was up to date, nothing was built")
        if self.worth is not None:
            lines.append(str(self.worth))
        if self.trade_off is not None:
            lines.append(self.trade_off.summary)
        if self.audit is not None:
            lines.append("layers as they were built: .audit")
        return "BuildResult\n  " + "\n  ".join(line for part in lines for line in textwrap.wrap(part, 100))


def build(
    model: Path | str,
    config: Config,
    output: Path | str,
    options: BuildOptions = BuildOptions(),
    progress: Progress = silent,
    expect: Expect = unheard,
) -> BuildResult:
    """Builds a bundle from a float ONNX model, and compares INT8 with FP16.

    A bundle at ``output`` from the same model, configuration, images and options is kept. From another bundle of this
    model the histograms are reused if they fit. If INT8 is not faster than FP16, a warning says so. If its speed-up is
    below ``options.least_speedup``, the bundle gets the FP16 engine. If INT8 is estimated to gain nothing anywhere, a
    warning says so before any image is run, and FP16 alone is built.

    Args:
        config: the model's configuration with NMS thresholds.
        output: the bundle's folder.
        progress: called for every image and stage.
        expect: called once with the list of stages, after the checks.

    Raises:
        TrtdetError: a step failed; its subclass names the kind of failure. ``output`` is unchanged. A failing
            builder's messages are in a file beside ``output``, which the error names.
    """
    return build_job(job_of(Path(model), config, Path(output), options=options, repeatable=True), progress, expect)


def build_job(
    job: Job,
    progress: Progress,
    expect: Expect,
    fastest: Callable[[CheckedBuild, Progress], BuildResult] | None = None,
) -> BuildResult:
    """As :func:`build`. ``fastest`` builds in its place where a GPU here runs the engine, the plan is open, images are
    left to score, and no bundle is up to date."""
    options = job.options
    audit: Audit | None = None
    planned: Planned | None = None
    with log_kept(job.beside(f"failed-{BUILD_LOG}")), staging_folder(job) as place:
        checked = checked_build(job, progress)
        current = checked.up_to_date
        if fastest is not None and _has_candidates(checked) and current is None:
            return fastest(checked, progress)
        expect(foresee(checked).steps)
        alone = checked.default is not None and checked.default.fp16_alone
        if alone:
            warnings.warn(f"{checked.default}; {_INT8} insists on INT8", TrtdetWarning, stacklevel=3)
            bundle, audit = fp16_alone(checked, progress)
        elif current is None:
            bundle, audit, planned = assemble(checked, place, progress)
        else:
            # Left by a build that was killed after its bundle was complete.
            job.beside("reconstruction").unlink(missing_ok=True)
            remove_stale(job.output)
            bundle, check = current, current.manifest.input_check
            if check is not None and options.calibration.check_input:
                warn_of(check["warning"])
        worth = None
        compared = alone or (current is not None and has_comparison(current, options))
        if options.int8 and options.compare and not compared:
            worth = compare_with_fp16(job, bundle, progress=progress, estimated=checked.estimated)
            bundle = Bundle(job.output, verify=False)
            if bundle.manifest.shipped != "int8":
                audit = Audit.load(bundle.file(AUDIT)) if AUDIT in bundle.manifest.files else None
                for warning in audit.warnings if audit is not None else ():
                    warnings.warn(warning, TrtdetWarning, stacklevel=3)
    # A plan without INT8 layers has its own warning.
    if worth is not None and worth.warning and bundle.manifest.precision.int8:
        warnings.warn(worth.warning, TrtdetWarning, stacklevel=3)
    trade_off, within = (planned.trade_off, planned.within) if planned is not None else (None, None)
    return BuildResult(
        bundle, audit=audit, up_to_date=current is not None, trade_off=trade_off, worth=worth, within=within
    )


def _has_candidates(build: CheckedBuild) -> bool:
    """Whether candidates are timed on a GPU of this machine. Warns if only the images to score them are missing."""
    if not timeable(build.options, build.backend.capabilities):
        return False
    if images_to_score(build.options):
        return True
    warnings.warn(
        "every image calibrates, so that none can score candidates: only the default plan is built and timed; give "
        "--val-images, or a smaller --num-images",
        TrtdetWarning,
        stacklevel=4,
    )
    return False


def calibrate(
    model: Path | str,
    config: Config,
    options: CalibrationOptions,
    progress: Progress = silent,
    quantization: Literal["explicit", "implicit"] = "explicit",
    attention: bool = False,
) -> Calibrated:
    """Runs calibration images through a float ONNX model and chooses the range of each activation for INT8.

    Args:
        progress: called for every image.
        quantization: ``explicit`` gives ranges for the inputs of Q/DQ nodes; ``implicit`` for every tensor that
            TensorRT may run in INT8, about four times as many.
        attention: include the inputs of products of two activations, for ``int8_attention``.

    Raises:
        ModelError, DataError, CalibrationError, ConfigError: see the messages; nothing has been written.
    """
    check_calibration(options, ())
    warn_of_percentile(options.rule)
    graph = host_graph(Path(model), config, plan=PlanOptions(int8_attention=attention))
    selected = select_images(options)
    plausibility = check_detections(graph, options, selected, progress=progress)
    selected = replace(selected, cache=ImageCache(0))  # no later pass would read it
    ranged = calibrated(graph, options, selected, implicit=quantization == "implicit", progress=progress)
    # Includes ranges for convolutions that only a later plan puts into INT8.
    ranges = prepared(ranged, options, (), progress=progress, plan=graph.placement.plan, share=False).ranges
    return replace(ranged, ranges=ranges, seen=plausibility)


def sensitivity(
    model: Path | str,
    config: Config,
    options: SensitivityOptions,
    rows: Path | str | None = None,
    progress: Progress = silent,
) -> Sensitivity:
    """Ranks the convolutions of a float ONNX model by their accuracy loss in INT8.

    Each finished row is appended to ``rows``; an existing file is resumed. ``progress`` is called for every image and
    row.

    Raises:
        ModelError, DataError, CalibrationError, ConfigError, BackendError: see the messages.
    """
    calibration, plan = options.calibration, options.plan
    check_calibration(calibration, options.corrections)
    warn_of_percentile(calibration.rule)
    check_annotated(plan)
    check_ray(plan)
    graph = host_graph(Path(model), config, plan=plan)
    check_rankable(graph.plan)
    dataset = scored_images(plan, config)
    selected = select_images(calibration)
    check_detections(graph, calibration, selected, progress=progress)
    ranged = calibrated(graph, calibration, selected, progress=progress)
    corrected = prepared(ranged, calibration, options.corrections, progress=progress)
    method = Method(options.method, base="int8" if options.all_but_one else "fp32", dataset=dataset, nms=config.nms)
    return ranking(corrected, plan, method, rows=None if rows is None else Path(rows), progress=progress)
