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


@dataclass(frozen=True)
class DrawnHistogram:
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


@dataclass(frozen=True)
class Histograms:
    """Histograms of which some are drawn and any can be chosen.

    Attributes:
        entries: in the order of the network.
        shown: positions of those that are drawn at once.
        title: what was drawn first, and why.
    """

    entries: tuple[DrawnHistogram, ...]
    shown: tuple[int, ...]
    title: str

    kind = "histograms"


@dataclass(frozen=True)
class Picture:
    """An image, the bytes of a JPEG file, with a sentence below."""

    jpeg: bytes
    caption: str

    kind = "picture"

    @property
    def source(self) -> str:
        """A ``data:`` URL."""
        return f"data:image/jpeg;base64,{base64.b64encode(self.jpeg).decode('ascii')}"


Part = Text | Chart | Grid | Histograms | Picture


def plain_part(part: Part) -> dict[str, Any]:
    """Plain values for JSON: a table as an object a row, bars of histograms in base64, a picture without its image."""
    values: dict[str, Any]
    match part:
        case Text(lines, code):
            values = {"lines": list(lines), "code": code}
        case Chart(title, traces, note=note):
            values = {"title": title, "traces": list(traces), "note": note}
        case Grid(table):
            values = {"title": table.title, "rows": table.as_dicts()}
        case Histograms(entries, shown, title):
            plain = [{**vars(entry), "heights": base64.b64encode(entry.heights).decode("ascii")} for entry in entries]
            values = {"title": title, "shown": list(shown), "entries": plain}
        case Picture(_, caption):
            values = {"caption": caption}
    return {"kind": part.kind, **values}


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

    def markdown(self) -> str:
        """The heading, the sentences and the tables, without charts."""
        blocks = [f"## {self.heading}"]
        for part in self.parts:
            match part:
                case Text(lines, True):
                    blocks.append("\n".join(("```sh", *lines, "```")))
                case Text(lines):
                    blocks.append("\n\n".join(lines))
                case Grid(table):
                    blocks.append(table.markdown())
        return "\n\n".join(blocks)


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
    verdict: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    missing: tuple[Missing, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "title": self.title,
            "verdict": list(self.verdict),
            "sections": [
                {"title": section.title, "run": section.about, "parts": [plain_part(part) for part in section.parts]}
                for section in self.sections
            ],
            "missing": [{"what": figure.what, "how": figure.how, "run": figure.about} for figure in self.missing],
        }

    def markdown(self) -> str:
        """The verdict and the sections that are brief, without charts: what fits into a pull request."""
        blocks = [f"# {self.title}", "\n".join(f"- {line}" for line in self.verdict)]
        blocks += [section.markdown() for section in self.sections if section.brief]
        if self.missing:
            blocks += ["## Not measured", "\n".join(f"- {figure}" for figure in self.missing)]
        return "\n\n".join(filter(None, blocks)) + "\n"
