"""Sweeps along the number of proposals of a two-stage detector."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trtdet import CalibrationOptions, SweepOptions, load_config, sweep
from trtdet.config import Config
from trtdet.demo import shapes
from trtdet.errors import ConfigError
from trtdet.exporter import SHAPES_MODEL
from trtdet.report.sections.fronts import sweep_section, variant_title

MODEL = Path(__file__).parents[1] / "fixtures" / "two_stage" / "faster_dynamo.onnx"
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
def options(tmp_path: Path) -> SweepOptions:
    images = shapes.generate(tmp_path / "data", "calibration", 2).images
    split = shapes.generate(tmp_path / "data", "val", 3)
    return SweepOptions(
        CalibrationOptions(images=images),
        split.images,
        split.annotations,
        corrections=((),),
        backend="onnxruntime",
        rpn_pre_nms_topk=(10, 1000, 2000),
    )


@pytest.mark.slow
def test_fewer_proposals_have_their_recall_and_their_latency(options: SweepOptions, tmp_path: Path) -> None:
    done = sweep(MODEL, CONFIG, tmp_path / "sweep", options)
    rows = {(row["precision"], row["rpn_pre_nms_topk"]): row for row in done.rows}
    assert list(rows) == [(kind, most) for most in (10, 1000, 2000) for kind in ("FP32", "INT8")]
    few, many = rows["FP32", 10], rows["FP32", 1000]
    assert few["proposals"] <= 50 < many["proposals"] <= 1000
    assert few["ar1000"] == few["ar100"]
    assert few["ar1000"] < many["ar1000"] <= 1
    assert few["latency_ms"] < many["latency_ms"]
    assert "onnxruntime" in few["timed_on"]
    # The model has 1000 at most, so that more are the same network.
    assert many["same_as"] == "FP32, 2000 anchors a level"
    assert rows["INT8", 2000]["same_as"].endswith("1000 anchors a level")
    assert all(row["difference"] == pytest.approx(row["map"] - many["map"], abs=1e-12) for row in done.rows)
    assert {path.name for path in done.folder.glob("histograms*")} == {
        f"histograms-{most}-all.npz" for most in (10, 1000, 2000)
    }
    lines = done.markdown().splitlines()
    assert lines[0].startswith("| anchors a level | proposals at most | proposals | AR@100 | AR@1000 | precision |")
    drawn = sweep_section(done.rows).parts[1]
    assert [trace["name"] for trace in drawn.traces[:3]] == ["mAP, FP32", "AR@100, FP32", "AR@1000, FP32"]
    assert drawn.traces[2]["text"] == ["10 / all", "1000 / all", "2000 / all"]
    assert len({variant_title(row) for row in done.rows}) == len(done.rows)
    assert variant_title(few) == "FP32, 10 anchors a level"
    assert sweep(MODEL, CONFIG, tmp_path / "sweep", options).rows == done.rows


def test_a_detector_of_one_stage_is_refused(options: SweepOptions, tmp_path: Path) -> None:
    config = load_config("shapes")
    with pytest.raises(ConfigError, match=r"--rpn-pre-nms-topk is for two-stage detectors, and '.*' aligns no regions"):
        sweep(SHAPES_MODEL, config, tmp_path / "one", options)
    with pytest.raises(ConfigError, match="--rpn-post-nms-topk 0: allowed is 1 or more"):
        sweep(MODEL, CONFIG, tmp_path / "none", replace(options, rpn_pre_nms_topk=(), rpn_post_nms_topk=(0,)))
    assert not (tmp_path / "one").exists()
