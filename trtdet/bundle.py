"""The bundle: a folder with an engine and everything that is known about it. The contract with C++.

``manifest.json`` is written last and holds the SHA-256 of every other file, so a folder with a manifest that
verifies is complete. A bundle appears under its name in one rename; what stood there before stays until then.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from trtdet.config import Config, InputConfig, Where
from trtdet.errors import BundleError, OutputError

if TYPE_CHECKING:
    from typing_extensions import Self

SCHEMA: Literal[1] = 1
MANIFEST = "manifest.json"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelPart(_Part):
    sha256: str
    name: str
    classes: tuple[str, ...]


class ShapePart(_Part):
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


class InputPart(_Part):
    name: str
    shape: ShapePart
    dtype: str
    preprocess: InputConfig


class OutputPart(_Part):
    name: str
    dtype: str
    shape: tuple[int | str, ...]


class NmsPart(_Part):
    where: Where
    scores: Literal["probabilities", "logits"] = "probabilities"
    """What ``scores`` holds with ``host``; thresholds and results are probabilities all the same."""
    own: bool = False
    """The model brought its suppression along: kind and thresholds are the model's, not the configuration's."""
    score_threshold: float
    iou_threshold: float
    max_detections: int
    pre_nms_topk: int
    class_agnostic: bool
    candidates: Literal["all-classes", "best-class"]


class PluginPart(_Part):
    file: str
    sha256: str
    embedded: bool = False
    """The engine carries the library; a service need not load the file."""


class BackendPart(_Part):
    name: str
    version: str
    sms: tuple[int, ...]
    plugins: tuple[PluginPart, ...] = ()
    version_compatible: bool = False
    """The engine runs on later versions of the library as well."""
    hardware_compatible: bool = False
    """The engine runs on compute capability 8.0 and every later one, not on those of ``sms`` alone."""

    @property
    def loose_plugins(self) -> tuple[str, ...]:
        """Files with plugins that the engine does not carry: what runs it must load them first."""
        return tuple(part.file for part in self.plugins if not part.embedded)

    @property
    def carries_plugins(self) -> bool:
        """The engine holds plugins itself, which are code of the host."""
        return any(part.embedded for part in self.plugins)


class ImagesPart(_Part):
    count: int
    sha256: str
    skipped: tuple[str, ...] = ()


class QuantizationPart(_Part):
    mode: Literal["explicit", "implicit", "none"]
    source: Literal["trtdet", "tensorrt", "cache"] = "trtdet"
    """Who chose the ranges: trtdet, TensorRT's own calibrator, or whoever made the calibration cache that was given."""
    calibrator: str | None = None
    percentile: float | None = None
    histograms_key: str | None = None
    images: ImagesPart | None = None
    corrections: tuple[str, ...] = ()


class SiluPart(_Part):
    """What became of SiLU and HardSwish.

    ``asked`` and ``done`` are values of ``--silu``; ``rewritten`` counts the nodes that were written anew,
    ``read_int8`` and ``write_int8`` the plugin's that read and write INT8; ``skipped`` has the reason for each that
    could not be.
    """

    asked: str
    done: str
    rewritten: int
    read_int8: int = 0
    write_int8: int = 0
    skipped: tuple[str, ...] = ()


class CountsPart(_Part):
    int8: int
    fp16: int
    fp32: int


class FloatConvPart(_Part):
    name: str
    got: str
    reason: str


class AuditPart(CountsPart):
    float_by_backend: tuple[FloatConvPart, ...] = ()


class Manifest(_Part):
    """What ``manifest.json`` holds. Keys are added within schema 1, never removed or given another meaning."""

    schema_: Literal[1] = SCHEMA
    trtdet_version: str
    created: str
    model: ModelPart
    input: InputPart
    outputs: tuple[OutputPart, ...]
    nms: NmsPart
    backend: BackendPart
    quantization: QuantizationPart
    precision: CountsPart
    audit: AuditPart | None
    files: dict[str, str]
    command: dict[str, Any]
    silu: SiluPart | None = None
    content_hash: str
    """SHA-256 over everything the engine was made from; equal hashes mean there is nothing to build."""

    def to_json(self) -> str:
        data = self.model_dump(mode="json")
        ordered = {"schema": data.pop("schema_"), **data}
        return json.dumps(ordered, indent=2) + "\n"


