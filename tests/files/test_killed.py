"""Writers that are killed (SIGKILL) at each step, and several that write to the same place."""

import errno
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from trtdet.errors import OutputError
from trtdet.files import FolderWriter, atomic, finish_replacing, scratch_folder, write_atomically, write_together

WRITE = """
from __future__ import annotations
import json, os, shutil, signal, sys, errno
from pathlib import Path
from trtdet.files import FolderWriter, atomic, write_atomically

place, moment, exchanges, content = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "exchange", sys.argv[4]

def killed_at(owner, name, when, after=False):
    original, calls = getattr(owner, name), []

    def patched(*arguments, **options):
        calls.append(arguments)
        if len(calls) == when and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if len(calls) == when and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, patched)

if not exchanges:
    def unable(first, second):
        raise OSError(errno.EINVAL, "Invalid argument")
    atomic.exchange = unable
moments = {
    "created": (atomic, "lock", 1),
    "locked": (atomic, "lock", 1, True),
    "first file": (atomic, "_write_flushed", 1, True),
    "marker": (atomic, "_write_flushed", 3),
    "whole": (atomic, "_write_flushed", 3, True),
    "before": (atomic, "exchange", 1),
    "exchanged": (atomic, "exchange", 1, True),
    "moved aside": (Path, "rename", 1, True),
    "in place": (Path, "rename", 2, True),
    "removing": (shutil, "rmtree", 1),
    "flushed": (os, "fsync", 1, True),
    "replaced": (Path, "replace", 1, True),
    "set created": (atomic, "lock", 2),
    "set flushed": (os, "fsync", 2, True),
    "list created": (atomic, "lock", 2, True),
    "list flushed": (os, "fsync", 3, True),
    "folder locked": (atomic, "lock", 3, True),
    "second replaced": (Path, "replace", 2, True),
}
if moment != "never":
    killed_at(*moments[moment])
"""

FILE = "write_atomically(place, content.encode())"
SET = """from trtdet.files import write_together
write_together({place: content.encode(), place.with_suffix(".npz"): content.encode()})"""


def write(place: Path, content: str) -> None:
    with FolderWriter(place, "manifest.json", "a bundle") as writer:
        writer.add("a", content.encode() * 1000)
        writer.add("deep/b", content.encode())
        writer.put(json.dumps({"a": content}).encode())


FOLDER = f"{inspect.getsource(write)}\nwrite(place, content)\n"


