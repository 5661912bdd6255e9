"""The one place that touches CUDA: which devices this machine has."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR in cuda.h


@dataclass(frozen=True)
class Device:
    """A CUDA device: its name and compute capability, 86 for 8.6."""

    name: str
    sm: int


def devices() -> tuple[Device, ...]:
    """The CUDA devices that the driver shows; empty where there is no driver or no device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = []
    for index in range(count.value):
        handle, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        major, minor = ctypes.c_int(), ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(handle), index) != 0:
            continue
        driver.cuDeviceGetName(name, len(name), handle)
        driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, handle)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, handle)
        found.append(Device(name.value.decode(errors="replace"), 10 * major.value + minor.value))
    return tuple(found)
