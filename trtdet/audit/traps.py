"""Operators in which transformers lose accuracy or speed, where an engine has them, and what to do about them.

- GridSample in FP16: its coordinates are then a fraction of a pixel off.
- A LayerNormalization that is written out in other operators: in FP16 its squares overflow, and float32 takes casts.
- An attention that is several kernels: builders fuse its products with the softmax in float, and less around INT8.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx

from trtdet.audit.layers import Layer
from trtdet.audit.traffic import Flow
from trtdet.quantization.written_out import attentions, normalisations

HALF_COORDINATES, HALF_SQUARES = "half-coordinates", "half-squares"
INEXACT = (HALF_COORDINATES, HALF_SQUARES)
"""The kinds that cost accuracy: the build warns of them."""

_EXPORT = "export with opset 17 or later, which has LayerNormalization as one operator"


def traps(flow: Flow) -> Iterator[tuple[str, tuple[str, ...], str, tuple[Layer, ...]]]:
    """Kind, nodes and cause of each trap in an engine, as of a finding, and the layers that it is about."""
    samples = [node.name for node in flow.model.graph.node if node.op_type == "GridSample" and _in_half(flow, node)]
    if samples:
        cause = "GridSample in FP16, whose coordinates are a fraction of a pixel off: export the model in float32"
        yield HALF_COORDINATES, tuple(samples), cause, _layers(flow, samples)
    for nodes in normalisations(flow.model):
        half = any(_in_half(flow, flow.nodes[name]) for name in nodes)
        why = "in FP16, which holds no squares over 65504" if half else "in float32, as FP16 does not hold its squares"
        cause = f"{len(nodes)} operators of a LayerNormalization {why}: {_EXPORT}"
        yield HALF_SQUARES if half else "normalisation", nodes, cause, _layers(flow, nodes)
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
    """Whether a node computes in FP16: as the network is written or, where that leaves it open, as its layer reads."""
    if onnx.TensorProto.FLOAT16 in flow.types.values():
        return flow.types.get(node.output[0]) == onnx.TensorProto.FLOAT16
    return any(layer.input == "Half" for layer in _layers(flow, [node.name]))


def _layers(flow: Flow, names: Collection[str]) -> tuple[Layer, ...]:
    """The layers that move something and compute some of the nodes, in order; a product's is that which multiplies."""
    return tuple(
        layer
        for index, layer in enumerate(flow.layers)
        if layer.bytes and any(name in names and flow.layer_of.get(name, index) == index for name in layer.onnx)
    )
