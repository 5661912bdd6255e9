"""Timed runs: until a target is warm, one after the other, and side by side in threads."""

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
"""A warm-up lasts at most this multiple of its requested seconds."""

_STEADY = 0.02
"""A target is warm when the medians of both halves of the last seconds differ by at most this share."""

_FEWEST = 10
"""A target with fewer runs in both halves together is not warm yet."""


@dataclass(frozen=True)
class WarmUp:
    """The runs before a measurement: number, seconds, and whether their times had settled."""

    runs: int
    seconds: float
    settled: bool


@dataclass(frozen=True)
class Slice:
    """Length of a turn of a target: at least ``seconds`` and at least ``runs``; ``clock`` returns seconds."""

    seconds: float
    runs: int
    clock: Clock

    def times(self, context: ExecutionContext, transfers: bool) -> Times:
        """Milliseconds of runs one after the other, after one run that is not counted.

        With transfers, each run starts on an idle device, as a request does. Without, only the work is timed, not its
        launch, see :meth:`trtdet.backends.base.ExecutionContext.compute`.
        """
        timed = context.run if transfers else context.compute
        context.run(transfers)
        times, end = array("d"), self.clock() + self.seconds
        while len(times) < self.runs or self.clock() < end:
            times.append(timed())
        return np.asarray(times)

    def runs_per_second(self, pool: ThreadPoolExecutor, contexts: Sequence[ExecutionContext], transfers: bool) -> float:
        """Runs per second of contexts that start together, each in its own thread.

        The rates of the contexts are added; each counts up to its own last run, so one that ends early leaves no gap in
        the sum. The first run of each is not counted.
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
        except BaseException:  # Ctrl-C: each context ends after its present run
            gate.abort()
            stop.set()
            raise
        for error in failed:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return sum(future.result() for future in futures)


def warm_up(context: ExecutionContext, seconds: float, transfers: bool, clock: Clock) -> WarmUp:
    """Runs until the times of the last ``seconds`` are steady, for at most ``PATIENCE`` times as long."""
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
