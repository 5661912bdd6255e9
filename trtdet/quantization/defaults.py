"""Which convolutions stay in FP16 unless INT8 is asked for: those that INT8 kernels make no faster.

- Depthwise convolutions read each value once for each tap and reuse nothing, so that memory bounds them and not
  arithmetic; INT8 kernels pad each group to a whole vector of 32 channels besides, and the best of FP16's are written
  for them.
- With under 16 channels on a side, in a group, most of what an INT8 kernel computes is padding; the first convolution
  of a detector, with 3, is the usual case.
- The outputs of a head give boxes and scores. Nothing quantises them, so that the kernel writes float anyway, and an
  error in them is an error of the detections.

They are few multiply-adds and much of what INT8 costs in accuracy. What can be in INT8 can be asked for all the same.

Sources: NVIDIA, TensorRT documentation, "I/O Formats" (the channels of INT8 tensors are packed in vectors of 4 or 32);
ultralytics pull request 26171 (head outputs stay in float by default); what they are of published models is in
docs/results/precision.md.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.passes.provenance import origin_of
from trtdet.quantization.macs import Macs, multiply_adds
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.precision import Cause, Entry, PrecisionPlan

FEWEST_CHANNELS = 16
"""With fewer on a side, in each group, a convolution stays in FP16."""

_TITLES = {
    Cause.DEPTHWISE: "depthwise",
    Cause.FEW_CHANNELS: f"with under {FEWEST_CHANNELS} channels on a side",
    Cause.HEAD_OUTPUT: "outputs of heads",
}

_DENSE = ("MatMul", "Gemm", "Einsum", "LSTM", "GRU", "RNN", "Attention", "MultiHeadAttention")
_SHAPES = ("Shape", "Size")


def default_plan(model: onnx.ModelProto, placement: QdqPlacement) -> PrecisionPlan:
    """INT8 for each convolution that is faster for it, FP16 or FP32 with the reason for the others.

    Args:
        model: float, as the passes leave it.
        placement: of this model; its plan says what can be in INT8.
    """
    graph = gs.import_onnx(model)
    able = set(placement.plan.names("int8"))
    inner = _before_layers(graph, able, set(origin_of(model)))
    entries = dict(placement.plan.entries)
    for name, conv in multiply_adds(model).items():
        if name in able:
            entries[name] = _left_in_fp16(conv, name not in inner) or entries[name]
    return PrecisionPlan(entries)


def left_by_default(plan: PrecisionPlan) -> str:
    """How many convolutions of a plan stay in FP16 by default, by cause, in words; empty where none does."""
    causes = [entry.cause for entry in plan.entries.values() if entry.precision == "fp16"]
    return ", ".join(f"{causes.count(cause)} {title}" for cause, title in _TITLES.items() if cause in causes)


def _left_in_fp16(conv: Macs, last: bool) -> Entry | None:
    """The entry of a convolution that INT8 makes no faster, None where it may."""
    if conv.depthwise:
        reason = "depthwise: bound by memory, its FP16 kernel is as fast, and INT8 pads its channels to 32"
        return Entry("fp16", reason, Cause.DEPTHWISE)
    if last:
        return Entry("fp16", "head output: gives boxes or scores, and nothing quantises them", Cause.HEAD_OUTPUT)
    sides = {"input": conv.inputs // conv.groups, "output": conv.outputs // conv.groups}
    side = min(sides, key=lambda name: sides[name])
    if sides[side] >= FEWEST_CHANNELS:
        return None
    channels = f"{sides[side]} {side} channel{'s' if sides[side] > 1 else ''}{' a group' if conv.groups > 1 else ''}"
    return Entry("fp16", f"{channels}: under {FEWEST_CHANNELS}, INT8 kernels pad them", Cause.FEW_CHANNELS)


def _before_layers(graph: gs.Graph, able: set[str], written: set[str]) -> set[str]:
    """The names of the nodes whose outputs some layer with weights reads in the end.

    Layers are the convolutions that can be in INT8, and matrix products. The expectation of a softmax, as convolution
    or as product, decodes boxes and is none; nor are products with the few columns that turn centres into corners.

    Args:
        graph: the float network.
        able: names of the convolutions that can be in INT8.
        written: names of the nodes that decode and suppress.
    """
    before: set[int] = set()
    found: set[str] = set()
    for layer in graph.nodes:
        dense = layer.op in _DENSE and layer.name not in written and _mixes_features(layer)
        if layer.name not in able and not dense:
            continue
        # The expectation of a softmax decodes; attention is reached by its other inputs.
        ends = (*_SHAPES, "Softmax") if dense else _SHAPES
        waiting = [maker for tensor in layer.inputs for maker in tensor.inputs]
        while waiting:
            node = waiting.pop()
            if id(node) in before or node.op in ends:
                continue
            before.add(id(node))
            found.add(node.name)
            waiting.extend(maker for tensor in node.inputs for maker in tensor.inputs)
    return found


def _mixes_features(product: gs.Node) -> bool:
    constants = [tensor for tensor in product.inputs if isinstance(tensor, gs.Constant)]
    return not constants or max(np.max(tensor.shape, initial=0) for tensor in constants) >= FEWEST_CHANNELS
