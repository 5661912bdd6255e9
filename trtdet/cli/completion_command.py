"""``trtdet completion``: what a shell needs to complete commands, options and their values."""

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

    top, commands = parsers(*(command.name for command in COMMANDS))
    script = script_of(top, [top, *commands.values()], options.shell)
    console.say(script)
    return {"shell": options.shell, "script": script}


def script_of(top: ArgumentParser, every: list[ArgumentParser], shell: str) -> str:
    """The script that completes a command line in a shell.

    Args:
        top: the parser of the program.
        every: it and those of its commands.
        shell: one of ``SHELLS``.

    Raises:
        ConfigError: the library that writes such scripts is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise ConfigError("completion needs the library shtab, which is not installed", "pip install shtab") from None
    for parser in every:
        for action in parser._actions:  # argparse has no public list of them
            if action.type is Path and action.help != argparse.SUPPRESS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # as shtab documents it
    return str(shtab.complete(top, shell))


COMMAND = Command("completion", "print what a shell needs to complete commands and options", _options, _run)
