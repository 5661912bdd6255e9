from dataclasses import dataclass
from typing import Literal

import pytest
from pydantic import ConfigDict, TypeAdapter

from trtdet.files.documents import DocumentError, parse_document, read_document


@dataclass(frozen=True)
class Paper:
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    schema: Literal[1]
    pages: dict[str, tuple[int, ...]]


ADAPTER = TypeAdapter(Paper)


def test_a_document_is_read_as_its_type(tmp_path):
    (tmp_path / "p.json").write_text('{"schema": 1, "pages": {"a": [1, 2]}}')
    assert read_document(tmp_path / "p.json", ADAPTER) == Paper(1, {"a": (1, 2)})


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        (b"", "", "Invalid JSON: EOF"),
        (b'{"a":' * 100_000, "", "Invalid JSON: recursion limit exceeded"),
        (b"[]", "", "Input should be an object"),
        (b'{"pages": {}}', "schema", "'schema': field required"),
        (b'{"schema": 1, "pages": {"a": ["1"]}}', "pages.a.0", "'pages.a.0': input should be a valid integer, got '1'"),
        (b'{"pages": 1, "schema": 2, "more": 0}', "schema", "'schema': input should be 1, got 2"),
        (b'{"schema": 1, "pages": "' + b"x" * 10_000 + b'"}', "pages", "'pages': input should be an object, got 'xxx"),
        (b'{"schema": 1, "pages": {"a\\nb": 3}}', "pages.a b", "'pages.a b': input should be a valid array, got 3"),
    ],
)
def test_the_first_thing_that_does_not_fit_is_named_in_one_line(text, place, message):
    with pytest.raises(DocumentError) as caught:
        parse_document(text, ADAPTER)
    assert str(caught.value).startswith(message)
    assert caught.value.place == place
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
