"""Checks the Q/DQ pairs of a model that another tool quantised against what builders fuse.

Source: NVIDIA, "Working with Quantized Types", TensorRT documentation, section "Q/DQ Layer-Placement Recommendations".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs

from trtdet.passes.walk import PAIR, above, downstream, maker, upstream
from trtdet.quantization.defaults import FEWEST_CHANNELS
from trtdet.quantization.half import ACTIVATION_FUNCTIONS
from trtdet.quantization.weighted import CONVOLUTIONS, LAYERS

COMMUTING = ("MaxPool", "Slice", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Dropout")
"""Operators that only move values of their first input, so that a scale before them holds behind them."""

Kind = Literal["blocks-fusion", "missing-pair", "different-scales", "float-island", "fp16-scales", "asymmetric"]

_GATES = ("Sigmoid", "HardSigmoid")


@dataclass(frozen=True)
class PairProblem:
    """Pairs that cost time or accuracy.

    Attributes:
        kind: ``blocks-fusion``: a pair inside of what one kernel computes; ``missing-pair``: a layer or a sum with one
            quantised and one float input; ``different-scales``: INT8 must be scaled again; ``float-island``: a float
            layer between INT8 layers; ``fp16-scales``: the backend takes FP16 scales, and rounding changes them;
            ``asymmetric``: UINT8 or zero points, in whose place symmetric INT8 covers the same range.
        nodes: names, in the model that was given.
        text: what is wrong, and what to do.
    """

    kind: Kind
    nodes: tuple[str, ...]
    text: str


def check_pairs(graph: gs.Graph) -> tuple[PairProblem, ...]:
    """The places of a graph with pairs where INT8 is lost or slow, by kind; constants are folded."""
    checks = (_inside_of_kernels, _half_quantized, _sums, _several_scales, _islands)
    return tuple(problem for check in checks for problem in check(graph))


def _inside_of_kernels(graph: gs.Graph) -> Iterator[PairProblem]:
    for quantizer in _quantizers(graph):
        source, name = maker(quantizer.inputs[0]), quantizer.name
        if source is None:
            continue
        layer = source.op in (*LAYERS, "BatchNormalization") or _adds_bias(source)
        ends = ("BatchNormalization", *ACTIVATION_FUNCTIONS) if layer else ("Mul",) if source.op in _GATES else ()
        reader = next((each for each in _readers(quantizer) if each.op in ends), None)
        if reader is not None:
            text = f"'{name}' parts {source.op} '{source.name}' from {reader.op} '{reader.name}', which one kernel "
            text += "computes; it is left out here: quantise behind the activation instead"
            yield PairProblem("blocks-fusion", (name, source.name, reader.name), text)


def _half_quantized(graph: gs.Graph) -> Iterator[PairProblem]:
    for node in filter(_has_weights, graph.nodes):
        value, weight = _is_quantized(above(node.inputs[0], *COMMUTING)), _has_int8_weights(node)
        if value != weight:
            has, lacks = ("input", "weights") if value else ("weights", "input")
            text = f"{node.op} '{node.name}' has a pair on its {has} and none on its {lacks}, and stays in float: "
            yield PairProblem("missing-pair", (node.name,), f"{text}add one to its {lacks}, or leave the other out")


def _sums(graph: gs.Graph) -> Iterator[PairProblem]:
    """Sums of feature maps whose skip is float although it is quantised elsewhere, or the other operand is; and those
    whose other operand is quantised too, which parts the layer before from the sum."""
    for node in graph.nodes:
        if node.op != "Add" or any(isinstance(tensor, gs.Constant) for tensor in node.inputs):
            continue
        sources = [above(tensor, *PAIR) for tensor in node.inputs]
        if sources[0].shape is None or sources[0].shape != sources[1].shape or len(sources[0].shape) != 4:
            continue
        pairs = [maker(tensor, "DequantizeLinear") for tensor in node.inputs]
        users = [_users(source) - {id(node)} for source in sources]
        # The skip is what others read too.
        skip = max((0, 1), key=lambda index: (bool(users[index]), pairs[index] is not None, len(users[index])))
        other, branch = pairs[1 - skip], sources[1 - skip].name
        elsewhere = any(reader.op == "QuantizeLinear" for reader in sources[skip].outputs)
        if pairs[skip] is None and (other or elsewhere):
            text = f"the sum '{node.name}' reads its skip '{sources[skip].name}' in float: give this input the pair of "
            yield PairProblem("missing-pair", (node.name,), f"{text}the layers that read the tensor")
        elif all(pairs) and _scale(pairs[0]) != _scale(pairs[1]):
            text = f"the sum '{node.name}' adds INT8 of two scales; '{branch}' is added in float here: leave its pair "
            text += "out, so that the layer before adds the skip, or give both one scale"
            yield PairProblem("different-scales", (node.name,), text)
        elif all(pairs) and not users[1 - skip]:
            text = f"the pair on '{branch}' keeps the layer before it from computing the sum '{node.name}'; it is left "
            yield PairProblem("blocks-fusion", (node.name,), f"{text}out here: quantise the skip alone")


def _several_scales(graph: gs.Graph) -> Iterator[PairProblem]:
    for node in graph.nodes:
        if node.op == "Concat" and any(_has_weights(each) for each in downstream([node])):
            ends = [each for each in node.outputs[0].outputs if each.op == "QuantizeLinear"]
            pairs = [maker(tensor, "DequantizeLinear") for tensor in node.inputs]
            scales = {_scale(each) for each in (*pairs, *ends) if each is not None}
            if len(scales) > 1:
                text = f"Concat '{node.name}' joins and gives INT8 of {len(scales)} scales, which more kernels must "
                text += "unify: give the pairs of its inputs and output one scale, the largest"
                yield PairProblem("different-scales", (node.name, *(each.name for each in ends)), text)
    by_tensor: dict[str, list[gs.Node]] = {}
    for quantizer in _quantizers(graph):
        by_tensor.setdefault(quantizer.inputs[0].name, []).append(quantizer)
    for tensor, quantizers in by_tensor.items():
        if len({_scale(each) for each in quantizers}) > 1:
            names = tuple(each.name for each in quantizers)
            text = (
                f"'{tensor}' is quantised with several scales, by {', '.join(map(repr, names))}: give all its readers "
            )
            yield PairProblem("different-scales", names, f"{text}one pair")


def _islands(graph: gs.Graph) -> Iterator[PairProblem]:
    layers = {id(node): _has_int8_weights(node) for node in graph.nodes if _has_weights(node)}

    def before(node: gs.Node) -> list[gs.Node]:
        """The nearest layers that a layer's input is computed from."""
        nodes = upstream(node.inputs[0], reads=lambda each: () if id(each) in layers else each.inputs)
        return [each for each in nodes if id(each) in layers]

    for node in graph.nodes:
        if layers.get(id(node), True) or _is_quantized(above(node.inputs[0], *COMMUTING)) or _gains_nothing(node):
            continue
        after = [each for each in downstream([node]) if id(each) in layers and id(node) in map(id, before(each))]
        if before(node) and after and all(layers[id(each)] for each in (*before(node), *after)):
            text = f"{node.op} '{node.name}' is in float between INT8 layers such as '{before(node)[0].name}' and "
            text += f"'{after[0].name}': quantise its input and weights too, or leave those in float"
            yield PairProblem("float-island", (node.name,), text)


