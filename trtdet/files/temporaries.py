"""Temporary files and folders beside their target: locked while their writer lives, removed by later writers.

A temporary is called ``.TARGET.XXXXXXXX.trtdet``. Its writer holds a lock on it (flock), which ends with the process,
however that ends: a temporary whose lock can be taken is stale. On a file system without locks no temporary is removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

SUFFIX = ".trtdet"
OLD = ".old"
"""Follows the name of a temporary folder: where the folder that it replaces waits if the two cannot be exchanged."""


class Temporary:
    """A new temporary file or folder beside ``target``, locked until ``release`` or the end of the process.

    Attributes:
        path: where it is, in the target's folder.
        descriptor: of the file, open for writing; of the folder, open for reading. It carries the lock.

    Raises:
        OSError: the target's folder cannot be written.
    """

    def __init__(self, target: Path, *, folder: bool) -> None:
        self._folder = folder
        while True:
            self.path, self.descriptor = self._create(target)
            # Between creation and lock another writer may have taken it for stale.
            if _lock(self.descriptor) is not False and _is_open_at(self.path, self.descriptor):
                return
            self.release()
            self.remove()

    def _create(self, target: Path) -> tuple[Path, int]:
        prefix = f".{target.name}."
        if not self._folder:
            descriptor, name = tempfile.mkstemp(suffix=SUFFIX, prefix=prefix, dir=target.parent)
            return Path(name), descriptor
        while True:
            path = Path(tempfile.mkdtemp(suffix=SUFFIX, prefix=prefix, dir=target.parent))
            try:
                return path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:  # taken for stale already
                continue

    def release(self) -> None:
        """Closes the descriptor, and thereby ends the lock."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def remove(self) -> None:
        """Removes the file or folder, if it is still at ``path``."""
        remove(self.path)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with all in it; nothing happens where there is nothing, or it cannot be."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return


def remove_stale(target: Path) -> None:
    """Removes the temporaries of ``target`` whose writers were killed, and puts back a folder that was moved aside.

    A writer that cannot exchange two folders moves the old folder aside first. Killed at that moment, it leaves no
    target and the old folder beside its place: the next writer puts it back before it does anything else.
    """
    pattern = re.compile(re.escape(f".{target.name}.") + "[a-z0-9_]{8}" + re.escape(SUFFIX))
    try:
        with os.scandir(target.parent) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return
    for name in names:
        path = target.parent / name
        if name.endswith(OLD) and pattern.fullmatch(name[: -len(OLD)]):
            _settle_old(path, target)
        elif pattern.fullmatch(name):
            _remove_if_stale(path)


def _settle_old(old: Path, target: Path) -> None:
    """A folder that a dead writer moved aside goes back to its place, or away where a newer folder is there."""
    writer = old.with_name(old.name[: -len(OLD)])
    if writer.exists() and not _remove_if_stale(writer):
        return
    if not os.path.lexists(target):
        try:
            old.rename(target)
            return
        except OSError:  # another writer was faster
            pass
    remove(old)


def _remove_if_stale(path: Path) -> bool:
    """Removes a temporary whose lock is free; returns whether it was."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        # A link to the folder that was replaced is not locked by anyone; anything else is gone, or another user's.
        if path.is_symlink():
            remove(path)
        return not os.path.lexists(path)
    try:
        if _lock(descriptor) is not True or not _is_open_at(path, descriptor):
            return False
        remove(path)
        return True
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Takes the lock: True where it was free, False where another holds it, None where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_open_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except OSError:
        return False
