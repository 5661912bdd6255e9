from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtdet import CalibrationOptions, SweepOptions, load_config, sweep
from trtdet.demo import shapes
from trtdet.errors import ConfigError, TrtdetWarning
from trtdet.exporter import SHAPES_MODEL
from trtdet.pipeline.made_with import MadeWith
from trtdet.report import report
from trtdet.report.document import Histograms

CONFIG = load_config("shapes")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> SweepOptions:
    folder = tmp_path_factory.mktemp("shapes")
    images = shapes.generate(folder, "calibration", 4).images
    split = shapes.generate(folder, "val", 4)
    return SweepOptions(
        CalibrationOptions(images=images),
        split.images,
        split.annotations,
        rules=("minmax",),
        corrections=((), ("bias",)),
        keeps=(0, 2, "depthwise"),
        suppressions=(CONFIG.nms, CONFIG.with_nms(iou_threshold=0.5).nms),
        backend="onnxruntime",
        int8_all=True,
    )


def plain(rows: Any) -> list[dict[str, Any]]:
    """Rows without how long something took."""
    return [{key: value for key, value in row.items() if key != "build_seconds"} for row in rows]


@pytest.fixture(scope="module")
def done(options: SweepOptions, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return sweep(SHAPES_MODEL, CONFIG, tmp_path_factory.mktemp("done"), options)


def test_every_variant_has_a_row(done: Any) -> None:
    assert len(done.rows) == 2 + 2 * 3 * 2
    assert [row["precision"] for row in done.rows[:3]] == ["FP32", "FP32", "INT8"]
    assert [row["fp32"] for row in done.rows[:2]] == [95, 95]
    by = {
        (row["calibration"], tuple(row["corrections"] or ()), row["kept"], row["nms"]["iou_threshold"]): row
        for row in done.rows
    }
    assert len(by) == len(done.rows)
    for (rule, _, kept, threshold), row in by.items():
        if rule is None:
            assert (row["difference"], row["low"]) == (0, None)
            continue
        reference = by[None, (), None, threshold]
        assert row["difference"] == pytest.approx(row["map"] - reference["map"], abs=1e-12)
        assert row["low"] <= row["high"]
        assert row["fp16"] == len(row["kept_names"]) == {0: 0, 2: 2, "depthwise": 12}[kept]
        assert row["int8"] + row["fp16"] == 95
    assert by["minmax", (), 0, 0.65]["map"] != by["minmax", ("bias",), 0, 0.65]["map"]


def test_the_files_hold_what_was_given(done: Any) -> None:
    assert json.loads((done.folder / "sweep.json").read_text()) == list(done.rows)
    table = (done.folder / "sweep.md").read_text()
    assert table == done.markdown() + "\n"
    assert len(table.splitlines()) == 2 + len(done.rows)
    assert "| INT8 | keep | minmax | bias | depthwise | --int8-all | 0.001 / 0.5 / 300 |" in table


def test_more_values_on_an_axis_do_only_what_is_new(done: Any, options: SweepOptions) -> None:
    stages: list[str] = []
    again = sweep(SHAPES_MODEL, CONFIG, done.folder, options, lambda stage, *_: stages.append(stage))
    assert again.rows == done.rows
    assert set(stages) == {"sweep"}
    more = replace(options, keeps=(0, 1), rules=("minmax",), corrections=((),), suppressions=(CONFIG.nms,))
    wider = sweep(SHAPES_MODEL, CONFIG, done.folder, more, lambda stage, *_: stages.append(stage))
    assert [row["kept"] for row in wider.rows] == [None, 0, 1]
    assert [row for row in wider.rows if row["kept"] != 1] == [
        row
        for row in done.rows
        if row["nms"]["iou_threshold"] == 0.65
        and row["calibration"] in (None, "minmax")
        and not row["corrections"]
        and row["kept"] in (None, 0)
    ]
    # The files keep the older rows, behind those that were asked for.
    assert len(wider.rows) + len(wider.older) == len(done.rows) + 1
    assert json.loads((done.folder / "sweep.json").read_text()) == [*wider.rows, *wider.older]
    table = (done.folder / "sweep.md").read_text()
    assert table == wider.markdown() + "\n"
    assert len(table.splitlines()) == 2 + len(done.rows) + 1
    assert "| INT8 | keep | minmax | bias | depthwise | --int8-all | 0.001 / 0.5 / 300 |" in table
    assert wider.as_dict()["rows"] == list(wider.rows)
    assert "calibrating" not in stages
    assert "scoring minmax, 0 in FP16" not in stages
    assert "scoring minmax, 1 in FP16" in stages
    made = MadeWith.load(done.folder)
    assert made is not None
    assert [making.options["keeps"] for making in made.makings] == [[0, 2, "depthwise"], [0, 1]]
    told = report([done.folder])
    assert [section.title for section in told.sections] == ["Variants", "Histograms and thresholds", "Reproduce"]
    histograms = next(part for section in told.sections for part in section.parts if isinstance(part, Histograms))
    assert len(histograms.shown) == 10 and len(histograms.entries) == 95
    assert all(entry.chosen is None and entry.thresholds for entry in histograms.entries)
    first, second = (line for line in told.sections[-1].parts[1].lines)
    assert "--keep-fp16 0 2 depthwise --correct none bias --iou-threshold 0.65 0.5 --int8-all" in first
    assert "--keep-fp16 0 1 --correct none --int8-all" in second


def test_a_damaged_row_is_made_again(done: Any, options: SweepOptions, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(done.folder, folder)
    lines = (folder / "rows.jsonl").read_text().splitlines()
    damaged = json.loads(lines[3])
    lines[3] = json.dumps({**damaged, "map": "high"})
    lines[4] = json.dumps({**json.loads(lines[4]), "nms": {"score_threshold": 7}})
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    few = replace(
        options, corrections=((),), keeps=(0,), suppressions=(CONFIG.nms, CONFIG.with_nms(iou_threshold=0.5).nms)
    )
    (folder / "histograms.npz").write_bytes(b"cut")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TrtdetWarning)
        again = sweep(SHAPES_MODEL, CONFIG, folder, few)
    said = [str(warning.message) for warning in caught if warning.category is TrtdetWarning]
    assert [bool(re.search(r"a row is damaged \('(map|nms.*)': .* measured again", text)) for text in said[:2]] == [
        True,
        True,
    ]
    assert any("they are collected again" in text for text in said[2:])
    assert plain(again.rows) == [row for row in plain(done.rows) if row["kept"] in (None, 0) and not row["corrections"]]


def test_another_model_or_other_images_are_refused(done: Any, options: SweepOptions) -> None:
    before = (done.folder / "rows.jsonl").read_bytes()
    fewer = replace(options, calibration=replace(options.calibration, num_images=3))
    with pytest.raises(ConfigError, match="another model, other images or other options"):
        sweep(SHAPES_MODEL, CONFIG, done.folder, fewer)
    assert (done.folder / "rows.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match="needs calibration images"):
        sweep(SHAPES_MODEL, CONFIG, done.folder, replace(options, calibration=CalibrationOptions()))


@pytest.fixture(scope="module")
def few(options: SweepOptions) -> SweepOptions:
    """Fewer variants, for what takes them one more time."""
    return replace(options, corrections=((),), keeps=(0, 2))


def of_few(done: Any) -> list[dict[str, Any]]:
    """The rows that they have in the whole sweep."""
    return [row for row in plain(done.rows) if row["kept"] in (None, 0, 2) and not row["corrections"]]


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_rows(few: SweepOptions, done: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trtdet", "sweep", str(SHAPES_MODEL), "--config", "shapes", "-o", str(tmp_path)]
    command += ["--images", str(few.calibration.images), "--backend", "onnxruntime"]
    command += ["--val-images", str(few.images), "--annotations", str(few.annotations)]
    command += ["--calib", "minmax", "--correct", "none", "--keep-fp16", "0", "2", "--int8-all"]
    command += ["--iou-threshold", "0.65", "0.5"]
    rows = tmp_path / "rows.jsonl"
    for target in (0, 3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        limit = time.monotonic() + 120
        while time.monotonic() < limit and process.poll() is None:
            if rows.exists() and len(rows.read_bytes().splitlines()) - 1 >= target:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert plain(json.loads((tmp_path / "sweep.json").read_text())) == of_few(done)


def workers_at(function: str) -> list[int]:
    """The processes of this process's own Ray that are at a task with this function."""
    found, parents = [], {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if (entry / "cmdline").read_bytes().startswith(f"ray::{function}".encode()):
                    found.append(int(entry.name))
    # A worker is a child of the raylet, which is a child of what has started Ray.
    return [worker for worker in found if parents.get(parents[worker]) == os.getpid()]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_workers")
def test_ray_gives_the_same_rows_though_a_worker_is_killed(few: SweepOptions, done: Any, tmp_path: Path) -> None:
    killed: list[int] = []
    over = threading.Event()

    def kill_one() -> None:
        """The first worker that is seen at a group: one that waits for a row may find no worker left."""
        while not killed and not over.wait(0.02):
            for worker in workers_at("rows_of_group"):
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
                    killed.append(worker)
                    break

    killing = threading.Thread(target=kill_one)
    killing.start()
    try:
        remote = sweep(SHAPES_MODEL, CONFIG, tmp_path, replace(few, ray="local"))
    finally:
        over.set()
        killing.join()
    assert killed
    assert plain(remote.rows) == of_few(done)


@pytest.mark.slow
def test_corrections_that_need_no_rule_are_worked_out_once(options: SweepOptions, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'trtdet[correct]'")
    asked = replace(
        options,
        rules=("minmax", "percentile", "entropy"),
        corrections=(("range", "bias"),),
        keeps=(0,),
        suppressions=(CONFIG.nms,),
    )
    stages: list[tuple[str, int]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # of the few images
        found = sweep(SHAPES_MODEL, CONFIG, tmp_path, asked, lambda stage, done, total: stages.append((stage, done)))
    gradients = [done for stage, done in stages if stage == "correcting: gradients of the detections"]
    assert gradients.count(1) == 1
    # Each rule is compared with, all the same, and corrections are judged with the biases of their ranges once more.
    assert [done for stage, done in stages if stage == "correcting: detections"].count(1) == 4
    first, *others = found.rows[1:]
    assert [row["same_as"] for row in others] == ["minmax, range, bias, 0 in FP16, SiLU keep"] * 2
    assert {row["calibration"] for row in found.rows[1:]} == {"minmax", "percentile", "entropy"}
    assert "same_as" not in first


def test_variants_with_one_network_are_scored_once(options: SweepOptions, tmp_path: Path) -> None:
    """A percentile of 100 is the largest magnitude."""
    asked = replace(
        options,
        calibration=replace(options.calibration, percentile=100.0),
        rules=("minmax", "percentile"),
        corrections=((),),
        keeps=(0,),
        suppressions=(CONFIG.nms,),
    )
    stages: list[str] = []
    found = sweep(SHAPES_MODEL, CONFIG, tmp_path, asked, lambda stage, *_: stages.append(stage))
    minmax, percentile = found.rows[1:]
    assert "same_as" not in minmax
    assert percentile["same_as"] == "minmax, 0 in FP16, SiLU keep"
    assert (percentile["map"], percentile["difference"]) == (minmax["map"], minmax["difference"])
    assert "scoring minmax, 0 in FP16" in stages
    assert "scoring percentile, 0 in FP16" not in stages
    assert found.repeated == (
        "1 of the rows have the network of an earlier variant, which was scored once: minmax, 0 in FP16, SiLU keep"
    )
    again = sweep(SHAPES_MODEL, CONFIG, tmp_path, asked)
    assert again.rows == found.rows
    assert replace(found, rows=found.rows[:2]).repeated == ""
