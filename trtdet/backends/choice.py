"""Chooses a backend by name, here or for another machine, and reuses kernel times between builds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from trtdet.backends import cuda
from trtdet.backends.base import Backend, BuildRequest, Built, Capabilities
from trtdet.backends.libraries import LIBRARIES, library_named
from trtdet.backends.tensorrt import builder, rtx
from trtdet.errors import BackendError
from trtdet.files import write_atomically
from trtdet.progress import Progress, silent


def build_remembering(backend: Backend, request: BuildRequest, timings: Path, progress: Progress = silent) -> Built:
    """Builds with the kernel times in the file ``timings``, which may be missing, and adds the newly measured ones."""
    measured = timings.read_bytes() if backend.capabilities.keeps_timing_cache and timings.is_file() else b""
    built = backend.build(replace(request, timing_cache=measured), progress)
    if built.timing_cache:
        write_atomically(timings, built.timing_cache)
    return built


def choose(name: str) -> Backend:
    """The backend of that name; ``auto`` takes the first installed library that can build an engine here.

    ``auto`` never takes onnxruntime, which makes no engine. Raises BackendError if there is no such backend, or it is
    not usable here; for ``auto``, if none is.
    """
    if name != "auto":
        return library_named(name).new_backend()
    builders = [library for library in LIBRARIES if library.makes_engine]
    has_device = bool(cuda.devices())
    for library in builders:
        if library.installed and (has_device or not library.times_kernels):
            return library.new_backend()
    problem = "no TensorRT here to build an engine with"
    if has_device:
        raise BackendError(problem, " or ".join(library.pip for library in builders))
    without_gpu = " or ".join(library.pip for library in builders if not library.times_kernels)
    model_alone = " or ".join(f"--backend {library.name}" for library in LIBRARIES if not library.makes_engine)
    raise BackendError(problem, f"{without_gpu} builds without a GPU; for the Q/DQ model alone, {model_alone}")


_OLDEST, _NEWEST = (8, 6), 11
"""The first version of TensorRT, as (major, minor), and the last major version whose networks are known."""


class PlannedBackend:
    """A library's version by its name, such as ``tensorrt-10.3`` or ``tensorrt-rtx-1.7``. It need not be installed, and
    has capabilities but no builder.

    Raises BackendError if there is no such library, or its version is not supported.
    """

    def __init__(self, target: str) -> None:
        libraries = {library.name: library for library in LIBRARIES if library.makes_engine}
        name, _, version = target.rpartition("-")
        examples = "tensorrt-8.6, tensorrt-10.3, tensorrt-11.0 or tensorrt-rtx-1.7"
        if name not in libraries or not re.fullmatch(r"[0-9]+\.[0-9]+(\.[0-9]+){0,2}", version):
            raise BackendError(f"'{target}' is no library with a version", f"give one such as {examples}")
        major, minor = (int(part) for part in version.split(".")[:2])
        if libraries[name].times_kernels and not ((major, minor) >= _OLDEST and major <= _NEWEST):
            raise BackendError(
                f"{libraries[name].title} {version} is not supported; allowed: {_OLDEST[0]}.{_OLDEST[1]} to {_NEWEST}"
            )
        of = builder.capabilities_of if libraries[name].times_kernels else rtx.capabilities_of
        self.capabilities: Capabilities = of(version if version.count(".") > 1 else f"{version}.0")

    def build(self, request: BuildRequest, progress: Progress = silent) -> Built:
        raise BackendError(
            f"{self.capabilities.name} {self.capabilities.version} builds on the machine that 'trtdet finish' runs on",
            "run it there, on the folder that 'trtdet prepare' wrote",
        )
