"""How long a detector takes, and how many images a second it does: several detectors side by side in one run."""

from __future__ import annotations

import os
import platform
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.backends.base import ExecutionContext, RunInfo, Runner
from trtdet.config import Config, InputConfig
from trtdet.data import ImageStream, evenly, find_images
from trtdet.data.images import preprocess
from trtdet.errors import ConfigError
from trtdet.progress import Progress, silent
from trtdet.runtime.detector import Detector

ROUNDS = 20
"""A measurement is cut into so many slices, between which the targets take turns."""

CONFIDENCE = 0.9
"""How sure an interval is to hold the true ratio."""

_STEADY = 0.02
"""A target is warm when the medians of both halves of the last ``warm_up`` seconds differ by no more."""

_PATIENCE = 3
"""It is given up waiting for that after so many times ``warm_up``."""

_FEWEST = 10
"""Two halves of fewer runs in all say nothing."""

Clock = Callable[[], float]
Times = NDArray[np.float64]


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, and for how long.

    Attributes:
        batches: images at once; empty for the fixed batch that all targets have, else 1.
        streams: for the throughput, how many contexts run side by side.
        seconds: at least so long each target is measured at each point, above 0.
        warm_up: at least so long each target runs before that, in seconds, 0 or more.
        min_runs: at least so many runs each point has, 2 or more.
        transfers: also time the copies to the device and back, and run them for the throughput.
        images: a folder or list of images to run; None for noise.
        seed: of the noise.

    Raises:
        ConfigError: a value is out of range.
    """

    batches: tuple[int, ...] = ()
    streams: tuple[int, ...] = (1,)
    seconds: float = 3.0
    warm_up: float = 1.0
    min_runs: int = 50
    transfers: bool = True
    images: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values in (("--batch", self.batches), ("--streams", self.streams)):
            if any(value < 1 for value in values) or len(set(values)) != len(values):
                raise ConfigError(f"{name} takes distinct numbers from 1 up, got {' '.join(map(str, values))}")
        if not self.streams:
            raise ConfigError("--streams takes at least one number, got none")
        if not self.seconds > 0:
            raise ConfigError(f"--seconds must be above 0, got {self.seconds:g}")
        if not self.warm_up >= 0:
            raise ConfigError(f"--warm-up must be 0 or more seconds, got {self.warm_up:g}")
        if self.min_runs < 2:
            raise ConfigError(f"--min-runs must be at least 2, got {self.min_runs}")


@dataclass(frozen=True, eq=False)
class Target:
    """Something to time.

    Attributes:
        name: as it is called in the results.
        runner: runs it.
        input: its pre-processing.
        file: what is run.
        nms: what suppresses; with ``host`` the suppression comes after the run and is in none of the times.
    """

    name: str
    runner: Runner
    input: InputConfig
    file: str
    nms: str

    @property
    def on_device(self) -> bool:
        """Whether images are copied to a device and results back."""
        return self.runner.on_device

    def check_batch(self, batch: int) -> None:
        """Raises ConfigError where the target does not take a batch of this size."""
        fixed, largest = self.runner.batch, self.runner.largest_batch
        if fixed is not None and batch != fixed:
            raise ConfigError(
                f"'{self.name}' takes batches of exactly {fixed}, got --batch {batch}; give --batch {fixed}, or build "
                "it from a model with a dynamic batch"
            )
        if largest is not None and batch > largest:
            raise ConfigError(
                f"'{self.name}' takes at most {largest} images at once, got --batch {batch}; build it with a larger "
                "--batch MIN:OPT:MAX"
            )

    def pixels(self, count: int, images: Path | None, seed: int) -> NDArray[np.float32]:
        """A batch for it.

        Args:
            count: images in the batch.
            images: a folder or list of images, evenly spaced and repeated where there are too few; None for noise of
                8-bit pixels.
            seed: of the noise.

        Returns:
            float32 (count, 3, H, W), pre-processed.

        Raises:
            DataError: an image cannot be read.
        """
        if images is None:
            generator = np.random.default_rng(seed)
            noise = generator.integers(0, 256, (count, *self.input.size, 3), dtype=np.uint8)
            return np.stack([preprocess(one, self.input)[0] for one in noise])
        stream = ImageStream(evenly(find_images(images), count), self.input, on_bad="raise")
        found = np.concatenate([batch.images for batch in stream])
        return np.ascontiguousarray(found[np.arange(count) % len(found)])


def open_targets(paths: Sequence[Path], config: Config | None) -> tuple[Target, ...]:
    """Opens bundles, and models by the configuration; one that is named twice is opened twice.

    Raises:
        ConfigError: a model without a configuration, or a configuration and no model.
        BundleError, ModelError, BackendError: one cannot be opened or run.
    """
    if config is not None and all(path.is_dir() for path in paths):
        raise ConfigError("--config is for models, bundles carry their own configuration; leave --config out")
    opened: list[Target] = []
    for path in paths:
        detector = Detector.open(path, None if path.is_dir() else config)
        again = sum(one.name.partition(" #")[0] == str(path) for one in opened)
        name = f"{path} #{again + 1}" if again else str(path)
        opened.append(Target(name, detector.runner, detector.input, str(detector.file), detector.where))
    return tuple(opened)


# results


@dataclass(frozen=True)
class Latency:
    """Milliseconds of single runs, one after the other.

    Attributes:
        mean, stddev: over the runs; the standard deviation is that of a sample (n - 1).
        p50, p95, p99: percentiles, linear between the two nearest runs.
        shortest, longest: of all.
        runs: how many.
    """

    mean: float
    stddev: float
    p50: float
    p95: float
    p99: float
    shortest: float
    longest: float
    runs: int

    @staticmethod
    def of(milliseconds: Times) -> Latency:
        """Sums up at least two runs."""
        p50, p95, p99 = np.percentile(milliseconds, [50, 95, 99])
        return Latency(
            float(milliseconds.mean()),
            float(milliseconds.std(ddof=1)),
            float(p50),
            float(p95),
            float(p99),
            float(milliseconds.min()),
            float(milliseconds.max()),
            len(milliseconds),
        )


@dataclass(frozen=True)
class Ratio:
    """A figure as a multiple of the baseline's, and the interval of it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} .. {self.high:.3f})"


