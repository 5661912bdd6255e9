"""Which step of trtdet wrote a node of a graph.

Names do not show it: a model may have nodes named ``trtdet/nms/...`` of its own. So each node that trtdet writes is
registered, and the registry travels with the model, as JSON under one key of its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum

import onnx
import onnx_graphsurgeon as gs

KEY = "trtdet.provenance"
"""Of the metadata: a JSON object that lists the names of nodes by origin, ``{"decode": ["trtdet/decode/Split_2"]}``."""


class Origin(str, Enum):
    """The step that wrote a node. The values are those of the JSON."""

    DECODE = "decode"
    """From raw outputs to boxes and scores."""
    NMS = "nms"
    """Suppression, the body of its loop included."""
    EMBEDDED_NMS = "embedded-nms"
    """Between a model and the suppression that was cut off it."""
    QDQ = "qdq"
    """QuantizeLinear and DequantizeLinear, and the padding written in front of them."""
    CHANNEL_MAP = "channel-map"
    """A scale and an offset for each channel around a quantised tensor."""
    FP16 = "fp16"
    """Casts around the nodes that run in FP16."""
    REQUANTIZE = "requantize"
    """Around activations of the plugin library that read or write INT8."""
    ACTIVATION = "activation"
    """Swish, HardSwish or a plugin in the place of the model's own operators."""
    BATCH = "batch"
    """Shapes computed for another batch than the model was exported with."""
    LOWERING = "lowering"
    """An operator of the model, expressed in an older opset."""

    @property
    def replaces(self) -> bool:
        """Whether the node computes what nodes of the model computed, and is named after them."""
        return self in (Origin.ACTIVATION, Origin.LOWERING)


def origin_of(model: onnx.ModelProto) -> dict[str, Origin]:
    """By name, the origin of each node that trtdet wrote. What cannot be read of the registry counts as absent."""
    text = next((entry.value for entry in model.metadata_props if entry.key == KEY), "{}")
    try:
        lists = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    values = {origin.value: origin for origin in Origin}
    return {
        name: values[value]
        for value, names in (lists.items() if isinstance(lists, dict) else ())
        if value in values and isinstance(names, list)
        for name in names
        if isinstance(name, str)
    }


def registry(graph: gs.Graph) -> dict[str, Origin]:
    """The registry of a graph-surgeon graph, which ``Graph.copy`` does not copy."""
    origins: dict[str, Origin] = vars(graph).setdefault("provenance", {})
    return origins


def put(model: onnx.ModelProto, origins: Mapping[str, Origin]) -> None:
    """Makes ``origins`` the registry of a model, without names that the model has no node of."""
    for entry in [entry for entry in model.metadata_props if entry.key == KEY]:
        model.metadata_props.remove(entry)
    names: dict[str, list[str]] = {}
    for name in dict.fromkeys(node_names(model.graph)):
        if name in origins:
            names.setdefault(origins[name].value, []).append(name)
    if names:
        model.metadata_props.add(key=KEY, value=json.dumps(names, sort_keys=True, separators=(",", ":")))


def without_registry(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as a builder should see it: TensorRT-RTX writes a model's metadata into the engine."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    put(bare, {})
    return bare


def node_names(graph: onnx.GraphProto) -> Iterator[str]:
    """The names of all nodes, also in branches and loop bodies."""
    for node in graph.node:
        yield node.name
        for inner in subgraphs(node):
            yield from node_names(inner)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The branches and loop bodies that a node holds."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all that its nodes hold, the outer before the inner."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from graphs(inner)


def replace_nodes(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    """Makes ``nodes`` those of a graph; some may be its own."""
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
