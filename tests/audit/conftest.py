"""The library that engines of these tests are built with, and the benchmark of estimates."""

import importlib
import sys
from pathlib import Path

import pytest

from trtdet.backends import choose


@pytest.fixture(scope="session")
def rtx():
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'trtdet[rtx]'")
    return choose("tensorrt-rtx")


@pytest.fixture(scope="session")
def benchmark():
    """The module, which is then forgotten by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        module = importlib.import_module("estimates")
    for name in ("estimates", "fused_plan"):
        sys.modules.pop(name, None)
    return module
