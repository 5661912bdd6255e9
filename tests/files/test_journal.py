from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtdet.errors import ConfigError
from trtdet.files.journal import Rows


def test_rows_are_on_disk_at_once_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    with Rows(path, "key") as rows:
        rows.append({"name": "a", "score": 1})
        assert json.loads(path.read_text().splitlines()[-1]) == {"name": "a", "score": 1}
        rows.append({"name": "b", "score": 2})
        rows.append({"name": "a", "score": 3})  # what is done is done
    with Rows(path, "key") as rows:
        assert rows.found == {"a": {"name": "a", "score": 1}, "b": {"name": "b", "score": 2}}
        rows.append({"name": "c", "score": 4})
    assert len(path.read_text().splitlines()) == 4


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_row_that_was_cut_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "rows.jsonl"
    with Rows(path, "key") as rows:
        rows.append({"name": "a"})
        rows.append({"name": "b"})
    path.write_bytes(path.read_bytes()[:-cut])
    with Rows(path, "key") as rows:
        assert list(rows.found) == (["a", "b"] if cut == 1 else ["a"])
        rows.append({"name": "b", "score": 2})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("name") for line in lines] == [None, "a", "b"]


def test_rows_of_something_else_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Rows(path, "key") as rows:
        rows.append({"name": "a"})
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="holds results of another model"):
        Rows(path, "other")
    assert path.read_bytes() == before
    (tmp_path / "no.jsonl").write_text("something\n")
    with pytest.raises(ConfigError, match="holds results of another model"):
        Rows(tmp_path / "no.jsonl", "key")


def test_an_empty_file_is_begun(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    with Rows(path, "key") as rows:
        rows.append({"name": "a"})
    with Rows(path, "key") as rows:
        assert list(rows.found) == ["a"]
