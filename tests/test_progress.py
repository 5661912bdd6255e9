import logging
import os
import pty
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from typing import TextIO

import pytest
from rich import progress as bars

from trtdet.errors import TrtdetWarning
from trtdet.progress import Console, Course, ExpectedStage
from trtdet.tables import Table


def test_results_go_to_standard_output_and_the_rest_to_standard_error(capsys):
    with Console() as console:
        console.say("result")
        console.warn("look\nhere")
        console.fail("no")
        console.give({"a": 1})
    assert capsys.readouterr() == ("result\n", "warning: look here\ntrtdet: error: no\n")


def test_with_json_standard_output_has_the_object_alone(capsys):
    with Console(json=True) as console:
        console.say("result")
        console.give({"a": 1})
    assert capsys.readouterr() == ('{"a": 1}\n', "result\n")


def two_stages(console: Console, clock: list[float]) -> None:
    """A stage of ten steps and one of two, each step of a second."""
    for stage, total in (("calibrating", 10), ("building", 2)):
        for done in range(total + 1):
            console.progress(stage, done, total)
            clock[0] += 1


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_a_pipe_gets_no_progress(capsys, clock):
    with Console() as console:
        two_stages(console, clock)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("json", [False, True])
def test_what_is_said_has_no_control_characters(capsys, json):
    with Console(verbose=False, json=json) as console:
        console.say("next: \x1b[31mred\x07\n  indented")
    captured = capsys.readouterr()
    said = captured.err if json else captured.out
    assert said == "next: \N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}\n  indented\n"


def test_verbose_says_how_long_each_stage_took_and_what_libraries_say(capsys, clock):
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    with Console(verbose=True) as console:
        two_stages(console, clock)
        logging.getLogger("some.library").info("read\n%d layers", 7)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("of a library", UserWarning, stacklevel=1)
    assert capsys.readouterr().err.splitlines() == [
        *("calibrating: 10.0 s", "building: 2.0 s", "some.library: read 7 layers", "UserWarning: of a library")
    ]
    assert (root.level, root.handlers) == before


class Terminal:
    """What a terminal on standard error was given."""

    def __init__(self, read: int, written: TextIO) -> None:
        self._read, self._written = read, written

    def text(self) -> str:
        self._written.flush()
        found = b""
        with suppress(BlockingIOError):
            while part := os.read(self._read, 65536):
                found += part
        return found.decode()


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)


@contextmanager
def terminal_on_standard_error() -> Iterator[Terminal]:
    read, slave = pty.openpty()
    os.set_blocking(read, False)
    with os.fdopen(slave, "w") as written, redirect_stderr(written):
        yield Terminal(read, written)
    os.close(read)


@pytest.mark.usefixtures("environment")
def test_a_terminal_gets_one_bar_for_all_stages_with_an_estimate(clock):
    with terminal_on_standard_error() as screen:
        with Console() as console:
            console.expect([ExpectedStage("calibrating", 20), ExpectedStage("building", 4)])
            console.progress("calibrating", 0, 10)
            console._bar.refresh()
            two_stages(console, clock)
            console._bar.refresh()
        text = screen.text()
    drawn = [re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]+", text)]
    assert any(re.match(r"calibrating ━+.* 0/10 0% about 0:24 left", line) for line in drawn)
    assert any(re.match(r"building ━+ 2/2 100% about 0:00 left", line) for line in drawn)
    assert "\x1b[38" in text or "\x1b[3" in text, "in colour"
    assert text.rstrip().endswith(("\x1b[2K", "\x1b[?25h")), "and it is gone at the end"


@pytest.mark.usefixtures("environment")
def test_no_color_is_obeyed(clock, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal_on_standard_error() as screen:
        with Console() as console:
            two_stages(console, clock)
        text = screen.text()
    assert "calibrating" in text
    assert not re.findall(r"\x1b\[[\d;]*3\d[\d;]*m", text)


@pytest.mark.usefixtures("environment")
def test_results_are_not_drawn_over(capsys):
    with terminal_on_standard_error() as screen:
        with Console() as console:
            console.expect([ExpectedStage("calibrating", 20), ExpectedStage("building", 4)])
            console.progress("calibrating", 1, 10)
            console.say("a result")
            assert console._bar is None
            console.progress("calibrating", 2, 10)
            assert console._bar is not None
        text = screen.text()
    assert capsys.readouterr().out == "a result\n"
    assert text.count("\x1b[?25h") == 2, "the cursor is back after each"


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("variable", "value", "styled"), [("A", "1", True), ("NO_COLOR", "1", False), ("TERM", "dumb", False)]
)
def test_a_table_has_styles_in_a_terminal_alone(variable, value, styled, monkeypatch, capsys):
    table = Table(("name", "mAP"), [("int8", 64.29)], "Scores", ["a note"])
    with Console() as console:
        console.say(table)
    plain = capsys.readouterr().out
    assert plain == f"{table}\n" and "\x1b" not in plain
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Console() as console:
        console.say(table)
    shown = capsys.readouterr().out
    assert ("\x1b[1mScores" in shown and "\x1b[2ma note" in shown) == styled
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in shown.splitlines()]
    assert lines == plain.splitlines(), "the same but for the styles"
    assert ("\x1b" in shown) == styled


# How far a command is


def test_steps_count_by_their_estimates_and_by_how_fast_they_went():
    course = Course([ExpectedStage("a", 10), ExpectedStage("b", 30)], now=100.0)
    assert (course.share, course.left) == (0, 40)
    course.tell("a", 5, 10, 105.0)
    assert (course.share, course.left) == (0.125, 35)
    course.tell("b", 0, 1, 120.0)
    assert course.share == 0.25
    assert course.left == pytest.approx(30 * (20 + 4) / (10 + 4)), "twice as slow as estimated, not all of it believed"


def test_a_stage_that_was_left_out_or_comes_unexpected_changes_no_order():
    course = Course(
        [ExpectedStage("a", 10), ExpectedStage("there already", 0), ExpectedStage("b", 10), ExpectedStage("a", 20)]
    )
    for stage, share in (("else", 0), ("b", 0.25), ("a", 0.5), ("b", 0.5)):
        course.tell(stage, 0, 4, 1.0)
        assert course.share == share
    course.tell("a", 4, 4, 2.0)
    assert (course.share, course.left) == (1, 0)


def test_where_nothing_is_expected_a_stage_counts_by_itself():
    course = Course(now=3.0)
    assert course.left is None
    course.tell("a", 1, 4, 5.0)
    assert (course.share, course.left) == (0.25, 6)
    course = Course()
    course.tell("a", 1, 4, 2.0)
    assert course.left == 6, "its clock began at 0"


@pytest.mark.parametrize("steps", [(), (ExpectedStage("a", 10), ExpectedStage("b", 10))])
def test_more_steps_than_there_were_to_be_are_no_more_than_all(steps):
    course = Course(steps)
    course.tell("a", 9, 4, 1.0)
    assert course.share == (0.5 if steps else 1)


def test_work_goes_on_where_no_bar_can_be_drawn(monkeypatch):
    def start(self: bars.Progress) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(bars.Progress, "start", start)
    with Console() as console:
        for done in range(3):
            console.progress("one", done, 2)


def test_equal_warnings_are_one_with_a_count(capsys):
    with Console() as console:
        for _ in range(300):
            warnings.warn("look here", TrtdetWarning, stacklevel=1)
        console.warn("and there")
        console.say("done")
    assert capsys.readouterr() == (
        "done\n",
        "warning: look here\nwarning: and there\nwarning, 300 times: look here\n",
    )
