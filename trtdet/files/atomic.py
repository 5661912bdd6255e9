"""Files and folders that appear complete or not at all, even if the program is killed.

A temporary is in its target's folder, with the name ``.TARGET.XXXXXXXX.trtdet``. Its writer holds a lock on it (flock),
which ends with the process. A temporary without a lock is therefore stale, and the next writer removes it. On a file
system without locks, no temporary is removed.

Files that belong together (:class:`NewFiles`) are all complete, in one temporary folder, before the first is replaced.
A list of them, also a temporary, says so. If their writer is killed between two replacements, whoever next reads or
writes such a file in that folder replaces the others (:func:`finish_replacing`): the list is a redo log.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

from trtdet.errors import OutputError

if TYPE_CHECKING:
    from typing_extensions import Self

SUFFIX = ".trtdet"
OLD = ".old"
"""Name suffix of a replaced folder, moved aside because the file system cannot exchange it with the new one."""
GONE = ".gone"
"""Name suffix of a replaced folder during its removal, so that no other writer restores what remains of it."""

_LIST = "replacing"
"""The name of a list of files that are being replaced together, as if it was the temporary of a file of that name."""

_LONGEST_LIST = 1 << 26
"""Most bytes of such a list that are read."""

_SCRATCH = "trtdet"
"""As if this was the target of folders in the folder for temporaries."""

_SPECIAL = {stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
"""Error codes if the system, the file system or a sandbox cannot exchange two names."""

_WAIT = 10.0
"""Most seconds that a writer waits while another moves files in the same folder, which takes far less."""

_ATTEMPTS = 20
"""Attempts of a writer while others write to the same place."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Converts an operating system error in its block to an OutputError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"'{path}' cannot be written: {error.strerror or error}; the old content is untouched; "
            "choose another place with -o"
        ) from None


def check_target(path: Path, *, folder: bool = False) -> None:
    """Refuses a path to anything but a regular file (or a folder, with ``folder``), which a rename would replace.

    Links are followed. A path that does not exist is allowed.

    Raises:
        OutputError: ``path`` is a device, a pipe, a socket, or a folder in the place of a file.
    """
    try:
        mode = path.stat().st_mode
    except OSError:  # the path does not exist; or it cannot be reached, which the write will report
        return
    kind = _SPECIAL.get(stat.S_IFMT(mode))
    if kind is None and path.is_symlink() and path.parent.resolve() == Path("/dev"):
        kind = "a link of the system"  # such as /dev/stdout, which may lead to a regular file
    if kind is None and stat.S_ISDIR(mode) and not folder:
        kind = "a folder"
    if kind is not None:
        allowed = "a folder" if folder else "a regular file"
        raise OutputError(
            f"'{path}' cannot be written: it is {kind}, and only {allowed} is replaced", "choose another place with -o"
        )


