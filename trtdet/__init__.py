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
    from trtdet.deploy import PackageOptions, TritonOptions, package
    from trtdet.errors import TrtdetError, TrtdetWarning
    from trtdet.evaluation.agreement import AgreementOptions, agree
    from trtdet.evaluation.comparison import compare
    from trtdet.evaluation.guessing import guess_config
    from trtdet.evaluation.resampling import Bootstrap
    from trtdet.evaluation.scoring import evaluate
    from trtdet.evaluation.shifted_scores import score_shift
    from trtdet.exporter import ExportOptions, export
    from trtdet.performance import BenchOptions, ProfileOptions, bench, profile
    from trtdet.pipeline import (
        BuildOptions,
        CalibrationOptions,
        KeepOptions,
        SensitivityOptions,
        TuneOptions,
        build,
        calibrate,
        sensitivity,
    )
    from trtdet.pipeline.tuned import tuned_options
    from trtdet.pipeline.tuning import tune
    from trtdet.pipeline.variants import SweepOptions, sweep
    from trtdet.runtime.detector import Detector
    from trtdet.runtime.pictures import infer
    from trtdet.runtime.recordings import record

# No module may be called like one of these names: importing it would put the module in the function's place.
_HOMES = {
    "AgreementOptions": "evaluation.agreement",
    "BenchOptions": "performance",
    "Bootstrap": "evaluation.resampling",
    "BuildOptions": "pipeline",
    "Bundle": "bundle",
    "CalibrationOptions": "pipeline",
    "CocoDataset": "data",
    "Config": "config",
    "Detector": "runtime.detector",
    "ExportOptions": "exporter",
    "KeepOptions": "pipeline",
    "PackageOptions": "deploy",
    "ProfileOptions": "performance",
    "SensitivityOptions": "pipeline",
    "SweepOptions": "pipeline.variants",
    "TritonOptions": "deploy",
    "TrtdetError": "errors",
    "TuneOptions": "pipeline",
    "TrtdetWarning": "errors",
    "agree": "evaluation.agreement",
    "bench": "performance",
    "build": "pipeline",
    "calibrate": "pipeline",
    "compare": "evaluation.comparison",
    "evaluate": "evaluation.scoring",
    "export": "exporter",
    "guess_config": "evaluation.guessing",
    "infer": "runtime.pictures",
    "load_config": "config",
    "package": "deploy",
    "profile": "performance",
    "record": "runtime.recordings",
    "score_shift": "evaluation.shifted_scores",
    "sensitivity": "pipeline",
    "sweep": "pipeline.variants",
    "tune": "pipeline.tuning",
    "tuned_options": "pipeline.tuned",
}

__all__ = [
    "AgreementOptions",
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
    "TuneOptions",
    "__version__",
    "agree",
    "bench",
    "build",
    "calibrate",
    "compare",
    "evaluate",
    "export",
    "guess_config",
    "infer",
    "load_config",
    "package",
    "profile",
    "record",
    "score_shift",
    "sensitivity",
    "sweep",
    "tune",
    "tuned_options",
]


def __getattr__(name: str) -> Any:
    """Imports a part when it is first used: ``trtdet --help`` then loads neither NumPy nor ONNX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trtdet' has no attribute '{name}'")
    return getattr(importlib.import_module(f"trtdet.{_HOMES[name]}"), name)
