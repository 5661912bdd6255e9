"""x * Sigmoid(x) -> SiLU(x)

Also ``x * clip(x + 3, 0, 6) / 6 -> HardSwish(x)``. The clip may be Clip, HardSigmoid, or Min and Max; the factors may
come before or after the product. ``Options.silu`` selects the result: ``swish`` for the ONNX operators Swish (opset 24)
and HardSwish (opset 14), ``plugin`` for the operators of trtdet's plugin library.

A Cast in between is ignored if it keeps every value; a Cast that rounds is part of the computation and stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.passes.base import PLUGIN_DOMAIN, Options, PassResult
from trtdet.passes.opset import upgrade
from trtdet.passes.plugin_ops import HARD_SWISH, PLUGIN_ACTIVATIONS, SILU, attributes
from trtdet.passes.provenance import Origin, registry
from trtdet.passes.walk import maker, number

_OPERATORS = {"swish": ("Swish", "HardSwish"), "plugin": (SILU, HARD_SWISH)}
"""Operators of SiLU and HardSwish, by ``Options.silu``."""

_OPSETS = {"Swish": 24, "HardSwish": 14}
_TOLERANCE = 1e-3  # allowed error of a constant: exporters write 1/6 in float16 or with four digits


def apply(graph: gs.Graph, options: Options) -> PassResult:
    """Rewrites activations whose inner tensors have no other readers; ``keep`` only lists the near-matches."""
    activations, skipped = _search(graph)
    if options.silu == "keep":
        return PassResult(0, skipped)
    silu, hard_swish = _OPERATORS[options.silu]
    minimum = max((_OPSETS.get(silu if each.silu else hard_swish, 0) for each in activations), default=0)
    if graph.opset < minimum:
        upgrade(graph, minimum)
        activations, skipped = _search(graph)
    count = 0
    for activation in activations:
        op, last = silu if activation.silu else hard_swish, activation.last
        if last.op == op:
            continue
        output, source = last.outputs[0], activation.source
        last.outputs.clear()
        if output.dtype is None or output.shape is None:
            output.dtype, output.shape = output.dtype or source.dtype, output.shape or source.shape
        name = f"{last.name}/{op}"
        registry(graph)[name] = Origin.ACTIVATION
        domain, attrs = (PLUGIN_DOMAIN, attributes()) if op in PLUGIN_ACTIVATIONS else (None, {})
        graph.nodes.append(gs.Node(op=op, name=name, attrs=attrs, inputs=[source], outputs=[output], domain=domain))
        count += 1
    graph.cleanup().toposort()
    return PassResult(count, skipped)


@dataclass(frozen=True, eq=False)
class _Activation:
    """A SiLU or HardSwish, its input, and the node that gives its output."""

    silu: bool
    source: gs.Tensor
    last: gs.Node


def _search(graph: gs.Graph) -> tuple[list[_Activation], tuple[str, ...]]:
    """The activations of a graph, and the reason for each near-match."""
    activations: list[_Activation] = []
    skipped: list[str] = []
    neutral = {"output_type": [-1], "factor": [1.0], "offset": [0.0]}
    for node in graph.nodes:
        match: _Activation | str | None = None
        if node.op in ("Swish", "HardSwish", *PLUGIN_ACTIVATIONS):
            if node.attrs.get("alpha", 1.0) != 1.0:
                match = f"it is x * Sigmoid({node.attrs['alpha']:g} x), not SiLU"
            elif node.op in PLUGIN_ACTIVATIONS and any(
                np.any(node.attrs.get(key, value) != np.array(value)) for key, value in neutral.items()
            ):
                match = "it does more than the activation: it scales its output, or changes its type"
            else:
                match = _Activation(node.op in ("Swish", SILU), node.inputs[0], node)
        elif node.op == "Mul" and not any(isinstance(tensor, gs.Constant) for tensor in node.inputs):
            match = _product(graph, node)
        if isinstance(match, str):
            skipped.append(f"{node.name}: {match}")
        elif match is not None:
            activations.append(match)
    return activations, tuple(skipped)


@dataclass(frozen=True, eq=False)
class _Line:
    """A tensor as ``factor * tensor + offset`` of an earlier tensor."""

    tensor: gs.Tensor
    factor: float = 1.0
    offset: float = 0.0
    through: tuple[gs.Node, ...] = ()  # the nodes in between
    rounds: bool = False  # a Cast in between does not keep every value


@dataclass(frozen=True, eq=False)
class _Gate:
    """``factor * Sigmoid(of)``, or ``factor * clip(of, low, high)``."""

    silu: bool
    of: _Line
    factor: float = 1.0
    low: float = 0.0
    high: float = 1.0


def _product(graph: gs.Graph, product: gs.Node) -> _Activation | str | None:
    for position in (0, 1):
        gate = _gate(product.inputs[position])
        if gate is None:
            continue
        factors = {id(line.tensor): line for line in _lines(_Line(product.inputs[1 - position]))}
        for line in _lines(gate.of):
            other = factors.get(id(line.tensor))
            if other is not None and other.offset == 0 and other.factor != 0:
                return _checked(graph, product, gate, line=line, other=other)
        if gate.silu and not isinstance(product.inputs[1 - position], gs.Constant):
            return "its Sigmoid reads another tensor than it multiplies"
    return None


def _checked(graph: gs.Graph, product: gs.Node, gate: _Gate, line: _Line, other: _Line) -> _Activation | str:
    """The activation; or the reason if constants are wrong or tensors in between have other readers."""
    last, through = product, (product, *line.through, *other.through)
    factor = gate.factor * other.factor
    if gate.silu:
        if (line.factor, line.offset, factor) != (1.0, 0.0, 1.0):
            return f"it is {factor:g} x * Sigmoid({line.factor:g} x + {line.offset:g}), not SiLU"
    else:
        terms = ((line.factor, 1 / 6), (line.offset, 0.5), (gate.low, 0), (gate.high, 1))
        while not all(math.isclose(factor * term, needed, abs_tol=_TOLERANCE) for term, needed in terms):
            readers = last.outputs[0].outputs
            scale = _scale(readers[0]) if len(readers) == 1 else None
            if scale is None:
                bounds = f"{factor:g} x * clip({line.factor:g} x + {line.offset:g}, {gate.low:g}, {gate.high:g})"
                return f"it is {bounds}, not HardSwish"
            factor *= scale
            last = readers[0]
            through = (*through, last)
    if line.rounds or other.rounds:
        return "a Cast in between rounds"
    for tensor in (node.outputs[0] for node in through if node is not last):
        if any(tensor is output for output in graph.outputs):
            return f"'{tensor.name}' in between is an output of the model"
        for reader in tensor.outputs:
            if not any(reader is inner for inner in through):
                return f"'{tensor.name}' in between is read by '{reader.name}' as well"
    return _Activation(gate.silu, line.tensor, last)


def _gate(tensor: gs.Tensor) -> _Gate | None:
    for line in _lines(_Line(tensor)):
        node = maker(line.tensor)
        if node is None or line.offset != 0:
            continue
        if node.op in ("Sigmoid", "HardSigmoid"):
            source = _Line(node.inputs[0], through=(*line.through, node), rounds=line.rounds)
            if node.op == "Sigmoid":
                # A gate may be computed in a wider type and cast back to the product's type.
                rounds = line.rounds and tensor.dtype == node.outputs[0].dtype
                return _Gate(True, replace(source, rounds=rounds), line.factor)
            slope, middle = node.attrs.get("alpha", 0.2), node.attrs.get("beta", 0.5)
            return _Gate(False, replace(source, factor=slope, offset=middle), line.factor)
        clipped = _clipped(replace(line, factor=1.0))
        if clipped is not None:
            return _Gate(False, of=clipped[0], factor=line.factor, low=clipped[1], high=clipped[2])
    return None


def _clipped(line: _Line) -> tuple[_Line, float, float] | None:
    """The clipped tensor and the bounds of a Clip, or of Min, Max and Relu in sequence."""
    low, high = -math.inf, math.inf
    while (node := maker(line.tensor)) is not None and not (math.isfinite(low) and math.isfinite(high)):
        values = [number(tensor) for tensor in node.inputs]
        if node.op == "Clip":
            below, above = (*values[1:], None, None)[:2]
            if any(not bound.is_empty() and number(bound) is None for bound in node.inputs[1:]):
                return None
            below, above = node.attrs.get("min", below), node.attrs.get("max", above)
        elif node.op == "Relu":
            below, above = 0.0, None
        elif node.op in ("Min", "Max") and len(values) == 2 and values.count(None) == 1:
            bound = values[0] if values[1] is None else values[1]
            below, above = (None, bound) if node.op == "Min" else (bound, None)
        else:
            return None
        low = low if below is None else max(low, below)
        high = high if above is None else min(high, above)
        line = _before(line, node)
    return (line, low, high) if low < high and math.isfinite(low) and math.isfinite(high) else None


def _lines(line: _Line) -> Iterator[_Line]:
    """The line itself, and lines from earlier tensors that differ by a factor and an offset."""
    while True:
        yield line
        node = maker(line.tensor)
        if node is None:
            return
        factor, offset, rounds = line.factor, line.offset, line.rounds
        if node.op == "Cast":
            types = [node.inputs[0].dtype, node.outputs[0].dtype]
            # graph-surgeon keeps ONNX's number for a type that NumPy lacks.
            known = [onnx.helper.tensor_dtype_to_np_dtype(kind) if isinstance(kind, int) else kind for kind in types]
            if any(kind is None or not np.issubdtype(kind, np.floating) for kind in known):
                return
            rounds = rounds or not np.can_cast(*types)
        elif node.op in ("Add", "Sub"):
            values = [number(tensor) for tensor in node.inputs]
            value = next((value for value in values if value is not None), None)
            if value is None or None not in values:
                return
            if node.op == "Sub" and values[0] is not None:
                factor, offset = -factor, offset + line.factor * value
            else:
                offset += factor * (value if node.op == "Add" else -value)
        elif node.op != "Identity":
            scale = _scale(node)
            if scale is None:
                return
            factor *= scale
        line = replace(_before(line, node), factor=factor, offset=offset, rounds=rounds)


def _before(line: _Line, node: gs.Node) -> _Line:
    """The same function, of a node's only input that is not constant."""
    source = next(tensor for tensor in node.inputs if not isinstance(tensor, gs.Constant))
    return replace(line, tensor=source, through=(*line.through, node))


def _scale(node: gs.Node) -> float | None:
    """The number that a Mul or Div multiplies by; None for other nodes."""
    if node.op not in ("Mul", "Div"):
        return None
    values = [number(tensor) for tensor in node.inputs]
    if node.op == "Mul" and None in values:
        return values[0] if values[1] is None else values[1]
    divisor = None if node.op == "Mul" or isinstance(node.inputs[0], gs.Constant) else values[1]
    return 1 / divisor if divisor else None
