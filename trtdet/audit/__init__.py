"""What the builder made of the plan: the precision of each convolution, and what gets in the way of INT8."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from trtdet.audit.advice import Advice, advise
from trtdet.audit.findings import KINDS, Finding, find
from trtdet.audit.layers import BITS, Layer, Tensor, layers_of, parse_inspector, parse_layers
from trtdet.audit.traffic import Flow
from trtdet.config import SiluForm
from trtdet.errors import BackendError, BundleError, ConfigError
from trtdet.quantization import Entry, PrecisionPlan, lint

__all__ = [
    "Advice",
    "Audit",
    "Departure",
    "Finding",
    "Layer",
    "Tensor",
    "audit",
    "layers_of",
    "load_times",
    "parse_inspector",
    "parse_layers",
]

_SCHEMA = 2
_PRECISION = {"Int8": "int8", "Half": "fp16", "Float": "fp32"}
_ROWS = 3
"""Findings of a kind that a report shows unless all are asked for."""


@dataclass(frozen=True)
class Departure:
    """A convolution that the builder runs in another precision than planned."""

    name: str
    planned: str
    got: str
    reason: str


@dataclass(frozen=True)
class Audit:
    """The precisions of an engine's convolutions as built, and what gets in the way.

    Attributes:
        int8: how many convolutions read INT8.
        fp16: how many read FP16.
        fp32: how many read FP32.
        layers: every layer of the engine.
        departures: convolutions that are not what the plan says.
        warnings: what to look at, one sentence each.
        findings: what gets in the way, the costliest first.
        advice: what to try, the largest saving first.
        ms: measured milliseconds of all layers; None where shares are of estimated memory traffic.
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

    @property
    def bytes(self) -> int:
        """What all layers read and write, a run; estimated from dimensions, types and formats."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def cost(self) -> str:
        """What the shares of the findings are of."""
        return "estimated memory traffic" if self.ms is None else "measured time"

    @property
    def summary(self) -> str:
        """How many convolutions got which precision, in one line."""
        return (
            f"as built: {self.int8} convs in INT8, {self.fp16} in FP16, {self.fp32} in FP32; "
            f"{len(self.departures)} not as planned; {len(self.layers)} layers in all"
        )

    def timed(self, times: Mapping[str, float]) -> Audit:
        """The same with measured shares.

        Args:
            times: milliseconds by layer name, as a profiler gives them.

        Raises:
            ConfigError: they are of another engine.
        """
        layers = {layer.name: layer.bytes for layer in self.layers}
        working = [name for name, moved in layers.items() if moved]
        untimed = [name for name in working if name not in times]
        # Generated layers have names that other engines have as well, so that a few in common say nothing.
        if 2 * len(untimed) > len(working):
            raise ConfigError(
                f"the measured times are of another engine: {len(untimed)} of this one's {len(working)} layers have "
                f"none, such as '{untimed[0]}'; profile the bundle's own engine"
            )
        left = (f"{len(untimed)} layers have no measured time, such as '{untimed[0]}'",) if untimed else ()
        total = sum(ms for name, ms in times.items() if name in layers)
        findings = [one.timed(times, layers, total) for one in self.findings]
        return replace(
            self,
            findings=tuple(sorted(findings, key=lambda one: -(one.ms or 0.0))),
            warnings=(*self.warnings, *left),
            ms=total,
        )

    def report(self, everything: bool = False) -> str:
        """A table of what gets in the way, grouped by kind, and the advice.

        Args:
            everything: all findings; otherwise the costliest three of each kind.
        """
        return "\n".join(self._lines(everything))

    def _lines(self, everything: bool) -> Iterator[str]:
        for one in self.departures:
            yield f"  {one.name}: planned {one.planned}, got {one.got}: {one.reason}"
        yield from (f"  {one}" for one in self.warnings[len(self.departures) :])
        if not self.findings:
            yield "nothing gets in the way of INT8 that the builder's list of layers shows"
        else:
            total = f"{self.bytes / 1e6:.1f} MB" if self.ms is None else f"{self.ms:.3f} ms"
            unit = "MB" if self.ms is None else "ms"
            yield f"what gets in the way, by {self.cost} ({total} in all):"
            yield f"{unit:>9} {'share':>6}"
        groups: dict[str, list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault(finding.kind, []).append(finding)
        for kind, found in sorted(groups.items(), key=lambda item: -sum(one.share for one in item[1])):
            count = "" if kind == "suppression" else f" ({len(found)})"
            yield f"{self._figures(found)}  {KINDS[kind]}{count}"
            shown = found if everything else found[:_ROWS]
            for finding in shown:
                yield f"{self._figures([finding])}    {_short(finding.layer)}: {finding.cause}"
            if len(shown) < len(found):
                yield f"{self._figures(found[len(shown) :])}    {len(found) - len(shown)} more; --all shows them"
        if self.advice:
            yield "what to try, by what it would save (not additive; estimated memory traffic):"
            yield from (f"  {one}" for one in self.advice)

    def _figures(self, found: Sequence[Finding]) -> str:
        if self.ms is None:
            return f"{sum(one.bytes for one in found) / 1e6:9.2f} {sum(one.share for one in found):6.1%}"
        return f"{sum(one.ms or 0.0 for one in found):9.4f} {sum(one.share for one in found):6.1%}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        layers = [
            {**asdict(layer), "input": layer.input, "weights": layer.weights, "output": layer.output}
            for layer in self.layers
        ]
        return {**asdict(self), "layers": layers, "cost": self.cost, "bytes": self.bytes}

    def to_json(self) -> str:
        return json.dumps({"schema": _SCHEMA, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def load(path: Path) -> Audit:
        """Reads ``audit.json``.

        Raises:
            BundleError: it cannot be read or is of another schema.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("schema") != _SCHEMA:
                raise BundleError(
                    f"'{path}' was written by another version of trtdet; remove the bundle and build it again"
                )
            return Audit(
                layers=tuple(_layer(**one) for one in data.pop("layers")),
                departures=tuple(Departure(**one) for one in data.pop("departures")),
                warnings=tuple(data.pop("warnings")),
                findings=tuple(Finding(**{**one, "nodes": tuple(one["nodes"])}) for one in data.pop("findings")),
                advice=tuple(Advice(**one) for one in data.pop("advice")),
                **data,
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BundleError(f"'{path}' cannot be read ({error}); build the bundle again") from None


def _layer(name: str, type: str, onnx: list[str], **tensors: list[dict[str, Any]]) -> Layer:
    inputs, constants, outputs = (
        tuple(Tensor(**{**one, "dims": tuple(one["dims"])}) for one in tensors[key])
        for key in ("inputs", "constants", "outputs")
    )
    return Layer(name, type, inputs, constants, outputs, tuple(onnx))


def audit(
    layers: Sequence[Layer],
    plan: PrecisionPlan,
    model: onnx.ModelProto,
    times: Mapping[str, float] | None = None,
    silu: Collection[SiluForm] = (),
) -> Audit:
    """Compares what was built with what was planned, and finds what gets in the way of INT8.

    A convolution runs in the type of its first input: INT8 kernels may take INT8 there and give float, which a
    pointwise kernel scales and quantises again.

    Args:
        layers: of the engine, as :func:`layers_of` gives them.
        plan: what was planned.
        model: that the engine was built from, Q/DQ and casts included.
        times: milliseconds by layer name, where they were measured.
        silu: what ``--silu`` may write on the engine's backend.

    Raises:
        BackendError: there are no layers.
        ConfigError: the times are of another engine.
    """
    if not layers:
        raise BackendError("the engine lists no layers, so nothing can be said of it")
    flow = Flow(layers, plan, model)
    got = {
        name: _PRECISION.get(flow.layers[index].input, flow.layers[index].input.lower())
        for name, index in flow.kernels.items()
    }
    problems = {one.node: one.problem for one in lint(model)}
    departures = tuple(
        Departure(name, entry.precision, got.get(name, "unknown"), _reason(flow, name, entry, problems))
        for name, entry in plan.entries.items()
        if got.get(name) != entry.precision
    )
    warnings = [f"'{one.name}' was planned as {one.planned} and runs in {one.got}" for one in departures]
    tensors = [tensor for layer in layers for tensor in (*layer.inputs, *layer.constants, *layer.outputs)]
    unknown = sorted({tensor.type for tensor in tensors} - BITS.keys())
    if unknown:
        warnings.append(f"the size of data type {', '.join(unknown)} is not known, so its bytes are not counted")
    findings = find(flow, plan, got)
    found = list(got.values())
    done = Audit(
        **{precision: found.count(precision) for precision in ("int8", "fp16", "fp32")},
        layers=tuple(layers),
        departures=departures,
        warnings=tuple(warnings),
        findings=findings,
        advice=advise(flow, got, findings, silu),
    )
    return done if times is None else done.timed(times)


def _short(name: str, width: int = 50) -> str:
    """A layer's name for a table: generated kernels are named after all that they compute, and numbered at the end."""
    return name if len(name) <= width else f"{name[: width - 15]}...{name[-12:]}"


def load_times(path: Path) -> dict[str, float]:
    """Measured times of layers: an object of milliseconds by name, or what ``trtexec --exportProfile`` writes.

    Returns:
        Milliseconds of one run by layer name.

    Raises:
        ConfigError: the file is missing or neither.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, list):
            return {str(one["name"]): float(one["averageMs"]) for one in data if "name" in one}
        return {str(name): float(ms) for name, ms in data.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"'{path}' has no times of layers ({error}); give what 'trtexec --exportProfile' writes, or an object of "
            "milliseconds by layer name"
        ) from None


def _reason(flow: Flow, name: str, entry: Entry, problems: Mapping[str, str]) -> str:
    """Why a convolution is not what was planned, as far as it can be known."""
    if name not in flow.kernels:
        return "the builder names no layer for it: it was folded away or merged into another"
    chosen = f"the builder chose a kernel of type {flow.layers[flow.kernels[name]].type}"
    node = flow.nodes.get(name)
    if entry.precision != "int8" or node is None:
        return chosen
    if name in problems:
        return f"{problems[name]}; {chosen}"
    before = flow.maker.get(node.input[0])
    if before is None or before.op_type != "DequantizeLinear":
        return f"{chosen}; the model has no Q/DQ pair on its input"
    return f"{chosen}, though its input and weights are quantised"
