"""The page of a front: whole, loading nothing, every point drawn with its facts under the pointer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from report_pages import Page

from trtdet.errors import ConfigError
from trtdet.evaluation.comparison import MaskScore
from trtdet.pipeline.points import Front, Point
from trtdet.report import front_page


def point(title: str, ms: float, difference: float, wide: float = 0.002) -> Point:
    counts = {"int8": 3, "fp16": 1, "fp32": 0}
    score = (0.3 + difference, difference, difference - wide, difference + wide)
    return Point(0, (title,), ("a",), counts, 0.01, ms, None, 5.0, 2_000_000, 3_000_000, *score)


def front(*points: Point, name: str = "net") -> Front:
    return Front(name, Path("tuned"), points, "latency", "L4", 1, None, 0.3, 64, 188).numbered()


POINTS = (
    point("all INT8", 0.2, -0.2, 0.05),
    point("program", 0.25, -0.01),
    point("program", 0.3, -0.003),
    point("default", 0.35, -0.02),
    point("all FP16", 0.4, 0.0),
)


def test_the_page_is_whole_loads_nothing_and_escapes_names() -> None:
    text = front_page(front(*POINTS, name="<b>&net"))
    found = Page(text)
    assert not [tag for tag, _ in found.seen if tag in ("link", "img", "iframe", "b")]
    assert found.loaded == []
    assert "default-src 'none'" in text
    assert "prefers-color-scheme:dark" in text
    assert "The front of <b>&net" in "".join(found.text)


def test_every_point_is_drawn_with_its_facts_and_the_best_are_joined() -> None:
    made = front(*POINTS)
    best, beaten = Page(front_page(made)).traces
    assert best["mode"] == "lines+markers+text" and beaten["mode"] == "markers+text"
    assert best["x"] == [0.2, 0.25, 0.3, 0.4]
    assert beaten["x"] == [0.35]
    assert beaten["y"] == pytest.approx([-2.0])
    assert beaten["error_y"]["array"] == pytest.approx([0.2]) == beaten["error_y"]["arrayminus"]
    (tip,) = beaten["hovertext"]
    assert tip.startswith(
        "point 4: default<br>3 convolutions INT8, 1 FP16, 0 FP32<br>0.35 ms (estimate, L4, batch 1)<br>"
    )
    assert "mAP against FP32 -2.00 (-2.20 .. -1.80)" in tip
    assert tip.endswith("beaten by point 2")
    assert "mask" not in made.markdown()


def test_the_score_of_masks_stands_beside_that_of_boxes() -> None:
    masks: MaskScore = {"map": 0.42, "difference": -0.001, "low": -0.003, "high": 0.002}
    made = front(replace(POINTS[0], masks=masks), POINTS[4])
    header, _, *rows = made.markdown().splitlines()
    assert header.index("90 % interval") < header.index("masks against FP32") < header.index("error at the head")
    assert ["-0.10 (-0.30 .. +0.20)" in row for row in rows] == [True, False]
    tips = [tip for trace in Page(front_page(made)).traces for tip in trace["hovertext"]]
    assert ["<br>mask mAP 42.00, -0.10 (-0.30 .. +0.20)<br>" in tip for tip in tips] == [True, False]


def test_the_verdict_names_the_cheapest_point_that_is_not_shown_to_lose() -> None:
    said = "".join(Page(front_page(front(*POINTS))).text)
    assert "net: of 5 plans no other beats 4, from 0.2 to 0.4 ms (estimate, L4, batch 1)" in said
    assert "the cheapest plan that is not shown to lose anything is point 5 (all FP16) at 0.4 ms" in said


@pytest.mark.parametrize("points", [POINTS[:1], (POINTS[4], POINTS[4]), (point("all FP16", 0.0, 0.0, 0.0),)])
def test_a_front_of_a_single_place_is_drawn(points: tuple[Point, ...]) -> None:
    figure = Page(front_page(front(*points))).figures[0]
    low, high = figure["layout"]["yaxis"]["range"]
    assert low < high


def test_a_front_is_read_back_as_it_was(tmp_path: Path) -> None:
    made = front(*POINTS)
    (tmp_path / "front.json").write_text(json.dumps(made.as_dict()))
    assert Front.load(tmp_path / "front.json") == made
    (tmp_path / "front.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"cannot be used \('name': field required\); run 'trtdet tune' again"):
        Front.load(tmp_path / "front.json")
