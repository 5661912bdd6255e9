"""Finds values that exceed FP16's range, on calibration images: random images would give other values."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.backends import OnnxRunner, side_by_side
from trtdet.building.graph import PlacedGraph
from trtdet.building.ranges import Selection
from trtdet.calibration import expose
from trtdet.data import ImageStream
from trtdet.errors import TrtdetWarning
from trtdet.passes.base import Writer
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.provenance import Origin
from trtdet.progress import Progress, silent
from trtdet.quantization import (
    LARGEST,
    LAYERS,
    PRODUCTS,
    SMALLEST_NORMAL,
    Cause,
    DataFlow,
    Entry,
    PrecisionPlan,
    nodes_of,
    tensors_of,
)

_BOUNDED = frozenset(
    (
        *("Sigmoid", "HardSigmoid", "HardSwish", "Relu", "LeakyRelu", "Clip", "Tanh", "Elu", "Softplus", "Mish"),
        *("Swish", "Gelu", "Erf", "Concat", "Split", "Slice", "MaxPool", "AveragePool", "GlobalAveragePool", "Resize"),
        *("Transpose", "Pad", "DepthToSpace", "SpaceToDepth", "Identity", "Reshape", "Flatten", "Squeeze"),
        *("Unsqueeze", "Min", "Max", "Neg", "Softmax"),
    )
)
"""Operators whose output is not larger than their inputs or a small constant."""

_MOST_LINES = 3
"""Most layers with the same effect that are warned of one by one."""


class Magnitudes:
    """Largest magnitudes of tensors on the calibration images, measured at first use or given in ``largest``."""

    def __init__(self, graph: PlacedGraph, selected: Selection, largest: Mapping[str, float] | None = None) -> None:
        self._graph, self._selected = graph, selected
        self._largest = dict(largest or {})
        self._by_channel: dict[str, NDArray[np.float64]] = {}

    def of(self, tensors: Iterable[str], progress: Progress = silent) -> dict[str, float]:
        """The largest magnitude by tensor; without images unmeasured tensors are left out, with a warning."""
        names = list(dict.fromkeys(tensors))
        self._measure([name for name in names if name not in self._largest], progress)
        return {name: self._largest[name] for name in names if name in self._largest}

    def by_channel(self, tensors: Iterable[str], progress: Progress = silent) -> dict[str, NDArray[np.float64]]:
        """The largest magnitude of each channel by tensor, float64 (C,); empty without images."""
        names = list(dict.fromkeys(tensors))
        self._measure([name for name in names if name not in self._by_channel], progress, quiet=True)
        return {name: self._by_channel[name] for name in names if name in self._by_channel}

    def _measure(self, names: list[str], progress: Progress, quiet: bool = False) -> None:
        model, config, selected = self._graph.model, self._graph.config.input, self._selected
        names = [name for name in names if name != model.graph.input[0].name]
        if names and not selected.paths and not quiet:
            warnings.warn(
                f"without images {len(names)} tensors that run in FP16 cannot be checked for overflow; give --images",
                TrtdetWarning,
                stacklevel=6,
            )
        if not names or not selected.paths:
            return
        # Maxima are computed in the graph, so that whole feature maps need not be copied out.
        graph = to_graph(model)
        tensors, write = graph.tensors(), Writer(graph, "trtdet/maxima", Origin.FP16)
        outputs = {}
        for name in names:
            tensor = tensors[name]
            sizes = write("Abs", tensor)
            shape, maker = tensor.shape or (), tensor.inputs[0] if tensor.inputs else None
            product = maker is not None and maker.op in PRODUCTS
            if shape and isinstance(shape[-1], int) and (len(shape) == 2 or product):  # with channels on the last axis
                rows = write("Reshape", sizes, write.const([1, -1, shape[-1]], np.int64))
                sizes = write("Transpose", rows, perm=[0, 2, 1])
            pooled = write("GlobalMaxPool", sizes)
            pooled.dtype = np.float32
            outputs[name] = pooled.name
            graph.outputs.append(pooled)
        runner = OnnxRunner(expose(to_model(graph), list(outputs.values())))
        images = 0
        stream = ImageStream(selected.paths, config, batch_size=runner.batch or 1, cache=selected.cache)
        for batch, maxima in side_by_side(runner, lambda run, batch: (batch, run(batch.images)), iter(stream)):
            for name in names:
                values = maxima[outputs[name]].astype(np.float64)
                most = values.reshape(*values.shape[:2], -1).max(axis=(0, 2))
                self._by_channel[name] = np.maximum(self._by_channel.get(name, 0.0), most)
            images += len(batch)
            progress("ranges of what FP16 holds", images, len(selected.paths))
        self._largest.update({name: float(self._by_channel[name].max()) for name in names})


@dataclass(frozen=True, eq=False)
class HalfParts:
    """The FP16 part of a model.

    ``outputs``: largest magnitude of each output channel, float64 (out,), by INT8 convolution.
    """

    names: tuple[str, ...] = ()  # FP16 convolutions, and INT8 convolutions if values between INT8 kernels are FP16
    left: tuple[str, ...] = ()  # other nodes that stay in float32
    reasons: Mapping[str, str] = field(default_factory=dict)  # why values exceed FP16, by convolution or other node
    outputs: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)


def half_parts(
    model: onnx.ModelProto, plan: PrecisionPlan, flow: DataFlow, magnitudes: Magnitudes, progress: Progress = silent
) -> HalfParts:
    """Finds the FP16 part of a float model under a plan, and the nodes whose values exceed FP16."""
    int8 = plan.names("int8") if flow.half else ()
    planned = {*plan.names("fp16"), *int8}
    names = tuple(name for name in plan.entries if name in planned)
    if not names:
        return HalfParts()
    nodes = nodes_of(model, names)
    computed = {output.name for node in nodes for output in node.outputs}
    measured = [output.name for node in nodes if node.op not in _BOUNDED for output in node.outputs]
    # Tensors with a channel axis: those with two axes or more.
    feature_maps = {
        value.name
        for value in (*model.graph.value_info, *model.graph.output)
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT and len(value.type.tensor_type.shape.dim) > 1
    }
    measured += sorted(feature_maps & (set(tensors_of(nodes)) - computed))
    bad = _problems(magnitudes.of(measured, progress))
    # Outputs of bounded operators that read such a tensor, directly or through each other.
    bounded: dict[str, None] = {}
    for node in nodes:
        if node.op in _BOUNDED and any(tensor.name in bounded or tensor.name in bad for tensor in node.inputs):
            bounded.update(dict.fromkeys(output.name for output in node.outputs if len(output.shape or ()) > 2))
    bad |= _problems(magnitudes.of(bounded, progress))
    reasons: dict[str, str] = {}
    for node in nodes:
        # An INT8 convolution reads its inputs through Q/DQ, not in FP16.
        read = [] if node.name in int8 else [tensor.name for tensor in node.inputs]
        touched = [name for name in (*read, *(output.name for output in node.outputs)) if name in bad]
        if touched:
            reasons[node.name] = bad[touched[-1]]
        elif node.op in LAYERS and node.name not in int8 and isinstance(node.inputs[1], gs.Constant):
            heaviest = float(np.abs(node.inputs[1].values).max(initial=0.0))
            if heaviest > LARGEST:
                reasons[node.name] = f"FP16 would overflow: 'its weights' reaches {heaviest:.3g}, over {LARGEST:g}"
    makers = {node.outputs[0].name: node.name for node in nodes if node.name in int8}
    largest = magnitudes.by_channel(makers, progress) if flow.half else {}
    return HalfParts(
        tuple(name for name in names if name not in reasons),
        left=tuple(node.name for node in nodes if node.name in reasons and node.name not in planned),
        reasons=reasons,
        outputs={makers[name]: most for name, most in largest.items()},
    )


def within_half(
    model: onnx.ModelProto, plan: PrecisionPlan, flow: DataFlow, magnitudes: Magnitudes, progress: Progress = silent
) -> PrecisionPlan:
    """The plan with FP32 for FP16 layers whose values exceed FP16 on the calibration images; warns of them.

    An INT8 convolution stays in INT8 and writes float32; its entry has the reason. See :func:`half_parts`.
    """
    parts = half_parts(model, plan, flow, magnitudes=magnitudes, progress=progress)
    entries = dict(plan.entries)
    named = {reason for name, reason in parts.reasons.items() if name in entries}
    by_effect: dict[str, list[str]] = {}
    for name, reason in parts.reasons.items():
        if name not in entries and reason in named:
            continue  # the warning of a convolution names the same tensor
        entry = entries.get(name)
        if entry is None:
            effect = "stays in float32"
        elif entry.precision == "int8":
            entries[name] = replace(entry, float_output=reason)
            effect = "writes float32"
        else:
            entries[name] = Entry("fp32", reason, Cause.FP16_OVERFLOW)
            effect = "stays in FP32"
        by_effect.setdefault(effect, []).append(f"'{name}' {effect}: {reason}")
    for effect, lines in by_effect.items():
        if len(lines) > _MOST_LINES:
            lines = [f"{len(lines)} layers: each {effect}; the first: {lines[0]}"]
        for line in lines:
            warnings.warn(line, TrtdetWarning, stacklevel=4)
    return PrecisionPlan(entries)


def _problems(magnitudes: Mapping[str, float]) -> dict[str, str]:
    """Reasons by tensor that FP16 cannot hold: values over its largest, or all below its smallest normal number."""
    problems = {}
    for name, largest in magnitudes.items():
        if largest > LARGEST:
            problems[name] = f"FP16 would overflow: '{name}' reaches {largest:.3g}, over {LARGEST:g}"
        elif 0 < largest < SMALLEST_NORMAL:
            least = f"under its smallest normal {SMALLEST_NORMAL:.3g}"
            problems[name] = f"FP16 would lose it: '{name}' reaches only {largest:.3g}, {least}"
    return problems
