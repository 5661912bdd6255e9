"""An engine in device memory, with its inputs and outputs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtdet.backends import cuda
from trtdet.backends.tensorrt.engine_facts import EngineFacts
from trtdet.backends.tensorrt.messages import advised, logger_of
from trtdet.errors import BackendError, one_line

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
        self._finish = weakref.finalize(self, _give_back, gpu, self._objects)

    @property
    def engine(self) -> Any:
        if len(self._objects) < 2:
            raise BackendError("the engine was closed")
        return self._objects[1]

    @property
    def captures_graphs(self) -> bool:
        """Whether the library can capture and replay CUDA graphs itself, as TensorRT-RTX does for any shape ("Working
        with RTX CUDA Graphs" in its documentation)."""
        return hasattr(self.trt, "CudaGraphStrategy")

    def close(self) -> None:
        self._finish()

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
            raise BackendError(f"the engine needs the plugin library '{missing[0]}', which does not exist")
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
