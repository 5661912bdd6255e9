"""What a command is, and a parser that answers a misspelt word with the nearest."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from trtdet.errors import one_line
from trtdet.progress import Console


@dataclass(frozen=True)
class Command:
    """One command of ``trtdet``.

    Attributes:
        name: as it is typed.
        summary: its line in ``trtdet --help``.
        add_options: declares its options on a parser.
        run: takes the options and the console, does the work through a call of the package, prints the results, and
            returns the object of ``--json``.
    """

    name: str
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Console], dict[str, Any]]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are a single line, and name the option nearest to a misspelling."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {one_line(message, 1000)}; see '{self.prog} --help'\n")

    def options(self, hidden: bool = False) -> dict[str, argparse.Action]:
        """The actions by option string, those of renamed options only if ``hidden``."""
        # argparse has no public list of its options.
        known = self._option_string_actions
        return {name: action for name, action in known.items() if hidden or action.help != argparse.SUPPRESS}

    def check_spelling(self, words: Iterable[str]) -> None:
        """Ends with an error at the first word that is meant as an option and is none.

        argparse itself first complains of a required option that is missing, though it is there misspelt."""
        known = self.options(hidden=True)
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            if name.startswith("--"):
                # argparse takes an option by its first letters, and words with spaces in them as values.
                unknown = " " not in word and not any(option.startswith(name) for option in known)
            else:
                unknown = len(word) > 2 and word[0] == "-" and word[:2] not in known and not re.match(r"-\.?\d", word)
            if unknown:
                self.error(f"no option '{name}'{nearest(name, self.options())}")


def nearest(word: str, candidates: Iterable[str]) -> str:
    """``, did you mean 'build'?`` for ``biuld``; nothing where no candidate is near."""
    import difflib

    close = difflib.get_close_matches(word, list(candidates), n=1)
    return f", did you mean '{close[0]}'?" if close else ""


class _Renamed(argparse.Action):
    """The old spelling of an option: it works, is in no help, and says how the option is called now."""

    def __init__(self, option_strings: Sequence[str], dest: str, now: str = "", **rest: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **rest)
        self._now = now

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.notes = [*getattr(namespace, "notes", ()), f"note: {option} is now called {self._now}"]


def add_renamed(parser: argparse.ArgumentParser, old: str, now: str, choices: Sequence[str]) -> None:
    """Declares ``old`` as a hidden spelling of the option ``now``, which takes the same ``choices``."""
    dest = now.lstrip("-").replace("-", "_")
    parser.add_argument(old, dest=dest, action=_Renamed, now=now, choices=choices)
