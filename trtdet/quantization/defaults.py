"""Layers that stay in FP16 by default, because INT8 makes them no faster.

- Depthwise convolutions are bound by memory, since they read each value once for each tap. INT8 kernels also pad each
  group to a vector of 32 channels.
- With under 16 channels per group, most of what an INT8 kernel computes is padding.
- The outputs of a head give boxes and scores: nothing quantises them, and their errors are errors of the detections.
  Scores that choose rows for later layers are outputs of a head as well.

These layers have few multiply-adds and cause much of the accuracy loss of INT8. A user may request INT8 for them.

Where a backend lists the layers of an engine and quantises in separate kernels, estimates choose among the others, see
:mod:`trtdet.building.default_plan`.

Sources: NVIDIA, TensorRT documentation, "I/O Formats" (the channels of INT8 tensors are packed in vectors of 4 or 32);
ultralytics pull request 26171 (head outputs stay in float by default); figures are in docs/results/precision.md.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.passes.provenance import origin_of
from trtdet.passes.walk import maker, upstream
from trtdet.quantization.macs import Macs, multiply_adds
from trtdet.quantization.placement import FEWEST_FEATURES, QdqPlacement, after_softmax
from trtdet.quantization.precision import Cause, Entry, PrecisionPlan

FEWEST_CHANNELS = 16  # a convolution with fewer input or output channels per group stays in FP16

_FEWEST_FUSED = FEWEST_CHANNELS + 1
"""The same where kernels write INT8 themselves: 16 channels, padded to 32, take as many bytes as in FP16."""

_TITLES = {
    Cause.DEPTHWISE: "depthwise",
    Cause.FEW_CHANNELS: "with few channels on a side",
    Cause.HEAD_OUTPUT: "outputs of heads",
    Cause.NO_TIME_GAINED: "where INT8 is estimated to take longer",
}

_DENSE = ("MatMul", "Gemm", "Einsum", "LSTM", "GRU", "RNN", "Attention", "MultiHeadAttention")
_SHAPES = ("Shape", "Size")


def default_plan(model: onnx.ModelProto, placement: QdqPlacement, fused: bool = False) -> PrecisionPlan:
    """INT8 for each convolution of a float model that it may make faster; FP16 or FP32 with a reason for the others.
    ``fused`` is that of :class:`trtdet.quantization.DataFlow`."""
    graph = gs.import_onnx(model)
    able = set(placement.plan.names("int8"))
    inner = _before_layers(graph, able, set(origin_of(model)))
    entries, fewest = dict(placement.plan.entries), _FEWEST_FUSED if fused else FEWEST_CHANNELS
    for name, conv in multiply_adds(model).items():
        # Attention products have no weights and run in INT8 only on request.
        if name in able and conv.inputs:
            entries[name] = _left_in_fp16(conv, name not in inner, fewest) or entries[name]
    return PrecisionPlan(entries)


def left_by_default(plan: PrecisionPlan) -> str:
    """A phrase on how many convolutions stay in FP16 by default, by cause; empty if none does."""
    causes = [entry.cause for entry in plan.entries.values() if entry.precision == "fp16"]
    return ", ".join(f"{causes.count(cause)} {title}" for cause, title in _TITLES.items() if cause in causes)


def _left_in_fp16(conv: Macs, last: bool, fewest: int) -> Entry | None:
    """The FP16 entry of a convolution that INT8 makes no faster, else None."""
    if conv.depthwise:
        reason = "depthwise: bound by memory, its FP16 kernel is as fast, and INT8 pads its channels to 32"
        return Entry("fp16", reason, Cause.DEPTHWISE)
    if last:
        return Entry("fp16", "head output: gives boxes or scores, and nothing quantises them", Cause.HEAD_OUTPUT)
    sides = {"input": conv.inputs // conv.groups, "output": conv.outputs // conv.groups}
    side = min(sides, key=lambda name: sides[name])
    if sides[side] >= fewest:
        return None
    channels = f"{sides[side]} {side} channel{'s' if sides[side] > 1 else ''}{' a group' if conv.groups > 1 else ''}"
    return Entry("fp16", f"{channels}: under {fewest}, INT8 kernels pad them", Cause.FEW_CHANNELS)


def _before_layers(graph: gs.Graph, able: set[str], written: set[str]) -> set[str]:
    """Names of the nodes whose outputs some later layer reads: a layer that can run in INT8, or another matrix product.
    Layers that decode boxes, such as the expectation of a softmax, do not count; nor do products with few columns,
    which turn centres into corners."""

    def values(node: gs.Node) -> list[gs.Tensor]:
        """The inputs that carry values, none where the search ends; a TopK's positions only choose rows."""
        if node.op in _SHAPES or _expects(node):
            return []
        tops = [maker(tensor, "TopK") for tensor in node.inputs]
        return [each for each, top in zip(node.inputs, tops, strict=True) if top is None or each is top.outputs[0]]

    layers = []
    for layer in graph.nodes:
        constants = [tensor for tensor in layer.inputs if isinstance(tensor, gs.Constant)]
        mixes = not constants or max(np.max(tensor.shape, initial=0) for tensor in constants) >= FEWEST_FEATURES
        dense = layer.op in _DENSE and layer.name not in written and mixes
        if (layer.name in able or dense) and not _expects(layer):
            layers.append(layer)
    read = [tensor for layer in layers for tensor in values(layer)]
    nodes = upstream(*read, reads=values)
    return {node.name for node in nodes if node.op not in _SHAPES and not _expects(node)}


def _expects(node: gs.Node) -> bool:
    """Whether a layer is the expectation of a softmax, which decodes boxes; a decoder's next layer may read these."""
    weighted = any(isinstance(tensor, gs.Constant) for tensor in node.inputs)
    return node.op in ("Conv", *_DENSE) and weighted and after_softmax(node.inputs[0])
