"""Two runs against each other: what changed, and whether a difference of scores is noise."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from report_pages import Page
from test_front_page import point, swept

from trtdet.bundle import Bundle
from trtdet.cli import main
from trtdet.errors import ConfigError
from trtdet.evaluation.comparison import PartScore
from trtdet.experiments.experiment import Variant
from trtdet.quantization import Entry, PrecisionPlan
from trtdet.report import compare_runs, page

INT8, FP16 = Entry("int8", "fits"), Entry("fp16", "named")


def plan(path: Path, **entries: Entry) -> Path:
    PrecisionPlan(entries).save(path)
    return path


def row(name: str, difference: float, wide: float | None = 0.01) -> Variant:
    made = point(f"INT8 minmax, {name}", 0.0, difference, wide or 0.0, name=name)
    found = replace(made, map=0.4 + difference, engine=None)
    return replace(found, low=None, high=None) if wide is None else found


def sweep(folder: Path, *rows: Variant) -> Path:
    folder.mkdir()
    replace(swept(*rows), folder=folder).save()
    return folder


def test_plans_differ_by_convolution(tmp_path):
    first = plan(tmp_path / "a.json", x=INT8, y=INT8, gone=INT8)
    second = plan(tmp_path / "b.json", x=INT8, y=FP16, new=FP16)
    found = compare_runs(first, second)
    changes = [("y", "int8", "fp16"), ("gone", "int8", ""), ("new", "", "fp16")]
    assert [(change.name, change.first, change.second) for change in found.changes] == changes
    assert found.same == 1
    assert found.verdict == ("3 of 4 convolutions run in another precision.",)
    figures = [(one.name, one.first, one.second, one.change) for one in found.figures]
    assert figures[0] == ("convolutions in INT8", 3, 1, -2) and [change for *_, change in figures] == [-2, 2, 0]
    assert [one.how.split()[:2] for one in found.missing] == [["build", "each"]]
    text = found.table().text()
    assert re.search(r"y +INT8 +FP16 +fits +named", text)
    assert "3 of 4 convolutions" in "".join(Page(page(found.report())).text)
    equal = compare_runs(plan(tmp_path / "c.json", x=INT8), plan(tmp_path / "d.json", x=INT8))
    assert equal.changes == () and "All 1 convolutions run in the same precision." in equal.table().text()


def test_a_figure_of_one_run_alone_has_no_change(bundle, tmp_path):
    shutil.copytree(bundle, tmp_path / "b")
    Bundle(tmp_path / "b").add("model.engine", b"engine")
    alone = plan(tmp_path / "a.json", x=INT8)
    for runs in ((tmp_path / "b", alone), (alone, tmp_path / "b")):
        figures = {one.name: (one.first, one.second, one.change) for one in compare_runs(*runs).figures}
        assert set(figures["engine file"]) == {6e-6, None} and figures["engine file"][2] is None


def test_variants_of_sweeps_differ_by_noise_or_more(tmp_path):
    fp32 = replace(row("fp32", 0.0, None), titles=("FP32",))
    first = sweep(tmp_path / "a", fp32, row("near", -0.02), row("far", -0.02), row("gone", 0.0))
    second = sweep(tmp_path / "b", fp32, row("near", -0.03), row("far", -0.1))
    found = compare_runs(first, second)
    verdicts = {line["variant"]: line["verdict"] for line in found.variants.as_dicts()}
    assert verdicts == {"FP32": "equal", "INT8 minmax, near": "noise", "INT8 minmax, far": "more than noise"}
    assert found.verdict == ("1 of 3 variants differ by more than noise.", "In a alone: INT8 minmax, gone.")
    assert [column for column in found.variants.as_dicts()[0] if "MB" in column or "ms" in column] == []


def test_parts_of_sweeps_differ_too(tmp_path):
    pair = [
        replace(row("v", -0.02), parts={"masks": PartScore(map=0.3, difference=x, low=x - 0.01, high=x + 0.01)})
        for x in (-0.01, -0.05)
    ]
    found = compare_runs(*(sweep(tmp_path / name, one) for name, one in zip("ab", pair, strict=True)))
    (line,) = found.variants.as_dicts()
    assert (line["masks"], line["verdict"]) == ("-4.00 (± 1.41)", "more than noise")


def test_latencies_of_sweeps_stand_beside_each_other(tmp_path):
    first = sweep(tmp_path / "a", replace(row("v", -0.02), latency_ms=1.5))
    second = sweep(tmp_path / "b", replace(row("v", -0.02), latency_ms=1.25))
    (line,) = compare_runs(first, second).variants.as_dicts()
    assert (line["latency ms in a"], line["latency ms in b"]) == (1.5, 1.25)


def test_what_cannot_be_compared_is_refused(tmp_path):
    first = plan(tmp_path / "a.json", x=INT8)
    folder = sweep(tmp_path / "s", row("v", 0.0))
    with pytest.raises(ConfigError, match="cannot be compared: give two bundles, plans"):
        compare_runs(first, folder)
    with pytest.raises(ConfigError, match="have no variant in common; compare sweeps of"):
        compare_runs(folder, sweep(tmp_path / "t", row("w", 0.0)))


@pytest.mark.parametrize("name", ["c.html", "c.md", "c.json"])
def test_the_command_prints_and_writes(tmp_path, name, capsys):
    runs = [str(plan(tmp_path / "a.json", x=INT8)), str(plan(tmp_path / "b.json", x=FP16))]
    assert main(["compare", *runs, "-o", str(tmp_path / name)]) == 0
    assert "1 of 1 convolutions run in another precision" in capsys.readouterr().out
    assert "1 of 1 convolutions run in another precision" in (tmp_path / name).read_text()
    assert main(["compare", *runs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"][0]["second"] == "fp16"
    assert main(["compare", *runs, "--images", "x"]) == 1
