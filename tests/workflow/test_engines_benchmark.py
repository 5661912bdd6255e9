"""The script that makes the table of engines, on a stand-in for TensorRT and the driver: what is measured against what,
and that it goes on where it was stopped."""

import importlib.util
import json
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from standin.machine import Finished

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "engines.py"
OLD = "8.6.0"

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(
        importlib.util.find_spec("cuda") is None, reason="cuda-python is not installed: pip install 'trtdet[cuda]'"
    ),
]


@pytest.fixture(scope="module")
def given(trained, calibration_images, drawn):
    """The arguments of every run: batches of 1 and 2 in place of 1 and 32."""
    return [
        *("--model", trained, "--config", "shapes", "--images", calibration_images, "--num-images", 4),
        *("--val-images", drawn.images, "--annotations", drawn.annotations),
        *("--batches", 1, 2, "--quick", "--seconds", 0.01),
    ]


@pytest.fixture(scope="module")
def start(machine, given):
    def call(output: Path, *arguments: object, **settings: Any) -> subprocess.Popen[str]:
        command = [sys.executable, str(SCRIPT), *map(str, [*given, "-o", output, *arguments])]
        environment = machine.environment(**{"version": OLD, **settings})
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)

    return call


@pytest.fixture(scope="module")
def run(start):
    def call(output: Path, *arguments: object, **settings: Any) -> Finished:
        process = start(output, *arguments, **settings)
        out, err = process.communicate(timeout=600)
        return Finished(process.returncode, out, err)

    return call


def steps(output: Path) -> list[dict[str, Any]]:
    lines = (output / "rows.jsonl").read_text().splitlines()[1:]
    return [one for one in map(json.loads, lines) if one["kind"] != "facts"]


def table(output: Path) -> dict[str, dict[str, Any]]:
    found = json.loads((output / "engines.json").read_text())
    return {line["row"]: line for line in found["table"]}


@pytest.fixture(scope="module")
def made(run, tmp_path_factory):
    """A finished table; its networks were made beforehand on a machine without a GPU."""
    output = tmp_path_factory.mktemp("engines") / "out"
    rows = ["--rows", "int8-none", "implicit", "int8-plugin"]
    before = run(output, *rows, "--networks-for", OLD, driver=False).ok
    assert before.out == "left to do: nothing\n"
    done = run(output, *rows, "--tactic-sources", "JIT_CONVOLUTIONS").ok
    assert (output / "engines.md").read_text() in done.out
    return output


def test_every_row_is_scored_timed_and_counted(made):
    found = table(made)
    # What the others are compared with is there unasked.
    assert list(found) == ["fp16", "fp32", "int8-none", "implicit"]
    for name, line in found.items():
        assert line["map"] > 0.3
        assert (line["to_fp32"] is None) == (name == "fp32")
        for at in line["batches"].values():
            assert at["compute_ms"] > 0
            assert at["build_seconds"] > 0
            assert at["engine_mb"] > 0.5
    loss = found["int8-none"]["map"] - found["fp32"]["map"]
    assert found["int8-none"]["to_fp32"]["difference"] == pytest.approx(loss)
    counts = {name: line["batches"]["2"]["audit"] for name, line in found.items()}
    # What INT8 makes no faster stays in FP16 there.
    every = counts["fp16"]["fp16"]
    assert counts["fp32"]["fp32"] == every
    for row in ("int8-none", "implicit"):
        assert every / 2 < counts[row]["int8"] < every
        assert counts[row]["int8"] + counts[row]["fp16"] == every
    assert [(step["kind"], step["rows"]) for step in steps(made)[:4]] == [("network", [row]) for row in found]


def told(engine: Path) -> dict[str, Any]:
    """What the stand-in was told of an engine when it built it, as far as it does not depend on the batch."""
    data = engine.read_bytes()
    (length,) = struct.unpack_from("<I", data, 8)
    facts = json.loads(data[12 : 12 + length])
    return {key: facts[key] for key in ("flags", "precisions", "stored")}


@pytest.mark.parametrize("row", ["fp16", "int8-none"])
def test_a_row_is_what_trtdet_build_makes(made, machine, scored, tmp_path, row):
    line = table(made)[row]
    command = line["command"].split()
    assert command[:2] == ["trtdet", "build"]
    assert machine.trtdet(*command[1:], "--guard", "off", "-o", tmp_path / "b", version=OLD).ok
    done = machine.trtdet("eval", tmp_path / "b", *scored, "--json", version=OLD)
    assert done.json["map"] == line["map"]
    assert (tmp_path / "b" / "plan.json").read_bytes() == (made / "shapes" / row / "plan.json").read_bytes()
    facts = told(made / "shapes" / row / "batch-2.engine")
    # The decoding of boxes stays in float32 in both, without which their times are not those of the same work.
    assert facts == told(tmp_path / "b" / "model.engine")
    assert any(name.startswith("trtdet/decode") for name in facts["precisions"])


def test_rows_are_timed_side_by_side_with_fp16_as_the_baseline(made):
    runs = [one for one in steps(made) if one["kind"] == "measure"]
    # The rows that say most first, at every batch; then all of them.
    first, everything = ["fp16", "fp32"], ["fp16", "fp32", "int8-none", "implicit"]
    assert [(one["batch"], one["rows"]) for one in runs] == [(2, first), (1, first), (2, everything), (1, everything)]
    assert all(one["bench"]["baseline"] == "fp16" for one in runs)
    for batch, last in (("2", runs[2]), ("1", runs[3])):
        points = {one["name"]: one["points"][0] for one in last["bench"]["targets"]}
        for name, line in table(made).items():
            at, point = line["batches"][batch], points[name]
            assert at["side_by_side"] == everything
            assert at["fp16_compute_ms"] == points["fp16"]["compute_ms"]["p50"]
            assert at["images_per_second"] == pytest.approx(1000 * int(batch) / point["compute_ms"]["p50"])
            if name == "fp16":
                assert at["times_fp16"] is None
                continue
            ratio = at["times_fp16"]
            assert ratio["low"] <= ratio["value"] <= ratio["high"]
            assert ratio["value"] == pytest.approx(1 / point["compute_ratio"]["value"])
            assert at["times_fp16_with_transfers"]["value"] == pytest.approx(1 / point["ratio"]["value"])


