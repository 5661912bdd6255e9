"""Compares a built engine with its precision plan and reports what makes INT8 slower or less exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import onnx

from trtdet.audit.findings import INEXACT, advise, find
from trtdet.audit.layers import BITS, Layer, Tensor, layers_of
from trtdet.audit.results import Audit, Departure, load_times
from trtdet.audit.traffic import PRECISIONS, Flow
from trtdet.config import SiluForm
from trtdet.errors import BackendError
from trtdet.quantization import PrecisionPlan, lint

__all__ = ["Audit", "Layer", "Tensor", "audit", "layers_of", "load_times"]


def audit(
    layers: Sequence[Layer],
    plan: PrecisionPlan,
    model: onnx.ModelProto,
    times: Mapping[str, float] | None = None,
    silu: Collection[SiluForm] = (),
) -> Audit:
    """Compares an engine with its plan, and finds what makes INT8 slower or less exact.

    A convolution counts in the type of its first input: an INT8 kernel may read INT8 and write float, which a pointwise
    kernel then scales and quantises again. ``model`` is what the engine was built from, with Q/DQ pairs. ``times`` are
    measured milliseconds by layer name; ``silu`` has the values of ``--silu`` that the backend supports. Raises
    BackendError if there are no layers; ConfigError if the times belong to another engine.
    """
    if not layers:
        raise BackendError("the engine lists no layers, so its convolutions' precisions are unknown")
    flow = Flow(layers, plan, model)
    departures = _departures(flow)
    warnings = [str(departure) for departure in departures]
    tensors = [tensor for layer in layers for tensor in (*layer.inputs, *layer.constants, *layer.outputs)]
    unknown = sorted({tensor.type for tensor in tensors} - BITS.keys())
    if unknown:
        warnings.append(f"the size of data type {', '.join(unknown)} is not known, so its bytes are not counted")
    findings = find(flow)
    warnings += [f"'{finding.nodes[0]}': {finding.cause}" for finding in findings if finding.kind in INEXACT]
    counts = Counter(flow.precisions.values())
    estimated = Audit(
        **{precision: counts[precision] for precision in PRECISIONS.values()},
        layers=tuple(layers),
        departures=departures,
        warnings=tuple(warnings),
        findings=findings,
        advice=advise(flow, findings, silu),
    )
    return estimated if times is None else estimated.timed(times)


def _departures(flow: Flow) -> tuple[Departure, ...]:
    """The convolutions whose precision differs from the plan, with the reason as far as it is known."""
    problems = {problem.node: problem.problem for problem in lint(flow.model)}
    departures = []
    for name, entry in flow.plan.entries.items():
        planned = entry.number_format
        got = flow.precisions.get(name, "unknown")
        if got == planned:
            continue
        node = flow.nodes.get(name)
        if name not in flow.kernels:
            reason = "the builder names no layer for it: it was folded away or merged into another"
        else:
            reason = f"the builder chose a kernel of type {flow.layers[flow.kernels[name]].type}"
            if entry.precision == "int8" and node is not None:
                before = flow.maker.get(node.input[0])
                if name in problems:
                    reason = f"{problems[name]}; {reason}"
                elif before is None or before.op_type != "DequantizeLinear":
                    reason += "; the model has no Q/DQ pair on its input"
                else:
                    reason += ", though its input and weights are quantised"
        departures.append(Departure(name, planned=planned, got=got, reason=reason))
    return tuple(departures)
