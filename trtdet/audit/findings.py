"""What gets in the way of INT8 in an engine: layers, and parts of layers, that only the change of precision needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx

from trtdet.audit.float_outputs import float_outputs
from trtdet.audit.layers import Layer, Tensor
from trtdet.audit.traffic import ACTIVATION_FUNCTIONS, POINTWISE, TYPE_CHANGES, Convolution, Flow
from trtdet.audit.traps import HALF_COORDINATES, HALF_SQUARES, traps, uncounted
from trtdet.passes.plugin_ops import HARD_SWISH, SILU
from trtdet.passes.provenance import Origin
from trtdet.quantization import PrecisionPlan
from trtdet.quantization.weighted import CONVOLUTIONS

KINDS: Mapping[str, str] = {
    "float": "convolutions planned in INT8 that run in float",
    "float-output": "convolutions that write float32",
    "activation": "activations in kernels of their own",
    "element-wise": "sums and products in kernels of their own",
    "quantise": "kernels that only quantise",
    "dequantise": "kernels that only dequantise",
    "cast": "kernels that only cast",
    "reformat": "kernels that only move data or change its layout",
    "padding": "convolutions whose input is padded to more channels",
    "copy": "tensors written twice, in two types",
    "suppression": "suppression in the graph",
    HALF_COORDINATES: "samples at coordinates in FP16",
    HALF_SQUARES: "normalisations that are written out, in FP16",
    "normalisation": "normalisations that are written out, in float32",
    "attention": "attentions that are several kernels",
}
"""What the findings of each kind are called in a report."""

_SUPPRESSION = ("NonMaxSuppression", "EfficientNMS_TRT")
_QUANTISING = (Origin.QDQ, Origin.CHANNEL_MAP)
_ELEMENT_WISE = frozenset(("Add", "Concat", "Div", "Identity", "Max", "Min", "Mul", "Sub", *TYPE_CHANGES))
_CONSTANT_STEPS = ("Add", "Sub", "Mul", "Div")


@dataclass(frozen=True)
class Finding:
    """A layer, or part of it, that gets in the way.

    Attributes:
        kind: one of ``KINDS``.
        layer: name of the layer; of several layers, the layer that moves most.
        nodes: names of the convolutions or other ONNX nodes it is about.
        cause: the work of the layer, its producer and consumer, and the reason.
        bytes: moved in a run of the engine; an estimate from dimensions and types.
        share: of the engine: of its bytes, or of its time where that was measured; 0..1.
        ms: measured milliseconds; None where they were not measured.
        parts: bytes by layer name; a layer's other bytes belong to other findings or are no finding.
    """

    kind: str
    layer: str
    nodes: tuple[str, ...]
    cause: str
    bytes: int
    share: float
    ms: float | None
    parts: Mapping[str, int]

    def timed(self, times: Mapping[str, float], layers: Mapping[str, int], total: float) -> Finding:
        """The same with measured time, which a layer shares out among its findings by their bytes.

        Args:
            times: milliseconds by layer name.
            layers: bytes by layer name.
            total: milliseconds of the engine.
        """
        ms = sum(times.get(name, 0.0) * part / layers[name] for name, part in self.parts.items() if layers[name])
        return replace(self, ms=ms, share=ms / total if total else 0.0)


def find(flow: Flow, plan: PrecisionPlan, got: Mapping[str, str]) -> tuple[Finding, ...]:
    """Finds what gets in the way, the costliest first.

    Args:
        flow: the engine.
        plan: the planned precision of each convolution.
        got: the precision of each convolution as built, by name.
    """
    found = [
        *_in_float(flow, plan, got),
        *_float_outputs(flow, plan, got),
        *_paddings(flow),
        *_copies(flow, plan),
        *_suppression(flow),
    ]
    spent: dict[str, int] = {}
    for finding in found:
        for name, part in finding.parts.items():
            spent[name] = spent.get(name, 0) + part
    for trap in traps(flow):
        parts = uncounted(flow, trap, spent)
        if parts:
            found.append(_finding(flow, trap.kind, trap.nodes, trap.cause, parts))
            spent.update({name: spent.get(name, 0) + part for name, part in parts.items()})
    for index, layer in enumerate(flow.layers):
        left = layer.bytes - spent.get(layer.name, 0)
        if index in flow.runs or layer.type not in POINTWISE or left <= 0 or _suppresses(flow, layer):
            continue
        described = _pointwise(flow, plan, layer)
        if described is not None:
            kind, nodes, cause = described
            found.append(_finding(flow, kind, nodes, cause, {layer.name: left}))
    return tuple(sorted(found, key=lambda finding: -finding.bytes))


def activation_functions(flow: Flow, layer: Layer) -> dict[str, str]:
    """The activation functions that a layer computes right after a convolution: their names by convolution."""
    found: dict[str, str] = {}
    for name in layer.onnx:
        node = flow.nodes.get(name)
        if node is None or node.op_type not in ACTIVATION_FUNCTIONS:
            continue
        source = flow.before(node.input[0])
        gated = source
        while source is not None and source.op_type in _CONSTANT_STEPS and _by_constant(flow, source):
            source = flow.before(source.input[0]) or flow.before(source.input[1])
        if source is None or (source.op_type not in CONVOLUTIONS and source.name not in flow.kernels):
            continue
        found[source.name] = _title(flow, layer, node, gated)
    return found


def _title(flow: Flow, layer: Layer, node: onnx.NodeProto, source: onnx.NodeProto | None) -> str:
    if node.op_type in (SILU, "Swish"):
        return "SiLU"
    if node.op_type in (HARD_SWISH, "HardSwish"):
        return "HardSwish"
    product = any(
        reader.op_type == "Mul" and node.output[0] in reader.input and not _by_constant(flow, reader)
        for reader in (flow.nodes[name] for name in layer.onnx if name in flow.nodes)
    )
    if product and node.op_type == "Sigmoid":
        return "SiLU"
    # A bias that stands outside its convolution is an Add as well, of a value for each channel.
    shifted = node.op_type == "HardSigmoid" or (
        source is not None and source.op_type == "Add" and _by_scalar(flow, source)
    )
    return "HardSwish" if product and shifted else node.op_type


def _by_constant(flow: Flow, node: onnx.NodeProto) -> bool:
    return any(name not in flow.maker or flow.maker[name].op_type == "Constant" for name in node.input)


def _by_scalar(flow: Flow, node: onnx.NodeProto) -> bool:
    return any(math.prod(flow.constants.get(name, ())) == 1 for name in node.input if name not in flow.maker)


def _finding(flow: Flow, kind: str, nodes: Sequence[str], cause: str, parts: Mapping[str, int]) -> Finding:
    moved = sum(parts.values())
    largest = max(parts, key=lambda name: parts[name])
    return Finding(kind, largest, tuple(nodes), cause, moved, moved / max(flow.bytes, 1), None, dict(parts))


def _in_float(flow: Flow, plan: PrecisionPlan, got: Mapping[str, str]) -> Iterator[Finding]:
    for name, entry in plan.entries.items():
        if entry.precision == "int8" and got.get(name) in ("fp16", "fp32"):
            layer = flow.layers[flow.kernels[name]]
            yield _finding(flow, "float", [name], f"{name} reads {layer.input}, not Int8", {layer.name: layer.bytes})


def _float_outputs(flow: Flow, plan: PrecisionPlan, got: Mapping[str, str]) -> Iterator[Finding]:
    done: set[int] = set()
    for found in float_outputs(flow, plan):
        name, layer = found.convolution.name, flow.layers[found.convolution.layer]
        # A layer that runs several convolutions writes its output once; all of a layer in float is counted already.
        in_float = plan.entries[name].precision == "int8" and got.get(name) != "int8"
        counted = in_float or found.convolution.layer in done
        done.add(found.convolution.layer)
        cause = f"{name} ({layer.input}) writes Float: {found.cause}"
        yield _finding(flow, "float-output", [name], cause, {layer.name: 0 if counted else found.bytes})


def _paddings(flow: Flow) -> Iterator[Finding]:
    done: set[str] = set()
    for convolution in flow.convolutions.values():
        layer, share = flow.layers[convolution.layer], flow.padding(convolution)
        if share <= 1:
            continue
        tensor = layer.inputs[0]
        parts = {layer.name: _extra(tensor, share)}
        for index in flow.writers[tensor.name] if tensor.name not in done else ():
            writer = flow.layers[index]
            if index not in flow.runs and tensor in writer.outputs:
                only = writer.input == tensor.type and not flow.work_of(writer) - set(TYPE_CHANGES)
                more = writer.bytes if only else _extra(tensor, share) + flow.filling(writer, tensor, share)
                parts[writer.name] = min(more, writer.bytes)
        done.add(tensor.name)
        touched = round(convolution.channels * share)
        kind = "depthwise: " if convolution.depthwise else ""
        channels = f"{convolution.name} ({kind}{convolution.channels} channels)"
        cause = f"{channels} reads {touched}, as its {tensor.type} kernel takes them"
        yield _finding(flow, "padding", [convolution.name], cause, parts)


def _extra(tensor: Tensor, padding: float) -> int:
    return int(tensor.bytes * (1 - 1 / padding))


def _copies(flow: Flow, plan: PrecisionPlan) -> Iterator[Finding]:
    for layer in flow.layers:
        quantised = [output for output in layer.outputs if output.type == "Int8"]
        for tensor in layer.outputs:
            same = [copy for copy in quantised if math.prod(copy.dims) == math.prod(tensor.dims)]
            if layer.type not in POINTWISE or tensor.type not in ("Float", "Half") or not same:
                continue
            cause = (
                f"written in Int8 for {_readers(flow, same[0])} and again in {tensor.type} for {_readers(flow, tensor)}"
                f"{_why(flow, plan, tensor)}"
            )
            yield _finding(flow, "copy", flow.named(layer), cause, {layer.name: tensor.bytes})


def _suppresses(flow: Flow, layer: Layer) -> bool:
    """Whether most of a layer's nodes, Q/DQ aside, belong to the suppression."""
    nodes = [name for name in layer.onnx if flow.origins.get(name) not in _QUANTISING]
    suppressing = [
        name
        for name in nodes
        if flow.origins.get(name) is Origin.NMS or (name in flow.nodes and flow.nodes[name].op_type in _SUPPRESSION)
    ]
    return 2 * len(suppressing) > len(nodes)


