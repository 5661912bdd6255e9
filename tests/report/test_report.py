"""Reports of what commands left behind: what is told, and what is said to be missing."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_pages import Page
from test_front_page import POINTS, front, point, swept

from trtdet.bundle import Bundle
from trtdet.cli import main
from trtdet.errors import BundleError, ConfigError, ModelError
from trtdet.plans.scores import Sensitivity
from trtdet.quantization import PrecisionPlan
from trtdet.report import page, pages, report
from trtdet.report.document import Chart
from trtdet.report.sections.layers import sensitivity_section
from trtdet.report.sections.verdicts import next_steps


def scores(bundle: Path, difference: float = -0.01) -> dict[str, Any]:
    """What ``trtdet eval --against`` writes."""
    own = {"map": 0.4 + difference, "map50": 0.6, "map75": 0.4, "map_small": None, "map_medium": 0.3, "map_large": 0.5}
    own |= {"images": 20, "per_class": {"circle": 0.3, "square": 0.5, "star": None}}
    threshold = {"reference": 0.25, "threshold": 0.22, "low": 0.2, "high": 0.24, "problem": None}
    ratio = {"median": 0.98, "low": 0.97, "high": 0.99, "pairs": 31}
    against = {"file": "model.onnx", "ran_on": "a CPU", "map": 0.4, "images": 20, "verdict": "a loss"}
    against |= {"difference": difference, "low": difference - 0.005, "high": difference + 0.005, "confidence": 0.9}
    against["scores"] = {**own, "map": 0.4, "per_class": {"circle": 0.35, "square": 0.45, "star": None}}
    against["score_shift"] = {"basis": "precision", "overall": [threshold], "score_ratio": ratio}
    return {**own, "file": str(bundle / "int8.onnx"), "ran_on": "a CPU", "nms": "host", "against": against}


def test_a_bundle_is_told_with_what_it_was_not_measured_for(bundle):
    found = report([bundle])
    assert found.verdict == (
        "b: can it ship? Not known yet: accuracy was not measured; the speed against FP16 was not measured.",
        f"b: next: trtdet eval {bundle} --against MODEL --images DIR --annotations JSON: what INT8 cost in mAP was not "
        "measured.",
    )
    titles = [
        "Figures, and what is not in INT8",
        "Sensitivity by layer",
        "Histograms and thresholds",
        "Layers as drawn",
        "Plan",
        "Reproduce",
    ]
    assert [section.title for section in found.sections] == titles
    assert [one.what for one in found.missing] == [
        "mAP, its differences by class and size, and the shift of scores",
        "the audit of an engine",
        "the time against FP16",
    ]
    text = "".join(Page(page(found)).text)
    for said in ("8 INT8, 3 FP16, 0 FP32", "as planned, not audited", *(one.how for one in found.missing)):
        assert said in text
    kept = PrecisionPlan.load(bundle / "plan.json").names("fp16")
    assert f"| FP16 | 3 | among the most sensitive that --keep-fp16 asked for | {', '.join(kept)} |" in found.markdown()


@pytest.mark.parametrize(
    ("int8", "next_step"), [(0, "build with --fp16, or with --int8-all"), (5, "build with --guard")]
)
def test_a_guard_is_advised_where_there_is_something_to_guard(int8, next_step):
    run: Any = SimpleNamespace(
        bundle=SimpleNamespace(manifest=SimpleNamespace(input_check=None, shipped="int8", candidates=())),
        audit=SimpleNamespace(int8=int8, fp8=0, departures=(), advice=()),
        worth={"speedup": 1.0},
        scores=None,
        path="b",
    )
    steps = [step for step, _ in next_steps(run)]
    assert next_step in steps
    assert ("build with --guard" in steps) == (int8 > 0)


def test_bars_stand_in_the_order_of_the_network_or_sorted_where_none_is_known(bundle):
    plan = PrecisionPlan.load(bundle / "plan.json")
    ranking = Sensitivity.load(bundle / "sensitivity.json")
    unplaced = replace(ranking, layers=tuple(replace(layer, place=0) for layer in ranking.layers))
    for scores, names in ((ranking, [*plan.entries]), (unplaced, [layer.name for layer in ranking.layers])):
        _, bars, _ = sensitivity_section(scores, plan).parts
        assert isinstance(bars, Chart)
        placed = {place: tip for bar in bars.traces for place, tip in zip(bar["x"], bar["hovertext"], strict=True)}
        assert [placed[place].partition("<br>")[0] for place in sorted(placed)] == names
        kinds = {trace["name"]: len(trace["x"]) for trace in bars.traces}
        assert kinds == {"FP16": 3, "INT8": len(names) - 3}


def test_an_evaluation_is_told_with_its_bundle(bundle, tmp_path):
    (tmp_path / "eval.json").write_text(json.dumps(scores(bundle)))
    found = report([bundle, tmp_path / "eval.json"])
    assert found.verdict[0].startswith("b: can it ship? Not known yet: ")
    assert found.verdict[1] == (
        "b: mAP 39.00 against 40.00 of model.onnx: -1.00 points (90 % interval -1.50 .. -0.50, paired bootstrap over "
        "20 images, a CPU): a loss."
    )
    assert found.verdict[2] == "b: shift of scores: a threshold of 0.220 serves as 0.25 did."
    sections = {section.title: section for section in found.sections}
    assert {"AP differences by class and size", "Shift of scores"} <= sections.keys()
    assert not any("mAP" in one.what for one in found.missing)
    (classes,) = (trace for trace in Page(page(found)).traces if "circle" in trace["x"])
    assert classes["x"] == ["circle", "square"] and classes["y"] == pytest.approx([-5.0, 5.0])
    assert "the loss of mAP is more than chance" in found.markdown()
    # An evaluation of something else is told by itself.
    (tmp_path / "eval.json").write_text(json.dumps(scores(tmp_path / "other")))
    found = report([bundle, tmp_path / "eval.json"])
    assert {section.about for section in found.sections} == {"b", "eval.json"}
    assert found.verdict[-1].startswith("eval.json: mAP 39.00")


def test_tunes_sweeps_rankings_plans_and_profiles_are_read(bundle, tmp_path):
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / "experiment.json").write_text(json.dumps(front(*POINTS).as_dict()))
    (tmp_path / "sweep").mkdir()
    rows = (point("FP32", 0.0, 0.0), point("INT8 minmax", 0.0, -0.05))
    replace(swept(*rows), folder=tmp_path / "sweep").save()
    found = report([tmp_path / "tune", tmp_path / "sweep", bundle / "sensitivity.json", bundle / "plan.json"])
    titles = [section.heading for section in found.sections]
    assert titles == [
        "Accuracy-speed trade-offs: tune",
        "Accuracy-speed trade-offs: sweep",
        "Sensitivity by layer: sensitivity.json",
        "Plan: plan.json",
    ]
    assert "sweep: 1 of 2 variants are Pareto-optimal" in found.verdict[2]
    text = found.markdown()
    assert text.startswith("# Report of tune, sweep, sensitivity.json, plan.json\n")
    assert "| 1 | all INT8 |" in text and "- the latency of the variants of sweep: " in text
    assert "Sensitivity" not in text  # a pull request has no room for it


def test_what_is_no_run_and_a_run_given_twice_are_refused(bundle, tmp_path):
    path = tmp_path / "run.json"
    for content, words in (
        (None, "does not exist; give a bundle"),
        ("[]", "holds no JSON object; give a bundle"),
        ("{}", "is no result that a report reads; give a bundle"),
        ("{", "is not JSON"),
    ):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=re.escape(f"'{path}' {words}")):
            report([path])
    with pytest.raises(ConfigError, match="is the folder of no finished run"):
        report([tmp_path])
    with pytest.raises(ConfigError, match="a run is given twice"):
        report([bundle, bundle.parent / "." / "b"])


@pytest.mark.parametrize("name", ["r.html", "r.md", "r.json"])
def test_the_command_writes_what_the_name_says(bundle, tmp_path, name, capsys):
    assert main(["report", str(bundle), "-o", str(tmp_path / name)]) == 0
    text = (tmp_path / name).read_text()
    assert f"wrote {tmp_path / name} (" in capsys.readouterr().out
    assert text.startswith({".html": "<!doctype html>", ".md": "# Report of b", ".json": '{\n "'}[Path(name).suffix])
    assert main(["report", str(bundle), "-o", str(tmp_path / "other"), "--format", "json", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {"report": str(tmp_path / "other"), **json.loads((tmp_path / "other").read_text())} == printed


def test_a_bundle_without_its_configuration_is_refused(bundle, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["command"]["config"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="lacks the configuration that the bundle was built with; build it again"):
        report([copy])


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("map",), "much", "'map': input should be a valid number"),
        (("per_class",), ["a"], "'per_class': input should be a valid dictionary"),
        (("against", "scores", "map50"), [], "'against.scores.map50': "),
        (("against", "difference"), None, "'difference': "),
        (("against", "masks"), {"map": 0.4}, "'masks.difference': field required"),
        (("against", "agreement"), {"ap": 0.9}, "has an 'ap' without the interval"),
        (("against", "score_shift", "overall"), {}, "'against.score_shift.overall': "),
        (("masks",), {"map": None}, "has a part without a 'map'"),
        (("file",), {}, "'file': input should be a valid string"),
    ],
)
def test_an_evaluation_that_lacks_what_is_reported_is_refused(bundle, tmp_path, keys, value, words):
    plain = scores(bundle)
    holder = plain
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = value
    path = tmp_path / "eval.json"
    path.write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match=re.escape(words)):
        report([path])


@pytest.mark.parametrize(
    "plain",
    [
        {"layers": [], "sum_ms": 1.0},
        {"layers": [{"name": "a"}], "sum_ms": 1.0},
        {"targets": [], "baseline": "a"},
        {"targets": [{"name": "a", "points": []}], "baseline": "a", "rounds": 3, "warnings": []},
    ],
)
def test_a_measurement_that_lacks_what_is_reported_is_refused(tmp_path, plain):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match="cannot be used .*; measure it again"):
        report([path])


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"comparison": {"map": 1}}'])
def test_a_bundle_with_a_damaged_comparison_is_refused(bundle, tmp_path, content):
    copy = Bundle(shutil.copytree(bundle, tmp_path / "copy"))
    copy.add("worth.json", content)
    with pytest.raises(BundleError, match="is no comparison with FP16"):
        report([copy.path])


@pytest.mark.parametrize("content", [b"", b"garbage" * 50])
def test_a_bundle_whose_model_is_not_onnx_is_refused(bundle, tmp_path, content):
    copy = Bundle(shutil.copytree(bundle, tmp_path / "copy"))
    copy.add("int8.onnx", content)
    with pytest.raises(ModelError, match="is not ONNX or is truncated"):
        report([copy.path])


def test_figures_of_a_page_that_are_not_finite_are_left_open():
    assert pages._finite({"y": [1.5, float("inf"), ("a", float("nan"))], "n": 2}) == {
        "y": [1.5, None, ["a", None]],
        "n": 2,
    }
