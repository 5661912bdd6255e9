"""Finds what makes INT8 slower or less exact, and the options of a build that would make an engine move fewer bytes.

Slower: layers, or parts of layers, that only exist because the precision changes there. Operators in which transformers
lose accuracy or speed are findings too:

- GridSample in FP16: its coordinates are off by a fraction of a pixel.
- A LayerNormalization made of several operators: its squares overflow in FP16, and float32 needs casts.
- An attention in several kernels: builders fuse its products with the softmax in float, but less around INT8.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import onnx

from trtdet.audit.fp16 import InFp16
from trtdet.audit.layers import Layer, Tensor
from trtdet.audit.traffic import ACTIVATION_FUNCTIONS, POINTWISE, TYPE_CHANGES, Flow
from trtdet.config import SiluForm
from trtdet.passes.plugin_ops import HARD_SWISH, SILU
from trtdet.passes.provenance import Origin
from trtdet.quantization.weighted import CONVOLUTIONS
from trtdet.quantization.written_out import attentions, normalisations
from trtdet.tables import listed

# fmt: off
Kind = Literal[
    "float", "float-output", "activation", "element-wise", "quantise", "dequantise", "cast", "reformat", "padding",
    "copy", "suppression", "half-coordinates", "half-squares", "normalisation", "attention",
]
# fmt: on

INEXACT: tuple[Kind, ...] = ("half-coordinates", "half-squares")
"""The kinds that cost accuracy; the build warns about them."""

_EXPORT = "export with opset 17 or later, which has LayerNormalization as one operator"


def _of_transformers(flow: Flow) -> Iterator[tuple[Kind, tuple[str, ...], str, tuple[Layer, ...]]]:
    """Kind, nodes and cause of each finding about GridSample, normalisations and attentions, and its layers."""
    samples = [node.name for node in flow.model.graph.node if node.op_type == "GridSample" and _in_half(flow, node)]
    if samples:
        cause = "GridSample in FP16, whose coordinates are a fraction of a pixel off: export the model in float32"
        yield "half-coordinates", tuple(samples), cause, _layers(flow, samples)
    for nodes in normalisations(flow.model):
        half = any(_in_half(flow, flow.nodes[name]) for name in nodes)
        why = "in FP16, which holds no squares over 65504" if half else "in float32, as FP16 does not hold its squares"
        cause = f"{len(nodes)} operators of a LayerNormalization {why}: {_EXPORT}"
        yield "half-squares" if half else "normalisation", nodes, cause, _layers(flow, nodes)
    for attention in attentions(flow.model):
        layers = _layers(flow, attention.nodes)
        products = (flow.nodes[name] for name in (attention.scores, attention.values))
        read = {flow.maker[name].op_type for node in products for name in node.input if name in flow.maker}
        if read & {"QuantizeLinear", "DequantizeLinear"}:
            why = (
                ": Q/DQ pairs stand before the products; without plan.int8_attention they run in FP16, in one kernel "
                "if the builder has one of this form, which the audit of such a build says"
            )
        else:
            why = ", though no Q/DQ pair stands between them: the builder has no kernel of this form"
        if len(layers) > 1:
            cause = f"{attention.softmax} and its products are {len(layers)} kernels{why}"
            yield "attention", attention.nodes, cause, layers


def _in_half(flow: Flow, node: onnx.NodeProto) -> bool:
    """Whether a node computes in FP16: by its type in the model if the model has FP16, else by its layer's input."""
    if onnx.TensorProto.FLOAT16 in flow.types.values():
        return flow.types.get(node.output[0]) == onnx.TensorProto.FLOAT16
    return any(layer.input == "Half" for layer in _layers(flow, [node.name]))


def _layers(flow: Flow, names: Collection[str]) -> tuple[Layer, ...]:
    """The layers with memory traffic that compute these nodes, in order; for a product, the layer that multiplies."""
    return tuple(
        layer
        for index, layer in enumerate(flow.layers)
        if layer.bytes and any(name in names and flow.layer_of.get(name, index) == index for name in layer.onnx)
    )


KINDS: Mapping[Kind, str] = {
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
    "half-coordinates": "samples at coordinates in FP16",
    "half-squares": "normalisations that are written out, in FP16",
    "normalisation": "normalisations that are written out, in float32",
    "attention": "attentions that are several kernels",
}
"""Title of each kind of finding in a report."""

