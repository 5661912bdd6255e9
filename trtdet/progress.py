"""What a person sees while something runs: on standard error, with an estimate, and nothing where nobody watches."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is."""


def silent(stage: str, done: int, total: int) -> None:
    """Nobody is told."""


class Console:
    """Progress bars and messages on standard error.

    A terminal gets a bar with an estimate; a file or a pipe gets a line every five seconds of work. Used as a context
    manager, it also shows warnings as single lines.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._stage = ""
        self._started = self._said = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._show = warnings.showwarning

    def __enter__(self) -> Console:
        warnings.showwarning = self._warning
        # A warning counts once a place by default; two skipped images are two facts.
        warnings.simplefilter("always", category=_own_warning())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        warnings.showwarning = self._show

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

    def line(self, text: str) -> None:
        """Prints one line on standard error."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def _draw(self, stage: str, done: int, total: int) -> None:
        from rich import console, progress

        if self._bar is None:
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
                console=console.Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(stage, total=None if total == 1 else total)
        self._bar.update(self._task, completed=done)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None
        self._stage = ""

    def _warning(self, message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, _own_warning()):
            self.line(f"warning: {message}")


def _own_warning() -> type[Warning]:
    from trtdet.errors import TrtdetWarning

    return TrtdetWarning
