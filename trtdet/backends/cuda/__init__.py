"""CUDA: the devices of this machine, and memory, streams and events on one of them.

``devices`` and ``absence`` ask the driver directly. ``open_device`` uses PyCUDA if installed, else cuda-python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtdet import importer

if TYPE_CHECKING:
    from trtdet.backends.cuda.bindings import no_bindings
    from trtdet.backends.cuda.device import Buffer, CudaDevice, Graph, Pinned, Stream, open_device
    from trtdet.backends.cuda.driver import Device, absence, devices, driver_version

__all__ = [
    "Buffer",
    "CudaDevice",
    "Device",
    "Graph",
    "Pinned",
    "Stream",
    "absence",
    "devices",
    "driver_version",
    "no_bindings",
    "open_device",
]

# The driver alone loads no NumPy.
__getattr__ = importer(
    __name__,
    {
        "bindings": "no_bindings",
        "device": "Buffer CudaDevice Graph Pinned Stream open_device",
        "driver": "Device absence devices driver_version",
    },
)
