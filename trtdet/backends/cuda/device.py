"""An open CUDA device: memory, streams, events and graphs, each released once."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray
from typing_extensions import Self

from trtdet.backends.cuda.bindings import PIP, CudaPython, DeviceFailed, OutOfMemory, PyCuda
from trtdet.backends.cuda.driver import Device, absence, devices
from trtdet.errors import BackendError, one_line

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING in cuda.h

_THROTTLE_REASONS = {
    0x2: "application clocks are set",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal limit of the software",
    0x40: "thermal limit of the hardware",
    0x80: "power brake",
    0x100: "display clocks are set",
}
"""nvmlClocksEventReason* in nvml.h; 0x1 means idle and does not count."""


def open_device(index: int = 0) -> CudaDevice:
    """Opens a device by its number in ``devices()``, with the primary context that the process's libraries share.

    Raises BackendError if the driver is missing or unsuitable, there is no such device, or neither PyCUDA nor
    cuda-python is usable.
    """
    if reason := absence():
        raise BackendError(reason, "run this on a machine with a CUDA device")
    visible = {device.index: device for device in devices()}
    if index not in visible:
        raise BackendError(f"no CUDA device {index}; this machine has {', '.join(map(str, visible))}")
    import_errors = []
    for package, module, bindings in (
        ("pycuda", "pycuda.driver", PyCuda),
        ("cuda-python", "cuda.bindings.driver", CudaPython),
    ):
        try:
            return CudaDevice(visible[index], bindings(importlib.import_module(module), index))
        except ImportError as error:
            import_errors.append(f"{package}: {one_line(error)}")
    raise BackendError(
        f"no package to reach the GPU with ({'; '.join(import_errors)})", f"{PIP} or pip install 'trtdet[pycuda]'"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"


class _Owned:
    """A device resource, released once: by ``free`` or at the end of a ``with`` block."""

    release: ClassVar[str]
    """The driver function that releases the resource."""

    def __init__(self, gpu: CudaDevice, raw: Any) -> None:
        self._gpu, self._raw = gpu, raw

    def free(self) -> None:
        """Releases the resource; a second call does nothing."""
        raw, self._raw = self._raw, None
        if raw is None:
            return
        with self._gpu.current():
            # The failure was reported by the wait for the work; a failed device has nothing to release.
            with suppress(DeviceFailed):
                self._gpu.bindings.call(self.release, raw)
            # PyCUDA destroys an object with its last reference, while the device must be current.
            del raw

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()


class Buffer(_Owned):
    """``nbytes`` of device memory from ``address`` on."""

    release = "cuMemFree"

    def __init__(self, gpu: CudaDevice, raw: Any, nbytes: int) -> None:
        super().__init__(gpu, raw)
        self.address, self.nbytes = int(raw), nbytes


class Pinned(_Owned):
    """Page-locked host memory for copies to and from the device. ``array`` is invalid after ``free``."""

    release = "cuMemFreeHost"

    def __init__(self, gpu: CudaDevice, raw: Any, array: NDArray[Any]) -> None:
        super().__init__(gpu, raw)
        self.array = array


class Graph(_Owned):
    """Work captured from a stream and launched as a whole."""

    release = "cuGraphExecDestroy"


class Event(_Owned):
    """A point in time in a stream."""

    release = "cuEventDestroy"

    def since(self, start: Event) -> float:
        """Milliseconds since ``start``; both must be recorded, and their streams waited for."""
        return float(self._gpu.call("cuEventElapsedTime", start._raw, self._raw))


class Stream(_Owned):
    """Work that the device does in order; ``handle`` is its address. Only ``wait`` blocks."""

    release = "cuStreamDestroy"

    def __init__(self, gpu: CudaDevice, raw: Any) -> None:
        super().__init__(gpu, raw)
        self.handle = int(getattr(raw, "handle", raw))

    def copy_in(self, to: Buffer, array: NDArray[Any]) -> None:
        """Copies a contiguous array to the device; do not change it before ``wait`` returns."""
        self._gpu.call("cuMemcpyHtoDAsync", to.address, array, array.nbytes, self._raw)

    def copy_out(self, array: NDArray[Any], start: Buffer) -> None:
        """Fills the contiguous array from the device; read it after ``wait``."""
        self._gpu.call("cuMemcpyDtoHAsync", array, start.address, array.nbytes, self._raw)

    def record(self, event: Event) -> None:
        """Marks the time when all work queued so far is done."""
        self._gpu.call("cuEventRecord", event._raw, self._raw)

    def wait(self) -> None:
        """Blocks until all work is done; raises BackendError if it failed on the device."""
        self._gpu.call("cuStreamSynchronize", self._raw)

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """Records what ``enqueue`` puts into this stream, without running it. Other threads may call CUDA meanwhile.
        Raises BackendError if the work cannot be captured, or PyCUDA is used; the stream stays usable."""
        with self._gpu.current():
            return Graph(self._gpu, self._gpu.bindings.capture(self._raw, enqueue))

    def launch(self, graph: Graph) -> None:
        self._gpu.call("cuGraphLaunch", graph._raw, self._raw)


class CudaDevice:
    """An open device. Any thread may make any call.

    ``graphs`` is False with PyCUDA, which has none. ``through`` names the package for the driver and its version.
    """

    def __init__(self, device: Device, bindings: CudaPython | PyCuda) -> None:
        self.device = device
        self.bindings = bindings
        self.graphs: bool = bindings.graphs
        self.through = bindings.through
        self._nvml: Any = None
        self._open = True

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes the device current for this thread inside the block."""
        self.bindings.call("cuCtxPushCurrent", self.bindings.context)
        try:
            yield
        finally:
            self.bindings.call("cuCtxPopCurrent")

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a driver function with the device current."""
        with self.current():
            return self.bindings.call(name, *arguments)

    def memory(self) -> tuple[int, int]:
        """Free and total device memory, in bytes."""
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    def buffer(self, nbytes: int) -> Buffer:
        """Allocates device memory; raises BackendError, with the sizes, if too little is free."""
        # CUDA has no empty allocations, but a tensor without elements needs an address.
        size = max(1, nbytes)
        with self.current():
            try:
                return Buffer(self, self.bindings.call("cuMemAlloc", size), size)
            except OutOfMemory:
                free, total = self.memory()
                raise BackendError(
                    f"{self.device.name} has no {_gib(size)} of memory left: {_gib(free)} of {_gib(total)} are free",
                    "take a smaller batch, or end other programs that use it",
                ) from None

    def pinned(self, shape: Sequence[int], dtype: DTypeLike) -> Pinned:
        """An uninitialised array in page-locked host memory; raises BackendError if the host cannot lock enough."""
        with self.current():
            try:
                return Pinned(self, *self.bindings.allocate_pinned(tuple(shape), np.dtype(dtype)))
            except OutOfMemory:
                size = math.prod(shape) * np.dtype(dtype).itemsize
                raise BackendError(
                    f"the host cannot lock {_gib(size)} of memory for copies to {self.device.name}",
                    "take a smaller batch",
                ) from None

    def stream(self) -> Stream:
        """A new stream, which does not synchronise with the default stream."""
        return Stream(self, self.call("cuStreamCreate", _NON_BLOCKING))

    def event(self) -> Event:
        return Event(self, self.call("cuEventCreate", 0))

    def clocks(self) -> dict[str, Any] | None:
        """The clocks now; None if NVML cannot read them, for the reason in :meth:`no_clocks`.

        Keys: ``sm_mhz``, ``sm_max_mhz``, ``memory_mhz``, ``memory_max_mhz``, ``temperature_c`` (degrees Celsius) and
        ``power_w`` (watts), each None if the device does not report it; ``throttled``, the reasons in words why the
        clocks are reduced, empty if they are not or the device is only idle.
        """
        if self.no_clocks():
            return None
        nvml, handle = self._nvml

        def read(name: str, *arguments: Any) -> Any:
            try:
                return getattr(nvml, name)(handle, *arguments)
            except nvml.NVMLError:
                return None

        power = read("nvmlDeviceGetPowerUsage")
        # The function was renamed in 2023; older drivers have only this name.
        reasons = read("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        return {
            "sm_mhz": read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            "sm_max_mhz": read("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
            "memory_mhz": read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            "memory_max_mhz": read("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
            "temperature_c": read("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            "power_w": None if power is None else power / 1000,
            "throttled": tuple(words for bit, words in _THROTTLE_REASONS.items() if reasons & bit),
        }

    def no_clocks(self) -> str:
        """Why the clocks cannot be read; empty if they can."""
        if self._nvml is None:
            try:
                nvml = importlib.import_module("pynvml")
            except ImportError:
                return f"nvidia-ml-py is not installed ({PIP})"
            try:
                nvml.nvmlInit()
                with self.current():
                    bus = self.bindings.call("cuDeviceGetPCIBusId", 32, self.bindings.device).split(b"\0")[0]
                    self._nvml = nvml, nvml.nvmlDeviceGetHandleByPciBusId(bus)
            except nvml.NVMLError as error:
                return f"NVML does not answer: {one_line(error)}"
        return ""

    def close(self) -> None:
        """Releases the device, after everything allocated on it. A second call does nothing."""
        if self._open:
            self._open = False
            if self._nvml is not None:
                self._nvml[0].nvmlShutdown()
                self._nvml = None
            self.bindings.call("cuDevicePrimaryCtxRelease", self.bindings.retained)
