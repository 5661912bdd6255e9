"""The bundle as a folder: read, verified, and written in one step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trtdet.bundle.manifest import MANIFEST, SCHEMA, Manifest
from trtdet.config import Config
from trtdet.errors import BundleError
from trtdet.files import FolderWriter, sha256_file, write_atomically
from trtdet.files.documents import DocumentError, read_document

PORTABLE = "portable.onnx"
"""The file of a bundle with the model as onnxruntime runs it, where the engine is made from another."""


class Bundle:
    """A finished bundle, read and verified.

    Args:
        path: the bundle's folder.
        verify: compare every file with its hash.

    Raises:
        BundleError: there is no bundle, its manifest is of another schema, or a file is missing or altered.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path = path
        file = path / MANIFEST
        try:
            self.manifest = read_document(file, TypeAdapter(Manifest))
        except (FileNotFoundError, NotADirectoryError):
            raise BundleError(
                f"'{path}' is not a bundle: it has no {MANIFEST}; make a bundle with 'trtdet build'"
            ) from None
        except OSError as error:
            raise BundleError(f"'{file}' cannot be read: {error.strerror or error}; check the file") from None
        except DocumentError as error:
            reads = f"; this trtdet reads schema {SCHEMA}" if error.place == "schema" else ""
            raise BundleError(f"'{file}' is not a manifest: {error}{reads}; build the bundle again") from None
        if verify:
            self._verify()

    def _verify(self) -> None:
        for name, expected in self.manifest.files.items():
            try:
                got = sha256_file(self.path / name)
            except OSError:
                raise BundleError(f"bundle '{self.path}' lacks '{name}'; build it again") from None
            if got != expected:
                raise BundleError(
                    f"bundle '{self.path}': '{name}' was altered: sha256 {got[:12]}... where the manifest says "
                    f"{expected[:12]}...; build it again"
                )

    def file(self, name: str) -> Path:
        """The path of one of the bundle's files.

        Raises:
            BundleError: the bundle has no such file.
        """
        if name not in self.manifest.files:
            raise BundleError(
                f"bundle '{self.path}' has no '{name}'; it holds {', '.join(sorted(self.manifest.files))}"
            )
        return self.path / name

    def add(self, name: str, data: bytes) -> None:
        """Adds a file to the bundle, or replaces it; the bundle is whole at every moment.

        Raises:
            OutputError: the folder cannot be written.
        """
        if name in self.manifest.files:
            self._list({key: value for key, value in self.manifest.files.items() if key != name})
        write_atomically(self.path / name, data)
        self._list({**self.manifest.files, name: hashlib.sha256(data).hexdigest()})

    def _list(self, files: dict[str, str]) -> None:
        manifest = self.manifest.model_copy(update={"files": files})
        write_atomically(self.path / MANIFEST, manifest.to_json().encode())
        self.manifest = manifest

    @property
    def config(self) -> Config:
        """The configuration that the bundle was built with, thresholds of the command line included.

        Raises:
            BundleError: the manifest's ``command`` holds no configuration that this version reads.
        """
        try:
            return Config.model_validate(self.manifest.command.get("config"))
        except ValidationError:
            raise BundleError(
                f"'{self.path / MANIFEST}' lacks the configuration that the bundle was built with; build it again"
            ) from None

    @property
    def model(self) -> Path:
        """The ONNX model that the engine was built from, Q/DQ and casts included; float where ``quantization.mode`` is
        ``implicit``, since INT8 is then in the engine alone."""
        return next(self.path / name for name in self.manifest.files if name.endswith(".onnx") and name != PORTABLE)

    @property
    def engine(self) -> Path | None:
        """The engine file, or None where the bundle was built for onnxruntime."""
        return self.path / "model.engine" if "model.engine" in self.manifest.files else None


class BundleWriter(FolderWriter):
    """Collects the files of a bundle beside its place and puts all of it there in one step.

    Raises:
        OutputError: the place holds something that is not a bundle, cannot be written, or the disk is full.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, MANIFEST, "a bundle")

    def commit(self, fields: Mapping[str, Any]) -> Bundle:
        """Writes the manifest from ``fields`` (its keys without files and created) and puts the bundle in place."""
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        manifest = Manifest.model_validate({"schema_": SCHEMA, **fields, "created": created, "files": self.files})
        self.put(manifest.to_json().encode())
        return Bundle(self.path, verify=False)
