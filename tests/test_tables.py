import os
import re
import sys
from dataclasses import FrozenInstanceError

import pytest

from trtdet.tables import Column, LabelledLines, Table, Tables, counted

SCORES = Table(
    ("variant", Column("mAP", ".2f"), Column("against FP32", "+.2f"), "note"),
    [("FP32", 64.48, None, ""), ("INT8 minmax alone", 4.031, -60.449, "a loss")],
    title="Scores",
    notes=("200 images",),
)


def test_text_has_numbers_on_the_right_and_words_on_the_left():
    assert SCORES.text().splitlines() == [
        "Scores",
        "",
        "variant              mAP  against FP32  note",
        "----------------------------------------------",
        "FP32               64.48",
        "INT8 minmax alone   4.03        -60.45  a loss",
        "",
        "200 images",
    ]
    assert str(SCORES) == SCORES.text()


def test_markdown_aligns_as_the_text_does():
    assert SCORES.markdown().splitlines() == [
        "Scores",
        "",
        "| variant | mAP | against FP32 | note |",
        "|---|---:|---:|---|",
        "| FP32 | 64.48 |  |  |",
        "| INT8 minmax alone | 4.03 | -60.45 | a loss |",
        "",
        "200 images",
    ]


def test_html_escapes_and_marks_numbers():
    page = Table(("a<b", "n"), [("<script>", 1)], title="x & y", notes=("1 < 2",)).html()
    assert "<caption>x &amp; y</caption>" in page
    assert "<th>a&lt;b</th>" in page
    assert '<td>&lt;script&gt;</td><td class="number">1</td>' in page
    assert page.endswith("<p>1 &lt; 2</p>")
    assert "<thead><tr><th>a</th><td></td></tr></thead>" in Table(("a", ""), [("x", "y")]).html()


@pytest.mark.parametrize(
    ("cells", "right"),
    [
        (["1", "-2.5"], True),
        (["12.5%", "+3 %"], True),
        (["1e-05", ""], True),
        (["470 845", "5"], True),
        (["1", "n/a"], False),
        (["", ""], False),
        (["1 .. 2", "3 .. 4"], False),
        (["", "conv1"], False),
    ],
)
def test_a_column_is_numbers_when_every_filled_cell_is(cells, right):
    head = Table(("x",), [(cell,) for cell in cells]).markdown().splitlines()[1]
    assert head == ("|---:|" if right else "|---|")


def test_an_alignment_that_is_given_holds():
    table = Table((Column("n", align="left"), Column("range", align="right")), [(1, "a .. b")])
    assert table.markdown().splitlines()[1] == "|---|---:|"


@pytest.mark.parametrize("text", ["a\nb", "a\r\tb", "\na \n b "])
def test_a_cell_stays_on_one_line(text):
    table = Table(("name",), [(text,)])
    assert table.text().splitlines()[-1] == "a b"
    assert table.markdown().splitlines()[-1] == "| a b |"


def test_nothing_that_a_terminal_obeys_or_that_cannot_be_encoded_is_printed():
    table = Table(("na\x1b[1mme",), [("\x1b[31mred\x07",), ("\ud800",)], title="\x1b[2J", notes=("\x1b[2J",))
    for text in (table.text(), table.markdown(), table.html()):
        assert "\x1b" not in text and "\x07" not in text
        text.encode()


def test_spaces_in_a_cell_and_a_note_stay():
    """They show what belongs to what."""
    assert Table(("a",), [], notes=("bundles   demo",)).text().endswith("bundles   demo")
    assert Table(("finding",), [("kind",), ("  layer",)]).text().splitlines()[2:] == ["kind", "  layer"]


def test_markup_of_rich_is_text():
    assert "[bold]x[/bold] :smile:" in Table(("[red]",), [("[bold]x[/bold] :smile:",)]).text()


def test_a_bar_in_a_cell_does_not_end_it_in_markdown():
    (row,) = Table(("x", "y"), [("a|b", "c\\")]).markdown().splitlines()[2:]
    assert row == r"| a\|b | c\\ |"


def test_a_pipe_gets_whole_lines_and_a_terminal_wraps_them(monkeypatch):
    long = "/model/" + "x" * 400
    table = Table(("layer", "ms"), [(long, 1.25)])
    assert long in table.text()
    assert table.text().splitlines()[1] == "-" * 100
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    wrapped = table.text().splitlines()
    assert max(map(len, wrapped)) <= 40
    assert "".join(re.findall("[/a-wyz]|x", "".join(line.split(" ")[0] for line in wrapped[2:]))) == long


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="a row of 1 cells in a table of 2 columns"):
        Table(("a", "b"), [(1, 2), (1,)])
    with pytest.raises(FrozenInstanceError):
        SCORES.title = "other"


def test_a_table_without_rows_is_its_head():
    assert Table(("a", "b"), []).text().splitlines()[0] == "a  b"


def test_columns_that_are_empty_in_every_row_are_left_out():
    table = Table(("a", Column("b", ".1f"), "c"), [(1, None, ""), (None, 0.0, "")], "title", ["note"])
    assert table.filled() == Table(["a", Column("b", ".1f")], [[1, None], [None, 0.0]], "title", ["note"])
    assert [*Table(("a", "b"), []).filled().columns] == ["a", "b"]


def test_several_tables_are_written_in_order():
    both = Tables(["before\nit", SCORES, Table(("a",), [(1,)])])
    assert both.text() == str(both) == f"before\nit\n\n{SCORES.text()}\n\n{Table(('a',), [(1,)]).text()}"
    assert both.markdown().startswith("before\nit\n\nScores\n\n| variant")


def test_a_summary_has_a_keyword_before_each_line(monkeypatch):
    summary = LabelledLines((("asked", "--int8"), ("done", "wrote one two three four")))
    assert str(summary) == "asked  --int8\ndone   wrote one two three four"
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: os.terminal_size((30, 24)))
    assert summary.text(styled=True).splitlines() == [
        "\x1b[1;36masked\x1b[0m  --int8",
        "\x1b[1;36mdone\x1b[0m   wrote one two three",
        "       four",
    ]


@pytest.mark.parametrize(("number", "noun", "text"), [(1, "image", "1 image"), (2, "image", "2 images")])
def test_a_number_and_its_noun(number, noun, text):
    assert counted(number, noun) == text


@pytest.mark.parametrize(("number", "text"), [(1, "1 class"), (0, "0 classes"), (80, "80 classes")])
def test_a_number_of_classes(number, text):
    assert counted(number, "class") == text
