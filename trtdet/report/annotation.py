"""The model of a bundle with what is known of each node written beside it, for viewers of ONNX such as Netron.

Metadata of nodes came with version 10 of ONNX's IR (onnx 1.16, ``NodeProto.metadata_props``); the same stands in
``doc_string``, which older viewers show. Nothing else changes, so that the model computes what it did.
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
from trtdet.report.sections.verdicts import listed

PREFIX = "trtdet."
"""Prefix of every key of the metadata."""

_NODE_METADATA = 10
"""The version of ONNX's IR that has metadata of nodes."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of an engine's layers.

    Attributes:
        ms: by layer.
        basis: where they come from, such as ``measured``.
    """

    ms: Mapping[str, float]
    basis: str


def annotated(run: Run, times: Times | None = None) -> onnx.ModelProto:
    """The model that a bundle's engine was built from, its nodes annotated.

    What a node gets, as far as it is known: the precision that was planned and why, the engine's layer with what it
    reads, writes, moves and takes, the error at the head, and, of a node that trtdet wrote, why it is there and which
    of the model's own layers it is for.

    Args:
        run: a bundle.
        times: of the engine's layers.

    Raises:
        ConfigError: the run is not a bundle.
    """
    if run.model is None or run.plan is None:
        raise ConfigError(f"'{run.path}' is no bundle: there is no model to annotate", "give the -o of 'trtdet build'")
    model = onnx.ModelProto()
    model.CopyFrom(run.model)
    notes: dict[str, dict[str, str]] = defaultdict(dict)
    for name, entry in run.plan.entries.items():
        notes[name] = {
            "planned": entry.number_format,
            "reason": entry.reason,
        }
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
            # What the node said before stays below.
            lines = [f"{key}: {value}" for key, value in own.items()]
            node.doc_string = "\n".join([*lines, *(["", node.doc_string] if node.doc_string else [])])
    if notes:
        model.ir_version = max(model.ir_version, _NODE_METADATA)
    return model


def _add_layers(notes: dict[str, dict[str, str]], layers: Sequence[Layer], times: Times | None) -> None:
    """A node that several layers compute, such as one whose inputs are reformatted, has the figures of all of them."""
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
    """Notes for each node that trtdet wrote: the rewrite that made it, and the nearest of the model's own layers after
    it, or else before it."""
    origins = {name: origin for name, origin in origin_of(model).items() if not origin.replaces}
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    makers: dict[str, onnx.NodeProto] = {}
    for node in model.graph.node:
        for tensor in node.input:
            readers[tensor].append(node)
        for tensor in node.output:
            makers[tensor] = node

    def after(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        return [reader for tensor in node.output for reader in readers[tensor]]

    def before(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        return [makers[tensor] for tensor in node.input if tensor in makers]

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
        # Steps whose nodes stand beside a layer of the model.
        if origin in (Origin.QDQ, Origin.CHANNEL_MAP, Origin.FP16, Origin.REQUANTIZE):
            notes[node.name]["for"] = listed(nearest(node, after) or nearest(node, before))