def run(body: str, place: Path, moment: str, exchanges: bool = True) -> int:
    arguments = [str(place), moment, "exchange" if exchanges else "renames", "new"]
    done = subprocess.run([sys.executable, "-c", WRITE + body, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def content(place: Path) -> str:
    """What a folder was written with; it is whole."""
    written = str(json.loads((place / "manifest.json").read_text())["a"])
    assert (place / "a").read_bytes() == written.encode() * 1000
    assert (place / "deep" / "b").read_text() == written
    return written


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def unable(first: Path, second: Path) -> None:
    raise OSError(errno.EINVAL, "Invalid argument")


BEFORE = ("created", "locked", "first file", "marker", "whole", "before")


@pytest.mark.parametrize("moment", [*BEFORE, "exchanged", "removing"])
def test_killed_at_any_moment_a_folder_is_the_old_or_the_new_one(tmp_path, moment):
    place = tmp_path / "b"
    write(place, "old")
    assert run(FOLDER, place, moment) == -signal.SIGKILL
    assert content(place) == ("old" if moment in BEFORE else "new")
    assert len(names(tmp_path)) == 2, "the killed writer leaves its temporary"
    write(place, "third")
    assert content(place) == "third" and names(tmp_path) == ["b"]


@pytest.mark.parametrize("moment", ["whole", "moved aside", "in place"])
def test_killed_between_two_renames_the_next_writer_puts_the_old_folder_back(tmp_path, moment):
    """Where names cannot be exchanged; whether that writer ends well or not."""
    place = tmp_path / "b"
    write(place, "old")
    assert run(FOLDER, place, moment, exchanges=False) == -signal.SIGKILL
    assert place.exists() == (moment != "moved aside")
    with pytest.raises(KeyboardInterrupt), FolderWriter(place, "manifest.json", "a bundle"):
        raise KeyboardInterrupt
    assert content(place) == ("new" if moment == "in place" else "old")
    assert names(tmp_path) == ["b"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_where_none_was_is_there_whole_or_not_at_all(tmp_path, exchanges):
    place = tmp_path / "b"
    assert run(FOLDER, place, "whole", exchanges) == -signal.SIGKILL
    assert not place.exists()
    assert run(FOLDER, place, "never", exchanges) == 0
    assert content(place) == "new" and names(tmp_path) == ["b"]


@pytest.mark.parametrize("moment", ["created", "locked", "flushed", "replaced"])
def test_killed_at_any_moment_a_file_is_the_old_or_the_new_one(tmp_path, moment):
    place = tmp_path / "r.json"
    place.write_text("old")
    assert run(FILE, place, moment) == -signal.SIGKILL
    assert place.read_text() == ("new" if moment == "replaced" else "old")
    write_atomically(place, b"third")
    assert place.read_bytes() == b"third" and names(tmp_path) == ["r.json"]


# Siblings


def test_the_temporary_of_a_live_writer_is_left_alone(tmp_path):
    place, file = tmp_path / "b", tmp_path / "b.json"
    with FolderWriter(place, "manifest.json", "a bundle") as slow:
        slow.add("a", b"slow" * 1000)
        slow.add("deep/b", b"slow")
        write(place, "fast")
        write_atomically(file, b"fast")
        assert content(place) == "fast"
        slow.put(json.dumps({"a": "slow"}).encode())
    assert content(place) == "slow"
    assert names(tmp_path) == ["b", "b.json"]


def test_a_folder_that_a_live_writer_moved_aside_is_left_to_it(tmp_path, monkeypatch):
    place = tmp_path / "b"
    write(place, "old")
    rename, between = Path.rename, []

    def watched(source: Path, target: Path) -> Path:
        moved = rename(source, target)
        if source == place:
            atomic.remove_stale(place)
            between.append((place.exists(), content(target)))
        return moved

    monkeypatch.setattr(atomic, "exchange", unable)
    monkeypatch.setattr(Path, "rename", watched)
    write(place, "new")
    assert between == [(False, "old")]
    assert content(place) == "new" and names(tmp_path) == ["b"]


def test_files_of_the_user_with_similar_names_are_left_alone(tmp_path):
    kept = [".b.settings", ".b.notes", ".bb.abcdefgh.trtdet", ".c.abcdefgh.trtdet", ".b.trtdet", ".b.abcdefgh.old"]
    for name in kept:
        (tmp_path / name).write_text("the user's")
    (tmp_path / ".b.abcdefgh.trtdet").write_text("of a killed writer")
    write(tmp_path / "b", "new")
    assert names(tmp_path) == sorted([*kept, "b"])


def test_where_files_cannot_be_locked_nothing_is_taken_for_stale(tmp_path, monkeypatch):
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / ".b.abcdefgh.trtdet").write_text("of a writer that may live")
    monkeypatch.setattr(atomic.fcntl, "flock", unsupported)
    write(tmp_path / "b", "new")
    assert content(tmp_path / "b") == "new" and names(tmp_path) == [".b.abcdefgh.trtdet", "b"]


def test_a_temporary_that_is_taken_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    lock, calls = atomic.lock, []

    def taken(descriptor: int) -> bool | None:
        calls.append(descriptor)
        if len(calls) == 1:
            return False
        if len(calls) == 2:
            (stale,) = tmp_path.glob(".b.*")
            atomic.remove(stale)
        return lock(descriptor)

    monkeypatch.setattr(atomic, "lock", taken)
    write(tmp_path / "b", "new")
    assert len(calls) == 3 and content(tmp_path / "b") == "new" and names(tmp_path) == ["b"]


# Several writers


@pytest.mark.parametrize("exchanges", ["exchange", "renames"])
def test_several_writers_leave_the_folder_of_one_and_nothing_else(tmp_path, exchanges):
    place = tmp_path / "b"
    write(place, "old")
    loop = f"{WRITE}{inspect.getsource(write)}\nfor _ in range(30):\n    write(place, content)\n"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", loop, str(place), "never", exchanges, name], stderr=subprocess.PIPE, text=True
        )
        for name in ("one", "two", "three")
    ]
    for writer in writers:
        errors = writer.communicate(timeout=120)[1]
        assert writer.returncode == 0, errors
    assert content(place) in ("one", "two", "three")
    assert names(tmp_path) == ["b"]


