"""Accuracy of a detector, and its difference from a reference, by class and by object size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtdet.evaluation.parts import NAMES
from trtdet.report.charts import COLOURS, markup
from trtdet.report.document import Chart, Grid, Part, Section, Text
from trtdet.tables import Cell, Column, Table

_FIGURES = {
    "mAP": "map",
    "AP50": "map50",
    "AP75": "map75",
    "small objects": "map_small",
    "medium objects": "map_medium",
    "large objects": "map_large",
}
AGAINST = "'trtdet eval BUNDLE --against MODEL --images DIR --annotations JSON -o eval.json', and give eval.json too"


def scores_section(scores: Mapping[str, Any], against: Mapping[str, Any], name: str) -> Section:
    """AP by object size and class, of boxes and of each part, beside the reference's.

    ``scores`` is the content of an ``eval.json``, ``against`` its comparison with the reference, whose name is
    ``name``; empty without one.
    """
    other: Mapping[str, Any] | None = against.get("scores")
    parts: list[Part] = []
    for of in NAMES:
        own = scores if of == "boxes" else scores.get(of)
        if own is not None:
            theirs = other if of == "boxes" else (against.get(of) or {}).get("scores")
            title = "figure" if of == "boxes" else f"figure of {of.replace('_', ' ')}"
            first, second = (
                {label: (each or {}).get(key) for label, key in _FIGURES.items()} for each in (own, theirs)
            )
            parts.append(_beside(title, first, None if theirs is None else second, name=name))
    own, others = scores["per_class"], {} if other is None else other["per_class"]
    differences = {name: 100 * (own[name] - others[name]) for name in own if None not in (own[name], others.get(name))}
    if differences:
        parts.append(_by_class(differences, name))
    parts.append(_beside("class", own, None if other is None else others, name=name))
    title = "Accuracy by class and size" if other is None else "AP differences by class and size"
    return Section(title, tuple(parts))


def _beside(title: str, values: Mapping[str, Any], others: Mapping[str, Any] | None, name: str) -> Grid:
    """Values as points, beside those of the reference ``name`` and the differences; None without a reference."""
    columns = [Column(title, align="left"), Column("AP", ".2f")]
    if others is not None:
        columns += [Column(f"AP of {name}", ".2f"), Column("difference", "+.2f")]
    rows: list[tuple[Cell, ...]] = []
    for row, value in values.items():
        theirs = (others or {}).get(row)
        difference = None if value is None or theirs is None else 100 * (value - theirs)
        cells = (row, None if value is None else 100 * value, None if theirs is None else 100 * theirs, difference)
        rows.append(cells[: len(columns)])
    return Grid(Table(columns, rows))


def _by_class(differences: Mapping[str, float], against: str) -> Chart:
    """Differences in points by class, the largest loss first."""
    ordered = sorted(differences, key=lambda name: differences[name])
    trace = {
        "type": "bar",
        "x": [markup(name) for name in ordered],
        "y": [differences[name] for name in ordered],
        "marker": {"color": [COLOURS[3] if differences[name] < 0 else COLOURS[2] for name in ordered]},
        "hovertemplate": "%{x}: %{y:+.2f}<extra></extra>",
    }
    layout = {"yaxis": {"title": {"text": "points of AP"}}, "xaxis": {"type": "category"}}
    note = "One class has few boxes, so that single differences are noise more often than the mean."
    title = f"AP against {against}, the largest loss first"
    return Chart(title, traces=[trace], layout=layout, note=note, height=320)


def shift_section(shift: Mapping[str, Any]) -> Section:
    """The score thresholds that are equivalent to thresholds of the reference."""
    rows = [
        (entry["reference"], entry["threshold"], entry["low"], entry["high"], entry["problem"] or "")
        for entry in shift["overall"]
    ]
    columns = (
        *(Column("threshold of the reference", "g"), Column("serves as well", ".3f"), Column("from", ".3f")),
        *(Column("to", ".3f"), "problem"),
    )
    ratio = shift["score_ratio"]
    same = "precision" if shift["basis"] == "precision" else "number of detections"
    lines = [f"Thresholds with the reference's {same}, for all classes together."]
    if ratio["median"] is not None:
        lines.append(
            f"{ratio['pairs']} objects are found by both: the median score is {ratio['median']:.3f} of the "
            f"reference's ({ratio['low']:.3f} .. {ratio['high']:.3f})."
        )
    return Section("Shift of scores", (Text(tuple(lines)), Grid(Table(columns, rows).filled())), brief=True)
