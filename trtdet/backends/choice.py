"""Chooses a backend by name, and reuses kernel times between builds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trtdet.backends import cuda
from trtdet.backends.base import Backend, BuildRequest, Built
from trtdet.backends.libraries import LIBRARIES, library_named
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

    ``auto`` never takes onnxruntime, which makes no engine.

    Raises:
        BackendError: no such backend, or it is not usable here; for ``auto``, none is.
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
