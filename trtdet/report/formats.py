"""A report as the bytes of a file."""

from __future__ import annotations

import json
from typing import Literal

from trtdet.report.document import Report
from trtdet.report.html import page

Format = Literal["html", "md", "json"]


def written(report: Report, kind: Format) -> bytes:
    """A report as a page, as Markdown or as JSON."""
    if kind == "html":
        return page(report).encode()
    if kind == "md":
        return report.markdown().encode()
    return (json.dumps(report.as_dict(), indent=1) + "\n").encode()
