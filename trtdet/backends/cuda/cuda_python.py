"""The CUDA driver through cuda-python, of CUDA 12.6 and later."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.backends.cuda.bindings import failure, version_of
from trtdet.errors import BackendError, one_line


class CudaPython:
    """The driver through cuda-python, of CUDA 12.6 and later."""

    graphs = True

    def __init__(self, driver: Any, index: int) -> None:
        self._cu = driver
        self.through = f"cuda-python {version_of('cuda-bindings', 'cuda-python')}"
        self._device = self._call("cuDeviceGet", index)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            code, *results = getattr(self._cu, name)(*arguments)
        except RuntimeError as error:
            raise BackendError(
                f"this machine's CUDA driver is older than {self.through} ({one_line(error)}); update the driver, or "
                "install the cuda-python of its CUDA version"
            ) from None
        if int(code) != 0:
            _, text = self._cu.cuGetErrorString(code)
            words = text.decode(errors="replace") if text else "an unknown error"
            raise failure(name, f"error {int(code)}, {words}", int(code))
        return results[0] if len(results) == 1 else tuple(results)

    def push(self) -> None:
        self._call("cuCtxPushCurrent", self._context)

    def pop(self) -> None:
        self._call("cuCtxPopCurrent")

    def close(self) -> None:
        self._call("cuDevicePrimaryCtxRelease", self._device)

    def bus_id(self) -> str:
        text: bytes = self._call("cuDeviceGetPCIBusId", 32, self._device)
        return text.split(b"\0")[0].decode()

    def memory(self) -> tuple[int, int]:
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def allocate(self, nbytes: int) -> Any:
        return self._call("cuMemAlloc", nbytes)

    def free(self, memory: Any) -> None:
        self._call("cuMemFree", memory)

    def allocate_pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, NDArray[Any]]:
        count = math.prod(shape)
        address = self._call("cuMemHostAlloc", max(1, count * dtype.itemsize), 0)
        memory: Any = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(int(address))
        return address, np.frombuffer(memory, dtype, count).reshape(shape)

    def free_pinned(self, memory: Any) -> None:
        self._call("cuMemFreeHost", memory)

    def new_stream(self) -> Any:
        return self._call("cuStreamCreate", int(self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def stream_handle(self, stream: Any) -> int:
        return int(stream)

    def free_stream(self, stream: Any) -> None:
        self._call("cuStreamDestroy", stream)

    def copy_in(self, to: int, array: NDArray[Any], stream: Any) -> None:
        self._call("cuMemcpyHtoDAsync", to, array.ctypes.data, array.nbytes, stream)

    def copy_out(self, array: NDArray[Any], start: int, stream: Any) -> None:
        self._call("cuMemcpyDtoHAsync", array.ctypes.data, start, array.nbytes, stream)

    def wait(self, stream: Any) -> None:
        self._call("cuStreamSynchronize", stream)

    def new_event(self) -> Any:
        return self._call("cuEventCreate", 0)

    def record(self, event: Any, stream: Any) -> None:
        self._call("cuEventRecord", event, stream)

    def elapsed(self, start: Any, end: Any) -> float:
        return float(self._call("cuEventElapsedTime", start, end))

    def free_event(self, event: Any) -> None:
        self._call("cuEventDestroy", event)

    def capture(self, stream: Any, enqueue: Callable[[], None]) -> Any:
        # Other threads may allocate meanwhile: in the global mode that would spoil the capture.
        self._call("cuStreamBeginCapture", stream, self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            enqueue()
        except BaseException:
            # What cannot be captured ends the capture with an error that is the same one.
            code, graph = self._cu.cuStreamEndCapture(stream)
            if int(code) == 0:
                self._call("cuGraphDestroy", graph)
            raise
        graph = self._call("cuStreamEndCapture", stream)
        try:
            return self._call("cuGraphInstantiate", graph, 0)
        finally:
            self._call("cuGraphDestroy", graph)

    def launch(self, graph: Any, stream: Any) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def free_graph(self, graph: Any) -> None:
        self._call("cuGraphExecDestroy", graph)
