"""Results of measurements as pages to look at."""

from __future__ import annotations

from trtdet.report.pages import front_page, profile_page

__all__ = ["front_page", "profile_page"]