def prepare_target(path: Path) -> None:
    """Calls :func:`check_target` and creates the folder of a file, before the work for the file starts.

    Raises:
        OutputError: as :func:`check_target`, or the folder cannot be created.
    """
    check_target(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a temporary file, flushes it to disk and renames it to ``path``; removes temporaries of killed writers.

    Raises:
        OutputError: the folder cannot be written, the disk is full, or ``path`` is not a regular file. The old content
            is unchanged.
    """
    with writing_atomically(path) as stream:
        stream.write(data)


@contextmanager
def writing_atomically(path: Path) -> Iterator[BinaryIO]:
    """As :func:`write_atomically`, for data in pieces: ``path`` is replaced when the block ends without an error.
    Raises OutputError: as :func:`write_atomically`."""
    prepare_target(path)
    with writing(path):
        remove_stale(path)
        with _temporary(path) as temporary:
            with os.fdopen(temporary.descriptor, "wb", closefd=False) as stream:
                yield stream
                _flush(stream)
            temporary.path.chmod(0o644)
            temporary.path.replace(path)


def write_together(contents: Mapping[Path, bytes | Path]) -> None:
    """As :func:`write_atomically`, for files that belong together: all are replaced or none.

    Args:
        contents: by path, the bytes, or a finished file on the same file system that is moved there. The list of
            :func:`finish_replacing` is in the deepest folder that has all paths.

    Raises:
        OutputError: as :func:`write_atomically`; no file was replaced.
    """
    folder = Path(os.path.commonpath([path.parent for path in contents]))
    for path in contents:
        prepare_target(path)
    names = {path: path.relative_to(folder) for path in contents}
    with NewFiles(next(iter(contents)), folder) as new:
        for path, content in contents.items():
            place = new.place(names[path])
            with writing(path):
                content.replace(place) if isinstance(content, Path) else place.write_bytes(content)
        new.put(names.values())


class NewFiles:
    """Files that belong together, in a temporary folder until :meth:`put` moves all of them to their places.

    As a context manager it removes what was not put.

    Args:
        first: one of the files; its name is that of the temporary folder.
        folder: that all files are in, or in folders of it; None for that of ``first``.

    Raises:
        OutputError: the folder cannot be written, or ``first`` is not a regular file.
    """

    def __init__(self, first: Path, folder: Path | None = None) -> None:
        prepare_target(first)
        self._folder = first.parent if folder is None else folder
        target = self._folder / first.name
        with writing(target):
            remove_stale(target)
            self._temporary = Temporary(target, folder=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        remove(self._temporary.path)
        self._temporary.release()

    def place(self, name: Path | str) -> Path:
        """Where a file is to be written until it is put as ``name``, a path in the folder.

        Raises:
            OutputError: there is something else than a regular file, or a folder cannot be created.
        """
        prepare_target(self._folder / name)
        place = self._temporary.path / name
        with writing(self._folder / name):
            place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def put(self, names: Iterable[Path | str]) -> None:
        """Flushes the files of these names to disk and moves all to their places.

        Raises:
            OutputError: a file is missing or cannot be written; none was replaced, unless the disk fails meanwhile.
        """
        paths = [Path(name) for name in names]
        for name in paths:
            with writing(self._folder / name), self._temporary.path.joinpath(name).open("rb") as stream:
                os.fsync(stream.fileno())
                os.fchmod(stream.fileno(), 0o644)
        content = json.dumps({"folder": self._temporary.path.name, "names": [str(name) for name in paths]})
        with writing(self._folder), _temporary(self._folder / _LIST) as listed:
            _write_flushed(listed.path, content.encode())
            # Another writer of the same files goes before or after, not between.
            with _locked(self._folder):
                try:
                    _replace_all(self._folder, self._temporary.path, names=paths)
                except BaseException:
                    # Ctrl-C between two leaves no half: the list, which would finish the rest, is about to be removed.
                    with contextlib.suppress(OSError):
                        _replace_present(self._folder, self._temporary.path, names=paths)
                    raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, if the file system has locks; first finishes the sets of killed writers."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        limit = time.monotonic() + _WAIT
        while lock(descriptor) is False and time.monotonic() < limit:
            time.sleep(0.005)
        finish_replacing(folder)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _temporary(target: Path) -> Iterator[Temporary]:
    """A temporary file that is removed at the end, unless it was moved to its target."""
    temporary = Temporary(target, folder=False)
    try:
        yield temporary
    finally:
        remove(temporary.path)
        temporary.release()


def _replace_all(folder: Path, temporary: Path, names: Iterable[Path]) -> None:
    for name in names:
        (temporary / name).replace(folder / name)


def _replace_present(folder: Path, temporary: Path, names: Iterable[Path]) -> None:
    """As :func:`_replace_all`, without those that were replaced before a stop and are gone."""
    _replace_all(folder, temporary, names=[name for name in names if (temporary / name).exists()])


def finish_replacing(folder: Path) -> None:
    """Makes the files whose writer was killed while it replaced several of a folder; errors are ignored."""
    for name in _entries(folder):
        path = folder / name
        if not _is_temporary(name, _LIST):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as stream:
                if lock(descriptor) is not True or not is_open_at(path, descriptor):
                    continue  # its writer is at work, or another process was faster
                temporary, names = _listed(stream.read(_LONGEST_LIST))
                _replace_present(folder, folder / temporary, names=names)
                remove(path)
                if names:
                    remove(folder / temporary)


def _listed(content: bytes) -> tuple[str, list[Path]]:
    """The temporary folder and the names in a list; no names if it was not finished, or lists anything else."""
    try:
        listed = json.loads(content)
        temporary, names = str(listed["folder"]), [Path(name) for name in listed["names"]]
    except (ValueError, RecursionError, KeyError, TypeError):
        return "", []
    inside = not any(name.is_absolute() or ".." in name.parts for name in names)
    own = "/" not in temporary and any(_is_temporary(temporary, name.name) for name in names)
    return (temporary, names) if inside and own else ("", [])


@contextmanager
def scratch_folder(beside: Path | None = None) -> Iterator[Path]:
    """A temporary folder that is removed at the end.

    If this process is killed, the next writer to ``beside`` or the next such folder removes it; with None it is in the
    folder for temporaries (``TMPDIR``), where the next such folder of this user removes it.

    Raises:
        OutputError: it cannot be created, or its disk is full.
    """
    target = beside or Path(tempfile.gettempdir()) / _SCRATCH
    with writing(target.parent if beside is None else beside):
        if beside is not None:
            remove_stale(beside)
        else:
            for name in _entries(target.parent):
                path = target.parent / name
                with contextlib.suppress(OSError):  # another process was faster
                    if _is_temporary(name, _SCRATCH) and path.lstat().st_uid == os.geteuid():
                        _remove_if_stale(path)
        temporary = Temporary(target, folder=True)
    try:
        yield temporary.path
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OutputError(
            f"'{target.parent}' is too full for temporary files: {error.strerror}",
            "free some space" if beside is not None else "free some space, or set TMPDIR to another folder",
        ) from None
    finally:
        remove(temporary.path)
        temporary.release()


def _flush(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


class FolderWriter:
    """Writes a temporary folder and moves it to ``path`` in one step.

    An existing folder is exchanged with the new one (renameat2 with RENAME_EXCHANGE), so a process killed at any moment
    leaves the old or the new folder complete. If the file system cannot exchange, the old folder is first moved aside.
    If the process is killed before the second move, the next writer restores the old folder.

    Only an empty folder, or one of the same kind, is replaced. The file ``marker``, which is written last, identifies a
    folder of this ``kind``, its name in messages. Raises OutputError if ``path`` has other content or cannot be
    written, or the disk is full.
    """

    def __init__(self, path: Path, marker: str, kind: str) -> None:
        self.path = path
        self.files: dict[str, str] = {}
        """SHA-256 of the added files by name."""
        self._marker = marker
        self._kind = kind
        self._temporary: Temporary | None = None

    def __enter__(self) -> Self:
        with writing(self.path):
            # Restores a folder that a killed writer moved aside, before the check.
            remove_stale(self.path)
            self._check_place()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._temporary = Temporary(self.path, folder=True)
            self._folder = self._temporary.path
            # Temporary place of the old folder if the two cannot be exchanged.
            self._old = self._folder.with_name(self._folder.name + OLD)
            self._folder.chmod(0o755)
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
        while (names := _names_in(self.path)) is not None:
            if not names or self._marker in names:
                return
            # Another writer may have replaced the folder while it was read.
            if names == _names_in(self.path):
                raise OutputError(
                    f"'{self.path}' exists and is not {self._kind}; choose another place with -o or remove it"
                )

    def add(self, name: str, data: bytes) -> None:
        """Writes one file and records its hash; ``name`` may contain folders."""
        with writing(self.path):
            place = self._folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            _write_flushed(place, data)
        self.files[name] = hashlib.sha256(data).hexdigest()

    def put(self, marker: bytes) -> None:
        """Writes the marker and moves the folder to its place."""
        with writing(self.path):
            _write_flushed(self._folder / self._marker, marker)
            self._check_place()
            self._take_place()
        self._discard()

    def _take_place(self) -> None:
        """Exchanges the folders, or renames the new one if there is no old one; retries if other writers interfere."""
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
        """Removes the replaced folder, or the new folder if it was not moved to its place."""
        remove(self._folder)
        if os.path.lexists(self.path):
            remove_old(self._old)


def exchange(first: Path, second: Path) -> None:
    """Exchanges the names of two folders in one step. Raises OSError: a folder does not exist (ENOENT), the system
    cannot exchange names (ENOSYS, EINVAL, ...), or the kernel refused for another reason. Nothing was changed."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(second))


def _write_flushed(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        _flush(stream)


def _names_in(folder: Path) -> set[str] | None:
    """Names in a folder, even if it is replaced meanwhile; the name of a file; None if the path does not exist."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        if os.path.lexists(folder):
            return {folder.name}
        raise  # a parent is a file
    try:
        with os.scandir(handle) as entries:
            return {entry.name for entry in entries}
    finally:
        os.close(handle)


class Temporary:
    """A new temporary file or folder in the target's folder, locked until ``release`` or the end of the process.

    The descriptor has the lock. A file is open for writing, a folder for reading.

    Raises:
        OSError: the target's folder cannot be written.
    """

    def __init__(self, target: Path, *, folder: bool) -> None:
        prefix = f".{target.name}."
        while True:
            if folder:
                self.path = Path(tempfile.mkdtemp(suffix=SUFFIX, prefix=prefix, dir=target.parent))
                try:
                    self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                except FileNotFoundError:  # removed as stale by another writer
                    continue
            else:
                self.descriptor, name = tempfile.mkstemp(suffix=SUFFIX, prefix=prefix, dir=target.parent)
                self.path = Path(name)
            # Another writer may have removed it as stale between creation and lock.
            if lock(self.descriptor) is not False and is_open_at(self.path, self.descriptor):
                return
            self.release()
            remove(self.path)

    def release(self) -> None:
        """Closes the descriptor, which ends the lock."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with its content; ignores errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def remove_old(old: Path) -> None:
    """Removes a folder that was moved aside, so that no other writer restores a part of it."""
    gone = old.with_suffix(GONE)
    with contextlib.suppress(OSError):  # another writer has restored it or is removing it
        old.rename(gone)
    remove(gone)


def remove_stale(target: Path) -> None:
    """Removes the temporaries of ``target`` whose writers were killed, and restores a folder that was moved aside.

    A writer that cannot exchange two folders moves the old folder aside first. If it is killed then, the target does
    not exist, and the next writer restores the old folder before anything else.
    """
    finish_replacing(target.parent)
    for name in _entries(target.parent):
        path = target.parent / name
        if name.endswith(OLD) and _is_temporary(name[: -len(OLD)], target.name):
            writer = path.with_name(name[: -len(OLD)])
            if writer.exists() and not _remove_if_stale(writer):
                continue
            if not os.path.lexists(target):
                with contextlib.suppress(OSError):  # another writer was faster
                    path.rename(target)
                    continue
            remove_old(path)
        elif name.endswith(GONE) and _is_temporary(name[: -len(GONE)], target.name):
            remove(path)
        elif _is_temporary(name, target.name):
            _remove_if_stale(path)


def _entries(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except OSError:
        return []


def _is_temporary(name: str, target: str) -> bool:
    """Whether ``name`` is that of a temporary of ``target``."""
    start = f".{target}."
    middle = name[len(start) : -len(SUFFIX)]
    return name.startswith(start) and name.endswith(SUFFIX) and re.fullmatch("[a-z0-9_]{8}", middle) is not None


def _remove_if_stale(path: Path) -> bool:
    """Removes a temporary whose lock is free; returns whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        # A link in the place of the replaced folder has no lock. Anything else is gone, or belongs to another user.
        if path.is_symlink():
            remove(path)
        return not os.path.lexists(path)
    try:
        if lock(descriptor) is not True or not is_open_at(path, descriptor):
            return False
        remove(path)
        return True
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> bool | None:
    """Takes the lock: True if it was free, False if another process has it, None if there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_open_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except OSError:
        return False
