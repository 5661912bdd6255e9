"""What a measurement side by side gives: latencies, rates, their ratios, and the tables of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trtdet.backends.base import RunInfo
from trtdet.performance.machine import Machine, circumstances
from trtdet.performance.options import BenchOptions
from trtdet.performance.ratios import CONFIDENCE, Ratio, Times
from trtdet.performance.timing import WarmUp
from trtdet.tables import Cell, Column, Table, Tables

ROUNDS = 20
"""A measurement is cut into so many slices, between which the targets take turns."""


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
class Throughput:
    """Images a second.

    Attributes:
        streams: execution contexts that ran side by side.
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
        warm_up: the runs before the measurement.
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
        file: the engine or the model.
        run_info: the device and the library that ran it.
        nms: the mode of suppression.
        transfers: ``included`` or ``excluded`` in ``latency_ms`` and the throughput; None where there are none.
        points: for each batch size.
        nms_differs: how the suppression in the times differs from the baseline's, in words; empty where it does not.
        tf32: it has float32 convolutions, which may run in TF32.
    """

    name: str
    file: str
    run_info: RunInfo
    nms: str
    transfers: str | None
    points: tuple[Point, ...]
    nms_differs: str = ""
    tf32: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "file": self.file,
            "ran_on": str(self.run_info),
            "nms": self.nms,
            "nms_differs": self.nms_differs,
            "tf32": self.tf32,
            "transfers": self.transfers,
            "points": [point.as_dict() for point in self.points],
        }


@dataclass(frozen=True)
class Bench:
    """What :func:`trtdet.bench` measured.

    Attributes:
        targets: the results, in the order given.
        baseline: name of the target that the ratios refer to; None where there is only one target.
        images: the source of the images, in words.
        options: how it was measured.
        before, after: the machine.
        warnings: to read before the figures are believed, one sentence each.
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

    def table(self) -> Tables:
        """Latencies, then throughputs with the circumstances of both as notes."""
        return Tables((self._latencies(), self._throughputs()))

    def _latencies(self) -> Table:
        apart = any(point.compute_ms for _, point in self._points())
        excluded = {target.transfers for target in self.targets} == {"excluded"}
        figures = ("mean", "stddev", "p50", "p95", "p99")
        columns: list[Column | str] = ["target", "batch", *(Column(name, ".3f") for name in figures), "runs"]
        columns += [Column("p50 without transfers", ".3f")] if apart else []
        rows: list[Sequence[Cell]] = []
        for target, point in self._points():
            latency = point.latency_ms
            row: list[Cell] = [target.name, point.batch, *(getattr(latency, name) for name in figures), latency.runs]
            row += [point.compute_ms.p50 if point.compute_ms else None] if apart else []
            rows.append((*row, *self._ratio(point.ratio, target)))
        title = f"Latency of one run, ms{' without transfers' if excluded else ''}"
        return Table((*columns, *self._compared()), rows, title)

    def _throughputs(self) -> Table:
        columns = ("target", "batch", "streams", Column("images/s", ".1f"), Column("stddev", ".1f"))
        rows: list[Sequence[Cell]] = [
            (
                target.name,
                point.batch,
                rate.streams,
                rate.images_per_second,
                rate.stddev,
                *self._ratio(rate.ratio, target),
            )
            for target, point in self._points()
            for rate in point.throughput
        ]
        notes = []
        for target in self.targets:
            extra = "; suppression on the host comes on top" if target.nms == "host" else ""
            extra += "; its float32 convolutions may run in TF32 (--no-tf32)" if target.tf32 else ""
            notes.append(f"{target.name}: {target.file} on {target.run_info}, NMS {target.nms}{extra}")
        notes.append(f"{ROUNDS} rounds in turn; images: {self.images}")
        notes += circumstances(self.before, self.after)
        return Table((*columns, *self._compared()), rows, "Throughput", notes)

    def _points(self) -> Iterator[tuple[Measured, Point]]:
        for target in self.targets:
            for point in target.points:
                yield target, point

    def _compared(self) -> tuple[Column, ...]:
        return (Column(f"of {self.baseline} ({CONFIDENCE:.0%} interval)", align="right"),) if self.baseline else ()

    def _ratio(self, ratio: Ratio | None, target: Measured) -> tuple[str, ...]:
        if not self.baseline:
            return ()
        return (f"{ratio}; {target.nms_differs}" if ratio and target.nms_differs else str(ratio or 1),)
