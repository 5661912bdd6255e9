"""Tables of results: the same rows as text for a terminal or a pipe, as Markdown and as HTML."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import Literal, TypeAlias

from trtdet.errors import one_line

Align = Literal["left", "right"]
Cell: TypeAlias = "str | int | float | None"

_NUMBER = re.compile(r"[-+]?[\d ]*\d(\.\d+)?([eE][-+]?\d+)?\s?%?$")


@dataclass(frozen=True)
class Column:
    """One column."""

    title: str
    spec: str = ""
    """How its int and float cells are written, as in ``format(value, spec)``: ``.2f``, ``+.2f``, ``.1%``."""
    align: Align | None = None
    """None puts a column to the right whose every cell is a number or empty."""

    def write(self, cell: Cell) -> str:
        """A cell as it is printed: on one line, with nothing that a terminal would obey; empty for None."""
        if cell is None:
            return ""
        return _printable(cell if isinstance(cell, str) else format(cell, self.spec))


@dataclass(frozen=True)
class Table:
    """Rows under headings, with a title above and notes below.

    Raises:
        ValueError: a row has more or fewer cells than there are columns.
    """

    columns: Sequence[Column | str]
    """``Column``, or a heading alone."""
    rows: Sequence[Sequence[Cell]]
    """A cell that is text stays as it is."""
    title: str = ""
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells in a table of {len(self.columns)} columns: {row}")

    def filled(self) -> Table:
        """The same without the columns that are empty in every row; all of them where there is no row."""
        kept = [place for place in range(len(self.columns)) if not self.rows or any(row[place] for row in self._cells)]
        rows = [[row[place] for place in kept] for row in self.rows]
        return replace(self, columns=[self.columns[place] for place in kept], rows=rows)

    @cached_property
    def _columns(self) -> list[Column]:
        return [Column(column) if isinstance(column, str) else column for column in self.columns]

    @cached_property
    def _cells(self) -> list[list[str]]:
        return [[column.write(cell) for column, cell in zip(self._columns, row, strict=True)] for row in self.rows]

    @cached_property
    def _aligned(self) -> list[Align]:
        aligned: list[Align] = []
        for place, column in enumerate(self._columns):
            numbers = [bool(_NUMBER.match(row[place])) for row in self._cells if row[place]]
            aligned.append(column.align or ("right" if numbers and all(numbers) else "left"))
        return aligned

    def __str__(self) -> str:
        return self.text()

    def text(self, styled: bool = False) -> str:
        """Plain text in columns. A terminal's width wraps cells inside their columns; a file or a pipe wraps nothing.

        Args:
            styled: for a terminal: title and headings are bold, rule and notes dim.
        """
        from rich.box import Box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        rule = Box("    \n    \n -- \n    \n    \n    \n    \n    \n")
        drawn = RichTable(
            box=rule, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold" if styled else ""
        )
        for column, align in zip(self._columns, self._aligned, strict=True):
            drawn.add_column(Text(_printable(column.title)), justify=align, overflow="fold")
        for row in self._cells:
            drawn.add_row(*map(Text, row))
        terminal = sys.stdout is not None and sys.stdout.isatty()
        console = Console(
            width=None if terminal else 10_000,  # no line is wrapped where there is no terminal
            color_system="standard" if styled else None,
            force_terminal=styled or None,
        )
        with console.capture() as captured:
            console.print(drawn)
        bold, dim, end = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if styled else ("", "", "")  # ECMA-48, SGR
        lines = [line.rstrip() for line in captured.get().splitlines()]
        # The rule under the headings need not be as long as the longest sentence in a cell.
        lines = [f"{dim}{line[:100]}{end}" if set(line) == {"-"} else line for line in lines]
        above = [f"{bold}{_printable(self.title)}{end}", ""] if self.title else []
        below = ["", *(f"{dim}{_printable(note)}{end}" for note in self.notes)] if self.notes else []
        return "\n".join([*above, *lines, *below])

    def markdown(self) -> str:
        """A Markdown table (GitHub's), the title a paragraph above and each note a paragraph below."""
        lines = [
            _markdown_row([_printable(column.title) for column in self._columns]),
            "|" + "|".join("---:" if align == "right" else "---" for align in self._aligned) + "|",
            *map(_markdown_row, self._cells),
        ]
        parts = [_printable(self.title), "\n".join(lines), *map(_printable, self.notes)]
        return "\n\n".join(part for part in parts if part)

    def as_dicts(self) -> list[dict[str, Cell]]:
        """The rows for JSON: cells as they were given, by the titles of the columns."""
        titles = [column.title for column in self._columns]
        return [dict(zip(titles, row, strict=True)) for row in self.rows]

    def html(self) -> str:
        """A ``<table>``, the title its caption and each note a paragraph below; cells that stand to the right have
        the class ``number``."""
        kinds = [' class="number"' if align == "right" else "" for align in self._aligned]

        def row(tag: str, cells: Sequence[str]) -> str:
            inner = "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
            return f"<tr>{inner}</tr>"

        caption = f"<caption>{escape(_printable(self.title))}</caption>" if self.title else ""
        head = row("th", [_printable(column.title) for column in self._columns])
        body = "\n".join(row("td", cells) for cells in self._cells)
        table = f"<table>{caption}<thead>{head}</thead><tbody>\n{body}\n</tbody></table>"
        return "\n".join([table, *(f"<p>{escape(_printable(note))}</p>" for note in self.notes)])


@dataclass(frozen=True)
class Tables:
    """Several tables and the paragraphs between them, in order, written like a single table."""

    parts: Sequence[Table | str]

    def __str__(self) -> str:
        return self.text()

    def text(self, styled: bool = False) -> str:
        """The parts as ``Table.text`` gives them, an empty line between two."""
        return "\n\n".join(part if isinstance(part, str) else part.text(styled) for part in self.parts)

    def markdown(self) -> str:
        """The parts as ``Table.markdown`` gives them; text stays as it is."""
        return "\n\n".join(part if isinstance(part, str) else part.markdown() for part in self.parts)


def _printable(text: str) -> str:
    return text if text.isprintable() else one_line(text, limit=max(len(text), 3))


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("\\", "\\\\").replace("|", "\\|") for cell in cells) + " |"
