"""Writes reports. A page is one HTML file; its content security policy forbids it to load anything from elsewhere."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from trtdet.experiments.experiment import Experiment
from trtdet.performance.profiling import Profiling
from trtdet.report.charts import PRECISIONS, rectangles
from trtdet.report.document import Chart, Histograms, LayerBars, Report, plain_part
from trtdet.report.sections.fronts import experiment_section, experiment_verdict
from trtdet.report.sections.profiles import profiling_sections

Format = Literal["html", "md", "json"]

PLOTLY = "plotly-basic.min.js"
"""plotly.js-basic-dist-min 4.1.1 from npm, unchanged (MIT, licence beside it): 1.2 MB; the full library has 4.6 MB."""


def written(report: Report, kind: Format) -> bytes:
    """A report as a page, as Markdown or as JSON."""
    if kind == "html":
        return page(report).encode()
    if kind == "md":
        return report.markdown().encode()
    return (json.dumps(report.as_dict(), indent=1) + "\n").encode()


def page(report: Report) -> str:
    """A report as HTML. It follows the system's light or dark theme; tables sort and filter, and charts zoom. What it
    folds is printed in full."""
    figures = {}  # Data for the page's script, by id() of the part.
    for part in (part for section in report.sections for part in section.parts):
        if isinstance(part, Chart):
            figures[id(part)] = {"traces": list(part.traces), "layout": dict(part.layout)}
        elif isinstance(part, Histograms):
            figures[id(part)] = plain_part(part)
    environment = Environment(
        loader=PackageLoader("trtdet.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"identity": id, "rectangles": rectangles}
    assets = resources.files("trtdet.report") / "assets"
    return environment.get_template("report.html.j2").render(
        report=report,
        summaries={summary.name: summary for summary in report.summaries},
        tops=_tops(report),
        precisions=PRECISIONS,
        timed_precisions=[name for name in PRECISIONS if any(name in times.shares() for times in _times(report))],
        numbers={key: number for number, key in enumerate(figures)},
        # Without '<' the JSON cannot close the script element.
        figures=json.dumps(_finite([*figures.values()]), separators=(",", ":"), allow_nan=False).replace(
            "<", "\\u003c"
        ),
        style=(assets / "report.css").read_text(encoding="utf-8"),
        script=(assets / "report.js").read_text(encoding="utf-8"),
        plotly=(assets / PLOTLY).read_text(encoding="utf-8") if figures else "",
    )


def _times(report: Report) -> list[LayerBars]:
    return [summary.times for summary in report.summaries if summary.times is not None]


def _finite(value: Any) -> Any:
    """The same plain value; numbers that are not finite, which JSON does not have, become None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tops(report: Report) -> dict[str, float]:
    """The longest time of a layer, by how the times are known, so that bundles share a scale."""
    tops: dict[str, float] = {}
    for times in _times(report):
        tops[times.note] = max(tops.get(times.note, 0.0), *(bar.size for bar in times.bars))
    return tops


def profile_page(profiling: Profiling) -> str:
    """The page of one profile, or of two compared."""
    name = profiling.profile.name
    return page(Report(f"Profile of {name}", (f"{name}: {profiling.profile.summary}.",), profiling_sections(profiling)))


def experiment_page(experiment: Experiment) -> str:
    """The page of an experiment: a chart of accuracy against cost, and the table of variants."""
    title = f"Accuracy and speed of {experiment.name}"
    verdict = experiment_verdict(experiment.name, experiment)
    return page(Report(title, verdict, (experiment_section(experiment),)))