def _suppression(flow: Flow) -> Iterator[Finding]:
    parts = {layer.name: layer.bytes for layer in flow.layers if layer.bytes and _suppresses(flow, layer)}
    if parts:
        yield _finding(flow, "suppression", [], f"{len(parts)} layers, of which a loop runs some several times", parts)


def _pointwise(flow: Flow, plan: PrecisionPlan, layer: Layer) -> tuple[str, tuple[str, ...], str] | None:
    """Kind, nodes and cause of a kernel that works element by element; None for a kernel that does work of its own."""
    operators = flow.work_of(layer)
    before = activation_functions(flow, layer)
    if before:
        return "activation", tuple(before), _of_activation(flow, layer, before)
    if layer.type == "Reformat" or operators <= set(TYPE_CHANGES):
        return _of_conversion(flow, plan, layer)
    makers = [convolution for tensor in layer.inputs for convolution in _makers(flow, tensor)]
    if operators <= _ELEMENT_WISE and makers:
        names = tuple(dict.fromkeys(convolution.name for convolution in makers))
        work = " and ".join(sorted(operators - {*TYPE_CHANGES, "Identity"}))
        cause = f"{work} after {listed(names)}, whose kernel does not include it{_ends(flow, layer)}"
        return "element-wise", names, cause
    return None


