"""Whatever goes wrong, the command line ends with one line, and with one object where JSON was asked for."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trtdet.cli
from trtdet.cli import Command, main
from trtdet.cli.failures import RAISE
from trtdet.config import load_config
from trtdet.errors import BundleError, ConfigError, TrtdetWarning
from trtdet.progress import Console

Act = Callable[[argparse.Namespace, Console], dict[str, Any]]


@pytest.fixture
def acting(monkeypatch, tmp_path):
    """``trtdet act`` does what it is given; files for details go into ``tmp_path``."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(RAISE, raising=False)

    def install(act: Act) -> None:
        monkeypatch.setattr(trtdet.cli, "COMMANDS", (Command("act", "acts", act),))

    return install


def raising(error: BaseException) -> Act:
    def act(options: argparse.Namespace, console: Console) -> dict[str, Any]:
        raise error

    return act


def too_deep(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    return too_deep(options, console)


def too_large(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    return {"bytes": len(bytearray(1 << 62))}


def with_surrogates(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    raise ValueError("first\nsecond \x1b[31m\ud800")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


UNFORESEEN = [
    pytest.param(raising(ValueError("it broke")), "ValueError", "it broke", id="ValueError"),
    pytest.param(raising(KeyError("k")), "KeyError", "'k'", id="KeyError"),
    pytest.param(raising(OSError(28, "No space left on device", "x")), "OSError", "[Errno 28]", id="OSError"),
    pytest.param(raising(BrokenPipeError(32, "Broken pipe")), "BrokenPipeError", "[Errno 32]", id="a worker's pipe"),
    pytest.param(too_deep, "RecursionError", "maximum recursion depth exceeded", id="RecursionError"),
    pytest.param(with_surrogates, "ValueError", "first second \ufffd[31m\ufffd", id="lines"),
    pytest.param(raising(Mute()), "Mute", "its message cannot be printed", id="no message"),
]


@pytest.mark.parametrize(("act", "kind", "said"), UNFORESEEN)
def test_an_unforeseen_exception_is_one_line_or_object_and_a_file(acting, capsys, tmp_path, act, kind, said):
    acting(act)
    assert main(["act"]) == 1
    done = capsys.readouterr()
    assert done.out == ""
    (line,) = done.err.splitlines()
    (details,) = tmp_path.iterdir()
    assert line.startswith(f"trtdet: error: unexpected {kind}: ")
    assert said in line
    machine = kind in ("OSError", "BrokenPipeError")
    assert line.endswith(f"; {'the details are in' if machine else 'please report it with the details in'} {details}")
    text = details.read_text(encoding="utf-8")
    assert text.startswith(f"trtdet {trtdet.__version__}, Python ")
    assert "Traceback (most recent call last):" in text
    assert details.suffix == ".txt"
    assert details.stat().st_mode & 0o777 == 0o600
    assert main(["act", "--json"]) == 1
    done = capsys.readouterr()
    error = json.loads(done.out)["error"]
    assert (set(error), error["type"]) == ({"type", "message", "details"}, kind)
    assert said in error["message"]
    assert Path(error["details"]).is_file()
    assert done.err == f"trtdet: error: {error['message']}\n"


def test_without_a_place_for_the_details_the_line_names_the_place_of_the_fault(acting, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    acting(raising(ValueError("it broke")))
    place = rf"{re.escape(__file__)}:\d+"
    words = rf"unexpected ValueError at {place}: it broke; the details could not be written into a file"
    for options in ([], ["--json"]):
        assert main(["act", *options]) == 1
        done = capsys.readouterr()
        (line,) = done.err.splitlines()
        assert re.fullmatch(f"trtdet: error: {words}", line)
    assert json.loads(done.out)["error"]["details"] is None
    # A developer can have the exception.
    monkeypatch.setenv(RAISE, "1")
    with pytest.raises(ValueError, match="it broke"):
        main(["act"])


def test_an_error_on_purpose_has_no_details_and_one_line(acting, capsys, tmp_path):
    acting(raising(BundleError("bundle 'a\nb' is\x1b[2J incomplete", "build it again")))
    assert main(["act"]) == 1
    assert capsys.readouterr().err == "trtdet: error: bundle 'a b' is\ufffd[2J incomplete; build it again\n"
    assert list(tmp_path.iterdir()) == []
    assert main(["act", "--json"]) == 1
    assert set(json.loads(capsys.readouterr().out)["error"]) == {"type", "message"}
    acting(raising(BundleError("x" * 10_000_000)))
    assert main(["act"]) == 1
    assert len(capsys.readouterr().err) < 5000


def interrupted_load(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """As a compiled module that Ctrl-C stops while it loads."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as stopped:
        raise ImportError("initialization failed") from stopped


@pytest.mark.parametrize("act", [raising(KeyboardInterrupt()), interrupted_load])
def test_ctrl_c_is_one_line_and_130(acting, act, capsys):
    acting(act)
    assert main(["act"]) == 130
    assert capsys.readouterr().err == "trtdet: stopped; nothing was left half-written\n"


def test_a_warning_is_one_line(acting, capsys):
    def warn(options: argparse.Namespace, console: Console) -> dict[str, Any]:
        warnings.warn("node 'a\nb' is left out", TrtdetWarning, stacklevel=1)
        return {}

    acting(warn)
    assert main(["act"]) == 0
    assert capsys.readouterr().err == "warning: node 'a b' is left out\n"


def test_an_exception_in_a_thread_is_one_line(acting, capsys):
    def act(options: argparse.Namespace, console: Console) -> dict[str, Any]:
        def fail() -> None:
            raise ValueError("in\nthe thread")

        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        return {}

    before = threading.excepthook
    acting(act)
    assert main(["act"]) == 0
    assert capsys.readouterr().err == "warning: a thread failed: ValueError: in the thread\n"
    assert threading.excepthook is before


def test_text_that_the_terminal_cannot_encode_is_printed_escaped(acting):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "console.say('a\\udcff \\u20ac \\u00e9')"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert (done.stdout, done.stderr) == (b"a\\ufffd \\u20ac \\xe9\n", b"")


# Standard output that cannot be written

PROGRAM = """
import sys
import trtdet.cli as cli
from trtdet.cli.command import Command

def act(options, console):
    exec(sys.argv[1])
    return {}

cli.COMMANDS = (Command("act", "acts", act),)
sys.exit(cli.main(["act", *sys.argv[2:]]))
"""


def ran(redirections: str, act: str, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a process whose shell redirects them."""
    command = ["bash", "-c", f'"$@" {redirections}', "bash", sys.executable, "-c", PROGRAM, act, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


FULL = "trtdet: error: standard output cannot be written: No space left on device; free some space\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device of Linux")
@pytest.mark.parametrize(
    ("act", "words", "before"),
    [
        ("console.say('x')", (), ""),
        ("console.say('x' * 100_000)", (), ""),
        ("pass", ("--json",), ""),
        ("from trtdet.errors import DataError; raise DataError('no image')", ("--json",), "trtdet: error: no image\n"),
    ],
)
def test_a_full_device_is_an_error_of_one_line(act, words, before):
    code, _, err = ran(">/dev/full", act, *words)
    assert (code, err) == (1, before + FULL)


def test_a_reader_that_closes_the_pipe_ends_the_command_quietly():
    code, out, err = ran("> >(head -c 1 >&2)", "for _ in range(100_000): console.say('x' * 100)")
    assert (code, out) == (1, "")
    assert err.strip() == "x"


@pytest.mark.parametrize("redirections", [">&-", "2>&-", ">&- 2>&-", "2>/dev/full"])
def test_closed_outputs_are_no_traceback(redirections):
    code, out, err = ran(redirections, "console.say('x'); console.warn('w'); console.progress('s', 1, 2)")
    assert code == 0
    assert out == ("" if ">&- 2" in redirections or redirections == ">&-" else "x\n")
    assert err == ("warning: w\n" if redirections == ">&-" else "")


def test_an_error_that_quotes_a_file_is_one_short_line_without_control_characters(tmp_path):
    (tmp_path / "own.yaml").write_text("extends: " + "a" * 5000)
    with pytest.raises(ConfigError) as raised:
        load_config(str(tmp_path / "own.yaml"))
    assert len(str(raised.value)) < 1500 and "neither a file nor a shipped name" not in str(raised.value)[1500:]
    error = ConfigError("key '\x1b[31mred\n'", "hint\x07 " + "b" * 2000)
    assert str(error).isprintable() and len(str(error)) < 1500 and error.hint.endswith("...")


def caused(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    try:
        raise MemoryError
    except MemoryError as error:
        raise ValueError("a library hides it") from error


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (raising(MemoryError()), "not enough memory; "),
        (too_large, "not enough memory; "),
        (caused, "not enough memory; "),
        (raising(RuntimeError("can't start new thread")), "not enough memory (can't start new thread); "),
        (raising(ImportError("cv2.so: failed to map segment from shared object")), "not enough memory (cv2.so: failed"),
        (raising(RuntimeError("std::bad_alloc")), "not enough memory (std::bad_alloc)"),
    ],
)
def test_a_lack_of_memory_is_no_bug(acting, capsys, tmp_path, act, said):
    acting(act)
    assert main(["act"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"trtdet: error: {said}") and "close other programs" in line
    assert not [*tmp_path.iterdir()], "there are no details to report"


@pytest.mark.parametrize("words", ["verify LONG", "predict m.onnx LONG -o p", "audit b --times LONG"])
@pytest.mark.parametrize("name", ["x" * 5000, "9" * 5000, "a/" * 2500])
def test_a_path_that_no_file_can_have_is_one_short_line(words, name, capsys, monkeypatch):
    monkeypatch.setenv("TRTDET_RAISE", "1")
    try:
        code = main(words.replace("LONG", name).split())
    except SystemExit as ended:
        code = ended.code
    assert code in (1, 2)
    said = capsys.readouterr().err
    assert "is no path that a file can have" in said
    assert max(map(len, said.splitlines())) < 1500
