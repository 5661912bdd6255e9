"""One scale for tensors whose values a join, a cut or a pool only moves, so that INT8 flows through it.

Suppose a convolution and a Concat read a quantised tensor, and the Concat's output is quantised too. Then the tensor is
written twice, in INT8 and in float. With one scale the pairs around the Concat, Split, Slice, MaxPool or nearest Resize
cancel. Source: NVIDIA, "Working with Quantized Types", TensorRT documentation, section "Q/DQ Layer-Placement
Recommendations".
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

_CUTS = ("Split", "Slice")
MOVES = ("Concat", "MaxPool", "Resize", "Identity", *_CUTS)  # operators that only move values


def shared(
    model: onnx.ModelProto, placement: QdqPlacement, ranges: Ranges, most_ratio: float = MOST_RATIO
) -> tuple[Ranges, tuple[tuple[str, ...], ...]]:
    """One range for each group of tensors between which values only move; also returns the groups of several tensors.
    Only tensors that are quantised for INT8 layers count. ``most_ratio`` is the widest range over the narrowest."""
    groups = {name: {name} for name in placement.activations}
    amax = {name: ranges.tensors[name].amax for name in placement.activations}
    # The closest first, so that a group does not start with two that barely fit.
    links = sorted(set(_links(model, amax)), key=lambda pair: (abs(math.log(amax[pair[0]] / amax[pair[1]])), pair))
    for first, second in links:
        both = groups[first] | groups[second]
        if max(amax[name] for name in both) <= most_ratio * min(amax[name] for name in both):
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
            move = maker(waiting.pop(), *MOVES)
            if move is None or _interpolates(move):
                continue
            for source in move.inputs if move.op == "Concat" else move.inputs[:1]:
                if source.name in names:
                    yield source.name, name
                elif isinstance(source, gs.Variable):
                    waiting.append(source)


def quantized_joins(model: onnx.ModelProto, every: bool = False) -> onnx.ModelProto:
    """Quantises the inputs of a Concat whose output is quantised, if one of them already has that scale, or in any case
    with ``every``. The results do not change: quantising a value twice with one scale is the same as once."""
    graph = to_graph(model)
    write = Writer(graph, "trtdet/join", Origin.QDQ)
    for concat in [node for node in graph.nodes if node.op == "Concat"]:
        joined = concat.outputs[0]
        quantizer = joined.outputs[0] if len(joined.outputs) == 1 and joined not in graph.outputs else None
        if quantizer is None or quantizer.op != "QuantizeLinear" or quantizer.inputs[1].values.size != 1:
            continue
        paired = any(_pair_of(tensor, quantizer) is not None for tensor in concat.inputs)
        if (paired or every) and not any(isinstance(tensor, gs.Constant) for tensor in concat.inputs):
            concat.inputs = [_pair(write, tensor, quantizer) for tensor in concat.inputs]
    graph.cleanup()
    return to_model(graph)


def quantized_cuts(model: onnx.ModelProto, every: bool = False) -> onnx.ModelProto:
    """Quantises a tensor before Split or Slice if all its parts are quantised with one scale anyway, as in a C2f block,
    so that the kernel that makes it writes INT8. With ``every`` also before MaxPool and nearest Resize. The results do
    not change."""
    graph = to_graph(model)
    write = Writer(graph, "trtdet/cut", Origin.QDQ)
    moves = {*MOVES} - {"Concat"} if every else {*_CUTS}
    # From the last tensor on: a pair behind one operator lets the pair before it follow.
    for tensor in [tensor for tensor in graph.tensors().values() if isinstance(tensor, gs.Variable)][::-1]:
        cuts: list[gs.Node] = []
        quantizers: list[gs.Node] = []
        for reader in tensor.outputs:
            cut = reader.op in moves and not _interpolates(reader) and reader.inputs[0] is tensor
            (cuts if cut else quantizers).append(reader)
        parts = [part for cut in cuts for part in cut.outputs]
        quantizers += [reader for part in parts for reader in part.outputs]
        outer = any(part is output for part in (tensor, *parts) for output in graph.outputs)
        if not cuts or not quantizers or outer or maker(tensor, "DequantizeLinear"):
            continue
        scales = {each.inputs[1].values.tobytes() if each.op == "QuantizeLinear" else b"" for each in quantizers}
        if len(scales) == 1 and b"" not in scales and quantizers[0].inputs[1].values.size == 1:
            pair = _pair(write, tensor, quantizers[0])
            for reader in cuts:
                reader.inputs[0] = pair
    graph.cleanup()
    return to_model(graph)


def _interpolates(node: gs.Node) -> bool:
    mode: str = node.attrs.get("mode", "nearest")
    return node.op == "Resize" and mode != "nearest"


def _pair_of(tensor: gs.Tensor, like: gs.Node) -> gs.Variable | None:
    """The tensor's existing Q/DQ result with the scale of ``like``."""
    for reader in tensor.outputs:
        if reader.op == "QuantizeLinear" and np.array_equal(reader.inputs[1].values, like.inputs[1].values):
            result: gs.Variable = reader.outputs[0].outputs[0].outputs[0]
            return result
    return None


def _pair(write: Writer, tensor: gs.Tensor, like: gs.Node) -> gs.Variable:
    """The tensor's Q/DQ result with the scale of ``like``, written if it has none."""
    pair = _pair_of(tensor, like)
    if pair is None:
        scale = like.inputs[1:]
        pair = write("DequantizeLinear", write("QuantizeLinear", tensor, *scale), *scale)
        pair.shape, pair.dtype = tensor.shape, tensor.dtype
    return pair