# Failures without a kill


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("when", [1, 2])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")], ids=["stop", "io"])
def test_a_stop_around_either_step_leaves_one_whole_folder(tmp_path, monkeypatch, exchanges, when, after, error):
    write(tmp_path / "b", "old")
    original = atomic.exchange if exchanges else Path.rename
    calls: list[Path] = []

    def failing(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) != when or after:
            original(source, target)
        if len(calls) == when:
            raise error

    monkeypatch.setattr(atomic, "exchange", failing if exchanges else unable)
    if not exchanges:
        monkeypatch.setattr(Path, "rename", failing)
    if exchanges and when == 2:
        write(tmp_path / "b", "new")  # there is one step only
    else:
        with pytest.raises((KeyboardInterrupt, OutputError)):
            write(tmp_path / "b", "new")
    assert names(tmp_path) == ["b"]
    assert content(tmp_path / "b") in ("old", "new")


def test_a_folder_of_another_kind_that_appears_meanwhile_is_not_replaced(tmp_path):
    place = tmp_path / "b"
    with FolderWriter(place, "manifest.json", "a bundle") as writer:
        place.mkdir()
        (place / "notes.txt").write_text("the user's")
        with pytest.raises(OutputError, match="exists and is not a bundle"):
            writer.put(b"{}")
    assert names(tmp_path) == ["b"] and names(place) == ["notes.txt"]


def test_a_stop_while_the_old_folder_is_removed_leaves_the_new_one_alone(tmp_path, monkeypatch):
    write(tmp_path / "b", "old")
    rmtree, calls = atomic.shutil.rmtree, []

    def stopped(path: Path, **options: object) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        rmtree(path, ignore_errors=True)

    monkeypatch.setattr(atomic.shutil, "rmtree", stopped)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "b", "new")
    assert names(tmp_path) == ["b"] and content(tmp_path / "b") == "new"


def test_a_link_to_a_folder_is_replaced_and_its_target_kept(tmp_path):
    write(tmp_path / "target", "old")
    (tmp_path / "link").symlink_to("target")
    write(tmp_path / "link", "new")
    assert content(tmp_path / "link") == "new" and content(tmp_path / "target") == "old"
    assert names(tmp_path) == ["link", "target"] and not (tmp_path / "link").is_symlink()


def test_this_system_exchanges_names(tmp_path):
    """Else every test above would have taken the other way."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").touch()
    atomic.exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").is_file() and (tmp_path / "b").is_dir()
    with pytest.raises(FileNotFoundError):
        atomic.exchange(tmp_path / "a", tmp_path / "c")
    assert os.path.lexists(tmp_path / "a")


NOT_YET = ("set created", "set flushed", "list created")


@pytest.mark.parametrize("moment", [*NOT_YET, "list flushed", "folder locked", "replaced", "second replaced"])
def test_killed_at_any_moment_files_that_belong_together_are_all_old_or_all_new(tmp_path, moment):
    first, second = tmp_path / "r.json", tmp_path / "r.npz"
    write_together({first: b"old", second: b"old"})
    assert names(tmp_path) == ["r.json", "r.npz"]
    assert run(SET, first, moment) == -signal.SIGKILL
    finish_replacing(tmp_path)  # as whoever reads one of them
    expected = b"old" if moment in NOT_YET else b"new"
    assert (first.read_bytes(), second.read_bytes()) == (expected, expected)
    write_together({first: b"third", second: b"third"})
    assert (first.read_bytes(), second.read_bytes()) == (b"third", b"third")
    assert names(tmp_path) == ["r.json", "r.npz"], "the next writer leaves nothing behind"


def test_a_list_of_another_program_replaces_nothing_but_its_own_temporaries(tmp_path):
    (tmp_path / "kept.txt").write_text("kept")
    (tmp_path / "other.txt").write_text("other")
    staged = tmp_path / ".kept.txt.aaaaaaaa.trtdet"
    (tmp_path / "folder").mkdir()
    for folder in (staged, tmp_path / "folder", staged / "..trtdet"):
        folder.mkdir(exist_ok=True)
        (folder / "kept.txt").write_text("planted")
    (tmp_path / "up.txt").write_text("planted")
    for number, listed in enumerate(
        (
            {"folder": "folder", "names": ["kept.txt"]},
            {"folder": f"{staged.name}/..trtdet", "names": ["kept.txt"]},
            {"folder": staged.name, "names": ["kept.txt", "../up.txt"]},
            {"folder": staged.name, "names": ["kept.txt", str(tmp_path / "other.txt")]},
            {"folder": staged.name, "names": None},
            {"names": ["kept.txt"]},
            ["kept.txt"],
        )
    ):
        (tmp_path / f".replacing.aaaaaaa{number}.trtdet").write_text(json.dumps(listed))
    finish_replacing(tmp_path)
    assert (tmp_path / "kept.txt").read_text() == "kept" and (tmp_path / "other.txt").read_text() == "other"
    assert not (tmp_path.parent / "up.txt").exists()


def test_a_set_that_cannot_be_written_whole_replaces_nothing(tmp_path):
    first = tmp_path / "r.json"
    first.write_bytes(b"old")
    (tmp_path / "r.npz").mkdir()
    with pytest.raises(OutputError, match="it is a folder"):
        write_together({first: b"new", tmp_path / "r.npz": b"new"})
    with pytest.raises(OutputError, match="cannot be written"):
        write_together({first: b"new", tmp_path / "r.cache": tmp_path / "missing"})
    assert first.read_bytes() == b"old" and names(tmp_path) == ["r.json", "r.npz"]


def test_a_set_of_which_a_temporary_is_lost_is_an_error(tmp_path, monkeypatch):
    write = atomic._write_flushed

    def write_and_lose(path: Path, data: bytes) -> None:
        write(path, data)
        if path.name.startswith(".replacing."):
            next(tmp_path.glob(".r.json.*/r.npz")).unlink()

    monkeypatch.setattr(atomic, "_write_flushed", write_and_lose)
    with pytest.raises(OutputError, match="No such file"):
        write_together({tmp_path / "r.json": b"new", tmp_path / "r.npz": b"new"})


def test_files_in_folders_change_together_with_those_above(tmp_path):
    """As the plans of a tune, and the table that numbers them."""
    table, plan = tmp_path / "table", tmp_path / "plans" / "1.json"
    write_together({table: b"old", plan: b"old"})
    body = """from trtdet.files import write_together
