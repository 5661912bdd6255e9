"""Masks, keypoints and rotated boxes from an ONNX file to the figures of a bundle."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import task_models

from benchmarks import cards
from trtdet import build, prepare, sweep
from trtdet.bundle import Bundle
from trtdet.config import Config
from trtdet.data import CocoDataset
from trtdet.detection.masks import from_run_lengths
from trtdet.errors import ConfigError, TrtdetWarning
from trtdet.evaluation.agreement import AgreementOptions, agree, agreeing_parts
from trtdet.evaluation.comparison import compare
from trtdet.evaluation.guessing import guess_config
from trtdet.evaluation.resampling import Bootstrap
from trtdet.evaluation.scoring import evaluate
from trtdet.experiments.experiment import Experiment
from trtdet.options import BuildOptions, CalibrationOptions, NmsOptions, PlanOptions, PrepareOptions, SweepOptions
from trtdet.report import report, written
from trtdet.runtime.detector import Detector
from trtdet.runtime.saving import save_predictions

PART = {"seg": "masks", "pose": "keypoints", "obb": "rotated_boxes"}
OUTPUTS = {"seg": ["mask_coefficients", "prototypes"], "pose": ["keypoints"], "obb": ["rotated_boxes"]}
TASKS = list(PART)


@pytest.fixture(scope="session")
def pictures(once):
    return once("cards", lambda folder: cards.generate(folder, first=0, count=8))


@pytest.fixture(scope="session")
def others(once):
    """Pictures that calibrate where ``pictures`` measure."""
    return once("other-cards", lambda folder: cards.generate(folder, first=500, count=8)) / "images"


def configured(folder: Path, task: str) -> tuple[Path, Config]:
    model = task_models.save(folder, task)
    return model, guess_config(model).config.with_nms(score_threshold=0.1, iou_threshold=0.5, max_detections=60)


def built(folder: Path, task: str, pictures: Path, **options: Any) -> Bundle:
    """An INT8 bundle with every convolution in INT8 that can be."""
    model, config = configured(folder, task)
    calibration = CalibrationOptions(images=pictures / "images", check_input=False)
    chosen = {"backend": "onnxruntime", "effort": "none", **options}
    asked = BuildOptions(**chosen, calibration=calibration, plan=PlanOptions(int8_all=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # of the few images
        return build(model, config, folder / "bundle", asked).bundle


@pytest.mark.parametrize("task", TASKS)
def test_init_recognises_it_and_writes_it(task, tmp_path):
    guess = guess_config(task_models.save(tmp_path, task))
    assert guess.config.classes == cards.CLASSES and guess.config.input.size == cards.SIZE
    parts = {"seg": ("mask_coefficients", "prototypes"), "pose": ("keypoints",), "obb": ("angles",)}
    assert guess.config.head.raw_parts == parts[task]
    assert Config.model_validate_json(guess.config.model_dump_json()) == guess.config


def test_rotated_boxes_are_suppressed_on_the_host_by_default(tmp_path):
    """In plain operators that takes three times as long as a small network."""
    chosen = {}
    for task in ("pose", "obb"):
        model, config = configured(tmp_path, task)
        asked = BuildOptions(backend="onnxruntime", precision="fp32")
        chosen[task] = build(model, config, tmp_path / task, asked).bundle.manifest.nms
    assert (chosen["pose"].mode, chosen["pose"].reason) == ("onnx", "")
    assert (chosen["obb"].mode, chosen["obb"].reason.split()[2]) == ("host", "native")


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["none", "quick"])
@pytest.mark.parametrize("task", TASKS)
def test_a_bundle_is_built_scored_and_drawn(task, effort, pictures, tmp_path):
    bundle = built(tmp_path, task, pictures, effort=effort)
    manifest = bundle.manifest
    assert manifest.schema_ == 2 and manifest.parts is not None and list(manifest.parts.model_dump()) == [PART[task]]
    outputs = [output.name for output in manifest.outputs]
    assert outputs[-len(OUTPUTS[task]) :] == OUTPUTS[task]
    assert manifest.precision.int8 > 1
    detector = Detector.open(bundle.path)
    reference = Detector.open(tmp_path / f"cards-{task}.onnx", bundle.config, manifest.nms.mode)
    dataset = CocoDataset.load(pictures / "annotations.json", pictures / "images", cards.CLASSES)
    rough, exact = (evaluate(one, dataset) for one in (detector, reference))
    assert rough.scored_parts == exact.scored_parts == (PART[task],)
    assert rough.as_dict()[PART[task]]["images"] == 8
    difference = compare(rough, exact, Bootstrap(100), of=PART[task])
    assert difference.low <= difference.difference <= difference.high
    assert agreeing_parts(rough, exact) == (PART[task],)
    agreement = agree(rough, exact, AgreementOptions(bootstrap=Bootstrap(100)), of=PART[task])
    assert 0.05 < agreement.ap < 1 and agree(exact, exact, of=PART[task]).ap > 0.98

    done = save_predictions(detector.predict(pictures / "images" / "001.png"), tmp_path / "out")
    row = json.loads(done.detections.read_text())
    assert len(row["detections"]) > 2 and done.pictures[0].is_file()
    for found in row["detections"]:
        if task == "seg":
            mask = from_run_lengths(found["mask"])
            inside = np.argwhere(mask)
            x1, y1, x2, y2 = found["box"]
            assert mask.shape == cards.SIZE
            assert not len(inside) or (inside.min(0) >= np.floor([y1, x1])).all()
            assert not len(inside) or (inside.max(0) <= np.ceil([y2, x2])).all()
        elif task == "pose":
            points = np.array(found["keypoints"])
            assert points.shape == (4, 3) and (points[:, :2] <= [160, 128]).all() and (points[:, 2] <= 1).all()
        else:
            assert len(found["rotated_box"]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("mode", ["host", "native"])
def test_nms_in_the_graph_and_on_the_host_give_the_same(task, mode, pictures, tmp_path):
    bundle = built(tmp_path, task, pictures, nms=NmsOptions(mode=mode))
    assert bundle.manifest.nms.mode == mode
    model, config = configured(tmp_path, task)
    image = cards.drawn(3)[0].transpose(2, 0, 1)[None].astype(np.float32) / 255
    first, second = (Detector.open(model, config, nms)(image) for nms in (mode, "host"))
    count = int(second.num_dets[0, 0])
    assert int(first.num_dets[0, 0]) == count > 2
    for name, value in second.image_parts(0).items().items():
        np.testing.assert_allclose(first.image_parts(0).items()[name], value, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_grid_scores_the_parts_too(task, pictures, tmp_path):
    model, config = configured(tmp_path, task)
    plan = PlanOptions(val_images=pictures / "images", annotations=pictures / "annotations.json", int8_all=True)
    calibration = CalibrationOptions(images=pictures / "images", check_input=False)
    options = SweepOptions(calibration=calibration, plan=plan, efforts=("none",), backend="onnxruntime")
    made = sweep(model, config, tmp_path / "sweep", options)
    exact, rough = made.variants
    assert list(exact.parts) == list(rough.parts) == [PART[task]]
    assert exact.parts[PART[task]]["low"] is None and rough.parts[PART[task]]["low"] is not None
    assert f"{PART[task].replace('_', ' ')} against FP32" in made.markdown()
    again = sweep(model, config, tmp_path / "sweep", options)
    assert again.variants == made.variants
    assert Experiment.load(tmp_path / "sweep" / "experiment.json").variants[1].parts == rough.parts


@pytest.mark.slow
@pytest.mark.parametrize("annotated", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_candidates_and_plans_are_judged_by_their_parts_too(task, annotated, pictures, others, tmp_path):
    model, config = configured(tmp_path, task)
    seen = {"val_images": pictures / "images", "annotations": pictures / "annotations.json"} if annotated else {}
    images = CalibrationOptions(images=others, check_input=False, num_images=4)
    asked = BuildOptions(effort="none", calibration=images, plan=PlanOptions(**seen))
    folder = prepare(model, config, tmp_path / "p", PrepareOptions("tensorrt-10.3", asked, max_map_drop=100, points=0))
    assert folder.content.bound.endswith(f", of boxes and of {PART[task].replace('_', ' ')}")
    for candidate in folder.content.candidates:
        (score,) = candidate.accuracy.parts.values()
        assert list(candidate.accuracy.parts) == [PART[task]] and (score["map"] is not None) == annotated
        assert score["low"] <= score["difference"] <= score["high"]
        assert annotated or -1 <= score["difference"] <= 0
    assert PART[task].replace("_", " ") in folder.table().markdown()

    limits = {"max_map_drop": 60.0} if annotated else {"max_disagreement": 100.0}
    plan = PlanOptions(**{"val_images": pictures / "images", **seen, **limits}, int8_all=True)
    asked = BuildOptions(effort="none", calibration=images, plan=plan, backend="onnxruntime")
    bundle = build(model, config, tmp_path / "b", asked).bundle
    trade_off = json.loads(bundle.file("tradeoff.json").read_text())
    assert [list(one["score"]["parts"]) for one in trade_off["candidates"]] == [[PART[task]]] * len(
        trade_off["candidates"]
    )


@pytest.mark.slow
def test_the_verdict_of_a_build_is_of_the_parts_too(pictures, others, tmp_path):
    model, config = configured(tmp_path, "pose")
    seen = {"val_images": pictures / "images", "annotations": pictures / "annotations.json"}
    calibration = CalibrationOptions(images=others, check_input=False)
    asked = BuildOptions(effort="none", calibration=calibration, plan=PlanOptions(**seen), backend="onnxruntime")
    done = build(model, config, tmp_path / "b", asked)
    assert done.worth is not None and [one.of for one in done.worth.parts] == ["keypoints"]
    assert ", keypoint mAP " in str(done.worth)
    assert done.worth.as_dict()["comparison"]["keypoints"]["difference"] == done.worth.parts[0].difference
    assert "; keypoint mAP against " in written(report([done.bundle.path]), "md").decode()


@pytest.mark.slow
@pytest.mark.tensorrt
@pytest.mark.parametrize("task", TASKS)
def test_an_engine_of_tensorrt_rtx_has_the_same_outputs(task, pictures, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    bundle = built(tmp_path, task, pictures, backend="tensorrt-rtx", nms=NmsOptions(mode="native"))
    assert bundle.engine is not None and bundle.manifest.parts is not None
    assert [output.name for output in bundle.manifest.outputs[4:]] == OUTPUTS[task]
    found = Detector.open(bundle.path, runtime="onnxruntime")
    image = cards.drawn(3)[0].transpose(2, 0, 1)[None].astype(np.float32) / 255
    assert len(found(image).image(0)[0]) > 2
    assert "fp16" in written(report([bundle.path]), "md").decode().lower()


@pytest.mark.parametrize("task", TASKS)
def test_efficient_nms_is_refused_before_anything_is_calibrated(task, pictures, tmp_path):
    with pytest.raises(ConfigError, match="--nms efficient does not say which boxes it kept"):
        built(tmp_path, task, pictures, nms=NmsOptions(mode="efficient"))
