import errno
import json
import os
import resource

import pytest

from trtdet.errors import ConfigError, OutputError
from trtdet.files.journal import Rows


@pytest.mark.parametrize("empty", [False, True])
def test_rows_are_on_disk_at_once_and_found_again(tmp_path, empty):
    path = tmp_path / "deep" / "rows.jsonl"
    if empty:
        path.parent.mkdir()
        path.touch()
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
def test_a_row_that_was_cut_is_dropped(tmp_path, cut):
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


def test_rows_of_something_else_are_left_alone(tmp_path):
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


def test_a_disk_that_fills_up_is_told_and_the_rows_before_it_stay(tmp_path):
    """The limit on a file's size fails as a full disk does: a part of the row is written first."""
    path = tmp_path / "rows.jsonl"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(OutputError, match=r"rows\.jsonl' cannot be written: File too large"), Rows(path, "key") as rows:
        rows.append({"name": "a"})
        whole = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, limit[1]))
        try:
            rows.append({"name": "b", "text": "x" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == whole
    assert list(rows.found) == ["a"]


def test_a_row_after_a_failed_one_is_whole(tmp_path, monkeypatch):
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Rows(tmp_path / "rows.jsonl", "key") as rows:
        with monkeypatch.context() as patch, pytest.raises(OutputError, match="No space left on device"):
            patch.setattr(os, "fsync", fail)
            rows.append({"name": "a"})
        rows.append({"name": "b"})
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert lines == [{"key": "key"}, {"name": "b"}]


@pytest.mark.parametrize(
    "damaged", ['{"name": ["a"]}', '{"name": 3}', "[" * 100_000, '{"name": "b", "score": "x"}', "3"]
)
def test_a_damaged_row_is_dropped(tmp_path, damaged):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": "key"}\n{"name": "a", "score": 1}\n' + damaged + "\n")
    with Rows(path, "key", valid=lambda row: isinstance(row.get("score"), int)) as rows:
        assert list(rows.found) == ["a"]


def test_a_folder_at_the_place_is_refused(tmp_path):
    with pytest.raises(OutputError, match="it is a folder, and only a regular file is replaced"):
        Rows(tmp_path, "key")


def test_rows_that_another_process_appends_to_are_left_to_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    with Rows(path, "key") as rows:
        rows.append({"name": "one"})
        with pytest.raises(OutputError, match="is being written by another process; wait until it has ended"):
            Rows(path, "key")
        rows.append({"name": "two"})
    with Rows(path, "key") as rows:
        assert [*rows.found] == ["one", "two"]
