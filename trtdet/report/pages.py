"""Results as pages: each is a whole HTML file that loads nothing from elsewhere."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trtdet.performance.profiles import Profile
from trtdet.performance.profiling import Profiling
from trtdet.pipeline.points import Front
from trtdet.report.charts import GREY, BarChart, ColumnChart
from trtdet.report.fronts import FrontChart
from trtdet.tables import Tables


def profile_page(profiling: Profiling, top: int = 20) -> str:
    """A profile, or two compared: bars by kind of operator and by part, the layers in order, the tables.

    Args:
        profiling: the profile and, where there is one, the one it is compared with.
        top: rows in the tables of layers and of convolutions.
    """
    sections = [_section(profile, top) for profile in (profiling.profile, profiling.against) if profile is not None]
    return (
        _environment()
        .get_template("profile.html.j2")
        .render(
            title=f"Profile of {profiling.profile.name}",
            sections=sections,
            compared=None if profiling.against is None else _markup(profiling.compared(top)),
            circumstances=profiling.circumstances,
            warnings=profiling.warnings,
        )
    )


def front_page(front: Front) -> str:
    """The front of a model: accuracy with its interval against cost, a point for each plan, and the table."""
    chart = FrontChart.of(front)
    table = Markup(front.html())  # the table escapes its cells itself
    title = f"The front of {front.name}"
    return _environment().get_template("front.html.j2").render(title=title, front=front, chart=chart, table=table)


def _section(profile: Profile, top: int) -> dict[str, object]:
    return {
        "profile": profile,
        "runs": len(profile.latency_ms),
        "types": BarChart.of(profile.by_type),
        "layers": ColumnChart.of(profile),
        "parts": BarChart.of(profile.by_part, [GREY]) if profile.by_part else None,
        "tables": _markup(profile.table(top)),
    }


def _markup(tables: Tables) -> Markup:
    """Tables escape their cells themselves."""
    return Markup(tables.html())


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("trtdet.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
