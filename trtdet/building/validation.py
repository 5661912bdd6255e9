"""Checks of options: a wrong option is an error before anything is decoded, run or written."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import get_args

from trtdet.backends import Capabilities, EngineTarget, OwnCalibrator, cuda
from trtdet.building.costs import named_gpu
from trtdet.bundle import PluginPart
from trtdet.config import Config
from trtdet.data import CocoDataset
from trtdet.errors import BackendError, CalibrationError, ConfigError, TrtdetWarning
from trtdet.evaluation.confidence import apart_from
from trtdet.files import cluster, sha256_file
from trtdet.options import (
    BuildOptions,
    CalibrationOptions,
    PlanOptions,
    SweepOptions,
    TuneOptions,
    rows_of,
    spelled,
    value_of,
)
from trtdet.options.fields import rule_percentile
from trtdet.plans.front import AGREEMENT, MAP, limit_of

FIRST_FP8 = 89
"""First compute capability with FP8."""

_spelled = partial(spelled, BuildOptions)
_KEEP, _LATENCY = _spelled("plan.keep_fp16"), _spelled("plan.max_latency")
_VAL_IMAGES, _ANNOTATIONS = _spelled("plan.val_images"), _spelled("plan.annotations")
_NO_IMAGES = "{} needs calibration images: a folder or a list of file names with --images"


def check_build(options: BuildOptions, caps: Capabilities) -> None:
    """Refuses wrong options of a build. Raises ConfigError: two options contradict each other; BackendError: the
    backend lacks a requested feature; CalibrationError: the calibration cache or the histograms do not exist."""
    plan = options.plan
    _check_quantized(options)
    _check_engine(options, caps)
    if plan.fp8 and options.implicit:
        raise ConfigError(f"{_spelled('plan.fp8')} is written into the model; leave --quantization implicit out")
    check_targets(options, caps)
    if not options.int8:
        if options.least_speedup is not None:
            raise ConfigError(f"{_spelled('guard')} is about INT8's speed; leave it out with --{options.precision}")
        rows = [row for row in rows_of(BuildOptions) if row.path[0] == "plan"]
        wrong = next((row for row in rows if value_of(options, row) != row.default), None)
        if wrong is not None:
            raise ConfigError(f"{wrong.spelled} is about INT8; leave it out with --{options.precision}")
        return
    if options.implicit:
        _check_implicit(options, caps)
    _check_plan(plan, caps)
    if options.calibration.cache is not None:
        return
    lost = [sm for sm in EngineTarget.of(options).sms if sm in caps.sms_without_int8]
    if lost:
        raise BackendError(
            f"--sm {lost[0]} together with --int8: with compute capability {lost[0] / 10} among the targets "
            f"{caps.name} {caps.version} runs every convolution in float without saying so; leave {lost[0]} out, "
            "or build for it alone with --fp32"
        )
    if options.calibrated:
        check_calibration(options.calibration, () if options.implicit else options.corrections)
    warn_of_percentile(options.calibration.rule)
    if plan.ranked and options.calibration.images is None:
        raise ConfigError("a ranking of the convolutions is measured on images: give --images, or name them")


def _check_quantized(options: BuildOptions) -> None:
    """Refuses what a quantised model decides itself, and ``calibration.rescale`` for a float model."""
    again, rescaled = f"{_spelled('calibration.rescale')}=true", options.calibration.rescale
    if rescaled and not options.quantized:
        raise ConfigError(f"{again} is about a model that is quantised already, and this one is float; leave it out")
    if not (options.quantized and options.int8):
        return
    names = ["plan.int8_all", "plan.int8_attention", "plan.fp8", "effort", "quantization", "calibration.cache"]
    names += [] if rescaled else ["calibration.rule", "calibration.histograms"]
    rows = [row for row in rows_of(BuildOptions) if row.name in names and value_of(options, row) != row.default]
    wrong = next((row for row in rows if row.name != "effort" or options.effort != "none"), None)
    if wrong is not None:
        more = "" if rescaled else f"; {again} chooses the ranges anew"
        raise ConfigError(f"the model is quantised already: leave {wrong.spelled} out, as its pairs decide that{more}")


def _check_engine(options: BuildOptions, caps: Capabilities) -> None:
    engine, backend = options.engine, f"{caps.name} {caps.version}"
    if engine.version_compatible and not caps.version_compatible:
        raise BackendError(
            f"{backend} cannot make version-compatible engines; leave {_spelled('engine.version_compatible')} out"
        )
    if engine.hardware_compatible and not caps.hardware_compatible:
        raise BackendError(
            f"{backend} cannot make engines for GPUs later than those it builds for; leave "
            f"{_spelled('engine.hardware_compatible')} out" + (" and name them with --sm" if caps.sms else "")
        )
    if engine.embed_plugins and not engine.plugins:
        libraries = _spelled("engine.plugins")
        raise ConfigError(f"{_spelled('engine.embed_plugins')} needs the libraries: give them with {libraries}")
    unknown = [name for name in engine.tactic_sources or () if name not in caps.tactic_sources]
    if unknown or (engine.tactic_sources is not None and not caps.tactic_sources):
        allowed = f"allowed: {', '.join(caps.tactic_sources)}" if caps.tactic_sources else "leave it out"
        raise BackendError(f"{backend} has no tactic source{f' {unknown[0]!r}' if unknown else 's'}; {allowed}")
    if not engine.tf32 and not caps.tf32:
        raise BackendError(f"{backend} does not compute in TF32; leave {_spelled('engine.tf32')}=false out")
    if engine.dla is not None:
        _check_dla(options, caps)
    if not options.implicit:
        for name in ("calibrator", "cache"):
            if getattr(options.calibration, name) != getattr(CalibrationOptions, name):
                option = _spelled(f"calibration.{name}")
                raise ConfigError(f"{option} belongs to --quantization implicit; Q/DQ nodes hold trtdet's own ranges")
    elif not options.int8:
        raise ConfigError(f"--quantization implicit is about INT8; leave it out with --{options.precision}")
    named_gpu(options)  # raises for an unknown GPU
    if options.least_speedup is not None and options.int8 and not caps.makes_engine:
        raise BackendError(
            f"{_spelled('guard')} compares the speed of engines, and {caps.name} makes none; leave it out, or choose "
            "another --backend"
        )


def _check_dla(options: BuildOptions, caps: Capabilities) -> None:
    option, batch = f"{_spelled('engine.dla')}={options.engine.dla}", options.batch
    if not caps.dla:
        raise BackendError(
            f"{caps.name} {caps.version} has no DLA here",
            f"leave {option} out, or build on a Jetson Xavier or Orin with TensorRT up to 10.7, or from 11.4.1 on",
        )
    if options.precision == "fp32":
        raise ConfigError(f"the DLA computes in FP16 and INT8; leave {option} or --fp32 out")
    if options.int8 and not options.implicit and caps.implicit is not None:
        raise ConfigError(
            f"the DLA takes no Q/DQ nodes with {caps.name} {caps.version}: give --quantization implicit with {option}"
        )
    if batch is not None and batch[0] != batch[2]:
        sizes = ":".join(map(str, batch))
        raise ConfigError(f"the DLA takes one batch size, not {sizes}: give --batch {batch[1]} with {option}")


def check_targets(options: BuildOptions | SweepOptions, caps: Capabilities) -> None:
    """Refuses compute capabilities that the backend cannot build for, and FP8 if the backend or a GPU lacks it."""
    sms = EngineTarget.of(options).sms
    if caps.makes_engine:
        # Without ``caps.sms`` a backend builds for the local GPU only; without a GPU, choosing it has already failed.
        possible = caps.sms or tuple(device.sm for device in cuda.devices()[:1])
        impossible = [sm for sm in sms if sm not in possible]
        if impossible and possible:
            hint = "" if caps.sms else "; leave --sm out, or use --backend tensorrt-rtx, which builds for other GPUs"
            raise BackendError(
                f"{caps.name} {caps.version} cannot build for compute capability {impossible[0]}; allowed: "
                f"{', '.join(map(str, possible))}{hint}"
            )
    if options.plan.fp8 and not caps.fp8:
        raise BackendError(
            f"{caps.name} {caps.version} has no FP8 for products of matrices; allowed: TensorRT 10 and later, "
            "tensorrt-rtx"
        )
    older = [sm for sm in sms or caps.default_sms if options.plan.fp8 and sm < FIRST_FP8]
    if older:
        raise BackendError(
            f"compute capability {older[0]} has no FP8, which came with {FIRST_FP8}",
            "give newer ones with --sm, such as --sm 89 120",
        )


def _check_implicit(options: BuildOptions, caps: Capabilities) -> None:
    calibration, plan = options.calibration, options.plan
    if caps.implicit is None:
        raise BackendError(
            f"{caps.name} {caps.version} has no calibrators, so it cannot quantize implicitly; use --quantization "
            "explicit, which writes the same ranges into the model as Q/DQ nodes"
        )
    if options.effort not in ("none", BuildOptions.effort):
        raise ConfigError(
            f"corrections are made in the Q/DQ model, which --quantization implicit has not; leave "
            f"{_spelled('effort')} out"
        )
    if calibration.calibrator == "tensorrt" and calibration.rule_name not in get_args(OwnCalibrator):
        raise ConfigError(
            f"TensorRT has no calibrator for --calib {calibration.rule}; allowed with "
            f"{_spelled('calibration.calibrator')}=tensorrt: {', '.join(get_args(OwnCalibrator))}"
        )
    if calibration.calibrator == "tensorrt" and calibration.images is None:
        raise ConfigError("TensorRT's own calibrators look at images: give them with --images")
    if plan.limited:
        limit = limit_of(plan)
        option = _LATENCY if limit is None else limit[0].option
        raise ConfigError(f"{option} scores Q/DQ models; with --quantization implicit give {_KEEP}")
    if calibration.cache is not None and not calibration.cache.is_file():
        raise CalibrationError(f"the calibration cache '{calibration.cache}' does not exist; give another")
    if calibration.cache is not None and plan != plan.formats_alone():
        raise ConfigError(f"what stays in FP16 is found on images; leave it out with {_spelled('calibration.cache')}")


def _check_plan(plan: PlanOptions, caps: Capabilities) -> None:
    """Refuses contradicting options for FP16 layers, and a search that lacks its images or layer times."""
    values = {
        _KEEP: plan.keep_fp16,
        _spelled("plan.fp16_budget"): plan.fp16_budget,
        MAP.option: plan.max_map_drop,
        AGREEMENT.option: plan.max_disagreement,
        _LATENCY: plan.max_latency,
    }
    used = [name for name, value in values.items() if value is not None]
    if len(used) > 1:
        raise ConfigError(f"{used[0]} and {used[1]} both say what stays in FP16: give one of them")
    limit, objective = limit_of(plan), _spelled("plan.objective")
    if plan.objective != "latency" and not plan.limited:
        raise ConfigError(
            f"{objective}={plan.objective} says what is cheap within a limit: give {MAP.option} or {AGREEMENT.option}"
        )
    if _LATENCY in used and plan.objective == "size":
        raise ConfigError(f"{_LATENCY} limits milliseconds; leave {objective}=size out")
    if _LATENCY in used and not caps.lists_layers:
        raise BackendError(
            f"{_LATENCY}: {caps.name} lists no layers that a time could be estimated from; choose another --backend, "
            "such as tensorrt-rtx"
        )
    if plan.max_disagreement is None or plan.val_images is None:
        check_annotated(plan)
    if limit is not None and plan.val_images is None:
        if limit[0] is MAP:
            raise ConfigError(f"{MAP.option} measures mAP: give annotated images with {_VAL_IMAGES} and {_ANNOTATIONS}")
        raise ConfigError(
            f"{AGREEMENT.option} compares detections on images that ranges and corrections were not made from: give "
            f"some with {_VAL_IMAGES}; they need no annotations"
        )
    if plan.ranked:
        check_ray(plan)


def check_annotated(plan: PlanOptions) -> None:
    """Refuses annotated images without annotations, and the reverse."""
    if (plan.val_images is None) != (plan.annotations is None):
        raise ConfigError(f"{_VAL_IMAGES} and {_ANNOTATIONS} belong together: give both")


def check_measured(plan: PlanOptions) -> None:
    """Refuses annotations without their images; images alone are enough for an agreement."""
    if plan.annotations is not None and plan.val_images is None:
        raise ConfigError(f"{_ANNOTATIONS} are those of {_VAL_IMAGES}: give both")


def check_ray(plan: PlanOptions) -> None:
    """Refuses Ray if it is not installed."""
    if plan.ray is not None and importlib.util.find_spec("ray") is None:
        raise BackendError("Ray is not installed here", cluster.PIP)


def check_calibration(calibration: CalibrationOptions, correct: tuple[str, ...]) -> None:
    """Refuses a calibration that lacks images, or whose histograms do not exist."""
    if calibration.images is None and calibration.histograms is None:
        raise ConfigError(_NO_IMAGES.format("INT8"))
    if calibration.histograms is not None and not calibration.histograms.is_file():
        raise CalibrationError(f"'{calibration.histograms}' does not exist; make it with 'trtdet calibrate'")
    # Histograms are enough for a threshold rule, but corrections need images.
    if calibration.images is None and correct:
        raise ConfigError(
            f"corrections are worked out on images: give --images, or build with {_spelled('effort')} none"
        )


def check_counted(calibration: CalibrationOptions) -> None:
    """Refuses to compare numbers of images without images."""
    if calibration.histograms is not None:
        raise ConfigError(
            f"histograms do not tell which image a value is from: leave {_spelled('calibration.histograms')} out and "
            "give --images"
        )
    if calibration.images is None:
        raise ConfigError(_NO_IMAGES.format("a comparison of numbers of images"))


def warn_of_percentile(*rules: str) -> None:
    """Warns if the percentile of a rule is below 50, as the user may have given a share (0..1) instead of percent."""
    percentile = min((rule_percentile(rule) for rule in rules if rule.startswith("percentile")), default=100.0)
    if percentile < 50:
        meant = 100 * percentile if percentile <= 1 else 99.99
        message = f"percentile {percentile:g} is in percent: all but the smallest {percentile:g} % of the values exceed"
        warnings.warn(f"{message} such a range; {meant:.10g} is likely meant", TrtdetWarning, stacklevel=3)


def check_sweep(options: SweepOptions) -> None:
    """Refuses a sweep without calibration images or annotated images."""
    if options.calibration.images is None:
        raise ConfigError(_NO_IMAGES.format("a sweep"))
    if options.plan.val_images is None or options.plan.annotations is None:
        raise ConfigError(f"a sweep scores its variants on annotated images: give {_VAL_IMAGES} and {_ANNOTATIONS}")


def check_tune(options: TuneOptions) -> None:
    """Refuses wrong options of a tune that :func:`check_build` accepts."""
    build, plan = options.build, options.build.plan
    if not build.int8 or build.implicit:
        raise ConfigError("a tune is about INT8 with Q/DQ nodes; leave --fp16, --fp32 and --quantization implicit out")
    if plan.keep_fp16 is not None or plan.limited or plan.fp16_budget is not None or build.tuned is not None:
        raise ConfigError("a tune finds plans itself; leave out what else says what stays in FP16")
    if build.calibration.images is None:
        raise ConfigError(_NO_IMAGES.format("a tune"))
    check_measured(plan)
    check_ray(plan)


def plugin_parts(plugins: tuple[Path, ...], caps: Capabilities, embedded: bool = False) -> tuple[PluginPart, ...]:
    """Checks the plugin libraries. Raises BackendError: the backend loads no plugins, a file is missing, or two have
    the same name."""
    if plugins and not caps.loads_plugins:
        raise BackendError(
            f"{caps.name} {caps.version} loads no plugin libraries; leave engine.plugins out, or use --backend tensorrt"
        )
    for path in plugins:
        if not path.is_file():
            raise BackendError(f"plugin library '{path}' does not exist; build it in plugins/ and give its path")
    names = [path.name for path in plugins]
    if len(set(names)) < len(names):
        raise BackendError(
            f"plugin libraries have the same file name ({', '.join(names)}): the bundle keeps them by it"
        )
    return tuple(PluginPart(file=path.name, sha256=sha256_file(path), embedded=embedded) for path in plugins)


def scored_images(plan: PlanOptions, config: Config) -> CocoDataset | None:
    """The images for measuring accuracy, not decoded yet; None if the options name none. Raises DataError: there are no
    images; or the annotations cannot be read, or do not fit the images or the classes."""
    if plan.val_images is None:
        return None
    if plan.annotations is None:
        return CocoDataset.unannotated(plan.val_images, config.classes)
    return CocoDataset.load(plan.annotations, plan.val_images, config.classes)


def bounding_images(plan: PlanOptions, config: Config, calibrating: Collection[Path]) -> CocoDataset | None:
    """The images that score plans. A limit on accuracy loss excludes calibration images, with a warning. Raises
    DataError: see :func:`scored_images`; or all images are calibration images."""
    dataset, limit = scored_images(plan, config), limit_of(plan)
    if dataset is None or limit is None:
        return dataset
    apart = apart_from(dataset, calibrating)
    left_out = len(dataset.images) - len(apart.images)
    if left_out:
        warnings.warn(
            f"{left_out} of {len(dataset.images)} images of '{plan.val_images}' are calibration images too: ranges and "
            f"corrections were made from these, so that they show nothing for {limit[0].option} and are left out",
            TrtdetWarning,
            stacklevel=3,
        )
    return apart
