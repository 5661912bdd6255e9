"""Typed JSON files, with errors of one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from trtdet.errors import ConfigError, TrtdetError, one_line

_T = TypeVar("_T")
_SHOWN = 60
"""Most characters of a key path or a wrong value in a message."""


class DocumentError(ValueError):
    """A document does not fit its type.

    Attributes:
        place: keys of the first wrong value, joined by dots; empty for the document itself.
        kind: pydantic's name of the problem, such as ``missing``.
    """

    def __init__(self, message: str, place: str, kind: str) -> None:
        super().__init__(message)
        self.place = place
        self.kind = kind


def read_document(path: Path, adapter: TypeAdapter[_T]) -> _T:
    """Reads a JSON file as the adapter's type.

    Raises:
        OSError: the file cannot be read.
        DocumentError: it is not JSON, nested too deeply, or not of the type.
    """
    return parse_document(path.read_bytes(), adapter)


def read_result(path: Path, kind: type[_T], hint: str, error: type[TrtdetError] = ConfigError) -> _T:
    """Reads a command's result, a JSON file.

    Raises:
        TrtdetError: ``error``, if it does not exist, cannot be read, or is of another kind or schema.
    """
    try:
        return read_document(path, TypeAdapter(kind))
    except FileNotFoundError:
        raise error(f"'{path}' does not exist", hint) from None
    except (OSError, DocumentError) as problem:
        raise error(f"'{path}' cannot be used ({one_line(problem)})", hint) from None


def parse_document(text: bytes, adapter: TypeAdapter[_T], *, strict: bool | None = None) -> _T:
    """Parses JSON as the adapter's type.

    ``strict`` refuses values that must be converted, such as numbers in strings; None is the type's own setting.

    Raises:
        DocumentError: it is not JSON, nested too deeply, or not of the type.
    """
    try:
        return adapter.validate_json(text, strict=strict)
    except ValidationError as error:
        raise _first(error) from None


def check_value(value: object, adapter: TypeAdapter[Any]) -> None:
    """Raises DocumentError if a value that was parsed from JSON is not of the adapter's type."""
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        raise _first(error) from None


def _first(error: ValidationError) -> DocumentError:
    problems = error.errors(include_url=False, include_context=False)
    # A wrong schema explains all other problems.
    first = next((problem for problem in problems if problem["loc"] == ("schema",)), problems[0])
    place = one_line(".".join(map(str, first["loc"])), _SHOWN)
    message = one_line(first["msg"].removeprefix("Value error, "))
    if place:
        value = "" if first["type"] == "missing" else f", got {one_line(repr(first['input']), _SHOWN)}"
        message = f"'{place}': {message[0].lower()}{message[1:]}{value}"
    return DocumentError(message, place, first["type"])
