"""The benchmark that turns each correction on and off, on a small detector."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trtdet.options.fields import EFFORTS

pytestmark = pytest.mark.benchmark

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def data(validation, calibration_images, tmp_path_factory):
    """The small detector's images, laid out as COCO's are."""
    folder = tmp_path_factory.mktemp("data")
    coco = folder / "coco"
    (coco / "annotations").mkdir(parents=True)
    (coco / "train2017").symlink_to(calibration_images)
    (coco / "val2017").symlink_to(validation.images)
    (coco / "annotations" / "instances_val2017.json").symlink_to(validation.annotations)
    return folder


def run(model: Path, data: Path, output: Path, *arguments: object) -> list[list[str]]:
    """The lines of the table, each as its cells."""
    given = (model, "--config", "shapes", "--data", data, "--num-images", 4, "--score-images", 4, "--int8-all")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "ablation.py"), *map(str, [*given, "-o", output, *arguments])],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    title, table = done.stdout.strip().split("\n\n")
    assert " convolutions in INT8, mAP of FP32 100.00, 4 images" in title
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_every_correction_is_on_alone_and_off_alone(model, data, tmp_path):
    rows = run(model, data, tmp_path, "--effort", "default")
    names = [f"`{name}`" for name in EFFORTS["default"]]
    assert len(names) > 2
    assert [row[0] for row in rows] == [
        *("none", *(f"{name} alone" for name in names)),
        *("all", *(f"all but {name}" for name in names)),
    ]
    found = {row[0]: row for row in rows}
    assert found["none"][4] == "0"
    assert float(found["all"][1]) < float(found["none"][1])
    # The maps' Muls are nodes; integers and biases are none.
    assert int(found["`smooth` alone"][4]) > 0
    assert int(found["`round` alone"][4]) == int(found["`bias` alone"][4]) == 0


def test_a_further_run_goes_on_where_it_was(model, data, tmp_path):
    first = run(model, data, tmp_path, "--effort", "bias")
    assert [row[0] for row in first] == ["none", "`bias` alone"]
    kept = tmp_path / f"{model.stem}.jsonl"
    header, _, bias = kept.read_text().splitlines()
    kept.write_text(f"{header}\n{json.dumps({**json.loads(bias), 'error': 7.0})}\n")
    again = run(model, data, tmp_path, "--effort", "bias")
    assert (again[0][:-1], again[1][1]) == (first[0][:-1], "7.0000")


def test_some_rows_alone(model, data, tmp_path):
    rows = run(model, data, tmp_path, "--effort", "bias", "--rows", "`bias` alone")
    assert [(row[0], row[4]) for row in rows] == [("`bias` alone", "")]
