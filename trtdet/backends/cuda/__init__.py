"""The one place that touches CUDA: which devices this machine has, and memory, streams and time on one of them.

``devices`` and ``absence`` ask the driver itself and need nothing installed. ``open_device`` gives a device to work on;
it goes through PyCUDA where that is installed, else through cuda-python.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from trtdet.errors import BackendError, one_line

PIP = "pip install 'trtdet[cuda]'"

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR in cuda.h

_OUT_OF_MEMORY, _NO_DEVICE = 2, 100
_TOO_OLD = {35, 36, 803, 804}
"""INSUFFICIENT_DRIVER (of the runtime), CALL_REQUIRES_NEWER_DRIVER, SYSTEM_DRIVER_MISMATCH, COMPAT_NOT_SUPPORTED."""
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
"""After these the device takes no more work from the process; the words are cuGetErrorString's."""


@dataclass(frozen=True)
class Device:
    """A CUDA device.

    Attributes:
        name: as the driver calls it.
        sm: compute capability, 86 for 8.6.
        memory: in all, in bytes.
        index: its number among the devices that the driver shows.
    """

    name: str
    sm: int
    memory: int = 0
    index: int = 0


@dataclass(frozen=True)
class Clocks:
    """What a device runs at; None for what it does not tell.

    Attributes:
        sm_mhz, memory_mhz: clocks now.
        sm_max_mhz, memory_max_mhz: the highest it has.
        temperature_c: in degrees Celsius.
        power_w: in watts.
        throttled: why the clocks are held back, in words; empty where they are not, or where it is only idle.
    """

    sm_mhz: int | None
    sm_max_mhz: int | None
    memory_mhz: int | None
    memory_max_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttled: tuple[str, ...]


def devices() -> tuple[Device, ...]:
    """The CUDA devices that the driver shows; empty where there is no driver or no device."""
    driver, _ = _started()
    found = []
    for index in range(_count(driver) if driver is not None else 0):
        handle, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        major, minor, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        if driver.cuDeviceGet(ctypes.byref(handle), index) != 0:
            continue
        driver.cuDeviceGetName(name, len(name), handle)
        driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, handle)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, handle)
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
        found.append(Device(name.value.decode(errors="replace"), 10 * major.value + minor.value, memory.value, index))
    return tuple(found)


def absence() -> str:
    """Why there is no CUDA device, as words that fit after "as"; empty where there is one."""
    driver, reason = _started()
    return reason or ("" if _count(driver) else _no_device())


def driver_version() -> str:
    """The newest CUDA that the driver runs, such as ``13.0``; empty where there is no driver."""
    driver, version = _driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def open_device(index: int = 0) -> Gpu:
    """A device to work on, by its primary context, which it shares with the libraries of this process.

    Args:
        index: its number among ``devices()``.

    Raises:
        BackendError: no driver, one that does not fit, no such device, or neither PyCUDA nor cuda-python is usable.
    """
    missing = absence()
    if missing:
        raise BackendError(f"{missing}; run this on a machine with a CUDA device")
    found = {device.index: device for device in devices()}
    if index not in found:
        raise BackendError(f"no CUDA device {index}; this machine has {', '.join(map(str, found))}")
    return Gpu(found[index], _bindings(index))


def no_bindings() -> str:
    """Why no device can be worked on from Python, as words that fit after "as"; empty where it can."""
    if importlib.util.find_spec("pycuda") is not None:
        return ""
    if importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None:
        return ""
    return f"neither cuda-python (12.6 or later) nor pycuda is installed here ({PIP})"


def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _started() -> tuple[Any, str]:
    """The driver, initialised, or None and what is in the way."""
    driver = _driver()
    if driver is None:
        return None, "this machine has no CUDA driver"
    code = driver.cuInit(0)
    if code == 0:
        return driver, ""
    if code == _NO_DEVICE:
        return None, _no_device()
    if code in _TOO_OLD:
        return None, f"this machine's CUDA driver does not fit: {_words(driver, code)}; update the driver"
    return None, f"this machine's CUDA driver does not start: {_words(driver, code)}"


