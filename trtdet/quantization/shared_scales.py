"""One scale for tensors whose values a join or a pool only moves, so that INT8 flows through it.

Suppose a convolution and a Concat read a quantised tensor, and the Concat's output is quantised too. Then the tensor is
written twice, in INT8 and in float. With one scale the pairs around the Concat, MaxPool or nearest Resize cancel.
Source: NVIDIA, "Working with Quantized Types", TensorRT documentation, section "Q/DQ Layer-Placement Recommendations".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.calibration import Ranges
from trtdet.passes.base import Writer
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.provenance import Origin
from trtdet.passes.walk import maker
from trtdet.quantization.placement import QdqPlacement

MOST_RATIO = 1.25
"""Maximum ratio of ranges that share a scale; the rounding noise grows with the square of the widening."""

_MOVES = ("Concat", "MaxPool", "Resize", "Identity")


def shared(
    model: onnx.ModelProto, placement: QdqPlacement, ranges: Ranges
) -> tuple[Ranges, tuple[tuple[str, ...], ...]]:
    """One range for each group of tensors between which values only move; also returns the groups of several tensors.
    Only tensors that are quantised for INT8 layers count."""
    groups = {name: {name} for name in placement.activations}
    amax = {name: ranges.tensors[name].amax for name in placement.activations}
    # The closest first, so that a group does not start with two that barely fit.
    links = sorted(set(_links(model, amax)), key=lambda pair: (abs(math.log(amax[pair[0]] / amax[pair[1]])), pair))
    for first, second in links:
        both = groups[first] | groups[second]
        if max(amax[name] for name in both) <= MOST_RATIO * min(amax[name] for name in both):
            groups.update(dict.fromkeys(both, both))
    widest = {name: max(amax[other] for other in group) for name, group in groups.items()}
    changed = {name: replace(ranges.tensors[name], amax=widest[name]) for name in widest if widest[name] != amax[name]}
    together = tuple(sorted({tuple(sorted(group)) for group in groups.values() if len(group) > 1}))
    return replace(ranges, tensors={**ranges.tensors, **changed}) if changed else ranges, together


def _links(model: onnx.ModelProto, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Pairs of quantised tensors; operators only move values from the first to the second."""
    tensors = gs.import_onnx(model).tensors()
    for name in names:
        waiting = [tensors[name]]
        while waiting:
            move = maker(waiting.pop(), *_MOVES)
            if move is None or (move.op == "Resize" and move.attrs.get("mode", "nearest") != "nearest"):
                continue
            for source in move.inputs if move.op == "Concat" else move.inputs[:1]:
                if source.name in names:
                    yield source.name, name
                elif isinstance(source, gs.Variable):
                    waiting.append(source)


def quantized_joins(model: onnx.ModelProto) -> onnx.ModelProto:
    """Quantises the inputs of a Concat whose output is quantised, if one of them already has that scale. The results do
    not change: quantising a value twice with one scale is the same as once."""
    graph = to_graph(model)
    write = Writer(graph, "trtdet/join", Origin.QDQ)
    for concat in [node for node in graph.nodes if node.op == "Concat"]:
        joined = concat.outputs[0]
        quantizer = joined.outputs[0] if len(joined.outputs) == 1 and joined not in graph.outputs else None
        if quantizer is None or quantizer.op != "QuantizeLinear" or quantizer.inputs[1].values.size != 1:
            continue
        pairs = [_pair_of(tensor, quantizer) for tensor in concat.inputs]
        if all(pair is None for pair in pairs) or any(isinstance(tensor, gs.Constant) for tensor in concat.inputs):
            continue
        for index, (tensor, pair) in enumerate(zip(concat.inputs, pairs, strict=True)):
            if pair is None:
                scale = quantizer.inputs[1:]
                pair = write("DequantizeLinear", write("QuantizeLinear", tensor, *scale), *scale)
                pair.shape, pair.dtype = tensor.shape, tensor.dtype
            concat.inputs[index] = pair
    graph.cleanup()
    return to_model(graph)


def _pair_of(tensor: gs.Tensor, like: gs.Node) -> gs.Tensor | None:
    """The tensor's existing Q/DQ result with the scale of ``like``."""
    for reader in tensor.outputs:
        if reader.op == "QuantizeLinear" and np.array_equal(reader.inputs[1].values, like.inputs[1].values):
            return reader.outputs[0].outputs[0].outputs[0]
    return None
