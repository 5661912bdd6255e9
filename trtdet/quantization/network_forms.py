"""Forms of an INT8 network: other Q/DQ pairs for the same plan and ranges. Which one is fastest depends on the layers
that a builder fuses, so they are candidates to build and time side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import onnx
import onnx_graphsurgeon as gs

from trtdet.calibration import Ranges
from trtdet.passes.base import Writer
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.provenance import Origin
from trtdet.passes.walk import maker, read_instead, upstream
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.precision import Cause, Entry, PrecisionPlan
from trtdet.quantization.shared_scales import quantized_cuts, quantized_joins, shared


@dataclass(frozen=True)
class NetworkForm:
    """How a plan is written as a network. The default is what a build writes."""

    # ``close`` quantises the inputs of a Concat where their ranges are within a factor of 1.25 of its output's.
    # ``all`` gives all of them the widest range, so that each kernel writes its part of the Concat in INT8, and lets
    # the pairs pass MaxPool and nearest Resize. Source: NVIDIA-AI-IOT/yolo_deepstream, ``yolov7_qat``.
    joins: Literal["close", "all"] = "close"
    # The quantised inputs of a sum of feature maps: the ``skip`` alone, ``both``, or ``none``.
    residual: Literal["skip", "both", "none"] = "skip"
    # One Q/DQ pair for all readers of a tensor (``shared``), or one for each (``own``), as the quantizers of
    # ``pytorch-quantization`` write them.
    pairs: Literal["shared", "own"] = "shared"
    first: Literal["int8", "fp16"] | None = None  # precision of the layers that read the image; None for the plan's

    def planned(self, model: onnx.ModelProto, plan: PrecisionPlan, able: PrecisionPlan) -> PrecisionPlan:
        """The plan with the precision of the layers that have no other layer before them; ``able`` has every possible
        layer in INT8."""
        entries, layers = dict(plan.entries), able.entries
        for node in gs.import_onnx(model).nodes if self.first is not None else ():
            first = node.name in layers and not any(each.name in layers for each in upstream(node.inputs[0]))
            if first and layers[node.name].precision == "int8" and entries[node.name].precision != self.first:
                fp16 = Entry("fp16", "first layer, in FP16 in this form of the network", Cause.REQUESTED)
                entries[node.name] = layers[node.name] if self.first == "int8" else fp16
        return PrecisionPlan(entries)

    def placed(self, model: onnx.ModelProto, placement: QdqPlacement) -> QdqPlacement:
        """The placement of a plan with the quantised inputs of sums."""
        if self.residual == "skip":
            return placement
        layers, readers, sums = placement.plan.entries, {}, set()
        for tensor, places in placement.readers.items():
            readers[tensor] = tuple(place for place in places if place[0] in layers)
            sums |= {name for name, _ in places if name not in layers}
        for node in gs.import_onnx(model).nodes if self.residual == "both" else ():
            for position, operand in enumerate(node.inputs if node.name in sums else ()):
                readers[operand.name] = (*readers.get(operand.name, ()), (node.name, position))
        return replace(placement, activations=tuple(readers), readers=readers)

    def ranged(self, model: onnx.ModelProto, placement: QdqPlacement, ranges: Ranges) -> Ranges:
        """The ranges of a placement's tensors with those that share a scale."""
        return shared(model, placement, ranges, most_ratio=math.inf)[0] if self.joins == "all" else ranges

    def paired(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """A model with the pairs of layers and sums -> with those around operators that only move values."""
        every = self.joins == "all"
        model = quantized_cuts(quantized_joins(model, every), every)
        return _with_own_pairs(model) if self.pairs == "own" else model


CANDIDATES: Mapping[str, NetworkForm] = {
    "joins-in-int8": NetworkForm(joins="all"),
    "sums-of-two-int8": NetworkForm(residual="both"),
    "sums-in-fp16": NetworkForm(residual="none"),
    "own-pairs": NetworkForm(pairs="own"),
    "first-in-int8": NetworkForm(first="int8"),
    "first-in-fp16": NetworkForm(first="fp16"),
}
"""Forms that differ from the default in one point each."""


def _with_own_pairs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Gives each reader of an activation's Q/DQ pair one of its own."""
    graph = to_graph(model)
    write = Writer(graph, "trtdet/own", Origin.QDQ)
    for node in [node for node in graph.nodes if node.op == "DequantizeLinear"]:
        quantizer = maker(node.inputs[0], "QuantizeLinear")
        if quantizer is None or isinstance(quantizer.inputs[0], gs.Constant):
            continue
        tensor, (source, *scale) = node.outputs[0], quantizer.inputs
        for reader in list({id(reader): reader for reader in tensor.outputs}.values())[1:]:
            own = write("DequantizeLinear", write("QuantizeLinear", source, *scale), *scale)
            own.shape, own.dtype = tensor.shape, tensor.dtype
            read_instead([reader], tensor, own)
    graph.cleanup()
    return to_model(graph)
