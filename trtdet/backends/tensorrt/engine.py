"""Runs a built engine of TensorRT 8.6 to 11 or of TensorRT-RTX: all of them have ``execute_async_v3``."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.backends import cuda
from trtdet.backends.base import LayerTime, RunInfo
from trtdet.backends.tensorrt.engine_context import EngineContext
from trtdet.backends.tensorrt.engine_facts import EngineFacts, check_format, fitting_devices, obstacle
from trtdet.backends.tensorrt.engine_layers import layer_times, layers_by_name, new_profiler
from trtdet.backends.tensorrt.loaded_engine import LoadedEngine
from trtdet.errors import BackendError


def open_engine(engine: bytes, facts: EngineFacts, *, graphs: bool = True) -> EngineRunner:
    """Loads an engine onto the first device that it was built for.

    Args:
        engine: the serialised engine.
        facts: its library, version, targets and plugins.
        graphs: launch the work as a CUDA graph where it can be captured.

    Raises:
        BackendError: it cannot be run here, was altered or cut short, needs plugins that are not given, or the device
            has not enough memory; the message quotes TensorRT.
    """
    reason = obstacle(facts)
    if reason:
        raise BackendError(f"the engine cannot be run here, as {reason}")
    check_format(engine, facts.library)
    gpu = cuda.open_device(fitting_devices(facts)[0].index)
    try:
        return EngineRunner(LoadedEngine(engine, facts, gpu), graphs)
    except BaseException:
        gpu.close()
        raise


class EngineRunner:
    """An engine on a device, as :class:`~trtdet.backends.base.Runner` says. Contexts may run in several
    threads at the same time; calls run one at a time.

    A call with a dynamic batch is launched without a CUDA graph, as its shape may change; a context's does not. Of
    TensorRT-RTX it is launched as such a graph too, which the library captures for each shape.

    Attributes:
        on_device: the images are copied to a device, and the outputs back.
        usual_batch: the batch that it was optimised for.
    """

    def __init__(self, loaded: LoadedEngine, graphs: bool) -> None:
        self._loaded = loaded
        self.input: str = loaded.input.name
        self.outputs: tuple[str, ...] = tuple(tensor.name for tensor in loaded.outputs)
        self.batch: int | None = None if loaded.dynamic else loaded.batches[1]
        self.on_device = True
        self.model = None
        self.usual_batch = loaded.batches[1]
        self.largest_batch: int | None = loaded.batches[2]
        self.run_info = RunInfo(loaded.gpu.device.name, f"{loaded.title} {loaded.trt.__version__}")
        self._contexts: weakref.WeakSet[EngineContext] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._called: EngineContext | None = None
        if not graphs:
            self._run_without_graphs("they were not asked for")
        elif not loaded.gpu.graphs and not loaded.captures_graphs:
            self._run_without_graphs(f"{loaded.gpu.through} has none")

    def __call__(self, images: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        smallest, _, largest = self._loaded.batches
        if len(images) > largest:
            raise BackendError(f"the engine takes {largest} images at once, not {len(images)}", "build it with --batch")
        missing = max(0, smallest - len(images))
        filled = np.concatenate([images, np.repeat(images[-1:], missing, axis=0)]) if missing else images
        with self._lock:
            if self._called is None:
                self._called = self._make_context(largest)
            context = self._called
            context.fill(filled)
            context.run()
            if not self._loaded.dynamic:
                self._capture(context)
            return {name: value[: len(images)].copy() for name, value in context.results().items()}

    def new_context(self, images: NDArray[np.float32]) -> EngineContext:
        with self._lock:
            context = self._context_of(images)
            # The first run also does what is done once; it must not be captured.
            context.run()
            self._capture(context)
            context.run()
        return context

    def profile(self, images: NDArray[np.float32], runs: int, warm_up: int) -> tuple[LayerTime, ...]:
        profiler = new_profiler(self._loaded.trt)
        with self._lock:
            context = self._context_of(images, profiler)
        rows: list[list[tuple[str, float]]] = []
        for _ in range(warm_up + runs):
            profiler.times = []
            context.run()
            rows.append(profiler.times)
        context.close()
        known = layers_by_name(self.inspect())
        return layer_times(rows[warm_up:], known)

    def inspect(self) -> str:
        """The report of TensorRT's inspector on the engine, JSON with a list ``Layers``.

        Raises:
            BackendError: the report is empty: the engine was built without profiling information.
        """
        loaded = self._loaded
        with loaded.doing("listing the layers"):
            inspector = loaded.engine.create_engine_inspector()
            report = inspector.get_engine_information(loaded.trt.LayerInformationFormat.JSON)
            if not report:
                raise BackendError("the engine has no information on its layers", "build it with profiling verbosity")
            return str(report)

    def clocks(self) -> cuda.Clocks | None:
        """The clocks of the device; None where NVML does not report them."""
        return self._loaded.gpu.clocks()

    def close(self) -> None:
        """Releases everything on the device, contexts first. A second call does nothing."""
        for context in list(self._contexts):
            context.close()
        self._loaded.close()

    def __enter__(self) -> EngineRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _context_of(self, images: NDArray[np.float32], profiler: Any = None) -> EngineContext:
        smallest, _, largest = self._loaded.batches
        if not smallest <= len(images) <= largest:
            allowed = str(largest) if smallest == largest else f"{smallest} to {largest}"
            raise BackendError(f"the engine takes a batch of {allowed}, not of {len(images)}", "build it with --batch")
        context = self._make_context(len(images), profiler)
        context.fill(images)
        return context

    def _make_context(self, batch: int, profiler: Any = None) -> EngineContext:
        context = EngineContext(self._loaded, batch, profiler, graphs=not self.run_info.without_graphs)
        self._contexts.add(context)
        return context

    def _capture(self, context: EngineContext) -> None:
        if not self.run_info.without_graphs and not context.captured:
            self._run_without_graphs(context.capture())

    def _run_without_graphs(self, reason: str) -> None:
        self.run_info = replace(self.run_info, without_graphs=reason)
