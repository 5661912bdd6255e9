"""A report as a page: one HTML file, whose content security policy lets it load nothing from elsewhere."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from trtdet.report.document import Chart, Histograms, Part, Report

PLOTLY = "plotly-basic.min.js"
"""plotly.js-basic-dist-min 4.1.1 from npm, unchanged (MIT, its licence beside it): bars and scatter in 1.2 MB, where
the whole library has 4.6 MB."""


def page(report: Report) -> str:
    """A report as HTML: light or dark as the reader's system asks, with tables that sort and filter, and charts that
    zoom by mouse, touch and keys."""
    parts = [part for section in report.sections for part in section.parts]
    figures = {id(part): figure for part in parts if (figure := _figure(part)) is not None}
    environment = Environment(
        loader=PackageLoader("trtdet.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["identity"] = id
    return environment.get_template("report.html.j2").render(
        report=report,
        numbers={key: number for number, key in enumerate(figures)},
        # What ends a script element in HTML cannot stand in JSON then.
        figures=json.dumps([*figures.values()], separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        style=_asset("report.css"),
        script=_asset("report.js"),
        plotly=_asset(PLOTLY) if figures else "",
    )


def _figure(part: Part) -> dict[str, Any] | None:
    """What the page's script draws; None of a part that is HTML."""
    match part:
        case Chart(_, traces, layout):
            return {"traces": list(traces), "layout": dict(layout)}
        case Histograms():
            return part.as_dict()
    return None


def _asset(name: str) -> str:
    return (resources.files("trtdet.report") / "assets" / name).read_text(encoding="utf-8")
