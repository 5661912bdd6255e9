import importlib
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
from onnx_parser import Parser, UnavailableError, built, why_not_built

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
    if reason := why_not_built("cmake", "g++", "nvcc"):
        pytest.skip(reason)
    options = "-DCMAKE_CUDA_ARCHITECTURES=90-virtual"
    return built(PLUGINS, tmp_path_factory.mktemp("plugins"), options, target="trtdet_plugins") / "libtrtdet_plugins.so"


@pytest.fixture(scope="session")
def parser(trt, tmp_path_factory):
    """The library's own ONNX parser."""
    try:
        return Parser(trt, tmp_path_factory.mktemp("parser"))
    except UnavailableError as error:
        pytest.skip(str(error))
