"""Runs as reports: what commands left behind, as a page, as Markdown and as JSON. Nothing else makes pages."""

from __future__ import annotations

from trtdet.report.assembly import report, with_pictures
from trtdet.report.differences import compare_runs
from trtdet.report.document import Report
from trtdet.report.formats import written
from trtdet.report.html import page
from trtdet.report.live import front_page, profile_page

__all__ = ["Report", "compare_runs", "front_page", "page", "profile_page", "report", "with_pictures", "written"]
