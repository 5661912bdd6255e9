"""Estimates the time of an engine on a GPU that is not here, from its layers and the GPU's published rates.

A layer that starts a kernel takes the longest of three times, plus a fixed time of the kernel itself:

- its bytes (inputs, outputs and constants, with channel padding) at the share of the bandwidth that kernels reach;
- the multiply-adds of its convolutions and matrix products at the share of the tensor cores' dense rate for the input
  type that kernels reach, with the channels of each group padded to the 16 bytes of a tensor-core operand, and the
  output cut into tiles that occupy the multiprocessors in waves; depthwise convolutions run on ordinary cores;
- its element-wise operators at the rate of the ordinary cores.

This is a roofline (Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009) below the peaks. What kernels reach was fitted to 35 published times: seven engines of
NVIDIA/TensorRT's ``trt-engine-explorer`` on A100, RTX 3090 and TITAN RTX, with the times of their layers, and FP16 and
INT8 of seven detectors on T4, Orin, RTX 2060 to 3080 and RTX PRO 6000 (``benchmarks/estimates.py``). The intervals are
the errors for GPUs and models that the fit left out one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from trtdet.audit.fp16 import InFp16, Moved
from trtdet.audit.gpus import Gpu
from trtdet.audit.layers import BITS
from trtdet.audit.results import Audit
from trtdet.audit.traffic import ACTIVATION_FUNCTIONS, TYPE_CHANGES, Flow
from trtdet.bundle import Bundle
from trtdet.errors import ConfigError
from trtdet.passes import load_model
from trtdet.quantization import PrecisionPlan
from trtdet.tables import Cell, Column, Table, Tables, listed

Bound = Literal["memory", "arithmetic", "launch"]
BOUNDS: tuple[Bound, ...] = get_args(Bound)
"""What limits a layer's speed."""

KERNEL_CYCLES = 7200
"""GPU clocks that every kernel of a CUDA graph takes beside its work: start, first loads, last writes, and the wait for
them; 4.1 us at 1.77 GHz. Fitted; the 72 kernels of a MobileNet at batch 1 take 4.9 us each on a TITAN RTX."""

MEMORY = 0.9
"""Share of the bandwidth that kernels reach. Fitted; a ResNet-50's convolutions of 64 to 256 channels reach 0.82 to 0.9
on an RTX 3090."""

QUANTISED = 0.5
"""The same for a kernel that only quantises a feature map: 0.45 to 0.5 in ResNet-18 on an A100."""

IMAGE = 0.16
"""The same for a kernel that converts an image of up to four channels to the engine's type and layout: 0.13 to 0.24 on
an A100, though 0.8 on an RTX 3090."""

ARITHMETIC: Mapping[int, float] = {8: 0.69, 16: 0.76, 32: 0.6}
"""Share of the dense tensor-core rate that full waves of a convolution reach, by the bits of what it reads. Fitted."""

DEPTHWISE = 0.5
"""Share of the ordinary cores' rate that depthwise convolutions reach. Fitted, by few layers."""

TILE = 64
"""Places, and output channels, that a multiprocessor computes at a time: fewer tiles than multiprocessors leave some
idle. Fitted among 1, 32, 64 and 128; builders choose tiles of 32 to 256."""

TIME_WITHIN = 1.3
"""Factor of the interval of a time. 90 % of the times of a GPU or a model lay within 1.22 where a fit left these out;
rounded up, as rows that share a GPU or a model are not independent."""

RATIO_WITHIN = 1.2
"""The same for the ratio of INT8's time to FP16's: 1.18, rounded up."""

LAUNCH_US = 3.0
"""Microseconds that the host takes to launch a kernel, so the shortest time between two kernels without a graph.
Source: Zhang, Wahib and Matsuoka, "Understanding the overheads of launching CUDA kernels", ICPP 2019 poster: 2 to 4."""

_VECTOR = 16
"""Bytes that a row of a tensor-core operand is padded to: 8 channels in FP16, 16 in INT8.
Source: NVIDIA, "Deep Learning Performance: Convolutional Layers User's Guide", section "Channels In And Out"."""

_IMAGE_CHANNELS = 4

_SHOWN = 8
"""Layers in a short table of an estimate."""


@dataclass(frozen=True)
class LayerEstimate:
    """Estimate of one layer for the whole batch; ``precision`` is the data type that it reads.

    Attributes:
        about: names of its convolutions, else of its other ONNX nodes, else its own.
        operations: of convolutions and matrix products; a multiply-add is two.
        launch_ms: the kernel's fixed time; without a CUDA graph at least the part of the host's launch that the layer's
            own work does not hide.
    """

    name: str
    type: str
    about: tuple[str, ...]
    precision: str
    bytes: int
    operations: int
    memory_ms: float
    arithmetic_ms: float
    launch_ms: float

    @property
    def ms(self) -> float:
        """Estimated milliseconds per run."""
        return max(self.memory_ms, self.arithmetic_ms) + self.launch_ms

    @property
    def bound(self) -> Bound:
        """The largest of the three times."""
        times = (self.memory_ms, self.arithmetic_ms, self.launch_ms)
        return BOUNDS[times.index(max(times))]


