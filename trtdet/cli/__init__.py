"""The command line: arguments in, a call of the package, its results out. Each command has a file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from trtdet import __version__
from trtdet.cli import (
    audit_command,
    bench_command,
    build_command,
    calibrate_command,
    compare_command,
    completion_command,
    demo_command,
    doctor_command,
    eval_command,
    export_command,
    infer_command,
    init_command,
    package_command,
    profile_command,
    record_command,
    report_command,
    sensitivity_command,
    sweep_command,
    tune_command,
)
from trtdet.cli.command import Command, Parser, nearest
from trtdet.cli.failures import RAISE, describe, interrupted, write_details
from trtdet.errors import TrtdetError
from trtdet.progress import Console, OutputClosed

COMMANDS: tuple[Command, ...] = (
    doctor_command.COMMAND,
    export_command.COMMAND,
    init_command.COMMAND,
    calibrate_command.COMMAND,
    build_command.COMMAND,
    eval_command.COMMAND,
    audit_command.COMMAND,
    sensitivity_command.COMMAND,
    sweep_command.COMMAND,
    tune_command.COMMAND,
    bench_command.COMMAND,
    profile_command.COMMAND,
    infer_command.COMMAND,
    record_command.COMMAND,
    report_command.COMMAND,
    compare_command.COMMAND,
    package_command.COMMAND,
    demo_command.COMMAND,
    completion_command.COMMAND,
)
"""In the order of ``trtdet --help``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        0 when done, 1 on an error, 130 on Ctrl-C; wrong usage exits with 2. No exception leaves it, unless the
        environment variable TRTDET_RAISE is set.
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
    try:
        for note in options.notes:
            console.line(note)
        console.give(options.run(options, console))
    except OutputClosed:
        raise
    except Exception as error:
        if interrupted(error):
            raise KeyboardInterrupt from error
        if isinstance(error, TrtdetError):
            return _failed(options, console, error, str(error), {})
        if os.environ.get(RAISE):
            raise
        details = write_details(error)
        where = {"details": str(details) if details else None}
        return _failed(options, console, error, describe(error, details), where)
    return 0


def _failed(
    options: argparse.Namespace, console: Console, error: Exception, said: str, more: dict[str, str | None]
) -> int:
    console.fail(said)
    if options.json:
        try:
            console.give({"error": {"type": type(error).__name__, "message": said, **more}})
        except TrtdetError as full:
            console.fail(full)
    return 1


def parsers(*names: str) -> tuple[Parser, dict[str, Parser]]:
    """The parser of ``trtdet`` and those of its commands.

    Args:
        names: the commands whose options are declared; the others have their line in the help.
    """
    top = Parser(
        prog="trtdet", description="A trained detector becomes an INT8 TensorRT engine, and COCO mAP says what it cost."
    )
    top.add_argument("--version", action="version", version=f"trtdet {__version__}", help="print the version and exit")
    group = top.add_subparsers(
        metavar="COMMAND", required=True, title="commands", description="'trtdet COMMAND --help' explains each"
    )
    for command in COMMANDS:
        parser = group.add_parser(command.name, help=command.summary, description=command.summary)
        parser.set_defaults(run=command.run, notes=[])
        if command.name in names:
            command.add_options(parser)
            parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
            parser.add_argument(
                "--verbose",
                action="store_true",
                help="show the messages of libraries and of the builder, and how long each stage took",
            )
    return top, dict(group.choices)


def _parse(words: list[str]) -> argparse.Namespace:
    name = next((word for word in words if not word.startswith("-")), "")
    top, commands = parsers(name)
    if name in commands:
        commands[name].check_spelling(words[words.index(name) + 1 :])
    elif name:
        top.error(f"no command '{name}'{nearest(name, commands)}; commands: {', '.join(commands)}")
    return top.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
