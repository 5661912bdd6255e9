"""Reports of what commands left behind: what is told, and what is said to be missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import SMALL_MODEL
from once import Once
from report_pages import Page
from test_front_page import POINTS, front

from trtdet import BuildOptions, CalibrationOptions, KeepOptions, build, load_config
from trtdet.cli import main
from trtdet.demo import shapes
from trtdet.errors import ConfigError
from trtdet.report import page, report
from trtdet.report.sections.verdicts import _next

RANKED = 3


@pytest.fixture(scope="module")
def bundle(once: Once) -> Path:
    """A bundle with a ranking, for onnxruntime."""

    def make(folder: Path) -> None:
        images = shapes.generate(folder, "calibration", 4).images
        calibration = CalibrationOptions("minmax", images=images)
        keep = KeepOptions(RANKED, num_images=1)
        options = BuildOptions(calibration=calibration, correct=(), backend="onnxruntime", keep=keep, int8_all=True)
        build(SMALL_MODEL, load_config("shapes"), folder / "b", options)

    return once("reported", make) / "b"


def scores(bundle: Path, difference: float = -0.01) -> dict[str, Any]:
    """What ``trtdet eval --against`` writes."""
    own = {"map": 0.4 + difference, "map50": 0.6, "map75": 0.4, "map_small": None, "map_medium": 0.3, "map_large": 0.5}
    own |= {"images": 20, "per_class": {"circle": 0.3, "square": 0.5, "star": None}}
    threshold = {"reference": 0.25, "threshold": 0.22, "low": 0.2, "high": 0.24, "problem": None}
    ratio = {"median": 0.98, "low": 0.97, "high": 0.99, "pairs": 31}
    against = {
        "file": "model.onnx",
        "ran_on": "a CPU",
        "map": 0.4,
        "difference": difference,
        "low": difference - 0.005,
        "high": difference + 0.005,
        "confidence": 0.9,
        "images": 20,
        "verdict": "a loss",
        "scores": {**own, "map": 0.4, "per_class": {"circle": 0.35, "square": 0.45, "star": None}},
        "score_shift": {"basis": "precision", "overall": [threshold], "score_ratio": ratio},
    }
    return {**own, "file": str(bundle / "int8.onnx"), "ran_on": "a CPU", "nms": "host", "against": against}


def test_a_bundle_is_told_with_what_it_was_not_measured_for(bundle: Path) -> None:
    found = report([bundle])
    assert found.verdict == (
        "b: 8 convolutions in INT8, 3 in FP16, 0 in FP32 as planned, not audited.",
        "b: not in INT8: 3 among the most sensitive that --keep-fp16 asked for.",
        f"b: next: trtdet eval {bundle} --against MODEL --images DIR --annotations JSON, as what INT8 cost in mAP was "
        "not measured.",
    )
    titles = [section.title for section in found.sections]
    assert titles == [
        *("Figures", "Sensitivity by layer", "Histograms and thresholds", "Layers as drawn", "Plan", "Reproduce"),
    ]
    whats = [one.what for one in found.missing]
    assert whats == [
        "mAP, its differences by class and size, and the shift of scores",
        "which blocks carry the error",
        "the audit of an engine",
        "the time against FP16",
    ]
    text = "".join(Page(page(found)).text)
    assert "among the most sensitive that --keep-fp16 asked for" in text
    assert all(one.how in text for one in found.missing)


@pytest.mark.parametrize(
    ("int8", "next_step"), [(0, "build with --fp16, or with --int8-all"), (5, "build with --guard")]
)
def test_a_guard_is_advised_where_there_is_something_to_guard(int8: int, next_step: str) -> None:
    run: Any = SimpleNamespace(
        bundle=SimpleNamespace(manifest=SimpleNamespace(input_check=None, shipped="int8")),
        audit=SimpleNamespace(int8=int8, fp8=0, departures=(), advice=()),
        worth={"speedup": 1.0},
        path="b",
    )
    assert next_step in [step for step, _ in _next(run, None)]
    assert ("build with --guard" in [step for step, _ in _next(run, None)]) == (int8 > 0)


def test_bars_stand_in_the_order_of_the_network_and_sorted(bundle: Path) -> None:
    traces = Page(page(report([bundle]))).traces[:4]
    ranking = json.loads((bundle / "sensitivity.json").read_text())["layers"]
    plan = json.loads((bundle / "plan.json").read_text())["entries"]
    ordered, ranked = traces[:2], traces[2:]
    for part, names in ((ordered, [*plan]), (ranked, [layer["name"] for layer in ranking])):
        placed = {place: tip for trace in part for place, tip in zip(trace["x"], trace["hovertext"], strict=True)}
        assert [placed[place].partition("<br>")[0] for place in sorted(placed)] == names
    assert {trace["name"]: len(trace["x"]) for trace in ranked} == {"FP16": RANKED, "INT8": len(plan) - RANKED}


def test_an_evaluation_is_told_with_its_bundle(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text(json.dumps(scores(bundle)))
    found = report([bundle, tmp_path / "eval.json"])
    assert found.verdict[0] == (
        "b: mAP 39.00 against 40.00 of model.onnx: -1.00 points (90 % interval -1.50 .. -0.50, 20 images): a loss."
    )
    assert found.verdict[1] == "b: shift of scores: a threshold of 0.220 serves as 0.25 did."
    sections = {section.title: section for section in found.sections}
    assert {"AP differences by class and size", "Shift of scores"} <= sections.keys()
    assert not any("mAP" in one.what for one in found.missing)
    (classes,) = (trace for trace in Page(page(found)).traces if "circle" in trace["x"])
    assert classes["x"] == ["circle", "square"] and classes["y"] == pytest.approx([-5.0, 5.0])
    assert "the loss of mAP is more than chance" in found.markdown()


def test_an_evaluation_of_something_else_is_told_by_itself(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text(json.dumps(scores(tmp_path / "other")))
    found = report([bundle, tmp_path / "eval.json"])
    assert {section.about for section in found.sections} == {"b", "eval.json"}
    assert found.verdict[-1].startswith("eval.json: mAP 39.00")


def test_tunes_sweeps_rankings_plans_and_profiles_are_read(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / "front.json").write_text(json.dumps(front(*POINTS).as_dict()))
    (tmp_path / "sweep").mkdir()
    start = {"precision": "FP32", "silu": "keep", "calibration": None, "corrections": None, "kept": None}
    row = {
        "variant": "fp32",
        **start,
        "nms": load_config("shapes").nms.model_dump(mode="json"),
        "map": 0.4,
        "map50": 0.6,
        "difference": 0.0,
        "low": None,
        "high": None,
        "int8": 0,
        "fp16": 0,
        "fp32": 11,
        "build_seconds": None,
        "engine_mb": None,
        "latency_ms": None,
        "kept_names": [],
    }
    int8 = {**row, "variant": "minmax", "precision": "INT8", "calibration": "minmax", "corrections": [], "kept": 0}
    rows = [row, {**int8, "map": 0.35, "difference": -0.05, "low": -0.06, "high": -0.04, "int8": 11, "fp32": 0}]
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(rows))
    found = report([tmp_path / "tune", tmp_path / "sweep", bundle / "sensitivity.json", bundle / "plan.json"])
    titles = [section.heading for section in found.sections]
    assert titles == [
        "Pareto front: tune",
        "Variants: sweep",
        "Sensitivity by layer: sensitivity.json",
        "Plan: plan.json",
    ]
    assert (
        "sweep: of 1 INT8 variants 'INT8 minmax, no corrections, SiLU keep' keeps most: mAP 35.00, -5.00 ("
        in found.verdict[2]
    )
    text = found.markdown()
    assert text.startswith("# Report of tune, sweep, sensitivity.json, plan.json\n")
    assert "| 1 | all INT8 |" in text and "- the latency of the variants of sweep: " in text
    assert "Sensitivity" not in text  # a pull request has no room for it


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "'{path}' does not exist; give a bundle"),
        ("[]", "'{path}' holds no JSON object; give a bundle"),
        ("{}", "'{path}' is no result that a report reads; give a bundle"),
        ("{", "'{path}' is not JSON"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(said.format(path=path))):
        report([path])


def test_a_folder_that_is_no_run_and_a_run_given_twice_are_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is the folder of no finished run"):
        report([tmp_path])
    with pytest.raises(ConfigError, match="a run is given twice"):
        report([bundle, bundle.parent / "." / "b"])


@pytest.mark.parametrize("name", ["r.html", "r.md", "r.json"])
def test_the_command_writes_what_the_name_says(
    bundle: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(bundle), "-o", str(tmp_path / name)]) == 0
    text = (tmp_path / name).read_text()
    assert f"wrote {tmp_path / name} (" in capsys.readouterr().out
    assert text.startswith({".html": "<!doctype html>", ".md": "# Report of b", ".json": "{"}[Path(name).suffix])
    assert main(["report", str(bundle), "-o", str(tmp_path / "other"), "--format", "json", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {"report": str(tmp_path / "other"), **json.loads((tmp_path / "other").read_text())} == printed
