"""The content of a report: sections of text, tables and charts. All pages, Markdown and JSON are made from it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

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
    """The histogram of one quantized tensor, small enough that a page can hold hundreds."""

    name: str  # of the INT8 convolutions that read the tensor
    tensor: str  # name of the tensor
    top: float  # |x| at the upper end of the last bar
    heights: bytes  # of the bars from 0 to ``top``, one byte each: 20 * log10(1 + count), 0..255
    thresholds: Mapping[str, float]  # amax by calibration rule
    chosen: float | None  # the amax in use; None where several are, as in a sweep
    cut_off: float | None  # share of the values above ``chosen``, 0..1; None without it
    largest: float  # largest |x|


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
    folded: bool = True  # closed on a page until a reader opens it

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


Tone = Literal["good", "open", "bad", ""]
"""Whether a result speaks for shipping, leaves it open, or speaks against it; empty for neither."""


@dataclass(frozen=True)
class Tile:
    """A figure of the first screen, and a cell of the table across bundles."""

    title: str
    value: str
    change: str = ""  # difference or other bundle's figure, with its interval
    basis: str = ""  # machine, images or reference of the figure
    tone: Tone = ""
    how: Literal["measured", "estimated", ""] = ""  # for times


@dataclass(frozen=True)
class LayerBar:
    """One layer of :class:`LayerBars`; ``precision`` is a key of :data:`trtdet.report.charts.PRECISIONS`."""

    tip: str
    precision: str
    size: float


@dataclass(frozen=True)
class LayerBars:
    """The layers in a row, coloured by precision: ``size`` is the width, or the height for ``columns``."""

    title: str
    bars: tuple[LayerBar, ...]
    unit: str  # of the sizes
    note: str  # how the sizes are known
    columns: bool = False

    def shares(self) -> dict[str, float]:
        """Share of the sizes by precision, 0..1, the largest first."""
        total = sum(bar.size for bar in self.bars) or 1.0
        sums: dict[str, float] = {}
        for bar in self.bars:
            sums[bar.precision] = sums.get(bar.precision, 0.0) + bar.size / total
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Summary:
    """The first screen of one bundle: can it ship, the figures behind the answer, precision and time by layer."""

    name: str
    subtitle: str  # model, backend, input
    answer: str  # such as ``Yes, if``
    reason: str  # completes the answer; empty for a plain yes
    tone: Tone
    tiles: tuple[Tile, ...]
    network: LayerBars
    times: LayerBars | None  # None where no layer has a time
    warnings: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()  # next steps, the most urgent first
    notes: tuple[str, ...] = ()  # sentences for the terminal and Markdown

    @property
    def tiles_by_title(self) -> dict[str, Tile]:
        return {tile.title: tile for tile in self.tiles}

    @property
    def verdict(self) -> tuple[str, ...]:
        """The answer, the notes and the next steps, one sentence each."""
        answer = f"can it ship? {self.answer}{f': {self.reason}' if self.reason else ''}"
        return tuple(
            f"{self.name}: {line}." for line in (answer, *self.notes, *(f"next: {step}" for step in self.steps))
        )


@dataclass(frozen=True)
class Report:
    """A report; ``sentences`` holds the most important results of runs that are no bundle."""

    title: str
    sentences: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    missing: tuple[Missing, ...] = ()
    summaries: tuple[Summary, ...] = ()

    @property
    def verdict(self) -> tuple[str, ...]:
        """The most important results, one sentence each."""
        return (*(line for summary in self.summaries for line in summary.verdict), *self.sentences)

    @property
    def runs(self) -> list[tuple[str, list[Section]]]:
        """The sections of each run, with its name; the name is empty if the report has one run."""
        return [(about, list(own)) for about, own in groupby(self.sections, lambda section: section.about)]

    @property
    def tile_titles(self) -> tuple[str, ...]:
        """Titles of all summaries' tiles, the last one last."""
        titles = dict.fromkeys(tile.title for summary in self.summaries for tile in summary.tiles)
        # Parts that only some bundles have stand beside the boxes.
        places = {title: max(places) for title in titles if (places := self._places(title))}
        return tuple(sorted(titles, key=lambda title: places[title]))

    def _places(self, title: str) -> list[int]:
        """Where a tile stands, from the end, in the summaries that have it."""
        each = ([tile.title for tile in summary.tiles] for summary in self.summaries)
        return [tiles.index(title) - len(tiles) for tiles in each if title in tiles]

    @property
    def overview(self) -> Table | None:
        """The tiles of several bundles side by side; None for fewer than two."""
        if len(self.summaries) < 2:
            return None
        rows = []
        for summary in self.summaries:
            cells = {tile.title: " ".join(filter(None, (tile.value, tile.change, tile.how))) for tile in summary.tiles}
            rows.append((summary.name, summary.answer, *(cells.get(title, "") for title in self.tile_titles)))
        return Table(("bundle", "can it ship?", *self.tile_titles), rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "title": self.title,
            "verdict": list(self.verdict),
            "summaries": [_plain_summary(summary) for summary in self.summaries],
            "sections": [
                {"title": section.title, "run": section.about, "parts": [plain_part(part) for part in section.parts]}
                for section in self.sections
            ],
            "missing": [{"what": figure.what, "how": figure.how, "run": figure.about} for figure in self.missing],
        }

    def markdown(self) -> str:
        """The verdict, the table across bundles, the brief sections without charts, and the missing results; it fits a
        pull request."""
        blocks = [f"# {self.title}", "\n".join(f"- {line}" for line in self.verdict)]
        if self.overview is not None:
            blocks.append(self.overview.markdown())
        blocks += [section.markdown() for section in self.sections if section.brief]
        if self.missing:
            blocks += ["## Not measured", "\n".join(f"- {figure}" for figure in self.missing)]
        return "\n\n".join(filter(None, blocks)) + "\n"


def _plain_summary(summary: Summary) -> dict[str, Any]:
    """Plain values for JSON: the bars without their tips."""
    charts = {"network": summary.network, "times": summary.times}
    bars = {
        key: chart
        and {"unit": chart.unit, "note": chart.note, "bars": [[bar.precision, bar.size] for bar in chart.bars]}
        for key, chart in charts.items()
    }
    return {**vars(summary), "tiles": [vars(tile) for tile in summary.tiles], **bars}
