from __future__ import annotations

import sys

import pytest
from rich import progress as bars

from trtdet.progress import Console


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")


def test_results_go_to_standard_output_and_the_rest_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Console() as console:
        console.say("result")
        console.warn("look\nhere")
        console.fail("no")
        console.give({"a": 1})
    assert capsys.readouterr() == ("result\n", "warning: look here\ntrtdet: error: no\n")


def test_with_json_standard_output_has_the_object_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with Console(json=True) as console:
        console.say("result")
        console.give({"a": 1})
    assert capsys.readouterr() == ('{"a": 1}\n', "result\n")


def test_a_pipe_gets_a_line_with_an_estimate_every_five_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    with Console() as console:
        for done in range(11):
            console.progress("calibrating", done, 10)
            clock[0] += 2
    assert capsys.readouterr().err.splitlines() == [
        "calibrating: 3 of 10, about 14 s left",
        "calibrating: 6 of 10, about 8 s left",
        "calibrating: 9 of 10, about 2 s left",
    ]


@pytest.mark.usefixtures("terminal")
def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bars.Progress] = []
    start = bars.Progress.start
    monkeypatch.setattr(bars.Progress, "start", lambda self: (made.append(self), start(self))[1])
    with Console() as console:
        console.progress("one", 0, 2)
        assert made[0].live.is_started
        console.progress("two", 1, 2)
        assert not made[0].live.is_started
    assert [bar.live.is_started for bar in made] == [False, False]


@pytest.mark.usefixtures("terminal")
def test_work_goes_on_where_no_bar_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: bars.Progress) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(bars.Progress, "start", start)
    with Console() as console:
        console.progress("one", 0, 2)
        console.progress("one", 1, 2)
        console.progress("one", 2, 2)
