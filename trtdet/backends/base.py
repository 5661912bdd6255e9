"""What a backend can do and what it is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.backends.cuda import Clocks
from trtdet.config import InputConfig, NmsMode, SiluForm
from trtdet.progress import Progress, silent
from trtdet.quantization import Precision

OwnCalibrator = Literal["minmax", "entropy", "percentile"]
"""The calibration rules that TensorRT has a calibrator of its own for."""


@dataclass(frozen=True)
class Typing:
    """How a network gets its precisions.

    Attributes:
        network_flags: names of the flags it is created with.
        weak: the builder chooses among the precisions that its flags allow, and what a layer must not run in is said
            layer by layer; else the model's Q/DQ nodes and casts say all of it.
    """

    network_flags: tuple[str, ...] = ()
    weak: bool = False


@dataclass(frozen=True)
class Capabilities:
    """What one version of one backend can do. Callers ask this row, never the version.

    Attributes:
        name: as ``--backend`` takes it.
        version: of the installed library.
        makes_engine: False where the Q/DQ model itself is what runs.
        lists_layers: what its builder says or its inspector gives lists the layers of the engine for the audit.
        keeps_timing_cache: its builder keeps the kernel times that it measured, and takes those of earlier builds.
        has_inspector: an engine's layers are read from the library's inspector, which needs the GPU of the machine.
        sms: compute capabilities it can build for ahead of time; empty means the machine's own.
        default_sms: those it builds for when none is asked for.
        sms_without_int8: targets that make every INT8 convolution run in float.
        in_graph_nms: what ``--nms`` may put into the graph, the one that ``auto`` takes first.
        nms_across_classes: its EfficientNMS heeds ``class_agnostic``.
        max_topk: the largest K of TopK, None for any.
        missing_ops: ONNX operators that it cannot build, each with what happens instead.
        max_opset: the newest ONNX opset that it reads, None for any.
        explicit: how a network with Q/DQ nodes gets its precisions.
        implicit: how one without them does, whose ranges come from a calibrator; None where calibrators are gone.
        version_compatible: an engine can be made to run on later versions of the library.
        hardware_compatible: an engine can be made to run on later GPUs than the one it is built on.
        tactic_sources: names of the kernel libraries that its builder can be held to.
        preview_features: names of those that its builder is asked for.
        cache_version: the library's version as a calibration cache names it; 0 where it reads none.
        silu: what ``--silu`` may write SiLU as, the best first.
        loads_plugins: its builder takes libraries of plugins.
        compiles_plugins: it takes trtdet's plugins without a library, as kernels that the engine carries.
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
    nms_across_classes: bool = True
    max_topk: int | None = None
    missing_ops: Mapping[str, str] = field(default_factory=dict)
    max_opset: int | None = None
    explicit: Typing = Typing()
    implicit: Typing | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    tactic_sources: tuple[str, ...] = ()
    preview_features: tuple[str, ...] = ()
    cache_version: int = 0
    silu: tuple[SiluForm, ...] = ("keep", "swish")
    loads_plugins: bool = False
    compiles_plugins: bool = False


@dataclass(frozen=True)
class Implicit:
    """Where an implicitly quantised network's ranges come from.

    Attributes:
        calibrator: ``cache``, or TensorRT's own ``minmax``, ``entropy`` or ``percentile``.
        cache: for ``cache``, the text of a calibration cache for the network's tensors.
        images: for the others, what they look at, in full batches.
        preprocess: how the images become the network's input.
        batch: images at a time.
        percentile: for ``percentile``, in percent.
    """

    calibrator: OwnCalibrator | Literal["cache"]
    cache: str = ""
    images: tuple[Path, ...] = ()
    preprocess: InputConfig | None = None
    batch: int = 1
    percentile: float = 99.99


@dataclass(frozen=True)
class EngineOptions:
    """What a builder is told beside the model.

    Attributes:
        workspace: bytes of device memory that a kernel may use for scratch; None for the library's own limit.
        version_compatible: the engine runs on later versions of the library as well.
        hardware_compatible: the engine runs on later GPUs as well, Ampere and newer.
        embed_plugins: the engine carries the plugin libraries, so that no service has to load them.
        tactic_sources: names of the kernel libraries that may be used; None for the library's own choice.
    """

    workspace: int | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    embed_plugins: bool = False
    tactic_sources: tuple[str, ...] | None = None


@dataclass(frozen=True)
class BuildRequest:
    """What an engine is built for.

    Attributes:
        model: ONNX; strongly typed unless ``implicit``: its Q/DQ nodes and casts say every precision.
        sms: compute capabilities; empty for the backend's default.
        batch: (min, opt, max) where the model's batch is dynamic, else None.
        precisions: ``fp16`` or ``fp32`` by name of the nodes that stay out of INT8; said to weakly typed networks.
        plugins: libraries with the plugins of the model's operators.
        precision: the lowest that the engine may use.
        implicit: where the ranges come from when the model has no Q/DQ nodes.
        options: what else the builder is told.
        timing_cache: what an earlier build learnt about the device's kernels; empty for nothing.
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
class Built:
    """An engine and what the builder said about it.

    Attributes:
        engine: the serialised engine; empty where the backend runs the model itself.
        sms: compute capabilities it runs on.
        log: the builder's messages, oldest first.
        seconds: how long the build took.
        layers: what the engine's inspector says, JSON; empty where there is none.
        timing_cache: what this build and those before it learnt; empty where nothing is kept.
        calibration_cache: the ranges of an implicitly quantised engine, as TensorRT wrote them.
    """

    engine: bytes
    sms: tuple[int, ...]
    log: tuple[str, ...]
    seconds: float
    layers: str = ""
    timing_cache: bytes = b""
    calibration_cache: str = ""


@dataclass(frozen=True)
class LayerTime:
    """What one layer took.

    Attributes:
        name: as the library that ran it calls it.
        type: its kind: an ONNX operator where nothing was fused, else the library's kind of kernel.
        onnx: names of the ONNX nodes it came from; empty where that is not known.
        ms: for each run in turn, in milliseconds; of a layer that ran several times in one run, the sum.
        count: how often it ran in one run.
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
        library: what runs it there, with its version.
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
        """Runs the batch once and waits for it.

        Args:
            transfers: whether the input is copied to the device and the outputs back.

        Returns:
            Milliseconds: by the device's own events where it has them, else by the clock.
        """
        ...


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
        """Runs float32 (B, 3, H, W); one smaller than a fixed batch is filled up and the filling left out again.

        Raises:
            BackendError: more images than it takes, or the device failed.
        """
        ...

    def new_context(self, images: NDArray[np.float32]) -> ExecutionContext:
        """A new context for exactly this batch, warmed up once.

        Raises:
            BackendError: a batch it does not take, or no memory on the device.
        """
        ...

    def profile(self, images: NDArray[np.float32], runs: int, warm_up: int) -> tuple[LayerTime, ...]:
        """Times every layer over so many runs of one batch, in the order of execution, after ``warm_up`` others."""
        ...

    def clocks(self) -> Clocks | None:
        """What the device runs at now; None where that is not known."""
        ...


class Backend(Protocol):
    """One way to run a detector."""

    @property
    def capabilities(self) -> Capabilities: ...

    def unsupported(self, model: onnx.ModelProto) -> dict[str, str]:
        """Operators of the model that the backend cannot build, each with the reason."""
        ...

    def build(self, request: BuildRequest, progress: Progress = silent) -> Built:
        """Builds the engine.

        Args:
            request: what to build.
            progress: told of the builder's phases, where it tells them.

        Raises:
            BackendError: the backend refused the model or a target; the message holds its own words.
        """
        ...
