"""Results of measurements as pages to look at."""

from __future__ import annotations

from trtdet.report.pages import profile_page

__all__ = ["profile_page"]
