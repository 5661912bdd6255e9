"""Tensors that need a range, and nodes that must not have one, where TensorRT quantises a float network itself.

A weakly typed network has no Q/DQ nodes: a layer may run in INT8 if the tensors that it reads and writes have a range.
So every tensor before a convolution gets one. Nodes after the convolutions compute boxes and scores. INT8 would cost
accuracy there and gain nothing, so they stay in float.

Source: NVIDIA, "Working with Quantized Types", TensorRT 8.6 documentation, section "Implicit Quantization".
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from trtdet.passes.walk import upstream
from trtdet.quantization.precision import PrecisionPlan
from trtdet.quantization.weighted import PRODUCTS
from trtdet.quantization.written_out import normalisations

_CONTROL = ("Loop", "If", "Scan")

_ALIGNING = ("RoiAlign", "GridSample")
"""Operators that read features at coordinates, for which half precision is too coarse."""

_FEATURES = {**dict.fromkeys((*_ALIGNING, "Gather", "GatherND", "GatherElements"), (0,)), "Where": (1, 2)}
"""Positions of the feature inputs; the other inputs of these operators are places, computed from boxes."""

_OF_PLACES = ("Softmax", "LayerNormalization", "Gelu", "Erf", "ReduceMean", "Pow", "Sqrt", "MatMul")
"""Operators around products for which INT8 is too coarse, or breaks the fusion."""


@dataclass(frozen=True)
class Quantizable:
    """The part of a float model that TensorRT may run in INT8."""

    tensors: tuple[str, ...]  # tensors that need a range, in graph order, the network's input first
    outside: tuple[str, ...]  # names of the nodes that stay in float, without loops and conditions, which are no layers
    # Names of nodes before a layer that stay in float too: attention, normalisation, GELU.
    floating: tuple[str, ...] = ()

    def precisions(self, plan: PrecisionPlan) -> dict[str, str]:
        """``fp16`` or ``fp32`` by name of each node that must not run in INT8. Boxes in pixels do not fit FP16, which a
        weakly typed network might choose for them."""
        return {**dict.fromkeys(self.outside, "fp32"), **dict.fromkeys(self.floating, "fp16"), **plan.kept()}


def quantizable(model: onnx.ModelProto, plan: PrecisionPlan) -> Quantizable:
    """Finds the nodes that may run in INT8: the plan's INT8 layers, and everything before one of them."""
    graph = gs.import_onnx(onnx.shape_inference.infer_shapes(model))
    graph.toposort()
    able = set(plan.names("int8"))

    def features(node: gs.Node) -> list[gs.Tensor]:
        return [node.inputs[position] for position in _FEATURES.get(node.op, range(len(node.inputs)))]

    layers = [node for node in graph.nodes if node.name in able]
    before_layers = upstream(*(tensor for layer in layers for tensor in features(layer)), reads=features)
    inside = {id(node) for node in (*layers, *before_layers) if node.op not in _ALIGNING}
    outputs = (output for node in graph.nodes if id(node) in inside for output in node.outputs)
    tensors = [tensor.name for tensor in (*graph.inputs, *outputs) if tensor.dtype == "float32"]
    # A decomposed normalisation has squares and sums that overflow FP16.
    written_out = {name for names in normalisations(model) for name in names}
    exact = [node for node in graph.nodes if id(node) not in inside or node.name in written_out]
    outside = [node.name for node in exact if node.op not in _CONTROL]
    before = [node for node in graph.nodes if id(node) in inside and node.name not in able | written_out]
    products = any(node.op in PRODUCTS and id(node) in inside for node in graph.nodes)
    floating = tuple(node.name for node in before if node.op in _OF_PLACES) if products else ()
    return Quantizable(tuple(tensors), tuple(outside), floating)
