"""Reads the time of each layer from the trace of onnxruntime's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.backends.base import LayerTime
from trtdet.errors import BackendError
from trtdet.passes.provenance import graphs

_KERNEL = "_kernel_time"
_BLOCKED = "_nchwc"
"""Suffix of kernels in onnxruntime's blocked memory layout; the name of their output tensor precedes it."""


def layer_times(
    events: Sequence[Mapping[str, Any]], model: onnx.ModelProto, runs: int, warm_up: int
) -> tuple[LayerTime, ...]:
    """Layer times from onnxruntime's trace, where ``Session`` events enclose the runs and ``Node`` events are kernels.

    ``events`` are in Chrome's format, with times in microseconds. ``runs`` counts all runs, and the first ``warm_up``
    are dropped.

    Raises:
        BackendError: the trace lacks runs, as the profiler stops at a million events.
    """
    frames = sorted(
        float(event["ts"]) for event in events if event["cat"] == "Session" and event["name"] == "model_run"
    )
    if len(frames) != runs:
        raise BackendError(
            f"onnxruntime's profiler kept {len(frames)} of {runs} runs, as it stops at a million events",
            "run fewer",
        )
    kernels = [event for event in events if event["cat"] == "Node" and str(event["name"]).endswith(_KERNEL)]
    # Of two kernels with the same start, the longer contains the other.
    kernels.sort(key=lambda kernel: (float(kernel["ts"]), -float(kernel["dur"])))
    own = [float(kernel["dur"]) for kernel in kernels]
    ends = [float(kernel["ts"]) + float(kernel["dur"]) for kernel in kernels]
    around: list[int] = []
    for index, kernel in enumerate(kernels):
        while around and ends[around[-1]] <= float(kernel["ts"]):
            around.pop()
        if around and ends[index] <= ends[around[-1]]:
            own[around[-1]] -= float(kernel["dur"])
        around.append(index)
    times: dict[tuple[str, str], NDArray[np.float64]] = defaultdict(lambda: np.zeros(runs))
    counts: dict[tuple[str, str], int] = defaultdict(int)
    rows = np.searchsorted(frames, [float(kernel["ts"]) for kernel in kernels], side="right") - 1
    for kernel, row, microseconds in zip(kernels, rows, own, strict=True):
        key = str(kernel["name"]).removesuffix(_KERNEL), str(kernel["args"]["op_name"])
        times[key][row] += microseconds / 1000
        counts[key] += 1
    nodes = _origins(model, [name for name, _ in times])
    return tuple(
        LayerTime(
            name,
            type=kind,
            onnx=nodes.get(name, ()),
            ms=tuple(map(float, row_times[warm_up:])),
            count=max(1, round(counts[name, kind] / runs)),
        )
        for (name, kind), row_times in times.items()
    )


def _origins(model: onnx.ModelProto, kernels: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The names of the model's nodes that each kernel computes.

    A kernel is named after a node, after a node's output with ``_nchwc``, or after a node and a fusion. Any other node
    was fused into the kernel of all its readers (the Sigmoid of a SiLU, the Q/DQ of weights), else into the kernel of
    its input (an activation in a convolution). The remaining nodes were computed at load time or are unknown.
    """
    nodes = [node for node in model.graph.node if node.name]
    named, writers = {node.name for node in nodes}, {name: node for node in nodes for name in node.output}
    homes: dict[str, str] = {}
    for kernel in kernels:
        if kernel in named:
            homes[kernel] = kernel
        elif kernel.removesuffix(_BLOCKED) in writers:
            homes[writers[kernel.removesuffix(_BLOCKED)].name] = kernel
        else:
            pieces = kernel.split("/")
            starts = ("/".join(pieces[:count]) for count in range(len(pieces) - 1, 0, -1))
            if node_name := next((start for start in starts if start in named), None):
                homes[node_name] = kernel
    readers: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        for name in node.input:
            readers[name].append(node.name)
    for node in reversed(nodes):
        into = {homes.get(reader) for name in node.output for reader in readers[name]}
        if node.name not in homes and len(into) == 1 and (home := into.pop()) is not None:
            homes[node.name] = home
    for node in nodes:
        into = {homes.get(writers[name].name) for name in node.input if name in writers}
        if node.name not in homes and len(into) == 1 and (home := into.pop()) is not None:
            homes[node.name] = home
    _, *bodies = graphs(model.graph)
    inner = {node.name for body in bodies for node in body.node}
    origins: dict[str, list[str]] = defaultdict(list, {kernel: [kernel] for kernel in kernels if kernel in inner})
    for node in nodes:
        if node.name in homes:
            origins[homes[node.name]].append(node.name)
    return {kernel: tuple(names) for kernel, names in origins.items()}
