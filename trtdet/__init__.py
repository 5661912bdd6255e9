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
    from trtdet.benching import BenchOptions, bench
    from trtdet.bundle import Bundle
    from trtdet.comparison import Bootstrap, compare
    from trtdet.config import Config, load_config
    from trtdet.data import CocoDataset
    from trtdet.detector import Detector
    from trtdet.errors import TrtdetError, TrtdetWarning
    from trtdet.evaluation import evaluate
    from trtdet.exporter import ExportOptions, export
    from trtdet.packaging import PackageOptions, TritonOptions, package
    from trtdet.pictures import infer
    from trtdet.pipeline import (
        BuildOptions,
        CalibrationOptions,
        KeepOptions,
        SensitivityOptions,
        build,
        calibrate,
        sensitivity,
    )
    from trtdet.profiling import ProfileOptions, profile
    from trtdet.recording import record
    from trtdet.sweeping import SweepOptions, sweep

# No module may be called like one of these names: importing it would put the module in the function's place.
_HOMES = {
    "BenchOptions": "benching",
    "Bootstrap": "comparison",
    "BuildOptions": "pipeline",
    "Bundle": "bundle",
    "CalibrationOptions": "pipeline",
    "CocoDataset": "data",
    "Config": "config",
    "Detector": "detector",
    "ExportOptions": "exporter",
    "KeepOptions": "pipeline",
    "PackageOptions": "packaging",
    "ProfileOptions": "profiling",
    "SensitivityOptions": "pipeline",
    "SweepOptions": "sweeping",
    "TritonOptions": "packaging",
    "TrtdetError": "errors",
    "TrtdetWarning": "errors",
    "bench": "benching",
    "build": "pipeline",
    "calibrate": "pipeline",
    "compare": "comparison",
    "evaluate": "evaluation",
    "export": "exporter",
    "infer": "pictures",
    "load_config": "config",
    "package": "packaging",
    "profile": "profiling",
    "record": "recording",
    "sensitivity": "pipeline",
    "sweep": "sweeping",
}

__all__ = [
    "BenchOptions",
    "Bootstrap",
    "BuildOptions",
    "Bundle",
    "CalibrationOptions",
    "CocoDataset",
    "Config",
    "Detector",
    "ExportOptions",
    "KeepOptions",
    "PackageOptions",
    "ProfileOptions",
    "SensitivityOptions",
    "SweepOptions",
    "TritonOptions",
    "TrtdetError",
    "TrtdetWarning",
    "__version__",
    "bench",
    "build",
    "calibrate",
    "compare",
    "evaluate",
    "export",
    "infer",
    "load_config",
    "package",
    "profile",
    "record",
    "sensitivity",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """Imports a part when it is first used: ``trtdet --help`` then loads neither NumPy nor ONNX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trtdet' has no attribute '{name}'")
    return getattr(importlib.import_module(f"trtdet.{_HOMES[name]}"), name)
