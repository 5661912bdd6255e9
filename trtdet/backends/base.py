"""The interface of a backend: its capabilities, a build, and a runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.config import InputConfig, NmsConfig, NmsMode, SiluForm
from trtdet.options import BuildOptions, EngineOptions, SweepOptions
from trtdet.progress import Progress, silent
from trtdet.quantization import DataFlow, Precision

OwnCalibrator = Literal["minmax", "entropy", "percentile"]
"""Calibration rules with a calibrator in TensorRT itself."""


@dataclass(frozen=True)
class Typing:
    """How a network gets its precisions.

    ``network_flags`` are names of creation flags. With ``weak`` the builder chooses precisions from those its flags
    allow, with exceptions for single layers; otherwise the model's Q/DQ nodes and casts determine every precision.
    """

    network_flags: tuple[str, ...] = ()
    weak: bool = False


@dataclass(frozen=True)
class Capabilities:
    """What the installed version of a backend can do. Callers ask for these and never compare versions.

    Attributes:
        name: value of ``--backend``.
        makes_engine: False if it runs the Q/DQ model itself.
        lists_layers: the builder's messages or the inspector list the engine's layers for the audit.
        keeps_timing_cache: the builder returns measured kernel times and reuses those of earlier builds.
        has_inspector: the library's inspector reports an engine's layers, on a machine with a GPU.
        sms: compute capabilities it can build for ahead of time; empty: only this machine's GPU.
        default_sms: compute capabilities it builds for by default.
        sms_without_int8: targets where every INT8 convolution runs in float.
        in_graph_nms: values of ``--nms`` that put NMS into the graph, best first.
        uncaptured_nms: those of them that rule out a CUDA graph, each with the reason; ``--nms auto`` avoids them.
        capture_flags: builder flags that forbid memory allocation during a run, as CUDA graphs require; not for
            networks with control flow.
        nms_across_classes: EfficientNMS supports ``class_agnostic``.
        max_topk: largest K of TopK; None for any.
        missing_ops: ONNX operators it cannot build, each with the reason.
        max_opset: newest ONNX opset it reads; None for any.
        explicit: precisions of a network with Q/DQ nodes.
        implicit: precisions of a network whose ranges come from a calibrator; None without calibrators.
        version_compatible: it can build engines for later versions of the library.
        hardware_compatible: it can build engines for later GPUs.
        tactic_sources: kernel libraries its builder can be restricted to.
        tf32: it multiplies float32 in TF32 on GPUs since Ampere, unless switched off.
        preview_features: preview features its builder needs.
        cache_version: the library's version as a calibration cache writes it; 0 if it reads no caches.
        silu: values of ``--silu`` it supports, best first.
        loads_plugins: its builder loads plugin libraries.
        compiles_plugins: trtdet's plugins need no library; the engine carries their kernels.
        data_flow: how its INT8 kernels read and write.
        fp8: it multiplies matrices in FP8; engines need compute capability 8.9 or later.
        dla: it can place layers on a DLA of this machine.
    """

    name: str
    version: str
    makes_engine: bool
    lists_layers: bool
    keeps_timing_cache: bool = False
    has_inspector: bool = False
    sms: tuple[int, ...] = ()
    default_sms: tuple[int, ...] = ()
    sms_without_int8: tuple[int, ...] = ()
    in_graph_nms: tuple[NmsMode, ...] = ("native",)
    uncaptured_nms: Mapping[NmsMode, str] = field(default_factory=dict)
    capture_flags: tuple[str, ...] = ()
    nms_across_classes: bool = True
    max_topk: int | None = None
    missing_ops: Mapping[str, str] = field(default_factory=dict)
    max_opset: int | None = None
    explicit: Typing = Typing()
    implicit: Typing | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    tactic_sources: tuple[str, ...] = ()
    tf32: bool = False
    preview_features: tuple[str, ...] = ()
    cache_version: int = 0
    silu: tuple[SiluForm, ...] = ("keep", "swish")
    loads_plugins: bool = False
    compiles_plugins: bool = False
    data_flow: DataFlow = DataFlow()
    fp8: bool = False
    dla: bool = False

    def uncaptured(self, mode: NmsMode, nms: NmsConfig) -> str:
        """Why an engine with this NMS cannot be launched as a CUDA graph; empty if it can."""
        # Without suppression, `native` and `onnx` have no loop and no data-dependent shapes.
        return self.uncaptured_nms.get(mode, "") if nms.suppresses or mode == "efficient" else ""

    def unsupported(self, model: onnx.ModelProto) -> dict[str, str]:
        """The model's operators that the backend cannot build, each with the reason."""
        missing = self.missing_ops
        return {node.op_type: missing[node.op_type] for node in model.graph.node if node.op_type in missing}


