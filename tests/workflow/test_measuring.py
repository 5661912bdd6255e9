"""``trtdet bench`` and ``trtdet profile`` in whole: what they print, write and refuse."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import CONVOLUTIONS, for_onnxruntime

from trtdet import build, load_config
from trtdet.options import BuildOptions, NmsOptions
from trtdet.passes.provenance import Origin
from trtdet.performance import open_targets
from trtdet.performance.profiling import nodes_behind

CONFIG = ["--config", "shapes"]
SHORT = ["--seconds", 0.02, "--warm-up", 0, "--min-runs", 20]
FEW = ["--runs", 3, "--warm-up", 1]
ON_HOST = "NMS host against onnx (on the host it is not timed)"


@pytest.fixture(scope="module")
def bundle(model, calibration_images, tmp_path_factory):
    """INT8 without an engine."""
    options = for_onnxruntime(effort="none", images=calibration_images, num_images=4, int8_all=True)
    return build(model, load_config("shapes"), tmp_path_factory.mktemp("measured") / "bundle", options).bundle.path


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_bench_of_a_model(run, model, tmp_path):
    done = run("bench", model, *CONFIG, *SHORT, "--streams", 1, 2, "-o", tmp_path / "b.json", "--json").ok
    found = done.json
    assert set(found["latency_ms"]) >= {"mean", "stddev", "p50", "p95", "p99"}
    assert 0 < found["latency_ms"]["p50"] <= found["latency_ms"]["p95"] <= found["latency_ms"]["p99"]
    assert found["throughput"] > 0
    (one,) = found["targets"]
    assert one["ran_on"] == "onnxruntime (CPU)"
    assert one["transfers"] is None
    (point,) = one["points"]
    assert (point["compute_ms"], point["transfers_ms"], point["ratio"]) == (None, None, None)
    assert point["latency_ms"]["runs"] >= 20
    assert [rate["streams"] for rate in point["throughput"]] == [1, 2]
    assert json.loads((tmp_path / "b.json").read_text()) == found
    assert leftovers(tmp_path) == ["b.json"]
    assert "target" in done.err and "images/s" in done.err


def test_bench_of_a_bundle_against_its_model(run, model, bundle, calibration_images):
    done = run("bench", bundle, *CONFIG, *SHORT, "--baseline", model, "--images", calibration_images).ok
    rows = [line for line in done.out.splitlines() if line.startswith(f"{bundle} ")]
    assert len(rows) == 2
    assert f"of {model} (90% interval)" in done.out
    assert f"images: from '{calibration_images}'" in done.out
    assert "clocks not known" in done.out
    assert "warning: there was no warm-up" in done.err
    # Both suppress in the graph, with the same thresholds, though the model alone would leave it to the host.
    assert done.out.count(", NMS onnx\n") == 2
    assert "suppression" not in done.err


@pytest.fixture(scope="module")
def bundles(model, tmp_path_factory):
    """Of the float model, without an engine: by what does the suppression, and how many candidates it has."""
    folder, paths = tmp_path_factory.mktemp("suppressed"), {}
    for nms, topk in (("onnx", 300), ("onnx", 400), ("host", 300)):
        config = load_config("shapes").with_nms(pre_nms_topk=topk)
        options = BuildOptions(precision="fp32", nms=NmsOptions(mode=nms), backend="onnxruntime")
        paths[nms, topk] = build(model, config, folder / f"{nms}-{topk}", options).bundle.path
    return paths


def test_a_model_is_given_the_suppression_of_the_bundles_beside_it(model, bundles):
    config = load_config("shapes")
    for (nms, topk), bundle in bundles.items():
        beside, alone = open_targets([model, bundle], config)
        assert (beside.nms, beside.thresholds.pre_nms_topk if nms == "onnx" else topk) == (nms, topk)
        assert beside.unlike(alone) == alone.unlike(beside) == ""
        assert (beside.runner.outputs[0] == "num_dets") == (nms == "onnx")
    mixed = open_targets([model, *bundles.values()], config)
    assert mixed[0].nms == "host"
    differences = [ON_HOST, "", "NMS with pre_nms_topk 400 against 300", ON_HOST]
    assert [target.unlike(mixed[1]) for target in mixed] == differences


def test_targets_with_unlike_suppression_are_told_apart_in_the_row(run, bundles):
    one, few, other = bundles.values()
    done = run("bench", one, few, other, *SHORT).ok
    lines = {
        path: [line for line in done.out.splitlines() if line.startswith(f"{path} ")] for path in (one, few, other)
    }
    assert all("; NMS with pre_nms_topk 400 against 300" in line for line in lines[few])
    assert all(f"; {ON_HOST}" in line for line in lines[other])
    assert not any(";" in line for line in lines[one])
    assert f"warning: '{other}' is not timed with the same suppression (NMS host against onnx" in done.err
    found = run("bench", one, other, *SHORT, "--json").json
    assert [target["nms_differs"] for target in found["targets"]] == ["", ON_HOST]
    profiled = run("profile", one, "--against", other, *FEW, "--json")
    assert profiled.json["against"]["nms_differs"] == "NMS onnx against host (on the host it is not timed)"
    assert any("not timed with the same suppression" in warning for warning in profiled.json["warnings"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("bench --config shapes --seconds 0", "--seconds must be above 0"),
        ("bench --config shapes -o bench.txt", "-o bench.txt must end in .json"),
        ("bench", "is a model, which needs --config"),
        ("bench --config shapes --images nowhere", "image source 'nowhere' does not exist"),
        # Before it measures for a quarter of an hour.
        ("bench --config shapes --batch 1 8 --seconds 1000", "takes batches of exactly 1, got --batch 8"),
        ("profile --config shapes --runs 1", "--runs must be at least 2, got 1"),
        ("profile --config shapes --batch 2", "takes batches of exactly 1, got --batch 2"),
        ("profile --config shapes -o profile.md", "-o profile.md must end in .json or .html"),
    ],
)
def test_wrong_options_are_refused(run, model, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    command, *options = arguments.split()
    run(command, model, *options).refused(words)
    assert leftovers(tmp_path) == []


def test_bench_refuses_a_configuration_for_bundles_alone(run, bundle):
    run("bench", bundle, *CONFIG).refused("--config is for models,")


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "--seconds", "600", "--warm-up", "0", "--streams", "2"],
        ["bench", "--seconds", "0.02", "--warm-up", "600"],
        ["profile", "--runs", "100000"],
    ],
)
def test_ctrl_c_ends_it_with_nothing_written(model, tmp_path, command):
    scratch, results = tmp_path / "scratch", tmp_path / "results"
    scratch.mkdir()
    results.mkdir()
    measuring = [command[0], str(model), *command[1:], *CONFIG, "-o", str(results / "result.json")]
    with subprocess.Popen(
        [sys.executable, "-c", STARTED, *measuring],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    ) as process:
        try:
            assert process.stdout.readline() == "measuring\n"
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert "stopped; nothing was left half-written" in said
    assert "Traceback" not in said
    assert leftovers(results) == []
    assert [name for name in leftovers(scratch) if "trtdet" in name] == []


STARTED = """
import signal, sys
from trtdet.backends import OnnxRunner
from trtdet.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)
load = OnnxRunner.new_context

