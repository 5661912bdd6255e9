"""A short run of the scripts that fuzz inputs and build random networks; both take minutes for their whole numbers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


@pytest.mark.slow
@pytest.mark.tensorrt
def test_300_inputs_give_a_result_or_one_error(tmp_path):
    pytest.importorskip("torch", reason="checkpoints are read with torch: pip install 'trtdet[export]'")
    done = run("fuzz.py", "-o", tmp_path, "--count", 300, "--seed", 7)
    assert done.returncode == 0, done.stderr
    _, *kinds, total = (line.strip("| ").split(" | ") for line in done.stdout.splitlines()[1:])
    assert len(kinds) == 25
    assert total[0] == "all" and int(total[1]) >= 300
    assert total[4:6] == ["0", "0"], done.stderr
    # The same inputs are not read again.
    assert run("fuzz.py", "-o", tmp_path, "--count", 300, "--seed", 7).stdout == done.stdout


@pytest.mark.slow
def test_random_networks_are_built_with_every_convolution_in_int8(tmp_path):
    done = run("random_networks.py", "-o", tmp_path, "--count", 5)
    assert done.returncode == 0, done.stderr
    cells = done.stdout.splitlines()[-1].strip("| ").split(" | ")
    assert cells[0] == cells[2] == "5", done.stderr
    assert float(cells[5].rstrip("%")) < 30