@dataclass(frozen=True)
class Implicit:
    """Where the ranges of an implicitly quantised network come from: one of TensorRT's own calibrators, which reads
    ``images`` with ``preprocess`` in batches of ``batch``, or with the calibrator ``cache`` the text of a calibration
    cache for the network's tensors. ``percentile`` is that of the calibrator ``percentile``, in percent.
    """

    calibrator: OwnCalibrator | Literal["cache"]
    cache: str = ""
    images: tuple[Path, ...] = ()
    preprocess: InputConfig | None = None
    batch: int = 1
    percentile: float = 99.99


@dataclass(frozen=True)
class BuildRequest:
    """A model, and the engine to build from it.

    Attributes:
        model: ONNX; strongly typed by its Q/DQ nodes and casts, unless ``implicit``.
        sms: compute capabilities; empty for the backend's default.
        batch: (min, opt, max) if the model's batch is dynamic, else None.
        precisions: ``fp16`` or ``fp32`` by name of the nodes that stay out of INT8; used for weakly typed networks.
        plugins: libraries with the plugins of the model's operators.
        precision: lowest precision the engine may use.
        implicit: source of the ranges if the model has no Q/DQ nodes.
        timing_cache: kernel times that earlier builds measured; empty for none.
    """

    model: onnx.ModelProto
    sms: tuple[int, ...] = ()
    batch: tuple[int, int, int] | None = None
    precisions: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[Path, ...] = ()
    precision: Precision = "int8"
    implicit: Implicit | None = None
    options: EngineOptions = EngineOptions()
    timing_cache: bytes = b""


@dataclass(frozen=True)
class EngineTarget:
    """Settings of :class:`BuildRequest` that hold for every network; a network with a fixed batch ignores ``batch``."""

    sms: tuple[int, ...] = ()
    batch: tuple[int, int, int] | None = None
    plugins: tuple[Path, ...] = ()
    options: EngineOptions = EngineOptions()

    @staticmethod
    def of(options: BuildOptions | SweepOptions) -> EngineTarget:
        """The target that the options describe."""
        batch = options.batch if isinstance(options, BuildOptions) else None
        return EngineTarget(options.sms, batch=batch, plugins=options.engine.plugins, options=options.engine)


def compose(
    model: onnx.ModelProto,
    precision: Precision,
    precisions: Mapping[str, str],
    target: EngineTarget,
    implicit: Implicit | None = None,
) -> BuildRequest:
    """The request to build a network for a target; arguments as in :class:`BuildRequest`."""
    batch = model.graph.input[0].type.tensor_type.shape.dim[0]
    return BuildRequest(
        model=model,
        sms=target.sms,
        batch=None if batch.HasField("dim_value") else target.batch,
        precisions=precisions if precision != "fp32" else {},
        plugins=target.plugins,
        precision=precision,
        implicit=implicit,
        options=target.options,
    )


