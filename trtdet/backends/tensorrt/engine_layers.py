"""The layers of an engine: which ONNX nodes each came from, and how long it takes."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from trtdet.backends.base import LayerTime


def onnx_nodes(name: str, metadata: str = "") -> tuple[str, ...]:
    """The ONNX nodes that a layer of an engine came from.

    They are taken from TensorRT's metadata, ``[ONNX Layer: Conv_41]`` once for each node. Without metadata they are
    read from the layer's name, in which ``+``, ``||`` and ``PWN(...)`` join the names of nodes. A copy between two
    formats has no node, nor has a kernel that TensorRT named itself, ``__myl_...``.
    """
    if nodes := re.findall(r"\[ONNX Layer: ([^\]]*)\]", metadata):
        return tuple(dict.fromkeys(nodes))
    if name.startswith(("Reformatting CopyNode", "__myl")):
        return ()
    region = re.match(r"\{ForeignNode\[(.*)\]\}", name)
    parts = region[1].split("...") if region else re.split(r" \+ | \|\| |, ", re.sub(r"PWN\(|\)", "", name))
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


def new_profiler(trt: Any) -> Any:
    """A profiler that keeps the layers of the last run, with their milliseconds, in ``times``."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]  # the base is known only at run time
        times: list[tuple[str, float]]

        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.times = []

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.times.append((layer_name, ms))

    return Profiler()


def layer_times(rows: list[list[tuple[str, float]]], report: str) -> tuple[LayerTime, ...]:
    """The times of each layer over all runs, in the order in which the layers first ran.

    Args:
        rows: for each run, the layers that ran, with their milliseconds.
        report: the inspector's JSON; of an engine that was built with layer names alone, it lists just these.
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
