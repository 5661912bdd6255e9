"""The page of a profile: whole, loading nothing, with every name escaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from trtdet.backends import RunInfo
from trtdet.backends.base import LayerTime
from trtdet.performance import OnnxNodes, Profile, Profiling
from trtdet.performance.machine import Machine
from trtdet.report import profile_page
from trtdet.report.charts import COLOURS, GREY, BarChart, ColumnChart, ticks

MACHINE = Machine("a <CPU>", 2, 4, (0.0, 0.0, 0.0), None)


def layer(name: str, kind: str, ms: float, *nodes: str) -> LayerTime:
    return LayerTime(name, kind, nodes, (ms, ms))


def made(*layers: LayerTime, name: str = "net") -> Profile:
    return Profile(name, "engine", RunInfo("paper & ink", "a library"), 1, layers, OnnxNodes(("a",), {}), (9.0, 9.0))


def page(first: Profile, second: Profile | None = None, *warnings: str) -> str:
    return profile_page(Profiling(first, second, "from 'a<b'", MACHINE, MACHINE, warnings), 5)


class Page(HTMLParser):
    """Checks that tags are closed, and notes what would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_loads_nothing_and_escapes_names() -> None:
    name = "<b>&first|"
    text = page(made(layer(name, name, 2.0, "a", name), name=name), made(layer("a", "Conv", 1.0, "a"), name="second"))
    found = Page()
    found.feed(text)
    assert found.open == []
    assert not {tag for tag, _ in found.seen} & {"script", "link", "img", "iframe", "b"}
    assert not any(key in ("src", "href") for _, attributes in found.seen for key in attributes)
    assert "http" not in text
    assert name in found.text
    assert [tag for tag, _ in found.seen].count("svg") == 4


def test_two_profiles_are_compared_and_the_circumstances_and_warnings_come_last() -> None:
    slow, fast = made(layer("a", "Conv", 3.0, "a"), name="first"), made(layer("a", "Conv", 1.0, "a"), name="second")
    found = Page()
    found.feed(page(slow, fast, "the machine was busy"))
    said = [text.strip() for text in found.text if text.strip()]
    compared = said.index("First against second")
    (gain,) = (index for index, text in enumerate(said) if "1 groups, 2.000 ms in all" in text)
    assert gain > compared
    assert said[-4] == "images: from 'a<b'"
    assert said[-3].startswith("a <CPU>, 2 of 4 cores")
    assert said[-2:] == ["clocks not known", "Warning: the machine was busy."]
    assert "First against second" not in page(slow)


def test_parts_have_bars_of_their_own_where_names_tell_them() -> None:
    assert page(made(layer("a", "Conv", 1.0, "/neck/a/Conv"))).count("<svg") == 3
    assert page(made(layer("a", "Conv", 1.0, "a"))).count("<svg") == 2


def test_the_longest_bar_and_column_fill_the_picture() -> None:
    found = made(layer("a", "Conv", 8.0), layer("b", "Add", 2.0))
    text = page(found)
    widths = [float(width) for width in re.findall(r'<rect x="190" y="\d+" width="([\d.]+)"', text)]
    assert widths == [620.0, 155.0]
    heights = [float(height) for height in re.findall(r'width="[\d.]+" height="([\d.]+\.\d\d)" style', text)]
    assert heights == [190.0, 47.5]


def test_bars_after_the_sixteenth_are_one_and_colours_after_the_eighth_are_grey() -> None:
    found = made(*(layer(f"l{index}", f"Op{index:02}", 20.0 - index) for index in range(18)))
    bars = BarChart.of(found.by_type).bars
    assert [bar.name for bar in bars[:2]] == ["Op00", "Op01"]
    assert bars[16].name == "2 more"
    assert bars[16].figures == "7.000 ms, 3.4%, 2x"
    assert [bar.colour for bar in bars] == [*COLOURS, *[GREY] * 9]
    assert ColumnChart.of(found).key[-1] == ("other", GREY)


@pytest.mark.parametrize(("highest", "expected"), [(8.25, [0, 2, 4, 6, 8]), (0.4, [0, 0.1, 0.2, 0.3, 0.4]), (0.0, [0])])
def test_ticks_are_round_numbers(highest: float, expected: list[float]) -> None:
    assert ticks(highest) == pytest.approx(expected)
