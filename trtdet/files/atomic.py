"""Files that appear whole or not at all, whatever ends the program meanwhile."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from trtdet.errors import OutputError
from trtdet.files.temporaries import Temporary, remove_stale

_SPECIAL = (
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


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
                f"'{self.path}' cannot be written: {value.strerror or value}; the old content is untouched; "
                "choose another place with -o"
            ) from None


def check_target(path: Path, *, folder: bool = False) -> None:
    """Refuses a place that holds no regular file (with ``folder``, no folder), which a rename would replace silently.

    Links are followed. A path where nothing is yet passes.

    Raises:
        OutputError: ``path`` is a device, a pipe, a socket, or a folder where a file is to be written.
    """
    try:
        mode = path.stat().st_mode
    except OSError:  # nothing there; or it cannot be reached, which writing will explain
        return
    kind = next((name for is_kind, name in _SPECIAL if is_kind(mode)), None)
    if kind is None and path.is_symlink() and path.parent.resolve() == Path("/dev"):
        kind = "a link of the system"  # such as /dev/stdout, which leads to a regular file now and then
    if kind is None and stat.S_ISDIR(mode) and not folder:
        kind = "a folder"
    if kind is not None:
        wanted = "a folder" if folder else "a regular file"
        raise OutputError(
            f"'{path}' cannot be written: it is {kind}, and only {wanted} is replaced", "choose another place with -o"
        )


def prepare_target(path: Path) -> None:
    """Checks that a file can take its place at ``path`` and creates its folder, before the work that fills it.

    Raises:
        OutputError: as of :func:`check_target`, or the folder cannot be created.
    """
    check_target(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes ``data`` beside ``path``, flushes it to the disk and renames it over ``path``.

    Temporaries that killed writers of ``path`` have left are removed.

    Raises:
        OutputError: the folder cannot be written, the disk is full, or ``path`` is no regular file; the old content
            is untouched.
    """
    with writing_atomically(path) as stream:
        stream.write(data)


@contextmanager
def writing_atomically(path: Path) -> Iterator[BinaryIO]:
    """The same for data written in pieces: the file takes its place when the block ends, and only if it ends well.

    Raises:
        OutputError: as of :func:`write_atomically`.
    """
    prepare_target(path)
    with writing(path):
        remove_stale(path)
        temporary = Temporary(path, folder=False)
        try:
            with os.fdopen(temporary.descriptor, "wb", closefd=False) as stream:
                yield stream
                flush(stream)
            temporary.path.chmod(0o644)
            temporary.path.replace(path)
        except BaseException:
            temporary.remove()
            raise
        finally:
            temporary.release()


def flush(stream: BinaryIO) -> None:
    """Sends all written data to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file as hexadecimal digits, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
