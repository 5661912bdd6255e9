"""Rows of JSON that are appended one by one, so that work that was killed goes on where it stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from trtdet.errors import ConfigError
from trtdet.files import write_atomically, writing


class Rows:
    """A file with a header line that says what it is of, and then one line a row.

    Args:
        path: the file; one that is there is gone on with.
        key: what the rows are of. A file of something else is left alone.
        name: the field that tells rows apart.

    Attributes:
        found: rows by name, those that were there before included.

    Raises:
        ConfigError: the file is of something else, or is no such file.
        BundleError: it cannot be written.
    """

    def __init__(self, path: Path, key: str, name: str = "name") -> None:
        self.path = path
        self._name = name
        self.found: dict[str, dict[str, Any]] = {}
        kept = [json.dumps({"key": key})]
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            if lines and _parsed(lines[0]).get("key") != key:
                raise ConfigError(
                    f"'{path}' holds results of another model, other images or other options; give another -o, or "
                    "remove it to begin anew"
                )
            for line in lines[1:]:
                row = _parsed(line)  # the last line may have been cut
                if name in row and row[name] not in self.found:
                    self.found[row[name]] = row
                    kept.append(line)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, ("\n".join(kept) + "\n").encode())
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: dict[str, Any]) -> None:
        """Adds a row for good: it is on disk when this returns."""
        if row[self._name] in self.found:
            return
        with writing(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self.found[row[self._name]] = row

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _parsed(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
