"""Backends build and run a detector. ``choose`` gives one by name; ``LIBRARIES`` lists them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtdet import importer

if TYPE_CHECKING:
    from trtdet.backends.base import (
        Backend,
        BuildRequest,
        Built,
        Capabilities,
        EngineTarget,
        Implicit,
        OwnCalibrator,
        RunInfo,
        Runner,
    )
    from trtdet.backends.choice import build_remembering, choose
    from trtdet.backends.libraries import LIBRARIES, Library, library_named
    from trtdet.backends.onnxruntime import OnnxRunner, at_once, for_scores, portable, side_by_side
    from trtdet.backends.tensorrt.dla import place_on_dla
    from trtdet.backends.tensorrt.engine import EngineRunner, open_engine
    from trtdet.backends.tensorrt.loaded_engine import EngineFacts, obstacle
    from trtdet.backends.tensorrt.silu_aot import check_compiler

__all__ = [
    "LIBRARIES",
    "Backend",
    "BuildRequest",
    "Built",
    "Capabilities",
    "EngineFacts",
    "EngineRunner",
    "EngineTarget",
    "Implicit",
    "Library",
    "OnnxRunner",
    "OwnCalibrator",
    "RunInfo",
    "Runner",
    "at_once",
    "build_remembering",
    "check_compiler",
    "choose",
    "for_scores",
    "library_named",
    "obstacle",
    "open_engine",
    "place_on_dla",
    "portable",
    "side_by_side",
]

# The table of libraries alone loads neither NumPy nor ONNX.
__getattr__ = importer(
    __name__,
    {
        "base": "Backend BuildRequest Built Capabilities EngineTarget Implicit OwnCalibrator RunInfo Runner",
        "choice": "build_remembering choose",
        "libraries": "LIBRARIES Library library_named",
        "onnxruntime": "OnnxRunner at_once for_scores portable side_by_side",
        "tensorrt.dla": "place_on_dla",
        "tensorrt.engine": "EngineRunner open_engine",
        "tensorrt.loaded_engine": "EngineFacts obstacle",
        "tensorrt.silu_aot": "check_compiler",
    },
)
