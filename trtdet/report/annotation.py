"""Annotates the nodes of a bundle's model for ONNX viewers such as Netron; the computation does not change.

Annotations are in ``NodeProto.metadata_props`` (ONNX IR version 10, onnx 1.16) and, for older viewers, in
``doc_string``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from trtdet.audit import Layer
from trtdet.errors import ConfigError
from trtdet.passes.provenance import Origin, origin_of
from trtdet.report.runs import Run
from trtdet.tables import listed

PREFIX = "trtdet."
"""Prefix of every metadata key."""

_NODE_METADATA = 10
"""The first version of ONNX's IR with node metadata."""


@dataclass(frozen=True)
class Times:
    """Milliseconds by layer of an engine; ``basis`` says where they come from, such as ``measured``."""

    ms: Mapping[str, float]
    basis: str


def annotated(run: Run, times: Times | None = None) -> onnx.ModelProto:
    """The model that a bundle's engine was built from, with annotated nodes.

    Annotations, where available: the planned precision and its reason; the engine's layer with its data types, bytes
    and time; the output error against the float model. Nodes that trtdet inserted also get their origin and the
    original layers that they serve. Raises ConfigError: the run is not a bundle.
    """
    if run.model is None or run.plan is None:
        raise ConfigError(f"'{run.path}' is no bundle: there is no model to annotate", "give the -o of 'trtdet build'")
    model = onnx.ModelProto()
    model.CopyFrom(run.model)
    notes: dict[str, dict[str, str]] = defaultdict(dict)
    for name, entry in run.plan.entries.items():
        notes[name] = {"planned": entry.number_format, "reason": entry.reason}
        if entry.corrections:
            notes[name]["corrected"] = "; ".join(step.name for step in entry.corrections)
    if run.audit is not None:
        _add_layers(notes, run.audit.layers, times)
    if run.ranking is not None:
        ranked, total = run.ranking.layers, run.ranking.total
        for layer in ranked:
            share = f"{max(layer.score, 0.0) / total:.1%} of all layers' (rank {layer.rank} of {len(ranked)})"
            notes[layer.name]["error"] = f"{layer.distance:.5f} at the head, {share}"
    _add_origins(notes, model)
    for node in model.graph.node:
        if own := notes.get(node.name):
            for key, value in own.items():
                node.metadata_props.add(key=PREFIX + key, value=value)
            # The node's former doc_string stays below.
            lines = [f"{key}: {value}" for key, value in own.items()]
            node.doc_string = "\n".join([*lines, *(["", node.doc_string] if node.doc_string else [])])
    if notes:
        model.ir_version = max(model.ir_version, _NODE_METADATA)
    return model


def _add_layers(notes: dict[str, dict[str, str]], layers: Sequence[Layer], times: Times | None) -> None:
    """Adds the figures of all layers that compute a node; a node with reformatted inputs has several."""
    layers_of: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        for name in dict.fromkeys(layer.onnx):
            layers_of[name].append(layer)
    for name, own in layers_of.items():
        working = [layer for layer in own if layer.bytes] or own
        notes[name] |= {
            "layer": "; ".join(layer.name for layer in working),
            "precision": "; ".join(dict.fromkeys(f"reads {each.input}, writes {each.output}" for each in working)),
            "bytes": str(sum(layer.bytes for layer in working)),
        }
        shared = len({node for layer in working for node in layer.onnx})
        if shared > 1:
            notes[name]["shared"] = f"{shared - 1} other nodes: bytes and time are of all of them together"
        if times is not None and any(layer.name in times.ms for layer in working):
            ms = sum(times.ms.get(layer.name, 0.0) for layer in working)
            notes[name]["ms"] = f"{ms:.4f} ({times.basis})"


def _add_origins(notes: dict[str, dict[str, str]], model: onnx.ModelProto) -> None:
    """Notes each inserted node's origin, and the nearest original layers after it, or else before it."""
    origins = {name: origin for name, origin in origin_of(model).items() if not origin.replaces}
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in model.graph.node:
        for tensor in node.input:
            readers[tensor].append(node)
    makers = {tensor: node for node in model.graph.node for tensor in node.output}

    def nearest(node: onnx.NodeProto, step: Callable[[onnx.NodeProto], list[onnx.NodeProto]]) -> list[str]:
        layer_names: dict[str, None] = {}
        waiting, visited = step(node), {node.output[0]}
        while waiting:
            neighbour = waiting.pop(0)
            if neighbour.output[0] not in visited:
                visited.add(neighbour.output[0])
                if neighbour.name in origins:
                    waiting += step(neighbour)
                else:
                    layer_names[neighbour.name] = None
        return list(layer_names)

    for node in model.graph.node:
        origin = origins.get(node.name)
        if origin is not None:
            notes[node.name]["origin"] = origin.value
        # Only these rewrites insert nodes that serve a layer of the model.
        if origin in (Origin.QDQ, Origin.CHANNEL_MAP, Origin.FP16, Origin.REQUANTIZE):
            after = nearest(node, lambda node: [reader for tensor in node.output for reader in readers[tensor]])
            before = nearest(node, lambda node: [makers[tensor] for tensor in node.input if tensor in makers])
            notes[node.name]["for"] = listed(after or before, 3)
