"""Tables of results as text, Markdown, HTML and JSON."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import Literal, TypeAlias

from trtdet.errors import one_line

Align = Literal["left", "right"]
Cell: TypeAlias = "str | int | float | None"

_NUMBER = re.compile(r"[-+]?[\d ]*\d(\.\d+)?([eE][-+]?\d+)?\s?%?$")


def counted(number: int, noun: str = "image") -> str:
    """``1 image``, ``2 images``, ``2 classes``."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def listed(names: Sequence[str], most: int = 2) -> str:
    """The first ``most`` names and the number of the others: ``a, b and 3 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@dataclass(frozen=True)
class Column:
    """A column; ``spec`` formats its int and float cells, such as ``.2f``, ``+.2f`` or ``.1%``."""

    title: str
    spec: str = ""
    align: Align | None = None
    """None aligns a column of numbers to the right."""

    def write(self, cell: Cell) -> str:
        """The cell as one line without control characters; empty for None."""
        if cell is None:
            return ""
        return printable(cell if isinstance(cell, str) else format(cell, self.spec))


@dataclass(frozen=True)
class Table:
    """Rows under headings, with a title above and notes below. Raises ValueError: a row has more or fewer cells than
    there are columns."""

    columns: Sequence[Column | str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells in a table of {len(self.columns)} columns: {row}")

    def filled(self) -> Table:
        """The table without columns that are empty in every row; a table without rows keeps all."""
        used = [place for place in range(len(self.columns)) if not self.rows or any(row[place] for row in self._cells)]
        rows = [[row[place] for place in used] for row in self.rows]
        return replace(self, columns=[self.columns[place] for place in used], rows=rows)

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
        """Plain text in columns; cells wrap only in a terminal. ``styled`` adds bold headings and dim notes."""
        from rich.box import Box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        rule = Box("    \n    \n -- \n    \n    \n    \n    \n    \n")
        rich_table = RichTable(
            box=rule, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold" if styled else ""
        )
        for column, align in zip(self._columns, self._aligned, strict=True):
            rich_table.add_column(Text(printable(column.title)), justify=align, overflow="fold")
        for row in self._cells:
            rich_table.add_row(*map(Text, row))
        terminal = sys.stdout is not None and sys.stdout.isatty()
        console = Console(
            width=None if terminal else 10_000,  # Files and pipes get no line breaks inside cells.
            color_system="standard" if styled else None,
            force_terminal=styled or None,
        )
        with console.capture() as captured:
            console.print(rich_table)
        bold, dim, end = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if styled else ("", "", "")  # ECMA-48, SGR
        lines = [line.rstrip() for line in captured.get().splitlines()]
        # A cell can hold a long sentence; the rule under the headings stays short.
        lines = [f"{dim}{line[:100]}{end}" if set(line) == {"-"} else line for line in lines]
        above = [f"{bold}{printable(self.title)}{end}", ""] if self.title else []
        below = ["", *(f"{dim}{printable(note)}{end}" for note in self.notes)] if self.notes else []
        return "\n".join([*above, *lines, *below])

    def markdown(self) -> str:
        """A GitHub Markdown table, with the title above and the notes below."""
        rows = [[printable(column.title) for column in self._columns], *self._cells]
        escaped = [[cell.replace("\\", "\\\\").replace("|", "\\|") for cell in row] for row in rows]
        head, *lines = ("| " + " | ".join(row) + " |" for row in escaped)
        rule = "|" + "|".join("---:" if align == "right" else "---" for align in self._aligned) + "|"
        parts = [printable(self.title), "\n".join([head, rule, *lines]), *map(printable, self.notes)]
        return "\n\n".join(part for part in parts if part)

    def as_dicts(self) -> list[dict[str, Cell]]:
        """The rows for JSON: unformatted cells by column title."""
        titles = [column.title for column in self._columns]
        return [dict(zip(titles, row, strict=True)) for row in self.rows]

    def html(self) -> str:
        """A ``<table>`` with a caption, and the notes below; right-aligned cells have the class ``number``. A column
        without a title has no heading, only an empty cell."""
        kinds = [' class="number"' if align == "right" else "" for align in self._aligned]

        def row(tag: str, cells: Sequence[str]) -> str:
            tags = [tag if cell else "td" for cell in cells]
            inner = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for tag, kind, cell in zip(tags, kinds, cells, strict=True))
            return f"<tr>{''.join(inner)}</tr>"

        caption = f"<caption>{escape(printable(self.title))}</caption>" if self.title else ""
        head = row("th", [printable(column.title) for column in self._columns])
        body = "\n".join(row("td", cells) for cells in self._cells)
        table = f"<table>{caption}<thead>{head}</thead><tbody>\n{body}\n</tbody></table>"
        return "\n".join([table, *(f"<p>{escape(printable(note))}</p>" for note in self.notes)])


@dataclass(frozen=True)
class Tables:
    """Tables and paragraphs in order, with the methods of a single table."""

    parts: Sequence[Table | str]

    def __str__(self) -> str:
        return self.text()

    def text(self, styled: bool = False) -> str:
        """See :meth:`Table.text`; an empty line separates the parts."""
        return "\n\n".join(part if isinstance(part, str) else part.text(styled) for part in self.parts)

    def markdown(self) -> str:
        """See :meth:`Table.markdown`; paragraphs are unchanged."""
        return "\n\n".join(part if isinstance(part, str) else part.markdown() for part in self.parts)


@dataclass(frozen=True)
class LabelledLines:
    """Lines that each begin with a keyword: what was asked, what was done."""

    rows: Sequence[tuple[str, str]]

    def __str__(self) -> str:
        return self.text()

    def text(self, styled: bool = False) -> str:
        """Plain text, a row a line; ``styled`` is for a terminal: coloured keywords, and rows that wrap beside them."""
        indent = max((len(keyword) for keyword, _ in self.rows), default=0) + 2
        lines = []
        for keyword, value in self.rows:
            value = printable(value)
            if styled:
                width = max(shutil.get_terminal_size((100, 24)).columns, indent + 20)
                value = textwrap.fill(value, width - indent, break_on_hyphens=False, break_long_words=False)
                value = value.replace("\n", "\n" + " " * indent)
            shown = f"\x1b[1;36m{keyword}\x1b[0m" if styled else keyword
            lines.append(f"{shown}{' ' * (indent - len(keyword))}{value}")
        return "\n".join(lines)


def printable(text: str) -> str:
    """The text itself, or one line of it without control characters."""
    return text if text.isprintable() else one_line(text, limit=max(len(text), 3))
