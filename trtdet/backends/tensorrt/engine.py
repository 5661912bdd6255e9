"""Runs an engine of TensorRT 8.6 to 11 or of TensorRT-RTX; all of them have ``execute_async_v3``."""

from __future__ import annotations

import json
import math
import re
import threading
import weakref
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.backends import cuda
from trtdet.backends.base import LayerTime, RunInfo
from trtdet.backends.libraries import LIBRARIES
from trtdet.backends.tensorrt.loaded_engine import EngineFacts, LoadedEngine, fitting_devices, obstacle, release
from trtdet.errors import BackendError, one_line
from trtdet.passes.batch import filled


class EngineContext:
    """One execution context with its own stream and memory, for up to ``largest`` images.

    ``profiler`` times every layer and rules out CUDA graphs. ``graphs`` lets TensorRT-RTX capture graphs itself.
    """

    def __init__(self, loaded: LoadedEngine, largest: int, profiler: Any = None, graphs: bool = False) -> None:
        self._loaded = loaded
        self._profiler = profiler
        self._graph: cuda.Graph | None = None
        self._library_graphs = graphs and loaded.captures_graphs and profiler is None
        self.captured = False
        """Whether the work is launched as a CUDA graph."""
        gpu = loaded.gpu
        with ExitStack() as stack:
            self._stream = stack.enter_context(gpu.stream())
            self._start, self._end = stack.enter_context(gpu.event()), stack.enter_context(gpu.event())
            mark = loaded.logger.count
            with loaded.doing("making an execution context"):
                context = self._new_context()
                if context is None:
                    raise loaded.refused("making an execution context", mark)
            self._contexts = [context]
            del context
            stack.callback(release, gpu, self._contexts)
            if profiler is not None:
                self._trt_context.profiler = profiler
            self._resize(largest)
            self._memory: dict[str, tuple[cuda.Buffer, cuda.Pinned]] = {}
            for tensor in (loaded.input, *loaded.outputs):
                count = math.prod(self._shapes[tensor.name])
                memory = stack.enter_context(gpu.buffer(count * tensor.dtype.itemsize))
                self._memory[tensor.name] = memory, stack.enter_context(gpu.pinned((count,), tensor.dtype))
                if not self._trt_context.set_tensor_address(tensor.name, memory.address):
                    raise loaded.refused(f"taking memory for '{tensor.name}'", mark)
            self._resources = stack.pop_all()
        self.close = weakref.finalize(self, _end_context, self._stream, self._resources)
        """Releases everything; a second call does nothing."""

    def fill(self, images: NDArray[np.float32]) -> None:
        """Copies a batch into the input buffer."""
        self._check_open()
        size = self._loaded.input.shape[1:]
        if images.shape[1:] != size:
            raise BackendError(
                f"the engine takes images of {'x'.join(map(str, size))}, not {'x'.join(map(str, images.shape[1:]))}"
            )
        if len(images) != self._shapes[self._loaded.input.name][0]:
            self._resize(len(images))
        np.copyto(self._array(self._loaded.input.name), images, casting="same_kind")
        self._copied = False

    def compute(self) -> float:
        # On an idle stream an event is recorded at once, so the time would include the launch that follows. Behind a
        # running batch it is recorded when that batch ends, after the launch.
        return self.run(False, behind_another=True)

    def run(self, transfers: bool = True, behind_another: bool = False) -> float:
        self._check_open()
        loaded, stream = self._loaded, self._stream
        name = loaded.input.name
        with loaded.gpu.current():
            if not transfers and not self._copied:
                stream.copy_in(self._memory[name][0], self._array(name))
            if behind_another:
                self._launch()
            stream.record(self._start)
            if transfers:
                stream.copy_in(self._memory[name][0], self._array(name))
            self._copied = True
            self._launch()
            if transfers:
                for output in loaded.outputs:
                    stream.copy_out(self._array(output.name), self._memory[output.name][0])
            stream.record(self._end)
            stream.wait()
            return self._end.since(self._start)

    def results(self) -> dict[str, NDArray[Any]]:
        """The outputs of the last run with transfers; the next run overwrites them."""
        return {output.name: self._array(output.name) for output in self._loaded.outputs}

    def capture(self) -> str:
        """Captures the work as a CUDA graph, after a first run at this shape; TensorRT-RTX captures by itself.

        Returns why this is not possible, or an empty string.
        """
        # Only TensorRT-RTX can tell in advance.
        if hasattr(self._trt_context, "is_stream_capturable"):
            with self._loaded.gpu.current():
                if not self._trt_context.is_stream_capturable(self._stream.handle):
                    return "TensorRT-RTX says that this engine cannot be captured"
        # Capturing again around the library's own capture would fail.
        if not self._library_graphs:
            try:
                self._graph = self._resources.enter_context(self._stream.capture(self._enqueue))
            except BackendError as error:
                return f"capturing it failed ({one_line(error)})"
        self.captured = True
        return ""

    @property
    def _trt_context(self) -> Any:
        return self._contexts[0]

    def _array(self, name: str) -> NDArray[Any]:
        self._check_open()  # the host's memory is released too
        shape = self._shapes[name]
        flat: NDArray[Any] = self._memory[name][1].array
        return flat[: math.prod(shape)].reshape(shape)

    def _check_open(self) -> None:
        if not self.close.alive:
            raise BackendError("the engine was closed")

    def _new_context(self) -> Any:
        trt, engine = self._loaded.trt, self._loaded.engine
        specialised = self._loaded.dynamic and hasattr(trt, "DynamicShapesKernelSpecializationStrategy")
        if not specialised and not self._library_graphs:
            return engine.create_execution_context()
        config = engine.create_runtime_config()
        if specialised:
            # By default TensorRT-RTX compiles a shape's kernels in the background and uses slower ones meanwhile. A
            # graph would keep the slower ones.
            config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        if self._library_graphs:
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return engine.create_execution_context(config)

    def _resize(self, batch: int) -> None:
        """Sets the batch size and reads the resulting output shapes."""
        # No local variable holds the context: in an error's traceback it would outlive its device.
        loaded, stream = self._loaded, self._stream
        mark = loaded.logger.count
        with loaded.doing(f"setting a batch of {batch}"):
            if loaded.dynamic:
                # In TensorRT 8.6, only the first context starts with a profile.
                if self._trt_context.active_optimization_profile != 0:
                    if not self._trt_context.set_optimization_profile_async(0, stream.handle):
                        raise BackendError(
                            f"{loaded.title} {loaded.trt.__version__} lets only one context use this engine: it was "
                            "built for one (PreviewFeature.PROFILE_SHARING_0806 was off); build it again"
                        )
                    stream.wait()
                if not self._trt_context.set_input_shape(loaded.input.name, (batch, *loaded.input.shape[1:])):
                    raise loaded.refused(f"setting a batch of {batch}", mark)
            self._shapes = {loaded.input.name: (batch, *loaded.input.shape[1:])}
            for output in loaded.outputs:
                shape = tuple(self._trt_context.get_tensor_shape(output.name))
                if min(shape, default=0) < 0:
                    raise BackendError(
                        f"output '{output.name}' of the engine has a shape, {'x'.join(map(str, shape))}, that is known "
                        "only when it ran; build it with --nms native or --nms host"
                    )
                self._shapes[output.name] = shape
        self._copied = False

    def _launch(self) -> None:
        if self._graph is None:
            self._enqueue()
        else:
            self._stream.launch(self._graph)

    def _enqueue(self) -> None:
        mark = self._loaded.logger.count
        with self._loaded.doing("running the engine"):
            if not self._trt_context.execute_async_v3(self._stream.handle):
                raise self._loaded.refused("running the engine", mark)


