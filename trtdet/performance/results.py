"""Results of a measurement side by side: latencies, rates, their ratios, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.backends.base import RunInfo
from trtdet.performance.options import BenchOptions
from trtdet.performance.targets import Machine, circumstances
from trtdet.tables import Cell, Column, Table, Tables

Times = NDArray[np.float64]

CONFIDENCE = 0.9
"""Confidence level of the intervals."""

ROUNDS = 20
"""Number of rounds that a measurement is cut into; in each the targets take turns."""


@dataclass(frozen=True)
class Ratio:
    """A figure as a multiple of the baseline's, with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} .. {self.high:.3f})"


def paired_ratio(first: Times, second: Times) -> Ratio:
    """Ratio of the figures of two targets from the same rounds, with a 90 % interval.

    Each round gives a ratio, in which a disturbance of both targets cancels out. Over the rounds it is the
    Hodges-Lehmann estimate of the logarithms, the median of all means of two, with Tukey's interval from the signed
    ranks (Hollander and Wolfe 1999, Nonparametric Statistical Methods, chapter 3). A round that disturbed only
    one target moves neither ratio nor interval far. The only assumption about the scatter is symmetry.

    ``first`` and ``second`` (the baseline) are (R,): a median time or a rate by round, above 0, for 5 rounds or more.
    """
    logs = np.log(first / second)
    rows, columns = np.triu_indices(len(logs))
    means = np.sort((logs[rows] + logs[columns]) / 2)
    # Number of the 2^R choices of signs for each sum of positive ranks: the product of all (1 + x^rank).
    choices = np.ones(1)
    for rank in range(1, len(logs) + 1):
        choices = np.pad(choices, (0, rank)) + np.pad(choices, (rank, 0))
    beyond = int(np.searchsorted(np.cumsum(choices) / choices.sum(), (1 - CONFIDENCE) / 2, side="right"))
    value, low, high = np.exp([np.median(means), means[beyond - 1], means[-beyond]])
    return Ratio(float(value), float(low), float(high))


@dataclass(frozen=True)
class WarmUp:
    """The runs before a measurement: number, seconds, and whether their times had settled."""

    runs: int
    seconds: float
    settled: bool


@dataclass(frozen=True)
class Latency:
    """Milliseconds of single runs, one after the other.

    ``stddev`` is of a sample (n - 1); percentiles are linear between the two nearest runs.
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
        """Summary of at least two runs."""
        p50, p95, p99 = np.percentile(milliseconds, [50, 95, 99])
        return Latency(
            mean=float(milliseconds.mean()),
            stddev=float(milliseconds.std(ddof=1)),
            p50=float(p50),
            p95=float(p95),
            p99=float(p99),
            shortest=float(milliseconds.min()),
            longest=float(milliseconds.max()),
            runs=len(milliseconds),
        )


@dataclass(frozen=True)
class Throughput:
    """Images per second of ``streams`` execution contexts side by side, mean and scatter over the rounds.

    ``ratio`` is to the baseline's, above 1 is more; None for the baseline itself.
    """

    streams: int
    images_per_second: float
    stddev: float
    ratio: Ratio | None


@dataclass(frozen=True)
class Point:
    """One target at one batch size, the images per run.

    Attributes:
        latency_ms: with transfers, unless they are excluded or there are none.
        compute_ms: without transfers; None if ``latency_ms`` is that already, or nothing is transferred.
        ratio: of the medians of ``latency_ms`` by round, below 1 is faster; None for the baseline itself.
        compute_ratio: the same for ``compute_ms``.
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
        """Time of the transfers in the median, in milliseconds; None if not measured."""
        return None if self.compute_ms is None else self.latency_ms.p50 - self.compute_ms.p50


