"""Commands that are killed, and that lack disk or memory: the short form of ``benchmarks/kill.py``."""

import os
import subprocess

import pytest

from benchmarks import kill

pytestmark = pytest.mark.slow
KILLED = ("calibrate", "predict")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with kill.Runs(tmp_path_factory.mktemp("kills")) as runs:
        yield runs


def command(name: str) -> kill.Command:
    return next(one for one in kill.COMMANDS if one.name == name)


@pytest.fixture(scope="module")
def benches(runs):
    return {name: runs.bench(command(name)) for name in KILLED}


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_command_leaves_the_old_result_or_the_new_one(benches, name):
    row = kill.kill(benches[name], count=3, seed=2)
    assert row.faults == []
    assert row.kills["kills"] == row.kills["equal"] == 3 and row.kills["half"] == 0


def test_a_full_disk_is_told_in_one_line_and_the_old_result_stays(benches):
    if os.geteuid() != 0:
        pytest.skip("needs the right to mount a small disk: run as root")
    try:
        trouble = kill.full_disk(benches["predict"])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"mounting is not allowed here: {error.stderr}")
    assert trouble.faults == []
    assert trouble.ends["refused"] >= 3
    assert "No space left on device" in trouble.line


def test_too_little_memory_is_told_in_one_line(benches, monkeypatch):
    monkeypatch.setattr(kill, "MEMORY", (250, 500, 3000))
    trouble = kill.little_memory(benches["calibrate"])
    assert trouble.faults == []
    assert trouble.ends["refused"] >= 1 and trouble.ends["done"] >= 1
