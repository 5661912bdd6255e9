"""Accuracy against cost: the points of a tune, the rows of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtdet.pipeline.points import Front, Point
from trtdet.pipeline.variants import sweep_table
from trtdet.report.document import Chart, Grid, Section, Text
from trtdet.report.palette import COLOURS, GREY

_BY_POINT = "trtdet build MODEL --config CONFIG --tuned {folder} --point N -o BUNDLE"


def front_section(front: Front) -> Section:
    """The front of a model: its points with their intervals against cost, and the table."""
    return Section(
        "Pareto front",
        (
            Text((f"{front.basis}.",)),
            front_chart(front),
            Grid(front.table()),
            Text((_BY_POINT.format(folder=front.folder),), code=True),
        ),
        brief=True,
    )


def front_chart(front: Front) -> Chart:
    """Points, a line through those that no other beats, and the axes that a reader wants first."""
    best = [point for point in front.points if point.beaten_by is None]
    beaten = [point for point in front.points if point.beaten_by is not None]
    traces = [_points("no other beats it", best, front, COLOURS[0], "lines+markers+text")]
    if beaten:
        traces.append(_points("another beats it", beaten, front, GREY, "markers+text"))
    # A long interval of a bad point would press the others together.
    ends = [100 * end for point in best for end in (point.low, point.high)]
    values = [0.0, *ends, *(100 * point.difference for point in front.points)]
    room = 0.08 * (max(values) - min(values)) or 1.0
    return Chart(
        f"{front.accuracy}, by {front.unit}",
        traces,
        {
            "xaxis": {"title": {"text": front.unit}},
            "yaxis": {
                "title": {"text": "points of mAP" if front.annotated else "points of agreement"},
                "range": [min(values) - room, max(values) + room],
            },
            "hovermode": "closest",
        },
        "Whiskers are 90 % intervals. Names and numbers are those of the table.",
        460,
    )


def _points(name: str, points: Sequence[Point], front: Front, colour: str, mode: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": name,
        "mode": mode,
        "x": [front.cost(point) for point in points],
        "y": [100 * point.difference for point in points],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [100 * (point.high - point.difference) for point in points],
            "arrayminus": [100 * (point.difference - point.low) for point in points],
            "color": colour,
            "thickness": 1.2,
        },
        "text": [str(point.number) for point in points],
        "textposition": "top right",
        "hovertext": [_tip(front, point) for point in points],
        "hoverinfo": "text",
        "marker": {"size": 11, "color": colour},
        "line": {"color": colour, "width": 1.5, "dash": "dot"},
    }


def _tip(front: Front, point: Point) -> str:
    """What is known of a point, a line for each fact."""
    counts = point.counts
    what = "mAP against FP32" if front.annotated else "agreement against 100"
    known = [
        f"point {point.number}: {point.title}",
        f"{counts['int8']} convolutions INT8, {counts['fp16']} FP16, {counts['fp32']} FP32",
        f"{front.cost(point):.4g} {front.unit}",
        f"{what} {100 * point.difference:+.2f} ({point.interval})",
        f"mAP {100 * point.map:.2f}" if point.map is not None else "",
        f"mask mAP {100 * point.masks['map']:.2f}, {point.mask_difference}" if point.masks is not None else "",
        f"{point.weights / 1e6:.3f} MB of weights",
        f"engine {point.engine / 1e6:.2f} MB" if point.engine is not None else "",
        f"error at the head {point.error:.3g}, predicted",
        f"beaten by point {point.beaten_by}" if point.beaten_by is not None else "",
    ]
    return "<br>".join(line for line in known if line)


def sweep_section(rows: Sequence[Mapping[str, Any]]) -> Section:
    """The matrix of variants: accuracy against latency, or size, where engines were built, and the table."""
    cost, unit = _sweep_cost(rows)
    parts: list[Chart | Grid] = []
    if cost:
        parts.append(_sweep_chart(rows, cost, unit))
    if any("ar100" in row for row in rows):
        parts.append(_proposals_chart([row for row in rows if "ar100" in row]))
    parts.append(
        Grid(sweep_table(rows).filled(), ("precision", "SiLU", "calibration", "corrected", "kept in FP16", "options"))
    )
    return Section("Variants", tuple(parts), brief=True)


def _sweep_cost(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The measure of all rows that is nearest to time: a key, and its unit; empty where rows have none in common."""
    for key, unit in (("latency_ms", "ms, measured"), ("engine_mb", "MB of the engine")):
        if all(row[key] is not None for row in rows):
            return key, unit
    return "int8", "convolutions in INT8"


