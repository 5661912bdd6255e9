"""What a person sees of a command: its results, its progress with an estimate, its warnings and errors."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from trtdet.errors import OutputError, TrtdetWarning, one_line

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the steps done and the steps in all; a total of 1 stands for an unknown length."""

_MESSAGE = 4000
"""Characters that a warning or an error may have: a message that quotes a user's file stays readable."""


class OutputClosed(Exception):
    """Whoever read standard output has closed it, as ``head`` does: there is nobody left to print for."""


def silent(stage: str, done: int, total: int) -> None:
    """A ``Progress`` that shows nothing."""


class Console:
    """The results of a command on standard output; its progress, warnings and errors on standard error.

    A terminal gets a progress bar with an estimate; a file or a pipe gets a line every five seconds of work. Used as a
    context manager, it also shows warnings, and exceptions of threads, as single lines.

    Args:
        json: standard output gets one JSON object and nothing else; text goes to standard error.
    """

    def __init__(self, json: bool = False) -> None:
        self._json = json
        self._bar: Any = None
        self._task: Any = None
        self._stage = ""
        self._started = self._said = time.monotonic()
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._show = warnings.showwarning
        self._thread_hook = threading.excepthook

    def __enter__(self) -> Console:
        warnings.showwarning = self._warning
        # A warning counts once a place by default; two skipped images are two facts.
        warnings.simplefilter("always", category=TrtdetWarning)
        threading.excepthook = self._thread_failed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        warnings.showwarning = self._show
        threading.excepthook = self._thread_hook

    def progress(self, stage: str, done: int, total: int) -> None:
        """Shows that ``done`` of ``total`` steps of a stage are over; a total of 1 stands for an unknown length."""
        now = time.monotonic()
        if stage != self._stage:
            self._close()
            self._stage, self._started, self._said = stage, now, now
        if self._terminal:
            self._draw(stage, done, total)
        elif now - self._said > 5 and 0 < done < total:
            left = (now - self._started) * (total - done) / done
            self._said = now
            self.line(f"{stage}: {done} of {total}, about {left:.0f} s left")
        if done >= total:
            self._close()

    def say(self, text: object) -> None:
        """Prints a result: a line, or a table.

        Raises:
            OutputClosed: nobody reads standard output any more.
            OutputError: standard output cannot be written.
        """
        if self._json:
            self.line(str(text))
        else:
            _write(f"{text}\n")

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

        try:
            if self._bar is None:
                bar = progress.Progress(
                    progress.TextColumn("{task.description}", markup=False),
                    progress.BarColumn(),
                    progress.MofNCompleteColumn(),
                    progress.TimeRemainingColumn(),
                    console=console.Console(stderr=True),
                    transient=True,
                )
                bar.start()
                self._bar, self._task = bar, bar.add_task(stage, total=None if total == 1 else total)
            self._bar.update(self._task, completed=done)
        except (OSError, RuntimeError):
            # No thread can be started, or the terminal is gone: the work itself goes on.
            self._close()
            self._terminal = False

    def _close(self) -> None:
        bar, self._bar, self._task, self._stage = self._bar, None, None, ""
        if bar is not None:
            with suppress(OSError, RuntimeError):
                bar.stop()

    def _warning(self, message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, TrtdetWarning):
            self.warn(message)

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        self.warn(f"a thread failed: {failure.exc_type.__name__}: {failure.exc_value}")


def _write(text: str, flush: bool = False) -> None:
    if sys.stdout is None:
        return
    try:
        print(text, end="", flush=flush)
    except OSError as error:
        _discard_output()
        if isinstance(error, BrokenPipeError):
            raise OutputClosed from None
        raise OutputError(f"standard output cannot be written: {error.strerror or error}", "free some space") from None


def _discard_output() -> None:
    """Drops what the buffer holds, which the interpreter would try to write again at its end, with a traceback."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
