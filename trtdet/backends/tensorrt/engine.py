"""Runs a built engine of TensorRT 8.6 to 11 or of TensorRT-RTX: all of them have ``execute_async_v3``."""

from __future__ import annotations

import json
import math
import re
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.backends import cuda
from trtdet.backends.base import Capabilities, LayerTime, RunInfo
from trtdet.backends.libraries import LIBRARIES, Library, library_named
from trtdet.backends.tensorrt.builder import advised
from trtdet.bundle import Bundle
from trtdet.errors import BackendError, one_line

_AMPERE = 80

_DTYPES = {"FLOAT": "f4", "HALF": "f2", "INT8": "i1", "UINT8": "u1", "INT32": "i4", "INT64": "i8", "BOOL": "?"}
"""trt.DataType by name, as NumPy has it."""


@dataclass(frozen=True)
class EngineFacts:
    """What is known of an engine before it is opened.

    Attributes:
        library: that it was built with.
        version: of that library then.
        sms: compute capabilities it was built for.
        version_compatible: later versions run it as well.
        hardware_compatible: every device from compute capability 8.0 on runs it.
        plugins: libraries with plugins that it needs.
        embedded: it carries its plugins, which are code of the host.
    """

    library: Library
    version: str
    sms: tuple[int, ...]
    version_compatible: bool = False
    hardware_compatible: bool = False
    plugins: tuple[Path, ...] = ()
    embedded: bool = False

    @staticmethod
    def of(bundle: Bundle) -> EngineFacts:
        """Those of a bundle's engine."""
        backend = bundle.manifest.backend
        return EngineFacts(
            library_named(backend.name),
            backend.version,
            backend.sms,
            version_compatible=backend.version_compatible,
            hardware_compatible=backend.hardware_compatible,
            plugins=tuple(bundle.file(file) for file in backend.loose_plugins),
            embedded=backend.carries_plugins,
        )

    @staticmethod
    def built(caps: Capabilities, sms: tuple[int, ...], plugins: tuple[Path, ...]) -> EngineFacts:
        """Those of an engine that was built in this process, or will be."""
        return EngineFacts(library_named(caps.name), caps.version, sms, plugins=plugins)


def obstacle(facts: EngineFacts) -> str:
    """Why an engine cannot be run here, as words that fit after "as"; empty where it can.

    Nothing of TensorRT is created for this: its Runtime ends the process on a machine without a device.
    """
    missing = cuda.absence()
    if missing:
        return missing
    if not _fitting(facts):
        here = ", ".join(f"{device.name} with {device.sm / 10}" for device in cuda.devices())
        wanted = " or ".join(str(sm / 10) for sm in facts.sms) + (" and later" if facts.hardware_compatible else "")
        return f"the engine was built for compute capability {wanted}, and this machine has {here}; build it again here"
    title = facts.library.title
    try:
        installed = facts.library.load().__version__
    except BackendError as error:
        return str(error)
    if installed != facts.version and not facts.version_compatible:
        return (
            f"the engine was built with {title} {facts.version}, and {installed} is installed here; build it again, or "
            "install that version"
        )
    return cuda.no_bindings()


def open_engine(engine: bytes, facts: EngineFacts, *, graphs: bool = True) -> EngineRunner:
    """Loads an engine onto the first device that it was built for.

    Args:
        engine: the serialised engine.
        facts: what is known of it.
        graphs: launch the work as a CUDA graph where it can be captured.

    Raises:
        BackendError: it cannot be run here, was altered or cut short, needs plugins that are not given, or there is no
            memory for it; the message holds TensorRT's own words.
    """
    reason = obstacle(facts)
    if reason:
        raise BackendError(f"the engine cannot be run here, as {reason}")
    _check_format(engine, facts.library)
    gpu = cuda.open_device(_fitting(facts)[0].index)
    try:
        return EngineRunner(_Loaded(engine, facts, gpu), graphs)
    except BaseException:
        gpu.close()
        raise