def _of_activation(flow: Flow, layer: Layer, before: Mapping[str, str]) -> str:
    convolutions = [flow.convolutions[name] for name in before if name in flow.convolutions]
    kinds = sorted({flow.layers[convolution.layer].input for convolution in convolutions})
    types = sorted({flow.layers[convolution.layer].output for convolution in convolutions})
    kernel = f": the {' and '.join(kinds)} kernel writes {' and '.join(types)}" if kinds else ""
    return f"{' and '.join(sorted(set(before.values())))} after {listed(tuple(before))}{kernel}{_ends(flow, layer)}"


def _ends(flow: Flow, layer: Layer) -> str:
    quantised = [tensor for tensor in layer.outputs if tensor.type == "Int8"]
    return f"; quantised for {_readers(flow, quantised[0])}" if quantised and layer.input != "Int8" else ""


def _of_conversion(flow: Flow, plan: PrecisionPlan, layer: Layer) -> tuple[str, tuple[str, ...], str] | None:
    if not layer.inputs or not layer.outputs:
        return None
    given, taken = layer.inputs[0], layer.outputs[0]
    source, target = _source(flow, given), _readers(flow, taken)
    nodes = flow.named(layer)
    if given.type == taken.type:
        layouts = f" ({given.format} to {taken.format})" if given.format != taken.format else ""
        return "reformat", nodes, f"moves {source} ({given.type}) for {target}{layouts}"
    if taken.type == "Int8":
        return "quantise", nodes, f"quantises {source} ({given.type}) for {target}"
    why = _why(flow, plan, taken)
    if given.type == "Int8":
        return "dequantise", nodes, f"dequantises {source} (Int8) for {target} ({taken.type}){why}"
    return "cast", nodes, f"casts {source} from {given.type} to {taken.type} for {target}{why}"


