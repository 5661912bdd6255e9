"""Registry of the nodes that trtdet wrote, by step.

Names are not enough: a model may have its own nodes named ``trtdet/nms/...``. So each node that trtdet writes is
registered, and the registry is saved as JSON in the model's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum

import onnx
import onnx_graphsurgeon as gs

from trtdet.passes.protobuf import metadata, node_names

KEY = "trtdet.provenance"
"""Metadata key; the value is JSON with node names by origin: ``{"decode": ["trtdet/decode/Split_2"]}``."""


class Origin(str, Enum):
    """The step that wrote a node; values are those of the JSON."""

    DECODE = "decode"  # from raw outputs to boxes and scores
    NMS = "nms"  # suppression, including the body of its loop
    EMBEDDED_NMS = "embedded-nms"  # between a model and the suppression that was cut off it
    QDQ = "qdq"  # QuantizeLinear and DequantizeLinear, and the padding before them
    CHANNEL_MAP = "channel-map"  # per-channel scale and offset around a quantised tensor
    FP16 = "fp16"  # casts around nodes that run in FP16
    REQUANTIZE = "requantize"  # around plugin activations that read or write INT8
    ACTIVATION = "activation"  # Swish, HardSwish or a plugin instead of the model's own operators
    BATCH = "batch"  # shapes for another batch than at export
    LOWERING = "lowering"  # an operator of the model, expressed in an older opset

    @property
    def replaces(self) -> bool:
        """Whether the node replaces nodes of the model and is named after them."""
        return self in (Origin.ACTIVATION, Origin.LOWERING)


def origin_of(model: onnx.ModelProto) -> dict[str, Origin]:
    """Origin of each node that trtdet wrote, by node name; unreadable parts of the registry are ignored."""
    try:
        lists = json.loads(metadata(model).get(KEY, "{}"))
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
    """Registry of a graph-surgeon graph; ``Graph.copy`` does not copy it."""
    origins: dict[str, Origin] = vars(graph).setdefault("provenance", {})
    return origins


def put(model: onnx.ModelProto, origins: Mapping[str, Origin]) -> None:
    """Makes ``origins`` the registry of a model, without names of missing nodes."""
    for entry in [entry for entry in model.metadata_props if entry.key == KEY]:
        model.metadata_props.remove(entry)
    names: dict[str, list[str]] = {}
    for name in dict.fromkeys(node_names(model.graph)):
        if name in origins:
            names.setdefault(origins[name].value, []).append(name)
    if names:
        model.metadata_props.add(key=KEY, value=json.dumps(names, sort_keys=True, separators=(",", ":")))


def without_registry(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model for a builder: TensorRT-RTX writes metadata into the engine."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    put(bare, {})
    return bare
