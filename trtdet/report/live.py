"""Pages of what a command has just measured, before anything is read back."""

from __future__ import annotations

from trtdet.performance.profiling import Profiling
from trtdet.pipeline.points import Front
from trtdet.report.document import Report
from trtdet.report.html import page
from trtdet.report.sections.fronts import front_section
from trtdet.report.sections.profiles import profiling_sections
from trtdet.report.sections.verdicts import front_verdict


def profile_page(profiling: Profiling) -> str:
    """A profile, or two compared: bars by kind of operator and by part, the layers in order, the tables."""
    name = profiling.profile.name
    return page(Report(f"Profile of {name}", (f"{name}: {profiling.profile.summary}.",), profiling_sections(profiling)))


def front_page(front: Front) -> str:
    """The front of a model: accuracy with its interval against cost, a point for each plan, and the table."""
    return page(Report(f"The front of {front.name}", front_verdict(front.name, front), (front_section(front),)))
