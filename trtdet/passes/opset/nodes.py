"""Nodes that are written in the place of another."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike


def attribute(node: onnx.NodeProto, name: str, otherwise: Any = None) -> Any:
    found = (each for each in node.attribute if each.name == name)
    return next((onnx.helper.get_attribute_value(each) for each in found), otherwise)


def copied(node: onnx.NodeProto) -> onnx.NodeProto:
    made = onnx.NodeProto()
    made.CopyFrom(node)
    return made


def replace_nodes(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    copies = [copied(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


class NodeWriter:
    """Writes the nodes that replace a node; their names come from its first output, so that they are unique."""

    def __init__(self, node: onnx.NodeProto) -> None:
        self.node = copied(node)
        self._made: list[onnx.NodeProto] = []
        self._number = itertools.count()

    def const(self, value: ArrayLike, dtype: Any) -> str:
        tensor = onnx.numpy_helper.from_array(np.array(value, dtype))
        return self("Constant", value=tensor)

    def __call__(self, op: str, *inputs: str, **attrs: Any) -> str:
        name = f"{self.node.output[0]}/{self.node.op_type}/{op}_{next(self._number)}"
        self._made.append(onnx.helper.make_node(op, inputs, [name], name, **attrs))
        return name

    def before(self) -> list[onnx.NodeProto]:
        """The nodes written, and after them the node itself, changed."""
        return [*self._made, self.node]

    def instead(self) -> list[onnx.NodeProto]:
        """The nodes written, the last with the name and the output of the node that they replace."""
        self._made[-1].output[0] = self.node.output[0]
        self._made[-1].name = self.node.name
        return self._made

    def drop(self, *names: str) -> None:
        for found in [found for found in self.node.attribute if found.name in names]:
            self.node.attribute.remove(found)

    def put(self, name: str, value: Any) -> None:
        self.drop(name)
        self.node.attribute.append(onnx.helper.make_attribute(name, value))

    def input(self, index: int) -> str:
        """Its name; empty where the node has none."""
        return self.node.input[index] if index < len(self.node.input) else ""

    def feed(self, index: int, name: str) -> None:
        self.node.input.extend([""] * (index + 1 - len(self.node.input)))
        self.node.input[index] = name


def without_no_reduction(node: onnx.NodeProto) -> onnx.NodeProto:
    """A scattering node without ``reduction = none``, the default: TensorRT's parser before 10.9 refuses ScatterND with
    it (its ``onnxOpImporters.cpp`` asks whether the attribute is present)."""
    if node.op_type not in ("ScatterND", "ScatterElements") or attribute(node, "reduction") != b"none":
        return node
    made = NodeWriter(node)
    made.drop("reduction")
    return made.node
