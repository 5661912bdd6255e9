"""Which layers stay in FP16 unless INT8 is asked for: those that INT8 kernels make no faster.

- Depthwise convolutions read each value once for each tap and reuse nothing, so that memory bounds them; INT8 kernels
  pad each group to a whole vector of 32 channels besides.
- With under 16 channels on a side, in a group, most of what an INT8 kernel computes is padding.
- The outputs of a head give boxes and scores: nothing quantises them, and an error in them is an error of the
  detections. Scores by which rows are chosen for the layers behind are outputs of a head as well.

They are few multiply-adds and much of what INT8 costs in accuracy. What can be in INT8 can be asked for all the same.

Where a backend quantises in a kernel of its own behind each convolution, a tensor that FP16 convolutions give is
written in FP16, read and written again in INT8, where an FP16 convolution would read it as it is. So where all that
makes a convolution's input is in FP16, and what INT8 saves takes less time than these bytes, it stays in FP16.

Sources: NVIDIA, TensorRT documentation, "I/O Formats" (the channels of INT8 tensors are packed in vectors of 4 or 32);
ultralytics pull request 26171 (head outputs stay in float by default); figures are in docs/results/precision.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.passes.provenance import origin_of
from trtdet.passes.walk import maker, upstream
from trtdet.quantization.macs import Macs, multiply_adds
from trtdet.quantization.placement import FEWEST_FEATURES, QdqPlacement, after_softmax
from trtdet.quantization.precision import Cause, Entry, PrecisionPlan
from trtdet.quantization.weight_forms import DataFlow

FEWEST_CHANNELS = 16
"""With fewer on a side, in each group, a convolution stays in FP16."""

_TITLES = {
    Cause.DEPTHWISE: "depthwise",
    Cause.FEW_CHANNELS: f"with under {FEWEST_CHANNELS} channels on a side",
    Cause.HEAD_OUTPUT: "outputs of heads",
    Cause.BOUND_BY_MEMORY: "bound by memory behind these",
}

BYTES_A_MULTIPLY_ADD = 0.0025
"""The bytes that memory moves in the time that INT8 saves a multiply-add against FP16: twice the memory's rate over
that of INT8 operations. It is that of an L4; by the published rates in ``trtdet/audit/gpus.py`` others have 0.0024 to
0.0066."""

_DENSE = ("MatMul", "Gemm", "Einsum", "LSTM", "GRU", "RNN", "Attention", "MultiHeadAttention")
_SHAPES = ("Shape", "Size")


def default_plan(model: onnx.ModelProto, placement: QdqPlacement, flow: DataFlow = DataFlow()) -> PrecisionPlan:
    """INT8 for each convolution of a float model that is faster for it, FP16 or FP32 with the reason for the others."""
    graph = gs.import_onnx(model)
    able = set(placement.plan.names("int8"))
    inner = _before_layers(graph, able, set(origin_of(model)))
    entries = dict(placement.plan.entries)
    work = multiply_adds(model)
    for name, conv in work.items():
        # What is no layer with weights was asked for by itself.
        if name in able and conv.inputs:
            entries[name] = _left_in_fp16(conv, name not in inner) or entries[name]
    if flow.fused is False:
        entries.update(_bound_by_memory(graph, placement, entries, work=work))
    return PrecisionPlan(entries)


def left_by_default(plan: PrecisionPlan) -> str:
    """How many convolutions of a plan stay in FP16 by default, by cause, in words; empty where none does."""
    causes = [entry.cause for entry in plan.entries.values() if entry.precision == "fp16"]
    return ", ".join(f"{causes.count(cause)} {title}" for cause, title in _TITLES.items() if cause in causes)


def _bound_by_memory(
    graph: gs.Graph, placement: QdqPlacement, entries: Mapping[str, Entry], work: Mapping[str, Macs]
) -> dict[str, Entry]:
    """The INT8 convolutions that FP16 is estimated to be faster for, because what makes their input is in FP16.

    Counted is the kernel that quantises: it reads and writes what the FP16 convolution behind it has in its own kernel,
    two bytes a value more in all; the weights take one byte less in INT8.
    """
    tensors = graph.tensors()
    makers = {name: _layers_before(tensors[name], entries) for name in placement.activations}
    weights = {node.name: node.inputs[1] for node in graph.nodes if node.name in entries}
    bound: dict[str, Entry] = {}
    grown = True
    while grown:
        grown = False
        for name in placement.activations:
            readers = dict.fromkeys(reader for reader, _ in placement.readers[name] if reader in entries)
            convs = [
                conv
                for conv in readers
                if conv not in bound and work[conv].inputs and entries[conv].precision == "int8"
            ]
            float_made = all(layer in bound or entries[layer].precision != "int8" for layer in makers[name])
            if not convs or not makers[name] or not float_made:
                continue
            sizes = (tensors[name].shape or (1, 0))[1:]
            size = math.prod(sizes) if all(isinstance(side, int) and side > 0 for side in sizes) else 0
            constants = (weights[conv] for conv in convs if isinstance(weights[conv], gs.Constant))
            saved = 2 * size - sum(weight.values.size for weight in constants)
            worth = BYTES_A_MULTIPLY_ADD * sum(work[conv].count for conv in convs)
            if saved > worth:
                reason = (
                    f"bound by memory: behind FP16 convolutions INT8 moves {saved / 1e6:.2f} MB more, and saves "
                    f"arithmetic that takes as long as {worth / 1e6:.2f} MB"
                )
                bound.update(dict.fromkeys(convs, Entry("fp16", reason, Cause.BOUND_BY_MEMORY)))
                grown = True
    return bound


def _layers_before(tensor: gs.Tensor, layers: Collection[str]) -> set[str]:
    """The layers that a tensor is computed from, without another layer in between."""
    nodes = upstream(tensor, reads=lambda node: () if node.name in layers else node.inputs)
    return {node.name for node in nodes if node.name in layers}


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
    """The names of the nodes whose outputs some layer with weights reads in the end: a layer that can be in INT8, or
    another matrix product. Neither what decodes boxes is one, such as the expectation of a softmax, nor products with
    the few columns that turn centres into corners."""

    def values(node: gs.Node) -> list[gs.Tensor]:
        """The inputs without the positions of a TopK: what only chooses rows gives no values."""
        tops = [maker(tensor, "TopK") for tensor in node.inputs]
        return [
            tensor for tensor, top in zip(node.inputs, tops, strict=True) if top is None or tensor is top.outputs[0]
        ]

    def ends(node: gs.Node) -> bool:
        return node.op in _SHAPES or _expects(node)

    layers = []
    for layer in graph.nodes:
        constants = [tensor for tensor in layer.inputs if isinstance(tensor, gs.Constant)]
        mixes = not constants or max(np.max(tensor.shape, initial=0) for tensor in constants) >= FEWEST_FEATURES
        dense = layer.op in _DENSE and layer.name not in written and mixes
        if (layer.name in able or dense) and not _expects(layer):
            layers.append(layer)
    read = [tensor for layer in layers for tensor in values(layer)]
    nodes = upstream(*read, reads=lambda node: () if ends(node) else values(node))
    return {node.name for node in nodes if not ends(node)}


def _expects(node: gs.Node) -> bool:
    """Whether it is the expectation of a softmax: it decodes boxes, from which a decoder's next layer may go on."""
    weighted = any(isinstance(tensor, gs.Constant) for tensor in node.inputs)
    return node.op in ("Conv", *_DENSE) and weighted and after_softmax(node.inputs[0])
