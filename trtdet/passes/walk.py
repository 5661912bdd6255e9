"""Functions that follow the tensors of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

PAIR = ("QuantizeLinear", "DequantizeLinear")

SAME_VALUES = ("Unsqueeze", "Squeeze", "Flatten", "Reshape", "Cast", "Identity")
"""Operators that change the shape or type of their first input, but no values."""

_INDEXING = ("NonZero", "Transpose", "Split", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Cast")


def maker(tensor: gs.Tensor, *ops: str) -> gs.Node | None:
    """The node that makes a tensor, if its operator is in ``ops`` or ``ops`` is empty; else None."""
    if not isinstance(tensor, gs.Variable) or not tensor.inputs:
        return None
    node = tensor.inputs[0]
    return node if not ops or node.op in ops else None


def above(tensor: gs.Tensor, *ops: str) -> gs.Tensor:
    """Follows first inputs upwards through nodes of ``ops``."""
    while (node := maker(tensor, *ops)) is not None:
        tensor = node.inputs[0]
    return tensor


def number(tensor: gs.Tensor) -> float | None:
    """The value of a constant with one element; None for any other tensor."""
    values = np.asarray(tensor.values).reshape(-1) if isinstance(tensor, gs.Constant) else np.zeros(0)
    return values[0].item() if values.size == 1 else None


def constant(node: gs.Node, position: int) -> float | None:
    """The value of an input with one element; None if it is missing or computed."""
    return number(node.inputs[position]) if len(node.inputs) > position else None


def values_of(tensor: gs.Tensor) -> NDArray[Any] | None:
    """The values of a constant, also one that a Constant node gives; None if they are computed."""
    node = maker(tensor, "Constant")
    constant = tensor if node is None else node.attrs.get("value")
    return np.asarray(constant.values) if isinstance(constant, gs.Constant) else None


def redirect(graph: gs.Graph, old: gs.Variable, new: gs.Variable) -> None:
    """Replaces ``old`` by ``new`` in all readers and graph outputs; graph outputs keep their name and position."""
    for node in list(old.outputs):
        for position, tensor in enumerate(node.inputs):
            if tensor is old:
                node.inputs[position] = new
    for position, tensor in enumerate(graph.outputs):
        if tensor is old:
            graph.outputs[position] = new
            new.name, old.name = old.name, f"{old.name}/before"


def read_instead(readers: Iterable[gs.Node], old: gs.Tensor, new: gs.Tensor) -> None:
    """Makes some readers of ``old`` read ``new``."""
    for node in readers:
        node.inputs = [new if tensor is old else tensor for tensor in node.inputs]


def upstream(
    *tensors: gs.Tensor,
    end: gs.Tensor | None = None,
    reads: Callable[[gs.Node], Iterable[gs.Tensor]] = lambda node: node.inputs,
) -> Iterator[gs.Node]:
    """Yields the nodes that tensors are computed from, nearest first, without passing ``end``.

    ``reads`` selects the inputs of a node to follow.
    """
    visited: set[int] = set()
    queue = list(tensors)
    for source in queue:
        node = None if source is end else maker(source)
        if node is not None and id(node) not in visited:
            visited.add(id(node))
            yield node
            queue += reads(node)


def depends(tensor: gs.Tensor, source: gs.Tensor) -> bool:
    """Whether a tensor is computed from ``source``, or is ``source`` itself."""
    return tensor is source or any(source is operand for node in upstream(tensor) for operand in node.inputs)


def downstream(nodes: Iterable[gs.Node], *ends: str) -> Iterator[gs.Node]:
    """Yields nodes and all nodes that depend on them, nearest first, but none behind an operator of ``ends``."""
    queue = list(nodes)
    visited = {id(node) for node in queue}
    for node in queue:
        yield node
        for reader in (reader for output in node.outputs for reader in output.outputs if node.op not in ends):
            if id(reader) not in visited:
                visited.add(id(reader))
                queue.append(reader)


def picks(*indices: gs.Variable, through: Sequence[str] = ()) -> list[gs.Node]:
    """The Gather and GatherND nodes that use indices, directly or through other indexing operators or ``through``."""
    nodes: list[gs.Node] = []
    queue = list(indices)
    for tensor in queue:
        for node in tensor.outputs:
            if node.op in ("Gather", "GatherND") and node.inputs[1] is tensor:
                nodes.append(node)
            elif node.op in (*_INDEXING, *through) and node.inputs[0] is tensor:
                queue += node.outputs
    return nodes


def unpick(graph: gs.Graph, nodes: list[gs.Node]) -> None:
    """Makes readers of picked rows read all rows, in place."""
    for node in nodes:
        redirect(graph, node.outputs[0], node.inputs[0])
        node.outputs.clear()
