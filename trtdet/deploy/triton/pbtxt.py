"""Protocol buffer messages as text (https://protobuf.dev/reference/protobuf/textformat-spec/)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping


class Word(str):
    """A value of an enumeration, which is written without quotes."""


def message(fields: Mapping[str, object]) -> bytes:
    """A protocol buffer message as text (https://protobuf.dev/reference/protobuf/textformat-spec/)."""
    return ("\n".join(_lines(fields)) + "\n").encode()


def _lines(fields: Mapping[str, object], indent: str = "") -> Iterable[str]:
    for key, value in fields.items():
        if isinstance(value, list) and all(isinstance(item, int) for item in value):
            yield f"{indent}{key}: [ {', '.join(map(str, value))} ]"
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                yield f"{indent}{key} {{"
                yield from _lines(item, indent + "  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{key}: {_scalar(item)}"


def _scalar(value: object) -> str:
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False)
