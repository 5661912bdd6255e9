"""Runs an engine of TensorRT 8.6 to 11 or of TensorRT-RTX; all of them have ``execute_async_v3``."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.backends import cuda
from trtdet.backends.base import LayerTime, RunInfo
from trtdet.backends.libraries import LIBRARIES
from trtdet.backends.tensorrt.engine_context import EngineContext
from trtdet.backends.tensorrt.engine_facts import EngineFacts, fitting_devices, obstacle
from trtdet.backends.tensorrt.engine_layers import layer_times, new_profiler
from trtdet.backends.tensorrt.loaded_engine import LoadedEngine
from trtdet.errors import BackendError


def open_engine(serialized: bytes, facts: EngineFacts, *, graphs: bool = True) -> EngineRunner:
    """Loads an engine onto the first device that it was built for; ``graphs`` allows CUDA graphs.

    Raises:
        BackendError: it cannot run here, was altered or cut short, lacks plugins, or the device has too little memory;
            the message quotes TensorRT.
    """
    if reason := obstacle(facts):
        raise BackendError(f"the engine cannot be run here, as {reason}")
    if not serialized:
        raise BackendError("the engine is empty", "build it again")
    # Only published formats can be checked here; TensorRT itself refuses the others when it loads the engine.
    library = facts.library
    foreign = any(serialized.startswith(row.magic) for row in LIBRARIES if row.magic and row != library)
    if foreign or not serialized.startswith(library.magic):
        raise BackendError(
            f"this is not an engine of {library.title}: it starts with {serialized[:4]!r}", "build it again"
        )
    if missing := library.missing_bytes(serialized):
        raise BackendError(
            f"the engine was cut short: {len(serialized)} of {len(serialized) + missing} bytes", "build it again"
        )
    gpu = cuda.open_device(fitting_devices(facts)[0].index)
    try:
        return EngineRunner(LoadedEngine(serialized, facts, gpu), graphs)
    except BaseException:
        gpu.close()
        raise


class EngineRunner:
    """An engine on a device, see :class:`~trtdet.backends.base.Runner`. Contexts may run in parallel threads; calls run
    one at a time.

    With a dynamic batch, a call may change the shape and uses no CUDA graph, but a context does. TensorRT-RTX uses
    graphs for both, as it captures one for each shape.
    """

    def __init__(self, loaded: LoadedEngine, graphs: bool) -> None:
        self._loaded = loaded
        self.input: str = loaded.input.name
        self.outputs: tuple[str, ...] = tuple(tensor.name for tensor in loaded.outputs)
        self.batch: int | None = None if loaded.dynamic else loaded.batches[1]
        self.on_device = True
        self.model = None
        self.largest_batch: int | None = loaded.batches[2]
        self._contexts: weakref.WeakSet[EngineContext] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._called: EngineContext | None = None
        without_graphs = "" if graphs else "they were not asked for"
        if graphs and not loaded.gpu.graphs and not loaded.captures_graphs:
            without_graphs = f"{loaded.gpu.through} has none"
        library = f"{loaded.title} {loaded.trt.__version__}"
        self.run_info = RunInfo(loaded.gpu.device.name, library, without_graphs=without_graphs)

    def __call__(self, images: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        smallest, _, largest = self._loaded.batches
        if len(images) > largest:
            raise BackendError(f"the engine takes {largest} images at once, not {len(images)}", "build it with --batch")
        padding = max(0, smallest - len(images))
        filled = np.concatenate([images, np.repeat(images[-1:], padding, axis=0)]) if padding else images
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
            context = self._filled_context(images)
            # The first run includes one-time work, which must not be captured.
            context.run()
            self._capture(context)
            context.run()
        return context

    def profile(self, images: NDArray[np.float32], runs: int, warm_up: int) -> tuple[LayerTime, ...]:
        profiler = new_profiler(self._loaded.trt)
        with self._lock:
            context = self._filled_context(images, profiler)
        rows: list[list[tuple[str, float]]] = []
        for _ in range(warm_up + runs):
            profiler.times = []
            context.run()
            rows.append(profiler.times)
        context.close()
        return layer_times(rows[warm_up:], self.inspect())

    def inspect(self) -> str:
        """The report of TensorRT's inspector, JSON with a list ``Layers``.

        Raises BackendError if it is empty, as the engine was built without profiling information.
        """
        loaded = self._loaded
        with loaded.doing("listing the layers"):
            inspector = loaded.engine.create_engine_inspector()
            report = inspector.get_engine_information(loaded.trt.LayerInformationFormat.JSON)
            if not report:
                raise BackendError("the engine has no information on its layers", "build it with profiling verbosity")
            return str(report)

    def clocks(self) -> dict[str, Any] | None:
        return self._loaded.gpu.clocks()

    def close(self) -> None:
        """Releases everything on the device, contexts first; a second call does nothing."""
        for context in list(self._contexts):
            context.close()
        self._loaded.close()

    def __enter__(self) -> EngineRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _filled_context(self, images: NDArray[np.float32], profiler: Any = None) -> EngineContext:
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
            self.run_info = replace(self.run_info, without_graphs=context.capture())
