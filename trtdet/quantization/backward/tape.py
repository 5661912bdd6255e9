"""Writes the nodes of a backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs


class Tape:
    """Adds nodes to the end of a graph. Inputs are tensors, arrays and numbers, or None for an omitted one."""

    def __init__(self, graph: gs.Graph, prefix: str = "gradient/") -> None:
        self._graph, self._prefix = graph, prefix
        self._count = 0

    def __call__(self, op: str, *inputs: Any, **attributes: Any) -> gs.Variable:
        """Adds a node with one output, which is returned."""
        return self.several(op, inputs, 1, **attributes)[0]

    @property
    def opset(self) -> int:
        return int(self._graph.opset)

    def several(self, op: str, inputs: Sequence[Any], outputs: int, **attributes: Any) -> list[gs.Variable]:
        """Adds a node with several outputs."""
        name = self._name()
        written = [gs.Variable(f"{name}/{index}") for index in range(outputs)]
        read = [self._tensor(value) for value in inputs]
        while read and isinstance(read[-1], gs.Variable) and read[-1].is_empty():
            read.pop()
        self._graph.nodes.append(gs.Node(op, name, attrs=attributes, inputs=read, outputs=written))
        return written

    def again(self, node: gs.Node, inputs: Sequence[Any], outputs: int = 1, **changed: Any) -> list[gs.Variable]:
        """Adds the operator of a node with its attributes, for other inputs."""
        return self.several(node.op, inputs, outputs, **{**node.attrs, **changed})

    def reduce(self, op: str, x: Any, axes: Sequence[int]) -> gs.Variable:
        """A reduction that keeps its axes, with length 1."""
        return self(op, x, np.array(axes, np.int64), keepdims=1)

    def shape(self, tensor: Any) -> gs.Tensor:
        """The shape, int64 (axes,): a constant if it is known."""
        sizes = sizes_of(tensor)
        return self._tensor(np.array(sizes, np.int64)) if sizes is not None else self("Shape", tensor)

    def shaped(self, tensor: Any, like: Any) -> gs.Variable:
        """The values in the shape of another tensor with as many."""
        return self("Reshape", tensor, self.shape(like), allowzero=1)

    def zeros(self, shape: Any) -> gs.Variable:
        """Float zeros of a shape."""
        return self("ConstantOfShape", shape)

    def masked(self, condition: Any, slope: Any) -> gs.Variable:
        """The gradient where the condition holds, else 0."""
        return self("Where", condition, slope, np.float32(0))

    def summed(self, slope: Any, like: gs.Tensor, wide: tuple[int, ...] | None) -> gs.Variable:
        """Sums a gradient of the shape ``wide``, None if a size is unknown, over the axes along which ``like`` was
        broadcast."""
        own = sizes_of(like)
        if own is not None and own == wide:
            return slope
        shape = self.shape(like)
        if own is not None and wide is not None:
            padded = (1,) * (len(wide) - len(own)) + own
            axes = [axis for axis, (small, large) in enumerate(zip(padded, wide, strict=True)) if small != large]
            return self("Reshape", self.reduce("ReduceSum", slope, axes), shape, allowzero=1)
        missing = self("Sub", self("Shape", self("Shape", slope)), self("Shape", shape))
        padded = self("Concat", self("Expand", np.array([1], np.int64), missing), shape, axis=0)
        different = self("Not", self("Equal", padded, self("Shape", slope)))
        axes = self("Reshape", self("NonZero", different), np.array([-1], np.int64))
        total = self("ReduceSum", slope, axes, keepdims=1, noop_with_empty_axes=1)
        return self("Reshape", total, shape, allowzero=1)

    def scattered(self, like: gs.Tensor, places: gs.Tensor, slope: Any) -> gs.Variable:
        """A gradient of the shape of ``like``: ``slope``, added up at ``places``, which count through all elements."""
        flat = np.array([-1], np.int64)
        count = self("Reshape", self("Size", like), np.array([1], np.int64))
        places, slope = self("Reshape", places, flat), self("Reshape", slope, flat)
        return self.shaped(self("ScatterElements", self.zeros(count), places, slope, axis=0, reduction="add"), like)

    def numbered(self, like: gs.Tensor) -> gs.Variable:
        """A tensor of the same shape that counts through its elements, int64."""
        return self.shaped(self("Range", np.int64(0), self("Size", like), np.int64(1)), like)

    def _name(self) -> str:
        self._count += 1
        return f"{self._prefix}{self._count}"

    def _tensor(self, value: Any) -> gs.Tensor:
        if value is None:
            return gs.Variable.empty()
        if isinstance(value, gs.Tensor):
            return value
        return gs.Constant(f"{self._name()}/constant", np.asarray(value))


def sizes_of(tensor: gs.Tensor) -> tuple[int, ...] | None:
    """A tensor's shape; None if a size is not known."""
    shape = tensor.shape
    if shape is None or not all(isinstance(size, (int, np.integer)) for size in shape):
        return None
    return tuple(map(int, shape))
