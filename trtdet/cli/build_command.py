"""``trtdet build``: a bundle with an engine."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.cli.options import model_options, options_of
from trtdet.options import BuildOptions, spelled, words
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.bundle import Bundle


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.building.comparison import WORTH
    from trtdet.building.forecasts import foresee_build
    from trtdet.candidates import build, times_table
    from trtdet.config import load_config
    from trtdet.quantization import PrecisionPlan, left_by_default

    config, build_options = load_config(options.config), options_of(options, BuildOptions)
    if options.dry_run:
        forecast = foresee_build(options.model, config, options.output, options=build_options)
        console.say(forecast.table())
        return {"dry_run": True, "bundle": str(options.output), **forecast.as_dict()}
    result = build(
        options.model, config, options.output, options=build_options, progress=console.progress, expect=console.expect
    )
    bundle, manifest, audit = result.bundle, result.bundle.manifest, result.audit
    if audit is not None:
        console.say(audit.summary)
        if audit.advice:
            console.say(f"to try, the first of {len(audit.advice)} that 'trtdet audit' lists: {audit.advice[0]}")
    fp16_by_default = left_by_default(PrecisionPlan.load(bundle.file("plan.json")))
    if fp16_by_default and build_options.from_ is None:  # The plan of a tune's variant gives its own reasons.
        flag = spelled(BuildOptions, "plan.int8_all")
        console.say(f"in FP16 by default, as INT8 makes them no faster: {fp16_by_default} (plan.json has each; {flag})")
    if manifest.quantization.corrections:
        console.say(f"corrected: {'; '.join(manifest.quantization.corrections)}")
    if result.trade_off is not None:
        console.say(result.trade_off.table())
        console.say(result.trade_off.summary)
    if result.within is not None:
        console.say(str(result.within))
    if manifest.candidates:
        console.say(times_table(manifest.candidates))
    worth: dict[str, Any] | None = None
    if result.worth is not None:
        worth = result.worth.as_dict()
    elif WORTH in manifest.files:  # From the existing bundle, which is up to date.
        worth = json.loads(bundle.file(WORTH).read_text())
    if worth is not None:
        console.say(worth["said"])
    if manifest.nms.reason:
        console.say(f"NMS {manifest.nms.mode}: {manifest.nms.reason}")
    console.say(_summary(bundle, build_options, result.up_to_date))
    return {
        "bundle": str(bundle.path),
        "up_to_date": result.up_to_date,
        "manifest": json.loads(manifest.to_json()),
        "worth": worth,
        "trade_off": result.trade_off.as_dict() if result.trade_off else None,
        "within": result.within.as_dict() if result.within else None,
    }


def _summary(bundle: Bundle, options: BuildOptions, up_to_date: bool) -> str:
    """The last line: the engine, its target, the precision of its layers, and the options."""
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
    return (
        f"{'up to date' if up_to_date else 'wrote'} {bundle.path}: {size}, {target}, NMS {manifest.nms.mode}, {silu}, "
        f"{precision} (asked {' '.join(words(options))})"
    )


COMMAND = Command(
    "build",
    summary="build a bundle with an engine from a float ONNX model; INT8 by default",
    add_options=model_options("BUNDLE", "folder that is written", BuildOptions, dry_run=True),
    run=_run,
    usage="MODEL --config CONFIG -o BUNDLE [options]",
    examples=(
        ("m.onnx --config c.yaml --images photos -o b", "INT8 in layers that gain"),
        ("m.onnx --config c.yaml --fp16 -o b", "the float model in FP16"),
        ("m.onnx --config c.yaml --images photos --keep-fp16 5 -o b", "more in FP16"),
        ("m.onnx --config c.yaml --images photos --guard 1.02 -o b", "FP16 unless faster"),
        ("m.onnx --config c.yaml --from tuned:3 -o b", "a measured plan"),
    ),
)