_SUPPRESSION = ("NonMaxSuppression", "EfficientNMS_TRT")
_QUANTISING = (Origin.QDQ, Origin.CHANNEL_MAP)
_ELEMENT_WISE = frozenset(("Add", "Concat", "Div", "Identity", "Max", "Min", "Mul", "Sub", *TYPE_CHANGES))
_CONSTANT_STEPS = ("Add", "Sub", "Mul", "Div")
_PASSING = ("Cast", "Identity", "Reshape", "Transpose", "Flatten", "Concat")
"""Operators that do not change values; they may change the type."""

_IN_FLOAT = {Origin.DECODE: "the decoding of boxes", Origin.NMS: "the suppression"}


@dataclass(frozen=True)
class Finding:
    """A layer, or part of it, that makes INT8 slower or less exact.

    Attributes:
        kind: titled by ``KINDS``.
        layer: name of the layer; of several layers, the one that moves most bytes.
        nodes: names of the convolutions or other ONNX nodes concerned.
        bytes: estimated bytes moved per run; ``parts`` has them by layer name.
        share: share of the engine's measured time, or of its bytes without measurements; 0..1.
        ms: measured milliseconds; None if not measured.
    """

    kind: Kind
    layer: str
    nodes: tuple[str, ...]
    cause: str
    bytes: int
    share: float
    ms: float | None
    parts: Mapping[str, int]

    def timed(self, times: Mapping[str, float], layers: Mapping[str, int], total: float) -> Finding:
        """This finding with measured time: the time of a layer is divided among its findings by their bytes.

        ``times`` and ``total`` are milliseconds, ``layers`` holds bytes by layer name.
        """
        ms = sum(times.get(name, 0.0) * part / layers[name] for name, part in self.parts.items() if layers[name])
        return replace(self, ms=ms, share=ms / total if total else 0.0)


_Part = tuple[Kind, Sequence[str], str, Mapping[str, int]]
"""Kind, nodes, cause and parts of a finding."""


def find(flow: Flow) -> tuple[Finding, ...]:
    """All findings, the costliest first."""
    spent: dict[str, int] = {}
    findings: list[Finding] = []

    def add(part: _Part) -> None:
        kind, nodes, cause, parts = part
        moved = sum(parts.values())
        findings.append(
            Finding(
                kind=kind,
                layer=max(parts, key=lambda name: parts[name]),
                nodes=tuple(nodes),
                cause=cause,
                bytes=moved,
                share=moved / max(flow.bytes, 1),
                ms=None,
                parts=dict(parts),
            )
        )
        spent.update({name: spent.get(name, 0) + part for name, part in parts.items()})

    for name, entry in flow.plan.entries.items():
        if entry.precision == "int8" and flow.precisions.get(name) in ("fp16", "fp32"):
            layer = flow.layers[flow.kernels[name]]
            add(("float", [name], f"{name} reads {layer.input}, not Int8", {layer.name: layer.bytes}))
    for part in (*_float_outputs(flow), *_paddings(flow), *_copies(flow)):
        add(part)
    suppressing = {layer.name: layer.bytes for layer in flow.layers if layer.bytes and _suppresses(flow, layer)}
    if suppressing:
        add(("suppression", [], f"{len(suppressing)} layers, of which a loop runs some several times", suppressing))
    for kind, nodes, cause, layers in _of_transformers(flow):
        parts = {layer.name: max(layer.bytes - spent.get(layer.name, 0), 0) for layer in layers}
        if parts:
            add((kind, nodes, cause, parts))
    for index, layer in enumerate(flow.layers):
        remaining = layer.bytes - spent.get(layer.name, 0)
        if index in flow.runs or layer.type not in POINTWISE or remaining <= 0 or layer.name in suppressing:
            continue
        described = _pointwise(flow, layer)
        if described is not None:
            add((*described, {layer.name: remaining}))
    return tuple(sorted(findings, key=lambda finding: -finding.bytes))


