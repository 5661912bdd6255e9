"""The page of an experiment: whole, loading nothing, every variant drawn with its facts under the pointer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from report_pages import Page

from trtdet.errors import ConfigError
from trtdet.evaluation.comparison import PartScore
from trtdet.experiments.experiment import Experiment, Variant
from trtdet.report import experiment_page


def point(title: str, ms: float, difference: float, wide: float = 0.002, name: str = "") -> Variant:
    return Variant(
        name,
        titles=(title,),
        kept=("a",),
        counts={"int8": 3, "fp16": 1, "fp32": 0},
        weights=2_000_000,
        multiply_adds=5.0,
        map=0.3 + difference,
        reference=0.3,
        difference=difference,
        low=difference - wide,
        high=difference + wide,
        engine=3_000_000,
        error=0.01,
        estimated=ms,
    )


def front(*points: Variant, name: str = "net") -> Experiment:
    gpu = {"gpu": "L4", "batch": 1, "device": None}
    images = {"reference": 0.3, "calibration": 64, "reported": 188}
    return Experiment("tune", name, Path("tuned"), points, "latency", **gpu, **images).numbered()


def swept(*rows: Variant, name: str = "net") -> Experiment:
    """Where nothing was timed."""
    return replace(front(*rows, name=name), kind="sweep", gpu=None).numbered()


POINTS = (
    point("all INT8", 0.2, -0.2, 0.05),
    point("optimiser", 0.25, -0.01),
    point("optimiser", 0.3, -0.003),
    point("default", 0.35, -0.02),
    point("all FP16", 0.4, 0.0),
)


def test_the_page_is_whole_loads_nothing_and_escapes_names():
    text = experiment_page(front(*POINTS, name="<b>&net"))
    found = Page(text)
    assert not [tag for tag, _ in found.seen if tag in ("link", "img", "iframe", "b")]
    assert found.loaded == []
    assert "default-src 'none'" in text
    assert "prefers-color-scheme:dark" in text
    text = "".join(found.text)
    assert "Accuracy and speed of <b>&net" in text
    assert "<b>&net: 4 of 5 variants are Pareto-optimal, from 0.2 to 0.4 ms (estimate within 1.3x, L4, batch 1)" in text
    assert "the cheapest INT8 variant without a significant loss is 5 (all FP16) at 0.4 ms" in text


def test_every_point_is_drawn_with_its_facts_and_the_best_are_joined():
    made = front(*POINTS)
    best, dominated = Page(experiment_page(made)).traces
    assert best["mode"] == "lines+markers+text" and dominated["mode"] == "markers+text"
    assert (best["x"], dominated["x"], dominated["y"]) == ([0.2, 0.25, 0.3, 0.4], [0.35], pytest.approx([-2.0]))
    assert dominated["error_y"]["array"] == pytest.approx([0.2]) == dominated["error_y"]["arrayminus"]
    (tip,) = dominated["hovertext"]
    facts = "3 convolutions INT8, 1 FP16, 0 FP32<br>0.35 ms (estimate within 1.3x, L4, batch 1)<br>"
    assert tip.startswith(f"variant 4: default<br>{facts}")
    assert "mAP against FP32 -2.00 (-2.20 .. -1.80)" in tip
    assert tip.endswith("dominated by variant 2")
    assert "mask" not in made.markdown()


def test_the_table_gives_differences_in_points_with_their_sign():
    header, _, *rows = front(*POINTS).markdown().splitlines()
    place = [cell.strip() for cell in header.split("|")].index("against FP32")
    assert [row.split("|")[place].strip() for row in rows] == ["-20.00", "-1.00", "-0.30", "-2.00", "+0.00"]


def test_the_score_of_masks_stands_beside_that_of_boxes():
    masks: PartScore = {"map": 0.42, "difference": -0.001, "low": -0.003, "high": 0.002}
    made = front(replace(POINTS[0], parts={"masks": masks}), POINTS[4])
    header, _, *rows = made.markdown().splitlines()
    assert header.index("90 % interval") < header.index("masks against FP32") < header.index("predicted error")
    assert ["-0.10 (-0.30 .. +0.20)" in row for row in rows] == [True, False]
    tips = [tip for trace in Page(experiment_page(made)).traces for tip in trace["hovertext"]]
    assert ["<br>mask mAP 42.00, -0.10 (-0.30 .. +0.20)<br>" in tip for tip in tips] == [True, False]


def test_a_variant_is_as_good_as_what_it_loses_most():
    lost: PartScore = {"map": 0.3, "difference": -0.03, "low": -0.04, "high": -0.02}
    equal: PartScore = {"map": 0.33, "difference": 0.0, "low": -0.01, "high": 0.01}
    cheap, dear = (point("optimiser", ms, -0.001) for ms in (0.3, 0.4))
    assert [variant.dominated_by for variant in front(cheap, dear).variants] == [None, 1]
    made = front(replace(cheap, parts={"keypoints": lost}), replace(dear, parts={"keypoints": equal}))
    assert [variant.dominated_by for variant in made.variants] == [None, None]
    assert "keypoints against FP32" in made.markdown() and "-3.00 (-4.00 .. -2.00)" in made.markdown()
    text = "".join(Page(experiment_page(made)).text)
    assert "the cheapest INT8 variant without a significant loss is 2" in text
    assert "-0.10 (-0.30 .. +0.10), keypoints -3.00 (-4.00 .. -2.00) to " in text


def test_agreement_of_parts_stands_where_there_are_no_annotations():
    agreement: PartScore = {"map": None, "difference": -0.03, "low": -0.04, "high": -0.02}
    made = replace(front(replace(POINTS[0], parts={"rotated_boxes": agreement})), reference=None)
    assert "rotated boxes against FP32" in made.markdown() and "rotated mAP" not in made.markdown()
    (tip,) = (tip for trace in Page(experiment_page(made)).traces for tip in trace["hovertext"])
    assert "<br>agreement of rotated boxes against 100 -3.00 (-4.00 .. -2.00)<br>" in tip


def test_no_whisker_leaves_the_chart():
    made = front(point("all INT8", 0.5, -0.2, 0.3), *POINTS[1:])
    low, high = Page(experiment_page(made)).figures[0]["layout"]["yaxis"]["range"]
    assert low < -50.0 and high > 10.0


@pytest.mark.parametrize("points", [POINTS[:1], (POINTS[4], POINTS[4]), (point("all FP16", 0.0, 0.0, 0.0),)])
def test_a_front_of_a_single_place_is_drawn(points):
    figure = Page(experiment_page(front(*points))).figures[0]
    low, high = figure["layout"]["yaxis"]["range"]
    assert low < high


def test_a_front_is_read_back_as_it_was(tmp_path):
    made = front(*POINTS)
    (tmp_path / "experiment.json").write_text(json.dumps(made.as_dict()))
    assert Experiment.load(tmp_path / "experiment.json") == made
    (tmp_path / "experiment.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"cannot be used \('kind': field required\); repeat the"):
        Experiment.load(tmp_path / "experiment.json")
