"""Checks the Q/DQ pairs of a model that another tool quantised against what builders fuse.

Source: NVIDIA, "Working with Quantized Types", TensorRT documentation, section "Q/DQ Layer-Placement Recommendations".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs

from trtdet.passes.walk import above, downstream, maker, upstream
from trtdet.quantization.defaults import FEWEST_CHANNELS
from trtdet.quantization.half import ACTIVATION_FUNCTIONS
from trtdet.quantization.weighted import CONVOLUTIONS, LAYERS

COMMUTING = ("MaxPool", "Slice", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Dropout")
"""Operators that only move values of their first input, so that a scale before them holds behind them."""

Kind = Literal["blocks-fusion", "missing-pair", "different-scales", "float-island", "fp16-scales"]

_GATES = ("Sigmoid", "HardSigmoid")


@dataclass(frozen=True)
class PairProblem:
    """Pairs that cost time or accuracy, and what to do about them.

    Attributes:
        kind: ``blocks-fusion``: a pair inside of what one kernel computes; ``missing-pair``: a layer or a sum with one
            quantised and one float input; ``different-scales``: INT8 must be scaled again; ``float-island``: a float
            layer between INT8 layers; ``fp16-scales``: the backend takes FP16 scales, and rounding changes them.
        nodes: names, in the model that was given.
    """

    kind: Kind
    nodes: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def check_pairs(graph: gs.Graph) -> tuple[PairProblem, ...]:
    """The places of a graph with pairs where INT8 is lost or slow, in graph order by kind; constants are folded."""
    checks = (_inside_of_kernels, _half_quantized, _on_half_of_a_sum, _several_scales, _islands)
    return tuple(problem for check in checks for problem in check(graph))


def _inside_of_kernels(graph: gs.Graph) -> Iterator[PairProblem]:
    for quantizer, readers in _quantizers(graph):
        source = maker(quantizer.inputs[0])
        if source is None:
            continue
        layer = source.op in (*LAYERS, "BatchNormalization") or _adds_bias(source)
        ends = ("BatchNormalization", *ACTIVATION_FUNCTIONS) if layer else ("Mul",) if source.op in _GATES else ()
        reader = next((each for each in readers if each.op in ends), None)
        if reader is not None:
            yield PairProblem(
                "blocks-fusion",
                (quantizer.name, source.name, reader.name),
                f"'{quantizer.name}' parts {source.op} '{source.name}' from {reader.op} '{reader.name}', which one "
                "kernel computes; it is left out here: quantise behind the activation instead",
            )


def _half_quantized(graph: gs.Graph) -> Iterator[PairProblem]:
    for node in graph.nodes:
        if not _has_weights(node):
            continue
        value, weight = _is_quantized(above(node.inputs[0], *COMMUTING)), _is_quantized(_stored(node))
        if value != weight:
            has, lacks = ("input", "weights") if value else ("weights", "input")
            yield PairProblem(
                "missing-pair",
                (node.name,),
                f"{node.op} '{node.name}' has a pair on its {has} and none on its {lacks}, and stays in float: add one "
                f"to its {lacks}, or leave the other out",
            )


def _on_half_of_a_sum(graph: gs.Graph) -> Iterator[PairProblem]:
    """Sums of feature maps whose skip is float though it is quantised elsewhere, or the other operand is; and those
    whose other operand is quantised too, which parts the layer before from the sum."""
    for node in graph.nodes:
        if node.op != "Add" or any(isinstance(tensor, gs.Constant) for tensor in node.inputs):
            continue
        sources = [_unquantized(tensor) for tensor in node.inputs]
        shapes = [source.shape for source in sources]
        if shapes[0] is None or shapes[0] != shapes[1] or len(shapes[0]) != 4:
            continue
        quantized = [_is_quantized(tensor) for tensor in node.inputs]
        users = [_users(source) - {id(node)} for source in sources]
        skip = max((0, 1), key=lambda index: (bool(users[index]), quantized[index], len(users[index])))
        elsewhere = any(reader.op == "QuantizeLinear" for reader in sources[skip].outputs)
        scales = {_scale_of(tensor) for tensor in node.inputs}
        branch = sources[1 - skip]
        if not quantized[skip] and (quantized[1 - skip] or elsewhere):
            yield PairProblem(
                "missing-pair",
                (node.name,),
                f"the sum '{node.name}' reads its skip '{sources[skip].name}' in float: give this input the pair of "
                "the layers that read the tensor",
            )
        elif all(quantized) and len(scales) > 1:
            yield PairProblem(
                "different-scales",
                (node.name,),
                f"the sum '{node.name}' adds INT8 of two scales; '{branch.name}' is added in float here: leave its "
                "pair out, so that the layer before adds the skip, or give both one scale",
            )
        elif all(quantized) and not users[1 - skip]:
            yield PairProblem(
                "blocks-fusion",
                (node.name,),
                f"the pair on '{branch.name}' keeps the layer before it from computing the sum '{node.name}'; it is "
                "left out here: quantise the skip alone",
            )


def _several_scales(graph: gs.Graph) -> Iterator[PairProblem]:
    for node in graph.nodes:
        if node.op == "Concat" and any(_has_weights(each) for each in downstream([node])):
            ends = [each for each in node.outputs[0].outputs if each.op == "QuantizeLinear"]
            scales = {_scale_of(tensor) for tensor in node.inputs if _is_quantized(tensor)}
            scales |= {_number(each) for each in ends}
            if len(scales) > 1:
                yield PairProblem(
                    "different-scales",
                    (node.name, *(each.name for each in ends)),
                    f"Concat '{node.name}' joins and gives INT8 of {len(scales)} scales, which more kernels must "
                    "unify: give the pairs of its inputs and output one scale, the largest",
                )
    for tensor in {id(each.inputs[0]): each.inputs[0] for each, _ in _quantizers(graph)}.values():
        pairs = [each for each in tensor.outputs if each.op == "QuantizeLinear"]
        if len({_number(each) for each in pairs}) > 1:
            names = tuple(each.name for each in pairs)
            yield PairProblem(
                "different-scales",
                names,
                f"'{tensor.name}' is quantised with several scales, by {', '.join(map(repr, names))}: give all its "
                "readers one pair",
            )


def _islands(graph: gs.Graph) -> Iterator[PairProblem]:
    layers = {id(node): _is_quantized(_stored(node)) for node in graph.nodes if _has_weights(node)}

    def stops(node: gs.Node) -> list[gs.Tensor]:
        return [] if id(node) in layers else list(node.inputs)

    for node in graph.nodes:
        if layers.get(id(node), True) or _is_quantized(above(node.inputs[0], *COMMUTING)) or _gains_nothing(node):
            continue
        before = [each for each in upstream(node.inputs[0], reads=stops) if id(each) in layers]
        after = [each for each in downstream([node]) if each is not node and id(each) in layers]
        after = [each for each in after if any(one is node for one in upstream(each.inputs[0], reads=stops))]
        if before and after and all(layers[id(each)] for each in (*before, *after)):
            yield PairProblem(
                "float-island",
                (node.name,),
                f"{node.op} '{node.name}' is in float between INT8 layers such as '{before[0].name}' and "
                f"'{after[0].name}': quantise its input and weights too, or leave those in float",
            )


def _quantizers(graph: gs.Graph) -> Iterator[tuple[gs.Node, list[gs.Node]]]:
    """Each QuantizeLinear of an activation with the readers of its DequantizeLinear nodes."""
    for node in graph.nodes:
        if node.op == "QuantizeLinear" and isinstance(node.inputs[0], gs.Variable):
            ends = [each.outputs[0] for each in node.outputs[0].outputs if each.op == "DequantizeLinear"]
            yield node, [reader for end in ends for reader in end.outputs]


def _users(tensor: gs.Tensor) -> set[int]:
    """Identities of the nodes that read a float tensor, directly or through pairs."""
    direct = [each for each in tensor.outputs if each.op != "QuantizeLinear"]
    integers = [each.outputs[0] for each in tensor.outputs if each.op == "QuantizeLinear"]
    ends = [each for values in integers for each in values.outputs]
    return {id(each) for each in (*direct, *(reader for end in ends for reader in end.outputs[0].outputs))}


def _is_quantized(tensor: gs.Tensor) -> bool:
    return maker(tensor, "DequantizeLinear") is not None


def _unquantized(tensor: gs.Tensor) -> gs.Tensor:
    return above(tensor, "DequantizeLinear", "QuantizeLinear")


def _scale_of(tensor: gs.Tensor) -> bytes:
    pair = maker(tensor, "DequantizeLinear")
    return b"" if pair is None else _number(pair)


def _number(node: gs.Node) -> bytes:
    """The scale of a Q/DQ node, to compare."""
    return node.inputs[1].values.tobytes() if isinstance(node.inputs[1], gs.Constant) else b""


def _stored(layer: gs.Node) -> gs.Tensor:
    return above(layer.inputs[1], "Transpose")


def _has_weights(node: gs.Node) -> bool:
    """Whether a node is a layer whose weights are constant, behind a pair or not."""
    if node.op not in LAYERS:
        return False
    return isinstance(above(node.inputs[1], "Transpose", "DequantizeLinear", "QuantizeLinear"), gs.Constant)


def _adds_bias(node: gs.Node) -> bool:
    constants = [isinstance(tensor, gs.Constant) or _is_constant(tensor) for tensor in node.inputs]
    return node.op == "Add" and any(constants) and any(maker(tensor, "MatMul") for tensor in node.inputs)


def _is_constant(tensor: gs.Tensor) -> bool:
    return isinstance(_unquantized(tensor), gs.Constant)


def _gains_nothing(node: gs.Node) -> bool:
    """Whether trtdet's own plan leaves a layer in float too: a depthwise convolution, or one with few channels."""
    weight = _stored(node)
    groups = node.attrs.get("group", 1)
    if node.op not in CONVOLUTIONS or not isinstance(weight, gs.Constant):
        return False
    outputs, inputs = weight.values.shape[:2]
    return bool(groups > 1 and inputs == 1) or bool(np.minimum(outputs // groups, inputs) < FEWEST_CHANNELS)