def _float_outputs(flow: Flow) -> Iterator[_Part]:
    """Convolutions that read INT8 or FP16 and write float32; half of the bytes they write count."""
    counted: set[int] = set()
    for name, convolution in flow.convolutions.items():
        layer = flow.layers[convolution.layer]
        tensors = [tensor for tensor in dict.fromkeys(layer.outputs) if tensor.type == "Float"]
        if layer.input not in ("Int8", "Half") or not tensors:
            continue
        # A layer with several convolutions writes its output once; find() already counts all bytes of one in float.
        in_float = flow.plan.entries[name].precision == "int8" and flow.precisions.get(name) != "int8"
        saved = 0 if in_float or convolution.layer in counted else sum(tensor.bytes for tensor in tensors) // 2
        counted.add(convolution.layer)
        cause = f"{name} ({layer.input}) writes Float: {_cause_of_float(flow, name, tensor=tensors[0])}"
        yield "float-output", [name], cause, {layer.name: saved}


def _cause_of_float(flow: Flow, name: str, tensor: Tensor) -> str:
    """Why the kernel of a convolution writes float32, as far as the model and the plan show."""
    node, entry = flow.nodes[name], flow.plan.entries[name]
    if not flow.readers[tensor.name]:
        return "it is an output of the engine"
    reasons = [entry.float_output] if entry.float_output else []
    weights = flow.maker.get(node.input[1])
    if weights is not None and weights.op_type == "DequantizeLinear":
        scales = math.prod(flow.constants.get(weights.input[1], (0,)))
        if scales > 1 and any(name in flow.layers[reader].onnx for reader in flow.readers[tensor.name]):
            reasons.append(f"its kernel leaves the {scales} scales of its weights, one a channel, to the next")
    kind, reader = flow.types.get(node.output[0]), _float_reader(flow, node)
    if reader:
        reasons.append(reader)
    elif not entry.float_output and kind == onnx.TensorProto.FLOAT:
        reasons.append("the model is float32 after it")
    half_after = ", though the model is FP16 after it" if kind == onnx.TensorProto.FLOAT16 else ""
    return ", and ".join(reasons) or f"the builder chose such a kernel{half_after}"


def _float_reader(flow: Flow, node: onnx.NodeProto) -> str:
    """The reader of a convolution, after casts, that needs float32; empty if none is known."""
    waiting, visited = [node.output[0]], set[str]()
    while waiting:
        tensor = waiting.pop()
        if tensor in visited:
            continue
        visited.add(tensor)
        if any(value.name == tensor for value in flow.model.graph.output):
            return "an output of the engine that it gives is float32"
        for reader in flow.node_readers.get(tensor, ()):
            origin, entry = flow.origins.get(reader.name), flow.plan.entries.get(reader.name)
            if origin in _IN_FLOAT:
                return f"{_IN_FLOAT[origin]} reads it, which is float32"
            if entry is not None and entry.precision == "fp32":
                return f"{reader.name} reads it, which the plan has in FP32 ({entry.reason})"
            if reader.op_type in _PASSING:
                waiting.extend(reader.output)
    return ""


def _paddings(flow: Flow) -> Iterator[_Part]:
    counted: set[str] = set()
    for convolution in flow.convolutions.values():
        layer, share = flow.layers[convolution.layer], flow.padding(convolution)
        if share <= 1:
            continue
        tensor = layer.inputs[0]
        extra = int(tensor.bytes * (1 - 1 / share))
        parts = {layer.name: extra}
        for index in flow.writers[tensor.name] if tensor.name not in counted else ():
            writer = flow.layers[index]
            if index not in flow.runs and tensor in writer.outputs:
                only = writer.input == tensor.type and not flow.work_of(writer) - set(TYPE_CHANGES)
                more = writer.bytes if only else extra + flow.filling(writer, tensor, share)
                parts[writer.name] = min(more, writer.bytes)
        counted.add(tensor.name)
        kind = "depthwise: " if convolution.depthwise else ""
        cause = (
            f"{convolution.name} ({kind}{convolution.channels} channels) reads "
            f"{round(convolution.channels * share)}, as its {tensor.type} kernel takes them"
        )
        yield "padding", [convolution.name], cause, parts


def _copies(flow: Flow) -> Iterator[_Part]:
    for layer in flow.layers:
        quantised = [output for output in layer.outputs if output.type == "Int8"]
        for tensor in layer.outputs:
            same = [copy for copy in quantised if math.prod(copy.dims) == math.prod(tensor.dims)]
            if layer.type in POINTWISE and tensor.type in ("Float", "Half") and same:
                cause = (
                    f"written in Int8 for {_readers(flow, same[0])} and again in {tensor.type} for "
                    f"{_readers(flow, tensor)}{_why(flow, tensor)}"
                )
                yield "copy", flow.named(layer), cause, {layer.name: tensor.bytes}