def _sweep_chart(rows: Sequence[Mapping[str, Any]], cost: str, unit: str) -> Chart:
    kinds = list(dict.fromkeys(_kind(row) for row in rows))
    traces = []
    for place, kind in enumerate(kinds):
        own = [row for row in rows if _kind(row) == kind]
        colour = COLOURS[place % len(COLOURS)]
        low = [row["difference"] if row["low"] is None else row["low"] for row in own]
        high = [row["difference"] if row["high"] is None else row["high"] for row in own]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": kind,
                "x": [row[cost] for row in own],
                "y": [100 * row["difference"] for row in own],
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [100 * (end - row["difference"]) for row, end in zip(own, high, strict=True)],
                    "arrayminus": [100 * (row["difference"] - end) for row, end in zip(own, low, strict=True)],
                    "color": colour,
                    "thickness": 1.2,
                },
                "hovertext": [f"{variant_title(row)}<br>mAP {100 * row['map']:.2f}{_of_masks(row)}" for row in own],
                "hoverinfo": "text",
                "marker": {"size": 10, "color": colour},
            }
        )
    layout = {
        "xaxis": {"title": {"text": unit}},
        "yaxis": {"title": {"text": "points of mAP"}},
        "hovermode": "closest",
    }
    return Chart(f"mAP against FP32, by {unit}", traces, layout, "Whiskers are 90 % intervals.")


def variant_title(row: Mapping[str, Any]) -> str:
    """A variant in words; the rows' own names are keys for machines."""
    limits = (("rpn_pre_nms_topk", "anchors a level"), ("rpn_post_nms_topk", "proposals at most"))
    proposals = "".join(f", {row[key]} {what}" for key, what in limits if row.get(key) is not None)
    if row["calibration"] is None:
        return f"{row['precision']}{proposals}"
    corrections = "+".join(row["corrections"] or ()) or "no corrections"
    kept = f", {row['kept']} kept in FP16" if row["kept"] else ""
    options = "".join(f", {option}" for option in row.get("options", ()))
    return f"{row['precision']} {row['calibration']}, {corrections}{kept}, SiLU {row['silu']}{options}{proposals}"


def _of_masks(row: Mapping[str, Any]) -> str:
    return f", mask mAP {100 * row['masks']['map']:.2f}" if "masks" in row else ""


def _kind(row: Mapping[str, Any]) -> str:
    return f"{row['precision']} {row['calibration']}" if row["calibration"] else str(row["precision"])


_KEPT = (("map", "mAP", "solid"), ("ar100", "AR@100", "dash"), ("ar1000", "AR@1000", "dot"))
"""What fewer proposals cost: a key of a row, its name and the dash of its line."""
_OF_MASKS = ("mask_map", "mask mAP", "dashdot")


def _proposals_chart(rows: Sequence[Mapping[str, Any]]) -> Chart:
    """What each number of proposals costs and keeps, a line for each kind of row and figure."""
    traces, masked = [], all("masks" in row for row in rows)
    rows = [{**row, "mask_map": row["masks"]["map"]} for row in rows] if masked else rows
    for place, kind in enumerate(dict.fromkeys(_kind(row) for row in rows)):
        own = sorted((row for row in rows if _kind(row) == kind), key=lambda row: [one or 0 for one in _numbers(row)])
        told = [" / ".join("all" if one is None else str(one) for one in _numbers(row)) for row in own]
        colour = COLOURS[place % len(COLOURS)]
        for key, name, dash in (*_KEPT, _OF_MASKS) if masked else _KEPT:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers+text" if key == "ar1000" else "lines+markers",
                    "name": f"{name}, {kind}",
                    "x": [row["latency_ms"] for row in own],
                    "y": [100 * row[key] for row in own],
                    "text": told if key == "ar1000" else None,
                    "textposition": "top center" if place % 2 == 0 else "bottom center",
                    "hovertext": [f"{one}<br>{name} {100 * row[key]:.2f}" for one, row in zip(told, own, strict=True)],
                    "hoverinfo": "text",
                    "marker": {"size": 8, "color": colour},
                    "line": {"color": colour, "width": 1.5, "dash": dash},
                }
            )
    layout = {
        "xaxis": {"title": {"text": "ms, median"}},
        "yaxis": {"title": {"text": "mAP and recall, in points"}},
        "hovermode": "closest",
    }
    where = ", ".join(dict.fromkeys(row["timed_on"] for row in rows))
    note = f"At each point: anchors of a level / proposals of the second stage, at most. Times are of {where}."
    return Chart("What fewer proposals cost and keep", traces, layout, note)


def _numbers(row: Mapping[str, Any]) -> tuple[int | None, int | None]:
    return row["rpn_pre_nms_topk"], row["rpn_post_nms_topk"]
