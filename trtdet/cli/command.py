"""The class of a command, and a parser that suggests the nearest option for a misspelt one."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from trtdet.errors import one_line
from trtdet.options.rows import nearest
from trtdet.progress import Console


@dataclass(frozen=True)
class Command:
    """One command of ``trtdet``.

    Attributes:
        summary: its line in ``trtdet --help``.
        run: does the work, prints the results and returns the object for ``--json``, or None if it has printed lines.
        add_options: declares its options on a parser; by default there are none.
        usage: its arguments in short; empty to list every option.
        examples: pairs of the arguments of a command and its meaning.
        json: what ``--json`` does.
    """

    name: str
    summary: str
    run: Callable[[argparse.Namespace, Console], dict[str, Any] | None]
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    usage: str = ""
    examples: tuple[tuple[str, str], ...] = ()
    json: str = "print one JSON object"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal, up to 120 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=27, width=min(shutil.get_terminal_size((100, 24)).columns, 120) - 1)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """``-o, --output DIR`` and ``--sm SM ...``, each value once."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, action.dest.upper()).partition(" [")[0]
        return f"{', '.join(action.option_strings)} {value}{' ...' if action.nargs == '+' else ''}"


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors, which suggest the nearest option for a misspelt one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, "allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {one_line(message, 1000)}; see '{self.prog} --help'\n")

    def options(self) -> dict[str, argparse.Action]:
        """The actions by option string."""
        return self._option_string_actions  # argparse has no public list of its options.

    def check_spelling(self, words: Iterable[str]) -> None:
        """Exits with an error at the first unknown option.

        argparse alone would first report a required option as missing, although it is only misspelt.
        """
        options = self.options()
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            if name.startswith("--"):
                unknown = " " not in word and name not in options  # Words with spaces are values.
            else:
                unknown = len(word) > 2 and word[0] == "-" and word[:2] not in options and not re.match(r"-\.?\d", word)
            if unknown:
                settings = getattr(options.get("--help-settings"), "names", ())
                key = name.lstrip("-").replace("-", "_")
                setting = next((setting for setting in settings if setting.rpartition(".")[2] == key), None)
                hint = f"; {setting} is a setting: --set {setting}=VALUE" if setting else ""
                self.error(f"no option '{name}'{nearest(name, options)}{hint}")
