"""Runs that are timed: until a target is warm, one after the other, and side by side in threads."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtdet.backends.base import ExecutionContext

Times = NDArray[np.float64]

Clock = Callable[[], float]

PATIENCE = 3
"""A warm-up is given up after so many times the seconds that were asked for."""

_STEADY = 0.02
"""A target is warm when the medians of both halves of the last seconds of its warm-up differ by no more."""

_FEWEST = 10
"""Two halves of fewer runs in all say nothing."""


@dataclass(frozen=True)
class WarmUp:
    """The runs before the measurement: how many, for how many seconds, and whether their times had settled."""

    runs: int
    seconds: float
    settled: bool


@dataclass(frozen=True)
class Slice:
    """How long a target runs when it is its turn.

    Attributes:
        seconds: at least so long.
        runs: at least so many.
        clock: seconds.
    """

    seconds: float
    runs: int
    clock: Clock

    def times(self, context: ExecutionContext, transfers: bool) -> Times:
        """Milliseconds of runs one after the other, after one run that is not counted.

        With transfers each finds the device at rest, as a request does; without, it is the work that is timed and not
        its launch, see :meth:`trtdet.backends.base.ExecutionContext.compute`.
        """
        timed = context.run if transfers else context.compute
        context.run(transfers)
        times, end = array("d"), self.clock() + self.seconds
        while len(times) < self.runs or self.clock() < end:
            times.append(timed())
        return np.asarray(times)

    def runs_per_second(self, pool: ThreadPoolExecutor, contexts: Sequence[ExecutionContext], transfers: bool) -> float:
        """Runs a second of contexts that start together, each in a thread of its own.

        Each context counts by its own last run, and their rates are added: one that ends early leaves no gap in the
        sum. The first run of each is not counted.
        """
        gate, stop = threading.Barrier(len(contexts)), threading.Event()

        def work(context: ExecutionContext) -> float:
            try:
                context.run(transfers)
                gate.wait()
                started, runs, passed = self.clock(), 0, 0.0
                while (runs < self.runs or passed < self.seconds) and not stop.is_set():
                    context.run(transfers)
                    runs += 1
                    passed = self.clock() - started
            except BaseException:
                gate.abort()
                stop.set()
                raise
            return runs / passed if passed else 0.0

        try:
            futures: list[Future[float]] = [pool.submit(work, context) for context in contexts]
            failed = [error for error in (future.exception() for future in futures) if error is not None]
        except BaseException:  # Ctrl-C while starting or awaiting them: each context ends with its present run
            gate.abort()
            stop.set()
            raise
        for error in failed:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return sum(future.result() for future in futures)


def warm_up(context: ExecutionContext, seconds: float, transfers: bool, clock: Clock) -> WarmUp:
    """Runs until the times of the last ``seconds`` are steady, or for ``PATIENCE`` times as long."""
    times, stamps = array("d"), array("d")
    started, due = clock(), seconds
    while True:
        times.append(context.run(transfers))
        now = clock() - started
        stamps.append(now)
        if now < due:
            continue
        recent = np.asarray(times)[np.asarray(stamps) > now - seconds]
        settled = len(recent) >= _FEWEST
        if settled:
            first, second = np.median(recent[: len(recent) // 2]), np.median(recent[len(recent) // 2 :])
            settled = bool(abs(second - first) <= _STEADY * first)
        if settled or now >= PATIENCE * seconds:
            return WarmUp(len(times), now, settled)
        due = now + seconds / 4
