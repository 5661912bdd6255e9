"""The verbs: calibrate a model, rank its convolutions, build its bundle. The command line and Python call the same."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trtdet.audit import Audit
from trtdet.bundle import Bundle
from trtdet.config import Config
from trtdet.data import ImageCache
from trtdet.errors import ConfigError, TrtdetWarning
from trtdet.evaluation.plausibility import warn_of
from trtdet.mixed_precision.breakdown import Breakdown
from trtdet.mixed_precision.ranking import check_rankable, rank
from trtdet.mixed_precision.scores import Sensitivity
from trtdet.mixed_precision.subject import Method
from trtdet.mixed_precision.trade_off import TradeOff
from trtdet.pipeline.accuracy import report_accuracy
from trtdet.pipeline.assembly import Job, assemble
from trtdet.pipeline.forecasts import foresee
from trtdet.pipeline.options import AUTO, BuildOptions, CalibrationOptions, SensitivityOptions
from trtdet.pipeline.stages.bundles import AUDIT, failed_log_of, log_kept
from trtdet.pipeline.stages.calibrating import Calibrated, calibrated, looked_at, select_images
from trtdet.pipeline.stages.correcting import prepared
from trtdet.pipeline.stages.rewriting import host_graph
from trtdet.pipeline.stages.within_time import Within
from trtdet.pipeline.validation import annotated_images, check_calibration, check_sensitivity, warn_of_percentile
from trtdet.pipeline.verdict import answered, place_of, weigh
from trtdet.pipeline.worth import Worth
from trtdet.progress import Expect, Progress, silent, unheard


@dataclass(frozen=True)
class BuildResult:
    """A finished bundle.

    Attributes:
        bundle: the bundle.
        audit: of the engine in it; None where no layers were listed, or the bundle was there already.
        up_to_date: it was there already.
        trade_off: what was tried for a bound on the loss.
        worth: what INT8 cost and gained; None where it was not compared.
        within: the plan within a time, where that was asked for and the bundle was not there already.
        accuracy: the accuracy report, where it was asked for and was not there already.
    """

    bundle: Bundle
    audit: Audit | None
    up_to_date: bool
    trade_off: TradeOff | None = None
    worth: Worth | None = None
    accuracy: Breakdown | None = None
    within: Within | None = None


def build(
    model: Path,
    config: Config,
    output: Path,
    options: BuildOptions = BuildOptions(),
    progress: Progress = silent,
    expect: Expect = unheard,
) -> BuildResult:
    """Builds a bundle from a float ONNX model, and compares INT8 with FP16.

    A bundle at ``output`` that was made from the same model, configuration, images and options is kept as it is; a
    bundle that differs only in what comes after the histograms lends them. Where INT8 is not faster than FP16 a warning
    says so; with ``options.guard`` the bundle then has the FP16 engine.

    Args:
        model: float ONNX model.
        config: its configuration, NMS thresholds included.
        output: the bundle's folder.
        options: precision, calibration, backend.
        progress: told of every image and every stage.
        expect: told of the stages to come, once the build is checked.

    Raises:
        TrtdetError: of the kind that says where it went wrong; the previous content of ``output`` is untouched. Where a
            builder fails, its messages are kept in a file beside ``output``, which the error names.
    """
    job = Job(model, config, output, options)
    with log_kept(failed_log_of(output)), place_of(job) as place:
        done = assemble(job, progress, place, lambda checked: expect(foresee(checked).steps))
        known = done.bundle.manifest.input_check
        if done.up_to_date and known is not None and options.calibration.check_input:
            warn_of(known["warning"])
        # A bound on the speed may have put FP16 in the place of INT8, of which there is nothing to report.
        asked = options.accuracy_report and done.bundle.manifest.shipped == "int8"
        accuracy = report_accuracy(job, done, progress) if asked else None
        wanted = options.precision == "int8" and options.measure
        if not wanted or (done.up_to_date and answered(done.bundle, options)):
            return BuildResult(
                done.bundle, done.audit, done.up_to_date, done.trade_off, accuracy=accuracy, within=done.within
            )
        worth = weigh(job, done.bundle, progress=progress)
    bundle, found = Bundle(output, verify=False), done.audit
    if bundle.manifest.shipped != options.precision:
        found = Audit.load(bundle.file(AUDIT)) if AUDIT in bundle.manifest.files else None
        for said in found.warnings if found is not None else ():
            warnings.warn(said, TrtdetWarning, stacklevel=2)
    # A plan with nothing in INT8 has been warned of.
    if worth is not None and worth.warning and bundle.manifest.precision.int8:
        warnings.warn(worth.warning, TrtdetWarning, stacklevel=2)
    return BuildResult(bundle, found, done.up_to_date, done.trade_off, worth, accuracy, done.within)


def calibrate(
    model: Path,
    config: Config,
    options: CalibrationOptions,
    progress: Progress = silent,
    quantization: Literal["explicit", "implicit"] = "explicit",
    attention: bool = False,
) -> Calibrated:
    """Runs calibration images through a model and chooses the range of every activation that INT8 needs.

    Args:
        model: float ONNX model.
        config: its configuration.
        options: images and rule.
        progress: told of every image.
        quantization: ``explicit`` for what Q/DQ nodes read; ``implicit`` for every tensor that TensorRT may run in
            INT8 by itself, about four times as many.
        attention: give what the products of two activations read a range as well, for ``int8_attention``.

    Raises:
        ModelError, DataError, CalibrationError, ConfigError: see the messages; nothing has been written.
    """
    if options.images is None and options.histograms is None:
        raise ConfigError("calibration needs images: a folder or a list of file names with --images")
    check_calibration(options, ())
    warn_of_percentile(options.percentile, options.rule)
    graph = host_graph(model, config, attention=attention)
    selected = select_images(options)
    seen = looked_at(graph, options, selected, progress)
    if options.rule != AUTO:
        selected = replace(selected, cache=ImageCache(0))  # there is no other pass that would read it
    ranged = calibrated(graph, options, selected, implicit=quantization == "implicit", progress=progress)
    # Whatever is put into INT8 later is to find its range here.
    ranges = prepared(ranged, options, (), progress, graph.placement.plan, share=False).ranges
    return replace(ranged, ranges=ranges, seen=seen)


def sensitivity(
    model: Path, config: Config, options: SensitivityOptions, rows: Path | None = None, progress: Progress = silent
) -> Sensitivity:
    """Ranks the convolutions of a model by what INT8 costs at each.

    Args:
        model: float ONNX model.
        config: its configuration.
        options: calibration, corrections and method.
        rows: a file that every finished row is appended to; an existing file is resumed.
        progress: told of every image and row.

    Raises:
        ModelError, DataError, CalibrationError, ConfigError, BackendError: see the messages.
    """
    check_sensitivity(options)
    graph = host_graph(model, config, attention=options.int8_attention, fp8=options.fp8)
    graph = replace(graph, int8_all=options.int8_all)
    check_rankable(graph.plan)
    dataset = annotated_images(options.images, options.annotations, config)
    if dataset is not None:
        dataset = dataset.first(options.num_images)
    selected = select_images(options.calibration)
    looked_at(graph, options.calibration, selected, progress)
    ranged = calibrated(graph, options.calibration, selected, progress=progress)
    ready = prepared(ranged, options.calibration, options.correct, progress)
    method = Method(options.method, options.base, dataset, config.nms)
    return rank(ready.subject(options.num_images, dataset), method, rows, options.ray, progress)
