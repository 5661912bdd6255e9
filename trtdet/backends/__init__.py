"""Backends build and run a detector. ``choose`` gives one by name; ``LIBRARIES`` lists them all."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from trtdet.backends.choice import build_remembering, choose
    from trtdet.backends.libraries import LIBRARIES, Library, library_named
    from trtdet.backends.onnxruntime import OnnxRunner, for_scores, portable
    from trtdet.backends.tensorrt.engine import EngineRunner, open_engine
    from trtdet.backends.tensorrt.engine_facts import EngineFacts, obstacle
    from trtdet.backends.tensorrt.silu_aot import check_compiler

_HOMES = {
    "LIBRARIES": "libraries",
    "Backend": "base",
    "BuildRequest": "base",
    "Built": "base",
    "Capabilities": "base",
    "EngineFacts": "tensorrt.engine_facts",
    "EngineOptions": "base",
    "EngineRunner": "tensorrt.engine",
    "Implicit": "base",
    "Library": "libraries",
    "OnnxRunner": "onnxruntime",
    "for_scores": "onnxruntime",
    "OwnCalibrator": "base",
    "RunInfo": "base",
    "Runner": "base",
    "build_remembering": "choice",
    "check_compiler": "tensorrt.silu_aot",
    "choose": "choice",
    "library_named": "libraries",
    "obstacle": "tensorrt.engine_facts",
    "open_engine": "tensorrt.engine",
    "portable": "onnxruntime",
}

__all__ = [
    "LIBRARIES",
    "Backend",
    "BuildRequest",
    "Built",
    "Capabilities",
    "EngineFacts",
    "EngineOptions",
    "EngineRunner",
    "Implicit",
    "Library",
    "OnnxRunner",
    "OwnCalibrator",
    "RunInfo",
    "Runner",
    "build_remembering",
    "check_compiler",
    "choose",
    "for_scores",
    "library_named",
    "obstacle",
    "open_engine",
    "portable",
]


def __getattr__(name: str) -> Any:
    """Imports a part when it is first used: the table of libraries then loads neither NumPy nor ONNX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trtdet.backends' has no attribute '{name}'")
    return getattr(importlib.import_module(f"trtdet.backends.{_HOMES[name]}"), name)
