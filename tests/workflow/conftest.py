"""The shipped detector and generated images, made once for all tests of whole commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trtdet import shapes
from trtdet.cli import main
from trtdet.zoo import SHAPES_MODEL


@dataclass(frozen=True)
class Ran:
    """What a command did: exit code, standard output and standard error."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.out)
        return value

    @property
    def message(self) -> str:
        """The one line that says what was wrong."""
        lines = [line for line in self.err.splitlines() if line.startswith("trtdet: error: ")]
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("trtdet: error: ")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a command in this process."""

    def call(*arguments: object) -> Ran:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def model() -> Path:
    return SHAPES_MODEL


@pytest.fixture(scope="session")
def calibration_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes.generate(tmp_path_factory.mktemp("shapes"), "calibration", 20).images


@pytest.fixture(scope="session")
def validation(tmp_path_factory: pytest.TempPathFactory) -> shapes.ShapesSplit:
    return shapes.generate(tmp_path_factory.mktemp("shapes"), "val", 16)


@pytest.fixture
def images(calibration_images: Path, tmp_path: Path) -> Path:
    """A copy of the calibration images that a test may spoil."""
    return Path(shutil.copytree(calibration_images, tmp_path / "images"))
