"""Sensitivity of the convolutions to INT8."""

from __future__ import annotations

from collections.abc import Mapping

from trtdet.plans.scores import Sensitivity
from trtdet.quantization import PrecisionPlan
from trtdet.report.charts import PRECISIONS, axes, bars_in_row
from trtdet.report.document import Chart, Grid, Section, Text
from trtdet.tables import Cell, Column, Table


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
            f"{layer.name}<br>rank {layer.rank}, {layer.score / total:.1%}",
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
