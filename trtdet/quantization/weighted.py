"""Layers with weights, independent of the operator: convolutions, and products with a constant matrix.

Weights are (out, in / groups, ...) here, as in a convolution and in Gemm with ``transB``. Those of MatMul and of other
Gemms are transposed. A MatMul has no bias; if only a sum with a constant reads it, that constant is its bias.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.passes.walk import maker

CONVOLUTIONS = ("Conv", "ConvTranspose")
PRODUCTS = ("MatMul", "Gemm")
LAYERS = (*CONVOLUTIONS, *PRODUCTS)  # operators that may have weights


@dataclass(frozen=True, eq=False)
class Weighted:
    """A convolution or a product with constant weights. ``node`` is the convolution or product; ``sum`` adds the bias
    of a MatMul, None if there is no such node."""

    node: gs.Node
    sum: gs.Node | None = None

    @staticmethod
    def of(node: gs.Node) -> Weighted | None:
        """The layer of a node; None for another operator, or for computed weights."""
        if node.op not in LAYERS or not isinstance(node.inputs[1], gs.Constant):
            return None
        return Weighted(node, _sum_after(node) if node.op == "MatMul" else None)

    @staticmethod
    def by_name(nodes: Iterable[gs.Node]) -> dict[str, Weighted]:
        """Layers by name; attention's products have no weights and are omitted."""
        layers = {node.name: Weighted.of(node) for node in nodes}
        return {name: layer for name, layer in layers.items() if layer is not None}

    @staticmethod
    def making(tensor: gs.Tensor) -> Weighted | None:
        """The layer that computes a tensor, bias included."""
        node = maker(tensor)
        if node is not None and node.op == "Add":
            products = (maker(source, "MatMul") for source in node.inputs)
            layers = (Weighted.of(product) for product in products if product is not None)
            return next((layer for layer in layers if layer is not None and layer.sum is node), None)
        layer = None if node is None else Weighted.of(node)
        return layer if layer is None or layer.sum is None else None

    @property
    def turned(self) -> bool:
        """Whether the node holds its weights as (in, out)."""
        return self.node.op == "MatMul" or (self.node.op == "Gemm" and not self.node.attrs.get("transB", 0))

    @property
    def weight(self) -> NDArray[np.floating]:
        """(out, in / groups, ...), in the type of the model."""
        values: NDArray[np.floating] = self.node.inputs[1].values
        return values.T if self.turned else values

    @property
    def bias(self) -> NDArray[np.float32]:
        """float32 (out,); zeros if there is no bias."""
        constant = self._bias_input()
        size = len(self.weight)
        values = np.zeros(size) if constant is None else np.broadcast_to(constant.values.reshape(-1), size)
        return values.astype(np.float32)

    @property
    def has_bias(self) -> bool:
        return self._bias_input() is not None

    @property
    def has_place(self) -> bool:
        """Whether a bias can be set without another node."""
        return self.sum is not None or self.node.op != "MatMul"

    def set_bias(self, bias: gs.Tensor) -> None:
        """Makes a tensor (out,) the bias, if :attr:`has_place`."""
        if self.sum is not None:
            self.sum.inputs[_constant_position(self.sum)] = bias
        else:
            self.node.inputs = [*self.node.inputs[:2], bias]

    def by_output(self, values: NDArray[np.floating]) -> NDArray[np.floating]:
        """Reshapes a value per output channel (out,) to broadcast with the node's output."""
        if self.node.op in PRODUCTS:
            return values.reshape(-1)
        return values.reshape(1, -1, *[1] * (self.node.inputs[1].values.ndim - 2))

    def _bias_input(self) -> gs.Constant | None:
        if self.sum is not None:
            constant: gs.Constant = self.sum.inputs[_constant_position(self.sum)]
            return constant
        if self.node.op == "MatMul" or len(self.node.inputs) < 3 or self.node.inputs[2].is_empty():
            return None
        return self.node.inputs[2]


def is_layer(product: gs.Node) -> bool:
    """Whether a product with constant weights can be quantised as a layer: it has a matrix and does not scale its
    result."""
    weight = product.inputs[1].values
    if weight.ndim != 2 or product.op == "MatMul":
        return bool(weight.ndim == 2)
    if product.attrs.get("transA", 0) or any(float(product.attrs.get(key, 1.0)) != 1.0 for key in ("alpha", "beta")):
        return False
    added = product.inputs[2] if len(product.inputs) > 2 else None
    if isinstance(added, gs.Constant):
        outputs = weight.shape[0 if product.attrs.get("transB", 0) else 1]
        return bool(added.values.size == 1 or added.values.size == outputs == added.values.shape[-1])
    return added is None or added.is_empty()


def _sum_after(product: gs.Node) -> gs.Node | None:
    readers = product.outputs[0].outputs
    weight = product.inputs[1].values
    if len(readers) != 1 or readers[0].op != "Add" or weight.ndim != 2:
        return None
    position = _constant_position(readers[0])
    if position is None:
        return None
    added = readers[0].inputs[position].values
    row = added.size == weight.shape[1] == (added.shape or (0,))[-1]
    return readers[0] if row and added.ndim <= max(len(product.outputs[0].shape or ()), 1) else None


def _constant_position(node: gs.Node) -> int | None:
    """The position of the only constant of a node with two inputs."""
    positions = [index for index, tensor in enumerate(node.inputs) if isinstance(tensor, gs.Constant)]
    return positions[0] if len(positions) == 1 and len(node.inputs) == 2 else None
