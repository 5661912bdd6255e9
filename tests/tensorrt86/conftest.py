from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def trt() -> Any:
    """TensorRT 8.6.0. Its ``Runtime`` is never made here: without a GPU it ends the process."""
    try:
        version = importlib.metadata.version("tensorrt")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version != "8.6.0":
        pytest.skip(f"needs TensorRT 8.6.0 for Python 3.10, here is {version}; 'make test-tensorrt86' sets both up")
    return importlib.import_module("tensorrt")


@pytest.fixture(scope="session")
def log(trt: Any) -> Any:
    """The one logger that the library keeps for a process; ``messages`` holds what it was told."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            self.messages.append(message)

    return Log()