class Bundle:
    """A finished bundle on the disk, read and verified.

    Args:
        path: the bundle's folder.
        verify: compare every file with its hash.

    Raises:
        BundleError: no bundle there, a schema this version does not read, a file missing or altered.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path = path
        file = path / MANIFEST
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise BundleError(f"'{path}' is not a bundle: it has no {MANIFEST}; make one with 'trtdet build'") from None
        except (OSError, ValueError) as error:
            raise BundleError(f"'{file}' cannot be read ({error}); build the bundle again") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            got = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise BundleError(f"'{file}' has schema {got!r}; this trtdet reads schema {SCHEMA}; build it again")
        data["schema_"] = data.pop("schema")
        try:
            self.manifest = Manifest.model_validate_json(json.dumps(data))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise BundleError(f"'{file}': key '{key}': {first['msg']}; build the bundle again") from None
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
        """Puts one more file into the bundle, or another in its place; the bundle is whole at every moment.

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
            BundleError: the manifest's ``command`` does not hold one that this version reads.
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
        return next(self.path / name for name in self.manifest.files if name.endswith(".onnx"))

    @property
    def engine(self) -> Path | None:
        """The engine file, or None where the bundle was built for onnxruntime."""
        return self.path / "model.engine" if "model.engine" in self.manifest.files else None


class FolderWriter:
    """Collects the files of a folder beside its place and puts all of it there in one rename.

    Args:
        path: the folder's place. An empty folder there, or one of the same kind, is replaced; nothing else is.
        marker: the file by which a folder of this kind is known; it is written last.
        kind: what such a folder is called.

    Raises:
        OutputError: the place holds something of another kind, cannot be written, or the disk is full.
    """

    def __init__(self, path: Path, marker: str, kind: str) -> None:
        self.path = path
        self.files: dict[str, str] = {}
        """SHA-256 by the names of the files added."""
        self._marker = marker
        self._kind = kind
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        if self.path.exists() and not (self.path / self._marker).is_file() and not _is_empty_folder(self.path):
            raise OutputError(
                f"'{self.path}' exists and is not {self._kind}; choose another place with -o or remove it"
            )
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent))
            self._folder.chmod(0o755)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            if self.path.exists():
                shutil.rmtree(self._old, ignore_errors=True)

    @property
    def _old(self) -> Path:
        """Where the folder that is being replaced stands until the new one is in place."""
        assert self._folder is not None
        return self._folder.with_name(self._folder.name + ".old")

    def add(self, name: str, data: bytes) -> None:
        """Writes one file, in a folder within the folder where ``name`` says so, and notes its hash."""
        assert self._folder is not None
        with writing(self.path):
            place = self._folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            _write_flushed(place, data)
        self.files[name] = hashlib.sha256(data).hexdigest()

    def put(self, marker: bytes) -> None:
        """Writes the marker and puts the folder in place."""
        assert self._folder is not None
        with writing(self.path):
            _write_flushed(self._folder / self._marker, marker)
            try:
                if self.path.exists():
                    self.path.rename(self._old)
                self._folder.rename(self.path)
            except BaseException:
                if self._old.exists() and not self.path.exists():
                    self._old.rename(self.path)
                raise
            shutil.rmtree(self._old, ignore_errors=True)
        self._folder = None


class BundleWriter(FolderWriter):
    """Collects the files of a bundle beside its place and puts all of it there in one rename.

    Raises:
        OutputError: the place holds something that is not a bundle, cannot be written, or the disk is full.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, MANIFEST, "a bundle")

    def commit(self, fields: Mapping[str, Any]) -> Bundle:
        """Writes the manifest from ``fields`` (its keys without files and created) and puts the bundle in place."""
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        manifest = Manifest(**fields, created=created, files=self.files)
        self.put(manifest.to_json().encode())
        return Bundle(self.path, verify=False)


class writing:
    """Turns an operating system error inside its block into an OutputError that names ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(value, OSError):
            raise OutputError(
                f"'{self.path}' cannot be written: {value.strerror or value}; what was there is untouched; "
                "choose another place with -o"
            ) from None


def write_atomically(path: Path, data: bytes) -> None:
    """Writes ``data`` beside ``path``, flushes it to the disk and renames it over ``path``.

    Raises:
        OutputError: the folder cannot be written or the disk is full; what stood at ``path`` is untouched.
    """
    with writing_atomically(path) as stream:
        stream.write(data)


@contextmanager
def writing_atomically(path: Path) -> Iterator[BinaryIO]:
    """The same for what is written bit by bit: the file takes its place when the block ends, and only if it ends well.

    Raises:
        OutputError: as of :func:`write_atomically`.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                yield stream
                _flush(stream)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _write_flushed(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        _flush(stream)


def _flush(stream: BinaryIO) -> None:
    """Sends what was written to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file as hexadecimal digits, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
