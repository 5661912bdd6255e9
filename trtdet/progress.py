"""What a person sees of a command: its results, its progress with an estimate, its warnings and errors."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from trtdet.errors import OutputError, TrtdetWarning, one_line
from trtdet.tables import Table, Tables

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the steps done and the steps in all; a total of 1 stands for an unknown length."""

Expect = Callable[[Sequence["ExpectedStage"]], None]
"""Called with the stages that are to come, as far as they are known."""

_MESSAGE = 4000
"""Characters that a warning or an error may have: a message that quotes a user's file stays readable."""


class OutputClosed(Exception):
    """Whoever read standard output has closed it, as ``head`` does: there is nobody left to print for."""


def silent(stage: str, done: int, total: int) -> None:
    """A ``Progress`` that shows nothing."""


def unheard(steps: Sequence[ExpectedStage]) -> None:
    """An ``Expect`` that does nothing."""


@dataclass(frozen=True)
class ExpectedStage:
    """A stage that is to come."""

    stage: str
    """Its name, as ``Progress`` gets it."""
    seconds: float
    """An estimate; 0 where its result is there already."""


class Course:
    """How far a command of several stages is, and how long it still takes.

    The estimates of the stages say what part of the work each is. The pace is measured, and an estimate counts as if
    a tenth of all had been done at its pace. A stage that is not among ``steps`` counts by itself; ``now`` is the clock
    at the start, in seconds.
    """

    def __init__(self, steps: Sequence[ExpectedStage] = (), now: float = 0.0) -> None:
        self._steps, self._all = tuple(steps), sum(step.seconds for step in steps)
        self._place, self._begun, self._now = 0, now, now
        self.share = 0.0
        """The part of the command that is done, 0..1."""

    def tell(self, stage: str, done: int, total: int, now: float) -> None:
        """That ``done`` of ``total`` steps of a stage are over."""
        self._now = now
        part = min(1.0, done / max(total, 1))
        if not self._all:
            self.share = part
            return
        names = [step.stage for step in self._steps]
        if stage in names[self._place :]:
            self._place = names.index(stage, self._place)
            before = sum(step.seconds for step in self._steps[: self._place])
            self.share = max(self.share, (before + part * self._steps[self._place].seconds) / self._all)

    @property
    def left(self) -> float | None:
        """Estimated seconds to the end; None where nothing is known."""
        passed = self._now - self._begun
        if not self._all:
            return passed * (1 - self.share) / self.share if self.share else None
        trust = 0.1 * self._all
        pace = (passed + trust) / (self.share * self._all + trust)
        return pace * (1 - self.share) * self._all


