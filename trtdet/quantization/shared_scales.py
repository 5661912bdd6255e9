"""One scale for tensors that a join or a pool only moves values between, so that INT8 flows through it.

A tensor that is quantised for a convolution and read by a Concat whose output is quantised as well is otherwise written
twice, in INT8 for the one and in float for the other. With one scale on both sides the pairs around the Concat, MaxPool
or nearest Resize cancel. Source: NVIDIA, "Working with Quantized Types", TensorRT documentation, section "Q/DQ
Layer-Placement Recommendations".
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
"""Tensors share a scale where the largest range is at most so many times the smallest: the rounding noise of a tensor
grows with the square of what its range is widened by."""

_MOVES = ("Concat", "MaxPool", "Resize", "Identity")


def shared(
    model: onnx.ModelProto, placement: QdqPlacement, ranges: Ranges
) -> tuple[Ranges, tuple[tuple[str, ...], ...]]:
    """The ranges with one for each group of tensors that values are only moved between, and the groups of several; of
    the tensors of a float model that are quantised for layers in INT8."""
    groups = {name: {name} for name in placement.activations}
    amax = {name: ranges.tensors[name].amax for name in placement.activations}
    # The nearest first, so that a group does not begin with two that only just fit.
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
    """Pairs of quantised tensors of which the second is made from the first by moving values alone."""
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
    """Quantises the inputs of a Concat whose output is quantised with the scale that one of them has already.

    Nothing is computed otherwise: a value that is quantised twice with one scale is quantised once.
    """
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
    """The tensor quantised and dequantised with the scale of ``like``, where it is already."""
    for reader in tensor.outputs:
        if reader.op == "QuantizeLinear" and np.array_equal(reader.inputs[1].values, like.inputs[1].values):
            return reader.outputs[0].outputs[0].outputs[0]
    return None
