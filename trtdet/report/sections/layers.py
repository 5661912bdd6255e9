"""Sections on the planned precision, and on the layers of the engine with the findings of its audit."""

from __future__ import annotations

from trtdet.audit import Audit
from trtdet.audit.findings import KINDS
from trtdet.audit.roofline import Estimate
from trtdet.quantization import PrecisionPlan
from trtdet.report.document import Grid, Section, Text
from trtdet.report.sections.verdicts import listed
from trtdet.tables import Cell, Column, Table


def plan_section(plan: PrecisionPlan) -> Section:
    """The planned precision of each convolution, with its reason."""
    rows = [(name, entry.precision.upper(), entry.cause.value, entry.reason) for name, entry in plan.entries.items()]
    columns = (Column("convolution", align="left"), "runs in", "cause", Column("reason", align="left"))
    counts = ", ".join(f"{count} in {name.upper()}" for name, count in plan.counts().items() if count)
    text = f"{len(plan.entries)} convolutions as planned: {counts}."
    return Section("Plan", (Text((text,)), Grid(Table(columns, rows), ("runs in", "cause"))))


def audit_section(audit: Audit, plan: PrecisionPlan, estimate: Estimate) -> Section:
    """Deviations from the plan, obstacles to INT8, and the layers with their precision, bytes and estimated time."""
    parts = []
    if audit.departures:
        departures = [(entry.name, entry.planned, entry.got, entry.reason) for entry in audit.departures]
        parts.append(Grid(Table(("convolution", "planned", "got", "reason"), departures, "Not as planned")))
    columns: tuple[Column | str, ...]
    cost = Column("MB", ".2f") if audit.ms is None else Column("ms", ".4f")
    columns = (cost, Column("share", ".1%"), "finding", Column("layer", align="left"), Column("cause", align="left"))
    findings = [
        (each.bytes / 1e6 if audit.ms is None else each.ms, each.share, KINDS[each.kind], each.layer, each.cause)
        for each in audit.findings
    ]
    parts.append(Grid(Table(columns, findings, f"What gets in the way of INT8, by {audit.cost}"), ("finding",)))
    times, total = {layer.name: layer for layer in estimate.layers}, estimate.ms or 1.0
    rows: list[tuple[Cell, ...]] = []
    for place, layer in enumerate(audit.layers, 1):
        planned = {name: plan.entries[name].precision.upper() for name in layer.onnx if name in plan.entries}
        time = times.get(layer.name)
        # Names of generated kernels list all their operations and end with a number.
        name = layer.name if len(layer.name) <= 90 else f"{layer.name[:75]}...{layer.name[-12:]}"
        rows.append(
            (
                *(place, layer.type, listed(list(planned)), ", ".join(dict.fromkeys(planned.values()))),
                *(layer.input, layer.output, layer.bytes / 1e6),
                *((time.ms, time.ms / total, time.bound) if time is not None else (None, None, "")),
                name,
            )
        )
    columns = (
        *("#", "kernel", Column("convolutions", align="left"), "planned", "reads", "writes", Column("MB", ".3f")),
        *(Column("ms", ".4f"), Column("share", ".1%"), "bound by", Column("layer", align="left")),
    )
    title = (
        f"Layers in the order of the engine; ms are an estimate for {estimate.gpu.name}, batch {estimate.batch}, not "
        "measured"
    )
    parts.append(Grid(Table(columns, rows, title), ("kernel", "planned", "reads", "writes", "bound by")))
    return Section("Audit of the engine", tuple(parts))
