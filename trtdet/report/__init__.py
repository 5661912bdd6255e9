"""Runs as reports: what commands left behind, as a page, as Markdown and as JSON. Nothing else makes pages."""

from __future__ import annotations

from trtdet.report.assembly import report
from trtdet.report.document import Report
from trtdet.report.html import page
from trtdet.report.live import front_page, profile_page

__all__ = ["Report", "front_page", "page", "profile_page", "report"]