@dataclass(frozen=True)
class WarmUp:
    """What was run before the measurement: how many times, for how many seconds, and whether the times had settled."""

    runs: int
    seconds: float
    settled: bool


@dataclass(frozen=True)
class Throughput:
    """Images a second.

    Attributes:
        streams: contexts that ran side by side.
        images_per_second: mean over the rounds.
        stddev: over the rounds.
        ratio: of the baseline's, above 1 is more; None for the baseline itself.
    """

    streams: int
    images_per_second: float
    stddev: float
    ratio: Ratio | None


@dataclass(frozen=True)
class Point:
    """One target at one batch size.

    Attributes:
        batch: images at once.
        latency_ms: with the transfers, unless they were left out or there are none.
        compute_ms: without the transfers; None where ``latency_ms`` is that already, or nothing is transferred.
        ratio: of the medians of ``latency_ms`` round by round, below 1 is faster; None for the baseline itself.
        compute_ratio: likewise of ``compute_ms``.
        warm_up: what went before.
        throughput: for each number of streams.
    """

    batch: int
    latency_ms: Latency
    compute_ms: Latency | None
    ratio: Ratio | None
    compute_ratio: Ratio | None
    warm_up: WarmUp
    throughput: tuple[Throughput, ...]

    @property
    def transfers_ms(self) -> float | None:
        """What the transfers add to the median, in milliseconds; None where that was not measured."""
        return None if self.compute_ms is None else self.latency_ms.p50 - self.compute_ms.p50

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "transfers_ms": self.transfers_ms}