def _suppresses(flow: Flow, layer: Layer) -> bool:
    """Whether most of a layer's nodes, without Q/DQ, belong to NMS."""
    nodes = [name for name in layer.onnx if flow.origins.get(name) not in _QUANTISING]
    suppressing = [
        name
        for name in nodes
        if flow.origins.get(name) is Origin.NMS or (name in flow.nodes and flow.nodes[name].op_type in _SUPPRESSION)
    ]
    return 2 * len(suppressing) > len(nodes)


def _pointwise(flow: Flow, layer: Layer) -> tuple[Kind, Sequence[str], str] | None:
    """Kind, nodes and cause of an element-wise kernel; None for all other kernels."""
    operators = flow.work_of(layer)
    quantised = [tensor for tensor in layer.outputs if tensor.type == "Int8"] if layer.input != "Int8" else []
    end = f"; quantised for {_readers(flow, quantised[0])}" if quantised else ""
    functions = activation_functions(flow, layer)
    if functions:
        makers = [flow.layers[flow.convolutions[name].layer] for name in functions if name in flow.convolutions]
        kinds, types = (sorted({getattr(maker, side) for maker in makers}) for side in ("input", "output"))
        kernel = f": the {' and '.join(kinds)} kernel writes {' and '.join(types)}" if makers else ""
        titles = " and ".join(sorted(set(functions.values())))
        return "activation", tuple(functions), f"{titles} after {listed(tuple(functions))}{kernel}{end}"
    if layer.type == "Reformat" or operators <= set(TYPE_CHANGES):
        return _conversion(flow, layer) if layer.inputs and layer.outputs else None
    writers = (index for tensor in layer.inputs for index in flow.writers[tensor.name])
    names = tuple(dict.fromkeys(convolution.name for index in writers for convolution in flow.runs.get(index, ())))
    if operators <= _ELEMENT_WISE and names:
        work = " and ".join(sorted(operators - {*TYPE_CHANGES, "Identity"}))
        return "element-wise", names, f"{work} after {listed(names)}, whose kernel does not include it{end}"
    return None


def _conversion(flow: Flow, layer: Layer) -> tuple[Kind, Sequence[str], str]:
    source, target = layer.inputs[0], layer.outputs[0]
    writers, readers = flow.writers[source.name], _readers(flow, target)
    origin = f"the output of {listed(_first_names(flow, writers))}" if writers else f"the input '{source.name}'"
    nodes = flow.named(layer)
    if source.type == target.type:
        layouts = f" ({source.format} to {target.format})" if source.format != target.format else ""
        return "reformat", nodes, f"moves {origin} ({source.type}) for {readers}{layouts}"
    if target.type == "Int8":
        return "quantise", nodes, f"quantises {origin} ({source.type}) for {readers}"
    why = _why(flow, target)
    if source.type == "Int8":
        return "dequantise", nodes, f"dequantises {origin} (Int8) for {readers} ({target.type}){why}"
    return "cast", nodes, f"casts {origin} from {source.type} to {target.type} for {readers}{why}"


def _why(flow: Flow, tensor: Tensor) -> str:
    """Why the first reader of a float tensor does not read INT8, as far as it is known."""
    for index in flow.readers[tensor.name]:
        layer = flow.layers[index]
        entries = (flow.plan.entries[name] for name in layer.onnx if name in flow.plan.entries)
        entry = next((entry for entry in entries if entry.precision != "int8"), None)
        if index in flow.runs and entry is not None:
            return f", which the plan has in {entry.precision.upper()} ({entry.reason})"
        if any(output.type == "Int8" for output in layer.outputs):
            return ", which quantises it with a step of its own"
        first = next((flow.nodes[name] for name in layer.onnx if name in flow.nodes), None)
        if first is not None and not any(
            flow.maker[name].op_type == "DequantizeLinear" for name in first.input if name in flow.maker
        ):
            return ", which runs in float: the model has no Q/DQ pair before it"
    return ""


