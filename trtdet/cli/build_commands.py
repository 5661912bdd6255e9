"""``trtdet calibrate``, ``build`` and ``sensitivity``: ranges, a bundle with an engine, what INT8 costs by layer."""

from __future__ import annotations

import json
from argparse import Namespace
from functools import partial
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.cli.options import check_suffix, model_options, options_of
from trtdet.errors import ConfigError
from trtdet.options import BuildOptions, CalibrateOptions, SensitivityOptions, spelled, words
from trtdet.progress import Console
from trtdet.tables import LabelledLines

if TYPE_CHECKING:
    from trtdet.building import BuildResult
    from trtdet.bundle import Bundle

_MOST_PAIRS = 3
"""How many places of a kind a build prints where the pairs of a quantised model cost time."""


def _calibrate(options: Namespace, console: Console) -> dict[str, Any]:
    import resource
    import time

    from trtdet.building import calibrate
    from trtdet.calibration.cache import version_number
    from trtdet.config import load_config
    from trtdet.files import prepare_target, write_together

    calibrate_options = options_of(options, CalibrateOptions)
    if calibrate_options.how_many:
        return _how_many(options, calibrate_options, console)
    if calibrate_options.effort != CalibrateOptions.effort:
        raise ConfigError("calibrate writes ranges without corrections: give --effort with --how-many, or to a build")
    if options.output is None:
        raise ConfigError("calibrate writes ranges: name their file with -o ranges.json, or only measure: --how-many")
    if options.output.suffix in (".npz", ".cache"):
        raise ConfigError(f"-o {options.output} names the ranges; the histograms and the cache are written beside it")
    prepare_target(options.output)
    started = time.perf_counter()
    version = version_number(calibrate_options.tensorrt)
    calibrated = calibrate(
        options.model,
        load_config(options.config),
        calibrate_options.calibration,
        progress=console.progress,
        quantization=calibrate_options.quantization,
        attention=calibrate_options.plan.int8_attention,
    )
    histograms = calibrate_options.calibration.histograms or options.output.with_suffix(".npz")
    cache = options.output.with_suffix(".cache")
    paths = [options.output, cache] if calibrated.reused else [options.output, histograms, cache]
    contents = {
        histograms: calibrated.collection.to_bytes(),
        cache: calibrated.ranges.to_calibration_cache(version).encode(),
        options.output: calibrated.ranges.to_json().encode(),
    }
    write_together({path: contents[path] for path in paths})
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tensors = len(calibrated.ranges.tensors)
    source = f"from {histograms}" if calibrated.reused else f"{calibrated.collection.images} images"
    console.say(f"{tensors} ranges by {calibrated.ranges.rule}, {source}, {seconds:.1f} s, peak memory {peak:.0f} MB")
    console.say(f"wrote {', '.join(map(str, paths))}")
    return {
        "images": calibrated.collection.images,
        "skipped": list(calibrated.collection.skipped),
        "tensors": tensors,
        "rule": calibrated.ranges.rule,
        "reused": calibrated.reused,
        "seconds": round(seconds, 3),
        "peak_rss_mb": round(peak, 1),
        "ranges": str(options.output),
        "histograms": str(histograms),
        "calibration_cache": str(cache),
        "input_check": calibrated.seen.as_dict() if calibrated.seen is not None else None,
    }


def _how_many(options: Namespace, calibrate_options: CalibrateOptions, console: Console) -> dict[str, Any]:
    from trtdet.config import load_config
    from trtdet.experiments.image_counts import how_many_images

    if options.output is not None:
        raise ConfigError(f"--how-many measures and writes nothing: leave -o {options.output} out")
    for name in ("quantization", "tensorrt"):
        if getattr(calibrate_options, name) != getattr(CalibrateOptions, name):
            raise ConfigError(f"--how-many measures a model with Q/DQ nodes: leave --{name} out")
    curve = how_many_images(
        options.model,
        load_config(options.config),
        calibrate_options.calibration,
        effort=calibrate_options.effort,
        attention=calibrate_options.plan.int8_attention,
        progress=console.progress,
    )
    console.say(curve.table())
    return curve.as_dict()