def new_context(*arguments):
    made = load(*arguments)
    print("measuring", flush=True)
    return made

OnnxRunner.new_context = new_context
sys.exit(main(sys.argv[1:]))
"""
"""Says when the first context is there, so that the signal meets the measurement."""


def test_what_trtdet_wrote_is_read_out_of_the_model_of_a_bundle(bundle):
    """The same whether that model runs or an engine that was built from it."""
    (target,) = open_targets([bundle], None)
    found = nodes_behind(bundle, target)
    assert len(found.convs) == CONVOLUTIONS
    assert {Origin.QDQ, Origin.DECODE} <= set(found.origins.values())
    assert nodes_behind(bundle, replace(target, runner=SimpleNamespace(model=None))) == found


def test_profile_of_a_model(run, model, tmp_path):
    done = run("profile", model, *CONFIG, *FEW, "-o", tmp_path / "p.json", "--json").ok
    found = done.json
    assert found == json.loads((tmp_path / "p.json").read_text())
    assert leftovers(tmp_path) == ["p.json"]
    kinds = {one["name"]: one for one in found["types"]}
    assert kinds["Conv"]["count"] == CONVOLUTIONS
    assert sum(one["share"] for one in found["types"]) == pytest.approx(1)
    assert sum(one["ms"] for one in found["layers"]) == pytest.approx(found["sum_ms"])
    assert found["overhead"] == pytest.approx(found["sum_ms"] / found["latency_ms"]["mean"] - 1)
    assert {"stem", "head0", "trtdet/decode"} <= {one["name"] for one in found["parts"]}
    assert found["runs"] == 3


def test_profile_of_a_bundle_against_its_model(run, model, bundle, tmp_path):
    page = tmp_path / "p.html"
    done = run("profile", bundle, "--against", model, *CONFIG, *FEW, "--top", 4, "-o", page, "--json").ok
    kinds = {one["name"] for one in done.json["types"]}
    assert "QuantizeLinear" in kinds
    assert "QuantizeLinear" not in {one["name"] for one in done.json["against"]["types"]}
    assert "NonMaxSuppression" in kinds & {one["name"] for one in done.json["against"]["types"]}
    assert done.json["against"]["nms_differs"] == ""
    convs = [name for one in done.json["against"]["differences"] for name in one["convs"]]
    assert len(set(convs)) == len(convs) == CONVOLUTIONS
    assert all(one["low_ms"] > 0 for one in done.json["against"]["slower"])
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert text.rstrip().endswith("</html>")
    assert "Layers in the order of execution" in text
