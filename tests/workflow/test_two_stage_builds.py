"""A two-stage detector from its ONNX file to the detections of a bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trtdet import BuildOptions, CalibrationOptions, build
from trtdet.bundle import Bundle
from trtdet.config import Config
from trtdet.runtime.detector import Detector

MODEL = Path(__file__).parents[1] / "fixtures" / "two_stage" / "faster_dynamo.onnx"

pytestmark = pytest.mark.slow


def test_it_is_built_in_int8_and_detects(calibration_images: Path, tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "name": "two-stage",
            "classes": [f"c{index}" for index in range(10)],
            "input": {"size": [128, 128], "mean": [114, 114, 114], "std": [58, 58, 58]},
            "head": {"decode": "detections"},
            "nms": "none",
        }
    )
    calibration = CalibrationOptions(images=calibration_images, num_images=4)
    int8 = BuildOptions(calibration=calibration, backend="onnxruntime", correct=(), int8_all=True)
    build(MODEL, config, tmp_path / "int8", int8)
    build(MODEL, config, tmp_path / "fp32", BuildOptions("fp32", backend="onnxruntime"))
    counts = Bundle(tmp_path / "int8").manifest.precision
    # Backbone 5, pyramid 8, the RPN head of 3 on each of 5 levels, box head 4.
    assert (counts.int8, counts.fp16, counts.fp32) == (32, 0, 0)
    image = np.random.default_rng(5).normal(size=(1, 3, 128, 128)).astype(np.float32)
    (_, int8_scores, _), (_, scores, classes) = (
        Detector.open(tmp_path / kind)(image).image(0) for kind in ("int8", "fp32")
    )
    assert len(scores) == len(int8_scores) == 100
    assert set(classes.tolist()) < set(range(10))
    assert not np.array_equal(int8_scores, scores)
    np.testing.assert_allclose(int8_scores[:10], scores[:10], atol=0.1)
