"""The C++ runtime's TensorRT engine, built against the headers of every version at hand, over stand-ins for TensorRT's
libraries and for the driver."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SERVICE = Path(__file__).resolve().parents[2] / "service"
HEADERS = "TRTDET_TENSORRT_HEADERS"
SDK = ", the headers that come with the SDK of TensorRT-RTX"
VERSIONS = ("8.6", "10.0", "10.9", "10.16", "11.1")
MEMORY, THREADS = "address,undefined", "thread"

pytestmark = pytest.mark.slow


def headers_of(version: str) -> Path:
    if HEADERS not in os.environ:
        pytest.skip(f"set {HEADERS} to a folder that holds VERSION/include/NvInfer.h")
    headers = Path(os.environ[HEADERS]) / version / "include"
    if not headers.is_dir():
        pytest.skip(f"{HEADERS} holds no {version}/include{SDK if version == 'rtx' else ''}")
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


def check_library(folder: Path, headers: Path, sanitizers: str, target: str) -> None:
    """Builds against headers into a folder; what comes of it needs no library of NVIDIA to be loaded."""
    options = (f"-DTENSORRT_INCLUDE_DIR={headers}", f"-DTRTDET_SANITIZE={sanitizers}", "-DCMAKE_BUILD_TYPE=Debug")
    said = run("cmake", "-S", SERVICE, "-B", folder, "-DCMAKE_CXX_COMPILER=g++", *options)
    assert f"TensorRT engine: headers of {headers}" in said
    built = run("cmake", "--build", folder, "--target", target, "--parallel", 2)
    assert "warning" not in built

    library = folder / "libtrtdet.so"
    undefined = run("nm", "-D", "-C", "--undefined-only", library)
    assert not re.search(r"nvinfer|createInfer|getPlugin|getInferLib| U cu[A-Z]", undefined)
    needed = run("readelf", "-d", library)
    assert not re.search(r"libnvinfer|libtensorrt|libcuda", needed)


def check_cases(folder: Path) -> str:
    """Runs the cases over the stand-ins and gives what they print."""
    tests = run("ctest", "--test-dir", folder, "-R", "^tensorrt$", "--verbose")
    assert "100% tests passed, 0 tests failed out of 1" in tests
    return tests


@pytest.mark.parametrize(("version", "sanitizers"), [*((one, MEMORY) for one in VERSIONS), (VERSIONS[-1], THREADS)])
def test_it_compiles_without_a_warning_links_nothing_of_nvidia_and_does_what_it_says(tmp_path, version, sanitizers):
    check_library(tmp_path, headers_of(version), sanitizers, "trtdet_tensorrt_test")
    check_cases(tmp_path)


def test_the_engine_of_tensorrt_rtx_does_what_it_says(tmp_path, monkeypatch):
    """Against headers with its interface, made from TensorRT's. Where its wheel is installed the library itself is
    loaded and asked for its version, which needs no GPU."""
    headers = tmp_path / "include"
    run(sys.executable, SERVICE / "tests" / "standin" / "rtx_headers.py", headers_of(VERSIONS[-1]), headers)
    libraries = importlib.util.find_spec("tensorrt_rtx_libs")
    if libraries is not None and libraries.origin is not None:
        monkeypatch.setenv("TENSORRT_RTX_LIBRARIES", str(Path(libraries.origin).parent))
    folder = tmp_path / "build"
    check_library(folder, headers, MEMORY, "trtdet_tensorrt_test")
    assert ("asked the library itself" in check_cases(folder)) == (libraries is not None)


def test_it_compiles_against_the_headers_of_tensorrt_rtx_itself(tmp_path):
    check_library(tmp_path, headers_of("rtx"), MEMORY, "trtdet")