def _no_device() -> str:
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "this machine's CUDA driver shows no device" + (
        f" (CUDA_VISIBLE_DEVICES is '{shown}')" if shown is not None else ""
    )


def _count(driver: Any) -> int:
    count = ctypes.c_int()
    return count.value if driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def _words(driver: Any, code: int) -> str:
    text = ctypes.c_char_p()
    known = driver.cuGetErrorString(code, ctypes.byref(text)) == 0 and text.value
    return f"error {code}" + (f", {text.value.decode(errors='replace')}" if known and text.value else "")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"


class _Owned:
    """Something of the device that is given back once, explicitly or at the end of a ``with`` block."""

    def __init__(self, gpu: Gpu, raw: Any, release: Callable[[Any], None]) -> None:
        self._gpu, self._raw, self._release = gpu, raw, release

    def free(self) -> None:
        """Gives it back; a second time does nothing."""
        raw, self._raw = self._raw, None
        if raw is None:
            return
        with self._gpu.current():
            # Whoever waited for the work has said that the device failed; there is nothing to give back then.
            with suppress(_DeviceFailed):
                self._release(raw)
            # What PyCUDA destroys with the last reference must go while the device is current.
            del raw

    def __enter__(self: _Thing) -> _Thing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()


_Thing = TypeVar("_Thing", bound=_Owned)


class Buffer(_Owned):
    """Memory of the device: ``nbytes`` of it from ``address`` on."""

    def __init__(self, gpu: Gpu, raw: Any, nbytes: int) -> None:
        super().__init__(gpu, raw, gpu.bindings.free)
        self.address, self.nbytes = int(raw), nbytes


class Pinned(_Owned):
    """Memory of the host that the device copies from and to by itself. ``array`` must not be used once it is freed."""

    def __init__(self, gpu: Gpu, raw: Any, array: NDArray[Any]) -> None:
        super().__init__(gpu, raw, gpu.bindings.free_pinned)
        self.array = array


class Graph(_Owned):
    """Work that was captured from a stream and is launched as one."""

    def __init__(self, gpu: Gpu, raw: Any) -> None:
        super().__init__(gpu, raw, gpu.bindings.free_graph)


class Event(_Owned):
    """A moment in a stream."""

    def __init__(self, gpu: Gpu, raw: Any) -> None:
        super().__init__(gpu, raw, gpu.bindings.free_event)

    def since(self, start: Event) -> float:
        """Milliseconds from ``start`` to here; both were recorded, and their streams waited for."""
        with self._gpu.current():
            return self._gpu.bindings.elapsed(start._raw, self._raw)


class Stream(_Owned):
    """Work that the device does in order. Nothing here waits but ``wait``.

    Attributes:
        handle: its address, for libraries that take one.
    """

    def __init__(self, gpu: Gpu, raw: Any) -> None:
        super().__init__(gpu, raw, gpu.bindings.free_stream)
        self.handle = gpu.bindings.stream_handle(raw)

    def copy_in(self, to: Buffer, array: NDArray[Any]) -> None:
        """Copies a contiguous array to the device; it must stay as it is until the stream was waited for."""
        with self._gpu.current():
            self._gpu.bindings.copy_in(to.address, array, self._raw)

    def copy_out(self, array: NDArray[Any], start: Buffer) -> None:
        """Copies as many bytes from the device as the contiguous array has; read it once the stream was waited for."""
        with self._gpu.current():
            self._gpu.bindings.copy_out(array, start.address, self._raw)

    def record(self, event: Event) -> None:
        """Marks the moment at which all work so far is done."""
        with self._gpu.current():
            self._gpu.bindings.record(event._raw, self._raw)

    def wait(self) -> None:
        """Blocks until all work is done.

        Raises:
            BackendError: the device failed at it.
        """
        with self._gpu.current():
            self._gpu.bindings.wait(self._raw)

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """What ``enqueue`` puts into this stream, not run but kept. Only this thread is held to what may be captured.

        Raises:
            BackendError: something in it cannot be captured, or PyCUDA is used; the stream is usable as before.
        """
        with self._gpu.current():
            return Graph(self._gpu, self._gpu.bindings.capture(self._raw, enqueue))

    def launch(self, graph: Graph) -> None:
        """Runs what was captured."""
        with self._gpu.current():
            self._gpu.bindings.launch(graph._raw, self._raw)


