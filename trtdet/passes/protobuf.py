"""Reads and changes ONNX models as protobuf messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx

ONNX_DOMAINS = ("", "ai.onnx")  # the two names of the domain of ONNX's own operators


def attribute(node: onnx.NodeProto, name: str, otherwise: Any = None) -> Any:
    """The value of a node's attribute; ``otherwise`` if it has none of that name."""
    values = (onnx.helper.get_attribute_value(each) for each in node.attribute if each.name == name)
    return next(values, otherwise)


def opset_of(model: onnx.ModelProto) -> int:
    """The opset of ONNX's own operators."""
    return max(entry.version for entry in model.opset_import if entry.domain in ONNX_DOMAINS)


def sizes_of(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    """Sizes of a tensor's dimensions, 0 where they are open; empty without a shape."""
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


def metadata(model: onnx.ModelProto) -> dict[str, str]:
    """The metadata of a model, by key."""
    return {entry.key: entry.value for entry in model.metadata_props}


def add_metadata(model: onnx.ModelProto, source: onnx.ModelProto) -> None:
    """Adds the metadata of ``source`` to a model, in place, except keys that the model has."""
    own = metadata(model)
    model.metadata_props.extend(entry for entry in source.metadata_props if entry.key not in own)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Branches and loop bodies of a node."""
    for each in node.attribute:
        if each.type == onnx.AttributeProto.GRAPH:
            yield each.g
        yield from each.graphs


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all its inner graphs, outer before inner."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from graphs(inner)


def node_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Names of all nodes, also in branches and loop bodies."""
    for node in graph.node:
        yield node.name
        for inner in subgraphs(node):
            yield from node_names(inner)


def captured(node: onnx.NodeProto) -> Iterator[str]:
    """Names of the tensors that a node's branches and loop bodies read from outside."""
    for graph in subgraphs(node):
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        own |= {output for inner in graph.node for output in inner.output}
        # A branch may also return a tensor from outside.
        read = (*(name for inner in graph.node for name in reads(inner)), *(value.name for value in graph.output))
        yield from (name for name in read if name not in own)


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Names of the tensors that a node reads from outside, including its branches and loop bodies."""
    yield from filter(None, node.input)
    yield from captured(node)


def replace_nodes(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    """Replaces the nodes of a graph; some of ``nodes`` may be its own."""
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
