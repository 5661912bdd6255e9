"""Compares two runs: precision, layers, memory traffic and score, and whether a score difference is noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtdet.errors import ConfigError
from trtdet.evaluation.comparison import each_score
from trtdet.evaluation.parts import Of
from trtdet.experiments.experiment import Variant
from trtdet.report.document import Grid, Missing, Report, Section
from trtdet.report.runs import Run, read_run
from trtdet.tables import Column, Table, Tables


@dataclass(frozen=True)
class Change:
    """A convolution that runs in another precision; its precision in both runs, empty where the network has no
    convolution of this name, and the plans' reasons."""

    name: str
    first: str
    second: str
    first_why: str
    second_why: str


@dataclass(frozen=True)
class Figure:
    """A figure of both runs; None where a run does not have it, and then ``change``, ``second - first``, is None too.
    ``unit`` is empty for counts, and ``basis`` is the source, such as ``engine``."""

    name: str
    first: float | None
    second: float | None
    unit: str
    basis: str
    change: float | None


@dataclass(frozen=True)
class RunDifference:
    """Result of :func:`compare_runs`; ``first`` and ``second`` are the names of the runs."""

    first: str
    second: str
    changes: tuple[Change, ...] = ()  # convolutions in another precision, in the order of the network
    same: int = 0  # number of convolutions in the same precision
    figures: tuple[Figure, ...] = ()
    scores: tuple[str, ...] = ()  # sentences on accuracy, and on whether the difference is noise
    variants: Table | None = None  # for two sweeps, the difference of each common variant, and whether it is noise
    missing: tuple[Missing, ...] = ()

    @property
    def verdict(self) -> tuple[str, ...]:
        """Sentences on the changes of precision, then on the score."""
        lines = []
        if self.changes:
            total = self.same + len(self.changes)
            lines.append(f"{len(self.changes)} of {total} convolutions run in another precision.")
        elif self.same:
            lines.append(f"All {self.same} convolutions run in the same precision.")
        return (*lines, *self.scores) or ("The runs have nothing in common that could be compared.",)

    def table(self) -> Tables:
        """Tables and sentences for a terminal."""
        return Tables([*self._tables().values(), *self.verdict, *(f"not known: {figure}" for figure in self.missing)])

    def report(self) -> Report:
        """The same as a report."""
        sections = [
            Section(
                title,
                (Grid(table, (self.first, self.second) if title == "Precision" else ()),),
                brief=True,
                folded=False,
            )
            for title, table in self._tables().items()
        ]
        return Report(f"{self.first} against {self.second}", self.verdict, tuple(sections), missing=self.missing)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "first": self.first,
            "second": self.second,
            "changes": [vars(change) for change in self.changes],
            "same": self.same,
            "figures": [vars(figure) for figure in self.figures],
            "scores": list(self.scores),
            "variants": self.variants.as_dicts() if self.variants is not None else [],
            "missing": [{"what": figure.what, "how": figure.how} for figure in self.missing],
        }

    def _tables(self) -> dict[str, Table]:
        """The tables that have rows, by heading."""
        tables = {}
        if self.figures:
            columns: tuple[Column | str, ...] = (
                *("figure", Column(self.first, align="right"), Column(self.second, align="right")),
                *("change", "known by"),
            )
            figures = []
            for figure in self.figures:
                cells = []
                for value, sign in ((figure.first, ""), (figure.second, ""), (figure.change, "+")):
                    number = value if figure.unit or value is None else int(value)
                    form = f"{sign}.3f" if figure.unit else f"{sign}d"
                    cells.append("" if number is None else f"{number:{form}} {figure.unit}".rstrip())
                figures.append((figure.name, *cells, figure.basis))
            tables["Figures"] = Table(columns, figures)
        if self.changes:
            columns = (
                *(Column("convolution", align="left"), self.first, self.second),
                *(Column(f"why in {self.first}", align="left"), Column(f"why in {self.second}", align="left")),
            )
            changes = [
                (change.name, change.first.upper(), change.second.upper(), change.first_why, change.second_why)
                for change in self.changes
            ]
            tables["Precision"] = Table(columns, changes)
        if self.variants is not None:
            tables["Variants"] = self.variants
        return tables


def compare_runs(first: Path, second: Path) -> RunDifference:
    """Compares two bundles or plans, or two sweeps, by their files; nothing is run. Raises ConfigError: the runs have
    no such files, or are of different kinds; TrtdetError: a file cannot be read."""
    runs = read_run(first), read_run(second)
    names = runs[0].name, runs[1].name
    if names[0] == names[1]:
        names = str(first), str(second)
    if all(run.experiment is not None and run.experiment.kind == "sweep" for run in runs):
        return _sweeps(names, runs)
    for run in runs:
        if run.plan is None:
            raise ConfigError(
                f"'{run.path}' cannot be compared: give two bundles, plans (plan.json), or two folders of sweeps"
            )
    entries = [run.plan.entries for run in runs if run.plan is not None]
    changes = []
    every = dict.fromkeys((*entries[0], *entries[1]))
    for name in every:
        pair = [plan.get(name) for plan in entries]
        precisions = ["" if entry is None else entry.number_format for entry in pair]
        if precisions[0] != precisions[1]:
            changes.append(Change(name, *precisions, *("" if entry is None else entry.reason for entry in pair)))
    # Each bundle stores its score against the same model without INT8.
    scores = []
    for name, run in zip(names, runs, strict=True):
        worth = run.worth or {}
        score = worth.get("comparison")
        if score is not None:
            scores.append(
                f"{name}: mAP {100 * (score['map'] + score['difference']):.2f}, {100 * score['difference']:+.2f} "
                f"({100 * score['low']:+.2f} .. {100 * score['high']:+.2f}, {score['images']} images) against "
                f"{worth['against'].upper()}: {score['verdict']}."
            )
    how = "build each with 'trtdet build --keep-fp16 PLAN.json' and compare the bundles"
    if all(run.bundle is not None for run in runs):
        how = "'trtdet compare A B --images DIR --annotations JSON' runs both on the same images"
    return RunDifference(
        *names,
        changes=tuple(changes),
        same=len(every) - len(changes),
        figures=_figures(runs),
        scores=tuple(scores),
        missing=(Missing("whether the difference of their scores is noise", how),),
    )


