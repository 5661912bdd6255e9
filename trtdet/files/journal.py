"""Rows of JSON that are appended one at a time, so that work that was killed resumes where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from trtdet.errors import ConfigError
from trtdet.files.atomic import prepare_target, write_atomically, writing


class Rows:
    """A file with a header line that names the work its rows belong to, and then one row a line.

    Args:
        path: the file; an existing file is resumed.
        key: identifies the work. A file with another key is left alone.
        name: the field that tells rows apart, a text.
        valid: whether a row of a resumed file can be used; any other is dropped, as a damaged line is.

    Attributes:
        found: rows by name, including the rows of the resumed file. Damaged lines are dropped.

    Raises:
        ConfigError: the file has another key, or no header line.
        OutputError: it cannot be read or written, or is no regular file.
    """

    def __init__(
        self,
        path: Path,
        key: str,
        name: str = "name",
        valid: Callable[[Mapping[str, Any]], bool] = lambda row: True,
    ) -> None:
        self.path = path
        self._name = name
        prepare_target(path)
        self.found = _rows(path, key, name, valid=valid)
        lines = [json.dumps(row) for row in ({"key": key}, *self.found.values())]
        write_atomically(path, ("\n".join(lines) + "\n").encode())
        with writing(path):
            # Without a buffer, closing after a failed write does not write again.
            self._file = path.open("ab", buffering=0)
            self._length = self._file.tell()

    def append(self, row: dict[str, Any]) -> None:
        """Adds a row for good: it is on disk when this returns. A row whose name is known already is not added.

        Raises:
            OutputError: it cannot be written; the file holds the rows before it.
        """
        if row[self._name] in self.found:
            return
        line = (json.dumps(row) + "\n").encode()
        with writing(self.path):
            try:
                written = 0
                while written < len(line):  # a disk that fills up takes a part first
                    written += self._file.write(line[written:])
                os.fsync(self._file.fileno())
            except OSError:
                os.ftruncate(self._file.fileno(), self._length)
                raise
        self._length += len(line)
        self.found[row[self._name]] = row

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def names_in(path: Path, key: str, name: str, valid: Callable[[Mapping[str, Any]], bool]) -> frozenset[str]:
    """The names of the rows that :class:`Rows` of the same would find; nothing is written.

    Raises:
        ConfigError, OutputError: as of :class:`Rows`.
    """
    return frozenset(_rows(path, key, name, valid=valid))


def _rows(path: Path, key: str, name: str, valid: Callable[[Mapping[str, Any]], bool]) -> dict[str, dict[str, Any]]:
    """The rows of an existing file that can be used, by name."""
    with writing(path):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    if lines and _parsed(lines[0]).get("key") != key:
        raise ConfigError(
            f"'{path}' holds results of another model, other images or other options; give another -o, or "
            "remove it to begin anew"
        )
    rows: dict[str, dict[str, Any]] = {}
    for row in map(_parsed, lines[1:]):  # the last line may have been cut
        value = row.get(name)
        if isinstance(value, str) and value not in rows and valid(row):
            rows[value] = row
    return rows


def _parsed(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
