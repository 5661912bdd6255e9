"""Finds operations that exporters decompose but that builders and FP16 need as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from trtdet.passes.walk import maker

_TRANSPARENT = ("Cast", "QuantizeLinear", "DequantizeLinear", "Identity")
_MOVES = ("Transpose", "Reshape")
_SCALES = ("Mul", "Div", "Add", "Where", "Sub")
"""Operators between the product of queries and keys and the softmax: a scale, a mask, a position."""


@dataclass(frozen=True)
class Attention:
    """softmax(queries keys) values: names of the product of queries and keys, of the nodes between it and the softmax
    (without casts and Q/DQ pairs), of the softmax, and of the product with the values."""

    scores: str
    between: tuple[str, ...]
    softmax: str
    values: str

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self.scores, *self.between, self.softmax, self.values)


def normalisations(model: onnx.ModelProto) -> tuple[tuple[str, ...], ...]:
    """Decomposed LayerNormalizations: ``(x - mean) / sqrt(mean((x - mean)^2) + epsilon)``. Exporters write them below
    opset 17, which added the operator. FP16 cannot hold squares over 65504. Returns the names of each one's nodes from
    the first mean to the quotient, without casts and Q/DQ pairs."""
    norms = []
    for root in gs.import_onnx(model).nodes:
        if root.op != "Sqrt":
            continue
        variance, added = _back(root.inputs[0]), []
        if variance is not None and variance.op == "Add":
            added = [variance]
            variance = next(filter(None, map(_back, variance.inputs)), None)
        square = None if variance is None or variance.op != "ReduceMean" else _back(variance.inputs[0])
        centred = None if square is None or square.op not in ("Pow", "Mul") else _back(square.inputs[0])
        if centred is None or centred.op != "Sub":
            continue
        means = [node for node in map(_back, centred.inputs) if node is not None and node.op == "ReduceMean"]
        if means:
            quotients = [node for node in _on(root.outputs[0]) if node.op in ("Div", "Reciprocal", "Mul")]
            norms.append(tuple(node.name for node in (*means, centred, square, variance, *added, root, *quotients[:1])))
    return tuple(norms)


def attentions(model: onnx.ModelProto) -> tuple[Attention, ...]:
    """The attentions of a model; their products are both of two activations."""
    result = []
    for softmax in gs.import_onnx(model).nodes:
        if softmax.op != "Softmax":
            continue
        between: list[str] = []
        before = _back(softmax.inputs[0])
        while before is not None and before.op in _SCALES:
            between.insert(0, before.name)
            makers = (_back(tensor) for tensor in before.inputs)
            before = next((node for node in makers if node is not None and node.op in ("MatMul", *_SCALES)), None)
        after = [node for node in _on(softmax.outputs[0], _MOVES) if node.op == "MatMul"]
        # A product with constants is an expectation, which decodes boxes.
        computed = after and not any(isinstance(tensor, gs.Constant) for tensor in after[0].inputs)
        if before is not None and before.op == "MatMul" and computed:
            result.append(Attention(before.name, tuple(between), softmax=softmax.name, values=after[0].name))
    return tuple(result)


def _back(tensor: gs.Tensor) -> gs.Node | None:
    """The node that makes a tensor, ignoring type changes."""
    node = maker(tensor)
    return _back(node.inputs[0]) if node is not None and node.op in _TRANSPARENT else node


def _on(tensor: gs.Tensor, more: Iterable[str] = ()) -> list[gs.Node]:
    """Nodes that read a tensor, also behind type changes and operators of ``more``."""
    readers, waiting = [], [tensor]
    while waiting:
        for node in waiting.pop().outputs:
            if node.op in (*_TRANSPARENT, *more):
                waiting.extend(node.outputs)
            else:
                readers.append(node)
    return readers