@dataclass(frozen=True)
class Measured:
    """One target's results.

    Attributes:
        name: of the target.
        file: what ran.
        run_info: where it ran.
        nms: what suppressed.
        transfers: ``included`` or ``excluded`` in ``latency_ms`` and the throughput; None where there are none.
        points: for each batch size.
    """

    name: str
    file: str
    run_info: RunInfo
    nms: str
    transfers: str | None
    points: tuple[Point, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "file": self.file,
            "ran_on": str(self.run_info),
            "nms": self.nms,
            "transfers": self.transfers,
            "points": [point.as_dict() for point in self.points],
        }


@dataclass(frozen=True)
class Machine:
    """The state of the machine before or after.

    Attributes:
        cpu: its model, as the system calls it.
        cores: how many this process may use.
        cores_in_all: how many there are.
        load: mean number of running processes over 1, 5 and 15 minutes.
        clocks: the device's clocks, temperature and what holds them back; None where they are not known.
    """

    cpu: str
    cores: int
    cores_in_all: int
    load: tuple[float, float, float]
    clocks: dict[str, Any] | None

    @staticmethod
    def now(targets: Sequence[Target]) -> Machine:
        """Looks at it, and at the device that the targets run on."""
        cores = len(os.sched_getaffinity(0))
        return Machine(_cpu(), cores, os.cpu_count() or cores, os.getloadavg(), _clocks(targets))

    @property
    def warnings(self) -> tuple[str, ...]:
        """One where others kept half of the cores or more busy over the last minute."""
        if self.load[0] < self.cores_in_all / 2:
            return ()
        return (
            f"the machine was busy before it began: load {self.load[0]:.2f} on {self.cores_in_all} cores; the times "
            "are longer and scatter more than on an idle one",
        )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _clocks(targets: Sequence[Target]) -> dict[str, Any] | None:
    for target in targets:
        if target.on_device:
            found = target.runner.clocks()
            return None if found is None else asdict(found)
    return None