def _end_context(stream: cuda.Stream, resources: ExitStack) -> None:
    # After Ctrl-C the device may still use the memory that is about to be freed.
    with suppress(BackendError):
        stream.wait()
    resources.close()


def onnx_nodes(name: str, metadata: str = "") -> tuple[str, ...]:
    """The ONNX nodes that a layer of an engine came from.

    TensorRT's metadata has ``[ONNX Layer: Conv_41]`` for each node. Without metadata, the layer's name joins the names
    of nodes with ``+``, ``||`` and ``PWN(...)``. A format copy and a kernel with TensorRT's own name, ``__myl_...``,
    have no nodes.
    """
    if nodes := re.findall(r"\[ONNX Layer: ([^\]]*)\]", metadata):
        return tuple(dict.fromkeys(nodes))
    if name.startswith(("Reformatting CopyNode", "__myl")):
        return ()
    region = re.match(r"\{ForeignNode\[(.*)\]\}", name)
    parts = region[1].split("...") if region else []
    for part in [] if region else re.split(r" \+ | \|\| |, ", name):
        while part.startswith("PWN("):
            part = part.removeprefix("PWN(")
        # A node's own name may have brackets too.
        while part.endswith(")") and part.count(")") > part.count("("):
            part = part.removesuffix(")")
        parts.append(part)
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


def new_profiler(trt: Any) -> Any:
    """A profiler that keeps the last run's layers and milliseconds in ``times``."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]  # the base is known only at run time
        times: list[tuple[str, float]]

        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.times = []

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.times.append((layer_name, ms))

    return Profiler()


def layer_times(rows: list[list[tuple[str, float]]], report: str) -> tuple[LayerTime, ...]:
    """The times of each layer over all runs, in the order of first execution.

    ``rows`` has the layers and milliseconds of each run. ``report`` is the inspector's JSON; it lists only names if the
    engine was built with layer names alone.
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


def open_engine(serialized: bytes, facts: EngineFacts, *, graphs: bool = True) -> EngineRunner:
    """Loads an engine onto the first device that it was built for; ``graphs`` allows CUDA graphs.

    Raises BackendError if it cannot run here, was altered or cut short, lacks plugins, or the device has too little
    memory; the message quotes TensorRT.
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
        self.on_device, self.clocks = True, loaded.gpu.clocks
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
        with self._lock:
            if self._called is None:
                self._called = self._make_context(largest)
            context = self._called
            context.fill(filled(images, smallest))
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
        """The report of TensorRT's inspector, JSON with a list ``Layers``. Raises BackendError if it is empty, as the
        engine was built without profiling information."""
        loaded = self._loaded
        with loaded.doing("listing the layers"):
            inspector = loaded.engine.create_engine_inspector()
            report = inspector.get_engine_information(loaded.trt.LayerInformationFormat.JSON)
            if not report:
                raise BackendError("the engine has no information on its layers", "build it with profiling verbosity")
            return str(report)

    def close(self) -> None:
        """Releases everything on the device, contexts first; a second call does nothing."""
        with self._lock:
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
