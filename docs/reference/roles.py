"""Docstrings name objects as ``:class:`Name``` for editors; the site shows the name alone."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """The page's HTML without roles, called by MkDocs for each page."""
    return re.sub(r":(?:class|func|mod|attr|data):<code>~?", "<code>", html)
