"""A two-stage detector from its ONNX file to the detections of a bundle."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from models import RCNN, for_onnxruntime

from trtdet import build, sensitivity
from trtdet.bundle import Bundle, MasksPart
from trtdet.config import Config
from trtdet.demo import shapes
from trtdet.detection.masks import from_run_lengths
from trtdet.errors import TrtdetWarning
from trtdet.options import BuildOptions, CalibrationOptions, PlanOptions, SensitivityOptions
from trtdet.performance import ProfileOptions, profile
from trtdet.quantization import PrecisionPlan
from trtdet.report import report, written
from trtdet.runtime.detector import Detector

FOLDER = Path(__file__).parents[1] / "fixtures" / "two_stage"
MODEL, WITH_MASKS = FOLDER / "faster_dynamo.onnx", FOLDER / "mask_dynamo.onnx"
TRAINED = FOLDER.parent / "shapes_rcnn" / "mask_trace.onnx"

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
    return BuildOptions(**options, effort="none", calibration=calibration, plan=PlanOptions(int8_all=True))


def test_it_is_built_in_int8_and_detects(calibration_images, tmp_path):
    build(MODEL, CONFIG, tmp_path / "int8", int8(calibration_images, backend="onnxruntime"))
    build(MODEL, CONFIG, tmp_path / "fp32", BuildOptions(precision="fp32", backend="onnxruntime"))
    counts = Bundle(tmp_path / "int8").manifest.precision
    # Backbone 5, pyramid 8, the RPN head of 3 on each of 5 levels, box head 4.
    assert (counts.int8, counts.fp16, counts.fp32) == (32, 0, 0)
    opened = (Detector.open(tmp_path / kind)(IMAGE).image(0) for kind in ("int8", "fp32"))
    (_, int8_scores, _), (_, scores, classes) = opened
    assert len(scores) == len(int8_scores) == 100
    assert set(classes.tolist()) < set(range(10))
    assert not np.array_equal(int8_scores, scores)
    np.testing.assert_allclose(int8_scores[:10], scores[:10], atol=0.1)


def test_layers_of_both_stages_are_corrected_and_reported(tmp_path):
    calibration = CalibrationOptions(images=shapes.generate(tmp_path, "calibration", 16).images)
    asked = for_onnxruntime(effort="round,bias", calibration=calibration, int8_all=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # of the few images
        bundle = build(TRAINED, RCNN, tmp_path / "int8", asked).bundle
    kinds = {node.name: node.op_type for node in onnx.load(TRAINED).graph.node}
    entries = PrecisionPlan.load(bundle.file("plan.json")).entries
    done = {(kinds.get(name), step.name) for name, entry in entries.items() for step in entry.corrections}
    assert {(kind, step) for kind in ("Conv", "Gemm") for step in ("round", "bias")} <= done
    told = written(report([tmp_path / "int8"]), "md").decode()
    assert "65 INT8, 0 FP16, 1 FP32" in told
    assert "/roi_heads/mask_predictor/conv5_mask/ConvTranspose" in told


def test_masks_are_drawn_and_listed(calibration_images, tmp_path):
    build(WITH_MASKS, CONFIG, tmp_path / "int8", int8(calibration_images, backend="onnxruntime"))
    build(WITH_MASKS, CONFIG, tmp_path / "fp32", BuildOptions(precision="fp32", backend="onnxruntime"))
    manifest = Bundle(tmp_path / "int8").manifest
    assert manifest.masks == MasksPart(output="masks", size=28, threshold=0.5)
    assert manifest.outputs[-1].name == "masks" and manifest.outputs[-1].shape == (1, 300, 28, 28)
    # As above, and the mask head's first convolution and its last; the transposed one between them stays in float.
    assert (manifest.precision.int8, manifest.precision.fp32) == (34, 1)
    detectors = [Detector.open(tmp_path / kind) for kind in ("int8", "fp32")]
    (rough, exact) = (detector(IMAGE).image_parts(0).masks for detector in detectors)
    assert rough.shape == exact.shape == (100, 28, 28) and not np.array_equal(rough, exact)
    assert rough.min() >= 0 and rough.max() <= 1
    picture = sorted(calibration_images.iterdir())[0]
    row = detectors[1].predict(picture, score_threshold=0.2)[0].to_dict()
    assert len(row["detections"]) > 10
    for found in row["detections"]:
        mask = from_run_lengths(found["mask"])
        assert mask.shape == (row["height"], row["width"])
        x1, y1, x2, y2 = found["box"]
        rows, columns = np.nonzero(mask)
        if len(rows):
            side = max(x2 - x1, y2 - y1) / 28 + 2
            assert columns.min() >= x1 - side and columns.max() <= x2 + side
            assert rows.min() >= y1 - side and rows.max() <= y2 + side
    assert any(from_run_lengths(found["mask"]).any() for found in row["detections"])


def test_layers_that_reach_masks_alone_cost_no_detection(calibration_images, tmp_path):
    calibration = CalibrationOptions(images=calibration_images, num_images=4)
    options = SensitivityOptions(calibration=calibration, effort="none", plan=PlanOptions(rank_images=2, int8_all=True))
    found = sensitivity(FOLDER / "mask_trace.onnx", CONFIG, options)
    scores = {layer.name: layer.score for layer in found.layers}
    masks = {name for name in scores if "mask" in name}
    assert masks and all(scores[name] == 0 for name in masks)
    assert max(scores.values()) > 0


def test_what_is_left_out_is_said(tmp_path):
    graph = gs.import_onnx(onnx.load(WITH_MASKS))
    other = gs.Variable("others", np.float32, graph.outputs[3].shape)
    graph.nodes.append(gs.Node("HardSigmoid", "others", {}, [graph.inputs[0]], [other]))
    graph.outputs[3] = other
    graph.cleanup()
    onnx.save(gs.export_onnx(graph), tmp_path / "other.onnx")
    with pytest.warns(TrtdetWarning, match="cut_masks: others: no sigmoid of"):
        build(tmp_path / "other.onnx", CONFIG, tmp_path / "fp32", BuildOptions(precision="fp32", backend="onnxruntime"))
    assert Bundle(tmp_path / "fp32").manifest.masks is None


@pytest.mark.tensorrt
@pytest.mark.filterwarnings("ignore:.*faster than FP16:trtdet.errors.TrtdetWarning")
def test_tensorrt_rtx_builds_all_of_it_without_a_gpu(calibration_images, tmp_path):
    built = build(MODEL, CONFIG, tmp_path / "rtx", int8(calibration_images, backend="tensorrt-rtx", sms=(89,)))
    assert built.bundle.engine is not None
    counts = built.bundle.manifest.precision
    assert (counts.int8, counts.fp16, counts.fp32) == (32, 0, 0)
    build(MODEL, CONFIG, tmp_path / "same", int8(calibration_images, backend="onnxruntime"))
    engine, model = (Detector.open(tmp_path / kind, runtime="model")(IMAGE).image(0) for kind in ("rtx", "same"))
    np.testing.assert_allclose(engine[1][:10], model[1][:10], atol=0.1)


def test_its_profile_counts_what_runs_in_each_run():
    found = profile(MODEL, CONFIG, ProfileOptions(runs=10, warm_up=1))
    by_type = {share.name: share for share in found.profile.by_type}
    assert (by_type["RoiAlign"].count, by_type["NonMaxSuppression"].count) == (4, 2)
    assert all(share.ms > 0 and share.stddev >= 0 for share in by_type.values())
