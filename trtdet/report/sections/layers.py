"""Sections by layer: planned precision, the engine's audit with its findings, and sensitivity to INT8."""

from __future__ import annotations

from collections.abc import Mapping

from trtdet.audit import Audit
from trtdet.audit.findings import KINDS
from trtdet.audit.roofline import Estimate
from trtdet.plans.scores import Sensitivity
from trtdet.quantization import PrecisionPlan
from trtdet.report.charts import PRECISIONS, axes, bars_in_row, markup
from trtdet.report.document import Chart, Grid, Section, Text
from trtdet.tables import Cell, Column, Table, listed


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
                *(place, layer.type, listed(list(planned), 3), ", ".join(dict.fromkeys(planned.values()))),
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


def sensitivity_section(ranking: Sensitivity, plan: PrecisionPlan | None) -> Section:
    """A chart in the order of the network, where the ranking has it, and a table by rank.

    ``plan`` gives the precisions for the colours; None where there is no plan.
    """
    total = ranking.total
    precisions: Mapping[str, str] = {name: entry.precision for name, entry in plan.entries.items()} if plan else {}
    measured = "each convolution alone in INT8" if ranking.base == "fp32" else "all but each convolution in INT8"
    text = (
        f"Error at the head with {measured}, on {ranking.images} images; powers of independent causes add up, and a "
        "share is of their sum."
    )
    title, layers = "The most sensitive first", list(ranking.layers)
    if all(layer.place for layer in layers):
        title = "In the order of the network"
        layers.sort(key=lambda layer: layer.place)
    kinds = {name: precisions.get(name, "") for name in (layer.name for layer in layers)}
    bars = [
        (
            kinds[layer.name].upper() or "error",
            100 * layer.score / total,
            f"{markup(layer.name)}<br>rank {layer.rank}, {layer.score / total:.1%}",
        )
        for layer in layers
    ]
    colours = {kind.upper() or "error": PRECISIONS[kind] for kind in kinds.values()}
    layout = axes("convolution", "% of the error", barmode="stack", showlegend=len(colours) > 1)
    columns = (
        *("rank", "place", Column("convolution", align="left"), Column("error", ".6f"), Column("share", ".1%")),
        *(Column("multiply-adds", ".1%"), Column("mAP", ".2f"), "kind", "runs in"),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            *(layer.rank, layer.place or None, layer.name, layer.score, layer.score / total),
            *(layer.macs / max(ranking.macs, 1), None if layer.map is None else 100 * layer.map),
            *("depthwise" if layer.depthwise else layer.kind, kinds[layer.name].upper()),
        )
        for layer in ranking.layers
    ]
    table = Grid(Table(columns, rows).filled(), ("kind", "runs in"))
    chart = Chart(title, bars_in_row(bars, colours), layout, height=300)
    return Section("Sensitivity by layer", (Text((text,)), chart, table))
