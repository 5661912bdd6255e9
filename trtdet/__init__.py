"""Turns trained detectors into INT8 TensorRT engines, and measures the loss in COCO mAP.

import trtdet
config = trtdet.load_config("yolox")
options = trtdet.BuildOptions(calibration=trtdet.CalibrationOptions(images="images"))
result = trtdet.build("yolox_nano.onnx", config, "bundle", options)
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# onnxruntime reads it when it is imported, and sends usage data without it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trtdet.building import calibrate, sensitivity
    from trtdet.building.variants import variant_options
    from trtdet.bundle import Bundle
    from trtdet.candidates import Finished, PreparedFolder, build, finish, prepare
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
    from trtdet.experiments.experiment import Experiment, Variant
    from trtdet.experiments.grid import sweep
    from trtdet.experiments.image_counts import ImageCurve, how_many_images
    from trtdet.experiments.search import tune
    from trtdet.exporter import ExportOptions, export
    from trtdet.options import (
        BuildOptions,
        CalibrationOptions,
        EngineOptions,
        FinishOptions,
        NmsOptions,
        PlanOptions,
        PrepareOptions,
        SensitivityOptions,
        SweepOptions,
        TuneOptions,
    )
    from trtdet.performance import BenchOptions, ProfileOptions, bench, profile
    from trtdet.runtime.detector import Detector
    from trtdet.runtime.prediction import Prediction
    from trtdet.runtime.saving import save_predictions

# fmt: off
__all__ = [
    "AgreementOptions", "BenchOptions", "Bootstrap", "BuildOptions", "Bundle", "CalibrationOptions", "CocoDataset",
    "Config", "Detector", "EngineOptions", "Experiment", "ExportOptions", "FinishOptions", "Finished", "ImageCurve",
    "NmsOptions", "PackageOptions", "PlanOptions", "Prediction", "PrepareOptions", "PreparedFolder", "ProfileOptions",
    "SensitivityOptions", "SweepOptions", "TritonOptions", "TrtdetError", "TrtdetWarning", "TuneOptions", "Variant",
    "__version__", "agree", "bench", "build", "calibrate", "compare", "evaluate", "export", "finish", "guess_config",
    "how_many_images", "load_config", "package", "prepare", "profile", "save_predictions", "score_shift", "sensitivity",
    "sweep", "tune", "variant_options",
]
# fmt: on


def importer(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package, which imports a part when it is first used. ``homes`` has its modules, and the
    names that each gives, between spaces."""
    modules = {name: module for module, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return load


# 'trtdet --help' loads neither NumPy nor ONNX. No module may have one of these names: importing it would replace the
# function by the module.
__getattr__ = importer(
    __name__,
    {
        "building": "calibrate sensitivity",
        "building.variants": "variant_options",
        "bundle": "Bundle",
        "candidates": "Finished PreparedFolder build finish prepare",
        "config": "Config load_config",
        "data": "CocoDataset",
        "deploy": "PackageOptions TritonOptions package",
        "errors": "TrtdetError TrtdetWarning",
        "evaluation.agreement": "AgreementOptions agree",
        "evaluation.comparison": "compare",
        "evaluation.guessing": "guess_config",
        "evaluation.resampling": "Bootstrap",
        "evaluation.scoring": "evaluate",
        "evaluation.shifted_scores": "score_shift",
        "experiments.experiment": "Experiment Variant",
        "experiments.grid": "sweep",
        "experiments.image_counts": "ImageCurve how_many_images",
        "experiments.search": "tune",
        "exporter": "ExportOptions export",
        "options": "BuildOptions CalibrationOptions EngineOptions FinishOptions NmsOptions PlanOptions PrepareOptions "
        "SensitivityOptions SweepOptions TuneOptions",
        "performance": "BenchOptions ProfileOptions bench profile",
        "runtime.detector": "Detector",
        "runtime.prediction": "Prediction",
        "runtime.saving": "save_predictions",
    },
)
