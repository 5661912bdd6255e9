"""The command line. Each file has one or two commands, which call the package and print its results."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from trtdet import __version__
from trtdet.cli import (
    build_commands,
    candidate_commands,
    detector_commands,
    experiment_commands,
    measure_commands,
    model_commands,
    report_commands,
    setup_commands,
    signature_commands,
)
from trtdet.cli.command import Command, Parser
from trtdet.cli.failures import RAISE, describe, interrupted, lacks_memory, write_details
from trtdet.errors import TrtdetError
from trtdet.options.rows import nearest
from trtdet.progress import Console, OutputClosed

COMMANDS: tuple[Command, ...] = (
    setup_commands.DOCTOR,
    model_commands.EXPORT,
    model_commands.INIT,
    build_commands.CALIBRATE,
    build_commands.BUILD,
    candidate_commands.PREPARE,
    candidate_commands.FINISH,
    detector_commands.EVAL,
    measure_commands.AUDIT,
    build_commands.SENSITIVITY,
    experiment_commands.SWEEP,
    experiment_commands.TUNE,
    measure_commands.BENCH,
    measure_commands.PROFILE,
    detector_commands.PREDICT,
    report_commands.REPORT,
    report_commands.COMPARE,
    report_commands.PACKAGE,
    signature_commands.SIGN,
    signature_commands.VERIFY,
    setup_commands.DEMO,
    setup_commands.COMPLETION,
)
"""In the order of ``trtdet --help``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns 0, 1 on an error, or 130 on Ctrl-C; wrong usage exits with 2.

    Unexpected exceptions pass only if the environment variable TRTDET_RAISE is set.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # A file name need not be text in the terminal's encoding.
    options = _parse(sys.argv[1:] if arguments is None else list(arguments))
    with Console(options.json, options.verbose) as console:
        try:
            return _run(options, console)
        except KeyboardInterrupt:
            console.line("trtdet: stopped; nothing was left half-written")
            return 130
        except OutputClosed:
            return 1


def _run(options: argparse.Namespace, console: Console) -> int:
    details: dict[str, str | None] = {}
    try:
        result = options.run(options, console)
        if result is not None:
            console.give(result)
        return 0
    except OutputClosed:
        raise
    except TrtdetError as error:
        kind, message = type(error).__name__, str(error)
    except Exception as error:
        if interrupted(error):
            raise KeyboardInterrupt from error
        if os.environ.get(RAISE):
            raise
        kind, message = type(error).__name__, lacks_memory(error) or ""
        if not message:
            file = write_details(error)
            message, details = describe(error, file), {"details": str(file) if file else None}
    console.fail(message)
    if options.json:
        try:
            console.give({"error": {"type": kind, "message": message, **details}})
        except TrtdetError as full:
            console.fail(full)
    return 1


def parsers(*names: str) -> tuple[Parser, dict[str, Parser]]:
    """The parser of ``trtdet``, and those of its commands by name. Only the commands in ``names`` get options."""
    top = Parser(
        prog="trtdet", description="A trained detector becomes an INT8 TensorRT engine, and COCO mAP says what it cost."
    )
    top.add_argument("--version", action="version", version=f"trtdet {__version__}", help="print the version and exit")
    group = top.add_subparsers(
        metavar="COMMAND", required=True, title="commands", description="'trtdet COMMAND --help' explains each"
    )
    for command in COMMANDS:
        usage = f"trtdet {command.name} {command.usage}" if command.usage else None
        lines = [command.summary[:1].upper() + command.summary[1:] + "."]
        if command.examples:
            width = max(len(arguments) for arguments, _ in command.examples)
            lines += ["", *(f"  {command.name} {arguments:{width}}  {what}" for arguments, what in command.examples)]
        parser = group.add_parser(command.name, help=command.summary, description="\n".join(lines), usage=usage)
        parser.set_defaults(run=command.run)
        if command.name in names:
            command.add_options(parser)
            parser.add_argument("--json", action="store_true", help=command.json)
            parser.add_argument("--verbose", action="store_true", help="show the builder's messages and times")
    return top, dict(group.choices)


def _parse(words: list[str]) -> argparse.Namespace:
    name = next((word for word in words if not word.startswith("-")), "")
    top, commands = parsers(name)
    if name in commands:
        commands[name].check_spelling(words[words.index(name) + 1 :])
    elif name == "infer":
        top.error("'infer' is now 'predict': trtdet predict BUNDLE|MODEL SOURCE ... -o DIR")
    elif name:
        top.error(f"no command '{name}'{nearest(name, commands)}; commands: {', '.join(commands)}")
    return top.parse_args(words)
