"""What trtdet calls of ``pycuda.driver``. As there, a context is a thread's only between push and pop, a thread that
ends with one still pushed takes the process along, and streams and events end with their last reference."""

import ctypes
import os
import threading

import numpy as np

_cuda = ctypes.CDLL("libcuda.so.1")
_size = ctypes.c_size_t
_cuda.cuMemAlloc_v2.argtypes = [ctypes.POINTER(_size), _size]
_cuda.cuMemHostAlloc.argtypes = [ctypes.POINTER(_size), _size, ctypes.c_uint]
_cuda.cuMemcpyHtoDAsync_v2.argtypes = [_size, ctypes.c_void_p, _size, ctypes.c_void_p]
_cuda.cuMemcpyDtoHAsync_v2.argtypes = [ctypes.c_void_p, _size, _size, ctypes.c_void_p]
for _name in ("cuMemFree_v2", "cuMemFreeHost", "cuStreamDestroy_v2", "cuStreamSynchronize", "cuEventDestroy_v2"):
    getattr(_cuda, _name).argtypes = [_size]
_cuda.cuEventRecord.argtypes = [_size, _size]
_cuda.cuEventElapsedTime_v2.argtypes = [ctypes.POINTER(ctypes.c_float), _size, _size]
_cuda.cuCtxPushCurrent_v2.argtypes = [_size]


class Error(Exception):
    pass


MemoryError, LogicError, LaunchError, RuntimeError = (
    type(f"{kind}Error", (Error,), {}) for kind in ("Memory", "Logic", "Launch", "Runtime")
)


def _call(name, *arguments):
    code = getattr(_cuda, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _cuda.cuGetErrorString(code, ctypes.byref(text))
        kind = {2: MemoryError, 100: RuntimeError, 719: LaunchError}.get(code, LogicError)
        raise kind(f"{name.removesuffix('_v2')} failed: {text.value.decode()}")


class _Stack(threading.local):
    def __init__(self):
        self.guard = _Guard()


class _Guard:
    def __init__(self):
        self.contexts = []

    def __del__(self):
        if self.contexts:
            os.write(2, b"PyCUDA ERROR: The context stack was not empty upon module cleanup.\n")
            os.abort()


_stack = _Stack()


def init(flags=0):
    _call("cuInit", flags)


def mem_get_info():
    free, total = _size(), _size()
    _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


class Device:
    def __init__(self, number):
        handle = ctypes.c_int()
        _call("cuDeviceGet", ctypes.byref(handle), number)
        self._handle = handle.value

    def retain_primary_context(self):
        handle = _size()
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), self._handle)
        return Context(handle.value, self._handle)

    def pci_bus_id(self):
        text = ctypes.create_string_buffer(32)
        _call("cuDeviceGetPCIBusId", text, len(text), self._handle)
        return text.value.decode()


class Context:
    def __init__(self, handle, device):
        self._handle, self._device = handle, device

    def push(self):
        _call("cuCtxPushCurrent_v2", self._handle)
        _stack.guard.contexts.append(self)

    @staticmethod
    def pop():
        if not _stack.guard.contexts:
            raise LogicError("context::pop failed: invalid device context - cannot pop non-current context")
        _stack.guard.contexts.pop()
        _call("cuCtxPopCurrent_v2", None)

    def detach(self):
        _call("cuDevicePrimaryCtxRelease_v2", self._device)


class DeviceAllocation:
    def __init__(self, address):
        self._address = address

    def __int__(self):
        return self._address

    def free(self):
        _call("cuMemFree_v2", self._address)


def mem_alloc(bytes):
    address = _size()
    _call("cuMemAlloc_v2", ctypes.byref(address), bytes)
    return DeviceAllocation(address.value)


class PagelockedHostAllocation:
    def __init__(self, address, size):
        self._address = address
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}

    def free(self):
        _call("cuMemFreeHost", self._address)


class _Pagelocked(np.ndarray):
    """An array whose base is the allocation, as PyCUDA makes them; views of NumPy's own point at an array."""

    @property
    def base(self):
        return self._allocation


def pagelocked_empty(shape, dtype, order="C", mem_flags=0):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    address = _size()
    _call("cuMemHostAlloc", ctypes.byref(address), max(1, size), mem_flags)
    allocation = PagelockedHostAllocation(address.value, size)
    memory = (ctypes.c_ubyte * size).from_address(address.value)
    array = np.frombuffer(memory, dtype).reshape(shape).view(_Pagelocked)
    array._allocation = allocation
    return array


class Stream:
    def __init__(self, flags=0):
        handle = _size()
        _call("cuStreamCreate", ctypes.byref(handle), flags)
        self.handle = handle.value

    def synchronize(self):
        _call("cuStreamSynchronize", self.handle)

    def __del__(self):
        if hasattr(self, "handle"):
            _call("cuStreamDestroy_v2", self.handle)


class Event:
    def __init__(self, flags=0):
        handle = _size()
        _call("cuEventCreate", ctypes.byref(handle), flags)
        self._handle = handle.value

    def record(self, stream=None):
        _call("cuEventRecord", self._handle, stream.handle if stream is not None else 0)
        return self

    def time_till(self, event):
        ms = ctypes.c_float()
        _call("cuEventElapsedTime_v2", ctypes.byref(ms), self._handle, event._handle)
        return ms.value

    def __del__(self):
        if hasattr(self, "_handle"):
            _call("cuEventDestroy_v2", self._handle)


def _contiguous(array):
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise ValueError("ndarray is not contiguous")
    return array.ctypes.data, array.nbytes


def memcpy_htod_async(dest, src, stream=None):
    address, size = _contiguous(src)
    _call("cuMemcpyHtoDAsync_v2", int(dest), address, size, stream.handle)


def memcpy_dtoh_async(dest, src, stream=None):
    address, size = _contiguous(dest)
    _call("cuMemcpyDtoHAsync_v2", address, int(src), size, stream.handle)
