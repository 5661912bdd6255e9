"""``trtdet build``: a bundle with an engine."""

from __future__ import annotations

import argparse
import json
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.cli.options import (
    SILU,
    add_backend,
    add_batch_range,
    add_calibration,
    add_corrections,
    add_dry_run,
    add_fp8,
    add_gpu,
    add_int8_all,
    add_int8_attention,
    add_model,
    add_nms,
    add_objective,
    add_output,
    add_quantization,
    add_ranking,
    add_validation,
    calibration_of,
    chosen_corrections,
    config_of,
    size,
)
from trtdet.errors import ConfigError
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.audit import Audit
    from trtdet.backends import EngineOptions
    from trtdet.bundle import Bundle, SiluPart
    from trtdet.pipeline import BuildOptions, BuildResult


def _options(parser: ArgumentParser) -> None:
    add_model(parser)
    add_output(parser, "BUNDLE", "the folder that is written; a bundle of the same model in its place is replaced")
    _add_precision(parser)
    add_calibration(parser)
    add_corrections(parser)
    add_int8_all(parser)
    add_int8_attention(parser)
    add_fp8(parser)
    _add_kept(parser)
    _add_best(parser)
    _add_tuned(parser)
    add_validation(parser, "for --max-map-drop and --max-disagreement")
    add_ranking(parser)
    add_nms(parser)
    parser.add_argument(
        "--silu", default="auto", choices=SILU, help="what SiLU and HardSwish become (default: auto, asks the backend)"
    )
    _add_implicit(parser)
    add_backend(parser)
    _add_engine(parser)
    add_batch_range(parser)
    parser.add_argument(
        "--size",
        type=size,
        metavar="HxW",
        help="height and width of the input, of a model that leaves them open or whose graph does not depend on them",
    )
    parser.add_argument("--force", action="store_true", help="replace a bundle of another model in the place of -o")
    add_dry_run(parser)
    _add_verdict(parser)
    parser.add_argument(
        "--accuracy-report",
        action="store_true",
        help="measure which blocks cause the error of INT8, and what each correction does to it (accuracy.json)",
    )


