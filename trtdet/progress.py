"""Output of a command for people: results, progress with the remaining time, warnings and errors."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from trtdet.errors import OutputError, TrtdetWarning, one_line
from trtdet.tables import LabelledLines, Table, Tables, printable

Progress = Callable[[str, int, int], None]
"""Called with (stage, steps done, total steps); a total of 1 means an unknown length."""

Expect = Callable[[Sequence["ExpectedStage"]], None]
"""Called with the stages ahead, as far as they are known."""

_MESSAGE = 4000
"""Largest length of a warning or error in characters: a message that quotes a user's file stays readable."""


class OutputClosed(Exception):
    """The reader of standard output has closed it, as ``head`` does."""


def silent(stage: str, done: int, total: int) -> None:
    """A ``Progress`` that shows nothing."""


def titled(progress: Progress, title: str) -> Progress:
    """A ``Progress`` that puts ``title`` and a colon before each stage."""
    return lambda stage, done, total: progress(f"{title}: {stage}", done, total)


def unheard(steps: Sequence[ExpectedStage]) -> None:
    """An ``Expect`` that does nothing."""


@dataclass(frozen=True)
class ExpectedStage:
    """A stage ahead."""

    stage: str
    """Its name, as ``Progress`` gets it."""
    seconds: float
    """Estimated duration; 0 where its result exists already."""


class Course:
    """Progress of a command of several stages, and its remaining time.

    The estimates weight the stages. The pace is measured; the estimated pace counts as much as the first tenth of the
    work. Without ``steps``, each stage counts by itself. ``now`` is the clock at the start, in seconds.
    """

    def __init__(self, steps: Sequence[ExpectedStage] = (), now: float = 0.0) -> None:
        self._steps, self._all = tuple(steps), sum(step.seconds for step in steps)
        self._place, self._begun, self._now = 0, now, now
        self.share = 0.0
        """The finished fraction of the command, 0..1."""

    def tell(self, stage: str, done: int, total: int, now: float) -> None:
        """Records that ``done`` of ``total`` steps of a stage are finished."""
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
        """Estimated remaining seconds; None where there is no estimate yet."""
        passed = self._now - self._begun
        if not self._all:
            return passed * (1 - self.share) / self.share if self.share else None
        trust = 0.1 * self._all
        pace = (passed + trust) / (self.share * self._all + trust)
        return pace * (1 - self.share) * self._all


class Console:
    """Prints results on standard output; progress, warnings and errors on standard error.

    Only a terminal gets a progress bar, one per command. As a context manager it also prints warnings, and exceptions
    of threads, as single lines.

    Args:
        json: standard output gets only one JSON object; text goes to standard error.
        verbose: also show messages of libraries and builders, and the time of each stage.
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
        self._warnings: Counter[str] = Counter()

    def __enter__(self) -> Console:
        if self._verbose:
            self._until_end.enter_context(_messages_to(self.line))
        self._until_end.enter_context(warnings.catch_warnings())
        warnings.showwarning = self._warning
        # By default Python shows a warning once per code line; two skipped images need two warnings.
        warnings.simplefilter("always", category=TrtdetWarning)
        self._until_end.callback(setattr, threading, "excepthook", threading.excepthook)
        threading.excepthook = lambda failure: self.warn(
            f"a thread failed: {failure.exc_type.__name__}: {failure.exc_value}"
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._finish_stage()
        self._close()
        for line, count in self._warnings.items():
            if count > 1:
                self.line(f"warning, {count} times: {line}")
        self._until_end.close()

    def expect(self, steps: Sequence[ExpectedStage]) -> None:
        """Uses one progress bar for all these stages."""
        self._expected, self._course = bool(steps), Course(steps, time.monotonic())

    def progress(self, stage: str, done: int, total: int) -> None:
        """Shows progress, see :data:`Progress`."""
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
        """Prints lines or a table, without control characters of what they quote; tables have styles in a terminal
        unless ``NO_COLOR`` is set.

        Raises:
            OutputClosed: nobody reads standard output any more.
            OutputError: standard output cannot be written.
        """
        self._close()  # The next progress call draws the bar again, below the text.
        if isinstance(text, str):
            text = "\n".join(map(printable, text.split("\n")))
        if self._json:
            self.line(str(text))
        else:
            # See https://no-color.org.
            styles = os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
            styles = styles and sys.stdout is not None and sys.stdout.isatty()
            _write(
                f"{text.text(styled=True) if styles and isinstance(text, (LabelledLines, Table, Tables)) else text}\n"
            )

    def give(self, result: Mapping[str, Any]) -> None:
        """Prints the command's JSON object if ``json`` is set, and flushes standard output.

        Raises:
            OutputClosed: nobody reads standard output any more.
            OutputError: standard output cannot be written.
        """
        _write(f"{json.dumps(result)}\n" if self._json else "", flush=True)

    def line(self, text: str) -> None:
        """Prints a line on standard error."""
        if sys.stderr is None:
            return
        with suppress(OSError):  # A full or closed standard error cannot be reported anywhere.
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=sys.stderr, flush=True)

    def warn(self, text: object) -> None:
        """Prints a warning, as a single line on standard error; at the end, how often an equal one followed."""
        line = one_line(text, _MESSAGE)
        self._warnings[line] += 1
        if self._warnings[line] == 1:
            self.line(f"warning: {line}")

    def fail(self, text: object) -> None:
        """Prints an error, as a single line on standard error."""
        self._close()
        self.line(f"trtdet: error: {one_line(text, _MESSAGE)}")

    def _draw(self, stage: str, done: int, total: int) -> None:
        from rich import console, progress

        measurable, seconds, remaining = self._expected or total != 1, self._course.left, ""
        if seconds is not None:
            minutes, rest = divmod(round(seconds), 60)
            hours, minutes = divmod(minutes, 60)
            remaining = f"about {f'{hours}:{minutes:02}' if hours else minutes}:{rest:02} left"
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
                left=remaining,
            )
        except (OSError, RuntimeError):
            # No thread can be started, or the terminal is gone: continue without a bar.
            self._close()
            self._terminal = False

    def _finish_stage(self) -> None:
        """Prints the stage's duration if verbose, and closes the bar if it belongs to this stage only."""
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


@contextmanager
def _messages_to(show: Callable[[str], None]) -> Iterator[None]:
    """Passes log messages of libraries and builders to ``show``, one line each."""
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
            # Otherwise the interpreter would write the buffer again at exit, and print a traceback.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            raise OutputClosed from None
        raise OutputError(f"standard output cannot be written: {error.strerror or error}", "free some space") from None
