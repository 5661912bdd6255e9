"""Checks which backends, devices and extras work on this machine, and how to install the others."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from dataclasses import dataclass

from trtdet import __version__
from trtdet.backends import cuda
from trtdet.backends.libraries import LIBRARIES, Consumption, consumptions
from trtdet.errors import BackendError, one_line

_EXTRAS = (
    ("trt", "tensorrt", "engines on the GPU of this machine"),
    ("rtx", "tensorrt-rtx", "engines without a GPU"),
    ("export", "torch", "trtdet export: torch to ONNX"),
    ("pycuda", "pycuda", "device buffers through PyCUDA"),
    ("cuda", "cuda-python", "device buffers through NVIDIA's wheels"),
    ("cuda", "nvidia-ml-py", "clocks and temperature beside a measured time"),
    ("ray", "ray", "rankings and sweeps on a Ray cluster"),
)
"""Name of the extra, one of its packages, and its purpose."""

_START = """
import sys, {0} as trt
class Messages(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)
    def log(self, severity, message):
        if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
            print(message, file=sys.stderr)
messages = Messages()
sys.exit(0 if trt.Builder(messages) else "it gives no builder")
"""
_SECONDS = 60
_RESTART = "see that the CUDA driver is new enough for it and the GPU is free, or install another version"


@dataclass(frozen=True)
class Check:
    """The state of one backend or extra: whether it works, its version or what is missing, and the fix."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All checks, with a description of each CUDA device.

    ``driver`` is the CUDA driver, and whether clocks can be read; without a device, the reason. ``consumers`` says
    where the bundles of each backend run, independent of this machine.
    """

    python: str
    trtdet: str
    devices: tuple[str, ...]
    driver: str
    backends: tuple[Check, ...]
    extras: tuple[Check, ...]
    consumers: tuple[Consumption, ...]


def start_failure(module: str) -> str:
    """Why a library of engines does not start, in one line; empty if it does.

    A process of its own makes a builder, as that can end its process.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _START.format(module)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it takes over {_SECONDS} s"
    lines = (done.stderr or done.stdout).strip().splitlines()
    return one_line(lines[-1] if lines else f"exit code {done.returncode}") if done.returncode else ""


def diagnose() -> Diagnosis:
    """Checks the backends, the CUDA devices and the extras of this machine."""
    driver = cuda.absence()
    if not driver:
        driver = f"CUDA {cuda.driver_version()}"
        try:
            gpu = cuda.open_device()
        except BackendError as error:
            driver += f"; {error}"
        else:
            no_clocks = gpu.no_clocks()
            gpu.close()
            clocks = f"no clocks: {no_clocks}" if no_clocks else "clocks by NVML"
            driver += f", through {gpu.through}, {clocks}"
    backends = []
    for library in LIBRARIES:
        try:
            caps = library.new_backend().capabilities
        except BackendError as error:
            backends.append(Check(library.name, ok=False, detail=error.problem, fix=error.hint))
            continue
        makes = "runs the model itself, no engine"
        if library.makes_engine:
            problem = start_failure(library.module)
            if problem:
                detail = f"{caps.version} is installed and does not start: {problem}"
                backends.append(Check(library.name, ok=False, detail=detail, fix=_RESTART))
                continue
            where = "for the GPU of this machine" if library.times_kernels else "on any machine, no GPU needed"
            targets = f", compute capabilities {', '.join(str(sm / 10) for sm in caps.sms)}" if caps.sms else ""
            makes = f"builds engines {where}{targets}"
        backends.append(Check(library.name, ok=True, detail=f"{caps.version}, {makes}"))
    extras = []
    for extra, package, purpose in _EXTRAS:
        try:
            version = importlib.metadata.version(package)
            extras.append(Check(extra, ok=True, detail=f"{package} {version}: {purpose}"))
        except importlib.metadata.PackageNotFoundError:
            detail = f"{package} is not installed: {purpose}"
            extras.append(Check(extra, ok=False, detail=detail, fix=f"pip install 'trtdet[{extra}]'"))
    return Diagnosis(
        python=platform.python_version(),
        trtdet=__version__,
        devices=tuple(
            f"{device.name}, compute capability {device.sm / 10}, {device.memory / 2**30:.1f} GiB"
            for device in cuda.devices()
        ),
        driver=driver,
        backends=tuple(backends),
        extras=tuple(extras),
        consumers=consumptions(),
    )
