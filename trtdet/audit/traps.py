"""Operators of an engine in which transformers lose accuracy or speed, and what to do.

- GridSample in FP16: its coordinates are off by a fraction of a pixel.
- A LayerNormalization made of several operators: its squares overflow in FP16, and float32 needs casts.
- An attention in several kernels: builders fuse its products with the softmax in float, but less around INT8.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx

from trtdet.audit.layers import Layer
from trtdet.audit.traffic import Flow
from trtdet.quantization.written_out import attentions, normalisations

HALF_COORDINATES, HALF_SQUARES = "half-coordinates", "half-squares"
INEXACT = (HALF_COORDINATES, HALF_SQUARES)
"""The kinds that cost accuracy; the build warns about them."""

_EXPORT = "export with opset 17 or later, which has LayerNormalization as one operator"


def traps(flow: Flow) -> Iterator[tuple[str, tuple[str, ...], str, tuple[Layer, ...]]]:
    """Kind, nodes and cause of each trap, as in a finding, and its layers."""
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
