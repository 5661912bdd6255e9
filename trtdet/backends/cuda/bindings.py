"""The driver's functions that a Python package for CUDA has to provide, and the errors they end in."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trtdet.backends.cuda.driver import TOO_OLD
from trtdet.errors import BackendError

PIP = "pip install 'trtdet[cuda]'"

OUT_OF_MEMORY = 2
STICKY = {
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
"""After these errors the device takes no more work from the process; the words are cuGetErrorString's."""


class OutOfMemory(BackendError):
    """An allocation was refused."""


class DeviceFailed(BackendError):
    """The device takes no more work from this process."""


class Bindings(Protocol):
    """The driver's functions as a package has them, on its own handles. A context is current at every call but those of
    ``push``, ``pop`` and ``close``."""

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


def no_bindings() -> str:
    """Why no device can be used from Python, as words that fit after "as"; empty where it can."""
    if importlib.util.find_spec("pycuda") is not None:
        return ""
    if importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None:
        return ""
    return f"neither cuda-python (12.6 or later) nor pycuda is installed here ({PIP})"


def failure(doing: str, words: str, code: int = -1) -> BackendError:
    """The error for an error code of the driver."""
    if code == OUT_OF_MEMORY:
        return OutOfMemory(f"the GPU has no memory left ({doing}: {words})", "end other programs that use it")
    if code in TOO_OLD:
        return BackendError(f"this machine's CUDA driver does not fit ({doing}: {words})", "update the driver")
    if code in STICKY:
        return DeviceFailed(
            f"the GPU failed at what it ran ({doing}: {words}) and takes no more work from this process",
            "start the command again, and if it fails again, build the engine again or test the GPU",
        )
    return BackendError(f"the CUDA driver refused {doing}: {words}")


def version_of(*packages: str) -> str:
    """The version of the first of these packages that is installed."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown version"
