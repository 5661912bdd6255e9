"""What a bundle costs and brings, in sentences and a table: what a reader wants first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trtdet.bundle import Manifest
from trtdet.pipeline.points import Front
from trtdet.quantization import Cause
from trtdet.report.document import Grid, Part, Section
from trtdet.report.runs import Run
from trtdet.report.sections.fronts import variant_title
from trtdet.tables import Column, Table

_ADVICE = 3
"""Pieces of an audit's advice, and causes, that a verdict names."""

_CAUSES: Mapping[Cause, str] = {
    Cause.UNSPECIFIED: "the plan gives no cause",
    Cause.TRANSPOSED: "transposed: no INT8 kernel takes a scale for each output channel",
    Cause.WEIGHTS_NOT_CONSTANT: "its weights are computed by the network",
    Cause.INPUT_CONSTANT: "its input is a constant",
    Cause.DECODES_BOXES: "it decodes boxes, which half precision cannot tell apart",
    Cause.DEPTHWISE: "depthwise: INT8 makes it no faster",
    Cause.FEW_CHANNELS: "few channels: an INT8 kernel would mostly compute padding",
    Cause.HEAD_OUTPUT: "outputs of a head, which nothing quantises",
    Cause.BOUND_BY_MEMORY: "bound by memory: quantising its input takes longer than INT8 saves",
    Cause.REQUESTED: "asked for",
    Cause.KEPT_NAMED: "named by --keep-fp16",
    Cause.KEPT_SENSITIVE: "among the most sensitive that --keep-fp16 asked for",
    Cause.KEPT_BUDGET: "within --fp16-budget",
    Cause.KEPT_BOUND: "needed for the bound on the loss",
    Cause.KEPT_LATENCY: "in the most accurate plan within --max-latency",
    Cause.KEPT_TUNED: "at this point of the front",
    Cause.EDITED: "edited by hand",
    Cause.FP16_OVERFLOW: "a value exceeds the largest of FP16",
}


