"""What exporters write out in several operators, where builders and FP16 want to see it whole: found by its form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx

_TRANSPARENT = ("Cast", "QuantizeLinear", "DequantizeLinear", "Identity")
_MOVES = ("Transpose", "Reshape")
_SCALES = ("Mul", "Div", "Add", "Where", "Sub")
"""What stands between the product of queries and keys and the softmax: a scale, a mask, a position."""


@dataclass(frozen=True)
class Attention:
    """An attention: softmax(queries keys) values.

    Attributes:
        scores: name of the product of queries and keys.
        between: names of what is between it and the softmax, without casts and Q/DQ pairs.
        softmax: name of the softmax.
        values: name of the product with the values.
    """

    scores: str
    between: tuple[str, ...]
    softmax: str
    values: str

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all that computes it."""
        return (self.scores, *self.between, self.softmax, self.values)


def normalisations(model: onnx.ModelProto) -> tuple[tuple[str, ...], ...]:
    """The LayerNormalizations that are written out: ``(x - mean) / sqrt(mean((x - mean)^2) + epsilon)``.

    That is how exporters write them below opset 17, which has the operator. FP16 holds no squares over 65504.

    Returns:
        For each the names of its nodes from the first mean to the quotient, without casts and Q/DQ pairs.
    """
    graph = _Graph(model.graph)
    found = []
    for root in model.graph.node:
        if root.op_type != "Sqrt":
            continue
        variance, added = graph.back(root.input[0]), []
        if variance is not None and variance.op_type == "Add":
            added = [variance]
            variance = next(filter(None, map(graph.back, variance.input)), None)
        square = None if (mean := _of(variance, "ReduceMean")) is None else graph.back(mean.input[0])
        left = None if (taken := _of(square, "Pow", "Mul")) is None else graph.back(taken.input[0])
        deviation = _of(left, "Sub")
        means = [] if deviation is None else [_of(graph.back(name), "ReduceMean") for name in deviation.input]
        if any(means):
            quotients = [node for node in graph.on(root.output[0]) if node.op_type in ("Div", "Reciprocal", "Mul")]
            nodes = [*means, left, square, variance, *added, root, *quotients[:1]]
            found.append(tuple(node.name for node in nodes if node is not None))
    return tuple(found)


def attentions(model: onnx.ModelProto) -> tuple[Attention, ...]:
    """The attentions of a model, whose products are both of two activations."""
    graph = _Graph(model.graph)
    found = []
    for softmax in model.graph.node:
        if softmax.op_type != "Softmax":
            continue
        between: list[onnx.NodeProto] = []
        before = graph.back(softmax.input[0])
        while before is not None and before.op_type in _SCALES:
            between.append(before)
            before = next(filter(None, (_of(graph.back(name), "MatMul", *_SCALES) for name in before.input)), None)
        after = [node for node in graph.on(softmax.output[0], _MOVES) if node.op_type == "MatMul"]
        # An expectation over constants decodes boxes.
        if (first := _of(before, "MatMul")) is not None and after and all(map(graph.made, after[0].input)):
            names = tuple(node.name for node in reversed(between))
            found.append(Attention(first.name, names, softmax.name, after[0].name))
    return tuple(found)


def _of(node: onnx.NodeProto | None, *operators: str) -> onnx.NodeProto | None:
    """A node that is of one of some operators."""
    return node if node is not None and node.op_type in operators else None


class _Graph:
    """Who makes and who reads a tensor, what only changes its type skipped."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._makers: Mapping[str, onnx.NodeProto] = {name: node for node in graph.node for name in node.output}
        self._takers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in dict.fromkeys(node.input):
                self._takers.setdefault(name, []).append(node)
        self._inputs = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}

    def made(self, tensor: str) -> bool:
        """Whether a tensor is computed or given, and so no constant."""
        return tensor in self._inputs or (tensor in self._makers and self._makers[tensor].op_type != "Constant")

    def back(self, tensor: str) -> onnx.NodeProto | None:
        """What makes a tensor."""
        node = self._makers.get(tensor)
        while node is not None and node.op_type in _TRANSPARENT:
            node = self._makers.get(node.input[0])
        return node

    def on(self, tensor: str, more: Iterable[str] = ()) -> list[onnx.NodeProto]:
        """What reads a tensor, also behind operators of ``more``."""
        found, waiting, through = [], [tensor], {*_TRANSPARENT, *more}
        while waiting:
            for node in self._takers.get(waiting.pop(), ()):
                if node.op_type in through:
                    waiting.extend(node.output)
                else:
                    found.append(node)
        return found
