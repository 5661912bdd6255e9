"""The programs of service/, which 'make service' builds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def program() -> Callable[[str], Path]:
    """Finds a program by its path in the build folder: ``build/service``, or what TRTDET_SERVICE_BUILD names, such as a
    build with sanitizers."""
    folder = Path(os.environ.get("TRTDET_SERVICE_BUILD", ROOT / "build" / "service"))

    def find(name: str) -> Path:
        path = folder / name
        if not path.is_file():
            pytest.skip(f"needs '{path}', which is not built: make service")
        return path

    return find
