"""trtdet switches off onnxruntime's telemetry before it is imported, unless the user has decided."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import trtdet, os
assert "onnxruntime" not in __import__("sys").modules
print(os.environ["ORT_DISABLE_TELEMETRY"])
"""


@pytest.mark.parametrize(("set_by_user", "expected"), [(None, "1"), ("0", "0"), ("1", "1")])
def test_telemetry_is_off_unless_the_user_has_set_it(set_by_user, expected):
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    if set_by_user is not None:
        environment["ORT_DISABLE_TELEMETRY"] = set_by_user
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == expected


def test_a_run_of_onnxruntime_leaves_no_file(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    environment |= {"TMPDIR": str(tmp_path / "temporary"), "HOME": str(tmp_path / "home")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "home" / ".cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("temporary", "home"):
        (tmp_path / name).mkdir()
    program = (
        "from trtdet.exporter import SHAPES_MODEL; import onnxruntime; "
        "onnxruntime.InferenceSession(str(SHAPES_MODEL), providers=['CPUExecutionProvider'])"
    )
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
