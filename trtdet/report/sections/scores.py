"""Accuracy: of a detector, and its difference to a reference by class and size of the objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtdet.report.document import Chart, Grid, Part, Section, Text
from trtdet.report.palette import COLOURS
from trtdet.tables import Cell, Column, Table

_FIGURES = (
    ("mAP", "map"),
    ("AP50", "map50"),
    ("AP75", "map75"),
    ("small objects", "map_small"),
    ("medium objects", "map_medium"),
    ("large objects", "map_large"),
)
AGAINST = "'trtdet eval BUNDLE --against MODEL --images DIR --annotations JSON -o eval.json', and give eval.json too"


def scores_section(scores: Mapping[str, Any], other: Mapping[str, Any] | None, against: str) -> Section:
    """AP by size and class, and the difference to a reference.

    Args:
        scores: values of :meth:`trtdet.evaluation.metrics.CocoResult.as_dict`.
        other: the same of the reference; None where there is none.
        against: what the reference is called.
    """
    parts: list[Part] = [Grid(_table("figure", [(title, key) for title, key in _FIGURES], scores, other, against))]
    classes = [(name, name) for name in scores["per_class"]]
    own, others = scores["per_class"], None if other is None else other["per_class"]
    if others is not None:
        known = {name: own[name] - others[name] for name in own if None not in (own[name], others.get(name))}
        if known:
            parts.append(_by_class(known, against))
    parts.append(Grid(_table("class", classes, own, others, against)))
    title = "Accuracy by class and size" if other is None else "AP differences by class and size"
    return Section(title, tuple(parts))


def _table(
    title: str,
    names: Sequence[tuple[str, str]],
    scores: Mapping[str, Any],
    other: Mapping[str, Any] | None,
    against: str,
) -> Table:
    columns = [Column(title, align="left"), Column("AP", ".2f")]
    if other is not None:
        columns += [Column(f"AP of {against}", ".2f"), Column("difference", "+.2f")]
    rows: list[list[Cell]] = []
    for name, key in names:
        value = scores.get(key)
        row: list[Cell] = [name, None if value is None else 100 * value]
        if other is not None:
            theirs = other.get(key)
            row.append(None if theirs is None else 100 * theirs)
            row.append(None if value is None or theirs is None else 100 * (value - theirs))
        rows.append(row)
    return Table(columns, rows)


def _by_class(known: Mapping[str, float], against: str) -> Chart:
    ordered = sorted(known, key=lambda name: known[name])
    values = [100 * known[name] for name in ordered]
    traces = [
        {
            "type": "bar",
            "x": ordered,
            "y": values,
            "marker": {"color": [COLOURS[3] if value < 0 else COLOURS[2] for value in values]},
            "hovertemplate": "%{x}: %{y:+.2f}<extra></extra>",
        }
    ]
    layout = {"yaxis": {"title": {"text": "points of AP"}}, "xaxis": {"type": "category"}}
    note = "One class has few boxes, so that single differences are noise more often than the mean."
    return Chart(f"AP against {against}, the largest loss first", traces, layout, note, 320)


def shift_section(shift: Mapping[str, Any]) -> Section:
    """The thresholds at which the detector serves as the reference does."""
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
    said = [f"Thresholds with the reference's {same}, for all classes together."]
    if ratio["median"] is not None:
        said.append(
            f"{ratio['pairs']} objects are found by both: the median score is {ratio['median']:.3f} of the "
            f"reference's ({ratio['low']:.3f} .. {ratio['high']:.3f})."
        )
    return Section("Shift of scores", (Text(tuple(said)), Grid(Table(columns, rows).filled())), brief=True)
