"""Packages a bundle for other servers: a Triton model repository, or a DeepStream configuration."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtdet import __version__
from trtdet.backends.libraries import LIBRARIES, library_named
from trtdet.bundle import Bundle
from trtdet.deploy import deepstream, triton
from trtdet.deploy.triton import TritonOptions
from trtdet.errors import BundleError, ConfigError
from trtdet.files import FolderWriter

__all__ = ["MARKER", "Package", "PackageOptions", "TritonOptions", "package"]

Format = Literal["triton", "deepstream"]

MARKER = "trtdet-package.json"
"""This file marks a folder as a package; only such a folder may be replaced."""


@dataclass(frozen=True)
class PackageOptions:
    """Options of :func:`package`.

    Attributes:
        format: ``triton`` for a model repository of Triton Inference Server, ``deepstream`` for Gst-nvinfer.
        name: of the served model and its folders: letters, digits, ``.``, ``_`` and ``-``; None for the name in the
            bundle's configuration.
        triton: only for format ``triton``; None for the defaults.
    """

    format: Format
    name: str | None = None
    triton: TritonOptions | None = None


@dataclass(frozen=True)
class Package:
    """Result of :func:`package`.

    Attributes:
        files: names, sorted.
        warnings: sentences on differences from trtdet, and on steps that the user must take.
    """

    folder: Path
    format: Format
    files: tuple[str, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        facts = {"format": self.format, "files": list(self.files), "warnings": list(self.warnings)}
        return {"package": str(self.folder), **facts}


def package(bundle: Path | str, folder: Path | str, options: PackageOptions) -> Package:
    """Verifies a bundle and writes a package of it; ``folder`` appears in one rename and may replace a package.

    Raises:
        BundleError: the folder has no bundle, the bundle was altered, or the server cannot run it.
        ConfigError: an option is invalid, or the server cannot do the bundle's pre-processing.
        OutputError: the folder holds something else or cannot be written.
    """
    source = Bundle(bundle)
    manifest = source.manifest
    if options.triton is not None and options.format != "triton":
        raise ConfigError("instances, queue and input are Triton's", f"leave them out with --format {options.format}")
    name = manifest.model.name if options.name is None else options.name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(
            f"'{name}' cannot be the name of a served model: letters, digits, '.', '_' and '-' are allowed, a letter "
            "or digit first",
            "give another with --name",
        )
    library = library_named(manifest.backend.name)
    if options.format in library.not_served:
        served = [
            f"--backend {row.name}"
            + (" on a machine with the GPU" if row.times_kernels else "")
            + ("" if row.makes_engine else " for the ONNX model alone")
            for row in LIBRARIES
            if options.format not in row.not_served
        ]
        raise BundleError(
            f"bundle '{bundle}' has an engine of {library.title}, for which {library.not_served[options.format]}",
            f"build it again with {' or with '.join(served)}",
        )
    if options.format == "triton":
        files, warnings = triton.repository(source, name, options.triton or TritonOptions())
    else:
        files, warnings = deepstream.configuration(source, name)
    folder = Path(folder)
    with FolderWriter(folder, MARKER, "a package of trtdet") as writer:
        for file, data in files.items():
            writer.add(file, data)
        facts = {
            "trtdet_version": __version__,
            "format": options.format,
            "name": name,
            "bundle": manifest.content_hash,
            "warnings": list(warnings),
            "files": writer.files,
        }
        writer.put((json.dumps(facts, indent=2) + "\n").encode())
    return Package(folder, format=options.format, files=tuple(sorted([*files, MARKER])), warnings=warnings)
