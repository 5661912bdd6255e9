"""Files and folders that appear whole or not at all, whatever ends the program meanwhile."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

from trtdet.errors import OutputError

if TYPE_CHECKING:
    from typing_extensions import Self


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
