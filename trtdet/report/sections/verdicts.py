"""The most important results of a bundle: sentences on accuracy and next steps, and a table of figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtdet.audit.roofline import TIME_WITHIN
from trtdet.bundle import CandidatePart
from trtdet.candidates import times_table
from trtdet.evaluation.comparison import spread_text
from trtdet.evaluation.parts import NAMES, Of
from trtdet.quantization import Cause
from trtdet.report.document import Grid, Section
from trtdet.report.runs import Run
from trtdet.tables import Column, Table, listed

_MOST = 3
"""Most items that a list names: advice of the audit, or convolutions with the same cause."""

_CAUSES: Mapping[Cause, str] = {
    Cause.UNSPECIFIED: "the plan gives no cause",
    Cause.TRANSPOSED: "transposed: no INT8 kernel takes a scale for each output channel",
    Cause.WEIGHTS_NOT_CONSTANT: "its weights are computed by the network",
    Cause.INPUT_CONSTANT: "its input is a constant",
    Cause.DECODES_BOXES: "it decodes boxes, which half precision cannot tell apart",
    Cause.DEPTHWISE: "depthwise: INT8 makes it no faster",
    Cause.FEW_CHANNELS: "few channels: an INT8 kernel would mostly compute padding",
    Cause.HEAD_OUTPUT: "outputs of a head, which nothing quantises",
    Cause.NO_TIME_GAINED: "INT8 is estimated to take longer here",
    Cause.FLOAT_IN_MODEL: "not quantised in the model that was given",
    Cause.REQUESTED: "asked for",
    Cause.KEPT_NAMED: "named by --keep-fp16",
    Cause.KEPT_SENSITIVE: "among the most sensitive that --keep-fp16 asked for",
    Cause.KEPT_BUDGET: "within plan.fp16_budget",
    Cause.KEPT_BOUND: "needed for the bound on the loss",
    Cause.KEPT_LATENCY: "in the most accurate plan within the time limit",
    Cause.KEPT_TUNED: "in this plan of the front",
    Cause.EDITED: "edited by hand",
    Cause.FP16_OVERFLOW: "a value exceeds the largest of FP16",
}


def bundle_notes(run: Run) -> tuple[str, ...]:
    """Sentences about a bundle: its accuracy, the shift of scores, the candidate and the precision that ship."""
    assert run.bundle is not None
    lines = [accuracy_sentence(run.worth, run.scores)]
    shift = ((run.scores or {}).get("against") or {}).get("score_shift") or {"overall": ()}
    pairs = [entry for entry in shift["overall"] if entry["threshold"] is not None]
    if pairs:
        same = ", ".join(f"{entry['threshold']:.3f} serves as {entry['reference']:g} did" for entry in pairs)
        lines.append(f"shift of scores: a threshold of {same}")
    lines += [_candidate_sentence(part) for part in run.bundle.manifest.candidates if part.shipped]
    guard = run.bundle.manifest.guard
    if guard is not None and guard.shipped != guard.asked:
        lines.append(f"FP16 is shipped: {guard.reason}")
    return tuple(line for line in lines if line)


def accuracy_sentence(worth: Mapping[str, Any] | None, scores: Mapping[str, Any] | None) -> str:
    """mAP with the interval of its difference, or the agreement; empty where neither was measured.

    The evaluation (``scores``) has priority over the build's own comparison (``worth``).
    """
    if scores is None:
        comparison = (worth or {}).get("comparison")
        if worth is None or comparison is None:
            return ""
        scores = {"map": comparison["map"] + comparison["difference"]}
        against, name = comparison, worth["against"].upper()
    else:
        against = scores.get("against") or {}
        name = Path(against.get("file", "")).name
    if "difference" in against:
        difference, low, high = (100 * against[key] for key in ("difference", "low", "high"))
        parts = "".join(
            f"; {NAMES[of]} against {100 * against[of]['map']:.2f}: {spread_text(against[of])}"
            for of in _parts(against)
        )
        return (
            f"mAP {100 * scores['map']:.2f} against {100 * against['map']:.2f} of {name}: {difference:+.2f} points "
            f"({100 * against['confidence']:g} % interval {low:+.2f} .. {high:+.2f}, paired bootstrap over "
            f"{against['images']} images, {against['ran_on']}): {against['verdict']}{parts}"
        )
    if scores["map"] is not None:
        return f"mAP {100 * scores['map']:.2f} on {scores['images']} images, {scores['ran_on']}"
    agreement = against.get("agreement") or {}
    if agreement.get("ap") is None:
        return ""
    return (
        f"agreement with {against['file']}: AP {100 * agreement['ap']:.2f} ({100 * agreement['low']:.2f} .. "
        f"{100 * agreement['high']:.2f}) on {agreement['images']} images"
    )


def _parts(against: Mapping[str, Any]) -> list[Of]:
    """The parts beside boxes that a comparison has."""
    return [of for of in NAMES if of in against]


def _candidate_sentence(part: CandidatePart) -> str:
    """Accuracy and speed of the candidate that ships."""
    score = "mAP" if part.figure == "map" else "agreement"
    difference, low, high = (100 * value for value in (part.difference, part.low, part.high))
    speed = "" if part.ratio is None else f", {part.ratio:.2f} of FP16's time, {part.how} on {part.on}"
    others = "".join(f", {of.replace('_', ' ')} {accuracy}" for of, accuracy in part.parts.items())
    return (
        f"candidate '{part.name}' ships: {score} {difference:+.2f} points against FP32 (90 % interval {low:+.2f} .. "
        f"{high:+.2f}, {part.images} images, onnxruntime){others}{speed}"
    )


def next_steps(run: Run) -> Iterator[tuple[str, str]]:
    """Pairs of a step and its reason, the most urgent first. ``run`` is a bundle."""
    bundle, worth, audit, scores = run.bundle, run.worth, run.audit, run.scores
    assert bundle is not None
    check = bundle.manifest.input_check or {}
    if check.get("warning"):
        untold = check.get("verdict") in ("cannot tell", "not done")
        step = "build with images that show the model's classes" if untold else "correct the pre-processing and head"
        yield step, str(check["warning"])
    known = accuracy_sentence(worth, scores) or bundle.manifest.candidates
    if bundle.manifest.shipped == "int8" and not known:
        yield (
            f"trtdet eval {run.path} --against MODEL --images DIR --annotations JSON",
            "what INT8 cost in mAP was not measured",
        )
    against = (scores or {}).get("against") or (worth or {}).get("comparison") or {}
    if any(score.get("high", 0.0) < 0 for score in (against, *(against[of] for of in _parts(against)))):
        yield "build with --max-map-drop X, or with --effort thorough", "the loss of mAP is more than chance"
    if audit is not None and audit.departures:
        yield "see 'Not as planned' in the audit", f"{len(audit.departures)} convolutions run in another precision"
    if audit is not None and audit.int8 + audit.fp8 == 0 and bundle.manifest.shipped == "int8":
        yield "build with --fp16, or with --int8-all", "no convolution runs in INT8"
    elif worth is not None and worth.get("speedup") is not None and worth["speedup"] <= 1 and not worth.get("guard"):
        what = "INT8 is not faster than FP16"
        if worth.get("latency") is None and (worth.get("estimate") or {}).get("verdict", "").startswith("cannot"):
            what = "the estimate cannot tell whether INT8 is faster than FP16: measure it with 'trtdet bench'"
        yield "build with --guard", f"{what}; --guard ships FP16 where it is not"
    if worth is not None and worth.get("advice"):
        yield "see --keep-fp16 in the next line", str(worth["advice"])
    for advice in audit.advice[:_MOST] if audit is not None else ():
        saved = f"by estimate that saves {advice.bytes / 1e6:.1f} MB of each run's traffic, {advice.share:.0%}"
        yield f"build with {advice.option}", f"{advice.text}; {saved}"


def figures_section(run: Run) -> Section:
    """Tables of a bundle's time, size and precision, and of the convolutions that are not in INT8."""
    bundle, plan, worth = run.bundle, run.plan, run.worth or {}
    assert bundle is not None and plan is not None
    manifest, latency, estimate = bundle.manifest, worth.get("latency"), worth.get("estimate")
    rows: list[tuple[str, str, str, str]] = []
    if latency is not None:
        against = f"FP16 ({latency['low']:.2f} .. {latency['high']:.2f})"
        basis = f"measured on {worth['ran_on']}, batch {worth['batch']}"
        rows.append(("latency", f"{latency['value']:.2f}x", against, basis))
    if estimate:
        times = [f"{estimate[key]['ms']:.3f} ms" for key in ("int8", "fp16")]
        basis = f"estimated for {estimate['gpu']}, batch {estimate['batch']}, within a factor of {TIME_WITHIN:g}"
        rows.append(("time of a run", times[0], f"{times[1]} in FP16", basis))
        if "interval" in estimate:
            ratio = "{:.2f} ({:.2f} .. {:.2f})".format(estimate["ratio"], *estimate["interval"])
            rows.append(("INT8's time over FP16's", ratio, estimate["verdict"], basis))
    if bundle.engine is not None:
        other = f"{estimate['fp16']['file_bytes'] / 1e6:.2f} MB in FP16" if estimate else ""
        rows.append(("engine file", f"{bundle.engine.stat().st_size / 1e6:.2f} MB", other, "size of the file"))
    if estimate:
        moved = [f"{estimate[key]['bytes'] / 1e6:.1f} MB" for key in ("int8", "fp16")]
        basis = "estimated from the engine's layers"
        rows.append(("memory traffic of a run", moved[0], f"{moved[1]} in FP16", basis))
    counts = manifest.audit or manifest.precision
    fp8 = f"{manifest.audit.fp8} FP8, " if manifest.audit and manifest.audit.fp8 else ""
    basis = "audit of the engine" if manifest.audit else "as planned, not audited"
    rows.append(("convolutions", f"{counts.int8} INT8, {fp8}{counts.fp16} FP16, {counts.fp32} FP32", "", basis))
    quantization = manifest.quantization
    if quantization.images is not None:
        rows.append(("calibration", f"{quantization.calibrator}", "", f"{quantization.images.count} images"))
    columns = ("figure", Column("value", align="left"), Column("against", align="left"), Column("how it is known"))
    parts = [Grid(Table(columns, rows).filled())]
    if manifest.candidates:
        parts.append(Grid(replace(times_table(manifest.candidates), title="Candidates for the engine")))
    not_int8: dict[tuple[str, Cause], list[str]] = {}
    for name, entry in plan.entries.items():
        if entry.precision != "int8":
            not_int8.setdefault((entry.precision, entry.cause), []).append(name)
    if not_int8:
        causes = [
            (precision.upper(), len(names), _CAUSES.get(cause, cause.value), listed(names, _MOST))
            for (precision, cause), names in sorted(not_int8.items(), key=lambda item: -len(item[1]))
        ]
        why = ("runs in", "convolutions", Column("why", align="left"), Column("which", align="left"))
        parts.append(Grid(Table(why, causes, "What is not in INT8, and why")))
    return Section("Figures, and what is not in INT8", tuple(parts), brief=True)
