"""Asks the CUDA driver itself about this machine, without any Python package."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR in cuda.h
_NO_DEVICE = 100
TOO_OLD = {35, 36, 803, 804}
"""INSUFFICIENT_DRIVER (of the runtime), CALL_REQUIRES_NEWER_DRIVER, SYSTEM_DRIVER_MISMATCH, COMPAT_NOT_SUPPORTED."""


@dataclass(frozen=True)
class Device:
    """A CUDA device; ``sm`` is its compute capability, 86 for 8.6, and ``memory`` its total memory in bytes."""

    name: str
    sm: int
    memory: int = 0
    index: int = 0


def devices() -> tuple[Device, ...]:
    """The CUDA devices that the driver shows; empty without a driver or a device."""
    driver, count, _ = _start()
    visible = []
    for index in range(count):
        handle, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        major, minor, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        if driver.cuDeviceGet(ctypes.byref(handle), index) != 0:
            continue
        driver.cuDeviceGetName(name, len(name), handle)
        driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, handle)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, handle)
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
        sm = 10 * major.value + minor.value
        visible.append(Device(name.value.decode(errors="replace"), sm=sm, memory=memory.value, index=index))
    return tuple(visible)


def absence() -> str:
    """Why there is no CUDA device, as words that fit after "as"; empty if there is one."""
    return _start()[2]


def driver_version() -> str:
    """The newest CUDA version that the driver supports, such as ``13.0``; empty without a driver."""
    driver, version = _driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _start() -> tuple[Any, int, str]:
    """The initialised driver, its number of devices, and why it has none."""
    driver, count = _driver(), ctypes.c_int()
    if driver is None:
        return None, 0, "this machine has no CUDA driver"
    code = driver.cuInit(0)
    if code not in (0, _NO_DEVICE):
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        words = f"error {code}" + (f", {text.value.decode(errors='replace')}" if text.value else "")
        if code in TOO_OLD:
            return None, 0, f"this machine's CUDA driver does not fit: {words}; update the driver"
        return None, 0, f"this machine's CUDA driver does not start: {words}"
    if code == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value:
        return driver, count.value, ""
    selection = os.environ.get("CUDA_VISIBLE_DEVICES")
    setting = "" if selection is None else f" (CUDA_VISIBLE_DEVICES is '{selection}')"
    return None, 0, f"this machine's CUDA driver shows no device{setting}"
