"""The page of a profile: whole, loading nothing, with every name escaped."""

import pytest
from report_pages import Page

from trtdet.backends import RunInfo
from trtdet.backends.base import LayerTime
from trtdet.performance import OnnxNodes, Profile, Profiling
from trtdet.performance.targets import Machine
from trtdet.report import profile_page
from trtdet.report.charts import COLOURS, GREY

MACHINE = Machine("a <CPU>", 2, 4, (0.0, 0.0, 0.0), None)


def layer(name: str, kind: str, ms: float, *nodes: str) -> LayerTime:
    return LayerTime(name, kind, nodes, (ms, ms))


def made(*layers: LayerTime, name: str = "net") -> Profile:
    return Profile(name, "engine", RunInfo("paper & ink", "a library"), 1, layers, OnnxNodes(("a",), {}), (9.0, 9.0))


def page(first: Profile, second: Profile | None = None, *warnings: str) -> Page:
    return Page(profile_page(Profiling(first, second, "from 'a<b'", MACHINE, MACHINE, warnings)))


def test_the_page_is_whole_loads_nothing_and_escapes_names():
    name = "<b>&first|"
    first = made(layer(name, name, 2.0, "a", name), name=name)
    found = page(first, made(layer("a", "Conv", 1.0, "a"), name="second"))
    assert not {tag for tag, _ in found.seen} & {"link", "img", "iframe", "b"}
    assert found.loaded == []
    assert name in found.text
    assert len(found.figures) == 4


def test_two_profiles_are_compared_and_the_circumstances_and_warnings_come_last():
    slow, fast = made(layer("a", "Conv", 3.0, "a"), name="first"), made(layer("a", "Conv", 1.0, "a"), name="second")
    said = [text.strip() for text in page(slow, fast, "the machine was busy").text if text.strip()]
    compared = len(said) - said[::-1].index("First against second")
    (gain,) = (index for index, text in enumerate(said) if "1 groups, 2.000 ms in all" in text)
    assert gain > compared
    assert said[-4] == "images: from 'a<b'"
    assert said[-3].startswith("a <CPU>, 2 of 4 cores")
    assert said[-2:] == ["clocks not known", "Warning: the machine was busy."]
    assert "First against second" not in page(slow).text


def test_parts_have_bars_of_their_own_where_names_tell_them():
    assert len(page(made(layer("a", "Conv", 1.0, "/neck/a/Conv"))).figures) == 3
    assert len(page(made(layer("a", "Conv", 1.0, "a"))).figures) == 2


def test_bars_after_the_sixteenth_are_one_and_colours_after_the_eighth_are_grey():
    found = page(made(*(layer(f"l{index}", f"Op{index:02}", 20.0 - index) for index in range(18))))
    bars, labels, *columns = found.traces
    assert (bars["y"][:2], bars["y"][16], bars["x"][0]) == (["Op00", "Op01"], "2 more", pytest.approx(20.0))
    assert (labels["text"][16], bars["marker"]["color"]) == ("7.000 ms, 3.4%, 2x", [*COLOURS, *[GREY] * 9])
    assert [column["marker"]["color"] for column in columns] == [*COLOURS, *[GREY] * 10]


def test_columns_stand_at_their_place_in_the_run():
    found = page(made(layer("a", "Conv", 8.0), layer("b", "Add", 2.0), layer("c", "Conv", 1.0)))
    convs, adds = found.traces[2:]
    assert (convs["name"], convs["x"], convs["y"]) == ("Conv", [1, 3], [8.0, 1.0])
    assert (adds["name"], adds["x"], adds["y"]) == ("Add", [2], [2.0])


def test_whiskers_end_at_zero_and_before_their_text():
    scattered = LayerTime("a", "Conv", ("a",), (0.0, 9.0))
    bars, labels, *_ = page(made(scattered, layer("b", "Add", 2.0))).traces
    spread = bars["error_x"]
    assert spread["array"][0] > bars["x"][0] == spread["arrayminus"][0]
    ends = [x + above for x, above in zip(bars["x"], spread["array"], strict=True)]
    assert all(text > end for text, end in zip(labels["x"], ends, strict=True))
    assert "text" not in bars and labels["mode"] == "text"


def test_a_narrow_screen_has_more_room_for_text_beside_the_longest_bar():
    for longest in (0.5, 20.0):
        layout = page(made(layer("a", "Conv", longest), layer("b", "Add", longest / 9))).figures[0]["layout"]
        (low, wide), (start, narrow) = layout["xaxis"]["range"], layout["narrow"]["xaxis"]["range"]
        assert low == start == 0 and narrow > 1.5 * wide > 1.5 * longest


def test_labels_of_charts_hold_no_markup_of_names():
    name = "<img src=x>&"
    found = page(made(layer(name, name, 2.0, name), name="net"))
    texts = [text for trace in found.traces for key in ("name", "y", "hovertext") for text in trace.get(key, ())]
    assert any("&lt;img src=x&gt;&amp;" in str(text) for text in texts)
    assert not any("<img" in str(text) for text in texts)
