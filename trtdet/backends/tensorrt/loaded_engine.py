"""Facts about an engine before it is loaded, and an engine in device memory with its inputs and outputs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtdet.backends import cuda
from trtdet.backends.base import Capabilities
from trtdet.backends.libraries import Library, library_named
from trtdet.backends.tensorrt.messages import advised, logger_of
from trtdet.bundle import Bundle
from trtdet.errors import BackendError, one_line

_AMPERE = 80


@dataclass(frozen=True)
class EngineFacts:
    """Facts about an engine before it is loaded.

    Attributes:
        library: the library that built it, in ``version``.
        sms: compute capabilities it was built for.
        version_compatible: later versions of the library can run it.
        hardware_compatible: every device of compute capability 8.0 or later can run it.
        plugins: plugin libraries it needs.
        embedded: it carries its plugins, which are host code.
        dla: core of the DLA that runs a part of it.
    """

    library: Library
    version: str
    sms: tuple[int, ...]
    version_compatible: bool = False
    hardware_compatible: bool = False
    plugins: tuple[Path, ...] = ()
    embedded: bool = False
    dla: int | None = None

    @staticmethod
    def of(bundle: Bundle) -> EngineFacts:
        """The facts in a bundle's manifest."""
        backend = bundle.manifest.backend
        return EngineFacts(
            library_named(backend.name),
            backend.version,
            backend.sms,
            version_compatible=backend.version_compatible,
            hardware_compatible=backend.hardware_compatible,
            plugins=tuple(bundle.file(file) for file in backend.loose_plugins),
            embedded=backend.carries_plugins,
            dla=backend.dla,
        )

    @staticmethod
    def built(caps: Capabilities, sms: tuple[int, ...], plugins: tuple[Path, ...]) -> EngineFacts:
        """The facts of an engine that this process builds."""
        return EngineFacts(library_named(caps.name), caps.version, sms, plugins=plugins)


def obstacle(facts: EngineFacts) -> str:
    """Why an engine cannot run on this machine, as words that fit after "as"; empty if it can.

    This creates no TensorRT object: its Runtime ends the process on a machine without a device.
    """
    if absence := cuda.absence():
        return absence
    if not fitting_devices(facts):
        here = ", ".join(f"{device.name} with {device.sm / 10}" for device in cuda.devices())
        targets = " or ".join(str(sm / 10) for sm in facts.sms) + (" and later" if facts.hardware_compatible else "")
        return (
            f"the engine was built for compute capability {targets}, and this machine has {here}; build it again here"
        )
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


def fitting_devices(facts: EngineFacts) -> list[cuda.Device]:
    """The devices of this machine that can run the engine."""
    return [
        device
        for device in cuda.devices()
        if device.sm in facts.sms or (facts.hardware_compatible and device.sm >= _AMPERE)
    ]


_DTYPES = {"FLOAT": "f4", "HALF": "f2", "INT8": "i1", "UINT8": "u1", "INT32": "i4", "INT64": "i8", "BOOL": "?"}
"""NumPy types by name of trt.DataType."""

_ADVICE = (
    (
        r"not compatible with this version|version tag|library version",
        "build it again with the TensorRT installed here",
    ),
    (r"plugin", "give the library that has the plugin with --set engine.plugins=LIBRARY when building"),
    (r"out of memory|outofmemory|failed to allocate|memory allocation", "take a smaller batch, or end what else runs"),
    (r"incompatible device|expecting compute", "build it again on this machine"),
    (r"magic tag|serialization|deserializ|checksum|corrupt", "it was altered or cut short; build it again"),
    (r"initialization|driver", "update the driver to one for this TensorRT's CUDA"),
)
"""Patterns of TensorRT's messages, each with its fix, the more specific first."""


