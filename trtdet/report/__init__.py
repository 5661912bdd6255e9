"""Reports of runs as a page, Markdown or JSON, made from the files that commands wrote."""

from __future__ import annotations

from trtdet.report.assembly import report
from trtdet.report.differences import compare_runs
from trtdet.report.document import Report
from trtdet.report.pages import experiment_page, page, profile_page, written

__all__ = ["Report", "compare_runs", "experiment_page", "page", "profile_page", "report", "written"]
