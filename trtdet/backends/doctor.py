"""Which backends, devices and extras work on this machine, and how to install the rest."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict, dataclass
from typing import Any

from trtdet import __version__
from trtdet.backends import cuda
from trtdet.backends.choice import new_backend
from trtdet.backends.libraries import LIBRARIES, Consumption, Library, consumptions
from trtdet.errors import BackendError

_EXTRAS = (
    *(
        (
            row.extra,
            row.distribution,
            "engines on the GPU of this machine" if row.times_kernels else "engines without a GPU",
        )
        for row in LIBRARIES
        if row.extra
    ),
    ("export", "torch", "trtdet export: torch to ONNX"),
    ("pycuda", "pycuda", "device buffers through PyCUDA"),
    ("cuda", "cuda-python", "device buffers through NVIDIA's wheels"),
    ("cuda", "nvidia-ml-py", "clocks and temperature beside a measured time"),
    ("ray", "ray", "rankings and sweeps on a Ray cluster"),
)
"""Name of the extra, a package of it, and its purpose."""


@dataclass(frozen=True)
class Check:
    """The state of one backend or extra: whether it works, its version or what is missing, and what to do."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All checks.

    Attributes:
        python, trtdet: versions.
        devices: the CUDA devices, in words.
        driver: the CUDA driver, and whether clocks can be read; the reason where there is no device.
        backends, extras: a check of each.
        consumers: where the bundles of each backend run, whatever this machine has.
    """

    python: str
    trtdet: str
    devices: tuple[str, ...]
    driver: str
    backends: tuple[Check, ...]
    extras: tuple[Check, ...]
    consumers: tuple[Consumption, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def diagnose() -> Diagnosis:
    """Looks at the backends, the CUDA devices and the extras of this machine."""
    found = cuda.devices()
    return Diagnosis(
        platform.python_version(),
        __version__,
        tuple(
            f"{device.name}, compute capability {device.sm / 10}, {device.memory / 2**30:.1f} GiB" for device in found
        ),
        _driver(),
        tuple(_backend(library) for library in LIBRARIES),
        tuple(_extra(*row) for row in _EXTRAS),
        consumptions(),
    )


def _driver() -> str:
    missing = cuda.absence()
    if missing:
        return missing
    version = f"CUDA {cuda.driver_version()}"
    try:
        gpu = cuda.open_device()
    except BackendError as error:
        return f"{version}; {error}"
    clocks = gpu.no_clocks()
    gpu.close()
    return f"{version}, through {gpu.through}, " + (f"no clocks: {clocks}" if clocks else "clocks by NVML")


def _backend(library: Library) -> Check:
    try:
        caps = new_backend(library).capabilities
    except BackendError as error:
        return Check(library.name, False, error.problem, error.hint)
    if not library.makes_engine:
        return Check(library.name, True, f"{caps.version}, runs the model itself, no engine")
    where = "for the GPU of this machine" if library.times_kernels else "on any machine, no GPU needed"
    targets = f", compute capabilities {', '.join(str(sm / 10) for sm in caps.sms)}" if caps.sms else ""
    return Check(library.name, True, f"{caps.version}, builds engines {where}{targets}")


def _extra(extra: str, package: str, purpose: str) -> Check:
    try:
        return Check(extra, True, f"{package} {importlib.metadata.version(package)}: {purpose}")
    except importlib.metadata.PackageNotFoundError:
        return Check(extra, False, f"{package} is not installed: {purpose}", f"pip install 'trtdet[{extra}]'")
