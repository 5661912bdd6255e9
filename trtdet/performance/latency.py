"""Measures latency and throughput of several detectors side by side in one run."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtdet.backends.base import ExecutionContext
from trtdet.config import Config
from trtdet.errors import ConfigError
from trtdet.performance.options import BenchOptions
from trtdet.performance.results import (
    ROUNDS,
    Bench,
    Latency,
    Measured,
    Point,
    Ratio,
    Throughput,
    Times,
    WarmUp,
    paired_ratio,
)
from trtdet.performance.targets import Machine, Target, open_targets, source_of_pixels, unfair
from trtdet.progress import Progress, silent

Clock = Callable[[], float]

PATIENCE = 3
"""A warm-up lasts at most this multiple of its requested seconds."""

_STEADY = 0.02
"""A target is warm when the medians of both halves of the last seconds differ by at most this share."""

_FEWEST = 10
"""A target with fewer runs in both halves together is not warm yet."""


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


def bench(
    paths: Sequence[Path | str],
    config: Config | None = None,
    options: BenchOptions = BenchOptions(),
    baseline: Path | str | None = None,
    progress: Progress = silent,
) -> Bench:
    """Measures bundles and ONNX models side by side.

    Args:
        config: of the ONNX models; bundles carry their own.
        baseline: target to compare the others with, by default the first; it is measured even if not in ``paths``.

    Raises:
        ConfigError: a target does not take a requested batch; nothing was measured then.
        BundleError, ModelError, BackendError, DataError: a target cannot be opened or run, or an image cannot be read.
    """
    everything = [Path(path) for path in paths]
    reference = None if baseline is None else Path(baseline)
    if reference is not None and reference not in everything:
        everything.append(reference)
    if not everything:
        raise ConfigError("nothing to measure", "give a bundle or a model")
    targets = open_targets(everything, config)
    return measure(targets, options, 0 if reference is None else everything.index(reference), progress=progress)


def measure(
    targets: Sequence[Target],
    options: BenchOptions = BenchOptions(),
    baseline: int = 0,
    progress: Progress = silent,
    clock: Clock = time.perf_counter,
) -> Bench:
    """Measures targets that are open; ``baseline`` is the index of the target that the others are compared with.

    Every measurement is cut into rounds, in which the targets take turns. The target that starts changes from round to
    round, so that clock changes and other processes affect all alike. The first run of a turn is not counted, because
    the other targets have filled the caches. Before the rounds, each target warms up for ``options.warm_up`` seconds.
    It continues until the medians of both halves of the last such span differ by at most 2 %, for three times as long
    at most (trtexec warms up for 200 ms without a check). ``clock`` returns seconds; it ends measurements and times
    contexts side by side. Raises ConfigError, before anything is measured, if a target does not take a requested batch;
    BackendError or DataError if a target fails or an image cannot be read.
    """
    fixed = {target.runner.batch for target in targets if target.runner.batch is not None}
    batches = options.batches or (fixed.pop() if len(fixed) == 1 else 1,)
    for target in targets:
        for batch in batches:
            target.check_batch(batch)
    before = Machine.now(targets)
    rows = [_points(targets, batch, options, baseline=baseline, progress=progress, clock=clock) for batch in batches]
    results = tuple(
        Measured(
            name=target.name,
            file=target.file,
            run_info=target.runner.run_info,
            nms=target.nms,
            transfers=("included" if options.transfers else "excluded") if target.runner.on_device else None,
            points=points,
            nms_differs=target.unlike(targets[baseline]),
            tf32=target.tf32,
        )
        for target, points in zip(targets, zip(*rows, strict=True), strict=True)
    )
    return Bench(
        targets=results,
        baseline=targets[baseline].name if len(targets) > 1 else None,
        images=source_of_pixels(options.images, options.seed),
        options=options,
        before=before,
        after=Machine.now(targets),
        warnings=_warnings(results, before, options),
    )


def _warnings(results: Sequence[Measured], before: Machine, options: BenchOptions) -> tuple[str, ...]:
    warnings = [*before.warnings]
    for result in results:
        restless = [str(point.batch) for point in result.points if not point.warm_up.settled]
        if restless and options.warm_up:
            warnings.append(
                f"'{result.name}' had not settled within {PATIENCE * options.warm_up:g} s of warm-up at batch "
                f"{', '.join(restless)}; give a longer --warm-up, or a quieter machine"
            )
        if result.nms_differs:
            warnings.append(unfair(result.name, result.nms_differs))
        if result.run_info.without_graphs:
            warnings.append(
                f"'{result.name}' ran without CUDA graphs, as {result.run_info.without_graphs}: where launching its "
                "kernels takes longer than running them the launch is what was timed, and ratios are drawn to 1"
            )
    if not options.warm_up:
        warnings.append("there was no warm-up; give --warm-up 1 for figures that last")
    return tuple(warnings)


class _Entrant:
    """A target at one batch size: its execution contexts and the times so far."""

    def __init__(self, target: Target, batch: int, options: BenchOptions, clock: Clock) -> None:
        self.target, self.batch = target, batch
        self.images = target.pixels(batch, options.images, options.seed)
        self.contexts = [target.runner.new_context(self.images)]
        self.slice = Slice(options.seconds / ROUNDS, -(-options.min_runs // ROUNDS), clock)
        # With transfers first, then without; the first mode is the latency of the result.
        with_transfers = options.transfers or not target.runner.on_device
        modes = (*([True] if with_transfers else []), *([False] if target.runner.on_device else []))
        self.times: dict[bool, list[Times]] = {mode: [] for mode in modes}
        self.rates: dict[int, list[float]] = {streams: [] for streams in options.streams}
        self.warm_up = WarmUp(0, 0.0, False)

    def point(self, baseline: _Entrant | None) -> Point:
        """The measured times and rates; ``baseline`` is None for the baseline itself, which gets no ratios."""
        latencies: list[tuple[Latency, Ratio | None]] = []
        for mode, times in self.times.items():
            ratio = None
            if baseline is not None:
                # A baseline without this mode has only one other.
                others = baseline.times.get(mode) or next(iter(baseline.times.values()))
                medians = (np.array([np.median(part) for part in parts]) for parts in (times, others))
                ratio = paired_ratio(*medians)
            latencies.append((Latency.of(np.concatenate(times)), ratio))
        throughput = []
        for streams, rates in self.rates.items():
            row = np.array(rates)
            ratio = None if baseline is None else paired_ratio(row, np.array(baseline.rates[streams]))
            throughput.append(Throughput(streams, float(row.mean()), stddev=float(row.std(ddof=1)), ratio=ratio))
        latency, ratio = latencies[0]
        compute, compute_ratio = latencies[1] if len(latencies) > 1 else (None, None)
        return Point(
            batch=self.batch,
            latency_ms=latency,
            compute_ms=compute,
            ratio=ratio,
            compute_ratio=compute_ratio,
            warm_up=self.warm_up,
            throughput=tuple(throughput),
        )


def _points(
    targets: Sequence[Target], batch: int, options: BenchOptions, baseline: int, progress: Progress, clock: Clock
) -> list[Point]:
    """Measures all targets at one batch size."""
    entrants = [_Entrant(target, batch, options, clock=clock) for target in targets]
    # Every target starts equally many rounds.
    orders = [[*entrants[first:], *entrants[:first]] for first in (number % len(targets) for number in range(ROUNDS))]
    stage = f"batch {batch}: warming up"
    for index, entrant in enumerate(entrants):
        progress(stage, index, len(entrants))
        transfers = options.transfers and entrant.target.runner.on_device
        entrant.warm_up = warm_up(entrant.contexts[0], options.warm_up, transfers, clock=clock)
    progress(stage, len(entrants), len(entrants))
    for number, order in enumerate(orders, 1):
        for entrant in order:
            for mode, times in entrant.times.items():
                times.append(entrant.slice.times(entrant.contexts[0], mode))
        progress(f"batch {batch}: latency", number, ROUNDS)
    for entrant in entrants:
        more = max(options.streams) - len(entrant.contexts)
        entrant.contexts.extend(entrant.target.runner.new_context(entrant.images) for _ in range(more))
    for streams in options.streams:
        with ThreadPoolExecutor(streams, thread_name_prefix="trtdet-context") as pool:
            for number, order in enumerate(orders, 1):
                for entrant in order:
                    rate = entrant.slice.runs_per_second(pool, entrant.contexts[:streams], options.transfers)
                    entrant.rates[streams].append(batch * rate)
                progress(f"batch {batch}: throughput, {streams} streams", number, ROUNDS)
    return [entrant.point(None if index == baseline else entrants[baseline]) for index, entrant in enumerate(entrants)]
