"""What a report holds: sections of sentences, tables and charts, and what is missing. Pages, Markdown and JSON are made
from it, and nothing else makes pages."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtdet.tables import Table


@dataclass(frozen=True)
class Text:
    """Sentences, each a paragraph; with ``code`` lines that are shown as they are typed."""

    lines: tuple[str, ...]
    code: bool = False

    kind = "text"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"kind": self.kind, "lines": list(self.lines), "code": self.code}


@dataclass(frozen=True)
class Chart:
    """A figure of Plotly (https://plotly.com/javascript/reference), drawn with its basic bundle.

    Attributes:
        title: above it; also what a screen reader says.
        traces: its ``data``: bars and scatter alone.
        layout: what the page's own layout, with colours for light and dark, is changed by.
        note: below it.
        height: in CSS pixels.
    """

    title: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    height: int = 420

    kind = "chart"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"kind": self.kind, "title": self.title, "traces": list(self.traces), "note": self.note}


@dataclass(frozen=True)
class Grid:
    """A table whose columns sort, with a field that filters its rows.

    Attributes:
        table: its rows.
        choices: titles of columns with few values, each of which gets a list to choose from.
    """

    table: Table
    choices: tuple[str, ...] = ()

    kind = "table"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: an object a row, by the titles of the columns."""
        return {"kind": self.kind, "title": self.table.title, "rows": self.table.as_dicts()}


@dataclass(frozen=True)
class Histogram:
    """The histogram of one tensor, small enough that a page can hold hundreds.

    Attributes:
        name: of the convolution that reads the tensor.
        tensor: of the tensor.
        top: |x| at the upper end of the last bar.
        heights: of the bars from 0 to ``top``: the decimal logarithm of 1 + count, in 1/20, 0..255.
        thresholds: amax by rule.
        chosen: the amax that is written; None where the tensor is not quantised.
        note: what is known of the convolution.
    """

    name: str
    tensor: str
    top: float
    heights: bytes
    thresholds: Mapping[str, float]
    chosen: float | None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``heights`` in base64."""
        return {
            "name": self.name,
            "tensor": self.tensor,
            "top": self.top,
            "heights": base64.b64encode(self.heights).decode("ascii"),
            "thresholds": dict(self.thresholds),
            "chosen": self.chosen,
            "note": self.note,
        }


@dataclass(frozen=True)
class Histograms:
    """Histograms of which some are drawn and any can be chosen.

    Attributes:
        entries: in the order of the network.
        shown: positions of those that are drawn at once.
        title: what was drawn first, and why.
    """

    entries: tuple[Histogram, ...]
    shown: tuple[int, ...]
    title: str

    kind = "histograms"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "title": self.title,
            "shown": list(self.shown),
            "entries": [entry.as_dict() for entry in self.entries],
        }


@dataclass(frozen=True)
class Picture:
    """An image with a sentence below.

    Attributes:
        jpeg: the bytes of a JPEG file.
        caption: the sentence.
    """

    jpeg: bytes
    caption: str

    kind = "picture"

    @property
    def source(self) -> str:
        """A ``data:`` URL."""
        return f"data:image/jpeg;base64,{base64.b64encode(self.jpeg).decode('ascii')}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the image."""
        return {"kind": self.kind, "caption": self.caption}


Part = Text | Chart | Grid | Histograms | Picture


@dataclass(frozen=True)
class Section:
    """A part of a report under a heading.

    Attributes:
        title: of the heading.
        parts: from above.
        about: the run that it is of, where a report is of several.
        brief: whether it belongs into Markdown, which should fit a pull request.
    """

    title: str
    parts: tuple[Part, ...]
    about: str = ""
    brief: bool = False

    @property
    def heading(self) -> str:
        return f"{self.title}: {self.about}" if self.about else self.title

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"title": self.title, "run": self.about, "parts": [part.as_dict() for part in self.parts]}


@dataclass(frozen=True)
class Missing:
    """What no run measured: a noun phrase, and the command or option that measures it."""

    what: str
    how: str
    about: str = ""

    def __str__(self) -> str:
        return f"{self.what}{f' of {self.about}' if self.about else ''}: {self.how}"


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes:
        title: of the page.
        verdict: first of all, one sentence each.
        sections: in their order.
        missing: what is left out.
    """

    title: str
    verdict: tuple[str, ...]
    sections: tuple[Section, ...]
    missing: tuple[Missing, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "title": self.title,
            "verdict": list(self.verdict),
            "sections": [section.as_dict() for section in self.sections],
            "missing": [{"what": one.what, "how": one.how, "run": one.about} for one in self.missing],
        }

    def markdown(self) -> str:
        """The verdict and the sections that are brief, without charts: what fits into a pull request."""
        parts = [f"# {self.title}", "\n".join(f"- {line}" for line in self.verdict)]
        for section in self.sections:
            if section.brief:
                parts += [f"## {section.heading}", *filter(None, map(_markdown, section.parts))]
        if self.missing:
            parts += ["## Not measured", "\n".join(f"- {one}" for one in self.missing)]
        return "\n\n".join(part for part in parts if part) + "\n"


def _markdown(part: Part) -> str:
    match part:
        case Text(lines, True):
            return "\n".join(("```sh", *lines, "```"))
        case Text(lines):
            return "\n\n".join(lines)
        case Grid(table):
            return table.markdown()
    return ""
