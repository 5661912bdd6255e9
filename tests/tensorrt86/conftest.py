from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from onnx_parser import TENSORRT_HEADERS, Parser, UnavailableError

PLUGINS = Path(__file__).resolve().parent.parent.parent / "plugins"


@pytest.fixture(scope="session", autouse=True)
def trt():
    """TensorRT 8.6.0. Its ``Runtime`` is never made here: without a GPU it ends the process."""
    try:
        version = importlib.metadata.version("tensorrt")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version != "8.6.0":
        pytest.skip(f"needs TensorRT 8.6.0 for Python 3.10, here is {version}; 'make test-tensorrt86' sets both up")
    return importlib.import_module("tensorrt")


@pytest.fixture(scope="session")
def log(trt):
    """The one logger that the library keeps for a process; ``messages`` holds what it was told."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            self.messages.append(message)

    return Log()


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The plugin library for TensorRT 8.6, with PTX of one architecture."""
    if TENSORRT_HEADERS not in os.environ:
        pytest.skip(f"set {TENSORRT_HEADERS} to a folder that holds 8.6/include/NvInfer.h")
    missing = [tool for tool in ("cmake", "g++", "nvcc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {missing[0]} to build the plugin, which is not on PATH")
    folder = tmp_path_factory.mktemp("plugins")
    headers = Path(os.environ[TENSORRT_HEADERS]) / "8.6" / "include"
    options = ("-DCMAKE_CXX_COMPILER=g++", f"-DTENSORRT_INCLUDE_DIR={headers}", "-DCMAKE_CUDA_ARCHITECTURES=90-virtual")
    for command in (
        ("cmake", "-S", PLUGINS, "-B", folder, *options),
        ("cmake", "--build", folder, "--target", "trtdet_plugins"),
    ):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-4000:]
    return folder / "libtrtdet_plugins.so"


@pytest.fixture(scope="session")
def parser(trt, tmp_path_factory):
    """The library's own ONNX parser."""
    try:
        return Parser(trt, tmp_path_factory.mktemp("parser"))
    except UnavailableError as error:
        pytest.skip(str(error))