def _quantizers(graph: gs.Graph) -> list[gs.Node]:
    """The QuantizeLinear nodes of activations."""
    return [node for node in graph.nodes if node.op == "QuantizeLinear" and isinstance(node.inputs[0], gs.Variable)]


def _readers(quantizer: gs.Node) -> list[gs.Node]:
    """The nodes that read a pair."""
    return [reader for end in quantizer.outputs[0].outputs for reader in end.outputs[0].outputs]


def _users(tensor: gs.Tensor) -> set[int]:
    """Identities of the nodes that read a float tensor, directly or through pairs."""
    through = (_readers(each) if each.op == "QuantizeLinear" else [each] for each in tensor.outputs)
    return {id(reader) for readers in through for reader in readers}


def _is_quantized(tensor: gs.Tensor) -> bool:
    return maker(tensor, "DequantizeLinear") is not None


def _scale(node: gs.Node) -> bytes:
    """The scale of a Q/DQ node, to compare."""
    return node.inputs[1].values.tobytes() if isinstance(node.inputs[1], gs.Constant) else b""


def _has_int8_weights(layer: gs.Node) -> bool:
    return _is_quantized(above(layer.inputs[1], "Transpose"))


def _has_weights(node: gs.Node) -> bool:
    """Whether a node is a layer whose weights are constant, behind a pair or not."""
    return node.op in LAYERS and isinstance(above(node.inputs[1], "Transpose", *PAIR), gs.Constant)


def _adds_bias(node: gs.Node) -> bool:
    constants = any(isinstance(above(tensor, *PAIR), gs.Constant) for tensor in node.inputs)
    return node.op == "Add" and constants and any(maker(tensor, "MatMul") for tensor in node.inputs)


def _gains_nothing(node: gs.Node) -> bool:
    """Whether trtdet's own plan leaves a layer in float too: a depthwise convolution, or one with few channels."""
    weight, groups = node.inputs[1], node.attrs.get("group", 1)
    if node.op not in CONVOLUTIONS or not isinstance(weight, gs.Constant):
        return False
    outputs, inputs = weight.values.shape[:2]
    return bool(groups > 1 and inputs == 1) or bool(np.minimum(outputs // groups, inputs) < FEWEST_CHANNELS)
