"""Builds parsers from the rows of :mod:`trtdet.options`, and options from parsed arguments.

Arguments that several commands share, such as the model and the output, are declared here too.
"""

from __future__ import annotations

import argparse
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trtdet.errors import ConfigError
from trtdet.options import OptionSet, Row, offered, path_of, rows_of, setting, with_values

if TYPE_CHECKING:
    from trtdet.config import Config

_Options = TypeVar("_Options", bound=OptionSet)


def argument(parser: Any, spelling: str, help: str, *, default: Any = None, **facts: Any) -> None:
    """Declares an argument of a single command.

    Args:
        parser: a parser or a group.
        spelling: name or flags, and the placeholder of the value, such as ``bundle BUNDLE`` or ``-o --output DIR``; a
            flag without a placeholder is a switch, unless ``facts`` has choices.
        help: the default is added to it.
        default: its type also reads the text.
        facts: more arguments of argparse's ``add_argument``.
    """
    *names, metavar = spelling.split(" ")
    if metavar.startswith("--"):
        names, metavar = [*names, metavar], ""
        facts = facts if "choices" in facts else {"action": "store_true", **facts}
    if facts.get("type") is Path:
        facts = {**facts, "type": read_path}
    if metavar:
        facts = {"metavar": metavar, **facts}
    if default is not None:
        facts = {"default": default, **({} if "choices" in facts else {"type": type(default)}), **facts}
        help = help if "default:" in help else f"{help} (default: %(default)s)"
    parser.add_argument(*names, help=help, **facts)


def add_rows(parser: ArgumentParser, options: type[OptionSet]) -> None:
    """Declares the flags of an options dataclass in their groups, and ``--set`` for its settings."""
    groups: dict[str, Any] = {}
    for row in offered(options):
        if not row.is_setting:
            if row.group not in groups:
                groups[row.group] = parser.add_argument_group(row.group)
            _add_flag(groups[row.group], row)
    parser.set_defaults(settings=[])
    if any(row.is_setting for row in offered(options)):
        parser.add_argument(
            "--set",
            dest="settings",
            action="extend",
            nargs="+",
            type=reading(lambda text: setting(options, text)),
            metavar="NAME=VALUE",
            help="settings, such as --set nms.max_detections=100",
        )
        parser.add_argument("--help-settings", action=_HelpSettings, nargs=0, options=options, help="list the settings")


def _add_flag(group: Any, row: Row) -> None:
    place = ".".join(row.path)
    if row.flags:
        choice = group.add_mutually_exclusive_group()
        for flag, (value, help) in row.flags.items():
            choice.add_argument(
                flag, dest=place, action="store_const", const=value, default=argparse.SUPPRESS, help=help
            )
    elif row.kind is bool and row.read is None:
        group.add_argument(row.flag, dest=place, action="store_true", default=argparse.SUPPRESS, help=row.help)
    else:
        group.add_argument(
            row.flag,
            dest=place,
            type=read_path if row.kind is Path and row.read is None else reading(row.parse),
            choices=row.values or None,
            nargs="+" if row.many else None,
            default=argparse.SUPPRESS,
            metavar=row.placeholder,
            help=_help(row).replace("%", "%%"),
        )


def default_text(row: Row) -> str:
    """The default of a row as on the command line."""
    return " ".join(row.text(item) for item in (row.default if row.many else (row.default,)))


def _help(row: Row) -> str:
    stated = row.default in (None, ()) or "(default" in row.help
    return row.help if stated else f"{row.help} (default: {default_text(row)})"


def reading(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """``read`` for argparse, which shows the message of no other error than its own."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


read_path = reading(path_of)
"""Reads a path, which ``trtdet completion`` completes."""


class _HelpSettings(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, options: type[OptionSet], **rest: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, **rest)
        self.rows = options
        self.names = [row.name for row in settings_of(options)]

    def __call__(self, parser: ArgumentParser, *_: Any) -> None:
        print(f"Settings of '{parser.prog}', given as --set NAME=VALUE NAME=VALUE ...\n")
        for row in settings_of(self.rows):
            print(f"  {row.name}={row.placeholder}")
            print(textwrap.fill(_help(row), 100, initial_indent="      ", subsequent_indent="      "))
        parser.exit()


def settings_of(options: type[OptionSet]) -> list[Row]:
    """The rows without a flag, by name."""
    return sorted((row for row in offered(options) if row.is_setting), key=lambda row: row.name)


def options_of(parsed: Namespace, options: type[_Options]) -> _Options:
    """The parsed arguments as options. Raises ConfigError for a value that is not allowed."""
    values = {row.path: value for row, value in parsed.settings}
    for row in rows_of(options):
        if hasattr(parsed, ".".join(row.path)):
            values[row.path] = getattr(parsed, ".".join(row.path))
    changed: _Options = with_values(options(), values)
    return changed


def model_options(
    parser: ArgumentParser,
    metavar: str,
    output: str,
    rows: type[OptionSet],
    dry_run: bool = False,
    required: bool = True,
) -> None:
    """Declares a command's options: a float model, its configuration, ``-o``, which may be ``required``, and
    ``rows``."""
    argument(parser, "model MODEL", "float ONNX model", type=Path)
    parser.add_argument("--config", required=True, help="YAML file, or a shipped name such as yolox")
    add_output(parser, metavar, output, required=required)
    add_rows(parser, rows)
    if dry_run:
        argument(parser, "--dry-run", "list stages, times and memory; write nothing")


def add_target(parser: ArgumentParser, several: bool = False) -> None:
    """Declares the target: a bundle, or a model with its configuration."""
    if several:
        argument(parser, "targets BUNDLE|MODEL", "bundles or ONNX models", type=Path, nargs="+")
    else:
        argument(parser, "target BUNDLE|MODEL", "a bundle or an ONNX model", type=Path)
    parser.add_argument("--config", help="YAML file or shipped name; required for a MODEL; a BUNDLE has its own")


def add_output(parser: ArgumentParser, metavar: str, what: str, required: bool = True) -> None:
    argument(parser, f"-o --output {metavar}", what, type=Path, required=required)


def config_if_given(options: Namespace) -> Config | None:
    """The configuration given with ``--config``, or None."""
    from trtdet.config import load_config

    return load_config(options.config) if options.config else None


def check_suffix(output: Path | None, *allowed: str) -> None:
    """Raises ConfigError for another suffix, before anything is measured."""
    if output is not None and output.suffix not in allowed:
        raise ConfigError(f"-o {output} must end in {' or '.join(allowed)}")
