"""Accuracy-speed trade-offs of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtdet.evaluation.comparison import PartScore, each_score, spread_text
from trtdet.evaluation.parts import NAMES, Of
from trtdet.experiments.experiment import Experiment, Variant
from trtdet.report.charts import COLOURS, GREY, axes, markup
from trtdet.report.document import Chart, Grid, Section, Text


def experiment_section(experiment: Experiment) -> Section:
    """Charts of accuracy against cost, the table of variants, and the command that builds one."""
    charts = [_trade_offs(experiment)]
    if any(variant.proposals is not None for variant in experiment.variants):
        charts.append(_proposals(experiment))
    return Section(
        "Accuracy-speed trade-offs",
        (
            Text((f"{experiment.basis}.",)),
            *charts,
            Grid(experiment.table().filled()),
            Text((f"trtdet build MODEL --config CONFIG --from {experiment.folder}:N -o BUNDLE",), code=True),
        ),
        brief=True,
        folded=False,
    )


def never_quantized(experiment: Experiment) -> set[str]:
    """Convolutions that no variant runs in INT8."""
    kept = [set(variant.kept) for variant in experiment.variants if variant.counts["int8"]]
    return set.intersection(*kept) if kept else set()


def experiment_verdict(name: str, experiment: Experiment) -> tuple[str, ...]:
    """Sentences about the Pareto-optimal variants."""
    best = sorted(experiment.best, key=experiment.cost)
    cheapest, dearest = best[0], best[-1]
    measure = "mAP against FP32" if experiment.annotated else "agreement with FP32, against 100"
    ends = " to ".join(
        ", ".join(
            [
                f"{100 * variant.difference:+.2f}" + (f" ({variant.interval})" if variant.interval else ""),
                *(
                    f"{of.replace('_', ' ')} {text}"
                    for of, score in variant.parts.items()
                    if (text := spread_text(score))
                ),
            ]
        )
        for variant in (cheapest, dearest)
    )
    lines = [
        f"{name}: {len(best)} of {len(experiment.variants)} variants are Pareto-optimal, from "
        f"{experiment.cost(cheapest):.4g} to {experiment.cost(dearest):.4g} {experiment.unit}; {measure} from {ends}."
    ]
    quantized = [variant for variant in best if variant.counts["int8"]]
    safe = next((variant for variant in quantized if not _shows_loss(variant)), None)
    if safe is not None:
        lines.append(
            f"{name}: the cheapest INT8 variant without a significant loss is {safe.number} ({safe.title}) at "
            f"{experiment.cost(safe):.4g} {experiment.unit}."
        )
    return tuple(lines)


def _shows_loss(variant: Variant) -> bool:
    """Whether boxes or a part lose more than chance, or nothing is known."""
    return any(score["high"] is None or score["high"] < 0 for score in each_score(variant).values())


def _trade_offs(experiment: Experiment) -> Chart:
    best = sorted(experiment.best, key=experiment.cost)
    dominated = [variant for variant in experiment.variants if variant.dominated_by is not None]
    kinds = (("Pareto-optimal", best, COLOURS[0], "lines+markers+text"), ("dominated", dominated, GREY, "markers+text"))
    traces = []
    for name, variants, colour, mode in kinds:
        if not variants:
            continue
        ends = [
            (variant.difference, variant.difference)
            if variant.low is None or variant.high is None
            else (variant.low, variant.high)
            for variant in variants
        ]
        above, below = (
            [100 * abs(end[side] - variant.difference) for variant, end in zip(variants, ends, strict=True)]
            for side in (1, 0)
        )
        traces.append(
            {
                "type": "scatter",
                "name": name,
                "mode": mode,
                "x": [experiment.cost(variant) for variant in variants],
                "y": [100 * variant.difference for variant in variants],
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": above,
                    "arrayminus": below,
                    "color": colour,
                    "thickness": 1.2,
                },
                "text": [str(variant.number) for variant in variants],
                "textposition": "top right",
                "hovertext": [_tip(experiment, variant) for variant in variants],
                "hoverinfo": "text",
                "marker": {"size": 11, "color": colour},
                "line": {"color": colour, "width": 1.5, "dash": "dot"},
            }
        )
    limits = [100 * (end or 0.0) for variant in experiment.variants for end in (variant.low, variant.high)]
    values = [0.0, *limits, *(100 * variant.difference for variant in experiment.variants)]
    room = 0.08 * (max(values) - min(values)) or 1.0
    layout = axes(experiment.unit, "points of mAP" if experiment.annotated else "points of agreement")
    layout["yaxis"]["range"] = [min(values) - room, max(values) + room]
    note = "Whiskers are 90 % intervals. Names and numbers are those of the table."
    measure = "mAP against FP32" if experiment.annotated else "agreement with FP32's detections against 1"
    others = f"{experiment.reported} images" + (" that chose nothing" if experiment.kind == "tune" else "")
    title = f"{measure}, on {others}, by {experiment.unit}"
    return Chart(title, traces, {**layout, "hovermode": "closest"}, note=note, height=460)


def _tip(experiment: Experiment, variant: Variant) -> str:
    """Hover text: one fact of the variant per line."""
    counts = variant.counts
    measure = "mAP against FP32" if experiment.annotated else "agreement against 100"
    spread = f" ({variant.interval})" if variant.interval else ""
    lines = [
        f"variant {variant.number}: {variant.title}",
        f"{counts['int8']} convolutions INT8, {counts['fp16']} FP16, {counts['fp32']} FP32",
        f"{experiment.cost(variant):.4g} {experiment.unit}",
        f"{measure} {100 * variant.difference:+.2f}{spread}",
        f"mAP {100 * variant.map:.2f}" if variant.map is not None else "",
        *(_tip_of(of, score) for of, score in variant.parts.items()),
        f"{variant.weights / 1e6:.3f} MB of weights",
        f"engine {variant.engine / 1e6:.2f} MB" if variant.engine is not None else "",
        f"predicted error {variant.error:.3g}" if variant.error is not None else "",
        f"dominated by variant {variant.dominated_by}" if variant.dominated_by is not None else "",
    ]
    return "<br>".join(markup(line) for line in lines if line)


def _tip_of(of: Of, score: PartScore) -> str:
    """The fact of a part."""
    if score["map"] is None:
        return f"agreement of {of.replace('_', ' ')} against 100 {spread_text(score)}"
    return f"{NAMES[of]} {100 * score['map']:.2f}, {spread_text(score)}"


_DASHES = {"mAP": "solid", "AR@100": "dash", "AR@1000": "dot", "mask mAP": "dashdot"}
"""Measures that depend on the number of proposals, and the line style of each."""


def _proposals(experiment: Experiment) -> Chart:
    """Accuracy and recall against latency for each number of proposals; one line per precision and measure."""
    groups: dict[str, list[tuple[Variant, Mapping[str, Any]]]] = {}
    for variant in experiment.variants:
        if variant.proposals:
            kind = f"{variant.axes.get('precision', '')} {variant.axes.get('calibration', '')}".strip()
            groups.setdefault(kind, []).append((variant, variant.proposals))
    traces = []
    for place, (kind, rows) in enumerate(groups.items()):
        rows.sort(key=lambda row: (row[1]["before"] or 0, row[1]["after"] or 0))
        labels = [f"{recall['before'] or 'all'} / {recall['after'] or 'all'}" for _, recall in rows]
        values: dict[str, list[float | None]] = {
            "mAP": [variant.map for variant, _ in rows],
            "AR@100": [recall["ar100"] for _, recall in rows],
            "AR@1000": [recall["ar1000"] for _, recall in rows],
            "mask mAP": [variant.parts["masks"]["map"] if "masks" in variant.parts else None for variant, _ in rows],
        }
        colour = COLOURS[place % len(COLOURS)]
        for name, dash in _DASHES.items():
            points = [100 * value for value in values[name] if value is not None]
            if len(points) < len(rows):
                continue
            labelled = name == "AR@1000"
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers+text" if labelled else "lines+markers",
                    "name": markup(f"{name}, {kind}"),
                    "x": [variant.latency_ms for variant, _ in rows],
                    "y": points,
                    "text": labels if labelled else None,
                    "textposition": "top center" if place % 2 == 0 else "bottom center",
                    "hovertext": [f"{label}<br>{name} {y:.2f}" for label, y in zip(labels, points, strict=True)],
                    "hoverinfo": "text",
                    "marker": {"size": 8, "color": colour},
                    "line": {"color": colour, "width": 1.5, "dash": dash},
                }
            )
    devices = ", ".join(dict.fromkeys(variant.device or "" for rows in groups.values() for variant, _ in rows))
    note = f"At each point: anchors of a level / proposals of the second stage, at most. Times are of {devices}."
    layout = axes("ms, median", "mAP and recall, in points", hovermode="closest")
    return Chart("Accuracy and latency by number of proposals", traces, layout, note=note)