def test_int8_that_is_not_faster_is_explained(made):
    text = (made / "engines.md").read_text()
    for name, line in table(made).items():
        slow = name in ("int8-none", "implicit") and line["batches"]["2"]["times_fp16"]["value"] < 1.3
        assert (f"## shapes {name}: less than 1.3 times FP16" in text) == slow
        assert bool(line["explained"]) == slow
        if slow:
            assert line["explained"]["audit"].startswith("as built: ")
            assert line["explained"]["findings"]
            assert line["explained"]["by_type"]


def test_what_was_left_out_and_what_it_ran_on_is_said(made):
    text = (made / "engines.md").read_text()
    assert "- int8-plugin: left out: the plugin's library was not given with --plugin-library" in text
    facts = json.loads((made / "engines.json").read_text())["facts"]
    assert (facts["tensorrt"], facts["device"]["name"]) == (OLD, "Stand-in GPU")
    assert (facts["clocks"][0]["before"]["clocks"]["sm_mhz"], facts["numpy"]) == (1410, np.__version__)
    assert (facts["command"][0], facts["tactic_sources"]) == ("engines.py", ["JIT_CONVOLUTIONS"])
    assert max(path.stat().st_size for path in made.iterdir() if path.is_file()) < 1 << 20


def test_done_work_is_not_done_again_and_bundles_are_dropped_when_asked(made, run):
    before = (made / "rows.jsonl").read_text()
    assert run(made, "--rows", "int8-none", "implicit", "--tactic-sources", "JIT_CONVOLUTIONS", "--drop-bundles").ok
    assert (made / "rows.jsonl").read_text() == before
    assert sorted(path.name for path in made.iterdir()) == ["engines.json", "engines.md", "rows.jsonl"]


def test_a_table_of_another_machine_is_not_gone_on_with(run, tmp_path):
    rows = ["--rows", "fp16", "--budget-seconds", 0]
    assert run(tmp_path / "o", *rows).code == 0
    other = run(tmp_path / "o", *rows, version="10.9.0")
    assert other.code == 1
    assert "is of another machine or other options: {'tensorrt': '8.6.0'" in other.err
    assert "engines.py: error: " in other.err


def test_nothing_is_begun_that_the_budget_would_cut_off(run, tmp_path):
    output = tmp_path / "o"
    done = run(output, "--rows", "fp16", "--budget-seconds", 20).ok
    assert steps(output) == []
    assert "'network shapes: fp16' would take about 60 s" in done.err
    left = "left to do: score shapes: fp16; score shapes: fp32; measure shapes at batch 2: fp16, fp32; "
    assert done.out.splitlines()[-1].startswith(left)
    assert "- left to do: compare shapes: fp16" in (output / "engines.md").read_text()


def test_a_run_that_was_killed_goes_on(start, run, tmp_path):
    output = tmp_path / "o"
    process = start(output, "--rows", "fp16")
    while process.poll() is None:
        lines = (output / "rows.jsonl").read_text().splitlines() if (output / "rows.jsonl").is_file() else []
        if any('"kind": "engine"' in line for line in lines):
            break
        time.sleep(0.02)
    process.kill()
    process.communicate()
    before = (output / "rows.jsonl").read_text().splitlines()
    finished = [json.loads(line)["name"] for line in before[1:]]
    # An engine that is gone, as on a machine that was given back, is built again where it is still needed.
    (output / "shapes" / "fp16" / "batch-2.engine").unlink(missing_ok=True)
    done = run(output, "--rows", "fp16").ok
    assert done.out.splitlines()[-1] == "left to do: nothing"
    names = [one["name"] for one in steps(output)]
    assert (output / "rows.jsonl").read_text().splitlines()[1 : len(before)] == before[1:]
    again = [name for name in names if name.endswith("#2")]
    assert again == ["engine shapes at batch 2: fp16 #2"]
    assert len(set(names)) == len(names)
    assert set(finished) - {"machine", "model shapes"} <= set(names)
    assert table(output)["fp16"]["batches"]["2"]["side_by_side"] == ["fp16", "fp32"]


def test_a_row_that_fails_costs_no_other(run, tmp_path):
    output, given = tmp_path / "o", ["--rows", "implicit", "--batches", 2]
    assert run(output, *given, "--networks-for", OLD, driver=False).code == 0
    (output / "shapes" / "implicit" / "ranges.json").write_text("{")
    done = run(output, *given).ok
    found = table(output)
    assert "ranges.json' cannot be used " in found["implicit"]["not_made"]
    assert found["implicit"]["batches"]["2"]["compute_ms"] is None
    assert found["fp16"]["batches"]["2"]["side_by_side"] == ["fp16", "fp32"]
    assert "- shapes implicit: not made: " in done.out
    assert done.out.splitlines()[-1] == "left to do: nothing"


def test_what_does_not_go_together_is_refused(run, tmp_path):
    for arguments, message in (
        (["--data", "."], "give --data, or --model with --config"),
        (["--batches", "0"], "--batches takes numbers from 1 up, got 0"),
    ):
        done = run(tmp_path / "o", *arguments)
        assert done.code == 1
        assert message in done.err
    assert not (tmp_path / "o").exists()