class Gpu:
    """A device that was opened. Every call may come from any thread.

    Attributes:
        device: which.
        graphs: whether work can be captured into graphs; PyCUDA has none.
        through: the package that it goes through, with its version.
    """

    def __init__(self, device: Device, bindings: _Bindings) -> None:
        self.device = device
        self.bindings = bindings
        self.graphs = bindings.graphs
        self.through = bindings.through
        self._nvml: Any = None
        self._open = True

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes the device this thread's own inside the block, for libraries that take the current one."""
        self.bindings.push()
        try:
            yield
        finally:
            self.bindings.pop()

    def memory(self) -> tuple[int, int]:
        """Free and total memory, in bytes."""
        with self.current():
            return self.bindings.memory()

    def buffer(self, nbytes: int) -> Buffer:
        """Memory on the device.

        Raises:
            BackendError: it has not so much left; the message says how much is.
        """
        # No allocation is empty; a tensor without elements has an address all the same.
        size = max(1, nbytes)
        with self.current():
            try:
                return Buffer(self, self.bindings.allocate(size), size)
            except _OutOfMemory:
                free, total = self.bindings.memory()
                raise BackendError(
                    f"{self.device.name} has no {_gib(size)} of memory left: {_gib(free)} of {_gib(total)} are free; "
                    "take a smaller batch, or end what else runs on it"
                ) from None

    def pinned(self, shape: Sequence[int], dtype: DTypeLike) -> Pinned:
        """An array of the host, uninitialised, that copies fast.

        Raises:
            BackendError: the host has not so much memory to lock.
        """
        with self.current():
            try:
                return Pinned(self, *self.bindings.allocate_pinned(tuple(shape), np.dtype(dtype)))
            except _OutOfMemory:
                size = math.prod(shape) * np.dtype(dtype).itemsize
                raise BackendError(
                    f"the host cannot lock {_gib(size)} of memory for copies to {self.device.name}; "
                    "take a smaller batch"
                ) from None

    def stream(self) -> Stream:
        """A stream of its own, which the default one does not wait for."""
        with self.current():
            return Stream(self, self.bindings.new_stream())

    def event(self) -> Event:
        """An event that keeps the time."""
        with self.current():
            return Event(self, self.bindings.new_event())

    def clocks(self) -> Clocks | None:
        """What it runs at, or None where NVML does not tell; :meth:`no_clocks` says why."""
        return None if self.no_clocks() else _read_clocks(*self._nvml)

    def no_clocks(self) -> str:
        """Why there are no clocks to read; empty where there are."""
        if self._nvml is None:
            try:
                nvml = importlib.import_module("pynvml")
            except ImportError:
                return f"nvidia-ml-py is not installed ({PIP})"
            try:
                nvml.nvmlInit()
                with self.current():
                    self._nvml = nvml, nvml.nvmlDeviceGetHandleByPciBusId(self.bindings.bus_id().encode())
            except nvml.NVMLError as error:
                return f"NVML does not answer: {one_line(error)}"
        return ""

    def close(self) -> None:
        """Gives the device back, after everything that was made on it. A second time does nothing."""
        if self._open:
            self._open = False
            if self._nvml is not None:
                self._nvml[0].nvmlShutdown()
                self._nvml = None
            self.bindings.close()


_REASONS = {
    0x2: "application clocks are set",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal limit of the software",
    0x40: "thermal limit of the hardware",
    0x80: "power brake",
    0x100: "display clocks are set",
}
"""nvmlClocksEventReason* in nvml.h; 0x1 is idleness, which is none."""


