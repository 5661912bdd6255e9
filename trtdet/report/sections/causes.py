"""Where the error comes from: convolution by convolution, and block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trtdet.mixed_precision.breakdown import Breakdown
from trtdet.mixed_precision.scores import LayerScore, Sensitivity
from trtdet.quantization import PrecisionPlan
from trtdet.report.document import Chart, Grid, Part, Section, Text
from trtdet.report.palette import COLOURS, GREY, PRECISIONS
from trtdet.tables import Cell, Column, Table


def sensitivity_section(ranking: Sensitivity, plan: PrecisionPlan | None) -> Section:
    """What INT8 costs at each convolution, in the order of the network and sorted.

    Args:
        ranking: of the convolutions.
        plan: what they run in, for the colours; None where it is not known.
    """
    total = sum(max(layer.score, 0.0) for layer in ranking.layers) or 1.0
    precisions = {} if plan is None else {name: entry.precision for name, entry in plan.entries.items()}
    measured = "each convolution alone in INT8" if ranking.base == "fp32" else "all but each convolution in INT8"
    said = (
        f"Error at the head with {measured}, on {ranking.images} images; powers of independent causes add up, and a "
        "share is of their sum."
    )
    charts: list[Part] = [Text((said,))]
    if all(layer.place for layer in ranking.layers):
        ordered = sorted(ranking.layers, key=lambda layer: layer.place)
        charts.append(_bars("In the order of the network", ordered, total, precisions))
    charts.append(_bars("The most sensitive first", ranking.layers, total, precisions))
    charts.append(Grid(_table(ranking, total, precisions), ("kind", "runs in")))
    return Section("Sensitivity by layer", tuple(charts))


def _table(ranking: Sensitivity, total: float, precisions: Mapping[str, str]) -> Table:
    """The ranking, of columns those that are not empty."""
    columns: list[tuple[Column, Callable[[LayerScore], Cell]]] = [
        (Column("rank"), lambda layer: layer.rank),
        (Column("place"), lambda layer: layer.place or None),
        (Column("convolution", align="left"), lambda layer: layer.name),
        (Column("error", ".6f"), lambda layer: layer.score),
        (Column("share", ".1%"), lambda layer: layer.score / total),
        (Column("multiply-adds", ".1%"), lambda layer: layer.macs / max(ranking.macs, 1)),
        (Column("mAP", ".2f"), lambda layer: None if layer.map is None else 100 * layer.map),
        (Column("kind"), lambda layer: "depthwise" if layer.depthwise else layer.kind or None),
        (Column("runs in"), lambda layer: precisions.get(layer.name, "").upper() or None),
    ]
    shown = [(column, cell) for column, cell in columns if any(cell(layer) is not None for layer in ranking.layers)]
    rows = [[cell(layer) for _, cell in shown] for layer in ranking.layers]
    return Table([column for column, _ in shown], rows)


def _bars(title: str, layers: Sequence[LayerScore], total: float, precisions: Mapping[str, str]) -> Chart:
    kinds = dict.fromkeys(precisions.get(layer.name, "") for layer in layers)
    traces = []
    for kind in kinds:
        chosen = [(place, layer) for place, layer in enumerate(layers, 1) if precisions.get(layer.name, "") == kind]
        traces.append(
            {
                "type": "bar",
                "name": kind.upper() or "error",
                "x": [place for place, _ in chosen],
                "y": [100 * layer.score / total for _, layer in chosen],
                "hovertext": [f"{layer.name}<br>rank {layer.rank}, {layer.score / total:.1%}" for _, layer in chosen],
                "hoverinfo": "text",
                "marker": {"color": PRECISIONS[kind]},
            }
        )
    layout = {
        "barmode": "stack",
        "showlegend": len(kinds) > 1,
        "xaxis": {"title": {"text": "convolution"}},
        "yaxis": {"title": {"text": "% of the error"}},
    }
    return Chart(title, traces, layout, height=300)


def blocks_section(found: Breakdown) -> Section:
    """Which blocks carry the error at the head by the plain rule, and as it is written with the corrections."""
    names = [block.name for block in found.blocks]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": title,
            "y": names,
            "x": [getattr(block, key).distance for block in found.blocks],
            "marker": {"color": colour},
            "hovertemplate": "%{y}: %{x:.4f}",
        }
        for title, key, colour in (("by the plain rule", "before", GREY), ("as written", "after", COLOURS[0]))
    ]
    layout = {
        "barmode": "group",
        "xaxis": {"title": {"text": "error at the head, the block alone in INT8"}},
        "yaxis": {"autorange": "reversed", "tickvals": names, "ticktext": [_tail(name) for name in names]},
    }
    said = (
        f"The whole network's error at the head is {found.before:.4f} by the plain rule and {found.after:.4f} as "
        f"written, lower on {found.lower_on} of {found.seen} images where anything is detected; detections agree with "
        f"the float model's by {found.agreement_before:.1%} and {found.agreement_after:.1%}. Blocks were measured on "
        f"{found.block_images} images that nothing was computed from."
    )
    parts: list[Part] = [
        Text((said,)),
        Chart("Blocks in the order of the network", traces, layout, height=80 + 34 * len(names)),
        Grid(_blocks(found)),
    ]
    if found.corrections:
        parts.append(Grid(_corrections(found)))
    return Section("Blocks that carry the error", tuple(parts))


def _tail(name: str, width: int = 30) -> str:
    """The end of a name, which tells it from others."""
    return name if len(name) <= width else f"…{name[-width + 1 :]}"


def _blocks(found: Breakdown) -> Table:
    total = sum(block.after.power for block in found.blocks) or 1.0
    columns = (
        *(Column("block", align="left"), "INT8 convolutions", Column("by the plain rule", ".4f")),
        *(Column("as written", ".4f"), Column("share", ".1%")),
    )
    rows = [
        (
            *(block.name, len(block.convs), block.before.distance, block.after.distance),
            block.after.power / total,
        )
        for block in found.blocks
    ]
    return Table(columns, rows, "Error at the head with one block in INT8")


def _corrections(found: Breakdown) -> Table:
    columns = ("correction", Column("error with it and those before", ".4f"), Column("all but it", ".4f"))
    rows = [(part.name.replace("_", " "), part.error, part.without) for part in found.corrections]
    return Table(columns, rows, "What each correction does to the error of the whole network")
