"""Versions, the resolved configuration, and the commands that give a bundle, a tune or a sweep again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import yaml

from trtdet.bundle import Manifest
from trtdet.pipeline.made_with import MadeWith
from trtdet.report.command_lines import build_command, sweep_command, tune_command
from trtdet.report.document import Grid, Section, Text
from trtdet.tables import Column, Table

_SAID = (
    "MODEL is the float ONNX file with the hash above, config.yaml the text below; paths are as they were given to the "
    "command."
)


def reproduce_section(manifest: Manifest, output: str) -> Section:
    """What a bundle was made with: versions, the command, the configuration as it was resolved.

    Args:
        manifest: of the bundle.
        output: the bundle's folder, for the command.
    """
    images, backend = manifest.quantization.images, manifest.backend
    rows = [
        ("trtdet", manifest.trtdet_version),
        (backend.name, backend.version),
        ("compute capabilities", ", ".join(f"{sm / 10}" for sm in backend.sms)),
        ("made", manifest.created),
        ("model, SHA-256", manifest.model.sha256),
        ("calibration images, SHA-256", images.sha256 if images is not None else ""),
        ("content, SHA-256", manifest.content_hash),
    ]
    commands = (build_command(manifest.command, output),)
    return _section(rows, commands, manifest.command["config"], "Equal content hashes mean equal inputs.")


def made_with_section(made: MadeWith, kind: Literal["tune", "sweep"], output: str) -> Section:
    """What the folder of a tune or a sweep was made with.

    Args:
        made: its document.
        kind: what it is of.
        output: the folder, for the command.
    """
    latest = made.makings[-1]
    rows = [
        ("trtdet", _each(one.trtdet for one in made.makings)),
        (latest.backend, latest.backend_version),
        ("compute capabilities", ", ".join(f"{sm / 10}" for sm in latest.sms)),
        ("made", _each(one.created for one in made.makings)),
        ("model, SHA-256", made.model),
        ("calibration images, SHA-256", made.images),
    ]
    if kind == "tune":
        commands = tuple(tune_command(one.options, output) for one in made.makings)
    else:
        commands = tuple(sweep_command(one.options, made.config["nms"], output) for one in made.makings)
    more = "Each command added its rows, and finds those that are there." if len(commands) > 1 else ""
    return _section(rows, commands, made.config, more)


def _section(
    rows: Sequence[tuple[str, str]], commands: tuple[str, ...], config: Mapping[str, Any], more: str
) -> Section:
    table = Table((Column("of", align="left"), Column("is", align="left")), [row for row in rows if row[1]])
    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    return Section(
        "Reproduce",
        (
            Grid(table),
            Text(commands, code=True),
            Text((f"{_SAID} {more}".rstrip(),)),
            Text(tuple(text.splitlines()), code=True),
        ),
    )


def _each(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
