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
"""The calibration rules that TensorRT has a calibrator of its own for."""


@dataclass(frozen=True)
class Typing:
    """How a network gets its precisions.

    Attributes:
        network_flags: names of the flags that it is created with.
        weak: the builder chooses among the precisions that its flags allow, with exceptions for single layers; else
            the model's Q/DQ nodes and casts determine every precision.
    """

    network_flags: tuple[str, ...] = ()
    weak: bool = False


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of one version of a backend. Callers ask for these and never compare versions.

    Attributes:
        name: as ``--backend`` takes it.
        version: of the installed library.
        makes_engine: False where the Q/DQ model itself is run.
        lists_layers: its builder's messages or its inspector list the layers of the engine for the audit.
        keeps_timing_cache: its builder keeps the kernel times that it measures, and reuses the times of earlier builds.
        has_inspector: an engine's layers are read from the library's inspector, which needs the GPU of the machine.
        sms: compute capabilities it can build for ahead of time; empty means the machine's own.
        default_sms: compute capabilities that it builds for by default.
        sms_without_int8: targets that make every INT8 convolution run in float.
        in_graph_nms: the values of ``--nms`` that put the suppression into the graph, the best first.
        uncaptured_nms: of these, those with which an engine cannot be launched as a CUDA graph, each with the reason;
            ``--nms auto`` takes none of them. Empty where there are no CUDA graphs.
        capture_flags: names of the builder's flags without which an engine may allocate memory while it runs, and then
            cannot be captured; they are not for networks with control flow.
        nms_across_classes: its EfficientNMS supports ``class_agnostic``.
        max_topk: the largest K of TopK, None for any.
        missing_ops: ONNX operators that it cannot build, each with the reason.
        max_opset: the newest ONNX opset that it reads, None for any.
        explicit: how a network with Q/DQ nodes gets its precisions.
        implicit: how a network gets them whose ranges come from a calibrator; None where there are no calibrators.
        version_compatible: it can build engines that later versions of the library run.
        hardware_compatible: it can build engines that later GPUs run.
        tactic_sources: names of the kernel libraries that its builder can be restricted to.
        tf32: it multiplies float32 in TF32 where the GPU can (since Ampere), unless it is told not to.
        preview_features: names of the preview features that its builder needs.
        cache_version: the library's version as a calibration cache names it; 0 where it reads none.
        silu: the values of ``--silu`` that it supports, the best first.
        loads_plugins: its builder takes libraries of plugins.
        compiles_plugins: it takes trtdet's plugins without a library, as kernels that the engine carries.
        data_flow: how its INT8 kernels read and write.
        fp8: it multiplies matrices in FP8, on compute capability 8.9 and later where it makes engines.
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

    def uncaptured(self, mode: NmsMode, nms: NmsConfig) -> str:
        """Why an engine with this suppression cannot be launched as a CUDA graph; empty where it can.

        Where nothing is suppressed, ``native`` and ``onnx`` hold nothing that the data decide.
        """
        return self.uncaptured_nms.get(mode, "") if nms.suppresses or mode == "efficient" else ""

    def unsupported(self, model: onnx.ModelProto) -> dict[str, str]:
        """Operators of the model that the backend cannot build, each with the reason."""
        missing = self.missing_ops
        return {node.op_type: missing[node.op_type] for node in model.graph.node if node.op_type in missing}


@dataclass(frozen=True)
class Implicit:
    """The source of an implicitly quantised network's ranges.

    Attributes:
        calibrator: ``cache``, or TensorRT's own ``minmax``, ``entropy`` or ``percentile``.
        cache: for ``cache``, the text of a calibration cache for the network's tensors.
        images: for the others, the calibration images.
        preprocess: how the images become the network's input.
        batch: images at once.
        percentile: for ``percentile``, in percent.
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
        model: ONNX; strongly typed unless ``implicit``: its Q/DQ nodes and casts determine every precision.
        sms: compute capabilities; empty for the backend's default.
        batch: (min, opt, max) where the model's batch is dynamic, else None.
        precisions: ``fp16`` or ``fp32`` by name of the nodes that stay out of INT8; used for weakly typed networks.
        plugins: libraries with the plugins of the model's operators.
        precision: the lowest that the engine may use.
        implicit: the source of the ranges when the model has no Q/DQ nodes.
        options: further settings of the builder.
        timing_cache: the kernel times that earlier builds measured; empty for none.
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
    """What engines are built for, whatever the network is; the fields are those of :class:`BuildRequest`, which takes
    ``batch`` only where the network's is dynamic."""

    sms: tuple[int, ...] = ()
    batch: tuple[int, int, int] | None = None
    plugins: tuple[Path, ...] = ()
    options: EngineOptions = EngineOptions()

    @staticmethod
    def of(options: BuildOptions | SweepOptions) -> EngineTarget:
        """What the options ask engines to be built for."""
        batch = options.batch if isinstance(options, BuildOptions) else None
        return EngineTarget(options.sms, batch=batch, plugins=options.engine.plugins, options=options.engine)


