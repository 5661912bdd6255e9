"""Two runs against each other: what changed in precision, layers, traffic and score, and whether that is noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtdet.errors import ConfigError
from trtdet.quantization import PrecisionPlan
from trtdet.report.document import Grid, Missing, Part, Report, Section, Text
from trtdet.report.runs import Run, read_run
from trtdet.report.sections.fronts import variant_title
from trtdet.tables import Column, Table, Tables

_BUILT = "build each with 'trtdet build --keep-fp16 PLAN.json' and compare the bundles"
_PAIRED = "'trtdet compare A B --images DIR --annotations JSON' runs both on the same images"


@dataclass(frozen=True)
class Change:
    """A convolution that runs in another precision.

    Attributes:
        name: of the convolution.
        first, second: its precision; empty where the network has none of the name.
        first_why, second_why: the plans' reasons.
    """

    name: str
    first: str
    second: str
    first_why: str
    second_why: str


@dataclass(frozen=True)
class Figure:
    """A figure of both.

    Attributes:
        name: such as ``layers``.
        first, second: None where a run does not know it.
        unit: empty for counts.
        basis: how it is known.
    """

    name: str
    first: float | None
    second: float | None
    unit: str
    basis: str

    @property
    def change(self) -> float | None:
        """The second less the first."""
        return None if self.first is None or self.second is None else self.second - self.first


@dataclass(frozen=True)
class RunDifference:
    """What :func:`compare_runs` found.

    Attributes:
        first, second: names of the runs.
        changes: convolutions in another precision, in the order of the network.
        same: convolutions in the same precision.
        figures: of both.
        scores: sentences on accuracy: what is known, and whether the difference is noise.
        variants: of two sweeps, the difference of each variant that both have, with whether it is noise.
        missing: what is not known.
    """

    first: str
    second: str
    changes: tuple[Change, ...]
    same: int
    figures: tuple[Figure, ...]
    scores: tuple[str, ...]
    variants: Table | None
    missing: tuple[Missing, ...]

    @property
    def verdict(self) -> tuple[str, ...]:
        """First what changed, then the score, one sentence each."""
        told = []
        if self.same or self.changes:
            total = self.same + len(self.changes)
            told.append(f"{len(self.changes)} of {total} convolutions run in another precision.")
        for figure in self.figures:
            if figure.change:
                told.append(
                    f"{figure.name}: {_written(figure.first, figure.unit)} -> {_written(figure.second, figure.unit)} "
                    f"({figure.basis})."
                )
        return (*told, *self.scores) or ("The runs have nothing in common that could be compared.",)

    def table(self) -> Tables:
        """For a terminal."""
        parts: list[Table | str] = []
        if self.figures:
            parts.append(self._figures())
        if self.changes:
            parts.append(self._changes())
        elif self.same:
            parts.append(f"all {self.same} convolutions run in the same precision")
        if self.variants is not None:
            parts.append(self.variants)
        return Tables([*parts, *self.scores, *(f"not known: {one}" for one in self.missing)])

    def report(self) -> Report:
        """As a page."""
        parts: list[Part] = [Grid(self._figures())] if self.figures else []
        if self.variants is not None:
            parts.append(Grid(self.variants))
        sections = [Section("Figures", tuple(parts), brief=True)] if parts else []
        if self.changes:
            sections.append(Section("Precision", (Grid(self._changes(), (self.first, self.second)),), brief=True))
        elif self.same:
            said = f"All {self.same} convolutions run in the same precision."
            sections.append(Section("Precision", (Text((said,)),), brief=True))
        title = f"{self.first} against {self.second}"
        return Report(title, self.verdict, tuple(sections), self.missing)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "first": self.first,
            "second": self.second,
            "changes": [vars(change) for change in self.changes],
            "same": self.same,
            "figures": [{**vars(figure), "change": figure.change} for figure in self.figures],
            "scores": list(self.scores),
            "variants": self.variants.as_dicts() if self.variants is not None else [],
            "missing": [{"what": one.what, "how": one.how} for one in self.missing],
        }

    def _figures(self) -> Table:
        columns = (
            "figure",
            Column(self.first, align="right"),
            Column(self.second, align="right"),
            "change",
            "known by",
        )
        rows = [
            (
                *(figure.name, _written(figure.first, figure.unit), _written(figure.second, figure.unit)),
                _written(figure.change, figure.unit, "+"),
                figure.basis,
            )
            for figure in self.figures
        ]
        return Table(columns, rows)

    def _changes(self) -> Table:
        columns = (
            *(Column("convolution", align="left"), self.first, self.second),
            *(Column(f"why in {self.first}", align="left"), Column(f"why in {self.second}", align="left")),
        )
        rows = [
            (change.name, change.first.upper(), change.second.upper(), change.first_why, change.second_why)
            for change in self.changes
        ]
        return Table(columns, rows, f"{len(rows)} convolutions in another precision, {self.same} in the same")


def compare_runs(first: Path, second: Path) -> RunDifference:
    """Compares two bundles, two plans (a bundle has one), or two sweeps.

    Nothing is run; scores are those that the runs kept.

    Raises:
        ConfigError: a run is none of these, or they are of different kinds.
        TrtdetError: of the kind of its reader.
    """
    runs = read_run(first), read_run(second)
    names = runs[0].name, runs[1].name
    if names[0] == names[1]:
        names = str(first), str(second)
    if all(run.rows is not None for run in runs):
        return _sweeps(names, runs)
    for run in runs:
        if run.kind not in ("bundle", "plan"):
            raise ConfigError(
                f"'{run.path}' cannot be compared: give two bundles, plans (plan.json), or two folders of sweeps"
            )
    plans = [run.plan for run in runs]
    assert plans[0] is not None and plans[1] is not None
    changes, same = _changed(plans[0], plans[1])
    scores, missing = _scores(names, runs)
    return RunDifference(names[0], names[1], changes, same, _figures(runs), scores, None, missing)


def _changed(first: PrecisionPlan, second: PrecisionPlan) -> tuple[tuple[Change, ...], int]:
    found, same = [], 0
    for name in dict.fromkeys((*first.entries, *second.entries)):
        own, other = first.entries.get(name), second.entries.get(name)
        precisions = tuple("" if entry is None else _precision(entry.precision, entry.format) for entry in (own, other))
        if precisions[0] == precisions[1]:
            same += 1
        else:
            reasons = ("" if entry is None else entry.reason for entry in (own, other))
            found.append(Change(name, *precisions, *reasons))
    return tuple(found), same


def _precision(precision: str, kind: str) -> str:
    return kind if precision == "int8" else precision


def _figures(runs: Sequence[Run]) -> tuple[Figure, ...]:
    plans = [run.plan for run in runs]
    audits = [run.audit for run in runs]
    estimates = [(run.worth or {}).get("estimate") for run in runs]
    built = [audit for audit in audits if audit is not None]
    known: list[tuple[str, Sequence[float | None], str, str]] = []
    for kind in ("int8", "fp16", "fp32"):
        counts = [None if plan is None else plan.counts()[kind] for plan in plans]
        known.append((f"convolutions in {kind.upper()}", counts, "", "plan"))
    if len(built) == len(runs):
        known += [
            ("layers", [len(audit.layers) for audit in built], "", "engine"),
            ("memory traffic of a run", [audit.bytes / 1e6 for audit in built], "MB", "estimated from layers"),
            ("findings of the audit", [len(audit.findings) for audit in built], "", "engine"),
        ]
    known.append(("engine file", [_engine_mb(run) for run in runs], "MB", "size of the file"))
    if len({(one["gpu"], one["batch"]) for one in estimates if one}) == 1 and all(estimates):
        said = next(f"estimated for {one['gpu']}, batch {one['batch']}" for one in estimates if one)
        known.append(("time of a run", [one["int8"]["ms"] for one in estimates if one], "ms", said))
    return tuple(
        Figure(name, values[0], values[1], unit, basis) for name, values, unit, basis in known if set(values) != {None}
    )


def _engine_mb(run: Run) -> float | None:
    engine = run.bundle.engine if run.bundle is not None else None
    return None if engine is None else engine.stat().st_size / 1e6


def _scores(names: Sequence[str], runs: Sequence[Run]) -> tuple[tuple[str, ...], tuple[Missing, ...]]:
    """What the bundles keep of their scores: each against the same model without INT8."""
    kept = [(run.worth or {}).get("comparison") for run in runs]
    how = _PAIRED if all(run.bundle is not None for run in runs) else _BUILT
    missing = (Missing("whether the difference of their scores is noise", how),)
    told = [
        f"{name}: mAP {100 * (one['map'] + one['difference']):.2f}, {100 * one['difference']:+.2f} "
        f"({100 * one['low']:+.2f} .. {100 * one['high']:+.2f}, {one['images']} images) against "
        f"{(run.worth or {})['against'].upper()}: {one['verdict']}."
        for name, run, one in zip(names, runs, kept, strict=True)
        if one is not None
    ]
    return tuple(told), missing


def _sweeps(names: tuple[str, str], runs: Sequence[Run]) -> RunDifference:
    """Variants that both sweeps have. Each sweep has an interval of its own against FP32; the difference of two is
    called noise where it is within both intervals taken as independent, which is cautious for the same images."""
    first, second = ({row["variant"]: row for row in run.rows or ()} for run in runs)
    both = [name for name in first if name in second]
    if not both:
        raise ConfigError(f"'{names[0]}' and '{names[1]}' have no variant in common: {len(first)} and {len(second)}")
    rows, beyond = [], 0
    for name in both:
        one, other = first[name], second[name]
        apart = other["difference"] - one["difference"]
        width = math.hypot(_half(one), _half(other))
        beyond += abs(apart) > width
        verdict = "more than noise" if abs(apart) > width else "noise" if apart else "equal"
        costs = [run[key] for key in ("engine_mb", "latency_ms") for run in (one, other)]
        rows.append(
            (variant_title(one), 100 * one["map"], 100 * other["map"], 100 * apart, 100 * width, verdict, *costs)
        )
    columns: tuple[Column | str, ...] = (
        *(Column("variant", align="left"), Column(f"mAP in {names[0]}", ".2f"), Column(f"mAP in {names[1]}", ".2f")),
        *(Column("difference", "+.2f"), Column("90 %, either side", ".2f"), "so it is"),
        *(Column(f"engine MB in {name}", ".1f") for name in names),
        *(Column(f"latency ms in {name}", ".2f") for name in names),
    )
    table = Table(columns, rows, f"{len(both)} variants in both; differences are of the loss against FP32")
    said = [f"{beyond} of {len(both)} variants differ by more than noise."]
    for name, own, others in ((names[0], first, second), (names[1], second, first)):
        alone = [variant_title(row) for key, row in own.items() if key not in others]
        if alone:
            said.append(f"In {name} alone: {'; '.join(alone)}.")
    return RunDifference(*names, (), 0, (), tuple(said), table.filled(), ())


def _half(row: Mapping[str, Any]) -> float:
    """Half of a row's interval; 0 of FP32, which is compared with itself."""
    return 0.0 if row["low"] is None else (row["high"] - row["low"]) / 2


def _written(value: float | None, unit: str, sign: str = "") -> str:
    if value is None:
        return ""
    return format(value, f"{sign}.3f") + f" {unit}" if unit else format(int(value), f"{sign}d")