def _build(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.building.request import unchanged
    from trtdet.config import load_config

    config, build_options = load_config(options.config), options_of(options, BuildOptions)
    if options.dry_run:
        from trtdet.building.forecasts import foresee_build

        forecast = foresee_build(options.model, config, options.output, options=build_options)
        console.say(forecast.table())
        return {"dry_run": True, "bundle": str(options.output), **forecast.as_dict()}
    bundle = unchanged(options.model, config, options.output, options=build_options)
    if bundle is not None:
        return _built(bundle, options, console)
    from trtdet.candidates import build

    result = build(
        options.model, config, options.output, options=build_options, progress=console.progress, expect=console.expect
    )
    if not result.up_to_date:
        _say_how(result, build_options, console)
    return _built(result.bundle, options, console, result=result)


def _say_how(result: BuildResult, options: BuildOptions, console: Console) -> None:
    """The audit, the plan, the pairs and corrections of a bundle that was just built, and what it was chosen from."""
    from trtdet.candidates import times_table
    from trtdet.quantization import PrecisionPlan, left_by_default

    bundle, manifest, audit = result.bundle, result.bundle.manifest, result.audit
    if audit is not None:
        console.say(audit.summary)
        if audit.advice:
            console.say(f"to try, the first of {len(audit.advice)} that 'trtdet audit' lists: {audit.advice[0]}")
    fp16_by_default = left_by_default(PrecisionPlan.load(bundle.file("plan.json")))
    if fp16_by_default and options.from_ is None:  # The plan of a tune's variant gives its own reasons.
        flag = spelled(BuildOptions, "plan.int8_all")
        console.say(f"in FP16 by default, as INT8 makes them no faster: {fp16_by_default} (plan.json has each; {flag})")
    found: dict[str, list[str]] = {}
    for pair in manifest.quantization.pairs or ():
        found.setdefault(pair.kind, []).append(pair.text)
    for kind, texts in found.items():
        more = f"; {len(texts) - _MOST_PAIRS} more in manifest.json" if len(texts) > _MOST_PAIRS else ""
        console.say(f"pairs of the model, {kind}: {'; '.join(texts[:_MOST_PAIRS])}{more}")
    if manifest.quantization.corrections:
        console.say(f"corrected: {'; '.join(manifest.quantization.corrections)}")
    if result.trade_off is not None:
        console.say(result.trade_off.table())
        console.say(result.trade_off.summary)
    if result.within is not None:
        console.say(str(result.within))
    if manifest.candidates:
        console.say(times_table(manifest.candidates))
    if manifest.nms.reason:
        console.say(f"NMS {manifest.nms.mode}: {manifest.nms.reason}")


def _built(bundle: Bundle, options: Namespace, console: Console, result: BuildResult | None = None) -> dict[str, Any]:
    """The last lines of a build, and its JSON; without a result the bundle was up to date."""
    from trtdet.building.worth import WORTH, read_worth

    manifest, up_to_date = bundle.manifest, result is None or result.up_to_date
    worth: dict[str, Any] | None = None
    if result is not None and result.worth is not None:
        worth = result.worth.as_dict()
    elif WORTH in manifest.files:  # From the existing bundle, which is up to date.
        worth = read_worth(bundle)
    cost = worth["said"] if worth is not None else "not compared with FP16"
    following = f"trtdet eval {bundle.path} --images DIR --annotations JSON --against {options.model}"
    console.say(
        LabelledLines(
            (*_done(bundle, options_of(options, BuildOptions), up_to_date), ("cost", cost), ("next", following))
        )
    )
    return {
        "bundle": str(bundle.path),
        "up_to_date": up_to_date,
        "manifest": json.loads(manifest.to_json()),
        "worth": worth,
        "trade_off": result.trade_off.as_dict() if result is not None and result.trade_off else None,
        "within": result.within.as_dict() if result is not None and result.within else None,
    }


def _done(bundle: Bundle, options: BuildOptions, up_to_date: bool) -> tuple[tuple[str, str], ...]:
    """The options, the engine with its target, and the precision of its layers."""
    manifest, engine = bundle.manifest, bundle.engine
    target = f"{manifest.backend.name} {manifest.backend.version}"
    if manifest.backend.sms:
        target += f" for compute capability {', '.join(str(sm / 10) for sm in manifest.backend.sms)}"
    silu = "SiLU as it was"
    if manifest.silu is not None:
        silu = f"SiLU {manifest.silu.done} ({manifest.silu.rewritten} rewritten"
        if manifest.silu.done == "plugin":
            silu += f", {manifest.silu.read_int8} read and {manifest.silu.write_int8} write INT8"
        silu += ")"
    counts = manifest.audit or manifest.precision
    fp8 = f"{manifest.audit.fp8} FP8, " if manifest.audit and manifest.audit.fp8 else ""
    tf32 = " (TF32 where the GPU has it)" if manifest.backend.tf32 and counts.fp32 else ""
    basis = "as built" if manifest.audit else "as planned, not audited"
    precision = f"{counts.int8} convs INT8, {fp8}{counts.fp16} FP16, {counts.fp32} FP32{tf32} {basis}"
    if manifest.guard is not None:
        precision += f"; shipped {manifest.guard.shipped.upper()}: {manifest.guard.reason}"
    if manifest.quantization.mode == "implicit":
        whose = {"trtdet": "trtdet's ranges", "tensorrt": "TensorRT's calibrator", "cache": "the ranges of a cache"}
        precision = f"quantised by TensorRT with {whose[manifest.quantization.source]}: {precision}"
    size = f"engine {engine.stat().st_size / 1e6:.1f} MB" if engine else "no engine (onnxruntime runs the model itself)"
    wrote = f"{'up to date' if up_to_date else 'wrote'} {bundle.path}: {size}, {target}"
    return (
        ("asked", " ".join(words(options))),
        ("done", f"{wrote}, NMS {manifest.nms.mode}, {silu}"),
        ("layers", precision),
    )


def _sensitivity(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.building import sensitivity
    from trtdet.config import load_config
    from trtdet.files import prepare_target

    check_suffix(options.output, ".json")
    prepare_target(options.output)
    ranking_options = options_of(options, SensitivityOptions)
    rows = options.output.with_suffix(".jsonl")
    config = load_config(options.config)
    ranking = sensitivity(options.model, config, ranking_options, rows=rows, progress=console.progress)
    ranking.save(options.output)
    console.say(ranking.table())
    console.say(f"{ranking.inferences} model runs, {ranking.seconds:.1f} s; wrote {options.output}, {rows}")
    return ranking.as_dict()


CALIBRATE = Command(
    "calibrate",
    summary="collect histograms of activations on images, and choose ranges",
    add_options=partial(
        model_options,
        metavar="ranges.json",
        output="where the ranges are written; the histograms and TensorRT's cache get its name",
        rows=CalibrateOptions,
        required=False,
    ),
    run=_calibrate,
    usage="MODEL --config CONFIG --images DIR (-o ranges.json | --how-many) [options]",
    examples=(
        ("m.onnx --config c.yaml --images photos -o ranges.json", "ranges and histograms"),
        ("m.onnx --config c.yaml --images photos --how-many", "how many images it needs"),
    ),
)
BUILD = Command(
    "build",
    summary="build a bundle with an engine from a float ONNX model; INT8 by default",
    add_options=partial(
        model_options, metavar="BUNDLE", output="folder that is written", rows=BuildOptions, dry_run=True
    ),
    run=_build,
    usage="MODEL --config CONFIG -o BUNDLE [options]",
    examples=(
        ("m.onnx --config c.yaml --images photos -o b", "INT8 in layers that gain"),
        ("m.onnx --config c.yaml --fp16 -o b", "the float model in FP16"),
        ("m.onnx --config c.yaml --images photos --keep-fp16 5 -o b", "more in FP16"),
        ("m.onnx --config c.yaml --images photos --guard 1.02 -o b", "FP16 unless faster"),
        ("m.onnx --config c.yaml --from tuned:3 -o b", "a measured plan"),
    ),
)
SENSITIVITY = Command(
    "sensitivity",
    summary="rank the convolutions by the accuracy that INT8 costs",
    add_options=partial(
        model_options,
        metavar="sensitivity.json",
        output="the ranking; its rows are kept in a .jsonl file beside it and resumed",
        rows=SensitivityOptions,
    ),
    run=_sensitivity,
    usage="MODEL --config CONFIG --images DIR -o sensitivity.json [options]",
    examples=(
        ("m.onnx --config c.yaml --images photos -o sensitivity.json", "against the float model"),
        ("m.onnx --config c.yaml --images photos --num-images 16 -o s.json", "on fewer images"),
    ),
)