def _add_precision(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("precision").add_mutually_exclusive_group()
    for name, what in (
        ("int8", "convolutions in INT8, with calibration images (the default)"),
        ("fp16", "the float model in FP16"),
        ("fp32", "the float model as it is"),
    ):
        group.add_argument(f"--{name}", dest="precision", action="store_const", const=name, help=what)
    parser.set_defaults(precision="int8")


def _add_kept(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "convolutions that stay in FP16", "with --int8, besides those that --int8-all is about"
    ).add_mutually_exclusive_group()
    group.add_argument(
        "--keep-fp16",
        type=_keep,
        metavar="N|PLAN.json|NODE,...",
        help="the N most sensitive, those of an edited plan, or the nodes of these names; 'depthwise' is all depthwise",
    )
    group.add_argument(
        "--fp16-budget",
        type=float,
        metavar="SHARE",
        help="the most sensitive, up to this share of the multiply-adds, 0 to 1",
    )
    group.add_argument(
        "--max-map-drop",
        type=float,
        metavar="X",
        help="the cheapest plan that loses at most X mAP points at 90 %% confidence, by halves of --val-images",
    )
    group.add_argument(
        "--max-disagreement",
        type=float,
        metavar="X",
        help="likewise with an agreement with the float model's detections of at least 100 - X points; no annotations, "
        "but --val-images other than the calibration images, which ranges and corrections were made from",
    )
    group.add_argument(
        "--max-latency",
        type=float,
        metavar="MS",
        help="the plan of least error within so many milliseconds, estimated for --gpu, or measured where a GPU here "
        "runs the engine",
    )


def _add_best(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("the best plan", "with --max-map-drop, --max-disagreement or --max-latency")
    group.add_argument(
        "--best",
        action="store_true",
        help="choose between INT8 and FP16 for every convolution that can be in INT8: none stays in FP16 by default",
    )
    add_objective(group)


def _add_tuned(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "a point of a front", "calibration, corrections, plan and backend are those of 'trtdet tune'"
    )
    group.add_argument("--tuned", type=Path, metavar="DIR", help="the folder of a tune of MODEL, its -o")
    group.add_argument("--point", type=int, metavar="N", help="the number of the point, as its table and front.md say")


def _add_implicit(parser: ArgumentParser) -> None:
    add_quantization(parser, "Q/DQ nodes in the model, or a float model and a calibrator for TensorRT up to 10")
    parser.add_argument(
        "--calibrator",
        default="trtdet",
        choices=("trtdet", "tensorrt"),
        help="implicit quantisation by trtdet's ranges, or by TensorRT's own calibrator of --calib "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--calibration-cache", type=Path, metavar="FILE", help="implicit quantisation by the ranges of this cache"
    )


def _add_engine(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--workspace",
        type=float,
        metavar="MIB",
        help="scratch memory that a kernel may use, in MiB (default: the library's limit)",
    )
    group.add_argument("--version-compatible", action="store_true", help="runs on later TensorRT versions as well")
    group.add_argument("--hardware-compatible", action="store_true", help="runs on every GPU since Ampere")
    group.add_argument("--embed-plugins", action="store_true", help="the engine carries the plugin libraries")
    group.add_argument(
        "--no-tf32",
        action="store_true",
        help="multiply float32 in float32, not in TF32, which GPUs since Ampere do by default",
    )
    group.add_argument(
        "--tactic-sources",
        nargs="*",
        metavar="NAME",
        help="kernel libraries that TensorRT may use (default: its own choice)",
    )
    group.add_argument(
        "--timing-cache",
        type=Path,
        metavar="FILE",
        help="measured times of the device's kernels, read and extended (default: beside -o)",
    )


def _add_verdict(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "comparison with FP16",
        "after an INT8 build: measured where the engine can be run, else estimated from its layers",
    )
    group.add_argument(
        "--guard",
        type=float,
        nargs="?",
        const=1.02,
        metavar="RATIO",
        help="ship the FP16 engine where INT8 is not at least RATIO times as fast; 1.02 where no RATIO is given "
        "(default: ship INT8, and warn where it is not faster)",
    )
    add_gpu(group)
    group.add_argument("--no-measure", action="store_true", help="do not compare an INT8 build with FP16")


def _keep(text: str) -> int | Path | tuple[str, ...]:
    if text.isdigit():
        return int(text)
    if text.endswith(".json"):
        return Path(text)
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"'{text}' must be a number, a plan (.json), or NODE,NODE,...")
    return names


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.pipeline import build
    from trtdet.pipeline.forecasts import foresee_build
    from trtdet.quantization import PrecisionPlan, left_by_default

    config, asked = config_of(options), _build_options(options)
    if options.size is not None:
        config = config.with_size(options.size)
    if options.dry_run:
        foreseen = foresee_build(options.model, config, options.output, asked)
        console.say(foreseen.table())
        return {"dry_run": True, "bundle": str(options.output), **foreseen.as_dict()}
    result = build(options.model, config, options.output, asked, console.progress, console.expect)
    manifest = result.bundle.manifest
    if result.audit is not None:
        _say_audit(console, result.audit)
    left = left_by_default(PrecisionPlan.load(result.bundle.file("plan.json")))
    if left and options.tuned is None:  # a point's plan is the tune's, and says why itself
        console.say(f"in FP16 by default, as INT8 makes them no faster: {left} (plan.json has each; --int8-all)")
    if manifest.quantization.corrections:
        console.say(f"corrected: {'; '.join(manifest.quantization.corrections)}")
    if result.accuracy is not None:
        console.say(result.accuracy.table())
    if result.trade_off is not None:
        console.say(result.trade_off.table())
        console.say(result.trade_off.summary)
    if result.within is not None:
        console.say(str(result.within))
    worth = _worth(result)
    if worth is not None:
        console.say(worth["said"])
    if manifest.nms.reason:
        console.say(f"NMS {manifest.nms.mode}: {manifest.nms.reason}")
    console.say(_summary(result.bundle, options, result.up_to_date))
    return {
        "bundle": str(result.bundle.path),
        "up_to_date": result.up_to_date,
        "manifest": json.loads(manifest.to_json()),
        "worth": worth,
        "trade_off": result.trade_off.as_dict() if result.trade_off else None,
        "within": result.within.as_dict() if result.within else None,
    }


def _worth(result: BuildResult) -> dict[str, Any] | None:
    """What INT8 cost and gained: found out now, or kept in a bundle that is up to date."""
    from trtdet.pipeline.worth import WORTH

    if result.worth is not None:
        return result.worth.as_dict()
    if WORTH not in result.bundle.manifest.files:
        return None
    kept: dict[str, Any] = json.loads(result.bundle.file(WORTH).read_text())
    return kept


_BESIDE_TUNED = (
    *("model", "config", "output", "tuned", "point", "val_images", "annotations", "timing_cache", "force", "guard"),
    *("workspace", "version_compatible", "hardware_compatible", "embed_plugins", "no_tf32", "tactic_sources", "gpu"),
    *("no_measure", "accuracy_report", "json", "verbose", "dry_run", "run", "notes"),
)
"""What may be said of a point's build; all else the tune has said."""


def _point_options(options: Namespace) -> BuildOptions:
    """The options of a point of a front, with what the command line says of the engine and of the comparison.

    Raises:
        ConfigError: one of ``--tuned`` and ``--point`` is missing, an option says what the tune has said already, or
            there is no such point.
    """
    from trtdet.pipeline.tuned import tuned_options

    if options.tuned is None or options.point is None:
        raise ConfigError("--tuned DIR and --point N belong together: give both")
    parser = ArgumentParser()
    _options(parser)
    asked = (name for name in vars(options) if name not in _BESIDE_TUNED)
    given = next((name for name in asked if getattr(options, name) != parser.get_default(name)), None)
    if given is not None:
        flag = options.precision if given == "precision" else given.replace("_", "-")
        raise ConfigError(f"--tuned: leave --{flag} out, as a point is built as it was tuned")
    known = tuned_options(options.tuned, options.point)
    return replace(
        known,
        keep=replace(known.keep, images=options.val_images, annotations=options.annotations),
        engine=_engine_options(options),
        timing_cache=options.timing_cache,
        measure=not options.no_measure,
        guard=options.guard,
        gpu=options.gpu,
        force=options.force,
        accuracy_report=options.accuracy_report,
    )


def _engine_options(options: Namespace) -> EngineOptions:
    from trtdet.backends import EngineOptions

    return EngineOptions(
        None if options.workspace is None else int(options.workspace * 2**20),
        options.version_compatible,
        options.hardware_compatible,
        options.embed_plugins,
        None if options.tactic_sources is None else tuple(options.tactic_sources),
        not options.no_tf32,
    )


def _build_options(options: Namespace) -> BuildOptions:
    from trtdet.pipeline import BuildOptions, KeepOptions

    if (options.tuned, options.point) != (None, None):
        return _point_options(options)
    (correct,) = chosen_corrections([options.correct], options.effort)
    return BuildOptions(
        options.precision,
        calibration_of(options),
        correct,
        options.nms,
        options.backend,
        tuple(options.sm),
        options.batch,
        KeepOptions(
            options.keep_fp16,
            options.fp16_budget,
            options.max_map_drop,
            options.val_images,
            options.annotations,
            options.rank_images,
            options.ray,
            options.max_disagreement,
            options.objective,
            options.max_latency,
        ),
        silu=options.silu,
        plugins=tuple(options.plugin_library),
        quantization=options.quantization,
        calibrator=options.calibrator,
        cache=options.calibration_cache,
        engine=_engine_options(options),
        timing_cache=options.timing_cache,
        measure=not options.no_measure,
        guard=options.guard,
        gpu=options.gpu,
        force=options.force,
        int8_all=options.int8_all,
        int8_attention=options.int8_attention,
        fp8=options.fp8,
        accuracy_report=options.accuracy_report,
        best=options.best,
        resize=options.size is not None,
    )


def _say_audit(console: Console, found: Audit) -> None:
    console.say(found.summary)
    if found.advice:
        console.say(f"to try, the first of {len(found.advice)} that 'trtdet audit' lists: {found.advice[0]}")


def _summary(bundle: Bundle, options: Namespace, up_to_date: bool) -> str:
    """The last line: what was asked for and what was done."""
    manifest = bundle.manifest
    counts = manifest.audit or manifest.precision
    engine = bundle.engine
    known = "as built" if manifest.audit else "as planned, not audited"
    tf32 = " (TF32 where the GPU has it)" if manifest.backend.tf32 and counts.fp32 else ""
    fp8 = f"{manifest.audit.fp8} FP8, " if manifest.audit and manifest.audit.fp8 else ""
    done = f"{counts.int8} convs INT8, {fp8}{counts.fp16} FP16, {counts.fp32} FP32{tf32} {known}"
    made = f"engine {engine.stat().st_size / 1e6:.1f} MB" if engine else "no engine (onnxruntime runs the model itself)"
    target = f"{manifest.backend.name} {manifest.backend.version}"
    if manifest.backend.sms:
        target += f" for compute capability {', '.join(str(sm / 10) for sm in manifest.backend.sms)}"
    state = "up to date" if up_to_date else "wrote"
    asked = f"asked --backend {options.backend} --nms {options.nms} --silu {options.silu} --{options.precision}"
    asked += " --int8-attention" * options.int8_attention + " --fp8" * options.fp8
    if manifest.guard is not None:
        asked += f" --guard {manifest.guard.least:g}"
        done += f"; shipped {manifest.guard.shipped.upper()}: {manifest.guard.reason}"
    if manifest.quantization.mode == "implicit":
        whose = {"trtdet": "trtdet's ranges", "tensorrt": "TensorRT's calibrator", "cache": "the ranges of a cache"}
        done = f"quantised by TensorRT with {whose[manifest.quantization.source]}: {done}"
    silu = _silu(manifest.silu)
    return f"{state} {bundle.path}: {made}, {target}, NMS {manifest.nms.mode}, {silu}, {done} ({asked})"


def _silu(part: SiluPart | None) -> str:
    if part is None:
        return "SiLU as it was"
    flow = f", {part.read_int8} read and {part.write_int8} write INT8" if part.done == "plugin" else ""
    return f"SiLU {part.done} ({part.rewritten} rewritten{flow})"


COMMAND = Command("build", "a bundle with an engine, from a float ONNX model; INT8 by default", _options, _run)
