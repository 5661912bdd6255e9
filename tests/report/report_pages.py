"""Pages of reports as tests read them."""

import json
from html.parser import HTMLParser
from typing import Any

_VOID = ("meta", "img", "input", "br")


class Page(HTMLParser):
    """Checks that tags are closed, and notes what would be loaded.

    Attributes:
        seen: every tag with its attributes.
        text: what stands between tags, scripts and styles left out.
        figures: what the page's script draws.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.figures: list[dict[str, Any]] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            if self.seen[-1][1].get("id") == "figures":
                self.figures = json.loads(data)
        elif not self._open or self._open[-1] != "style":
            self.text.append(data)

    @property
    def loaded(self) -> list[str]:
        """Addresses that the page would load from elsewhere."""
        addresses = [value or "" for _, given in self.seen for key, value in given.items() if key in ("src", "href")]
        return [address for address in addresses if not address.startswith(("#", "data:"))]

    @property
    def traces(self) -> list[dict[str, Any]]:
        """Those of all charts."""
        return [trace for figure in self.figures for trace in figure.get("traces", ())]
