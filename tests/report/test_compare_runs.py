"""Two runs against each other: what changed, and whether a difference of scores is noise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_pages import Page

from trtdet.cli import main
from trtdet.config import load_config
from trtdet.errors import ConfigError
from trtdet.quantization import Entry, PrecisionPlan
from trtdet.report import compare_runs, page

INT8, FP16 = Entry("int8", "fits"), Entry("fp16", "named")


def plan(path: Path, **entries: Entry) -> Path:
    PrecisionPlan(entries).save(path)
    return path


def row(variant: str, difference: float, wide: float | None = 0.01) -> dict[str, Any]:
    ends = (None, None) if wide is None else (difference - wide, difference + wide)
    return {
        "variant": variant,
        "precision": "INT8",
        "silu": "keep",
        "calibration": "minmax",
        "corrections": [variant],
        "nms": load_config("shapes").nms.model_dump(mode="json"),
        "map": 0.4 + difference,
        "map50": 0.6,
        "difference": difference,
        "low": ends[0],
        "high": ends[1],
        "kept": 0,
        "kept_names": [],
        "int8": 3,
        "fp16": 0,
        "fp32": 0,
        "build_seconds": None,
        "engine_mb": None,
        "latency_ms": None,
    }


def sweep(folder: Path, *rows: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "sweep.json").write_text(json.dumps(rows))
    return folder


def test_plans_differ_by_convolution(tmp_path: Path) -> None:
    first = plan(tmp_path / "a.json", x=INT8, y=INT8, gone=INT8)
    second = plan(tmp_path / "b.json", x=INT8, y=FP16, new=FP16)
    found = compare_runs(first, second)
    assert [(one.name, one.first, one.second) for one in found.changes] == [
        ("y", "int8", "fp16"),
        ("gone", "int8", ""),
        ("new", "", "fp16"),
    ]
    assert found.same == 1
    assert found.verdict[0] == "3 of 4 convolutions run in another precision."
    assert "convolutions in INT8: 3 -> 1 (plan)." in found.verdict
    assert [one.change for one in found.figures] == [-2, 2, 0]
    assert [one.how.split()[:2] for one in found.missing] == [["build", "each"]]
    text = found.table().text()
    assert re.search(r"y +INT8 +FP16 +fits +named", text)
    assert "3 of 4 convolutions" in "".join(Page(page(found.report())).text)


def test_equal_plans_are_said_to_be(tmp_path: Path) -> None:
    found = compare_runs(plan(tmp_path / "a.json", x=INT8), plan(tmp_path / "b.json", x=INT8))
    assert found.changes == () and "all 1 convolutions run in the same precision" in found.table().text()


def test_variants_of_sweeps_differ_by_noise_or_more(tmp_path: Path) -> None:
    fp32 = {**row("fp32", 0.0, None), "precision": "FP32", "calibration": None}
    first = sweep(tmp_path / "a", fp32, row("near", -0.02), row("far", -0.02), row("gone", 0.0))
    second = sweep(tmp_path / "b", fp32, row("near", -0.03), row("far", -0.1))
    found = compare_runs(first, second)
    assert found.variants is not None
    said = {line["variant"]: line["so it is"] for line in found.variants.as_dicts()}
    assert said == {
        "FP32": "equal",
        "INT8 minmax, near, SiLU keep": "noise",
        "INT8 minmax, far, SiLU keep": "more than noise",
    }
    assert found.verdict == (
        "1 of 3 variants differ by more than noise.",
        "In a alone: INT8 minmax, gone, SiLU keep.",
    )
    assert [column for column in found.variants.as_dicts()[0] if "MB" in column or "ms" in column] == []


def test_latencies_of_sweeps_stand_beside_each_other(tmp_path: Path) -> None:
    first = sweep(tmp_path / "a", {**row("v", -0.02), "latency_ms": 1.5})
    second = sweep(tmp_path / "b", {**row("v", -0.02), "latency_ms": 1.25})
    found = compare_runs(first, second)
    assert found.variants is not None
    (line,) = found.variants.as_dicts()
    assert (line["latency ms in a"], line["latency ms in b"]) == (1.5, 1.25)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    first = plan(tmp_path / "a.json", x=INT8)
    folder = sweep(tmp_path / "s", row("v", 0.0))
    with pytest.raises(ConfigError, match="cannot be compared: give two bundles, plans"):
        compare_runs(first, folder)
    with pytest.raises(ConfigError, match="have no variant in common: 1 and 1"):
        compare_runs(folder, sweep(tmp_path / "t", row("w", 0.0)))


@pytest.mark.parametrize("name", ["c.html", "c.md", "c.json"])
def test_the_command_prints_and_writes(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(plan(tmp_path / "a.json", x=INT8)), str(plan(tmp_path / "b.json", x=FP16))]
    assert main(["compare", *runs, "-o", str(tmp_path / name)]) == 0
    assert "1 convolutions in another precision, 0 in the same" in capsys.readouterr().out
    assert "1 of 1 convolutions run in another precision" in (tmp_path / name).read_text()
    assert main(["compare", *runs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"][0]["second"] == "fp16"
    assert main(["compare", *runs, "--images", "x"]) == 1
