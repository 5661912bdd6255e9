"""TensorRT 8.6.0 on a machine without a GPU: trtdet says so in one line, and never gets as far as a crash."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trtdet.backends import choose, cuda
from trtdet.errors import BackendError
from trtdet.exporter import SHAPES_MODEL

pytestmark = [pytest.mark.tensorrt86, pytest.mark.skipif(bool(cuda.devices()), reason="this machine has a CUDA device")]

SAID = "TensorRT 8.6.0 builds only on a machine with a CUDA device, and this machine has no CUDA driver"


def trtdet(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trtdet", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_builder_itself_only_raises_a_type_error(trt, log):
    with pytest.raises(TypeError, match="factory function returned nullptr"):
        trt.Builder(log)


def test_the_backend_says_what_to_do_instead():
    said = f"{SAID}; build on one that has, or use --backend tensorrt-rtx, which needs no GPU"
    with pytest.raises(BackendError, match=said):
        choose("tensorrt")


def test_the_doctor_lists_it_as_missing_with_the_reason():
    done = trtdet("doctor", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = (one for one in json.loads(done.stdout)["backends"] if one["name"] == "tensorrt")
    assert not found["ok"] and found["detail"] == SAID and "tensorrt-rtx" in found["fix"]


@pytest.mark.parametrize("precision", ["--int8", "--fp16"])
def test_a_build_ends_with_one_line_and_leaves_nothing(tmp_path, precision):
    output = tmp_path / "bundle"
    arguments = [SHAPES_MODEL, "--config", "shapes", precision, "--backend", "tensorrt", "-o", output]
    images = ["--images", tmp_path] if precision == "--int8" else []
    done = trtdet("build", *arguments, *images)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == f"trtdet: error: {SAID}; build on one that has, or use --backend tensorrt-rtx, which needs no GPU\n"
    )
    assert not output.exists()
    said = json.loads(trtdet("build", *arguments, *images, "--json").stdout)
    assert said["error"]["type"] == "BackendError" and said["error"]["message"].startswith(SAID)
