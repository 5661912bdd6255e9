"""Sweeps over the number of proposals of a two-stage detector."""

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import RCNN

from trtdet import load_config, sweep, tune
from trtdet.backends import choose
from trtdet.building.ranges import select_images
from trtdet.building.variants import variant_options
from trtdet.config import Config
from trtdet.data import CocoDataset
from trtdet.demo import shapes
from trtdet.errors import ConfigError, TrtdetWarning
from trtdet.evaluation.comparison import spread_text
from trtdet.experiments import grid
from trtdet.experiments.experiment import Experiment
from trtdet.exporter import SHAPES_MODEL
from trtdet.options import BuildOptions, CalibrationOptions, PlanOptions, SweepOptions, TuneOptions, changed
from trtdet.progress import silent
from trtdet.report.sections.fronts import experiment_section

FIXTURES = Path(__file__).parents[1] / "fixtures"
MODEL, WITH_MASKS = FIXTURES / "two_stage" / "faster_dynamo.onnx", FIXTURES / "shapes_rcnn" / "mask_trace.onnx"
CONFIG = Config.model_validate(
    {
        "name": "two-stage",
        "classes": list(shapes.CLASSES),
        "input": {"size": [128, 128]},
        "head": {"decode": "detections"},
        "nms": "none",
    }
)


@pytest.fixture
def options(tmp_path):
    images = shapes.generate(tmp_path / "data", "calibration", 2).images
    split = shapes.generate(tmp_path / "data", "val", 3)
    return SweepOptions(
        calibration=CalibrationOptions(images=images),
        efforts=("none",),
        backend="onnxruntime",
        rpn_pre_nms_topk=(10, 1000, 2000),
        plan=PlanOptions(val_images=split.images, annotations=split.annotations),
    )


@pytest.fixture
def with_masks(options, tmp_path):
    split = shapes.generate(tmp_path / "more", "val", 8)
    return changed(
        options, val_images=split.images, annotations=split.annotations, int8_all=True, rpn_pre_nms_topk=(50,)
    )


@pytest.mark.slow
def test_fewer_proposals_have_their_recall_and_their_latency(options, tmp_path):
    done = sweep(MODEL, CONFIG, tmp_path / "sweep", options)
    rows = {(row.axes["precision"], row.proposals["before"]): row for row in done.variants}
    assert list(rows) == [(kind, most) for most in (10, 1000, 2000) for kind in ("FP32", "INT8")]
    few, many = rows["FP32", 10], rows["FP32", 1000]
    assert few.proposals["proposals"] <= 50 < many.proposals["proposals"] <= 1000
    assert few.proposals["ar1000"] == few.proposals["ar100"]
    assert few.proposals["ar1000"] < many.proposals["ar1000"] <= 1
    assert few.latency_ms < many.latency_ms
    assert "onnxruntime" in few.device
    # The model has 1000 at most, so that more are the same network.
    assert many.same_as == "FP32, 2000 anchors a level"
    assert rows["INT8", 2000].same_as.endswith("1000 anchors a level")
    assert all(row.difference == pytest.approx(row.map - many.map, abs=1e-12) for row in done.variants)
    assert {path.name for path in done.folder.glob("histograms*")} == {
        f"histograms-{most}-all.npz" for most in (10, 1000, 2000)
    }
    lines = done.markdown().splitlines()
    assert lines[0].startswith("| variant | anchors a level | precision |") and "| AR@100 | AR@1000 |" in lines[0]
    drawn = next(part for part in experiment_section(done).parts[2:] if hasattr(part, "traces"))
    assert [trace["name"] for trace in drawn.traces[:3]] == ["mAP, FP32", "AR@100, FP32", "AR@1000, FP32"]
    assert drawn.traces[2]["text"] == ["10 / all", "1000 / all", "2000 / all"]
    assert len({row.title for row in done.variants}) == len(done.variants)
    assert few.title == "FP32, 10 anchors a level"
    config = variant_options(done.folder, few.number, CONFIG)[1]
    assert config.head.rpn_pre_nms_topk == 10
    assert sweep(MODEL, CONFIG, tmp_path / "sweep", options).variants == done.variants
    assert not any(row.parts for row in done.variants) and "mask mAP" not in done.markdown()