def activation_functions(flow: Flow, layer: Layer) -> dict[str, str]:
    """By convolution, the activation function that a layer computes right after it."""
    functions: dict[str, str] = {}
    nodes = [flow.nodes[name] for name in layer.onnx if name in flow.nodes]
    for node in nodes:
        if node.op_type not in ACTIVATION_FUNCTIONS:
            continue
        source = gate = flow.before(node.input[0])
        while source is not None and source.op_type in _CONSTANT_STEPS and _by_constant(flow, source):
            source = flow.before(source.input[0]) or flow.before(source.input[1])
        if source is None or (source.op_type not in CONVOLUTIONS and source.name not in flow.kernels):
            continue
        product = any(
            reader.op_type == "Mul" and node.output[0] in reader.input and not _by_constant(flow, reader)
            for reader in nodes
        )
        # A bias outside its convolution is also an Add, with one value per channel.
        shifted = node.op_type == "HardSigmoid" or (
            gate is not None
            and gate.op_type == "Add"
            and any(math.prod(flow.constants.get(name, ())) == 1 for name in gate.input if name not in flow.maker)
        )
        if node.op_type in (SILU, "Swish") or (product and node.op_type == "Sigmoid"):
            functions[source.name] = "SiLU"
        elif node.op_type in (HARD_SWISH, "HardSwish") or (product and shifted):
            functions[source.name] = "HardSwish"
        else:
            functions[source.name] = node.op_type
    return functions


def _by_constant(flow: Flow, node: onnx.NodeProto) -> bool:
    return any(name not in flow.maker or flow.maker[name].op_type == "Constant" for name in node.input)


def _readers(flow: Flow, tensor: Tensor) -> str:
    readers = flow.readers[tensor.name]
    return listed(_first_names(flow, readers)) if readers else f"the output '{tensor.name}'"


def _first_names(flow: Flow, indices: Sequence[int]) -> tuple[str, ...]:
    names = dict.fromkeys(flow.named(flow.layers[index])[0] for index in indices)
    # Layers that write parts of the tensor may have names that only the builder knows.
    return tuple(name for name in names if name in flow.nodes) or tuple(names)


_WORTH = 0.01
"""Smallest saving, as a share of all bytes, that is reported."""

_SQUARE = 256
"""A square matrix in the NMS with at least this many rows compares every candidate with every other."""


@dataclass(frozen=True)
class Advice:
    """An option of ``trtdet build`` with its effect and the estimated bytes saved per run, also as a share, 0..1.

    The shares of several options do not add up.
    """

    option: str
    text: str
    bytes: int
    share: float

    def __str__(self) -> str:
        return f"{self.option} (about {self.bytes / 1e6:.1f} MB less, {self.share:.0%}): {self.text}"


def advise(flow: Flow, findings: Sequence[Finding], silu: Collection[SiluForm]) -> tuple[Advice, ...]:
    """Options to try, the largest saving first; ``silu`` holds the values of ``--silu`` that the backend supports."""
    total = max(flow.bytes, 1)
    options = (*_precision(flow, findings), *_plugin(flow, findings, silu), *_suppression(flow, findings))
    advice = [Advice(option, text=text, bytes=saved, share=saved / total) for option, text, saved in options]
    return tuple(sorted((item for item in advice if item.bytes >= _WORTH * total), key=lambda item: -item.bytes))


