"""The C++ runtime with the real libnvinfer of TensorRT 8.6.0, as far as that goes without a GPU: it is found, loaded
and asked for its version, and what does not fit is refused before anything of it is created. Its ``Runtime`` is never
made: without a device it ends the process."""

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from onnx_parser import built, why_not_built
from standin.machine import FOLDER, compile_library

from trtdet.backends import cuda
from trtdet.building import build
from trtdet.config import load_config
from trtdet.exporter import SHAPES_MODEL
from trtdet.options import BuildOptions, NmsOptions

SERVICE = Path(__file__).resolve().parents[2] / "service"

pytestmark = [pytest.mark.tensorrt86, pytest.mark.skipif(bool(cuda.devices()), reason="this machine has a CUDA device")]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """trtdet-bench, built with the headers of 8.6."""
    if reason := why_not_built("cmake", "g++"):
        pytest.skip(reason)
    folder = built(SERVICE, tmp_path_factory.mktemp("service"), "-DBUILD_TESTING=OFF", target="trtdet-bench")
    return folder / "bench" / "trtdet-bench"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A folder with the stand-in for the driver."""
    folder = tmp_path_factory.mktemp("driver")
    compile_library(FOLDER / "cuda.c", folder / "libcuda.so.1")
    return folder


@pytest.fixture
def bundle(tmp_path):
    """A bundle for TensorRT 8.6.0 and compute capability 8.9, with words for an engine."""
    options = BuildOptions(precision="fp32", backend="onnxruntime", nms=NmsOptions(mode="host"))
    build(SHAPES_MODEL, load_config("shapes"), tmp_path / "bundle", options)
    change(tmp_path / "bundle", version="8.6.0", engine=b"not an engine")
    return tmp_path / "bundle"


def change(bundle: Path, version: str, engine: bytes) -> None:
    (bundle / "model.engine").write_bytes(engine)
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["backend"] |= {"name": "tensorrt", "version": version, "sms": [89]}
    manifest["files"]["model.engine"] = hashlib.sha256(engine).hexdigest()
    (bundle / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def refusal(trt, program, bundle):
    """Runs the program with the libraries of the installed TensorRT, and gives the line in which it refuses.

    The engine alone is asked for, as else its network would be run by onnxruntime instead.
    """

    def call(*folders: Path, sm: int = 89) -> str:
        libraries = [
            argument for folder in (*folders, Path(trt.__file__).parent) for argument in ("--library-folder", folder)
        ]
        done = subprocess.run(
            [program, bundle, "--backend", "tensorrt", *libraries],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "CUDA_STANDIN_SM": str(sm)},
        )
        assert done.returncode == 1 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        return line.removeprefix("trtdet-bench: ")

    return call


def test_no_driver_is_said_and_nothing_crashes(refusal):
    assert re.fullmatch(
        r"the engine cannot be run here, as this machine has no CUDA driver \(libcuda\.so\.1: .*\); run this on a "
        r"machine with a CUDA device and NVIDIA's driver",
        refusal(),
    )


def test_the_library_is_loaded_and_tells_its_version(refusal, driver, bundle):
    change(bundle, version="8.6.1", engine=b"not an engine")
    assert refusal(driver) == (
        "the engine cannot be run here, as it was built with tensorrt 8.6.1, and 8.6.0 is installed here; build it "
        "again, or install that version"
    )


def test_a_device_that_does_not_fit_is_refused(refusal, driver):
    assert refusal(driver, sm=75) == (
        "the engine cannot be run here, as it was built for compute capability 8.9, and this machine has Stand-in GPU "
        "with 7.5; build it again here"
    )


def test_what_is_no_engine_is_refused_before_a_runtime_is_made(refusal, driver, bundle):
    change(bundle, version="8.6.0", engine=b"vtrt")
    assert refusal(driver) == "the engine is none of TensorRT: it does not start as one; build it again"