def _figures(runs: Sequence[Run]) -> tuple[Figure, ...]:
    plans = [run.plan for run in runs]
    audits = [run.audit for run in runs if run.audit is not None]
    engines = [run.bundle.engine if run.bundle is not None else None for run in runs]
    estimates = [estimate for run in runs if (estimate := (run.worth or {}).get("estimate"))]
    rows: list[tuple[str, Sequence[float | None], str, str]] = []
    for kind in ("int8", "fp16", "fp32"):
        counts = [None if plan is None else plan.counts()[kind] for plan in plans]
        rows.append((f"convolutions in {kind.upper()}", counts, "", "plan"))
    if len(audits) == len(runs):
        rows += [
            ("layers", [len(audit.layers) for audit in audits], "", "engine"),
            ("memory traffic of a run", [audit.bytes / 1e6 for audit in audits], "MB", "estimated from layers"),
            ("findings of the audit", [len(audit.findings) for audit in audits], "", "engine"),
        ]
    sizes = [None if engine is None else engine.stat().st_size / 1e6 for engine in engines]
    rows.append(("engine file", sizes, "MB", "size of the file"))
    bases = {f"estimated for {estimate['gpu']}, batch {estimate['batch']}" for estimate in estimates}
    if len(estimates) == len(runs) and len(bases) == 1:
        rows.append(("time of a run", [estimate["int8"]["ms"] for estimate in estimates], "ms", bases.pop()))
    figures = []
    for name, (first, second), unit, basis in rows:
        change = None if first is None or second is None else second - first
        if (first, second) != (None, None):
            figures.append(Figure(name, first=first, second=second, unit=unit, basis=basis, change=change))
    return tuple(figures)


def _changes(first: Variant, second: Variant) -> dict[Of, tuple[float, float]]:
    """What the difference to FP32 changes by, and the half of its interval, of boxes and the parts that both have."""
    scores = each_score(first), each_score(second)
    changes = {}
    for of in scores[0]:
        if of in scores[1]:
            pair = scores[0][of], scores[1][of]
            # FP32 has no interval: its reference is FP32 itself.
            width = math.hypot(*(((score["high"] or 0.0) - (score["low"] or 0.0)) / 2 for score in pair))
            changes[of] = pair[1]["difference"] - pair[0]["difference"], width
    return changes


def _sweeps(names: tuple[str, str], runs: Sequence[Run]) -> RunDifference:
    """Compares the variants that both sweeps have.

    Each sweep has its own interval against FP32. A difference within the combined interval counts as noise. The
    intervals are combined as independent ones, which is cautious for equal images.
    """
    first, second = ({row.name: row for row in run.experiment.variants} for run in runs if run.experiment is not None)
    common = [name for name in first if name in second]
    if not common:
        raise ConfigError(f"'{names[0]}' and '{names[1]}' have no variant in common; compare sweeps of equal options")
    rows, significant, parts = [], 0, list(dict.fromkeys(of for name in common for of in first[name].parts))
    for name in common:
        pair = first[name], second[name]
        changes = _changes(*pair)
        more = any(abs(change) > width for change, width in changes.values())
        significant += more
        verdict = "more than noise" if more else "noise" if any(change for change, _ in changes.values()) else "equal"
        (difference, width), *_ = changes.values()
        beside = (changes.get(of) for of in parts)
        spreads = ("" if each is None else f"{100 * each[0]:+.2f} (± {100 * each[1]:.2f})" for each in beside)
        costs = [*(row.engine and row.engine / 1e6 for row in pair), *(row.latency_ms for row in pair)]
        scores = (100 * (row.map or 0) for row in pair)
        rows.append((pair[0].title, *scores, 100 * difference, 100 * width, *spreads, verdict, *costs))
    columns: tuple[Column | str, ...] = (
        *(Column("variant", align="left"), Column(f"mAP in {names[0]}", ".2f"), Column(f"mAP in {names[1]}", ".2f")),
        *(Column("difference", "+.2f"), Column("90 %, either side", ".2f")),
        *(Column(of.replace("_", " "), align="right") for of in parts),
        "verdict",
        *(Column(f"engine MB in {name}", ".1f") for name in names),
        *(Column(f"latency ms in {name}", ".2f") for name in names),
    )
    table = Table(columns, rows, f"{len(common)} variants in both; differences are of the loss against FP32")
    lines = [f"{significant} of {len(common)} variants differ by more than noise."]
    for name, variants, other in ((names[0], first, second), (names[1], second, first)):
        titles = [row.title for key, row in variants.items() if key not in other]
        if titles:
            lines.append(f"In {name} alone: {'; '.join(titles)}.")
    return RunDifference(*names, scores=tuple(lines), variants=table.filled())
