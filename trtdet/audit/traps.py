"""What costs transformers accuracy or speed unless it is known, told where an engine has it, with what to do.

- GridSample in FP16: its coordinates are then a fraction of a pixel off.
- A LayerNormalization that is written out in other operators: in FP16 its squares overflow, and float32 takes casts.
- An attention that is several kernels: builders fuse its products with the softmax in float, and less around INT8.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import onnx

from trtdet.audit.traffic import Flow
from trtdet.quantization.written_out import Attention, attentions, normalisations

HALF_COORDINATES, HALF_SQUARES = "half-coordinates", "half-squares"
INEXACT = (HALF_COORDINATES, HALF_SQUARES)
"""The kinds that cost accuracy: the build warns of them."""

_EXPORT = "export with opset 17 or later, which has LayerNormalization as one operator"
_PAIR = ("QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class Trap:
    """Where an engine has one of them: kind, nodes and cause as of a finding, and the layers that it is about."""

    kind: str
    nodes: tuple[str, ...]
    cause: str
    layers: tuple[int, ...]


def traps(flow: Flow) -> Iterator[Trap]:
    """What an engine has of them."""
    samples = [node.name for node in flow.model.graph.node if node.op_type == "GridSample" and _in_half(flow, node)]
    if samples:
        cause = "GridSample in FP16, whose coordinates are a fraction of a pixel off: export the model in float32"
        yield Trap(HALF_COORDINATES, tuple(samples), cause, _layers(flow, samples))
    for nodes in normalisations(flow.model):
        half = any(_in_half(flow, flow.nodes[name]) for name in nodes)
        why = "in FP16, which holds no squares over 65504" if half else "in float32, as FP16 does not hold its squares"
        cause = f"{len(nodes)} operators of a LayerNormalization {why}: {_EXPORT}"
        yield Trap(HALF_SQUARES if half else "normalisation", nodes, cause, _layers(flow, nodes))
    for attention in attentions(flow.model):
        layers = _layers(flow, attention.nodes)
        if len(layers) > 1:
            cause = f"{attention.softmax} and its products are {len(layers)} kernels{_why(flow, attention)}"
            yield Trap("attention", attention.nodes, cause, layers)


def _why(flow: Flow, attention: Attention) -> str:
    products = (flow.nodes[name] for name in (attention.scores, attention.values))
    read = [flow.maker[name].op_type for node in products for name in node.input if name in flow.maker]
    if any(operator in _PAIR for operator in read):
        return (
            ": Q/DQ pairs stand before the products; without --int8-attention they run in FP16, in one kernel if the "
            "builder has one of this form, which the audit of such a build says"
        )
    return ", though no Q/DQ pair stands between them: the builder has no kernel of this form"


def _in_half(flow: Flow, node: onnx.NodeProto) -> bool:
    """Whether a node computes in FP16: as the network is written or, where that leaves it open, as its layer reads."""
    if onnx.TensorProto.FLOAT16 in flow.types.values():
        return flow.types.get(node.output[0]) == onnx.TensorProto.FLOAT16
    return any(flow.layers[index].input == "Half" for index in _layers(flow, [node.name]))


def _layers(flow: Flow, names: Collection[str]) -> tuple[int, ...]:
    """The layers that move something and compute some of the nodes, in order; a product's is that which multiplies."""
    wanted = set(names)
    found = set()
    for index, layer in enumerate(flow.layers):
        own = {name for name in layer.onnx if name in wanted and flow.layer_of.get(name, index) == index}
        if own and layer.bytes:
            found.add(index)
    return tuple(sorted(found))


def uncounted(flow: Flow, trap: Trap, spent: Mapping[str, int]) -> dict[str, int]:
    """Bytes of a trap's layers, by name, that other findings have not counted."""
    layers = [flow.layers[index] for index in trap.layers]
    return {layer.name: max(layer.bytes - spent.get(layer.name, 0), 0) for layer in layers}
