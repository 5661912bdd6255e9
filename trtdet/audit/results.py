"""Result of an audit: its tables, its JSON file, and measured times in place of estimates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from trtdet.audit.findings import KINDS, Advice, Finding, Kind
from trtdet.audit.layers import Layer
from trtdet.errors import BundleError, ConfigError
from trtdet.files.documents import DocumentError, parse_document
from trtdet.tables import Column, Table, Tables

_SCHEMA = 2
_SHOWN, _WIDTH = 3, 50
"""Findings of each kind in a short report, and characters of a layer's name in it."""

Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Departure:
    """A convolution whose precision in the engine is not the planned one."""

    name: str
    planned: str
    got: str
    reason: str

    def __str__(self) -> str:
        return f"'{self.name}' was planned as {self.planned} and runs in {self.got}"


@dataclass(frozen=True)
class Audit:
    """Number of convolutions by precision as built, and what makes INT8 slower or less exact.

    ``warnings`` has a sentence for every departure, among others. ``findings`` and ``advice`` have the largest first.
    ``ms`` are measured milliseconds of all layers; None if shares are of estimated memory traffic.
    """

    int8: int
    fp16: int
    fp32: int
    layers: tuple[Layer, ...]
    departures: tuple[Departure, ...]
    warnings: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    advice: tuple[Advice, ...] = ()
    ms: float | None = None
    fp8: int = 0

    def counts(self) -> dict[str, int]:
        """Number of convolutions by precision, with FP8 counted as INT8 as in a plan."""
        return {"int8": self.int8 + self.fp8, "fp16": self.fp16, "fp32": self.fp32}

    @property
    def bytes(self) -> int:
        """Bytes that all layers read and write per run, estimated from dimensions, types and formats."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def cost(self) -> str:
        """What the findings' shares are a part of, in words."""
        return "estimated memory traffic" if self.ms is None else "measured time"

    @property
    def summary(self) -> str:
        """One line with the number of convolutions by precision."""
        return (
            f"as built: {self.int8} convs in INT8, {f'{self.fp8} in FP8, ' * bool(self.fp8)}{self.fp16} in FP16, "
            f"{self.fp32} in FP32; {len(self.departures)} not as planned; {len(self.layers)} layers in all"
        )

    def timed(self, times: Mapping[str, float]) -> Audit:
        """This audit with shares of measured time; ``times`` are a profiler's milliseconds by layer name. Raises
        ConfigError if the times belong to another engine."""
        layers = {layer.name: layer.bytes for layer in self.layers}
        working = [name for name, moved in layers.items() if moved]
        untimed = [name for name in working if name not in times]
        # Generated layers have the same names in many engines, so a few common names prove nothing.
        if 2 * len(untimed) > len(working):
            raise ConfigError(
                f"the measured times are of another engine: {len(untimed)} of this one's {len(working)} layers have "
                f"none, such as '{untimed[0]}'",
                "profile the bundle's own engine",
            )
        warnings = (f"{len(untimed)} layers have no measured time, such as '{untimed[0]}'",) if untimed else ()
        total = sum(ms for name, ms in times.items() if name in layers)
        findings = [finding.timed(times, layers, total) for finding in self.findings]
        return replace(
            self,
            findings=tuple(sorted(findings, key=lambda finding: -(finding.ms or 0.0))),
            warnings=(*self.warnings, *warnings),
            ms=total,
        )

    def report(self, everything: bool = False) -> Tables:
        """The departures, the costliest three findings of each kind or all of them, and the advice."""
        parts: list[Table | str] = []
        if self.departures:
            departures = [(item.name, item.planned, item.got, item.reason) for item in self.departures]
            parts.append(Table(("convolution", "planned", "got", "reason"), departures, "not as planned:"))
        departed = {str(departure) for departure in self.departures}
        parts.extend(warning for warning in self.warnings if warning not in departed)
        parts.append(
            self._obstacles(everything)
            if self.findings
            else "nothing gets in the way of INT8 that the builder's list of layers shows"
        )
        if self.advice:
            rows = [(advice.bytes / 1e6, advice.share, advice.option, advice.text) for advice in self.advice]
            headings = (Column("MB less", ".1f"), Column("share", ".0%"), "option", "reason")
            title = "what to try, by what it would save (not additive; estimated memory traffic):"
            parts.append(Table(headings, rows, title))
        return Tables(parts)

    def _obstacles(self, everything: bool) -> Table:
        def row(findings: Sequence[Finding], text: str) -> tuple[float, float, str]:
            """Milliseconds if measured, else megabytes; the share; the text."""
            cost = (finding.bytes / 1e6 if self.ms is None else finding.ms or 0.0 for finding in findings)
            return sum(cost), sum(finding.share for finding in findings), text

        groups: dict[Kind, list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault(finding.kind, []).append(finding)
        rows = []
        for kind, group in sorted(groups.items(), key=lambda group: -sum(finding.share for finding in group[1])):
            count = "" if kind == "suppression" else f" ({len(group)})"
            rows.append(row(group, f"{KINDS[kind]}{count}"))
            shown = group if everything else group[:_SHOWN]
            for finding in shown:
                name = finding.layer  # generated kernels have long names with a number at the end
                short = name if len(name) <= _WIDTH else f"{name[: _WIDTH - 15]}...{name[-12:]}"
                rows.append(row([finding], f"  {short}: {finding.cause}"))
            if len(shown) < len(group):
                rows.append(row(group[len(shown) :], f"  {len(group) - len(shown)} more; --all shows them"))
        total = f"{self.bytes / 1e6:.1f} MB" if self.ms is None else f"{self.ms:.3f} ms"
        cost = Column("MB", ".2f") if self.ms is None else Column("ms", ".4f")
        title = f"what gets in the way, by {self.cost} ({total} in all):"
        return Table((cost, Column("share", ".1%"), Column("finding", align="left")), rows, title)

    def as_dict(self) -> dict[str, Any]:
        layers = [
            {**asdict(layer), "input": layer.input, "weights": layer.weights, "output": layer.output}
            for layer in self.layers
        ]
        return {**asdict(self), "layers": layers, "cost": self.cost, "bytes": self.bytes}

    def to_json(self) -> str:
        """Text of ``audit.json``."""
        return json.dumps({"schema": _SCHEMA, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def load(path: Path) -> Audit:
        """Reads ``audit.json``. Raises BundleError if the file cannot be read or has another schema."""
        try:
            data = path.read_bytes()
            if parse_document(data, _adapter(_Header), strict=True)["schema"] != _SCHEMA:
                raise BundleError(
                    f"'{path}' was written by another version of trtdet", "remove the bundle and build it again"
                )
            loaded: Audit = parse_document(data, _adapter(Audit), strict=True)
            return loaded
        except (OSError, DocumentError) as error:
            raise BundleError(f"'{path}' cannot be read ({error})", "build the bundle again") from None


def load_times(path: Path) -> dict[str, float]:
    """Milliseconds per run by layer name, from a JSON object of these or a file of ``trtexec --exportProfile``. Raises
    ConfigError if the file is missing or has another form."""
    try:
        data = path.read_bytes()
        if data.lstrip().startswith(b"["):
            # The first entry gives the number of runs and has no name.
            rows = parse_document(data, _adapter(list[_Counted | _Timed]), strict=True)
            return {row["name"]: row["averageMs"] for row in rows if "name" in row}
        times: dict[str, float] = parse_document(data, _adapter(dict[str, Milliseconds]), strict=True)
        return times
    except (OSError, DocumentError) as error:
        raise ConfigError(
            f"'{path}' has no times of layers ({error})",
            "give what 'trtexec --exportProfile' writes, or an object of milliseconds by layer name",
        ) from None


class _Header(TypedDict):
    schema: int


class _Counted(TypedDict):
    """The entry of trtexec's profile with the number of runs."""

    count: int


class _Timed(TypedDict):
    """The entry of trtexec's profile for one layer."""

    name: str
    averageMs: Milliseconds


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
