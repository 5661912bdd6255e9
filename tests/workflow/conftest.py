"""A small detector, the shipped one and generated images for the tests of whole commands."""

import shutil
from pathlib import Path

import pytest
from models import own_labels
from standin.machine import Finished

from trtdet.cli import main
from trtdet.demo import shapes
from trtdet.exporter import SHAPES_MODEL


@pytest.fixture
def run(capfd):
    """Runs a command in this process."""

    def call(*arguments: object) -> Finished:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Finished(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def model(small_model):
    """What most tests of a command need: any detector, as small as can be."""
    return small_model


@pytest.fixture(scope="session")
def dynamic(small_dynamic):
    """The same with an open batch."""
    return small_dynamic


@pytest.fixture(scope="session")
def trained():
    """The shipped detector, for tests that ask what is found."""
    return SHAPES_MODEL


@pytest.fixture(scope="session")
def calibration_images(once):
    folder = once("workflow-calibration", lambda path: shapes.generate(path, "calibration", 20))
    return folder / "calibration"


@pytest.fixture(scope="session")
def drawn(once):
    """Images with what is drawn in them, for what is found by the shipped detector."""
    made = once("workflow-val", lambda path: shapes.generate(path, "val", 16))
    # Of what is made already it only says where.
    return shapes.generate(made, "val", 16)


@pytest.fixture(scope="session")
def validation(once, drawn):
    """The same images, labelled by the small detector itself: in float it scores 100, and INT8 costs it much."""
    return shapes.ShapesSplit(drawn.images, once("own-labels.json", lambda path: own_labels(drawn, path)))


@pytest.fixture
def images(calibration_images, tmp_path):
    """A copy of the calibration images that a test may spoil."""
    return Path(shutil.copytree(calibration_images, tmp_path / "images"))


@pytest.fixture(scope="session")
def labelled(validation):
    """The options of the images that the small detector labelled itself."""
    return ["--images", validation.images, "--annotations", validation.annotations]


@pytest.fixture(scope="session")
def val_labelled(validation):
    """The same for the commands that calibrate as well."""
    return ["--val-images", validation.images, "--annotations", validation.annotations]


@pytest.fixture(scope="session")
def scored(drawn):
    """The options of the images with what is drawn in them."""
    return ["--images", drawn.images, "--annotations", drawn.annotations]
