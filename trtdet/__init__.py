"""trtdet: a trained detector becomes an INT8 TensorRT engine, and COCO mAP says what INT8 cost.

import trtdet
config = trtdet.load_config("yolox")
options = trtdet.BuildOptions(calibration=trtdet.CalibrationOptions(images=Path("images")))
result = trtdet.build(Path("yolox_nano.onnx"), config, Path("bundle"), options)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trtdet.bundle import Bundle
    from trtdet.config import Config, load_config
    from trtdet.data import CocoDataset
    from trtdet.detector import Detector
    from trtdet.errors import TrtdetError, TrtdetWarning
    from trtdet.evaluate import evaluate
    from trtdet.export import ExportOptions, export
    from trtdet.pipeline import BuildOptions, CalibrationOptions, build, calibrate

_HOMES = {
    "Bundle": "bundle",
    "Config": "config",
    "load_config": "config",
    "CocoDataset": "data",
    "Detector": "detector",
    "TrtdetError": "errors",
    "TrtdetWarning": "errors",
    "evaluate": "evaluate",
    "ExportOptions": "export",
    "export": "export",
    "BuildOptions": "pipeline",
    "CalibrationOptions": "pipeline",
    "build": "pipeline",
    "calibrate": "pipeline",
}

__all__ = [
    "BuildOptions",
    "Bundle",
    "CalibrationOptions",
    "CocoDataset",
    "Config",
    "Detector",
    "ExportOptions",
    "TrtdetError",
    "TrtdetWarning",
    "__version__",
    "build",
    "calibrate",
    "evaluate",
    "export",
    "load_config",
]


def __getattr__(name: str) -> Any:
    """Imports a part when it is first used: ``trtdet --help`` then loads neither NumPy nor ONNX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trtdet' has no attribute '{name}'")
    return getattr(importlib.import_module(f"trtdet.{_HOMES[name]}"), name)
