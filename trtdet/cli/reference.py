"""Generates the page of all commands, options and settings: ``python -m trtdet.cli.reference``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from trtdet.cli import COMMANDS, parsers
from trtdet.cli.options import default_text, settings_of


def reference() -> str:
    _, commands = parsers(*(command.name for command in COMMANDS))
    lines = [
        *("---", "search:", "  boost: 4  # names of options are found here first", "---", ""),
        "# Commands",
        "",
        "Every command takes `--json`, which prints one JSON object, and `--verbose`. A setting is given as "
        "`--set NAME=VALUE`; several follow one `--set`. Options cannot be abbreviated.",
    ]
    for command in COMMANDS:
        parser = commands[command.name]
        lines += ["", f"## trtdet {command.name}", "", f"{command.summary[:1].upper()}{command.summary[1:]}.", ""]
        lines += ["| option | meaning |", "|---|---|", *_options(parser)]
        holder: Any = parser.options().get("--help-settings")
        if holder is not None:
            lines += ["", "| setting | default | meaning |", "|---|---|---|"]
            for row in settings_of(holder.rows):
                default = "" if row.default in (None, ()) else _code(default_text(row))
                lines.append(f"| {_code(f'{row.name}={row.placeholder}')} | {default} | {_cell(row.help)} |")
    return "\n".join(lines) + "\n"


_EVERYWHERE = {"-h", "--json", "--verbose", "--set", "--help-settings"}


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:  # argparse has no public list of its options.
        if action.help == argparse.SUPPRESS or _EVERYWHERE & set(action.option_strings):
            continue
        value = "" if action.nargs == 0 else action.metavar or "|".join(map(str, action.choices or ())) or action.dest
        words = [*action.option_strings[-1:], str(value)] if action.option_strings else [str(value)]
        help = str(action.help) % {**vars(action), "prog": parser.prog}
        yield f"| {_code(' '.join(filter(None, words)))} | {_cell(help)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{_cell(text)}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
