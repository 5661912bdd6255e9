"""The shipped detector and generated images, made once for all tests of whole commands."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from standin.machine import Finished

from trtdet.cli import main
from trtdet.demo import shapes
from trtdet.exporter import SHAPES_MODEL


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Runs a command in this process."""

    def call(*arguments: object) -> Finished:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Finished(code, captured.out, captured.err)

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