@dataclass(frozen=True)
class Bench:
    """What :func:`bench` measured.

    Attributes:
        targets: the results, in the order given.
        baseline: name of the target that the ratios refer to; None where there is but one.
        images: what was run, in words.
        options: how it was measured.
        before, after: the machine.
        warnings: what to know before the figures are believed, one sentence each.
    """

    targets: tuple[Measured, ...]
    baseline: str | None
    images: str
    options: BenchOptions
    before: Machine
    after: Machine
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; with one target, ``latency_ms`` and ``throughput`` of its first point at the top."""
        options = {**asdict(self.options), "images": None if self.options.images is None else str(self.options.images)}
        rest = {
            "targets": [target.as_dict() for target in self.targets],
            "baseline": self.baseline,
            "confidence": CONFIDENCE,
            "rounds": ROUNDS,
            "images": self.images,
            "options": options,
            "machine": {"before": asdict(self.before), "after": asdict(self.after)},
            "warnings": list(self.warnings),
        }
        if len(self.targets) > 1:
            return rest
        first = self.targets[0].points[0]
        return {
            "latency_ms": asdict(first.latency_ms),
            "throughput": first.throughput[0].images_per_second,
            "batch": first.batch,
            "streams": first.throughput[0].streams,
            **rest,
        }

    def table(self) -> str:
        """Markdown: latencies, throughputs, and under what circumstances."""
        compared = f" of {self.baseline} ({CONFIDENCE:.0%} interval) |" if self.baseline else ""
        apart = any(point.compute_ms for target in self.targets for point in target.points)
        what = {target.transfers for target in self.targets}
        lines = [f"Latency of one run, ms{' without transfers' if what == {'excluded'} else ''}", ""]
        lines += [
            "| target | batch | mean | stddev | p50 | p95 | p99 | runs |"
            + (" p50 without transfers |" if apart else "")
            + compared,
            "|---|" + "---:|" * (7 + apart + bool(compared)),
        ]
        for target in self.targets:
            for point in target.points:
                one = point.latency_ms
                figures = "".join(f" {value:.3f} |" for value in (one.mean, one.stddev, one.p50, one.p95, one.p99))
                line = f"| {target.name} | {point.batch} |{figures} {one.runs} |"
                if apart:
                    line += f" {point.compute_ms.p50:.3f} |" if point.compute_ms else " |"
                if compared:
                    line += f" {point.ratio} |" if point.ratio else " 1 |"
                lines.append(line)
        lines += ["", "Throughput", "", "| target | batch | streams | images/s | stddev |" + compared]
        lines.append("|---|" + "---:|" * (4 + bool(compared)))
        for target in self.targets:
            for point in target.points:
                for rate in point.throughput:
                    line = f"| {target.name} | {point.batch} | {rate.streams} | {rate.images_per_second:.1f} |"
                    line += f" {rate.stddev:.1f} |"
                    if compared:
                        line += f" {rate.ratio} |" if rate.ratio else " 1 |"
                    lines.append(line)
        lines.append("")
        for target in self.targets:
            apart_from = "; suppression on the host comes on top" if target.nms == "host" else ""
            lines.append(f"{target.name}: {target.file} on {target.run_info}, NMS {target.nms}{apart_from}")
        lines.append(f"{ROUNDS} rounds in turn; images: {self.images}")
        lines += circumstances(self.before, self.after)
        return "\n".join(lines)


def circumstances(before: Machine, after: Machine) -> list[str]:
    """The machine before and after, in two lines."""
    known = before.clocks or after.clocks
    return [
        f"{before.cpu}, {before.cores} of {before.cores_in_all} cores, load {before.load[0]:.2f} before and "
        f"{after.load[0]:.2f} after",
        f"clocks: {_in_words(before.clocks)} before, {_in_words(after.clocks)} after" if known else "clocks not known",
    ]


def pixels_in_words(images: Path | None, seed: int) -> str:
    """What :meth:`Target.pixels` takes."""
    return f"noise of 8-bit pixels, seed {seed}" if images is None else f"from '{images}'"


def _in_words(clocks: dict[str, Any] | None) -> str:
    return "not known" if clocks is None else ", ".join(f"{key} {value}" for key, value in clocks.items())


# measuring


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
        options: what is measured.
        baseline: what the others are compared with, measured as well where it is not among them; the first by default.
        progress: called with a stage, steps done and steps in all.

    Raises:
        ConfigError: a target does not take a batch that is asked for; nothing was measured then.
        BundleError, ModelError, BackendError, DataError: a target cannot be opened or run, or an image not read.
    """
    everything = [*paths]
    if baseline is not None and baseline not in everything:
        everything.append(baseline)
    if not everything:
        raise ConfigError("nothing to measure; give a bundle or a model")
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

    Every measurement is cut into rounds. In each the targets take turns, the one that begins changing from round to
    round, so that a clock that drops or a neighbour that wakes up hits all of them alike; the first run of a turn,
    whose caches the others have filled, is not counted. Before, each target runs for ``options.warm_up`` seconds and
    goes on until the medians of both halves of the last such span differ by at most 2 %, for three times as long at
    most (trtexec warms up for 200 ms, with no such check).

    Args:
        targets: what to measure.
        options: how.
        baseline: index of the target that the others are compared with.
        progress: called with a stage, steps done and steps in all.
        clock: seconds; says when a measurement has lasted long enough, and how long contexts side by side took.

    Raises:
        ConfigError: a target does not take a batch that is asked for; nothing was measured then.
        BackendError, DataError: a target fails, or an image cannot be read.
    """
    batches = options.batches or (_common_batch(targets),)
    for target in targets:
        for batch in batches:
            target.check_batch(batch)
    before = Machine.now(targets)
    found: list[list[Point]] = [[] for _ in targets]
    for batch in batches:
        images = [target.pixels(batch, options.images, options.seed) for target in targets]
        for points, point in zip(found, _measure(targets, images, options, baseline, progress, clock), strict=True):
            points.append(point)
    results = tuple(
        Measured(
            target.name,
            target.file,
            target.runner.run_info,
            target.nms,
            ("included" if options.transfers else "excluded") if target.on_device else None,
            tuple(points),
        )
        for target, points in zip(targets, found, strict=True)
    )
    return Bench(
        results,
        targets[baseline].name if len(targets) > 1 else None,
        pixels_in_words(options.images, options.seed),
        options,
        before,
        Machine.now(targets),
        _warnings(results, before, options),
    )


def _common_batch(targets: Sequence[Target]) -> int:
    fixed = {target.runner.batch for target in targets} - {None}
    return (fixed.pop() if len(fixed) == 1 else None) or 1


def _warnings(results: Sequence[Measured], before: Machine, options: BenchOptions) -> tuple[str, ...]:
    found = [*before.warnings]
    for one in results:
        restless = [str(point.batch) for point in one.points if not point.warm_up.settled]
        if restless and options.warm_up:
            found.append(
                f"'{one.name}' had not settled within {_PATIENCE * options.warm_up:g} s of warm-up at batch "
                f"{', '.join(restless)}; give a longer --warm-up, or a quieter machine"
            )
    if not options.warm_up:
        found.append("there was no warm-up; give --warm-up 1 for figures that last")
    return tuple(found)


def _measure(
    targets: Sequence[Target],
    images: Sequence[NDArray[np.float32]],
    options: BenchOptions,
    baseline: int,
    progress: Progress,
    clock: Clock,
) -> list[Point]:
    """All targets at one batch size."""
    batch = len(images[0])
    contexts = [[target.runner.new_context(one)] for target, one in zip(targets, images, strict=True)]
    stage = f"batch {batch}: warming up"
    warm = []
    for index, (own, target) in enumerate(zip(contexts, targets, strict=True)):
        progress(stage, index, len(targets))
        warm.append(_warm_up(own[0], options.warm_up, options.transfers and target.on_device, clock))
    progress(stage, len(targets), len(targets))

    modes = [
        (() if target.on_device and not options.transfers else (True,)) + ((False,) if target.on_device else ())
        for target in targets
    ]
    seconds, least = options.seconds / ROUNDS, -(-options.min_runs // ROUNDS)
    times: list[dict[bool, list[Times]]] = [{mode: [] for mode in own} for own in modes]
    for number in range(ROUNDS):
        for index in turns(len(targets), number):
            for mode in modes[index]:
                times[index][mode].append(_slice(contexts[index][0], mode, seconds, least, clock))
        progress(f"batch {batch}: latency", number + 1, ROUNDS)

    for own, target, one in zip(contexts, targets, images, strict=True):
        own.extend(target.runner.new_context(one) for _ in range(max(options.streams) - 1))
    rates: list[list[Times]] = [[] for _ in targets]
    for streams in options.streams:
        rounds = np.zeros((len(targets), ROUNDS))
        with ThreadPoolExecutor(streams, thread_name_prefix="trtdet-context") as pool:
            for number in range(ROUNDS):
                for index in turns(len(targets), number):
                    rounds[index, number] = batch * _side_by_side(
                        pool, contexts[index][:streams], options.transfers, seconds, least, clock
                    )
                progress(f"batch {batch}: throughput, {streams} streams", number + 1, ROUNDS)
        for kept, row in zip(rates, rounds, strict=True):
            kept.append(row)

    points = []
    for index in range(len(targets)):
        main, *rest = modes[index]
        alone = index == baseline

        def against(mode: bool, index: int = index, alone: bool = alone) -> Ratio | None:
            other = times[baseline].get(mode) or times[baseline][modes[baseline][0]]
            if alone:
                return None
            return paired_ratio(
                *(np.array([np.median(one) for one in rounds]) for rounds in (times[index][mode], other))
            )

        points.append(
            Point(
                batch,
                Latency.of(np.concatenate(times[index][main])),
                Latency.of(np.concatenate(times[index][rest[0]])) if rest else None,
                against(main),
                against(rest[0]) if rest else None,
                warm[index],
                tuple(
                    Throughput(
                        streams,
                        float(row.mean()),
                        float(row.std(ddof=1)),
                        None if alone else paired_ratio(row, other),
                    )
                    for streams, row, other in zip(options.streams, rates[index], rates[baseline], strict=True)
                ),
            )
        )
    return points


def turns(targets: int, number: int) -> list[int]:
    """The order of the targets in a round: each begins as often as any other."""
    return [(index + number) % targets for index in range(targets)]


def _warm_up(context: ExecutionContext, seconds: float, transfers: bool, clock: Clock) -> WarmUp:
    times, stamps = array("d"), array("d")
    started, due = clock(), seconds
    while True:
        times.append(context.run(transfers))
        now = clock() - started
        stamps.append(now)
        if now < due:
            continue
        recent = np.asarray(times)[np.asarray(stamps) > now - seconds]
        settled = len(recent) >= _FEWEST and is_steady(recent)
        if settled or now >= _PATIENCE * seconds:
            return WarmUp(len(times), now, settled)
        due = now + seconds / 4


def is_steady(times: Times) -> bool:
    """Whether the medians of both halves differ by no more than 2 %."""
    first, second = np.median(times[: len(times) // 2]), np.median(times[len(times) // 2 :])
    return bool(abs(second - first) <= _STEADY * first)


def _slice(context: ExecutionContext, transfers: bool, seconds: float, least: int, clock: Clock) -> Times:
    """Milliseconds of runs one after the other, for so long and so many at least, after one that is not counted."""
    context.run(transfers)
    times, end = array("d"), clock() + seconds
    while len(times) < least or clock() < end:
        times.append(context.run(transfers))
    return np.asarray(times)


def _side_by_side(
    pool: ThreadPoolExecutor,
    contexts: Sequence[ExecutionContext],
    transfers: bool,
    seconds: float,
    least: int,
    clock: Clock,
) -> float:
    """Runs a second of contexts that start together, each in a thread of its own.

    Each context counts by its own last run, and their rates are added: one that ends early leaves no gap in the sum.
    """
    gate, stop = threading.Barrier(len(contexts)), threading.Event()

    def work(context: ExecutionContext) -> float:
        try:
            context.run(transfers)
            gate.wait()
            started, runs, passed = clock(), 0, 0.0
            while (runs < least or passed < seconds) and not stop.is_set():
                context.run(transfers)
                runs += 1
                passed = clock() - started
        except BaseException:
            gate.abort()
            stop.set()
            raise
        return runs / passed if passed else 0.0

    try:
        futures: list[Future[float]] = [pool.submit(work, context) for context in contexts]
        failed = [error for error in (future.exception() for future in futures) if error is not None]
    except BaseException:  # Ctrl-C while starting them or waiting: the contexts end with the run that they are in
        gate.abort()
        stop.set()
        raise
    for error in failed:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return sum(future.result() for future in futures)


# ratios


def paired_ratio(first: Times, second: Times) -> Ratio:
    """The ratio of two targets' figures that were measured in the same rounds, with a 90 % interval.

    Each round gives a ratio, in which what hit both targets in that round falls out. Over the rounds it is the
    Hodges-Lehmann estimate of the logarithms, the median of all means of two, with Tukey's interval from the signed
    ranks (Hollander and Wolfe 1999, Nonparametric Statistical Methods, chapter 3): a round in which a neighbour hit one
    of the two moves neither far, and no shape of the scatter is assumed but symmetry.

    Args:
        first: (R,), a median time or a rate by round, above 0; at least 5 rounds.
        second: (R,), the baseline's.
    """
    logs = np.log(first / second)
    rows, columns = np.triu_indices(len(logs))
    means = np.sort((logs[rows] + logs[columns]) / 2)
    # How many of the 2^R choices of signs give each sum of positive ranks: the product of all (1 + x^rank).
    choices = np.ones(1)
    for rank in range(1, len(logs) + 1):
        choices = np.pad(choices, (0, rank)) + np.pad(choices, (rank, 0))
    beyond = int(np.searchsorted(np.cumsum(choices) / choices.sum(), (1 - CONFIDENCE) / 2, side="right"))
    value, low, high = np.exp([np.median(means), means[beyond - 1], means[-beyond]])
    return Ratio(float(value), float(low), float(high))
