"""``trtdet doctor``, ``demo`` and ``completion``: what works on this machine, and how it is used."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import argument, read_path
from trtdet.errors import ConfigError
from trtdet.progress import Console
from trtdet.tables import Table


def _doctor(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.backends.doctor import diagnose

    state = diagnose()
    devices = ", ".join(state.devices) or "none: engines are built ahead of time with TensorRT-RTX"
    console.say(f"trtdet {state.trtdet}, Python {state.python}\nCUDA devices: {devices}\nCUDA driver: {state.driver}")
    for title, checks in (("backend", state.backends), ("extra", state.extras)):
        rows = [(check.name, "ok" if check.ok else "missing", check.detail, check.fix) for check in checks]
        console.say(f"\n{Table((title, 'status', 'detail', 'to do'), rows)}")
    places = [(use.backend, use.consumer, "yes" if use.runs else "no", use.detail) for use in state.consumers]
    console.say(f"\n{Table(('bundle of', 'in', 'runs', 'with, or why not'), places)}")
    return asdict(state)


def _demo(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.demo.walkthrough import run_demo

    demo = run_demo(options.output, console.progress)
    console.say(demo.table())
    return demo.as_dict()


_FOLDER = "the folder of images, bundles, pictures and figures (default: %(default)s)"
SHELLS = ("bash", "zsh", "fish")

_FILES_TOO = ("config", "sources")
"""Arguments that take a file or something else, such as a shipped name or a camera; files are completed."""


def _completion_options(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for; it is printed")


def _completion(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.cli import COMMANDS, parsers

    try:
        import shtab
    except ImportError:
        raise ConfigError("completion needs the library shtab, which is not installed", "pip install shtab") from None
    top, commands = parsers(*(command.name for command in COMMANDS))
    for parser in (top, *commands.values()):
        for action in parser._actions:  # argparse has no public list of its options.
            file = action.type is read_path or action.dest in _FILES_TOO
            if file and action.help != argparse.SUPPRESS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # as shtab documents it
    script = str(shtab.complete(top, options.shell))
    console.say(script)
    return {"shell": options.shell, "script": script}


DOCTOR = Command(
    "doctor",
    summary="check this machine and print the install commands for what is missing",
    run=_doctor,
    examples=(
        ("", "what works on this machine"),
        ("--json", "the same for programs"),
    ),
)
DEMO = Command(
    "demo",
    summary="build, score and draw the shipped detector on generated images",
    add_options=partial(argument, spelling="-o --output DIR", help=_FOLDER, default=Path("demo"), type=Path),
    run=_demo,
    examples=(("-o demo", "minutes on a CPU"),),
)
COMPLETION = Command(
    "completion",
    summary="print a script that completes commands and options in a shell",
    add_options=_completion_options,
    run=_completion,
    examples=(("bash > trtdet.bash", "docs/terminal.md says where it goes"),),
)