def bundle_verdict(run: Run, scores: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Sentences about a bundle: accuracy, time, size, precision.

    Args:
        run: of a bundle.
        scores: what ``trtdet eval -o eval.json`` wrote about it; None where it was not given.
    """
    manifest = run.manifest
    assert manifest is not None
    found = [accuracy_said(run.worth, scores), _shift_said(scores), _time_said(run.worth), _precision_said(manifest)]
    found.append(_kept_said(run))
    found += [f"next: {todo}, as {why}" for todo, why in list(_next(run, scores))[:1]]
    return tuple(f"{run.name}: {line}." for line in found if line)


def accuracy_said(worth: Mapping[str, Any] | None, scores: Mapping[str, Any] | None) -> str:
    """mAP with the interval of its difference, or agreement, from the evaluation or else from the build; empty where
    neither was measured."""
    if scores is not None:
        against = scores.get("against") or {}
        if "difference" in against:
            return _difference_said(scores["map"], against, Path(against["file"]).name)
        if scores["map"] is not None:
            return f"mAP {100 * scores['map']:.2f} on {scores['images']} images"
        agreed = against.get("agreement") or {}
        if agreed.get("ap") is not None:
            return (
                f"agreement with {against['file']}: AP {100 * agreed['ap']:.2f} ({100 * agreed['low']:.2f} .. "
                f"{100 * agreed['high']:.2f}) on {agreed['images']} images"
            )
    compared = (worth or {}).get("comparison")
    if worth is None or compared is None:
        return ""
    return _difference_said(compared["map"] + compared["difference"], compared, worth["against"].upper())


def _difference_said(score: float, against: Mapping[str, Any], name: str) -> str:
    difference, low, high = (100 * against[key] for key in ("difference", "low", "high"))
    return (
        f"mAP {100 * score:.2f} against {100 * against['map']:.2f} of {name}: {difference:+.2f} points "
        f"({100 * against['confidence']:g} % interval {low:+.2f} .. {high:+.2f}, {against['images']} images): "
        f"{against['verdict']}"
    )


def _shift_said(scores: Mapping[str, Any] | None) -> str:
    shift = ((scores or {}).get("against") or {}).get("score_shift")
    if shift is None:
        return ""
    known = [entry for entry in shift["overall"] if entry["threshold"] is not None]
    said = [f"{entry['threshold']:.3f} serves as {entry['reference']:g} did" for entry in known]
    return f"shift of scores: a threshold of {', '.join(said)}" if said else ""


def _time_said(worth: Mapping[str, Any] | None) -> str:
    if worth is None:
        return ""
    latency, estimate = worth.get("latency"), worth.get("estimate")
    if latency is not None:
        return (
            f"measured on {worth['ran_on']}, batch {worth['batch']}: {latency['value']:.2f}x the latency of FP16 "
            f"({latency['low']:.2f} .. {latency['high']:.2f})"
        )
    if estimate is None:
        return ""
    return f"time not measured; {estimate['said']}"


def _precision_said(manifest: Manifest) -> str:
    counts = manifest.audit or manifest.precision
    how = "as built" if manifest.audit is not None else "as planned, not audited"
    fp8 = f"{manifest.audit.fp8} in FP8, " if manifest.audit and manifest.audit.fp8 else ""
    said = f"{counts.int8} convolutions in INT8, {fp8}{counts.fp16} in FP16, {counts.fp32} in FP32 {how}"
    if manifest.guard is not None and manifest.guard.shipped != manifest.guard.asked:
        said += f"; FP16 is shipped: {manifest.guard.reason}"
    return said


def _kept_said(run: Run) -> str:
    """Why convolutions are not in INT8, the most frequent causes first."""
    entries = run.plan.entries.values() if run.plan is not None else ()
    causes = Counter(entry.cause for entry in entries if entry.precision != "int8")
    said = [f"{count} {_CAUSES.get(cause, cause.value)}" for cause, count in causes.most_common(_ADVICE)]
    return f"not in INT8: {'; '.join(said)}" if said else ""


def front_verdict(name: str, front: Front) -> tuple[str, ...]:
    """A sentence about the points that no other beats."""
    best = [point for point in front.points if point.beaten_by is None]
    cheapest, dearest = best[0], best[-1]
    what = "mAP against FP32" if front.annotated else "agreement with FP32, against 100"
    said = [
        f"{name}: of {len(front.points)} plans no other beats {len(best)}, from {front.cost(cheapest):.4g} to "
        f"{front.cost(dearest):.4g} {front.unit}; {what} from {100 * cheapest.difference:+.2f} "
        f"({cheapest.interval}) to {100 * dearest.difference:+.2f} ({dearest.interval})."
    ]
    safe = next((point for point in best if point.high >= 0), None)
    if safe is not None:
        said.append(
            f"{name}: the cheapest plan that is not shown to lose anything is point {safe.number} ({safe.title}) at "
            f"{front.cost(safe):.4g} {front.unit}."
        )
    return tuple(said)


def sweep_verdict(name: str, rows: tuple[Mapping[str, Any], ...]) -> tuple[str, ...]:
    """A sentence about the best of the quantised variants."""
    int8 = [row for row in rows if row["precision"] == "INT8"]
    if not int8:
        return ()
    best = max(int8, key=lambda row: row["difference"])
    interval = f" ({100 * best['low']:+.2f} .. {100 * best['high']:+.2f})" if best["low"] is not None else ""
    worst = min(int8, key=lambda row: row["difference"])
    return (
        f"{name}: of {len(int8)} INT8 variants '{variant_title(best)}' keeps most: mAP {100 * best['map']:.2f}, "
        f"{100 * best['difference']:+.2f}{interval} against FP32; the least, '{variant_title(worst)}', "
        f"{100 * worst['difference']:+.2f}.",
    )


def verdict_section(run: Run, scores: Mapping[str, Any] | None) -> Section:
    """A bundle's figures as a table, what stayed out of INT8 and why, and what to do next."""
    columns = ("figure", Column("value", align="left"), Column("against", align="left"), Column("how it is known"))
    parts: list[Part] = [Grid(Table(columns, list(_figures(run, scores))))]
    kept = _kept(run)
    if kept is not None:
        parts.append(Grid(kept))
    advice = list(_next(run, scores))
    if advice:
        parts.append(Grid(Table((Column("what to do next", align="left"), Column("why", align="left")), advice)))
    return Section("Figures", tuple(parts), brief=True)


def _figures(run: Run, scores: Mapping[str, Any] | None) -> Iterator[tuple[str, str, str, str]]:
    bundle, worth = run.bundle, run.worth or {}
    assert bundle is not None
    against = (scores or {}).get("against") or worth.get("comparison") or {}
    if "difference" in against:
        value = against["map"] + against["difference"]
        yield (
            "mAP",
            f"{100 * value:.2f}",
            f"{100 * against['map']:.2f}: {100 * against['difference']:+.2f} "
            f"({100 * against['low']:+.2f} .. {100 * against['high']:+.2f})",
            f"paired bootstrap over {against['images']} images, {against['ran_on']}",
        )
    elif scores is not None and scores["map"] is not None:
        yield "mAP", f"{100 * scores['map']:.2f}", "", f"{scores['images']} images, {scores['ran_on']}"
    yield from _times(worth)
    estimate = worth.get("estimate")
    if bundle.engine is not None:
        other = f"{estimate['fp16']['file_bytes'] / 1e6:.2f} MB in FP16" if estimate else ""
        yield "engine file", f"{bundle.engine.stat().st_size / 1e6:.2f} MB", other, "size of the file"
    if estimate:
        moved = [f"{estimate[key]['bytes'] / 1e6:.1f} MB" for key in ("int8", "fp16")]
        yield "memory traffic of a run", moved[0], f"{moved[1]} in FP16", "estimated from the engine's layers"
    counts = bundle.manifest.audit or bundle.manifest.precision
    yield (
        "convolutions",
        f"{counts.int8} INT8, {counts.fp16} FP16, {counts.fp32} FP32",
        "",
        "audit of the engine" if bundle.manifest.audit else "plan",
    )
    quantization = bundle.manifest.quantization
    if quantization.images is not None:
        yield "calibration", f"{quantization.calibrator}", "", f"{quantization.images.count} images"


def _times(worth: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    latency, estimate = worth.get("latency"), worth.get("estimate")
    if latency is not None:
        yield (
            "latency",
            f"{latency['value']:.2f}x",
            f"FP16 ({latency['low']:.2f} .. {latency['high']:.2f})",
            f"measured on {worth['ran_on']}, batch {worth['batch']}",
        )
    if estimate:
        yield (
            "time of a run",
            f"{estimate['int8']['ms']:.3f} ms",
            f"{estimate['fp16']['ms']:.3f} ms in FP16",
            f"estimated for {estimate['gpu']}, batch {estimate['batch']}; not measured",
        )


def _kept(run: Run) -> Table | None:
    """The convolutions that are not in INT8, by precision and cause."""
    plan = run.plan
    if plan is None:
        return None
    causes = Counter((entry.precision, entry.cause) for entry in plan.entries.values() if entry.precision != "int8")
    if not causes:
        return None
    named: dict[tuple[str, Cause], list[str]] = {}
    for name, entry in plan.entries.items():
        named.setdefault((entry.precision, entry.cause), []).append(name)
    rows = [
        (precision.upper(), count, _CAUSES.get(cause, cause.value), _listed(named[precision, cause]))
        for (precision, cause), count in causes.most_common()
    ]
    columns = ("runs in", "convolutions", Column("why", align="left"), Column("which", align="left"))
    return Table(columns, rows, "What is not in INT8, and why")


def _listed(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _next(run: Run, scores: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """What to do next, the most pressing first."""
    bundle, worth, audit = run.bundle, run.worth, run.audit
    assert bundle is not None
    check = bundle.manifest.input_check or {}
    if check.get("warning"):
        yield "check the configuration's pre-processing and head", str(check["warning"])
    if bundle.manifest.shipped == "int8" and not accuracy_said(worth, scores):
        yield (
            f"trtdet eval {run.path} --against MODEL --images DIR --annotations JSON",
            "what INT8 cost in mAP was not measured",
        )
    against = (scores or {}).get("against") or (worth or {}).get("comparison") or {}
    if against.get("high", 0.0) < 0:
        yield "build with --max-map-drop X, or with --effort thorough", "the loss of mAP is more than chance"
    if audit is not None and audit.departures:
        yield "see 'Not as planned' in the audit", f"{len(audit.departures)} convolutions run in another precision"
    if audit is not None and audit.int8 + audit.fp8 == 0 and bundle.manifest.shipped == "int8":
        yield "build with --fp16, or with --int8-all", "no convolution runs in INT8"
    elif worth is not None and worth.get("speedup") is not None and worth["speedup"] <= 1 and not worth.get("guard"):
        yield "build with --guard", "INT8 is not faster than FP16, and --guard ships FP16 then"
    if worth is not None and worth.get("advice"):
        yield "see --keep-fp16 in the next line", str(worth["advice"])
    for advice in audit.advice[:_ADVICE] if audit is not None else ():
        yield advice.option, f"{advice.bytes / 1e6:.1f} MB less a run, {advice.share:.0%}, by estimate: {advice.text}"
