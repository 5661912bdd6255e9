"""JSON files with a type: what does not fit is one line, however the file is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from trtdet.errors import ConfigError, one_line

_T = TypeVar("_T")
_SHOWN = 60
"""Characters of a key path and of a wrong value that a message shows."""


class DocumentError(ValueError):
    """A document that does not fit its type.

    Attributes:
        place: of the first value that does not fit, keys joined by dots; empty for the document itself.
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


def read_result(path: Path, kind: type[_T], hint: str) -> _T:
    """Reads what a command left behind, a JSON file; ``hint`` says what to do where it cannot be read.

    Raises:
        ConfigError: it cannot be read, or is of another kind.
    """
    try:
        return read_document(path, TypeAdapter(kind))
    except (OSError, DocumentError) as error:
        raise ConfigError(f"'{path}' cannot be used ({one_line(error)}); {hint}") from None


def parse_document(text: bytes, adapter: TypeAdapter[_T], *, strict: bool | None = None) -> _T:
    """JSON as the adapter's type.

    Args:
        text: the JSON document.
        adapter: the type.
        strict: whether to refuse values that have to be converted, such as numbers in strings; None: as the type says.

    Raises:
        DocumentError: it is not JSON, nested too deeply, or not of the type.
    """
    try:
        return adapter.validate_json(text, strict=strict)
    except ValidationError as error:
        raise _first(error) from None


def check_value(value: object, adapter: TypeAdapter[Any]) -> None:
    """Checks what was read from JSON before.

    Raises:
        DocumentError: it is not of the adapter's type.
    """
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        raise _first(error) from None


def _first(error: ValidationError) -> DocumentError:
    problems = error.errors(include_url=False, include_context=False)
    # Of another schema nothing else need fit.
    first = next((problem for problem in problems if problem["loc"] == ("schema",)), problems[0])
    place = one_line(".".join(map(str, first["loc"])), _SHOWN)
    message = one_line(first["msg"])
    if place:
        value = "" if first["type"] == "missing" else f", got {one_line(repr(first['input']), _SHOWN)}"
        message = f"'{place}': {message[0].lower()}{message[1:]}{value}"
    return DocumentError(message, place, first["type"])
