"""The driver's functions through cuda-python and PyCUDA, and the errors they raise."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.backends.cuda.driver import TOO_OLD
from trtdet.errors import BackendError, one_line

PIP = "pip install 'trtdet[cuda]'"

_OUT_OF_MEMORY = 2
_STICKY = {
    214: "uncorrectable ECC error encountered",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
}
"""After these errors the process can no longer use the device; the texts are those of cuGetErrorString."""


class OutOfMemory(BackendError):
    """The driver refused an allocation."""


class DeviceFailed(BackendError):
    """This process can no longer use the device."""


def no_bindings() -> str:
    """Why Python cannot use a device, as words that fit after "as"; empty if it can."""
    if importlib.util.find_spec("pycuda") is not None:
        return ""
    if importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None:
        return ""
    return f"neither cuda-python (12.6 or later) nor pycuda is installed here ({PIP})"


def _failure(function: str, words: str, code: int = -1) -> BackendError:
    """The exception for an error code of the driver."""
    if code == _OUT_OF_MEMORY:
        return OutOfMemory(f"the GPU has no memory left ({function}: {words})", "end other programs that use it")
    if code in TOO_OLD:
        return BackendError(f"this machine's CUDA driver does not fit ({function}: {words})", "update the driver")
    if code in _STICKY:
        return DeviceFailed(
            f"the GPU failed at what it ran ({function}: {words}) and takes no more work from this process",
            "start the command again, and if it fails again, build the engine again or test the GPU",
        )
    return BackendError(f"the CUDA driver refused {function}: {words}")


def _version(*packages: str) -> str:
    """The version of the first installed package."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown version"


class CudaPython:
    """The driver through cuda-python for CUDA 12.6 and later; ``through`` names the package and its version.

    ``context`` is the primary context of the device. Every call needs it current, except push, pop and release, which
    takes ``retained``. ``device`` is the driver's handle.
    """

    graphs = True

    def __init__(self, driver: Any, index: int) -> None:
        self._cu = driver
        self.through = f"cuda-python {_version('cuda-bindings', 'cuda-python')}"
        self.device = self.retained = self.call("cuDeviceGet", index)
        self.context = self.call("cuDevicePrimaryCtxRetain", self.device)

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a driver function with its arguments in the driver's order, a NumPy array for its address.

        It gives no result, one or a tuple; raises BackendError if it is refused.
        """
        plain = [each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments]
        try:
            code, *results = getattr(self._cu, name)(*plain)
        except RuntimeError as error:
            raise BackendError(
                f"this machine's CUDA driver is older than {self.through} ({one_line(error)}); update the driver, or "
                "install the cuda-python of its CUDA version"
            ) from None
        if int(code) != 0:
            _, text = self._cu.cuGetErrorString(code)
            words = text.decode(errors="replace") if text else "an unknown error"
            raise _failure(name, f"error {int(code)}, {words}", int(code))
        return results[0] if len(results) == 1 else tuple(results)

    def allocate_pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, NDArray[Any]]:
        count = math.prod(shape)
        address = self.call("cuMemHostAlloc", max(1, count * dtype.itemsize), 0)
        memory: Any = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(int(address))
        return address, np.frombuffer(memory, dtype, count).reshape(shape)

    def capture(self, stream: Any, enqueue: Callable[[], None]) -> Any:
        # Other threads may allocate meanwhile, which would break the capture in global mode.
        self.call("cuStreamBeginCapture", stream, self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            enqueue()
        except BaseException:
            # After a failed capture, ending it fails with the same error.
            code, graph = self._cu.cuStreamEndCapture(stream)
            if int(code) == 0:
                self.call("cuGraphDestroy", graph)
            raise
        graph = self.call("cuStreamEndCapture", stream)
        try:
            return self.call("cuGraphInstantiate", graph, 0)
        finally:
            self.call("cuGraphDestroy", graph)


_METHODS = {
    "cuDevicePrimaryCtxRetain": "retain_primary_context",
    "cuDevicePrimaryCtxRelease": "detach",
    "cuCtxPushCurrent": "push",
    "cuMemFree": "free",
    "cuMemFreeHost": "free",
    "cuStreamSynchronize": "synchronize",
    "cuEventRecord": "record",
    "cuEventElapsedTime": "time_till",
}
"""Driver functions that are methods of their first argument in PyCUDA."""

_BY_DESTRUCTOR = ("cuStreamDestroy", "cuEventDestroy")
"""PyCUDA calls these when the last reference to the argument ends."""


class PyCuda:
    """The driver through PyCUDA, which has no graphs; same interface as :class:`CudaPython`."""

    graphs = False

    def __init__(self, driver: Any, index: int) -> None:
        self._cu = driver
        self.through = f"pycuda {_version('pycuda')}"
        self._functions: dict[str, Callable[..., Any]] = {
            "cuInit": driver.init,
            "cuDeviceGet": driver.Device,
            "cuDeviceGetPCIBusId": lambda _, device: device.pci_bus_id().encode(),
            # If a thread ends with a context on PyCUDA's own stack, the process ends too.
            "cuCtxPopCurrent": driver.Context.pop,
            "cuMemGetInfo": driver.mem_get_info,
            "cuMemAlloc": driver.mem_alloc,
            "cuMemHostAlloc": driver.pagelocked_empty,
            "cuMemcpyHtoDAsync": lambda to, array, _, stream: driver.memcpy_htod_async(to, array, stream),
            "cuMemcpyDtoHAsync": lambda array, start, _, stream: driver.memcpy_dtoh_async(array, start, stream),
            "cuStreamCreate": driver.Stream,
            "cuEventCreate": driver.Event,
        }
        self.call("cuInit")
        self.device = self.call("cuDeviceGet", index)
        self.context = self.retained = self.call("cuDevicePrimaryCtxRetain", self.device)

    def call(self, name: str, *arguments: Any) -> Any:
        if name in _BY_DESTRUCTOR:
            return None
        try:
            if name in _METHODS:
                return getattr(arguments[0], _METHODS[name])(*arguments[1:])
            return self._functions[name](*arguments)
        except self._cu.MemoryError as error:
            raise _failure(name, one_line(error), _OUT_OF_MEMORY) from None
        except self._cu.Error as error:
            # PyCUDA's errors have the driver's text but not its code.
            text = one_line(error)
            raise _failure(name, text, next((code for code, words in _STICKY.items() if words in text), -1)) from None

    def allocate_pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, NDArray[Any]]:
        array = self.call("cuMemHostAlloc", shape, dtype)
        return array.base, array

    def capture(self, stream: Any, enqueue: Callable[[], None]) -> Any:
        raise BackendError(f"{self.through} has no CUDA graphs; for them, {PIP}")
