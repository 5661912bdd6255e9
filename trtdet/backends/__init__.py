"""Backends: what builds and runs a detector. ``choose`` is the only way to one."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

from trtdet.backends import cuda
from trtdet.backends.base import (
    Backend,
    BuildRequest,
    Built,
    Capabilities,
    EngineOptions,
    Implicit,
    OwnCalibrator,
    RunInfo,
    Runner,
)
from trtdet.backends.onnxruntime import OnnxRunner, OnnxRuntime
from trtdet.backends.tensorrt.builder import PIP as TENSORRT_PIP
from trtdet.backends.tensorrt.builder import TensorRT
from trtdet.backends.tensorrt.engine import EngineFacts, EngineRunner, obstacle, open_engine
from trtdet.backends.tensorrt.rtx import PIP as RTX_PIP
from trtdet.backends.tensorrt.rtx import TensorRTRTX
from trtdet.errors import BackendError
from trtdet.files import write_atomically
from trtdet.progress import Progress, silent

BACKENDS: dict[str, type[Backend]] = {
    "tensorrt": TensorRT,
    "tensorrt-rtx": TensorRTRTX,
    "onnxruntime": OnnxRuntime,
}
"""Every backend by the name that ``--backend`` takes, in the order that ``auto`` prefers them."""

__all__ = [
    "BACKENDS",
    "Backend",
    "BuildRequest",
    "Built",
    "Capabilities",
    "EngineFacts",
    "EngineOptions",
    "EngineRunner",
    "Implicit",
    "OnnxRunner",
    "OwnCalibrator",
    "RunInfo",
    "Runner",
    "build_remembering",
    "choose",
    "cuda",
    "obstacle",
    "open_engine",
]


def build_remembering(backend: Backend, request: BuildRequest, timings: Path, progress: Progress = silent) -> Built:
    """Builds with what earlier builds learnt about the device's kernels, and keeps what this one learns.

    Args:
        backend: builds it.
        request: what to build; its ``timing_cache`` is taken from the file.
        timings: the file, which need not be there; only backends that time kernels write it.
        progress: told of the builder's phases.
    """
    known = timings.read_bytes() if backend.capabilities.needs_gpu and timings.is_file() else b""
    built = backend.build(replace(request, timing_cache=known), progress)
    if built.timing_cache:
        write_atomically(timings, built.timing_cache)
    return built


def choose(name: str) -> Backend:
    """The backend of that name; ``auto`` takes TensorRT where there is a GPU, else TensorRT-RTX.

    Raises:
        BackendError: no such backend, or it is not usable here; for ``auto``, neither is. onnxruntime makes no engine
            and is never taken unasked.
    """
    if name in BACKENDS:
        return BACKENDS[name]()
    if name != "auto":
        raise BackendError(f"no backend '{name}'; allowed: auto, {', '.join(BACKENDS)}")
    if importlib.util.find_spec("tensorrt") is not None and cuda.devices():
        return TensorRT()
    if importlib.util.find_spec("tensorrt_rtx") is not None:
        return TensorRTRTX()
    if cuda.devices():
        raise BackendError(f"no TensorRT here to build an engine with: {TENSORRT_PIP} or {RTX_PIP}")
    raise BackendError(
        f"no TensorRT here to build an engine with: {RTX_PIP} builds without a GPU; for the Q/DQ model alone, "
        "--backend onnxruntime"
    )
