"""The engine as built: its layers and what gets in the way of INT8."""

from __future__ import annotations

from collections.abc import Mapping

from trtdet.audit import Audit, Layer
from trtdet.audit.findings import KINDS
from trtdet.audit.roofline import Estimate
from trtdet.quantization import PrecisionPlan
from trtdet.report.document import Grid, Part, Section, Text
from trtdet.tables import Cell, Column, Table

_NAMED = 3
"""Convolutions of a layer that are named in a cell."""


def plan_section(plan: PrecisionPlan) -> Section:
    """The planned precision of each convolution, with its reason."""
    rows = [(name, entry.precision.upper(), entry.cause.value, entry.reason) for name, entry in plan.entries.items()]
    columns = (Column("convolution", align="left"), "runs in", "cause", Column("reason", align="left"))
    counts = ", ".join(f"{count} in {name.upper()}" for name, count in plan.counts().items() if count)
    said = f"{len(plan.entries)} convolutions as planned: {counts}."
    return Section("Plan", (Text((said,)), Grid(Table(columns, rows), ("runs in", "cause"))))


def audit_section(audit: Audit, plan: PrecisionPlan, estimate: Estimate) -> Section:
    """The layers of an engine with their precision, bytes and time, and the findings.

    Args:
        audit: of the engine.
        plan: what was planned.
        estimate: of the layers' times.
    """
    parts: list[Part] = [Text((f"{audit.summary[0].upper()}{audit.summary[1:]}.",))]
    if audit.departures:
        columns = ("convolution", "planned", "got", "reason")
        rows = [(one.name, one.planned, one.got, one.reason) for one in audit.departures]
        parts.append(Grid(Table(columns, rows, "Not as planned")))
    parts.append(Grid(_findings(audit), ("finding",)))
    parts.append(Grid(_layers(audit, plan, estimate), ("kernel", "planned", "reads", "writes", "bound by")))
    return Section("Audit of the engine", tuple(parts))


def _findings(audit: Audit) -> Table:
    cost = Column("MB", ".2f") if audit.ms is None else Column("ms", ".4f")
    columns = (cost, Column("share", ".1%"), "finding", Column("layer", align="left"), Column("cause", align="left"))
    rows = [
        (found.bytes / 1e6 if audit.ms is None else found.ms, found.share, KINDS[found.kind], found.layer, found.cause)
        for found in audit.findings
    ]
    return Table(columns, rows, f"What gets in the way of INT8, by {audit.cost}")


def _layers(audit: Audit, plan: PrecisionPlan, estimate: Estimate) -> Table:
    times = {layer.name: layer for layer in estimate.layers}
    columns = (
        *("#", "kernel", Column("convolutions", align="left"), "planned", "reads", "writes", Column("MB", ".3f")),
        *(Column("ms", ".4f"), Column("share", ".1%"), "bound by", Column("layer", align="left")),
    )
    total = estimate.ms or 1.0
    rows: list[list[Cell]] = []
    for place, layer in enumerate(audit.layers, 1):
        timed = times.get(layer.name)
        known: list[Cell] = [timed.ms, timed.ms / total, timed.bound] if timed is not None else [None, None, ""]
        moved: list[Cell] = [layer.input, layer.output, layer.bytes / 1e6]
        rows.append([place, layer.type, *_planned(layer, plan), *moved, *known, _short(layer.name)])
    title = f"Layers in the order of the engine; ms are an estimate for {estimate.gpu.name}, batch {estimate.batch}"
    return Table(columns, rows, f"{title}, not measured")


def _planned(layer: Layer, plan: PrecisionPlan) -> tuple[str, str]:
    """The convolutions of a layer, and their precisions as planned."""
    entries: Mapping[str, str] = {name: plan.entries[name].precision for name in layer.onnx if name in plan.entries}
    names = list(entries)
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest, ", ".join(dict.fromkeys(entries.values())).upper()


def _short(name: str, width: int = 90) -> str:
    """Generated kernels are named after all that they compute, and numbered at the end."""
    return name if len(name) <= width else f"{name[: width - 15]}...{name[-12:]}"
