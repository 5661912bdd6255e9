"""Versions, resolved configuration and commands that reproduce a bundle, a tune or a sweep."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Literal

import yaml

from trtdet.bundle import Bundle
from trtdet.experiments.folder import Provenance
from trtdet.options import BuildOptions, SweepOptions, TuneOptions, words
from trtdet.report.document import Grid, Section, Text
from trtdet.tables import Column, Table


def reproduce_section(bundle: Bundle) -> Section:
    """How to reproduce a bundle. Raises BundleError: its configuration is missing."""
    manifest = bundle.manifest
    images, backend = manifest.quantization.images, manifest.backend
    rows = {
        "trtdet": manifest.trtdet_version,
        backend.name: backend.version,
        "compute capabilities": ", ".join(f"{sm / 10}" for sm in backend.sms),
        "made": manifest.created,
        "model, SHA-256": manifest.model.sha256,
        "calibration images, SHA-256": images.sha256 if images is not None else "",
        "content, SHA-256": manifest.content_hash,
    }
    commands = (_command("build", BuildOptions, manifest.command, output=str(bundle.path)),)
    return _section(
        rows, commands, bundle.config.model_dump(mode="json"), more="Equal content hashes mean equal inputs."
    )


def provenance_section(provenance: Provenance, kind: Literal["tune", "sweep"], output: str) -> Section:
    """How to reproduce a tune or a sweep; ``output`` is its folder, for the command."""
    runs = provenance.runs
    rows = {
        "trtdet": ", ".join(dict.fromkeys(run.trtdet for run in runs)),
        runs[-1].backend: runs[-1].backend_version,
        "compute capabilities": ", ".join(f"{sm / 10}" for sm in runs[-1].sms),
        "made": ", ".join(dict.fromkeys(run.created for run in runs)),
        "model, SHA-256": provenance.model,
        "calibration images, SHA-256": provenance.images,
    }
    options = TuneOptions if kind == "tune" else SweepOptions
    commands = tuple(_command(kind, options, run.options, output=output) for run in runs)
    more = "Each command added its rows, and finds those that are there." if len(commands) > 1 else ""
    return _section(rows, commands, provenance.config, more=more)


def _section(rows: Mapping[str, str], commands: tuple[str, ...], config: Mapping[str, Any], more: str) -> Section:
    columns = (Column("of", align="left"), Column("is", align="left"))
    text = (
        "MODEL is the float ONNX file with the hash above, config.yaml the text below; paths are as they were given "
        f"to the command. {more}"
    )
    yaml_lines = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True).splitlines()
    table = Grid(Table(columns, [row for row in rows.items() if row[1]]))
    parts = (table, Text(commands, code=True), Text((text.rstrip(),)), Text(tuple(yaml_lines), code=True))
    return Section("Reproduce", parts)


def _command(verb: str, kind: type, options: Mapping[str, Any], output: str) -> str:
    return shlex.join(["trtdet", verb, "MODEL", "--config", "config.yaml", *words(options, kind), "-o", output])
