"""Published models on real images: the FP32 scores that are known, and INT8 engines of all of them."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from models import for_onnxruntime

from trtdet import CocoDataset, Config, build, compare, evaluate, load_config
from trtdet.config import NmsMode
from trtdet.evaluation.resampling import mean_average_precision
from trtdet.evaluation.scoring import Evaluation, evaluate_each
from trtdet.options import BuildOptions, CalibrationOptions, NmsOptions, PlanOptions
from trtdet.runtime.detector import Detector

pytestmark = pytest.mark.slow

MODELS = {"yolox_nano": "yolox", "yolov5n": "yolov5", "picodet_s": "dfl"}

KNOWN = {
    "yolox_nano": {"all-classes": (0.2831, 0.4482), "best-class": (0.2788, 0.4411)},
    "yolov5n": {"all-classes": (0.2913, 0.4404), "best-class": (0.2878, 0.4351)},
    "picodet_s": {"all-classes": (0.3385, 0.4819), "best-class": (0.3280, 0.4686)},
}
"""188 images of COCO val2017: mAP and AP50 at score 0.001, 3000 candidates, IoU 0.65, 300 detections."""

INT8 = [("yolox_nano", 32, 5.0, 0.0088), ("yolov5n", 16, 1.5, 0.0108), ("picodet_s", 24, 5.0, 0.013)]
"""Calibration images, by how much the corrections shrink the error at the head, and the mAP that INT8 loses at most,
where a threshold rule alone scores 0.12, 0.28 and 0.01. From one CPU to another the score moves by some tenths of a
point."""

DEFAULT = [("yolox_nano", "best-class", 0.0088), ("yolov5n", "all-classes", 0.011), ("picodet_s", "all-classes", 0.011)]
"""The mAP that the default loses at most, with what the score moves by from one CPU to another."""


def dataset(shared_data: Path, config: Config) -> CocoDataset:
    coco = shared_data / "coco"
    return CocoDataset.load(coco / "annotations" / "instances_val2017.json", coco / "val2017", config.classes)


@cache
def exact(shared_data: Path, name: str) -> dict[str, Evaluation]:
    """A float model's detections, for each convention of ``KNOWN``."""
    config = load_config(MODELS[name])
    detector = Detector.open(shared_data / "models" / f"{name}.onnx", config)
    conventions = [config.with_nms(candidates=candidates).nms for candidates in KNOWN[name]]
    return dict(zip(KNOWN[name], evaluate_each(detector, dataset(shared_data, config), conventions), strict=True))


def lost(bundle: Path, shared_data: Path, name: str, convention: str) -> float:
    """The mAP that a bundle loses on 94 of the images."""
    every = dataset(shared_data, load_config(MODELS[name]))
    some = every.first(94)
    counts = np.isin([image.id for image in every.images], [image.id for image in some.images])[None].astype(np.int32)
    (before,) = mean_average_precision(exact(shared_data, name)[convention].metric.matches(), counts)
    return before - evaluate(Detector.open(bundle), some).result.map


@pytest.mark.parametrize("name", KNOWN)
def test_fp32_scores_are_reproduced(shared_data, name):
    for convention, (known, known50) in KNOWN[name].items():
        result = exact(shared_data, name)[convention].result
        assert result.map == pytest.approx(known, abs=0.001)
        assert result.map50 == pytest.approx(known50, abs=0.001)


@pytest.mark.parametrize("name", KNOWN)
def test_every_way_to_suppress_scores_the_same(shared_data, name):
    config = load_config(MODELS[name])
    some = dataset(shared_data, config).first(24)
    path = shared_data / "models" / f"{name}.onnx"
    ways: tuple[NmsMode, ...] = ("host", "native", "onnx", "efficient")
    found = {where: evaluate(Detector.open(path, config, where), some).result for where in ways}
    for where, result in found.items():
        assert result.map == pytest.approx(found["host"].map, abs=0.0005), where
        assert result.detections == found["host"].detections, where


def test_two_models_are_compared_image_by_image(shared_data):
    evaluations = [exact(shared_data, name)["best-class"] for name in ("yolox_nano", "picodet_s")]
    for one in evaluations:
        (score,) = mean_average_precision(one.metric.matches(), np.ones((1, 188), np.int32))
        assert score == pytest.approx(one.result.map, abs=1e-12)
    done = compare(*evaluations)
    assert done.verdict == "a loss"
    assert done.low < done.difference < done.high < -0.01
    assert done.high - done.low < 0.06


@pytest.mark.parametrize(("name", "images", "gain", "most"), INT8)
def test_corrections_keep_the_score_in_int8(shared_data, tmp_path, name, images, gain, most):
    config = load_config(MODELS[name]).with_nms(candidates="best-class")
    options = for_onnxruntime(images=shared_data / "coco" / "train2017", num_images=images, int8_all=True)
    bundle = build(shared_data / "models" / f"{name}.onnx", config, tmp_path / "bundle", options).bundle
    said = bundle.manifest.quantization.corrections[-1].removeprefix("error at the head ")
    before, after = (float(part.split()[0]) for part in said.split(" -> "))
    assert after < before / gain
    assert lost(bundle.path, shared_data, name, "best-class") <= most


@pytest.mark.tensorrt
@pytest.mark.parametrize("name", MODELS)
def test_every_convolution_of_a_published_model_runs_in_int8(shared_data, tmp_path, name):
    calibration = CalibrationOptions(images=shared_data / "coco" / "train2017", num_images=8)
    plan = PlanOptions(int8_all=True)
    options = BuildOptions(sms=(86,), guard="off", effort="none", calibration=calibration, plan=plan)
    model = shared_data / "models" / f"{name}.onnx"
    done = build(model, load_config(MODELS[name]), tmp_path / "bundle", options)
    assert done.audit.departures == ()
    convolutions = {"yolov5n": 60, "yolox_nano": 113, "picodet_s": 133}[name]
    assert done.audit.int8 == done.bundle.manifest.precision.int8 == convolutions


@pytest.mark.tensorrt
@pytest.mark.parametrize(("name", "candidates", "most"), DEFAULT)
@pytest.mark.filterwarnings("ignore:FP16 alone:trtdet.errors.TrtdetWarning")
def test_no_default_is_estimated_to_be_slower_than_fp16_and_all_keep_the_score(
    shared_data, tmp_path, name, candidates, most
):
    config = load_config(MODELS[name]).with_nms(candidates=candidates)
    calibration = CalibrationOptions(images=shared_data / "coco" / "train2017", num_images=24)
    options = BuildOptions(backend="tensorrt-rtx", nms=NmsOptions(mode="host"), calibration=calibration)
    done = build(shared_data / "models" / f"{name}.onnx", config, tmp_path / "default", options)
    manifest = done.bundle.manifest
    assert done.audit.departures == ()
    assert [finding for finding in done.audit.findings if finding.kind == "float-output"] == []
    if manifest.shipped == "int8":
        assert done.worth.speedup is not None and done.worth.speedup >= 1
    assert lost(done.bundle.path, shared_data, name, candidates) <= most
