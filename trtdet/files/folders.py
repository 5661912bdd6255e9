"""Folders that are replaced as a whole: at every moment the old or the new folder is in its place."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from trtdet.errors import OutputError
from trtdet.files.atomic import check_target, flush, writing
from trtdet.files.temporaries import OLD, Temporary, remove, remove_stale

if TYPE_CHECKING:
    from typing_extensions import Self

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
"""What the kernel answers where the system, the file system or a sandbox cannot exchange two names."""

_ATTEMPTS = 20
"""How often a writer that meets others at the same place tries again."""


class FolderWriter:
    """Collects the files of a folder beside its place and puts all of it there in one step.

    An existing folder is exchanged with the new one (renameat2 with RENAME_EXCHANGE), so that a process killed at any
    moment leaves the old or the new folder in its place, whole. Where the file system cannot exchange, the old folder
    is moved aside and the new folder takes its place; killed between the two, the place is empty until the next writer
    puts the old folder back.

    Args:
        path: the folder's place. An empty folder, or a folder of the same kind, is replaced; nothing else is.
        marker: the file by which a folder of this kind is known; it is written last.
        kind: the name of this kind of folder in messages.

    Raises:
        OutputError: the place holds something of another kind, cannot be written, or the disk is full.
    """

    def __init__(self, path: Path, marker: str, kind: str) -> None:
        self.path = path
        self.files: dict[str, str] = {}
        """SHA-256 by the names of the files added."""
        self._marker = marker
        self._kind = kind
        self._temporary: Temporary | None = None

    def __enter__(self) -> Self:
        with writing(self.path):
            # A folder that a killed writer moved aside is put back before the place is judged.
            remove_stale(self.path)
            self._check_place()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._temporary = Temporary(self.path, folder=True)
            self._temporary.path.chmod(0o755)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._temporary is not None:
            if self._old.is_dir() and not os.path.lexists(self.path):
                with contextlib.suppress(OSError):  # another writer may be faster
                    self._old.rename(self.path)
            self._discard()
            self._temporary.release()
            self._temporary = None

    def _check_place(self) -> None:
        check_target(self.path, folder=True)
        if self.path.exists() and not (self.path / self._marker).is_file() and not _is_empty_folder(self.path):
            raise OutputError(
                f"'{self.path}' exists and is not {self._kind}; choose another place with -o or remove it"
            )

    @property
    def _folder(self) -> Path:
        assert self._temporary is not None
        return self._temporary.path

    @property
    def _old(self) -> Path:
        """Where the folder that is being replaced waits until the new folder is in place, without an exchange."""
        return self._folder.with_name(self._folder.name + OLD)

    def add(self, name: str, data: bytes) -> None:
        """Writes one file, in a folder within the folder where ``name`` says so, and notes its hash."""
        with writing(self.path):
            place = self._folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            _write_flushed(place, data)
        self.files[name] = hashlib.sha256(data).hexdigest()

    def put(self, marker: bytes) -> None:
        """Writes the marker and puts the folder in place."""
        with writing(self.path):
            _write_flushed(self._folder / self._marker, marker)
            self._check_place()
            self._take_place()
        self._discard()

    def _take_place(self) -> None:
        """Exchange, or a rename where nothing is at the place; tried again where another writer comes between."""
        for attempt in range(_ATTEMPTS):
            try:
                return exchange(self._folder, self.path)
            except FileNotFoundError:
                aside = False
            except OSError as error:
                if error.errno not in _NO_EXCHANGE:
                    raise
                aside = os.path.lexists(self.path)
            try:
                if aside:
                    remove(self._old)
                    self.path.rename(self._old)
                self._folder.rename(self.path)
                return None
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST) or attempt == _ATTEMPTS - 1:
                    raise
        return None

    def _discard(self) -> None:
        """Removes the replaced folder, or the new folder if it was not put in place."""
        remove(self._folder)
        if os.path.lexists(self.path):
            remove(self._old)


def exchange(first: Path, second: Path) -> None:
    """Gives each of two folders the name of the other in one step.

    Raises:
        OSError: nothing was changed: a folder does not exist (ENOENT), this system cannot exchange names (ENOSYS,
            EINVAL, ...), or the kernel refused for another reason.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(second))


def _write_flushed(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        flush(stream)


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