@dataclass(frozen=True)
class Measured:
    """Results of one target, an engine or a model in ``file``, with a point for each batch size.

    Attributes:
        transfers: ``included`` or ``excluded`` in ``latency_ms`` and the throughput; None if there are none.
        nms_differs: how the timed NMS differs from the baseline's, in words; empty if it does not.
        tf32: the target has float32 convolutions, which may run in TF32.
    """

    name: str
    file: str
    run_info: RunInfo
    nms: str
    transfers: str | None
    points: tuple[Point, ...]
    nms_differs: str = ""
    tf32: bool = False


@dataclass(frozen=True)
class Bench:
    """Result of :func:`trtdet.bench`, with the targets in the given order.

    ``baseline`` is the name of the target that the ratios refer to; None for a single target. ``images`` is the source
    of the images, in words; ``before`` and ``after`` are states of the machine. ``warnings`` are reasons to distrust
    the figures, one sentence each.
    """

    targets: tuple[Measured, ...]
    baseline: str | None
    images: str
    options: BenchOptions
    before: Machine
    after: Machine
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values; with one target, ``latency_ms`` and ``throughput`` of its first point are at the top."""
        options = {**asdict(self.options), "images": None if self.options.images is None else str(self.options.images)}
        rest = {
            "targets": [
                {
                    "name": target.name,
                    "file": target.file,
                    "ran_on": str(target.run_info),
                    "nms": target.nms,
                    "nms_differs": target.nms_differs,
                    "tf32": target.tf32,
                    "transfers": target.transfers,
                    "points": [{**asdict(point), "transfers_ms": point.transfers_ms} for point in target.points],
                }
                for target in self.targets
            ],
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

    def table(self) -> Tables:
        """Latencies, then throughputs with the circumstances of both as notes."""
        measured = [(target, point) for target in self.targets for point in target.points]
        compared = (Column(f"of {self.baseline} ({CONFIDENCE:.0%} interval)", align="right"),) if self.baseline else ()
        apart = any(point.compute_ms for _, point in measured)
        excluded = {target.transfers for target in self.targets} == {"excluded"}
        figures = ("mean", "stddev", "p50", "p95", "p99")
        columns: list[Column | str] = ["target", "batch", *(Column(name, ".3f") for name in figures), "runs"]
        columns += [Column("p50 without transfers", ".3f")] if apart else []
        latency_rows: list[Sequence[Cell]] = []
        rate_rows: list[Sequence[Cell]] = []
        for target, point in measured:
            latency = point.latency_ms
            row: list[Cell] = [target.name, point.batch, *(getattr(latency, name) for name in figures), latency.runs]
            row += [point.compute_ms.p50 if point.compute_ms else None] if apart else []
            latency_rows.append((*row, *self._ratio(point.ratio, target)))
            for rate in point.throughput:
                row = [target.name, point.batch, rate.streams, rate.images_per_second, rate.stddev]
                rate_rows.append((*row, *self._ratio(rate.ratio, target)))
        title = f"Latency of one run, ms{' without transfers' if excluded else ''}"
        latencies = Table((*columns, *compared), latency_rows, title)
        columns = ["target", "batch", "streams", Column("images/s", ".1f"), Column("stddev", ".1f")]
        notes = []
        for target in self.targets:
            extra = "; suppression on the host comes on top" if target.nms == "host" else ""
            extra += "; its float32 convolutions may run in TF32 (engine.tf32=false avoids it)" if target.tf32 else ""
            notes.append(f"{target.name}: {target.file} on {target.run_info}, NMS {target.nms}{extra}")
        notes.append(f"{ROUNDS} rounds in turn; images: {self.images}")
        notes += circumstances(self.before, self.after)
        throughputs = Table((*columns, *compared), rows=rate_rows, title="Throughput", notes=notes)
        return Tables((latencies, throughputs))

    def _ratio(self, ratio: Ratio | None, target: Measured) -> tuple[str, ...]:
        if not self.baseline:
            return ()
        return (f"{ratio}; {target.nms_differs}" if ratio and target.nms_differs else str(ratio or 1),)
