"""``trtdet completion``: shell completion of commands, options and values."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.errors import ConfigError
from trtdet.progress import Console

SHELLS = ("bash", "zsh", "fish")


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for; it is printed")


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.cli import COMMANDS, parsers

    try:
        import shtab
    except ImportError:
        raise ConfigError("completion needs the library shtab, which is not installed", "pip install shtab") from None
    top, commands = parsers(*(command.name for command in COMMANDS))
    for parser in (top, *commands.values()):
        for action in parser._actions:  # argparse has no public list of its options.
            if action.type is Path and action.help != argparse.SUPPRESS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # as shtab documents it
    script = str(shtab.complete(top, options.shell))
    console.say(script)
    return {"shell": options.shell, "script": script}


COMMAND = Command(
    "completion",
    summary="print a script that completes commands and options in a shell",
    add_options=_options,
    run=_run,
)