write_together({place: content.encode(), place.parent / "plans" / "1.json": content.encode()})"""
    assert run(body, table, "replaced") == -signal.SIGKILL
    assert (table.read_bytes(), plan.read_bytes()) == (b"new", b"old")
    finish_replacing(tmp_path)
    assert (table.read_bytes(), plan.read_bytes()) == (b"new", b"new")
    assert names(tmp_path) == ["plans", "table"] and names(tmp_path / "plans") == ["1.json"]


def test_a_writer_waits_until_another_has_moved_its_files(tmp_path, monkeypatch):
    first, second = tmp_path / "r.json", tmp_path / "r.npz"
    replace, threads = Path.replace, []

    def interrupted(source: Path, target: Path) -> Path:
        moved = replace(source, target)
        if target == first and not threads:
            threads.append(threading.Thread(target=write_together, args=({first: b"other", second: b"other"},)))
            threads[0].start()
            threads[0].join(0.2)
            assert threads[0].is_alive() and not second.exists()
        return moved

    monkeypatch.setattr(Path, "replace", interrupted)
    write_together({first: b"one", second: b"one"})
    threads[0].join(20)
    assert (first.read_bytes(), second.read_bytes()) == (b"other", b"other")
    assert names(tmp_path) == ["r.json", "r.npz"]


@pytest.mark.parametrize("beside", [True, False])
def test_the_next_scratch_folder_removes_that_of_a_killed_process(tmp_path, monkeypatch, beside):
    place = tmp_path / "b"
    body = f"""import tempfile
from trtdet.files import scratch_folder
tempfile.tempdir = str(place.parent)
with scratch_folder({"place" if beside else ""}) as folder:
    (folder / "file").touch()
    os.kill(os.getpid(), signal.SIGKILL)"""
    assert run(body, place, "never") == -signal.SIGKILL
    assert len(names(tmp_path)) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if beside:
        write(place, "new")
    else:
        with scratch_folder() as folder, scratch_folder() as another:
            assert {folder.name, another.name} == {*names(tmp_path)}
    assert names(tmp_path) == (["b"] if beside else [])


def test_a_full_disk_of_temporaries_is_told_with_what_helps(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OutputError, match="too full for temporary files: No space left.*TMPDIR"), scratch_folder():
        raise OSError(errno.ENOSPC, "No space left on device")
    assert names(tmp_path) == []


def test_a_stop_between_two_files_of_a_set_waits_for_the_rest(tmp_path, monkeypatch):
    first, second = tmp_path / "r.json", tmp_path / "r.npz"
    write_together({first: b"old", second: b"old"})
    replace, targets = Path.replace, []

    def stopped(source: Path, target: Path) -> Path:
        targets.append(target)
        moved = replace(source, target)
        if len(targets) == 1:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_together({first: b"new", second: b"new"})
    assert (first.read_bytes(), second.read_bytes()) == (b"new", b"new") and names(tmp_path) == ["r.json", "r.npz"]
