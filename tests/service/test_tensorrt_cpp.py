"""The C++ runtime's TensorRT engine, built against the headers of every version at hand, over stand-ins for TensorRT's
libraries and for the driver."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SERVICE = Path(__file__).resolve().parents[2] / "service"
HEADERS = "TRTDET_TENSORRT_HEADERS"
VERSIONS = ("8.6", "10.0", "10.9", "10.16", "11.1")
MEMORY, THREADS = "address,undefined", "thread"

pytestmark = pytest.mark.slow


def headers_of(version: str) -> Path:
    if HEADERS not in os.environ:
        pytest.skip(f"set {HEADERS} to a folder that holds VERSION/include/NvInfer.h")
    headers = Path(os.environ[HEADERS]) / version / "include"
    if not headers.is_dir():
        pytest.skip(f"{HEADERS} holds no {version}/include")
    missing = [tool for tool in ("cmake", "g++") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {missing[0]} to build the C++ runtime, which is not on PATH")
    return headers


def run(*command: object, timeout: int = 1500) -> str:
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.parametrize(("version", "sanitizers"), [*((one, MEMORY) for one in VERSIONS), (VERSIONS[-1], THREADS)])
def test_it_compiles_without_a_warning_links_nothing_of_nvidia_and_does_what_it_says(
    tmp_path: Path, version: str, sanitizers: str
) -> None:
    headers = headers_of(version)
    options = (f"-DTENSORRT_INCLUDE_DIR={headers}", f"-DTRTDET_SANITIZE={sanitizers}", "-DCMAKE_BUILD_TYPE=Debug")
    said = run("cmake", "-S", SERVICE, "-B", tmp_path, "-DCMAKE_CXX_COMPILER=g++", *options)
    assert f"TensorRT engine: headers of {headers}" in said
    built = run("cmake", "--build", tmp_path, "--target", "trtdet_tensorrt_test", "--parallel", 2)
    assert "warning" not in built

    library = tmp_path / "libtrtdet.so"
    undefined = run("nm", "-D", "-C", "--undefined-only", library)
    assert not re.search(r"nvinfer|createInfer|getPlugin|getInferLib| U cu[A-Z]", undefined)
    needed = run("readelf", "-d", library)
    assert "libnvinfer" not in needed and "libcuda" not in needed

    tests = run("ctest", "--test-dir", tmp_path, "-R", "^tensorrt$", "--output-on-failure")
    assert "100% tests passed, 0 tests failed out of 1" in tests