def onnx_nodes(name: str, metadata: str = "") -> tuple[str, ...]:
    """The ONNX nodes that a layer of an engine came from.

    What TensorRT notes of them goes first: ``[ONNX Layer: Conv_41]``, several one after the other. Without that they
    are read from the layer's name, in which ``+``, ``||`` and ``PWN(...)`` join the names of nodes. A copy between two
    formats came from no node, nor did a kernel that TensorRT gave a name of its own, ``__myl_...``.
    """
    noted = re.findall(r"\[ONNX Layer: ([^\]]*)\]", metadata)
    if noted:
        return tuple(dict.fromkeys(noted))
    if name.startswith(("Reformatting CopyNode", "__myl")):
        return ()
    region = re.match(r"\{ForeignNode\[(.*)\]\}", name)
    parts = region[1].split("...") if region else re.split(r" \+ | \|\| |, ", re.sub(r"PWN\(|\)", "", name))
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


class EngineRunner:
    """An engine on a device, as :class:`~trtdet.backends.base.Runner` says. Contexts may run in several
    threads at the same time; calls run one at a time.

    A call of a dynamic batch is launched without a CUDA graph: the state that a graph was captured with changes with
    the shape. Contexts keep theirs.

    Attributes:
        on_device: the images are copied to a device, and the outputs back.
        usual_batch: the batch that it was optimised for.
    """

    def __init__(self, loaded: _Loaded, graphs: bool) -> None:
        self._loaded = loaded
        self.input: str = loaded.input.name
        self.outputs: tuple[str, ...] = tuple(tensor.name for tensor in loaded.outputs)
        self.batch: int | None = None if loaded.dynamic else loaded.batches[1]
        self.on_device = True
        self.model = None
        self.usual_batch = loaded.batches[1]
        self.largest_batch: int | None = loaded.batches[2]
        self.run_info = RunInfo(loaded.gpu.device.name, f"{loaded.title} {loaded.trt.__version__}")
        self._contexts: weakref.WeakSet[_EngineContext] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._called: _EngineContext | None = None
        if not graphs:
            self._run_without_graphs("they were not asked for")
        elif not loaded.gpu.graphs:
            self._run_without_graphs(f"{loaded.gpu.through} has none")

    def __call__(self, images: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        smallest, _, largest = self._loaded.batches
        if len(images) > largest:
            raise BackendError(f"the engine takes {largest} images at once, not {len(images)}; build it with --batch")
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

    def new_context(self, images: NDArray[np.float32]) -> _EngineContext:
        with self._lock:
            context = self._context_of(images)
            # The first run also does what is done once; it must not be captured.
            context.run()
            self._capture(context)
            context.run()
        return context

    def profile(self, images: NDArray[np.float32], runs: int, warm_up: int) -> tuple[LayerTime, ...]:
        profiler = _profiler(self._loaded.trt)
        with self._lock:
            context = self._context_of(images, profiler)
        rows: list[list[tuple[str, float]]] = []
        for _ in range(warm_up + runs):
            profiler.times = []
            context.run()
            rows.append(profiler.times)
        context.close()
        known = _layers(self.inspect())
        return _by_layer(rows[warm_up:], known)

    def inspect(self) -> str:
        """What TensorRT's inspector tells of the engine, as JSON: ``Layers``, a list.

        Raises:
            BackendError: it tells nothing, as of an engine that was built with no profiling information.
        """
        loaded = self._loaded
        with loaded.doing("telling its layers"):
            inspector = loaded.engine.create_engine_inspector()
            told = inspector.get_engine_information(loaded.trt.LayerInformationFormat.JSON)
            if not told:
                raise BackendError("the engine has no information on its layers; build it with profiling verbosity")
            return str(told)

    def clocks(self) -> cuda.Clocks | None:
        """What the device runs at; None where NVML does not tell."""
        return self._loaded.gpu.clocks()

    def close(self) -> None:
        """Gives everything back to the device, contexts first. A second time does nothing."""
        for context in list(self._contexts):
            context.close()
        self._loaded.close()

    def __enter__(self) -> EngineRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _context_of(self, images: NDArray[np.float32], profiler: Any = None) -> _EngineContext:
        smallest, _, largest = self._loaded.batches
        if not smallest <= len(images) <= largest:
            allowed = str(largest) if smallest == largest else f"{smallest} to {largest}"
            raise BackendError(f"the engine takes a batch of {allowed}, not of {len(images)}; build it with --batch")
        context = self._make_context(len(images), profiler)
        context.fill(images)
        return context

    def _make_context(self, batch: int, profiler: Any = None) -> _EngineContext:
        context = _EngineContext(self._loaded, batch, profiler)
        self._contexts.add(context)
        return context

    def _capture(self, context: _EngineContext) -> None:
        if not self.run_info.without_graphs and not context.captured:
            self._run_without_graphs(context.capture())

    def _run_without_graphs(self, reason: str) -> None:
        self.run_info = replace(self.run_info, without_graphs=reason)


@dataclass(frozen=True)
class _Tensor:
    """An input or output; of a dynamic batch its shape starts with -1."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class _Loaded:
    """A deserialised engine, what it takes and gives, and the device it is on; all go together, in order."""

    def __init__(self, engine: bytes, facts: EngineFacts, gpu: cuda.Gpu) -> None:
        self.title = facts.library.title
        self.trt: Any = facts.library.load()
        self.gpu = gpu
        self.logger = _logger(self.trt)
        self._held: list[Any] = []
        try:
            with self.doing("loading the engine"):
                self._held.append(self._runtime(facts))
                self._held.append(self._engine(engine))
            self._read_tensors()
        except BaseException:
            _drop(gpu, self._held)
            raise
        self._finish = weakref.finalize(self, _give_back, gpu, self._held)

    @property
    def engine(self) -> Any:
        if len(self._held) < 2:
            raise BackendError("the engine was closed")
        return self._held[1]

    def close(self) -> None:
        self._finish()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """With the device current; what TensorRT raises becomes a BackendError with the words of its log."""
        mark = self.logger.count
        with self.gpu.current():
            try:
                yield
            except (TypeError, RuntimeError, MemoryError) as error:
                # A factory that gave nothing is a TypeError.
                raise self.refused(what, mark, one_line(error)) from None

    def refused(self, what: str, mark: int, otherwise: str = "it gave no reason") -> BackendError:
        """The error for what TensorRT did not do, with what it logged since ``mark`` and what to do about it."""
        words = one_line("; ".join(self.logger.since(mark)) or otherwise)
        return BackendError(f"{self.title} {self.trt.__version__} failed at {what}: {advised(words, _ADVICE)}")

    def _runtime(self, facts: EngineFacts) -> Any:
        if facts.plugins and not facts.library.loads_plugins:
            raise BackendError(f"{self.title} {self.trt.__version__} takes no plugin libraries; build the engine again")
        missing = [path for path in facts.plugins if not path.is_file()]
        if missing:
            raise BackendError(f"the engine needs the plugin library '{missing[0]}', which is not there")
        if facts.library.loads_plugins:
            # TensorRT's own plugins, EfficientNMS among them. TensorRT-RTX must have no creators at all.
            self.trt.init_libnvinfer_plugins(self.logger, "")
        mark = self.logger.count
        runtime = self.trt.Runtime(self.logger)
        if facts.embedded or facts.version_compatible:
            # Both carry code of the host, a plugin or a runtime of their version, which is run only when asked for.
            runtime.engine_host_code_allowed = True
        for path in facts.plugins:
            if runtime.get_plugin_registry().load_library(str(path.resolve())) is None:
                raise self.refused(f"loading the plugin library '{path}'", mark)
        return runtime

    def _engine(self, data: bytes) -> Any:
        mark = self.logger.count
        engine = self._held[0].deserialize_cuda_engine(data)
        if engine is None:
            raise self.refused("loading the engine", mark)
        return engine

    def _read_tensors(self) -> None:
        # No local name holds the engine: one in the trace of an error would keep it alive beyond its device.
        trt = self.trt
        inputs: list[_Tensor] = []
        outputs: list[_Tensor] = []
        for index in range(self.engine.num_io_tensors):
            name = self.engine.get_tensor_name(index)
            kind = self.engine.get_tensor_dtype(name).name
            if kind not in _DTYPES:
                raise BackendError(f"tensor '{name}' of the engine is {kind}; allowed: {', '.join(_DTYPES)}")
            if self.engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
                raise BackendError(f"tensor '{name}' of the engine is a shape on the host; build it from another model")
            tensor = _Tensor(name, np.dtype(_DTYPES[kind]), tuple(self.engine.get_tensor_shape(name)))
            (inputs if self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else outputs).append(tensor)
        if len(inputs) != 1 or len(inputs[0].shape) != 4 or min(inputs[0].shape[1:]) < 1:
            found = ", ".join(f"{one.name} {'x'.join(map(str, one.shape))}" for one in inputs)
            raise BackendError(f"the engine takes {found}; allowed: one input, images of one size")
        self.input, self.outputs = inputs[0], tuple(outputs)
        self.dynamic = self.input.shape[0] < 0
        if self.dynamic:
            smallest, usual, largest = (int(one[0]) for one in self.engine.get_tensor_profile_shape(self.input.name, 0))
        else:
            smallest = usual = largest = self.input.shape[0]
        self.batches = smallest, usual, largest


class _EngineContext:
    """One execution context with a stream and memory of its own, for batches up to a size."""

    def __init__(self, loaded: _Loaded, largest: int, profiler: Any = None) -> None:
        self._loaded = loaded
        self._profiler = profiler
        self._captured: cuda.Graph | None = None
        gpu = loaded.gpu
        with ExitStack() as stack:
            self._stream = stack.enter_context(gpu.stream())
            self._start, self._end = stack.enter_context(gpu.event()), stack.enter_context(gpu.event())
            mark = loaded.logger.count
            with loaded.doing("making an execution context"):
                context = self._new_context()
                if context is None:
                    raise loaded.refused("making an execution context", mark)
            self._held = [context]
            del context
            stack.callback(_drop, gpu, self._held)
            if profiler is not None:
                self._context.profiler = profiler
            self._resize(largest)
            self._memory: dict[str, tuple[cuda.Buffer, cuda.Pinned]] = {}
            for name, shape in self._shapes.items():
                dtype, count = self._dtypes[name], math.prod(shape)
                memory = stack.enter_context(gpu.buffer(count * dtype.itemsize))
                self._memory[name] = memory, stack.enter_context(gpu.pinned((count,), dtype))
                if not self._context.set_tensor_address(name, memory.address):
                    raise loaded.refused(f"taking memory for '{name}'", mark)
            self._kept = stack.pop_all()
        self._finish = weakref.finalize(self, _end_context, self._stream, self._kept)

    @property
    def captured(self) -> bool:
        """Whether the work is launched as a CUDA graph."""
        return self._captured is not None

    def fill(self, images: NDArray[np.float32]) -> None:
        """Makes this batch the one that is run."""
        wanted = self._loaded.input.shape[1:]
        if images.shape[1:] != wanted:
            raise BackendError(
                f"the engine takes images of {'x'.join(map(str, wanted))}, not {'x'.join(map(str, images.shape[1:]))}"
            )
        if len(images) != self._shapes[self._loaded.input.name][0]:
            self._resize(len(images))
        np.copyto(self._array(self._loaded.input.name), images, casting="same_kind")
        self._copied = False

    def run(self, transfers: bool = True) -> float:
        if not self._finish.alive:
            raise BackendError("the engine was closed")
        loaded, stream = self._loaded, self._stream
        name = loaded.input.name
        with loaded.gpu.current():
            if not transfers and not self._copied:
                stream.copy_in(self._memory[name][0], self._array(name))
            stream.record(self._start)
            if transfers:
                stream.copy_in(self._memory[name][0], self._array(name))
            self._copied = True
            if self._captured is None:
                self._enqueue()
            else:
                stream.launch(self._captured)
            if transfers:
                for output in loaded.outputs:
                    stream.copy_out(self._array(output.name), self._memory[output.name][0])
            stream.record(self._end)
            stream.wait()
            return self._end.since(self._start)

    def results(self) -> dict[str, NDArray[Any]]:
        """The outputs of the last run with transfers; the next one writes over them."""
        return {output.name: self._array(output.name) for output in self._loaded.outputs}

    def capture(self) -> str:
        """Makes a CUDA graph of the work, which has run before at this shape; says why where that cannot be."""
        # TensorRT-RTX can say beforehand.
        if hasattr(self._context, "is_stream_capturable"):
            with self._loaded.gpu.current():
                if not self._context.is_stream_capturable(self._stream.handle):
                    return "TensorRT-RTX says that this engine cannot be captured"
        try:
            self._captured = self._kept.enter_context(self._stream.capture(self._enqueue))
        except BackendError as error:
            return f"capturing it failed ({one_line(error)})"
        return ""

    def close(self) -> None:
        """Gives everything back; a second time does nothing."""
        self._finish()

    @property
    def _context(self) -> Any:
        return self._held[0]

    @property
    def _dtypes(self) -> dict[str, np.dtype[Any]]:
        return {one.name: one.dtype for one in (self._loaded.input, *self._loaded.outputs)}

    def _array(self, name: str) -> NDArray[Any]:
        shape = self._shapes[name]
        flat: NDArray[Any] = self._memory[name][1].array
        return flat[: math.prod(shape)].reshape(shape)

    def _new_context(self) -> Any:
        trt, engine = self._loaded.trt, self._loaded.engine
        if not (self._loaded.dynamic and hasattr(trt, "DynamicShapesKernelSpecializationStrategy")):
            return engine.create_execution_context()
        # TensorRT-RTX compiles for a shape in the background, and until then runs what is slower; and that is what a
        # graph would keep.
        config = engine.create_runtime_config()
        config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        return engine.create_execution_context(config)

    def _resize(self, batch: int) -> None:
        """Sets the batch and reads what shapes the outputs have with it."""
        # No local name holds the context: one in the trace of an error would keep it alive beyond its device.
        loaded, stream = self._loaded, self._stream
        mark = loaded.logger.count
        with loaded.doing(f"setting a batch of {batch}"):
            if loaded.dynamic:
                # Of TensorRT 8.6, only the first context has a profile from the start.
                if self._context.active_optimization_profile != 0:
                    if not self._context.set_optimization_profile_async(0, stream.handle):
                        raise BackendError(
                            f"{loaded.title} {loaded.trt.__version__} lets only one context use this engine: it was "
                            "built for one (PreviewFeature.PROFILE_SHARING_0806 was off); build it again"
                        )
                    stream.wait()
                if not self._context.set_input_shape(loaded.input.name, (batch, *loaded.input.shape[1:])):
                    raise loaded.refused(f"setting a batch of {batch}", mark)
            self._shapes = {loaded.input.name: (batch, *loaded.input.shape[1:])}
            for output in loaded.outputs:
                shape = tuple(self._context.get_tensor_shape(output.name))
                if min(shape, default=0) < 0:
                    raise BackendError(
                        f"output '{output.name}' of the engine has a shape, {'x'.join(map(str, shape))}, that is known "
                        "only when it ran; build it with --nms native or --nms host"
                    )
                self._shapes[output.name] = shape
        self._copied = False

    def _enqueue(self) -> None:
        mark = self._loaded.logger.count
        with self._loaded.doing("running the engine"):
            if not self._context.execute_async_v3(self._stream.handle):
                raise self._loaded.refused("running the engine", mark)


def _drop(gpu: cuda.Gpu, held: list[Any]) -> None:
    """Ends what a library holds on the device, the youngest first."""
    with gpu.current():
        while held:
            held.pop()


def _end_context(stream: cuda.Stream, kept: ExitStack) -> None:
    # After Ctrl-C there may be work under way, on memory that is about to go.
    with suppress(BackendError):
        stream.wait()
    kept.close()


def _give_back(gpu: cuda.Gpu, held: list[Any]) -> None:
    _drop(gpu, held)
    gpu.close()


def _fitting(facts: EngineFacts) -> list[cuda.Device]:
    return [
        device
        for device in cuda.devices()
        if device.sm in facts.sms or (facts.hardware_compatible and device.sm >= _AMPERE)
    ]


def _check_format(engine: bytes, library: Library) -> None:
    """Refuses another library's engine and one that was cut short, as far as the formats are published; TensorRT itself
    refuses the rest when it loads the engine."""
    if not engine:
        raise BackendError("the engine is empty", "build it again")
    foreign = any(engine.startswith(row.engine.magic) for row in LIBRARIES if row.engine.magic and row != library)
    if foreign or not engine.startswith(library.engine.magic):
        raise BackendError(f"this is not an engine of {library.title}: it starts with {engine[:4]!r}", "build it again")
    missing = library.engine.missing_bytes(engine)
    if missing:
        raise BackendError(
            f"the engine was cut short: {len(engine)} of {len(engine) + missing} bytes", "build it again"
        )


_ADVICE = (
    (
        r"not compatible with this version|version tag|library version",
        "build it again with the TensorRT installed here",
    ),
    (r"plugin", "give the library that has the plugin with --plugin-library when building"),
    (r"out of memory|outofmemory|failed to allocate|memory allocation", "take a smaller batch, or end what else runs"),
    (r"incompatible device|expecting compute", "build it again on this machine"),
    (r"magic tag|serialization|deserializ|checksum|corrupt", "it was altered or cut short; build it again"),
    (r"initialization|driver", "update the driver to one for this TensorRT's CUDA"),
)
"""What to do about what TensorRT says, by patterns in its words, the more special first."""


class _Words:
    """What TensorRT reported as wrong. It keeps the first logger of a process for good, so there is one a library."""

    def __init__(self) -> None:
        self.count = 0
        self._kept: deque[str] = deque(maxlen=20)

    def note(self, message: str) -> None:
        self._kept.append(message)
        self.count += 1

    def since(self, mark: int) -> list[str]:
        """The messages after the first ``mark``, as many of them as are kept."""
        return list(self._kept)[-(self.count - mark) :] if self.count > mark else []


@cache
def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger, _Words):  # type: ignore[misc]  # the base is known only at run time
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            _Words.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.note(message)

    return Logger()


def _profiler(trt: Any) -> Any:
    class Profiler(trt.IProfiler):  # type: ignore[misc]  # the base is known only at run time
        times: list[tuple[str, float]]

        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.times = []

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.times.append((layer_name, ms))

    return Profiler()


def _layers(told: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Kind and ONNX nodes of each layer by its name, from the inspector's JSON; an engine that was built with names
    only has a list of those."""
    found = {}
    for layer in json.loads(told).get("Layers", []):
        one = {"Name": layer} if isinstance(layer, str) else layer
        name = one.get("Name", "")
        found[name] = one.get("LayerType", "unknown"), onnx_nodes(name, one.get("Metadata", ""))
    return found


def _by_layer(
    rows: list[list[tuple[str, float]]], known: dict[str, tuple[str, tuple[str, ...]]]
) -> tuple[LayerTime, ...]:
    """The times of each layer over all runs, in the order in which layers first ran."""
    names = dict.fromkeys(name for row in rows for name, _ in row)
    found = []
    for name in names:
        kind, nodes = known.get(name, ("unknown", onnx_nodes(name)))
        sums = tuple(math.fsum(ms for one, ms in row if one == name) for row in rows)
        count = max(sum(one == name for one, _ in row) for row in rows)
        found.append(LayerTime(name, kind, nodes, sums, count))
    return tuple(found)