def compose(
    model: onnx.ModelProto,
    precision: Precision,
    precisions: Mapping[str, str],
    target: EngineTarget,
    implicit: Implicit | None = None,
) -> BuildRequest:
    """The request for an engine of a network; the arguments are the fields of :class:`BuildRequest`."""
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
        engine: the serialised engine; empty where the backend runs the model itself.
        sms: compute capabilities that it runs on.
        log: all of the builder's messages, oldest first, which list the layers of some libraries' engines.
        seconds: how long the build took.
        layers: the report of the engine's inspector, JSON; empty where there is none.
        timing_cache: the kernel times of this and earlier builds; empty where none are kept.
        calibration_cache: the ranges of an implicitly quantised engine, as TensorRT wrote them.
        messages: those of the log that are above VERBOSE, each with the letter of its severity: F, E, W or I.
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
    """The time of one layer.

    Attributes:
        name: as the library calls it.
        type: an ONNX operator where nothing was fused, else the library's kind of kernel.
        onnx: names of the ONNX nodes it came from; empty where they are not known.
        ms: milliseconds in each run; the sum where the layer ran several times in a run.
        count: how often it ran in each run.
    """

    name: str
    type: str
    onnx: tuple[str, ...]
    ms: tuple[float, ...]
    count: int = 1


@dataclass(frozen=True)
class RunInfo:
    """Where a model or an engine runs. ``str()`` says all of it, such as ``TensorRT 8.6.0 (NVIDIA H200)``.

    Attributes:
        device: ``CPU``, or the GPU as its driver calls it.
        library: the library that runs it, with its version.
        fallback_reason: why it is not the engine that runs; empty where it is, or where there is none.
        without_graphs: why the work is not launched as CUDA graphs; empty where it is, or where the device has none.
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
    """One stream of work with its own buffers, which hold one batch. Several contexts of a runner may run at the same
    time in different threads."""

    def run(self, transfers: bool = True) -> float:
        """Runs the batch once and waits for it. ``transfers`` copies the input to the device and the outputs back.

        Returns:
            Milliseconds from a device at rest, as a request finds it, so that launching the work counts: by the
            device's own events where it has them, else by the clock.
        """

    def compute(self) -> float:
        """Milliseconds of the work alone, without copies.

        A device runs the batch twice in a row, and the second run is timed: it was launched while the first was
        running, so that its launch counts only where that takes longer than the run, as it may without CUDA graphs.
        """


class Runner(Protocol):
    """A model or an engine, loaded and ready.

    Attributes:
        input: name of the images' input.
        batch: the fixed batch; None where it is dynamic.
        largest_batch: the most images it takes at once; None for any number.
        outputs: names.
        on_device: images are copied to a device and the outputs back; False where both stay in the host's memory.
        run_info: the device and the library that run it.
        model: the ONNX model that is run; None for an engine.
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
        """Runs a batch, float32 (B, 3, H, W). One that is smaller than a fixed batch is padded, and the outputs cut.

        Raises:
            BackendError: more images than it takes, or the device failed.
        """

    def new_context(self, images: NDArray[np.float32]) -> ExecutionContext:
        """A new context for exactly this batch, warmed up once.

        Raises:
            BackendError: a batch it does not take, or no memory on the device.
        """

    def profile(self, images: NDArray[np.float32], runs: int, warm_up: int) -> tuple[LayerTime, ...]:
        """Times every layer, in the order of execution, over ``runs`` runs of a batch, after ``warm_up`` others."""

    def clocks(self) -> dict[str, Any] | None:
        """As :meth:`trtdet.backends.cuda.CudaDevice.clocks`; None where they are not known."""


class Backend(Protocol):
    """One way to run a detector."""

    @property
    def capabilities(self) -> Capabilities: ...

    def build(self, request: BuildRequest, progress: Progress = silent) -> Built:
        """Builds the engine; ``progress`` is called with the builder's phases, where the builder reports them.

        Raises:
            BackendError: the backend refused the model or a target; the message quotes it.
        """
