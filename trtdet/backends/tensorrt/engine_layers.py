"""The ONNX nodes and the time of each layer of an engine."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from trtdet.backends.base import LayerTime


def onnx_nodes(name: str, metadata: str = "") -> tuple[str, ...]:
    """The ONNX nodes that a layer of an engine came from.

    TensorRT's metadata has ``[ONNX Layer: Conv_41]`` for each node. Without metadata, the layer's name joins the names
    of nodes with ``+``, ``||`` and ``PWN(...)``. A format copy and a kernel with TensorRT's own name, ``__myl_...``,
    have no nodes.
    """
    if nodes := re.findall(r"\[ONNX Layer: ([^\]]*)\]", metadata):
        return tuple(dict.fromkeys(nodes))
    if name.startswith(("Reformatting CopyNode", "__myl")):
        return ()
    region = re.match(r"\{ForeignNode\[(.*)\]\}", name)
    parts = region[1].split("...") if region else map(_without_group, re.split(r" \+ | \|\| |, ", name))
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


def _without_group(part: str) -> str:
    """A part of a layer's name without the brackets of ``PWN(...)``, which a node's own name may have too."""
    while part.startswith("PWN("):
        part = part.removeprefix("PWN(")
    while part.endswith(")") and part.count(")") > part.count("("):
        part = part.removesuffix(")")
    return part


def new_profiler(trt: Any) -> Any:
    """A profiler that keeps the last run's layers and milliseconds in ``times``."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]  # the base is known only at run time
        times: list[tuple[str, float]]

        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.times = []

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.times.append((layer_name, ms))

    return Profiler()


def layer_times(rows: list[list[tuple[str, float]]], report: str) -> tuple[LayerTime, ...]:
    """The times of each layer over all runs, in the order of first execution.

    ``rows`` has the layers and milliseconds of each run. ``report`` is the inspector's JSON; it lists only names if the
    engine was built with layer names alone.
    """
    kinds: dict[str, tuple[str, tuple[str, ...]]] = {}
    for layer in json.loads(report).get("Layers", []):
        entry = {"Name": layer} if isinstance(layer, str) else layer
        name = entry.get("Name", "")
        kinds[name] = entry.get("LayerType", "unknown"), onnx_nodes(name, entry.get("Metadata", ""))
    times = []
    for name in dict.fromkeys(name for row in rows for name, _ in row):
        kind, nodes = kinds.get(name, ("unknown", onnx_nodes(name)))
        sums = tuple(math.fsum(ms for layer, ms in row if layer == name) for row in rows)
        count = max(sum(layer == name for layer, _ in row) for row in rows)
        times.append(LayerTime(name, type=kind, onnx=nodes, ms=sums, count=count))
    return tuple(times)
