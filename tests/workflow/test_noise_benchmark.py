"""The benchmark that says which tensors make most of the noise, on a small detector."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.benchmark

ROOT = Path(__file__).resolve().parents[2]


def test_the_noisiest_tensors_come_first_and_own_ranges_never_add_noise(model, calibration_images):
    script = ROOT / "benchmarks" / "noise.py"
    given = (model, "--config", "shapes", "--images", calibration_images, "--num-images", 4)
    done = subprocess.run(
        [sys.executable, str(script), *map(str, given)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:]]
    assert [(row[0], row[1]) for row in rows] == [(model.stem, str(number)) for number in (1, 2, 3)]
    shares = [int(row[2].removesuffix(" %")) for row in rows]
    assert 100 > shares[0] >= shares[1] >= shares[2] > 0
    assert all(int(row[3].removesuffix(" %")) <= share for row, share in zip(rows, shares, strict=True))
    assert all(" x " in row[4] for row in rows)
