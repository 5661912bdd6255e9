"""The content of a report: sections of text, tables and charts. All pages, Markdown and JSON are made from it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtdet.tables import Table


@dataclass(frozen=True)
class Text:
    """Paragraphs, or with ``code`` the lines of one code block."""

    lines: tuple[str, ...]
    code: bool = False

    kind = "text"


@dataclass(frozen=True)
class Chart:
    """A figure of Plotly (https://plotly.com/javascript/reference), drawn with its basic bundle."""

    title: str  # above the figure, and for screen readers
    traces: Sequence[Mapping[str, Any]]  # Plotly's ``data``; only bars and scatter
    layout: Mapping[str, Any] = field(default_factory=dict)  # changes to the page's default layout
    note: str = ""  # below the figure
    height: int = 420  # in CSS pixels

    kind = "chart"


@dataclass(frozen=True)
class Grid:
    """A table that sorts and filters. Each column whose title is in ``choices`` gets a list of its values."""

    table: Table
    choices: tuple[str, ...] = ()

    kind = "table"


@dataclass(frozen=True)
class DrawnHistogram:
    """The histogram of one tensor, small enough that a page can hold hundreds."""

    name: str  # of the convolution that reads the tensor
    tensor: str  # name of the tensor
    top: float  # |x| at the upper end of the last bar
    heights: bytes  # of the bars from 0 to ``top``, one byte each: 20 * log10(1 + count), 0..255
    thresholds: Mapping[str, float]  # amax by calibration rule
    chosen: float | None  # the amax in use; None where the tensor is not quantized
    note: str = ""


@dataclass(frozen=True)
class Histograms:
    """Histograms in the order of the network. ``shown`` has the indices drawn first; a reader can choose any."""

    entries: tuple[DrawnHistogram, ...]
    shown: tuple[int, ...]
    title: str

    kind = "histograms"


@dataclass(frozen=True)
class Picture:
    """A JPEG image with a caption."""

    jpeg: bytes
    caption: str

    kind = "picture"

    @property
    def source(self) -> str:
        """A ``data:`` URL."""
        return f"data:image/jpeg;base64,{base64.b64encode(self.jpeg).decode('ascii')}"


Part = Text | Chart | Grid | Histograms | Picture


def plain_part(part: Part) -> dict[str, Any]:
    """Plain values for JSON: tables as one object per row, histogram bars in base64, pictures without the image."""
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
    """A part of a report under a heading."""

    title: str
    parts: tuple[Part, ...]
    about: str = ""  # name of the run, where a report has several runs
    brief: bool = False  # also included in Markdown, which should fit a pull request

    @property
    def heading(self) -> str:
        return f"{self.title}: {self.about}" if self.about else self.title

    def markdown(self) -> str:
        """The heading, the text and the tables, without charts."""
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
    """A result that no run measured: ``what`` is a noun phrase, ``how`` the command or option that measures it."""

    what: str
    how: str
    about: str = ""

    def __str__(self) -> str:
        return f"{self.what}{f' of {self.about}' if self.about else ''}: {self.how}"


@dataclass(frozen=True)
class Report:
    """A report; ``verdict`` holds the most important results, one sentence each."""

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
        """The verdict, the brief sections without charts, and the missing results; it fits a pull request."""
        blocks = [f"# {self.title}", "\n".join(f"- {line}" for line in self.verdict)]
        blocks += [section.markdown() for section in self.sections if section.brief]
        if self.missing:
            blocks += ["## Not measured", "\n".join(f"- {figure}" for figure in self.missing)]
        return "\n\n".join(filter(None, blocks)) + "\n"
