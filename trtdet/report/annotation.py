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
from trtdet.mixed_precision.breakdown import Breakdown
from trtdet.mixed_precision.scores import Sensitivity
from trtdet.passes.provenance import Origin, origin_of
from trtdet.quantization import PrecisionPlan
from trtdet.report.runs import Run

Step = Callable[[onnx.NodeProto], list[onnx.NodeProto]]
"""From a node to those after it, or before it."""

PREFIX = "trtdet."
"""Of every key of the metadata."""

_NODE_METADATA = 10
"""The version of ONNX's IR that has metadata of nodes."""

_MOST = 3
"""Layers of the model that a node between them is named after."""


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
        ConfigError: it is no bundle.
    """
    if run.model is None or run.plan is None:
        raise ConfigError(f"'{run.path}' is no bundle: there is no model to annotate", "give the -o of 'trtdet build'")
    model = onnx.ModelProto()
    model.CopyFrom(run.model)
    notes: dict[str, dict[str, str]] = defaultdict(dict)
    for part in (
        _of_plan(run.plan),
        _of_layers(run.audit.layers if run.audit is not None else (), times),
        _of_ranking(run.ranking),
        _of_blocks(run.breakdown),
        _of_origin(model),
    ):
        for name, found in part.items():
            notes[name].update(found)
    for node in model.graph.node:
        _write(node, notes.get(node.name, {}))
    if any(notes.values()):
        model.ir_version = max(model.ir_version, _NODE_METADATA)
    return model


def _write(node: onnx.NodeProto, found: Mapping[str, str]) -> None:
    """Notes in a node; what it said before stays below them."""
    if not found:
        return
    for key, value in found.items():
        node.metadata_props.add(key=PREFIX + key, value=value)
    lines = [f"{key}: {value}" for key, value in found.items()]
    node.doc_string = "\n".join([*lines, *(["", node.doc_string] if node.doc_string else [])])


def _of_plan(plan: PrecisionPlan) -> dict[str, dict[str, str]]:
    found = {}
    for name, entry in plan.entries.items():
        said = entry.format if entry.precision == "int8" else entry.precision
        found[name] = {"planned": said, "reason": entry.reason}
        if entry.corrections:
            found[name]["corrected"] = "; ".join(step.name for step in entry.corrections)
    return found


def _of_layers(layers: Sequence[Layer], times: Times | None) -> dict[str, dict[str, str]]:
    """A node that several layers compute, such as one whose inputs are reformatted, has the figures of all of them."""
    of_node: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        for name in dict.fromkeys(layer.onnx):
            of_node[name].append(layer)
    found = {}
    for name, own in of_node.items():
        working = [layer for layer in own if layer.bytes] or own
        found[name] = {
            "layer": "; ".join(layer.name for layer in working),
            "precision": "; ".join(dict.fromkeys(f"reads {one.input}, writes {one.output}" for one in working)),
            "bytes": str(sum(layer.bytes for layer in working)),
        }
        shared = len({node for layer in working for node in layer.onnx})
        if shared > 1:
            found[name]["shared"] = f"{shared - 1} other nodes: bytes and time are of all of them together"
        if times is not None and any(layer.name in times.ms for layer in working):
            ms = sum(times.ms.get(layer.name, 0.0) for layer in working)
            found[name]["ms"] = f"{ms:.4f} ({times.basis})"
    return found


def _of_ranking(ranking: Sensitivity | None) -> dict[str, dict[str, str]]:
    if ranking is None:
        return {}
    total = sum(max(layer.score, 0.0) for layer in ranking.layers) or 1.0
    count = len(ranking.layers)
    return {
        layer.name: {
            "error": f"{layer.distance:.5f} at the head, {max(layer.score, 0.0) / total:.1%} of all layers' "
            f"(rank {layer.rank} of {count})"
        }
        for layer in ranking.layers
    }


def _of_blocks(breakdown: Breakdown | None) -> dict[str, dict[str, str]]:
    blocks = () if breakdown is None else breakdown.blocks
    return {
        name: {"block": f"{block.after.distance:.5f} at the head with {block.name} alone in INT8"}
        for block in blocks
        for name in block.convs
    }


def _of_origin(model: onnx.ModelProto) -> dict[str, dict[str, str]]:
    """Of each node that trtdet wrote, the step, and the model's own layers that it is for."""
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

    found = {}
    for node in model.graph.node:
        origin = origins.get(node.name)
        if origin is None:
            continue
        found[node.name] = {"origin": origin.value}
        if origin in _BESIDE:
            own = _own(node, origins, after) or _own(node, origins, before)
            more = f" and {len(own) - _MOST} more" if len(own) > _MOST else ""
            found[node.name]["for"] = ", ".join(own[:_MOST]) + more
    return found


_BESIDE = (Origin.QDQ, Origin.CHANNEL_MAP, Origin.FP16, Origin.REQUANTIZE)
"""Steps whose nodes stand beside a layer of the model."""


def _own(node: onnx.NodeProto, origins: Mapping[str, Origin], step: Step) -> list[str]:
    """The nearest of the model's own nodes along the edges that ``step`` follows, in their order."""
    found: dict[str, None] = {}
    waiting, seen = step(node), {node.output[0]}
    while waiting:
        one = waiting.pop(0)
        if one.output[0] in seen:
            continue
        seen.add(one.output[0])
        if one.name in origins:
            waiting += step(one)
        else:
            found[one.name] = None
    return list(found)