@dataclass(frozen=True)
class Estimate:
    """Estimated time of an engine on a GPU, not a measurement; ``graph`` means launched as a CUDA graph.

    ``layers`` are those that start a kernel, in the order of the builder. ``cached`` is the part of ``bytes`` in
    tensors that fit into the L2 cache; memory time may fall by this share.
    """

    gpu: Gpu
    batch: int
    layers: tuple[LayerEstimate, ...]
    graph: bool = True
    cached: int = 0

    @property
    def ms(self) -> float:
        """Estimated milliseconds per run of the whole batch."""
        return math.fsum(layer.ms for layer in self.layers)

    @property
    def interval_ms(self) -> tuple[float, float]:
        """Least and most milliseconds that a measurement may show, at 90 % confidence; see ``TIME_WITHIN``."""
        return self.ms / TIME_WITHIN, self.ms * TIME_WITHIN

    @property
    def bytes(self) -> int:
        """Bytes that all layers move."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def operations(self) -> int:
        """Operations of all convolutions and matrix products; a multiply-add is two."""
        return sum(layer.operations for layer in self.layers)

    def bound_ms(self, bound: Bound) -> float:
        """Milliseconds of the layers with this bound."""
        return math.fsum(layer.ms for layer in self.layers if layer.bound == bound)

    def __str__(self) -> str:
        where = f"{self.gpu.name} at batch {self.batch}"
        low, high = self.interval_ms
        return f"{self.ms:.3f} ms ({low:.3f} .. {high:.3f}) on {where}, estimated from published rates, not measured"

    def as_dict(self) -> dict[str, Any]:
        layers = [{**asdict(layer), "ms": layer.ms, "bound": layer.bound} for layer in self.layers]
        return {
            "gpu": self.gpu.name,
            "batch": self.batch,
            "measured": False,
            "cuda_graph": self.graph,
            "ms": self.ms,
            "interval_ms": list(self.interval_ms),
            "bytes": self.bytes,
            "cached_bytes": self.cached,
            "operations": self.operations,
            "kernels": len(self.layers),
            "bound_ms": {bound: self.bound_ms(bound) for bound in BOUNDS},
            "layers": layers,
        }


def estimate(flow: Flow, gpu: Gpu, batch: int = 1, *, graph: bool = True, fp16: Collection[str] = ()) -> Estimate:
    """Estimates the time of an engine on a GPU, which need not be the GPU it was built for.

    ``fp16`` names INT8 convolutions to estimate in FP16, see :class:`trtdet.audit.fp16.InFp16`. For 14 plans each of
    YOLOX-nano and YOLOv5n, the result differed by at most 5.8 % from the estimate of the engine that TensorRT-RTX 1.7
    built, and ranked the plans alike (Spearman 0.98 and 0.96; L4, batch 1).

    Activation bytes and operations scale with the batch, constants do not. A builder might choose other kernels for
    another batch; the estimate ignores that. ``graph`` launches all kernels as one CUDA graph. Raises ConfigError if
    the batch is below 1.
    """
    roofline = Roofline(flow, gpu=gpu, batch=batch, graph=graph)
    layers = roofline.layers(range(len(flow.layers)), fp16)
    return Estimate(gpu, batch=batch, layers=layers, graph=graph, cached=roofline.cached)


def flow_of(bundle: Bundle) -> Flow:
    """The layers of a bundle's engine. Raises BundleError if the engine was not audited, or
    a file cannot be read; ModelError if the model is not valid."""
    layers = Audit.load(bundle.file("audit.json")).layers
    model = load_model(bundle.model, allow_quantized=True)
    return Flow(layers, PrecisionPlan.load(bundle.file("plan.json")), model)


_SPECIAL_STEPS: Mapping[str, int] = {
    **dict.fromkeys(ACTIVATION_FUNCTIONS, 2),
    **dict.fromkeys(("Clip", "HardSigmoid", "HardSwish", "LeakyRelu", "PRelu", "Relu"), 0),
    **dict.fromkeys(TYPE_CHANGES, 1),
    **dict.fromkeys(("Div", "Exp", "Reciprocal", "Sqrt", "Pow", "Erf"), 1),
}
"""Exponentials, reciprocals and type conversions per value of an operator; 0 for others.
A sigmoid is an exponential and a reciprocal; a quantisation rounds to an integer, a dequantisation makes it a float."""

_STEPS: Mapping[str, int] = {"QuantizeLinear": 3, "DequantizeLinear": 1, **dict.fromkeys(ACTIVATION_FUNCTIONS, 2)}
"""Ordinary instructions per value of an operator, such as scale and clamp in a quantisation; 1 for others."""

_MOVES = frozenset(
    ("Concat", "Constant", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Resize", "Shape", "Slice")
) | frozenset(("Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"))
"""Operators without arithmetic."""


class Roofline:
    """The times of an engine's layers on a GPU, with any of its INT8 convolutions in FP16; see :func:`estimate`."""

    def __init__(self, flow: Flow, gpu: Gpu, batch: int = 1, graph: bool = True) -> None:
        if batch < 1:
            raise ConfigError(f"the batch of an estimate is {batch}", "give 1 or more")
        self._flow, self._gpu, self._batch, self._graph = flow, gpu, batch, graph
        self._scale = batch / flow.batch
        self._instructions: dict[tuple[int, bool], float] = {}

    def layers(self, indices: Iterable[int], fp16: Collection[str] = ()) -> tuple[LayerEstimate, ...]:
        """Estimates of the layers that start a kernel; a fused layer counts with its convolution."""
        changed = InFp16(self._flow, fp16)
        moves = ((index, changed.layer(index)) for index in indices)
        return tuple(self._layer(index, moved, changed) for index, moved in moves if moved.kernels)

    def _layer(self, index: int, moved: Moved, changed: InFp16) -> LayerEstimate:
        layer, inside = self._flow.layers[index], changed.fused_layers(index)
        parts = [moved, *map(changed.layer, inside)]
        total = round(sum(part.activations for part in parts) * self._scale) + sum(part.constants for part in parts)
        operations, tensor_ms = self._products(index, moved.type)
        pointwise_ms = self._pointwise_ms(index, index in self._flow.workers)
        arithmetic_ms = max(tensor_ms, pointwise_ms + sum(self._pointwise_ms(other, True) for other in inside))
        gpu, reached = self._gpu, MEMORY
        if layer.type == "Reformat" and layer.inputs and layer.outputs:
            # Generated kernels fuse their conversions.
            source = layer.inputs[0]
            if len(source.dims) == 4 and source.dims[1] <= _IMAGE_CHANNELS:
                reached = IMAGE
            elif layer.output == "Int8" != layer.input:
                reached = QUANTISED
        memory_ms = total / (gpu.bandwidth * gpu.memory * reached) / 1e6
        launch_ms = moved.kernels * KERNEL_CYCLES / (gpu.clock * gpu.sustained) / 1e6
        if not self._graph:
            launch_ms = max(launch_ms, moved.kernels * LAUNCH_US / 1e3 - max(memory_ms, arithmetic_ms))
        return LayerEstimate(
            name=layer.name,
            type=layer.type,
            about=self._flow.named(layer),
            precision=moved.type,
            bytes=total,
            operations=operations,
            memory_ms=memory_ms,
            arithmetic_ms=arithmetic_ms,
            launch_ms=launch_ms,
        )

    def _products(self, index: int, kind: str) -> tuple[int, float]:
        """Operations of a layer's convolutions and matrix products on type ``kind``, and their milliseconds."""
        gpu, bits = self._gpu, BITS.get(kind, 32)
        peak = gpu.int8 if bits <= 8 else gpu.fp16 if bits == 16 else gpu.tf32 or gpu.fp32
        rate = peak * gpu.sustained * ARITHMETIC[min(max(bits, 8), 32)]
        step = _VECTOR * 8 // bits
        operations, ms = 0.0, 0.0
        for name in self._flow.workers.get(index, ()):
            work = self._flow.work.get(name)
            if work is None or (name in self._flow.products and not work.inputs):
                count = 2 * self._flow.products[name] * self._scale
                operations, ms = operations + count, ms + count / rate / 1e9
                continue
            count = 2 * work.count * self._batch
            operations += count
            if work.depthwise:
                ms += count / (gpu.fp32 * gpu.sustained * DEPTHWISE) / 1e9
            elif count:
                filled = _filled(work.inputs // work.groups, step) * _filled(work.outputs // work.groups, step)
                values = work.count * self._batch * work.groups // (work.inputs * math.prod(work.kernel))
                rows, columns = values // work.outputs, work.outputs // work.groups
                tiles = work.groups * -(-max(rows, 1) // TILE) * -(-max(columns, 1) // TILE)
                # Share of the multiprocessors that it keeps busy, above 0 to 1.
                occupied = tiles / (-(-tiles // gpu.sms) * gpu.sms)
                ms += count * filled / (rate * occupied) / 1e9
        return round(operations), ms

    def _pointwise_ms(self, index: int, beside: bool) -> float:
        """Milliseconds of a layer's element-wise operators; ``beside`` means in the kernel of a convolution."""
        if (index, beside) in self._instructions:
            return self._instructions[index, beside]
        instructions, flow, layer = 0.0, self._flow, self._flow.layers[index]
        most = max((tensor.elements for tensor in (*layer.inputs, *layer.outputs)), default=0)
        for name in layer.onnx:
            node = flow.nodes.get(name)
            if node is None or node.op_type in _MOVES or name in flow.products or name in flow.work:
                continue
            # A convolution's kernel also names the Q/DQ pairs around it, which other kernels compute.
            if name not in flow.live or (beside and node.op_type in TYPE_CHANGES):
                continue
            special = self._gpu.special * _SPECIAL_STEPS.get(node.op_type, 0)
            # If the model has no size for a node, the largest tensor of its layer stands in.
            values = min(flow.elements.get(node.output[0], most), most)
            instructions += (_STEPS.get(node.op_type, 1) + special) * values
        # The rate counts two operations per multiply-add, so an instruction counts as two.
        self._instructions[index, beside] = (
            instructions * self._scale * 2 / (self._gpu.fp32 * self._gpu.sustained) / 1e9
        )
        return self._instructions[index, beside]

    @cached_property
    def cached(self) -> int:
        """Bytes of tensors between layers that fill at most half of the L2 cache."""
        total, flow = 0, self._flow
        for layer in flow.layers:
            for part in (layer.inputs, layer.outputs) if layer.bytes else ():
                for tensor in dict.fromkeys(part):
                    size = round(tensor.bytes * self._scale)
                    if flow.writers.get(tensor.name) and flow.readers.get(tensor.name) and 2 * size <= self._gpu.l2:
                        total += size
        return total


def _filled(channels: int, step: int) -> float:
    """Padded channels per real channel."""
    return -(-channels // step) * step / max(channels, 1)


def estimate_tables(estimates: Sequence[Estimate], alone: Sequence[Estimate], everything: bool = False) -> Tables:
    """A table of all batches, and for each batch a table of its slowest eight layers or of all.

    ``estimates`` has one entry per batch, launched as a CUDA graph; ``alone`` has the same launched kernel by kernel.
    """
    gpu = estimates[0].gpu
    rows: list[tuple[Cell, ...]] = [
        (
            total.batch,
            total.ms,
            "{:.3f} .. {:.3f}".format(*total.interval_ms),
            1e3 * total.batch / total.ms,
            single.ms,
            total.bytes / 1e6,
            total.operations / 1e9,
            *(total.bound_ms(bound) / total.ms for bound in BOUNDS),
        )
        for total, single in zip(estimates, alone, strict=True)
    ]
    columns: tuple[Column | str, ...] = (
        "batch",
        Column("ms", ".3f"),
        "90 % interval",
        Column("images/s", ".0f"),
        Column("ms without CUDA graph", ".3f"),
        Column("MB", ".1f"),
        Column("GOP", ".2f"),
        *(Column(f"bound by {bound}", ".0%") for bound in BOUNDS),
    )
    title = (
        f"estimated, not measured: {gpu.name} at its published rates ({gpu.bandwidth:g} GB/s, FP16 {gpu.fp16:g} "
        f"TFLOPS, INT8 {gpu.int8:g} TOPS), {len(estimates[0].layers)} kernels:"
    )
    shares = [f"{total.cached / total.bytes:.0%} at batch {total.batch}" for total in estimates if total.bytes]
    note = (
        f"of these bytes, tensors that may stay in its L2 cache of {gpu.l2 >> 20} MB: {', '.join(shares)}; as far as "
        "they do, memory takes less than estimated"
    )
    totals = Table(columns, rows=rows, title=title, notes=(note,))
    return Tables([totals, *(_slowest_layers(total, everything) for total in estimates)])


def _slowest_layers(total: Estimate, everything: bool) -> Table:
    slowest = sorted(total.layers, key=lambda layer: -layer.ms)
    shown = slowest if everything else slowest[:_SHOWN]
    rows = [
        (
            layer.ms,
            layer.ms / total.ms,
            layer.bound,
            layer.bytes / 1e6,
            layer.operations / 1e9 or None,
            layer.precision,
            layer.type,
            listed(layer.about),
        )
        for layer in shown
    ]
    megabytes, operations, share = Column("MB", ".2f"), Column("GOP", ".2f"), Column("share", ".1%")
    columns = (Column("ms", ".4f"), share, "bound by", megabytes, operations, "reads", "kernel")
    title = f"estimated, the slowest layers at batch {total.batch}:"
    notes = () if len(shown) == len(slowest) else (f"{len(slowest) - len(shown)} more; --all shows them",)
    return Table((*columns, Column("layer", align="left")), rows=rows, title=title, notes=notes)