@dataclass(frozen=True)
class EngineTensor:
    """An input or output; the shape of a dynamic batch starts with -1."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class LoadedEngine:
    """A deserialised engine and its device, released together in order.

    ``batches`` are the smallest, the optimal and the largest batch size; ``dynamic`` tells whether the batch is.
    """

    def __init__(self, engine: bytes, facts: EngineFacts, gpu: cuda.CudaDevice) -> None:
        self.title = facts.library.title
        self.trt: Any = facts.library.load()
        self.gpu = gpu
        self.captures_graphs = hasattr(self.trt, "CudaGraphStrategy")
        """Whether the library captures and replays CUDA graphs itself, as TensorRT-RTX does for any shape (its
        documentation, "Working with RTX CUDA Graphs")."""
        self.logger = logger_of(self.trt)
        self._objects: list[Any] = []
        try:
            with self.doing("loading the engine"):
                self._objects.append(self._runtime(facts))
                mark = self.logger.count
                self._objects.append(self._objects[0].deserialize_cuda_engine(engine))
                if self._objects[1] is None:
                    raise self.refused("loading the engine", mark)
            self._read_tensors()
        except BaseException:
            release(gpu, self._objects)
            raise
        self.close = weakref.finalize(self, _give_back, gpu, self._objects)
        """Releases the engine, then the device; a second call does nothing."""

    @property
    def engine(self) -> Any:
        if len(self._objects) < 2:
            raise BackendError("the engine was closed")
        return self._objects[1]

    @contextmanager
    def doing(self, action: str) -> Iterator[None]:
        """Makes the device current; turns an exception of TensorRT into a BackendError with its log messages."""
        mark = self.logger.count
        with self.gpu.current():
            try:
                yield
            except (TypeError, RuntimeError, MemoryError) as error:
                # The bindings raise TypeError for a null pointer from a factory.
                raise self.refused(action, mark, one_line(error)) from None

    def refused(self, action: str, mark: int, otherwise: str = "it gave no reason") -> BackendError:
        """The error for a failed call, with TensorRT's messages since ``mark`` and the fix."""
        words = one_line("; ".join(self.logger.since(mark)) or otherwise)
        return BackendError(f"{self.title} {self.trt.__version__} failed at {action}: {advised(words, _ADVICE)}")

    def _runtime(self, facts: EngineFacts) -> Any:
        if facts.plugins and not facts.library.loads_plugins:
            raise BackendError(
                f"{self.title} {self.trt.__version__} takes no plugin libraries", "build the engine again"
            )
        missing = [path for path in facts.plugins if not path.is_file()]
        if missing:
            raise BackendError(
                f"the engine needs the plugin library '{missing[0]}', which does not exist", "put it there"
            )
        if facts.library.loads_plugins:
            # This registers TensorRT's own plugins, such as EfficientNMS. TensorRT-RTX must have no creators at all.
            self.trt.init_libnvinfer_plugins(self.logger, "")
        mark = self.logger.count
        runtime = self.trt.Runtime(self.logger)
        if facts.embedded or facts.version_compatible:
            # Host code, of plugins or of the version's runtime, needs this permission.
            runtime.engine_host_code_allowed = True
        if facts.dla is not None:
            runtime.DLA_core = facts.dla
        for path in facts.plugins:
            if runtime.get_plugin_registry().load_library(str(path.resolve())) is None:
                raise self.refused(f"loading the plugin library '{path}'", mark)
        return runtime

    def _read_tensors(self) -> None:
        # No local variable holds the engine: in an error's traceback it would outlive its device.
        trt = self.trt
        inputs: list[EngineTensor] = []
        outputs: list[EngineTensor] = []
        for index in range(self.engine.num_io_tensors):
            name = self.engine.get_tensor_name(index)
            kind = self.engine.get_tensor_dtype(name).name
            if kind not in _DTYPES:
                raise BackendError(f"tensor '{name}' of the engine is {kind}; allowed: {', '.join(_DTYPES)}")
            if self.engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
                raise BackendError(f"tensor '{name}' of the engine is a shape on the host; build it from another model")
            tensor = EngineTensor(name, np.dtype(_DTYPES[kind]), tuple(self.engine.get_tensor_shape(name)))
            (inputs if self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else outputs).append(tensor)
        if len(inputs) != 1 or len(inputs[0].shape) != 4 or min(inputs[0].shape[1:]) < 1:
            listed = ", ".join(f"{tensor.name} {'x'.join(map(str, tensor.shape))}" for tensor in inputs)
            raise BackendError(f"the engine takes {listed}; allowed: one input, images of one size")
        self.input, self.outputs = inputs[0], tuple(outputs)
        self.dynamic = self.input.shape[0] < 0
        shapes = (self.input.shape,) * 3
        if self.dynamic:
            shapes = self.engine.get_tensor_profile_shape(self.input.name, 0)
        smallest, usual, largest = (int(shape[0]) for shape in shapes)
        self.batches = smallest, usual, largest


def release(gpu: cuda.CudaDevice, objects: list[Any]) -> None:
    """Deletes a library's objects on the device, last created first."""
    with gpu.current():
        while objects:
            objects.pop()


def _give_back(gpu: cuda.CudaDevice, objects: list[Any]) -> None:
    release(gpu, objects)
    gpu.close()
