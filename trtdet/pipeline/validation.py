"""All checks that need no images: a wrong option is an error before anything is decoded, run or written."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from trtdet.audit.gpus import gpu_named
from trtdet.backends import Capabilities, OwnCalibrator, cuda
from trtdet.bundle import Bundle
from trtdet.calibration import RULES
from trtdet.config import Config
from trtdet.data import CocoDataset
from trtdet.errors import BackendError, BundleError, CalibrationError, ConfigError, OutputError, TrtdetWarning
from trtdet.evaluation.images_apart import apart_from
from trtdet.files import cluster, sha256_file
from trtdet.mixed_precision.planning import check_bound, check_count, check_share, named
from trtdet.mixed_precision.trade_off import AGREEMENT, MAP, Figure
from trtdet.pipeline.options import (
    AUTO,
    BuildOptions,
    CalibrationOptions,
    KeepOptions,
    SensitivityOptions,
    TuneOptions,
)
from trtdet.pipeline.stages.planning import edited_plan, starting_plan
from trtdet.pipeline.stages.rewriting import Graph
from trtdet.quantization import CORRECTIONS, DEFAULT_CORRECTIONS
from trtdet.quantization.macs import DEPTHWISE

FIRST_FP8 = 89
"""The compute capability that FP8 came with."""

_KEEPING = {
    "keep": "--keep-fp16",
    "budget": "--fp16-budget",
    "max_map_drop": "--max-map-drop",
    "max_disagreement": "--max-disagreement",
    "max_latency": "--max-latency",
    "objective": "--objective",
    "images": "--val-images",
    "annotations": "--annotations",
    "num_images": "--rank-images",
    "ray": "--ray",
}
"""The options that are the fields of :class:`KeepOptions`."""


def check_build(options: BuildOptions, caps: Capabilities) -> None:
    """Refuses options that contradict each other or are beyond the backend.

    Raises:
        ConfigError: a value is out of range, or two options do not fit together.
        BackendError: the backend cannot do it.
        CalibrationError: the given cache or histograms do not exist.
    """
    _check_engine(options, caps)
    check_targets(options.sms, caps)
    _check_batch(options.batch)
    _check_guard(options, caps)
    _check_report(options)
    if options.fp8:
        if options.implicit:
            raise ConfigError("--fp8 is written into the model; leave --quantization implicit out")
        check_fp8(options.sms, caps)
    if options.precision != "int8":
        given = [flag for name, flag in _KEEPING.items() if getattr(options.keep, name) != getattr(KeepOptions, name)]
        if given:
            raise ConfigError(f"--{options.precision} leaves nothing in INT8 to keep out of it; leave {given[0]} out")
        if options.best:
            raise ConfigError(f"--best chooses between INT8 and FP16; leave it out with --{options.precision}")
        if options.int8_all:
            raise ConfigError(f"--int8-all belongs to --int8; leave it out with --{options.precision}")
        if options.int8_attention:
            raise ConfigError(f"--int8-attention belongs to --int8; leave it out with --{options.precision}")
        if options.fp8:
            raise ConfigError(f"--fp8 belongs to --int8; leave it out with --{options.precision}")
        return
    if options.implicit:
        _check_implicit(options, caps)
    _check_one_way(options.keep)
    _check_choice(options, caps)
    if options.cache is not None:
        return
    lost = [sm for sm in options.sms if sm in caps.sms_without_int8]
    if lost:
        raise BackendError(
            f"--sm {lost[0]} together with --int8: with compute capability {lost[0] / 10} among the targets "
            f"{caps.name} {caps.version} runs every convolution in float without saying so; leave {lost[0]} out, "
            "or build for it alone with --fp32"
        )
    check_calibration(options.calibration, () if options.implicit else options.correct)
    warn_of_percentile(options.calibration.percentile, options.calibration.rule)
    _check_keep(options.keep, options.calibration)


def _check_choice(options: BuildOptions, caps: Capabilities) -> None:
    """Refuses a choice of a plan without a bound, or by what is not known."""
    keep = options.keep
    if options.best and options.implicit:
        raise ConfigError("--best chooses a plan for Q/DQ nodes; with --quantization implicit give --keep-fp16")
    if options.best and keep.bound is None and keep.max_latency is None:
        raise ConfigError(
            "--best is the best plan within a bound: give --max-map-drop X with annotated images, --max-disagreement X "
            "with images, or --max-latency MS"
        )
    if keep.max_latency is None:
        if keep.objective != "latency" and keep.bound is None:
            raise ConfigError(
                f"--objective {keep.objective} says what is cheap within a bound: give --max-map-drop or "
                "--max-disagreement"
            )
        return
    if not 0 < keep.max_latency < math.inf:
        raise ConfigError(f"--max-latency must be a number of milliseconds over 0, got {keep.max_latency:g}")
    if keep.objective == "size":
        raise ConfigError("--max-latency bounds milliseconds; leave --objective size out")
    if not caps.lists_layers:
        raise BackendError(
            f"--max-latency: {caps.name} lists no layers that a time could be estimated from; choose another "
            "--backend, such as tensorrt-rtx"
        )


def _check_report(options: BuildOptions) -> None:
    """Refuses an accuracy report of what cannot be measured here."""
    if not options.accuracy_report:
        return
    if options.precision != "int8":
        raise ConfigError(f"--accuracy-report measures what INT8 does; leave it out with --{options.precision}")
    if options.implicit:
        raise ConfigError(
            "--accuracy-report measures Q/DQ nodes, which --quantization implicit does not write; leave one of them out"
        )
    if options.calibration.images is None:
        raise ConfigError("--accuracy-report is measured on calibration images: give --images")


def check_calibration(calibration: CalibrationOptions, correct: tuple[str, ...]) -> None:
    """Refuses a calibration that lacks images, or whose values are out of range.

    Raises:
        ConfigError: see the message.
        CalibrationError: the given histograms do not exist.
    """
    if calibration.images is None and calibration.histograms is None:
        raise ConfigError("INT8 needs calibration images: a folder or a list of file names with --images")
    if calibration.num_images is not None and calibration.num_images < 1:
        raise ConfigError(f"--num-images must be at least 1, got {calibration.num_images}")
    if calibration.rule not in (*RULES, AUTO):
        raise ConfigError(f"no calibration rule '{calibration.rule}'; allowed: {', '.join(RULES)}, {AUTO}")
    if not 0 < calibration.percentile <= 100:
        raise ConfigError(
            f"percentile must be over 0 and up to 100, got {calibration.percentile}; the usual value is 99.99"
        )
    if calibration.histograms is not None and not calibration.histograms.is_file():
        raise CalibrationError(f"'{calibration.histograms}' does not exist; make it with 'trtdet calibrate'")
    unknown = [name for name in correct if name not in CORRECTIONS]
    if unknown:
        raise ConfigError(f"no correction '{unknown[0]}'; allowed: auto, none, or some of {','.join(CORRECTIONS)}")
    # Histograms alone are enough for a rule, not for what is judged on images.
    if calibration.images is None and calibration.rule == AUTO:
        raise ConfigError("--calib auto compares the rules on images: give --images, or name one rule")
    if calibration.images is None and correct:
        raise ConfigError("corrections are worked out on images: give --images, or build with --correct none")


def warn_of_percentile(percentile: float, *rules: str) -> None:
    """Says so where one of the rules takes a percentile, and it looks like the share that percent are a hundred of.

    Warns:
        TrtdetWarning: it is up to 1, or under 50.
    """
    if not (0 < percentile < 50 and {"percentile", AUTO}.intersection(rules)):
        return
    meant = 100 * percentile if percentile <= 1 else 99.99
    warnings.warn(
        f"percentile {percentile:g} is in percent: all but the smallest {percentile:g} % of the values exceed such a "
        f"range; {meant:.10g} is likely meant",
        TrtdetWarning,
        stacklevel=3,
    )


def check_sensitivity(options: SensitivityOptions) -> None:
    """Refuses a ranking that cannot be measured.

    Raises:
        ConfigError, CalibrationError: see the message.
        BackendError: Ray is asked for and missing.
    """
    check_calibration(options.calibration, options.correct)
    warn_of_percentile(options.calibration.percentile, options.calibration.rule)
    check_annotated(options.images, options.annotations)
    _check_ranked_images(options.num_images)
    _check_ray(options.ray)


def check_tune(options: TuneOptions) -> None:
    """Refuses a tune that cannot be measured, as far as :func:`check_build` does not.

    Raises:
        ConfigError: see the message.
        BackendError: Ray is asked for and missing.
    """
    build = options.build
    if build.precision != "int8" or build.implicit:
        raise ConfigError("a tune is about INT8 with Q/DQ nodes; leave --fp16, --fp32 and --quantization implicit out")
    if replace(build.keep, objective="latency") != KeepOptions() or build.tuned is not None:
        raise ConfigError("a tune finds plans itself; leave out what else says what stays in FP16")
    if build.calibration.images is None:
        raise ConfigError("a tune needs calibration images: a folder or a list of file names with --images")
    if options.annotations is not None and options.images is None:
        raise ConfigError("--annotations are those of --val-images: give both")
    if options.points < 2:
        raise ConfigError(f"--points must be at least 2, the ends of the front, got {options.points}")
    _check_ranked_images(options.rank_images)
    _check_ray(options.ray)


def check_placement(keep: KeepOptions, graph: Graph) -> None:
    """Refuses what a model cannot keep in FP16: unknown names, more convolutions than there are, a foreign plan.

    Warns:
        TrtdetWarning: nothing is in INT8, though something can be.

    Raises:
        ConfigError: see the message.
    """
    if isinstance(keep.keep, Path):
        edited_plan(keep.keep, graph.placement)
    elif isinstance(keep.keep, tuple):
        named(graph.plan, [name for name in keep.keep if name != DEPTHWISE])
    elif keep.keep is not None:
        check_count(keep.keep, len(graph.plan.names("int8")))
    if not starting_plan(graph, keep).names("int8"):
        warn_of_nothing(graph)


def warn_of_nothing(graph: Graph) -> None:
    """Says that INT8 has nothing to do in a model whose convolutions all stay in FP16 by default."""
    left = graph.plan.names("fp16")
    if left and not graph.plan.names("int8"):
        example = graph.plan.entries[left[0]].reason
        warnings.warn(
            f"INT8 has nothing to do: all {len(left)} convolutions that can be in INT8 stay in FP16 by default, the "
            f"first '{left[0]}' ({example}); --int8-all puts them into INT8",
            TrtdetWarning,
            stacklevel=3,
        )


def bounding_images(keep: KeepOptions, config: Config, calibrating: Collection[Path]) -> CocoDataset | None:
    """The images of a build that plans are scored on, read and checked but not decoded; None where none are given.

    Warns:
        TrtdetWarning: some are left out under a bound, since ranges and corrections were made from them.

    Raises:
        DataError: there are no images, or none besides those that calibrate; or the annotations cannot be read, or do
            not fit the images or the classes.
    """
    if keep.images is not None and keep.annotations is None:
        given: CocoDataset | None = CocoDataset.unannotated(keep.images, config.classes)
    else:
        given = annotated_images(keep.images, keep.annotations, config)
    if given is None or keep.bound is None:
        return given
    apart = apart_from(given, calibrating)
    left_out = len(given.images) - len(apart.images)
    if left_out:
        warnings.warn(
            f"{left_out} of {len(given.images)} images of '{keep.images}' are calibration images too: ranges and "
            f"corrections were made from these, so that they show nothing for {keep.bound[0].option} and are left out",
            TrtdetWarning,
            stacklevel=3,
        )
    return apart


def annotated_images(images: Path | None, annotations: Path | None, config: Config) -> CocoDataset | None:
    """The annotated images, read and checked but not decoded; None where none are given.

    Raises:
        DataError: the annotations cannot be read, or do not fit the images or the classes.
    """
    if images is None or annotations is None:
        return None
    return CocoDataset.load(annotations, images, config.classes)


def check_annotated(images: Path | None, annotations: Path | None) -> None:
    """Refuses annotated images without annotations, and the reverse."""
    if (images is None) != (annotations is None):
        raise ConfigError("--val-images and --annotations belong together: give both")


def previous_bundle(output: Path, model: Path, force: bool) -> Bundle | None:
    """The bundle at the output's place; None where there is none, or it is damaged and built again.

    Raises:
        OutputError: it is a bundle of another model, and nobody has said that it may be replaced.
    """
    try:
        known = Bundle(output, verify=False).manifest.model
    except BundleError:
        return None
    if not force and known.sha256 != sha256_file(model):
        raise OutputError(
            f"'{output}' is a bundle of another model ('{known.name}', SHA-256 {known.sha256[:12]}...), not of "
            f"'{model}'; choose another place with -o, or replace it with --force"
        )
    try:
        return Bundle(output)
    except BundleError:
        return None


def _check_engine(options: BuildOptions, caps: Capabilities) -> None:
    engine, backend = options.engine, f"{caps.name} {caps.version}"
    if engine.version_compatible and not caps.version_compatible:
        raise BackendError(f"{backend} cannot make version-compatible engines; leave --version-compatible out")
    if engine.hardware_compatible and not caps.hardware_compatible:
        raise BackendError(
            f"{backend} cannot make engines for GPUs later than those it builds for; leave --hardware-compatible out"
            + (" and name them with --sm" if caps.sms else "")
        )
    if engine.embed_plugins and not options.plugins:
        raise ConfigError("--embed-plugins needs the libraries: give them with --plugin-library")
    unknown = [name for name in engine.tactic_sources or () if name not in caps.tactic_sources]
    if unknown or (engine.tactic_sources is not None and not caps.tactic_sources):
        allowed = f"allowed: {', '.join(caps.tactic_sources)}" if caps.tactic_sources else "leave --tactic-sources out"
        raise BackendError(f"{backend} has no tactic source{f' {unknown[0]!r}' if unknown else 's'}; {allowed}")
    if not engine.tf32 and not caps.tf32:
        raise BackendError(f"{backend} does not compute in TF32; leave --no-tf32 out")
    if engine.workspace is not None and engine.workspace <= 0:
        raise ConfigError(f"--workspace must be over 0 MiB, got {engine.workspace / 2**20:g}")
    if not options.implicit:
        for name, given in (("--calibrator", options.calibrator != "trtdet"), ("--calibration-cache", options.cache)):
            if given:
                raise ConfigError(f"{name} belongs to --quantization implicit; Q/DQ nodes hold trtdet's own ranges")
    elif options.precision != "int8":
        raise ConfigError(f"--quantization implicit is about INT8; leave it out with --{options.precision}")


def check_fp8(sms: Sequence[int], caps: Capabilities) -> None:
    """Refuses FP8 for products where the backend, or one of the GPUs, has none.

    Args:
        sms: compute capabilities to build for; empty for the backend's default.
        caps: of the backend.

    Raises:
        BackendError: see the message.
    """
    if not caps.fp8:
        raise BackendError(
            f"{caps.name} {caps.version} has no FP8 for products of matrices; allowed: TensorRT 10 and later, "
            "tensorrt-rtx"
        )
    older = [sm for sm in sms or caps.default_sms if sm < FIRST_FP8]
    if older:
        raise BackendError(
            f"compute capability {older[0]} has no FP8, which came with {FIRST_FP8}",
            "give newer ones with --sm, such as --sm 89 120",
        )


def check_targets(sms: Iterable[int], caps: Capabilities) -> None:
    """Refuses compute capabilities that cannot be built for; a backend without engines builds for none in particular.

    Raises:
        BackendError: see the message.
    """
    if not caps.makes_engine:
        return
    # Without targets of its own the library builds for the machine's GPU; where there is none, choosing it fails.
    possible = caps.sms or tuple(device.sm for device in cuda.devices()[:1])
    impossible = [sm for sm in sms if sm not in possible]
    if impossible and possible:
        hint = "" if caps.sms else "; leave --sm out, or use --backend tensorrt-rtx, which builds for other GPUs"
        raise BackendError(
            f"{caps.name} {caps.version} cannot build for compute capability {impossible[0]}; allowed: "
            f"{', '.join(map(str, possible))}{hint}"
        )


def _check_batch(batch: tuple[int, int, int] | None) -> None:
    if batch is not None and not 0 < batch[0] <= batch[1] <= batch[2]:
        raise ConfigError(f"--batch must be MIN:OPT:MAX with 0 < MIN <= OPT <= MAX, got {':'.join(map(str, batch))}")


def _check_guard(options: BuildOptions, caps: Capabilities) -> None:
    if options.gpu is not None:
        gpu_named(options.gpu)
    if options.guard is None:
        return
    if not 0 < options.guard < math.inf:
        raise ConfigError(f"--guard must be a number over 0, got {options.guard:g}; the usual value is 1.02")
    if options.precision != "int8":
        raise ConfigError(f"--guard is about INT8's speed; leave it out with --{options.precision}")
    if not options.measure:
        raise ConfigError("--guard compares INT8 with FP16, which --no-measure leaves out: give one of them")
    if not caps.makes_engine:
        raise BackendError(
            f"--guard compares the speed of engines, and {caps.name} makes none; leave --guard out, or choose another "
            "--backend"
        )


def _check_implicit(options: BuildOptions, caps: Capabilities) -> None:
    if caps.implicit is None:
        raise BackendError(
            f"{caps.name} {caps.version} has no calibrators, so it cannot quantise implicitly; use --quantization "
            "explicit, which writes the same ranges into the model as Q/DQ nodes"
        )
    if options.correct not in ((), DEFAULT_CORRECTIONS):
        raise ConfigError(
            "corrections are made in the Q/DQ model, which --quantization implicit has not; leave out --correct "
            "and --effort"
        )
    rule = options.calibration.rule
    if rule == AUTO:
        raise ConfigError("--calib auto compares rules in the Q/DQ model; with --quantization implicit name one rule")
    if options.calibrator == "tensorrt" and rule not in get_args(OwnCalibrator):
        raise ConfigError(
            f"TensorRT has no calibrator for --calib {rule}; allowed with --calibrator tensorrt: "
            f"{', '.join(get_args(OwnCalibrator))}"
        )
    if options.calibrator == "tensorrt" and options.calibration.images is None:
        raise ConfigError("TensorRT's own calibrators look at images: give them with --images")
    if options.keep.bound is not None or options.keep.max_latency is not None:
        option = "--max-latency" if options.keep.bound is None else options.keep.bound[0].option
        raise ConfigError(f"{option} scores Q/DQ models; with --quantization implicit give --keep-fp16")
    if options.cache is not None and not options.cache.is_file():
        raise CalibrationError(f"the calibration cache '{options.cache}' does not exist; give another")
    if options.cache is not None and options.keep != KeepOptions():
        raise ConfigError("what stays in FP16 is found on images; with --calibration-cache leave it out")


def _check_one_way(keep: KeepOptions) -> None:
    ways = {
        "--keep-fp16": keep.keep,
        "--fp16-budget": keep.budget,
        MAP.option: keep.max_map_drop,
        AGREEMENT.option: keep.max_disagreement,
        "--max-latency": keep.max_latency,
    }
    asked = [name for name, value in ways.items() if value is not None]
    if len(asked) > 1:
        raise ConfigError(f"{asked[0]} and {asked[1]} both say what stays in FP16: give one of them")


def _check_keep(keep: KeepOptions, calibration: CalibrationOptions) -> None:
    if keep.max_disagreement is None or keep.images is None:
        check_annotated(keep.images, keep.annotations)
    if keep.budget is not None:
        check_share(keep.budget)
    if keep.bound is not None:
        _check_bound(keep, *keep.bound)
    if keep.ranked:
        _check_ranked_images(keep.num_images)
        _check_ray(keep.ray)
        if calibration.images is None:
            raise ConfigError("a ranking of the convolutions is measured on images: give --images, or name them")


def _check_bound(keep: KeepOptions, figure: Figure, limit: float) -> None:
    check_bound(limit, figure)
    if keep.images is not None:
        return
    if figure is MAP:
        raise ConfigError("--max-map-drop measures mAP: give annotated images with --val-images and --annotations")
    raise ConfigError(
        "--max-disagreement compares detections on images that ranges and corrections were not made from: give some "
        "with --val-images; they need no annotations"
    )


def _check_ranked_images(count: int) -> None:
    if count < 1:
        raise ConfigError(f"a ranking needs at least 1 image, got {count}; give --rank-images 1 or more")


def _check_ray(address: str | None) -> None:
    if address is not None and importlib.util.find_spec("ray") is None:
        raise BackendError("Ray is not installed here", cluster.PIP)