def _read_clocks(nvml: Any, handle: Any) -> Clocks:
    def told(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except nvml.NVMLError:
            return None

    # It was renamed in 2023; drivers before that know it only by its old name.
    reasons = told("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    power = told("nvmlDeviceGetPowerUsage")
    return Clocks(
        told("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        told("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        told("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        told("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
        told("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        None if power is None else power / 1000,
        tuple(words for bit, words in _REASONS.items() if reasons & bit),
    )


class _OutOfMemory(BackendError):
    """An allocation was refused."""


class _DeviceFailed(BackendError):
    """The device takes no more work from this process."""


class _Bindings(Protocol):
    """What is asked of a package that speaks to the driver, in its own handles. But for the first three, a context is
    current whenever one is called."""

    graphs: bool
    through: str

    def push(self) -> None: ...
    def pop(self) -> None: ...
    def close(self) -> None: ...
    def bus_id(self) -> str: ...
    def memory(self) -> tuple[int, int]: ...
    def allocate(self, nbytes: int) -> Any: ...
    def free(self, memory: Any) -> None: ...
    def allocate_pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, NDArray[Any]]: ...
    def free_pinned(self, memory: Any) -> None: ...
    def new_stream(self) -> Any: ...
    def stream_handle(self, stream: Any) -> int: ...
    def free_stream(self, stream: Any) -> None: ...
    def copy_in(self, to: int, array: NDArray[Any], stream: Any) -> None: ...
    def copy_out(self, array: NDArray[Any], start: int, stream: Any) -> None: ...
    def wait(self, stream: Any) -> None: ...
    def new_event(self) -> Any: ...
    def record(self, event: Any, stream: Any) -> None: ...
    def elapsed(self, start: Any, end: Any) -> float: ...
    def free_event(self, event: Any) -> None: ...
    def capture(self, stream: Any, enqueue: Callable[[], None]) -> Any: ...
    def launch(self, graph: Any, stream: Any) -> None: ...
    def free_graph(self, graph: Any) -> None: ...


def _bindings(index: int) -> _Bindings:
    refused = []
    for package, module, make in (
        ("pycuda", "pycuda.driver", _PyCuda),
        ("cuda-python", "cuda.bindings.driver", _CudaPython),
    ):
        try:
            return make(importlib.import_module(module), index)
        except ImportError as error:
            refused.append(f"{package}: {one_line(error)}")
    raise BackendError(
        f"no package to reach the GPU with ({'; '.join(refused)}); {PIP} or pip install 'trtdet[pycuda]'"
    )


def _failure(doing: str, words: str, code: int = -1) -> BackendError:
    """The error for what the driver answered."""
    if code == _OUT_OF_MEMORY:
        return _OutOfMemory(f"the GPU has no memory left ({doing}: {words}); end what else runs on it")
    if code in _TOO_OLD:
        return BackendError(f"this machine's CUDA driver does not fit ({doing}: {words}); update the driver")
    if code in _STICKY:
        return _DeviceFailed(
            f"the GPU failed at what it ran ({doing}: {words}) and takes no more work from this process; "
            "start the command again, and if it fails again, build the engine again or test the GPU"
        )
    return BackendError(f"the CUDA driver refused {doing}: {words}")


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown version"


class _CudaPython:
    """The driver through cuda-python, of CUDA 12.6 and later."""

    graphs = True

    def __init__(self, driver: Any, index: int) -> None:
        self._cu = driver
        self.through = f"cuda-python {_version('cuda-bindings', 'cuda-python')}"
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
            raise _failure(name, f"error {int(code)}, {words}", int(code))
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


class _PyCuda:
    """The driver through PyCUDA, which has no graphs."""

    graphs = False

    def __init__(self, driver: Any, index: int) -> None:
        self._cu = driver
        self.through = f"pycuda {_version('pycuda')}"
        self._call("cuInit", driver.init)
        self._device = self._call("cuDeviceGet", driver.Device, index)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device.retain_primary_context)

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._cu.MemoryError as error:
            raise _failure(name, one_line(error), _OUT_OF_MEMORY) from None
        except self._cu.Error as error:
            # Its errors carry the driver's words but not its code.
            said = one_line(error)
            raise _failure(name, said, next((code for code, words in _STICKY.items() if words in said), -1)) from None

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
