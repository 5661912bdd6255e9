"""A file of JSON rows, appended one at a time, so that killed work resumes where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from trtdet.errors import ConfigError, OutputError
from trtdet.files.atomic import is_open_at, lock, prepare_target, write_atomically, writing


class Rows:
    """A file with one row a line, after a header line with the key of the work; an existing file is resumed.

    Args:
        key: identifies the work; a file with another key is not changed.
        valid: whether a row of a resumed file can be used; other rows and damaged lines are dropped.

    Attributes:
        found: rows by their field ``name``, a text, including those of the resumed file.

    Raises:
        ConfigError: the file has another key, or no header line.
        OutputError: it cannot be read or written, is not a regular file, or another process appends to it.
    """

    def __init__(self, path: Path, key: str, valid: Callable[[Mapping[str, Any]], bool] = lambda row: True) -> None:
        self.path = path
        prepare_target(path)
        with writing(path), _alone(path):
            self.found = rows_in(path, key, valid)
            lines = [json.dumps(row) for row in ({"key": key}, *self.found.values())]
            write_atomically(path, ("\n".join(lines) + "\n").encode())
            # Without a buffer, close() does not repeat a failed write.
            self._file = path.open("ab", buffering=0)
            lock(self._file.fileno())
            self._length = self._file.tell()

    def append(self, row: dict[str, Any]) -> None:
        """Adds a row, which is on disk when this returns; a row with the name of an earlier one is not added. Raises
        OutputError: it cannot be written; the file keeps the earlier rows."""
        if row["name"] in self.found:
            return
        line = (json.dumps(row) + "\n").encode()
        with writing(self.path):
            try:
                written = 0
                while written < len(line):  # a disk that becomes full writes only a part
                    written += self._file.write(line[written:])
                os.fsync(self._file.fileno())
            except OSError:
                os.ftruncate(self._file.fileno(), self._length)
                raise
        self._length += len(line)
        self.found[row["name"]] = row

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds the lock of an existing file, whose rows another process would otherwise append to a file that is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        if lock(descriptor) is False or not is_open_at(path, descriptor):
            raise OutputError(
                f"'{path}' is being written by another process", "wait until it has ended, or choose another -o"
            )
        yield
    finally:
        os.close(descriptor)


def rows_in(path: Path, key: str, valid: Callable[[Mapping[str, Any]], bool]) -> dict[str, dict[str, Any]]:
    """The rows by name that :class:`Rows` would resume, with its errors; nothing is written."""
    with writing(path):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    values = []
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        values.append(value if isinstance(value, dict) else {})
    if values and values[0].get("key") != key:
        raise ConfigError(
            f"'{path}' holds results of another model, other images or other options; give another -o, or "
            "remove it to begin anew"
        )
    rows: dict[str, dict[str, Any]] = {}
    for row in values[1:]:  # the last line may have been cut
        name = row.get("name")
        if isinstance(name, str) and name not in rows and valid(row):
            rows[name] = row
    return rows
