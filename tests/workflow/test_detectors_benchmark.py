"""The benchmark that quantises any detectors with trtdet and its peers, on a small detector and without the peers."""

import importlib
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from models import CONVOLUTIONS, small_detector

from trtdet import build, load_config
from trtdet.options import BuildOptions, changed

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"

DFL = """<ir_version: 8, opset_import: ["" : 13]>
g (float[1,3,8,8] x) => (float[1,1,4,64] boxes, float[1,2,8,8] scores) {
    stem = Conv(x, w)
    map = Conv(stem, v)
    by_side = Reshape(map, sides)
    bins = Transpose<perm=[0,2,1,3]>(by_side)
    shares = Softmax<axis=1>(bins)
    boxes = Conv(shares, b)
    logits = Conv(stem, u)
    scores = Sigmoid(logits)
}"""


@pytest.fixture
def detectors(monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS))
    yield importlib.import_module("detectors")
    for name in ("detectors", "cases", "process"):
        sys.modules.pop(name, None)


def test_what_no_convolution_follows(detectors):
    model = small_detector()
    cases = sys.modules["cases"]
    convolutions = {node.name for node in model.graph.node if node.op_type == "Conv"}
    plain, head = cases.after_the_last_convolution(model), cases.after_the_last_convolution(model, and_head=True)
    assert plain
    assert not convolutions & set(plain)
    assert set(plain) < set(head)
    assert len(convolutions & set(head)) == 6, "for boxes and for scores, on three levels"
    assert all(name.startswith("/head") for name in convolutions & set(head))


def test_the_mean_of_a_distribution_is_of_the_decode(detectors):
    model = onnx.parser.parse_model(DFL)
    for node in model.graph.node:
        node.name = node.output[0]
    cases = sys.modules["cases"]
    assert "map" not in cases.after_the_last_convolution(model)
    assert set(cases.after_the_last_convolution(model, and_head=True)) == {
        *("map", "by_side", "bins", "shares", "boxes", "logits", "scores")
    }


def test_convolutions_are_counted_as_written(detectors, small_model, calibration_images, tmp_path):
    assert detectors.quantized_convolutions(onnx.load(small_model)) == (0, CONVOLUTIONS)
    quick = BuildOptions(effort="none", backend="onnxruntime")
    options = changed(quick, mode="host", images=calibration_images, num_images=2, int8_all=True)
    bundle = build(small_model, load_config("shapes"), tmp_path / "bundle", options).bundle
    assert detectors.quantized_convolutions(onnx.load(bundle.model)) == (CONVOLUTIONS, CONVOLUTIONS)


def test_the_table_says_what_is_missing(detectors):
    good = detectors.Row("a", "trtdet", "default", "", 0.3, -0.002, -0.004, 0.001, 0.9, 0.88, 0.92, (9, 10), 12.0)
    bare = detectors.Row("b", "trtdet", "default", "", None, None, None, None, 0.8, 0.7, 0.85, (10, 10), 3.0)
    bad = detectors.Row("a", "nncf", "performance", "no | word")
    lines = detectors.table([good, bad, bare]).splitlines()
    assert lines[2] == (
        "| a (30.00) | trtdet | default | -0.20 (-0.40 .. +0.10) | 90.00 (88.00 .. 92.00) | 9 of 10 | 12 |"
    )
    assert lines[3].startswith("|  | nncf | performance | no \\| word |")
    assert lines[4].startswith("| b | trtdet | default | - | 80.00")
    assert lines[-2:] == [
        "| trtdet | default | 2 | 0.20 | 0.20 | 85.00 | 80.00 |",
        "| nncf | performance | 0 | - | nan | nan | nan |",
    ]


def test_the_mean_loss_has_the_interval_of_the_images_that_detectors_share(detectors):
    draws = np.random.default_rng(0).normal(0, 0.01, 1000)
    first, second = (
        detectors.Row(
            *(name, "trtdet", "default", "", 0.3, -0.01, -0.02, 0.0, 0.9, 0.88, 0.92, (9, 10), 12.0),
            resampled=tuple(sign * draws - 0.01),
        )
        for name, sign in (("a", 1), ("b", -1))
    )
    assert detectors.mean_loss([first, second]) == "1.00 (1.00 .. 1.00)", "what one loses the other gains"
    low, high = np.percentile(1 - 100 * draws, [5, 95])
    assert detectors.mean_loss([first, first]) == f"1.00 ({low:.2f} .. {high:.2f})"


@pytest.fixture
def script(detectors, small_model, calibration_images, validation, tmp_path, monkeypatch):
    """Runs the script on the small detector, with images of its own, and gives its rows."""
    own = tmp_path / "models" / "small"
    shutil.copytree(calibration_images, own / "train")
    shutil.copytree(validation.images, own / "val")
    shutil.copy(small_model, own.with_suffix(".onnx"))
    own.with_suffix(".yaml").write_text("extends: shapes\nname: small\nnms: {score_threshold: 0.0001}\n")
    monkeypatch.setitem(detectors.METHODS, "trtdet", {"plain": ("--effort", "none", "--backend", "onnxruntime")})
    command = ["detectors.py", "--models", tmp_path / "models", "--data", tmp_path, "--work", tmp_path / "work"]
    command += ["--quantizers", "trtdet", "-o", tmp_path / "out"]

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [*map(str, [*command, *arguments])])
        detectors.main()
        return detectors.kept_rows(tmp_path / "out" / "rows.jsonl")

    return run


def test_a_row_that_is_there_is_not_measured_again(detectors, script, tmp_path, capsys):
    (row,) = script()
    assert row.key == ("small", "trtdet", "plain", detectors.ALL)
    assert row.difference is None, "its images have no annotations"
    first = capsys.readouterr()
    assert "trtdet plain" in first.err
    assert "5 judge corrections, 16 are scored; no image" in first.out
    assert first.out == (tmp_path / "out" / "detectors.md").read_text()
    script()
    second = capsys.readouterr()
    assert (second.out, second.err) == (first.out, "")


def test_images_that_decisions_were_made_on_are_scored_apart(detectors, script, validation, tmp_path, capsys):
    own = tmp_path / "models" / "small"
    shutil.copy(validation.annotations, own / "val.json")
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    for number, image in enumerate(sorted((own / "val").iterdir())[:6]):
        shutil.copy(image, chosen / f"renamed-{number}{image.suffix}")
    rows = {row.images: row for row in script("--chosen-on", chosen, "--detectors", "small")}
    assert {images: row.count for images, row in rows.items()} == {
        detectors.ALL: 16,
        detectors.OTHERS: 10,
        detectors.CHOSEN: 6,
    }
    assert all(row.reference == pytest.approx(1) for row in rows.values()), "FP32 drew its own boxes"
    for row in rows.values():
        assert detectors.BOOTSTRAP.interval(row.resampled) == pytest.approx((row.low, row.high), abs=1e-5)
    assert "6 of which decisions were made on" in capsys.readouterr().out


def test_an_image_with_two_purposes_ends_the_script(script, tmp_path):
    own = tmp_path / "models" / "small"
    calibrates = min((own / "train").iterdir())
    shutil.copy(calibrates, own / "val" / f"another-name{calibrates.suffix}")
    with pytest.raises(SystemExit, match="1 calibrate and are scored, 0 judge and are scored"):
        script()


def test_a_detector_that_is_not_there(script, capsys):
    with pytest.raises(SystemExit):
        script("--detectors", "large")
    assert "large not in" in capsys.readouterr().err