@dataclass(frozen=True)
class Built:
    """An engine and the builder's reports about it.

    Attributes:
        engine: serialised; empty if the backend runs the model itself.
        sms: compute capabilities it runs on.
        log: all builder messages, oldest first; for some libraries they list the engine's layers.
        seconds: duration of the build.
        layers: the inspector's report, JSON; empty without an inspector.
        timing_cache: kernel times of this and earlier builds; empty if none are kept.
        calibration_cache: ranges of an implicitly quantised engine, as TensorRT wrote them.
        messages: builder messages above VERBOSE, each with the letter of its severity: F, E, W or I.
    """

    engine: bytes
    sms: tuple[int, ...]
    log: tuple[str, ...]
    seconds: float
    layers: str = ""
    timing_cache: bytes = b""
    calibration_cache: str = ""
    messages: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerTime:
    """The time of one layer; ``ms`` has the milliseconds of each run, summed over its ``count`` executions in that run.

    ``name`` is as the library calls it, ``type`` the ONNX operator if nothing was fused, else the library's kind of
    kernel. ``onnx`` has the names of the ONNX nodes it came from; empty if unknown.
    """

    name: str
    type: str
    onnx: tuple[str, ...]
    ms: tuple[float, ...]
    count: int = 1


@dataclass(frozen=True)
class RunInfo:
    """Where a model or an engine runs. ``str()`` gives all of it, such as ``TensorRT 8.6.0 (NVIDIA H200)``.

    ``device`` is ``CPU`` or the driver's name of the GPU, ``library`` has its version. ``fallback_reason`` says why the
    engine does not run, ``without_graphs`` why no CUDA graph is used; each is empty if there is nothing to say.
    """

    device: str
    library: str
    fallback_reason: str = ""
    without_graphs: str = ""

    def __str__(self) -> str:
        text = f"{self.library} ({self.device})"
        if self.without_graphs:
            text += f", without CUDA graphs, as {self.without_graphs}"
        return text + (f", as {self.fallback_reason}" if self.fallback_reason else "")


class ExecutionContext(Protocol):
    """One stream of work with buffers for one batch. Contexts of one runner may run in different threads at once."""

    def run(self, transfers: bool = True) -> float:
        """Runs the batch once, waits for it and returns milliseconds.

        ``transfers`` copies the input to the device and the outputs back. The device is idle at the start, as when a
        request arrives, so the launch counts. The device's own events measure the time, or else the clock.
        """

    def compute(self) -> float:
        """Milliseconds of the work alone, without copies.

        A device runs the batch twice in a row and the second run is timed. Its launch overlaps with the first run, so
        it counts only if it takes longer than the run, which can happen without CUDA graphs.
        """


class Runner(Protocol):
    """A model or an engine, loaded and ready.

    Attributes:
        input: name of the images' input.
        batch: the fixed batch; None if dynamic.
        largest_batch: most images at once; None for any number.
        outputs: names.
        on_device: False if inputs and outputs stay in host memory and are not copied to a device.
        model: the ONNX model that runs; None for an engine.
    """

    input: str
    batch: int | None
    largest_batch: int | None
    outputs: tuple[str, ...]
    on_device: bool
    run_info: RunInfo

    @property
    def model(self) -> onnx.ModelProto | None: ...

    def __call__(self, images: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """Runs a batch, float32 (B, 3, H, W). A smaller batch than the fixed one is padded and its outputs are cut.
        Raises BackendError if the batch is too large, or the device failed."""

    def new_context(self, images: NDArray[np.float32]) -> ExecutionContext:
        """A new context for exactly this batch, warmed up once. Raises BackendError if the batch size is not supported,
        or the device has no memory left."""

    def profile(self, images: NDArray[np.float32], runs: int, warm_up: int) -> tuple[LayerTime, ...]:
        """Times every layer over ``runs`` runs of a batch, after ``warm_up`` others; in the order of execution."""

    def clocks(self) -> dict[str, Any] | None:
        """As :meth:`trtdet.backends.cuda.CudaDevice.clocks`; None if unknown."""


class Backend(Protocol):
    """One way to run a detector."""

    @property
    def capabilities(self) -> Capabilities: ...

    def build(self, request: BuildRequest, progress: Progress = silent) -> Built:
        """Builds the engine; ``progress`` gets the builder's phases, if the builder reports them. Raises BackendError
        if the backend refused the model or a target; the message quotes it."""