def _precision(flow: Flow, findings: Sequence[Finding]) -> Iterator[tuple[str, str, int]]:
    int8 = [name for name in flow.convolutions if flow.precisions[name] == "int8"]
    depthwise = [name for name in int8 if flow.convolutions[name].depthwise]
    in_fp16 = [name for name in flow.convolutions if flow.precisions[name] == "fp16"]
    if depthwise and len(depthwise) < len(int8):
        beside = {flow.convolutions[name].layer for name in depthwise}
        for layer in [flow.layers[index] for index in beside]:
            beside |= {writer for tensor in layer.inputs for writer in flow.writers[tensor.name]}
            beside |= {reader for tensor in layer.outputs for reader in flow.readers[tensor.name]}
        moved, saved = sum(flow.layers[index].bytes for index in beside), flow.bytes - InFp16(flow, depthwise).bytes
        most = max(flow.padding(flow.convolutions[name]) for name in depthwise)
        padded = f"; in INT8 their channels are padded up to {most:.0f} times" if most > 1 else ""
        yield (
            _keeping(flow, ["depthwise"], in_fp16),
            f"the {len(depthwise)} depthwise convolutions and the layers beside them move "
            f"{moved / max(moved - saved, 1):.1f} times the bytes in INT8 that they would in FP16{padded}",
            saved,
        )
    last = []
    for name in int8:
        layer = flow.layers[flow.convolutions[name].layer]
        after = [flow.layers[reader] for tensor in layer.outputs for reader in flow.readers[tensor.name]]
        quantised = any(tensor.type == "Int8" for reader in after for tensor in reader.outputs)
        if layer.output == "Float" and not quantised and InFp16(flow, [name]).bytes < flow.bytes:
            last.append(name)
    if last and len(last) < len(int8):
        these = "this convolution gives" if len(last) == 1 else f"these {len(last)} convolutions give"
        yield (
            _keeping(flow, last, in_fp16),
            f"nothing quantises what {these}, so the INT8 kernels write 32-bit float, and FP16 halves that",
            flow.bytes - InFp16(flow, last).bytes,
        )
    if int8:
        half = InFp16(flow, int8).bytes
        kinds = ("activation", "element-wise")
        unfused = {node for finding in findings if finding.kind in kinds for node in finding.nodes}
        yield (
            "--fp16",
            f"all in all this engine moves {flow.bytes / max(half, 1):.1f} times the bytes of an FP16 engine: "
            f"after {len(unfused & set(int8))} of the {len(int8)} INT8 convolutions come kernels of their own. "
            "INT8 is faster only where its arithmetic makes up for that, so time both",
            flow.bytes - half,
        )


def _keeping(flow: Flow, names: Sequence[str], in_fp16: Sequence[str]) -> str:
    """The option that keeps these convolutions in FP16 and also those that the plan already keeps."""
    all_depthwise = {name for name, convolution in flow.convolutions.items() if convolution.depthwise}
    before = [name for name in in_fp16 if name not in all_depthwise or "depthwise" not in names]
    if all_depthwise and all_depthwise <= set(before):
        before = ["depthwise", *(name for name in before if name not in all_depthwise)]
    return f"--keep-fp16 {','.join((*before, *names))}"


def _plugin(flow: Flow, findings: Sequence[Finding], silu: Collection[SiluForm]) -> Iterator[tuple[str, str, int]]:
    if "plugin" not in silu:
        return
    layers, saved, count = {layer.name: layer for layer in flow.layers}, 0, 0
    for finding in findings:
        layer = layers[finding.layer]
        if finding.kind != "activation" or not set(activation_functions(flow, layer).values()) <= {"SiLU", "HardSwish"}:
            continue
        inputs = [tensor for tensor in layer.inputs if tensor.type in ("Float", "Half")]
        makers = {index for tensor in inputs for index in flow.writers[tensor.name]}
        if makers and all(index in flow.runs and flow.layers[index].input == "Int8" for index in makers):
            saved += sum(2 * (tensor.bytes - tensor.elements) for tensor in inputs)
            count += len(finding.nodes)
    if count:
        yield (
            "--silu plugin",
            f"{count} activations after INT8 convolutions read float in kernels of their own; between INT8 "
            "convolutions the plugin reads and writes INT8",
            saved,
        )


def _suppression(flow: Flow, findings: Sequence[Finding]) -> Iterator[tuple[str, str, int]]:
    parts = {name for finding in findings if finding.kind == "suppression" for name in finding.parts}
    squares = [
        tensor
        for layer in flow.layers
        if layer.name in parts
        for tensor in (*layer.inputs, *layer.outputs)
        if len(tensor.dims) >= 2 and tensor.dims[-1] == tensor.dims[-2] >= _SQUARE
    ]
    if squares:
        rows = max(tensor.dims[-1] for tensor in squares)
        moved = sum(tensor.bytes for tensor in squares if tensor.dims[-1] == rows)
        yield (
            f"--set nms.pre_nms_topk={rows // 2}",
            f"the suppression compares {rows} candidates with one another, {moved / 1e6:.0f} MB; half as many are a "
            "quarter of it. Score what that costs with 'trtdet eval', or suppress outside with --nms host",
            moved * 3 // 4,
        )
