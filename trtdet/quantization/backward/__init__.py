"""Reverse-mode differentiation of an ONNX model, written as ONNX nodes: onnxruntime computes the gradients.

Source of the method: Griewank and Walther, "Evaluating Derivatives", 2nd edition 2008, chapter 3. The nodes are visited
from the outputs back; each adds the product of its outputs' gradients with its Jacobian to its inputs' gradients, see
:mod:`trtdet.quantization.backward.operators`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_graphsurgeon as gs

from trtdet.errors import ModelError
from trtdet.quantization.backward.operators import OPERATORS
from trtdet.quantization.backward.tape import Tape

OPSET = 18
"""The backward pass is written in this opset: ScatterElements and ScatterND add up from 16 on, and reductions take
their axes as an input from 18 on."""

STEPS = frozenset(
    (
        *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "IsNaN", "ArgMax", "ArgMin"),
        *("NonZero", "Sign", "Round", "Ceil", "Floor", "Shape", "Size", "NonMaxSuppression"),
    )
)
"""Operators whose results change in steps, with gradient 0."""


def gradients(
    graph: gs.Graph, tensors: Iterable[gs.Variable], seeds: Mapping[str, gs.Tensor]
) -> dict[str, gs.Variable]:
    """Adds the nodes that compute the gradient of ``sum(seed * output)`` to a graph of opset :data:`OPSET`, in place.

    Args:
        graph: sorted topologically, after :func:`trtdet.quantization.backward.sampling.written_out`.
        tensors: the tensors to differentiate by.
        seeds: by name of an output, its factor, of the output's shape.

    Returns:
        The gradients by the tensors' names; tensors that no seeded output depends on are left out.

    Raises:
        ModelError: an operator in between has no derivative here.
    """
    wanted, tape, nodes = list(tensors), Tape(graph), list(graph.nodes)
    depending = {tensor.name for tensor in wanted}
    for node in nodes:
        if node.op not in STEPS and any(tensor.name in depending for tensor in node.inputs):
            depending.update(tensor.name for tensor in node.outputs)
    sums = {name: seed for name, seed in seeds.items() if name in depending}
    for node in reversed(nodes):
        slopes = [sums.get(tensor.name) for tensor in node.outputs]
        moving = [tensor.name in depending for tensor in node.inputs]
        if node.op in STEPS or not any(moving) or all(slope is None for slope in slopes):
            continue
        if node.op not in OPERATORS:
            raise ModelError(f"'{node.name}' has no gradient here: the operator {node.op}")
        try:
            parts = OPERATORS[node.op](tape, node, slopes)
        except NotImplementedError as missing:
            raise ModelError(f"'{node.name}' has no gradient here: {missing}") from None
        for tensor, part, moves in zip(node.inputs, parts, moving, strict=False):
            if part is not None and moves:
                sums[tensor.name] = tape("Add", sums[tensor.name], part) if tensor.name in sums else part
    return {tensor.name: sums[tensor.name] for tensor in wanted if tensor.name in sums}