class Console:
    """The results of a command on standard output; its progress, warnings and errors on standard error.

    A terminal gets one progress bar for the command, with its stage and an estimate; a file or a pipe gets none. Used
    as a context manager, it also shows warnings, and exceptions of threads, as single lines.

    Args:
        json: standard output gets one JSON object and nothing else; text goes to standard error.
        verbose: show messages of libraries and builders, and how long each stage took.
    """

    def __init__(self, json: bool = False, verbose: bool = False) -> None:
        self._json, self._verbose = json, verbose
        self._bar: Any = None
        self._task: Any = None
        self._stage = ""
        self._expected = False
        self._course = Course()
        self._started = time.monotonic()
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._until_end = ExitStack()

    def __enter__(self) -> Console:
        if self._verbose:
            self._until_end.enter_context(_messages_to(self.line))
        self._until_end.enter_context(warnings.catch_warnings())
        warnings.showwarning = self._warning
        # A warning counts once a place by default; two skipped images are two facts.
        warnings.simplefilter("always", category=TrtdetWarning)
        self._until_end.callback(setattr, threading, "excepthook", threading.excepthook)
        threading.excepthook = self._thread_failed
        return self

    def __exit__(self, *_: object) -> None:
        self._finish_stage()
        self._close()
        self._until_end.close()

    def expect(self, steps: Sequence[ExpectedStage]) -> None:
        """Lets the bar be one for all of these stages."""
        self._expected, self._course = bool(steps), Course(steps, time.monotonic())

    def progress(self, stage: str, done: int, total: int) -> None:
        """Shows that ``done`` of ``total`` steps of a stage are over; a total of 1 stands for an unknown length."""
        now = time.monotonic()
        if stage != self._stage:
            self._finish_stage()
            self._stage, self._started = stage, now
            if not self._expected:
                self._course = Course((), now)
        self._course.tell(stage, done, total, now)
        if self._terminal:
            self._draw(stage, done, total)
        if done >= total:
            self._finish_stage()

    def say(self, text: object) -> None:
        """Prints a result: a line, or a table, which is drawn with styles in a terminal (unless ``NO_COLOR`` is set).

        Raises:
            OutputClosed: nobody reads standard output any more.
            OutputError: standard output cannot be written.
        """
        self._close()  # the next report of progress draws it again, below
        if self._json:
            self.line(str(text))
        else:
            # A terminal that is to show styles, see https://no-color.org.
            styles = os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
            styles = styles and sys.stdout is not None and sys.stdout.isatty()
            _write(f"{text.text(styled=True) if styles and isinstance(text, (Table, Tables)) else text}\n")

    def give(self, result: Mapping[str, Any]) -> None:
        """Prints the JSON object of a command, where JSON was asked for, and sees to it that what was printed arrives.

        Raises:
            OutputClosed: nobody reads standard output any more.
            OutputError: standard output cannot be written.
        """
        _write(f"{json.dumps(result)}\n" if self._json else "", flush=True)

    def line(self, text: str) -> None:
        """Prints a line on standard error."""
        if sys.stderr is None:
            return
        with suppress(OSError):  # There is no other place to say that standard error is full or closed.
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=sys.stderr, flush=True)

    def warn(self, text: object) -> None:
        """Prints a warning, as a single line on standard error."""
        self.line(f"warning: {one_line(text, _MESSAGE)}")

    def fail(self, text: object) -> None:
        """Prints an error, as a single line on standard error."""
        self._close()
        self.line(f"trtdet: error: {one_line(text, _MESSAGE)}")

    def _draw(self, stage: str, done: int, total: int) -> None:
        from rich import console, progress

        measurable, seconds, left = self._expected or total != 1, self._course.left, ""
        if seconds is not None:
            minutes, rest = divmod(round(seconds), 60)
            hours, minutes = divmod(minutes, 60)
            left = f"about {f'{hours}:{minutes:02}' if hours else minutes}:{rest:02} left"
        try:
            if self._bar is None:
                columns = ("{task.description}", "{task.fields[count]}", "{task.fields[share]}", "{task.fields[left]}")
                texts = [progress.TextColumn(column, markup=False) for column in columns]
                bar = progress.Progress(
                    texts[0], progress.BarColumn(), *texts[1:], console=console.Console(stderr=True), transient=True
                )
                self._task = bar.add_task(stage, total=1.0, count="", share="", left="")
                bar.start()
                self._bar = bar
            self._bar.update(
                self._task,
                description=stage,
                total=1.0 if measurable else None,
                completed=self._course.share,
                count="" if total == 1 else f"{done}/{total}",
                share=f"{self._course.share:.0%}" if self._expected else "",
                left=left,
            )
        except (OSError, RuntimeError):
            # No thread can be started, or the terminal is gone: the work itself goes on.
            self._close()
            self._terminal = False

    def _finish_stage(self) -> None:
        """Prints how long the stage took, where that is wanted, and closes a bar of this stage alone."""
        stage, self._stage = self._stage, ""
        seconds = time.monotonic() - self._started
        if self._verbose and stage and seconds >= 0.1:
            self.line(f"{stage}: {seconds:.1f} s")
        if not self._expected:
            self._close()

    def _close(self) -> None:
        bar, self._bar, self._task = self._bar, None, None
        if bar is not None:
            with suppress(OSError, RuntimeError):
                bar.stop()

    def _warning(self, message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, TrtdetWarning):
            self.warn(message)
        elif self._verbose:
            self.line(f"{category.__name__}: {one_line(message, _MESSAGE)}")

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        self.warn(f"a thread failed: {failure.exc_type.__name__}: {failure.exc_value}")


@contextmanager
def _messages_to(show: Callable[[str], None]) -> Iterator[None]:
    """Lets ``show`` have what libraries and builders log, a line a message."""
    import logging

    class Messages(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            show(f"{record.name}: {one_line(record.getMessage(), _MESSAGE)}")

    handler, root = Messages(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


def _write(text: str, flush: bool = False) -> None:
    if sys.stdout is None:
        return
    try:
        print(text, end="", flush=flush)
    except OSError as error:
        with suppress(OSError, ValueError):
            # The interpreter would try to write again, at its end and with a traceback, what the buffer holds.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            raise OutputClosed from None
        raise OutputError(f"standard output cannot be written: {error.strerror or error}", "free some space") from None