def _why(flow: Flow, plan: PrecisionPlan, tensor: Tensor) -> str:
    """Why the readers of a float tensor do not read INT8, as far as it can be known."""
    reasons = []
    for index in flow.readers[tensor.name]:
        layer = flow.layers[index]
        kept = [name for name in layer.onnx if name in plan.entries and plan.entries[name].precision != "int8"]
        if index in flow.runs and kept:
            entry = plan.entries[kept[0]]
            reasons.append(f"which the plan has in {entry.precision.upper()} ({entry.reason})")
        elif any(output.type == "Int8" for output in layer.outputs):
            reasons.append("which quantises it with a step of its own")
        else:
            first = next((flow.nodes[name] for name in layer.onnx if name in flow.nodes), None)
            paired = first is not None and any(
                flow.maker[name].op_type == "DequantizeLinear" for name in first.input if name in flow.maker
            )
            if first is not None and not paired:
                reasons.append("which runs in float: the model has no Q/DQ pair before it")
    return f", {reasons[0]}" if reasons else ""


def _makers(flow: Flow, tensor: Tensor) -> list[Convolution]:
    return [convolution for index in flow.writers[tensor.name] for convolution in flow.runs.get(index, ())]


def _source(flow: Flow, tensor: Tensor) -> str:
    if not flow.writers[tensor.name]:
        return f"the input '{tensor.name}'"
    return f"the output of {listed(_first_names(flow, flow.writers[tensor.name]))}"


def _readers(flow: Flow, tensor: Tensor) -> str:
    if not flow.readers[tensor.name]:
        return f"the output '{tensor.name}'"
    return listed(_first_names(flow, flow.readers[tensor.name]))


def _first_names(flow: Flow, indices: Sequence[int]) -> tuple[str, ...]:
    names = dict.fromkeys(flow.named(flow.layers[index])[0] for index in indices)
    # Parts of one tensor may be moved there by layers that only the builder has a name for.
    return tuple(name for name in names if name in flow.nodes) or tuple(names)


def listed(names: Sequence[str]) -> str:
    """The first two names, and how many more there are."""
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
