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
_UNBOUNDED = 10_000
"""A width that nothing printed here reaches: where there is no terminal, no line is wrapped."""

_LONGEST_RULE = 100

_STYLES = ("\x1b[1m", "\x1b[2m", "\x1b[0m")
"""What turns bold and dim on, and both off (ECMA-48, SGR)."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: its heading.
        spec: how its int and float cells are written, as in ``format(value, spec)``: ``.2f``, ``+.2f``, ``.1%``.
        align: None puts a column to the right whose every cell is a number or empty.
    """

    title: str
    spec: str = ""
    align: Align | None = None

    def write(self, cell: Cell) -> str:
        """A cell as it is printed: on one line, with nothing that a terminal would obey; empty for None."""
        if cell is None:
            return ""
        return _printable(cell if isinstance(cell, str) else format(cell, self.spec))


@dataclass(frozen=True)
class Table:
    """Rows under headings, with a title above and notes below.

    Attributes:
        columns: ``Column``, or a heading alone.
        rows: as many cells in each as there are columns; a cell that is text stays as it is.
        title: one line above.
        notes: lines below.

    Raises:
        ValueError: a row has more or fewer cells than there are columns.
    """

    columns: Sequence[Column | str]
    rows: Sequence[Sequence[Cell]]
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
        return [
            column.align or _alignment([row[place] for row in self._cells])
            for place, column in enumerate(self._columns)
        ]

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None, styled: bool = False) -> str:
        """Plain text in columns.

        Args:
            width: the most characters in a line; longer cells are wrapped inside their columns. None takes the width
                of the terminal, and wraps nothing where standard output is a file or a pipe.
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
            width=width or (None if terminal else _UNBOUNDED),
            color_system="standard" if styled else None,
            force_terminal=styled or None,
        )
        with console.capture() as captured:
            console.print(drawn)
        lines = [_rule_cut(line.rstrip()) for line in captured.get().splitlines()]
        bold, dim, end = _STYLES if styled else ("", "", "")
        lines = [f"{dim}{line}{end}" if set(line) == {"-"} else line for line in lines]
        above = [f"{bold}{_printable(self.title)}{end}", ""] if self.title else []
        below = ["", *(f"{dim}{_printable(note)}{end}" for note in self.notes)] if self.notes else []
        return "\n".join([*above, *lines, *below])

    def styled(self) -> str:
        """The text for a terminal, see :meth:`text`."""
        return self.text(styled=True)

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

    def text(self, width: int | None = None, styled: bool = False) -> str:
        """The parts as ``Table.text`` gives them, an empty line between two."""
        return "\n\n".join(part if isinstance(part, str) else part.text(width, styled) for part in self.parts)

    def styled(self) -> str:
        """The parts as ``Table.styled`` gives them."""
        return self.text(styled=True)

    def markdown(self) -> str:
        """The parts as ``Table.markdown`` gives them; text stays as it is."""
        return "\n\n".join(part if isinstance(part, str) else part.markdown() for part in self.parts)

    def html(self) -> str:
        """The parts as ``Table.html`` gives them; text as paragraphs, one for each of its lines."""
        return "\n".join(
            "\n".join(f"<p>{escape(line)}</p>" for line in part.splitlines() if line)
            if isinstance(part, str)
            else part.html()
            for part in self.parts
        )


def _alignment(cells: Sequence[str]) -> Align:
    filled = [cell for cell in cells if cell]
    return "right" if filled and all(_NUMBER.match(cell) for cell in filled) else "left"


def _printable(text: str) -> str:
    return text if text.isprintable() else one_line(text, limit=max(len(text), 3))


def _rule_cut(line: str) -> str:
    """The rule under the headings need not be as long as the longest sentence in a cell."""
    return line[:_LONGEST_RULE] if set(line) == {"-"} else line


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("\\", "\\\\").replace("|", "\\|") for cell in cells) + " |"
