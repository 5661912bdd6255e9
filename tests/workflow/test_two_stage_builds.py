"""A two-stage detector from its ONNX file to the detections of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtdet import BuildOptions, CalibrationOptions, build
from trtdet.bundle import Bundle
from trtdet.config import Config
from trtdet.runtime.detector import Detector

MODEL = Path(__file__).parents[1] / "fixtures" / "two_stage" / "faster_dynamo.onnx"

pytestmark = pytest.mark.slow


CONFIG = Config.model_validate(
    {
        "name": "two-stage",
        "classes": [f"c{index}" for index in range(10)],
        "input": {"size": [128, 128], "mean": [114, 114, 114], "std": [58, 58, 58]},
        "head": {"decode": "detections"},
        "nms": "none",
    }
)
IMAGE = np.random.default_rng(5).normal(size=(1, 3, 128, 128)).astype(np.float32)


def int8(images: Path, **options: Any) -> BuildOptions:
    calibration = CalibrationOptions(images=images, num_images=4)
    return BuildOptions(calibration=calibration, correct=(), int8_all=True, **options)


def test_it_is_built_in_int8_and_detects(calibration_images: Path, tmp_path: Path) -> None:
    build(MODEL, CONFIG, tmp_path / "int8", int8(calibration_images, backend="onnxruntime"))
    build(MODEL, CONFIG, tmp_path / "fp32", BuildOptions("fp32", backend="onnxruntime"))
    counts = Bundle(tmp_path / "int8").manifest.precision
    # Backbone 5, pyramid 8, the RPN head of 3 on each of 5 levels, box head 4.
    assert (counts.int8, counts.fp16, counts.fp32) == (32, 0, 0)
    opened = (Detector.open(tmp_path / kind)(IMAGE).image(0) for kind in ("int8", "fp32"))
    (_, int8_scores, _), (_, scores, classes) = opened
    assert len(scores) == len(int8_scores) == 100
    assert set(classes.tolist()) < set(range(10))
    assert not np.array_equal(int8_scores, scores)
    np.testing.assert_allclose(int8_scores[:10], scores[:10], atol=0.1)


@pytest.mark.tensorrt
@pytest.mark.filterwarnings("ignore:INT8 is not faster than FP16:trtdet.errors.TrtdetWarning")
def test_tensorrt_rtx_builds_all_of_it_without_a_gpu(calibration_images: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'trtdet[rtx]'")
    built = build(MODEL, CONFIG, tmp_path / "rtx", int8(calibration_images, backend="tensorrt-rtx", sms=(89,)))
    assert built.bundle.engine is not None
    counts = built.bundle.manifest.precision
    assert (counts.int8, counts.fp16, counts.fp32) == (32, 0, 0)
    build(MODEL, CONFIG, tmp_path / "same", int8(calibration_images, backend="onnxruntime"))
    engine, model = (Detector.open(tmp_path / kind, runtime="model")(IMAGE).image(0) for kind in ("rtx", "same"))
    np.testing.assert_allclose(engine[1][:10], model[1][:10], atol=0.1)
