"""The CUDA driver through PyCUDA, which has no graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.backends.cuda.bindings import OUT_OF_MEMORY, PIP, STICKY, failure, version_of
from trtdet.errors import BackendError, one_line


class PyCuda:
    """The driver through PyCUDA, which has no graphs."""

    graphs = False

    def __init__(self, driver: Any, index: int) -> None:
        self._cu = driver
        self.through = f"pycuda {version_of('pycuda')}"
        self._call("cuInit", driver.init)
        self._device = self._call("cuDeviceGet", driver.Device, index)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device.retain_primary_context)

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._cu.MemoryError as error:
            raise failure(name, one_line(error), OUT_OF_MEMORY) from None
        except self._cu.Error as error:
            # Its errors carry the driver's words but not its code.
            said = one_line(error)
            raise failure(name, said, next((code for code, words in STICKY.items() if words in said), -1)) from None

    def push(self) -> None:
        self._call("cuCtxPushCurrent", self._context.push)

    def pop(self) -> None:
        # A thread that ends with a context on PyCUDA's own stack takes the process with it.
        self._call("cuCtxPopCurrent", self._cu.Context.pop)

    def close(self) -> None:
        self._call("cuDevicePrimaryCtxRelease", self._context.detach)

    def bus_id(self) -> str:
        return str(self._call("cuDeviceGetPCIBusId", self._device.pci_bus_id))

    def memory(self) -> tuple[int, int]:
        free, total = self._call("cuMemGetInfo", self._cu.mem_get_info)
        return int(free), int(total)

    def allocate(self, nbytes: int) -> Any:
        return self._call("cuMemAlloc", self._cu.mem_alloc, nbytes)

    def free(self, memory: Any) -> None:
        self._call("cuMemFree", memory.free)

    def allocate_pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, NDArray[Any]]:
        array = self._call("cuMemHostAlloc", self._cu.pagelocked_empty, shape, dtype)
        return array.base, array

    def free_pinned(self, memory: Any) -> None:
        self._call("cuMemFreeHost", memory.free)

    def new_stream(self) -> Any:
        return self._call("cuStreamCreate", self._cu.Stream, 1)

    def stream_handle(self, stream: Any) -> int:
        return int(stream.handle)

    def free_stream(self, stream: Any) -> None:
        """Its destructor does it."""

    def copy_in(self, to: int, array: NDArray[Any], stream: Any) -> None:
        self._call("cuMemcpyHtoDAsync", self._cu.memcpy_htod_async, to, array, stream)

    def copy_out(self, array: NDArray[Any], start: int, stream: Any) -> None:
        self._call("cuMemcpyDtoHAsync", self._cu.memcpy_dtoh_async, array, start, stream)

    def wait(self, stream: Any) -> None:
        self._call("cuStreamSynchronize", stream.synchronize)

    def new_event(self) -> Any:
        return self._call("cuEventCreate", self._cu.Event)

    def record(self, event: Any, stream: Any) -> None:
        self._call("cuEventRecord", event.record, stream)

    def elapsed(self, start: Any, end: Any) -> float:
        return float(self._call("cuEventElapsedTime", start.time_till, end))

    def free_event(self, event: Any) -> None:
        """Its destructor does it."""

    def capture(self, stream: Any, enqueue: Callable[[], None]) -> Any:
        raise BackendError(f"{self.through} has no CUDA graphs; for them, {PIP}")

    def launch(self, graph: Any, stream: Any) -> None:
        raise BackendError(f"{self.through} has no CUDA graphs; for them, {PIP}")

    def free_graph(self, graph: Any) -> None:
        """There is none."""
