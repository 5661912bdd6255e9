"""The page of a front: whole, loading nothing, every point inside its frame with its facts under the pointer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_profile_page import Page

from trtdet.pipeline.points import Front, Point
from trtdet.report import front_page
from trtdet.report.fronts import FrontChart


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
    found = Page()
    text = front_page(front(*POINTS, name="<b>&net"))
    found.feed(text)
    assert found.open == []
    assert not [tag for tag, _ in found.seen if tag in ("script", "link", "img", "iframe", "b")]
    assert not re.search(r"(?:https?:)?//|url\(|@import", text)
    assert "prefers-color-scheme:dark" in text
    assert "The front of <b>&net" in "".join(found.text)


def test_every_point_stands_in_the_frame_with_its_facts() -> None:
    made = front(*POINTS)
    text = front_page(made)
    assert text.count('<g class="point') == len(POINTS) == text.count("<circle")
    assert text.count('<g class="point beaten"') == 1
    assert "point 4: default\n3 convolutions INT8, 1 FP16, 0 FP32\n0.35 ms (estimate, L4, batch 1)\n" in text
    assert "mAP against FP32 -2.00 (-2.20 .. -1.80)" in text
    assert "beaten by point 2" in text
    chart = FrontChart.of(made)
    for mark, one in zip(chart.marks, made.points, strict=True):
        assert chart.left < mark.x < chart.right and chart.top < mark.y < chart.bottom
        assert chart.top <= mark.whisker[1] <= mark.y <= mark.whisker[0] <= chart.bottom
        assert mark.label == ("" if one.titles == ("program",) else one.title)
    xs, ys = [mark.x for mark in chart.marks], [mark.y for mark in chart.marks]
    assert xs == sorted(xs)
    # What is more accurate is higher up.
    assert [made.points[place].difference for place in sorted(range(5), key=lambda place: ys[place])] == sorted(
        (one.difference for one in made.points), reverse=True
    )
    assert [chart.path.count(f"{mark.x:.1f},{mark.y:.1f}") for mark in chart.marks] == [1, 1, 1, 0, 1]
    assert any(line.label == "0" for line in chart.rows)
    assert all(chart.left <= line.place <= chart.right for line in chart.columns)


@pytest.mark.parametrize("points", [POINTS[:1], (POINTS[4], POINTS[4]), (point("all FP16", 0.0, 0.0, 0.0),)])
def test_a_front_of_a_single_place_is_drawn(points: tuple[Point, ...]) -> None:
    chart = FrontChart.of(front(*points))
    assert all(chart.left < mark.x < chart.right and chart.top < mark.y < chart.bottom for mark in chart.marks)
    assert len(chart.columns) <= 11 and len(chart.rows) <= 11
