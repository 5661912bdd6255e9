import os
import socket
from pathlib import Path

import pytest

from trtdet.errors import OutputError
from trtdet.files import FolderWriter, NewFiles, prepare_target, write_atomically, writing_atomically
from trtdet.files.atomic import SUFFIX
from trtdet.files.journal import Rows


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_with_its_folders(tmp_path):
    path = tmp_path / "a" / "b" / "file.json"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o644
    assert names(path.parent) == ["file.json"]


def test_files_of_another_library_are_moved_to_their_places_when_they_are_put(tmp_path):
    path = tmp_path / "a" / "video.mp4"
    with NewFiles(path) as new:
        assert new.place("video.mp4").name == "video.mp4"
        new.place("video.mp4").write_bytes(b"one")
        new.place("deep/lines").write_bytes(b"one")
        new.put(["deep/lines", "video.mp4"])
    with NewFiles(path) as new:
        new.place("video.mp4").write_bytes(b"half")
    with NewFiles(path) as new:
        new.place("video.mp4").write_bytes(b"half")
        new.place("other").write_bytes(b"put")
        new.put(["other"])
    assert path.read_bytes() == path.with_name("deep").joinpath("lines").read_bytes() == b"one"
    assert path.stat().st_mode & 0o777 == 0o644
    assert names(path.parent) == ["deep", "other", "video.mp4"]
    with pytest.raises(OutputError, match="it is a folder"):
        NewFiles(tmp_path / "a")
    with NewFiles(path) as new, pytest.raises(OutputError, match="it is a folder"):
        new.place("deep")


def test_a_file_on_a_full_disk_keeps_its_old_content(tmp_path, full_disk):
    path = tmp_path / "file.json"
    write_atomically(path, b"old")
    full_disk()
    with pytest.raises(OutputError, match=r"file\.json' cannot be written: No space left on device"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and names(tmp_path) == ["file.json"]


@pytest.mark.parametrize("moment", ["writing", "chmod", "replace"])
def test_a_file_stopped_by_ctrl_c_keeps_its_old_content(tmp_path, monkeypatch, moment):
    path = tmp_path / "file.json"
    write_atomically(path, b"old")

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    if moment != "writing":
        monkeypatch.setattr(Path, moment, stop)
    with pytest.raises(KeyboardInterrupt), writing_atomically(path) as stream:
        stream.write(b"new")
        if moment == "writing":
            stop()
    assert path.read_bytes() == b"old" and names(tmp_path) == ["file.json"]


def test_a_file_over_a_folder_or_under_a_file_is_an_error(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "folder", tmp_path / "file" / "under"):
        with pytest.raises(OutputError, match="cannot be written"):
            write_atomically(path, b"data")
    assert names(tmp_path) == ["file", "folder"] and (tmp_path / "file").read_bytes() == b"x"


# Devices, pipes and sockets


def pipe(path: Path) -> str:
    os.mkfifo(path)
    return "a pipe"


def listening(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    return "a socket"


def device(path: Path) -> str:
    path.symlink_to("/dev/null")
    return "a device"


def link_to_pipe(path: Path) -> str:
    os.mkfifo(path.with_name("target"))
    path.symlink_to("target")
    return "a pipe"


@pytest.mark.parametrize("make", [pipe, listening, device, link_to_pipe])
def test_only_files_and_folders_are_replaced(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    path = Path("place")
    kind = make(path)
    before = path.lstat()
    with pytest.raises(OutputError, match=f"'place' cannot be written: it is {kind}, and only a regular file is repl"):
        write_atomically(path, b"data")
    with pytest.raises(OutputError, match=f"it is {kind}, and only a folder is replaced; choose another place with -o"):
        FolderWriter(path, "marker", "a bundle").__enter__()
    for early in (prepare_target, lambda path: Rows(path, "key")):
        with pytest.raises(OutputError, match=f"it is {kind}"):
            early(path)
    assert os.path.samestat(path.lstat(), before)
    assert not [name for name in names(tmp_path) if name.endswith(SUFFIX)]


def test_a_device_itself_is_refused():
    with pytest.raises(OutputError, match="'/dev/full' cannot be written: it is a device"):
        write_atomically(Path("/dev/full"), b"data")
    assert Path("/dev/full").is_char_device()


def test_a_link_of_the_system_is_refused_wherever_it_leads(tmp_path, monkeypatch):
    """/dev/stdout is one, and leads to a regular file where the output is redirected."""
    (tmp_path / "log").touch()
    link = tmp_path / "stdout"
    link.symlink_to("log")
    resolve = Path.resolve
    monkeypatch.setattr(Path, "resolve", lambda path: Path("/dev") if path == tmp_path else resolve(path))
    with pytest.raises(OutputError, match="it is a link of the system"):
        write_atomically(link, b"data")
    assert link.is_symlink()


def test_a_link_of_the_users_is_replaced_and_its_target_kept(tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").read_bytes() == b"new" and not (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"old"
