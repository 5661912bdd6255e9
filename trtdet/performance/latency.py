"""How long a detector takes, and how many images a second it does: several detectors side by side in one run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtdet.config import Config
from trtdet.errors import ConfigError
from trtdet.performance.machine import Machine
from trtdet.performance.options import BenchOptions
from trtdet.performance.ratios import Ratio, Times, paired_ratio
from trtdet.performance.results import ROUNDS, Bench, Latency, Measured, Point, Throughput
from trtdet.performance.targets import Target, open_targets, source_of_pixels, unfair
from trtdet.performance.timing import PATIENCE, Clock, Slice, WarmUp, warm_up
from trtdet.progress import Progress, silent


def bench(
    paths: Sequence[Path],
    config: Config | None = None,
    options: BenchOptions = BenchOptions(),
    baseline: Path | None = None,
    progress: Progress = silent,
) -> Bench:
    """Measures bundles and models side by side.

    Args:
        paths: bundles or ONNX files.
        config: of the ONNX files; bundles carry their own.
        options: batches, streams, seconds.
        baseline: the target that the others are compared with, measured as well where it is not among them; the first
            by default.
        progress: called with a stage, steps done and steps in all.

    Raises:
        ConfigError: a target does not take a batch that is asked for; nothing was measured then.
        BundleError, ModelError, BackendError, DataError: a target cannot be opened or run, or an image not read.
    """
    everything = [*paths]
    if baseline is not None and baseline not in everything:
        everything.append(baseline)
    if not everything:
        raise ConfigError("nothing to measure", "give a bundle or a model")
    targets = open_targets(everything, config)
    reference = everything.index(baseline) if baseline is not None else 0
    return measure(targets, options, reference, progress)


def measure(
    targets: Sequence[Target],
    options: BenchOptions = BenchOptions(),
    baseline: int = 0,
    progress: Progress = silent,
    clock: Clock = time.perf_counter,
) -> Bench:
    """Measures targets that are open.

    Every measurement is cut into rounds. In each the targets take turns, the first of them changing from round to
    round, so that a clock that drops or a neighbour that wakes up hits all of them alike; the first run of a turn,
    whose caches the others have filled, is not counted. Before, each target runs for ``options.warm_up`` seconds and
    goes on until the medians of both halves of the last span of that length differ by at most 2 %, for three times as
    long at most (trtexec warms up for 200 ms without a check).

    Args:
        targets: the detectors to measure.
        options: how.
        baseline: index of the target that the others are compared with.
        progress: called with a stage, steps done and steps in all.
        clock: seconds; tells when a measurement has lasted long enough, and how long contexts side by side took.

    Raises:
        ConfigError: a target does not take a batch that is asked for; nothing was measured then.
        BackendError, DataError: a target fails, or an image cannot be read.
    """
    batches = options.batches or (_common_batch(targets),)
    for target in targets:
        for batch in batches:
            target.check_batch(batch)
    before = Machine.now(targets)
    rows = [_points(targets, batch, options, baseline, progress, clock) for batch in batches]
    results = tuple(
        Measured(
            target.name,
            target.file,
            target.runner.run_info,
            target.nms,
            ("included" if options.transfers else "excluded") if target.on_device else None,
            points,
            target.unlike(targets[baseline]),
            target.tf32,
        )
        for target, points in zip(targets, zip(*rows, strict=True), strict=True)
    )
    return Bench(
        results,
        targets[baseline].name if len(targets) > 1 else None,
        source_of_pixels(options.images, options.seed),
        options,
        before,
        Machine.now(targets),
        _warnings(results, before, options),
    )


def turns(targets: int, number: int) -> list[int]:
    """The order of the targets in a round: each begins as often as any other."""
    return [(index + number) % targets for index in range(targets)]


def _common_batch(targets: Sequence[Target]) -> int:
    fixed = {target.runner.batch for target in targets} - {None}
    return (fixed.pop() if len(fixed) == 1 else None) or 1


def _warnings(results: Sequence[Measured], before: Machine, options: BenchOptions) -> tuple[str, ...]:
    found = [*before.warnings]
    for result in results:
        restless = [str(point.batch) for point in result.points if not point.warm_up.settled]
        if restless and options.warm_up:
            found.append(
                f"'{result.name}' had not settled within {PATIENCE * options.warm_up:g} s of warm-up at batch "
                f"{', '.join(restless)}; give a longer --warm-up, or a quieter machine"
            )
        if result.nms_differs:
            found.append(unfair(result.name, result.nms_differs))
        if result.run_info.without_graphs:
            found.append(
                f"'{result.name}' ran without CUDA graphs, as {result.run_info.without_graphs}: where launching its "
                "kernels takes longer than running them the launch is what was timed, and ratios are drawn to 1"
            )
    if not options.warm_up:
        found.append("there was no warm-up; give --warm-up 1 for figures that last")
    return tuple(found)


class _Entrant:
    """A target at one batch size: its execution contexts, and the times that were measured so far."""

    def __init__(self, target: Target, images: NDArray[np.float32], options: BenchOptions, clock: Clock) -> None:
        self._target, self._images, self._options, self._clock = target, images, options, clock
        self._contexts = [target.runner.new_context(images)]
        self._slice = Slice(options.seconds / ROUNDS, -(-options.min_runs // ROUNDS), clock)
        # With the transfers, if at all, and then without, where there are any: the first mode is the result's latency.
        with_transfers = options.transfers or not target.on_device
        self._modes = (*([True] if with_transfers else []), *([False] if target.on_device else []))
        self._times: dict[bool, list[Times]] = {mode: [] for mode in self._modes}
        self._rates: dict[int, list[float]] = {streams: [] for streams in options.streams}
        self._warm_up = WarmUp(0, 0.0, False)

    def warm_up(self) -> None:
        transfers = self._options.transfers and self._target.on_device
        self._warm_up = warm_up(self._contexts[0], self._options.warm_up, transfers, self._clock)

    def time_latency(self) -> None:
        for mode in self._modes:
            self._times[mode].append(self._slice.times(self._contexts[0], mode))

    def add_contexts(self) -> None:
        more = max(self._options.streams) - len(self._contexts)
        self._contexts.extend(self._target.runner.new_context(self._images) for _ in range(more))

    def time_throughput(self, pool: ThreadPoolExecutor, streams: int) -> None:
        rate = self._slice.runs_per_second(pool, self._contexts[:streams], self._options.transfers)
        self._rates[streams].append(len(self._images) * rate)

    def point(self, baseline: _Entrant | None) -> Point:
        """What was measured; the ratios are None where there is no ``baseline``: this is it."""
        main, *others = self._modes
        apart = others[0] if others else None
        rates = []
        for streams, measured in self._rates.items():
            row = np.array(measured)
            ratio = None if baseline is None else paired_ratio(row, np.array(baseline._rates[streams]))
            rates.append(Throughput(streams, float(row.mean()), float(row.std(ddof=1)), ratio))
        return Point(
            len(self._images),
            Latency.of(np.concatenate(self._times[main])),
            None if apart is None else Latency.of(np.concatenate(self._times[apart])),
            self._against(baseline, main),
            None if apart is None else self._against(baseline, apart),
            self._warm_up,
            tuple(rates),
        )

    def _against(self, baseline: _Entrant | None, mode: bool) -> Ratio | None:
        if baseline is None:
            return None
        return paired_ratio(self._medians(mode), baseline._medians(mode))

    def _medians(self, mode: bool) -> Times:
        """The median by round; where transfers are not separated, of all runs."""
        return np.array([np.median(times) for times in self._times.get(mode) or self._times[self._modes[0]]])


def _points(
    targets: Sequence[Target], batch: int, options: BenchOptions, baseline: int, progress: Progress, clock: Clock
) -> list[Point]:
    """All targets at one batch size."""
    entrants = [
        _Entrant(target, target.pixels(batch, options.images, options.seed), options, clock) for target in targets
    ]
    stage = f"batch {batch}: warming up"
    for index, entrant in enumerate(entrants):
        progress(stage, index, len(entrants))
        entrant.warm_up()
    progress(stage, len(entrants), len(entrants))

    for number in range(ROUNDS):
        for index in turns(len(entrants), number):
            entrants[index].time_latency()
        progress(f"batch {batch}: latency", number + 1, ROUNDS)

    for entrant in entrants:
        entrant.add_contexts()
    for streams in options.streams:
        with ThreadPoolExecutor(streams, thread_name_prefix="trtdet-context") as pool:
            for number in range(ROUNDS):
                for index in turns(len(entrants), number):
                    entrants[index].time_throughput(pool, streams)
                progress(f"batch {batch}: throughput, {streams} streams", number + 1, ROUNDS)
    return [entrant.point(None if index == baseline else entrants[baseline]) for index, entrant in enumerate(entrants)]
