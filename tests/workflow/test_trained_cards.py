"""A detector that was trained to find masks, keypoints and rotated boxes: what INT8 costs each, and what it may not.

benchmarks/train_cards.py made tests/fixtures/cards.onnx.
"""

import warnings
from functools import cache
from pathlib import Path

import pytest
from trained_cards import HEADS, MODEL, configured

from benchmarks import cards
from trtdet import TuneOptions, build, tune, variant_options
from trtdet.bundle import Bundle
from trtdet.data import CocoDataset
from trtdet.errors import TrtdetWarning
from trtdet.evaluation.comparison import part_scores
from trtdet.evaluation.scoring import Evaluation, evaluate
from trtdet.options import BuildOptions, CalibrationOptions, PlanOptions, changed
from trtdet.runtime.detector import Detector

TASKS = list(HEADS)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def measured(once):
    folder = once("measured-cards", lambda folder: cards.generate(folder, first=20_000, count=40))
    return CocoDataset.load(folder / "annotations.json", folder / "images", cards.CLASSES)


@pytest.fixture(scope="session")
def calibration(once):
    return once("calibration-cards", lambda folder: cards.generate(folder, first=30_000, count=24)) / "images"


@cache
def exact(task: str, dataset: CocoDataset) -> Evaluation:
    return evaluate(Detector.open(MODEL, configured(task), "host"), dataset)


def built(folder: Path, task: str, images: Path, effort: str = "quick", rule: str = "percentile") -> Bundle:
    asked = BuildOptions(
        effort=effort,
        backend="onnxruntime",
        calibration=CalibrationOptions(images=images, rule=rule),
        plan=PlanOptions(int8_all=True),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)
        return build(MODEL, configured(task), folder / task, asked).bundle


@pytest.mark.parametrize("task", TASKS)
def test_int8_keeps_boxes_and_parts(task, measured, calibration, tmp_path):
    reference = exact(task, measured)
    assert reference.result.map > 0.75 and reference.scored_parts == (task,)
    assert reference.score_of(task).map > (0.6 if task == "keypoints" else 0.7)
    bundle = built(tmp_path, task, calibration)
    assert bundle.manifest.precision.int8 > 15 and bundle.manifest.precision.fp16 == 0
    found = evaluate(Detector.open(bundle.path), measured)
    assert found.result.map > reference.result.map - 0.02
    # The interval of the keypoints' difference reaches 0.02 to each side.
    assert part_scores(found, reference)[task]["difference"] > -0.03


@pytest.mark.parametrize("task", TASKS)
def test_a_tune_scores_what_there_is_beside_boxes(task, measured, calibration, tmp_path):
    images = measured.images[0].path.parent
    asked = changed(
        BuildOptions(effort="none", backend="onnxruntime", calibration=CalibrationOptions(images=calibration)),
        val_images=images,
        annotations=images.parent / "annotations.json",
        rank_images=2,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)
        found = tune(MODEL, configured(task), tmp_path / "tuned", TuneOptions(build=asked, points=2))
        chosen = next(variant for variant in found.variants if "all INT8" in variant.titles)
        options, config = variant_options(tmp_path / "tuned", chosen.number, configured(task))
        bundle = build(MODEL, config, tmp_path / "chosen", options).bundle
    assert len(found.variants) > 2 and bundle.manifest.precision.fp16 == 0
    for variant in found.variants:
        assert variant.parts.keys() == {task}
        # FP16 rounds too; INT8 has no corrections here.
        assert variant.parts[task]["difference"] > (-0.003 if "all FP16" in variant.titles else -0.1)


@pytest.mark.parametrize("task", TASKS)
def test_ranges_that_clip_are_seen_in_every_part(task, measured, calibration, tmp_path):
    reference = exact(task, measured)
    bundle = built(tmp_path, task, calibration, effort="none", rule="percentile:97")
    lost = part_scores(evaluate(Detector.open(bundle.path), measured), reference)[task]
    assert lost["high"] < -0.2
