"""The script that times the service with masks, keypoints and rotated boxes beside boxes alone."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from parts_model import config_of, network
from PIL import Image

from trtdet.building import build
from trtdet.options import BuildOptions

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "service" / "serve" / "trtdet-serve"

pytestmark = pytest.mark.benchmark


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "parts_served.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)


def test_each_detector_is_timed_beside_boxes_alone(tmp_path):
    if not PROGRAM.is_file():
        pytest.skip(f"needs '{PROGRAM}', which is not built: make service")
    for task in ("boxes", "seg", "all"):
        onnx.save(network(task), tmp_path / f"{task}.onnx")
        options = BuildOptions(precision="fp32", backend="onnxruntime")
        build(tmp_path / f"{task}.onnx", config_of(task), tmp_path / task, options)
    (tmp_path / "images").mkdir()
    for seed in range(3):
        pixels = np.random.default_rng(seed).integers(0, 256, (60, 80, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{seed}.png")
    given = ["--images", tmp_path / "images", "--service", PROGRAM, "--rounds", 2]
    given += ["--library-folder", Path(onnxruntime.__file__).parent / "capi"]
    report = tmp_path / "report.md"
    bundles = [tmp_path / task for task in ("boxes", "seg", "all")]
    done = run(*bundles, *given, "-o", report)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert report.read_text() == text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    assert [row[:2] for row in rows[1:]] == [
        ["boxes", "boxes"],
        ["seg", "masks"],
        ["all", "masks, keypoints, rotated boxes"],
    ]
    assert rows[1][6:] == ["", ""]
    assert all(float(row[5]) < float(row[4]) for row in rows[1:])
    assert "3 images, 2 rounds, one client; load of the machine" in text
    refused = run(*bundles[::-1], *given)
    assert refused.returncode == 1
    assert "name a bundle of boxes alone first" in refused.stderr