@pytest.mark.slow
def test_a_detector_with_masks_has_their_score_in_each_row(with_masks, tmp_path):
    done = sweep(WITH_MASKS, RCNN, tmp_path / "sweep", with_masks)
    best, rough = done.variants
    exact, changed_to = best.parts["masks"], rough.parts["masks"]
    assert exact == {"map": exact["map"], "difference": 0, "low": None, "high": None}
    assert 0.2 < exact["map"] != best.map
    assert changed_to["map"] - exact["map"] == changed_to["difference"] != 0
    assert changed_to["low"] <= changed_to["difference"] <= changed_to["high"]
    header, _, first, *_ = done.markdown().splitlines()
    assert "| mask mAP | masks against FP32 |" in header
    assert first.split("|")[header.split("|").index(" mask mAP ")] == f" {100 * exact['map']:.2f} "
    drawn, proposals = (part for part in experiment_section(done).parts if hasattr(part, "traces"))
    tips = [tip for trace in drawn.traces for tip in trace["hovertext"]]
    assert any(f"mask mAP {100 * exact['map']:.2f}" in tip for tip in tips)
    assert [trace["name"] for trace in proposals.traces].index("mask mAP, FP32") == 3
    assert proposals.traces[3]["y"] == [100 * exact["map"]]
    assert sweep(WITH_MASKS, RCNN, tmp_path / "sweep", with_masks).variants == done.variants


@pytest.mark.slow
def test_masks_that_no_engine_of_a_sweep_can_give_are_said(with_masks, tmp_path, monkeypatch):
    caps = replace(choose("onnxruntime").capabilities, missing_ops=("NonZero",))
    monkeypatch.setattr(grid, "choose", lambda name: SimpleNamespace(capabilities=caps))
    dataset = CocoDataset.load(with_masks.plan.annotations, with_masks.plan.val_images, RCNN.classes)
    selected = select_images(with_masks.calibration)
    swept = grid.SweepGrid(WITH_MASKS, RCNN, tmp_path, options=with_masks, selected=selected, dataset=dataset)
    with pytest.warns(TrtdetWarning, match="cut_masks: masks: left out: where no shape may depend on the image"):
        grid.save_histograms(swept, silent)


@pytest.mark.slow
def test_a_front_of_a_detector_with_masks_has_their_score(with_masks, tmp_path):
    plan = replace(with_masks.plan, int8_all=False, rank_images=1)
    built = BuildOptions(effort="none", backend="onnxruntime", calibration=with_masks.calibration, plan=plan)
    asked = TuneOptions(build=built, points=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # of the few images
        found = tune(WITH_MASKS, RCNN, tmp_path / "tuned", asked)
    assert all(point.parts["masks"]["low"] <= point.parts["masks"]["high"] for point in found.variants)
    assert any(point.parts["masks"]["difference"] != point.difference for point in found.variants)
    assert Experiment.load(found.folder / "experiment.json").variants == found.variants
    assert spread_text(found.variants[0].parts["masks"]) in found.markdown()


def test_a_detector_of_one_stage_is_refused(options, tmp_path):
    config = load_config("shapes")
    with pytest.raises(
        ConfigError, match=r"--set head\.rpn_pre_nms_topk is for two-stage detectors, and '.*' aligns no regions"
    ):
        sweep(SHAPES_MODEL, config, tmp_path / "one", options)
    with pytest.raises(ConfigError, match="head.rpn_post_nms_topk must be at least 1, got 0"):
        sweep(MODEL, CONFIG, tmp_path / "none", changed(options, rpn_pre_nms_topk=(), rpn_post_nms_topk=(0,)))
    assert not (tmp_path / "one").exists()
