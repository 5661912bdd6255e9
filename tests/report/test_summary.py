"""The first screen of bundles: whether each can ship, and the figures, bars and table behind the answer."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_pages import Page
from test_report import scores

from trtdet.bundle import Bundle
from trtdet.report import page, report
from trtdet.report.charts import rectangles
from trtdet.report.document import LayerBar, LayerBars, Report
from trtdet.report.runs import Run, attached, named_apart, read_run
from trtdet.report.summary import Speed, answer_of, scores_of, speed_of

FAST = Speed(1.6, low=1.4, high=1.9, against="FP16", how="measured", basis="an L4, batch 1")
SLOW, UNCLEAR = replace(FAST, low=0.5, high=0.9), replace(FAST, low=0.9)


def write(path: Path, plain: Any) -> Path:
    path.write_text(json.dumps(plain))
    return path


def evaluated(bundle: Path, difference: float, half: float = 0.0005) -> Run:
    plain = scores(bundle, difference)
    plain["against"] |= {"low": difference - half, "high": difference + half}
    return replace(read_run(bundle), scores=plain)


def benchmark(file: Path) -> dict[str, Any]:
    """What ``trtdet bench`` writes of a baseline and one target, 0.5 times its time."""
    latency = {"mean": 2.0, "stddev": 0.1, "p50": 2.0, "p95": 2.2}
    point = {"batch": 1, "latency_ms": latency, "ratio": None, "throughput": [{"images_per_second": 500.0}]}
    timed = {**point, "ratio": {"value": 0.5, "low": 0.4, "high": 0.625}}
    baseline = {"name": "model.onnx", "file": "model.onnx", "ran_on": "a CPU", "points": [point]}
    target = {"name": "b", "file": str(file), "ran_on": "a CPU", "points": [timed]}
    return {"targets": [baseline, target], "baseline": "model.onnx", "rounds": 20, "warnings": ["it was busy"]}


def profile(file: Path, *names: str) -> dict[str, Any]:
    """What ``trtdet profile`` writes, where each convolution takes a millisecond."""
    layers = [
        {"name": name, "type": "Conv", "onnx": [name], "part": "", "ms": 1.0, "stddev": 0.1, "count": 1, "share": 0.5}
        for name in names
    ]
    shares = [{"name": "Conv", "ms": 2.0, "stddev": 0.2, "count": 2, "share": 1.0}]
    plain = {"name": "b", "file": str(file), "ran_on": "a CPU", "batch": 1, "runs": 5, "sum_ms": 2.0, "overhead": 0.0}
    latency = {"mean": 2.0, "stddev": 0.1}
    return {**plain, "latency_ms": latency, "types": shares, "parts": [], "layers": layers, "warnings": []}


@pytest.mark.parametrize(
    ("difference", "half", "speed", "answer", "reason"),
    [
        (0.0, 0.0005, FAST, "Yes", "no loss is shown; INT8 is 1.60 times as fast as FP16 (1.40 .. 1.90), measured"),
        (-0.002, 0.004, FAST, "If acceptable", "up to 0.60 points of mAP may be lost"),
        (-0.05, 0.01, FAST, "If acceptable", "5.00 points of mAP are lost (4.00 .. 6.00)"),
        (0.0, 0.0005, UNCLEAR, "Not known yet", "INT8 is 1.60 times as fast as FP16 (0.90 .. 1.90)"),
        (0.0, 0.0005, None, "Not known yet", "the speed against FP16 was not measured"),
        (0.0, 0.0005, SLOW, "No", "INT8 is 1.60 times as fast as FP16 (0.50 .. 0.90)"),
    ],
)
def test_the_answer_follows_from_accuracy_and_speed(bundle, difference, half, speed, answer, reason):
    run = evaluated(bundle, difference, half)
    given, why, tone = answer_of(run, scores_of(run), speed)
    assert given == answer and why.startswith(reason)
    assert tone == {"Yes": "good", "No": "bad"}.get(answer, "bad" if difference < -0.01 else "open")


def test_what_was_not_measured_leaves_the_answer_open(bundle):
    run = read_run(bundle)
    assert answer_of(run, [], FAST) == ("Not known yet", "accuracy was not measured", "open")
    assert speed_of(run) is None


def test_a_score_without_a_reference_shows_no_loss(bundle):
    run = evaluated(bundle, 0.0)
    alone = replace(run, scores={key: value for key, value in (run.scores or {}).items() if key != "against"})
    (score,) = scores_of(alone)
    assert (score.value, score.spread, score.basis) == (0.4, "", "20 images")
    assert answer_of(alone, [score], FAST) == ("Not known yet", "the difference of mAP was not measured", "open")


@pytest.mark.parametrize("masks", [False, True])
def test_agreement_is_no_loss_of_map(bundle, masks):
    run = evaluated(bundle, 0.0)
    agreement = {"ap": 0.95, "low": 0.94, "high": 0.96}
    against = {"file": "model.onnx", "agreement": agreement}
    against |= {"agreement_of_parts": {"masks": agreement}} if masks else {}
    unannotated = replace(run, scores={**(run.scores or {}), "map": None, "against": against})
    found = scores_of(unannotated)
    assert [score.name for score in found] == ["Agreement", "Agreement of masks"][: 1 + masks]
    assert found[-1].basis == "90 % interval 94.00 .. 96.00, model.onnx, 20 images"
    assert answer_of(unannotated, found, FAST)[0] == "Not known yet"


def test_a_reference_that_finds_nothing_shows_no_loss(bundle):
    run = evaluated(bundle, 0.0)
    plain = {**(run.scores or {}), "map": 0.0}
    run = replace(run, scores={**plain, "against": {**plain["against"], "map": 0.0}})
    (score,) = scores_of(run)
    assert answer_of(run, [score], FAST) == ("Not known yet", "mAP is 0.00: a loss could not show", "open")
    assert score.spread == "+0.00 (-0.05 .. +0.05)"


def test_masks_stand_beside_fp32s_and_count_for_the_answer(bundle, tmp_path):
    plain = scores(bundle, 0.0)
    plain["against"] |= {"low": -0.0005, "high": 0.0005}
    own = {"map": 0.3, "map50": 0.5, "map75": 0.3}
    plain["masks"] = own
    plain["against"]["masks"] = {"map": 0.35, "difference": -0.05, "low": -0.06, "high": -0.04}
    plain["against"]["masks"] |= {"scores": {**own, "map": 0.35}, "verdict": "a loss"}
    found = report([bundle, write(tmp_path / "eval.json", plain)])
    (summary,) = found.summaries
    tile = summary.tiles_by_title["mask mAP"]
    assert (tile.value, tile.change) == ("30.00", "-5.00 (-6.00 .. -4.00)")
    assert tile.basis == "against 35.00 of model.onnx, 20 images"
    assert "5.00 points of mask mAP are lost (4.00 .. 6.00)" in summary.reason
    assert "figure of masks" in page(found)


def test_a_sensitivity_that_is_given_with_a_bundle_is_the_bundles(bundle, tmp_path):
    copy = Bundle(shutil.copytree(bundle, tmp_path / "c"))
    manifest = json.loads((copy.path / "manifest.json").read_text())
    del manifest["files"]["sensitivity.json"]
    write(copy.path / "manifest.json", manifest)
    ranking = shutil.copy(copy.path / "sensitivity.json", tmp_path / "sensitivity.json")
    assert "sensitivity by layer" in [one.what for one in report([copy.path]).missing]
    found = report([copy.path, ranking])
    assert "Sensitivity by layer" in [section.title for section in found.sections]
    assert "sensitivity by layer" not in [one.what for one in found.missing]
    assert found.title == "Report of c" and found.sentences == ()
    # One of another network is a run of its own.
    plain = json.loads(Path(ranking).read_text())
    plain["layers"][0]["name"] = "another"
    write(tmp_path / "sensitivity.json", plain)
    assert [section.about for section in report([copy.path, ranking]).sections][-1] == "sensitivity.json"


def test_times_are_measured_only_where_they_are_of_what_ships(bundle, tmp_path):
    shipped, names = Bundle(bundle).model, [bar.tip.partition(":")[0] for bar in bars_of(bundle)[:2]]
    times = write(tmp_path / "profile.json", profile(shipped, *names))
    bench = write(tmp_path / "bench.json", benchmark(shipped))
    (summary,) = report([bundle, times, bench]).summaries
    speed = summary.tiles_by_title["Speed-up"]
    assert (speed.value, speed.change, speed.how) == ("2.00x", "(1.60 .. 2.50)", "measured")
    assert summary.times is not None and "measured" in summary.times.note
    assert [(bar.size, bar.precision) for bar in summary.times.bars] == [
        (1.0, bar.precision) for bar in bars_of(bundle)[:2]
    ]
    assert "benchmark: it was busy" in summary.warnings
    write(times, profile(bundle / "portable.onnx", *names))
    write(bench, benchmark(bundle / "portable.onnx"))
    found = report([bundle, times, bench])
    assert found.summaries[0].times is None and found.summaries[0].tiles_by_title["Speed-up"].value == "-"
    assert "the time of the engine" in [one.what for one in found.missing]
    assert {"Benchmark", "Profile of b"} <= {section.title for section in found.sections}


def bars_of(bundle: Path) -> tuple[LayerBar, ...]:
    return report([bundle]).summaries[0].network.bars


def test_a_benchmark_of_no_bundle_is_a_run_of_its_own(tmp_path):
    found = report([write(tmp_path / "bench.json", benchmark(tmp_path / "model.onnx"))])
    (section,) = found.sections
    assert (section.title, section.folded) == ("Benchmark", False)
    assert "0.50 (0.40 .. 0.62)" in page(found)


def test_the_bar_of_the_network_has_the_share_that_the_tile_says(bundle):
    (summary,) = report([bundle]).summaries
    shares = summary.network.shares()
    assert set(shares) == {"int8", "fp16"} and sum(shares.values()) == pytest.approx(1.0)
    tile = summary.tiles_by_title["In INT8"]
    assert (tile.value, tile.change) == (f"{100 * shares['int8']:.1f} %", "8 of 11 convolutions")
    drawn = rectangles(summary.network, 0.0)
    assert drawn[-1].x + drawn[-1].width == pytest.approx(1000.0, abs=1.0)
    assert [one.precision for one in drawn] == [bar.precision for bar in summary.network.bars]


def test_columns_are_as_high_as_their_share_of_the_longest():
    chart = LayerBars("t", (LayerBar("a", "int8", 1.0), LayerBar("b", "", 4.0)), "ms", "n", columns=True)
    short, long = rectangles(chart, 8.0)
    assert (short.height, short.y, long.height, long.y) == (12.5, 87.5, 50.0, 50.0)
    assert (short.x, long.x) == (0.0, 500.0)


@pytest.fixture
def several(bundle, tmp_path):
    """Reports two bundles of the same folder name, one of which was scored."""
    other = shutil.copytree(bundle, tmp_path / "b")
    return report([bundle, other, write(tmp_path / "eval.json", scores(other))])


def test_bundles_stand_side_by_side_in_one_table_and_are_folded(several: Report):
    found, text = Page(page(several)), page(several)
    assert several.overview is not None and len(several.overview.rows) == 2
    names = [summary.name for summary in several.summaries]
    assert len({*names}) == 2 and all(name.endswith("/b") for name in names)
    assert several.markdown().count("| can it ship? |") == 1
    assert [tag for tag, given in found.seen if tag == "details" and "open" in given] == []
    assert text.count('<details class="run">') == 2
    assert "39.00" in "".join(found.text)


def test_a_page_is_the_same_each_time_loads_nothing_and_escapes_names(bundle, tmp_path):
    other = shutil.copytree(bundle, tmp_path / "<i>&b")
    paths = [bundle, other, write(tmp_path / "eval.json", scores(other))]
    text = page(report(paths))
    assert text == page(report(paths))
    assert "details[open]>summary" in text, "the style is no text to escape"
    found = Page(text)
    assert found.loaded == []
    assert not {tag for tag, _ in found.seen} & {"i", "link", "iframe", "img"}
    assert "<i>&b" in "".join(found.text)


def test_runs_are_named_by_as_much_of_their_path_as_tells_them_apart():
    runs = [Run(Path(path)) for path in ("/a/x/bundle", "/a/y/bundle", "/a/y/other")]
    assert [run.name for run in named_apart(runs)] == ["x/bundle", "y/bundle", "other"]


def test_a_second_evaluation_of_a_bundle_stays_a_run(bundle, tmp_path):
    runs = [read_run(bundle)]
    runs += [read_run(write(tmp_path / name, scores(bundle))) for name in ("first.json", "second.json")]
    assert [run.path.name for run in attached(runs)] == ["b", "second.json"]
