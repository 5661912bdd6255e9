"""What a backend can do and what it is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.config import SiluForm, Where


@dataclass(frozen=True)
class Capabilities:
    """What one version of one backend can do. Callers ask this row, never the version.

    Attributes:
        name: as ``--backend`` takes it.
        version: of the installed library.
        makes_engine: False where the Q/DQ model itself is what runs.
        lists_layers: its builder's messages list the layers of the engine in the form that the audit reads.
        needs_gpu: an engine can be built only on a machine with a CUDA device.
        sms: compute capabilities it can build for ahead of time; empty means the machine's own.
        default_sms: those it builds for when none is asked for.
        sms_without_int8: targets that make every INT8 convolution run in float.
        in_graph_nms: what ``--nms`` may put into the graph, the one that ``auto`` takes first.
        max_topk: the largest K of TopK, None for any.
        missing_ops: ONNX operators that it cannot build, each with what happens instead.
        max_opset: the newest ONNX opset that it reads, None for any.
        network_flags: names of the network creation flags an explicit INT8 network needs.
        precision_flags: names of the builder flags an explicit INT8 network needs.
        layer_precisions: its networks are weakly typed: what stays out of INT8 is said layer by layer as well.
        silu: what ``--silu`` may write SiLU as, the best first.
        plugin_loading: how a library of plugins gets into its builder: ``process`` is loaded before the creators are
            registered, ``registry`` by the builder itself; empty where it takes none.
        compiles_plugins: it takes trtdet's plugins without a library, as kernels that the engine carries.
    """

    name: str
    version: str
    makes_engine: bool
    lists_layers: bool
    needs_gpu: bool
    sms: tuple[int, ...] = ()
    default_sms: tuple[int, ...] = ()
    sms_without_int8: tuple[int, ...] = ()
    in_graph_nms: tuple[Where, ...] = ("native",)
    max_topk: int | None = None
    missing_ops: Mapping[str, str] = field(default_factory=dict)
    max_opset: int | None = None
    network_flags: tuple[str, ...] = ()
    precision_flags: tuple[str, ...] = ()
    layer_precisions: bool = False
    silu: tuple[SiluForm, ...] = ("keep", "swish")
    plugin_loading: str = ""
    compiles_plugins: bool = False


@dataclass(frozen=True)
class BuildRequest:
    """What an engine is built for.

    Attributes:
        model: strongly typed ONNX: its Q/DQ nodes and casts say every precision.
        sms: compute capabilities; empty for the backend's default.
        batch: (min, opt, max) where the model's batch is dynamic, else None.
        precisions: ``fp16`` or ``fp32`` by name of the convolutions that the plan keeps out of INT8.
        plugins: libraries with the plugins of the model's operators.
    """

    model: onnx.ModelProto
    sms: tuple[int, ...] = ()
    batch: tuple[int, int, int] | None = None
    precisions: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Built:
    """An engine and what the builder said about it.

    Attributes:
        engine: the serialised engine; empty where the backend runs the model itself.
        sms: compute capabilities it runs on.
        log: the builder's messages, oldest first.
        seconds: how long the build took.
    """

    engine: bytes
    sms: tuple[int, ...]
    log: tuple[str, ...]
    seconds: float


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


class Lane(Protocol):
    """One stream of work with buffers of its own, filled with one batch; several lanes may run side by side in
    threads."""

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
        ran_on: where it runs, in words, such as ``onnxruntime (CPU)`` or ``TensorRT 8.6.0 (NVIDIA H200)``.
    """

    input: str
    batch: int | None
    largest_batch: int | None
    outputs: tuple[str, ...]
    ran_on: str

    def __call__(self, images: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """Runs float32 (B, 3, H, W); one smaller than a fixed batch is filled up and the filling left out again.

        Raises:
            BackendError: more images than it takes, or the device failed.
        """
        ...

    def lane(self, images: NDArray[np.float32]) -> Lane:
        """A new lane for exactly this batch, warmed up once.

        Raises:
            BackendError: a batch it does not take, or no memory on the device.
        """
        ...

    def profile(self, images: NDArray[np.float32], runs: int, warm_up: int) -> tuple[LayerTime, ...]:
        """Times every layer over so many runs of one batch, in the order of execution, after ``warm_up`` others."""
        ...


class Backend(Protocol):
    """One way to run a detector."""

    @property
    def capabilities(self) -> Capabilities: ...

    def unsupported(self, model: onnx.ModelProto) -> dict[str, str]:
        """Operators of the model that the backend cannot build, each with the reason."""
        ...

    def build(self, request: BuildRequest) -> Built:
        """Builds the engine.

        Raises:
            BackendError: the backend refused the model or a target; the message holds its own words.
        """
        ...
