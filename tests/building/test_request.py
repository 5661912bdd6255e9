"""A build that is asked for again is known by its request, before the model is parsed."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from models import SMALL_MODEL, for_onnxruntime

import trtdet
from trtdet.backends import cuda
from trtdet.building import request
from trtdet.building.comparison import rewritten
from trtdet.bundle import Bundle, GuardPart
from trtdet.config import Config
from trtdet.options import BuildOptions, CalibrationOptions, changed


@dataclass
class Asked:
    """A build that was done, with files that a test may change."""

    folder: Path
    model: Path
    config: Config
    options: BuildOptions

    @property
    def output(self) -> Path:
        return self.folder / "bundle"

    def unchanged(self, config: Config | None = None, options: BuildOptions | None = None) -> Bundle | None:
        return request.unchanged(self.model, config or self.config, self.output, options or self.options)


@pytest.fixture(scope="module")
def done(images, tmp_path_factory):
    """A build of the small detector on four images."""
    folder = tmp_path_factory.mktemp("asked")
    (folder / "images").mkdir()
    for path in sorted(images.iterdir())[:4]:
        shutil.copy(path, folder / "images")
    model = folder / "model.onnx"
    shutil.copy(SMALL_MODEL, model)
    config = trtdet.load_config("shapes")
    calibration = CalibrationOptions(images=folder / "images", check_input=False)
    asked = Asked(folder, model, config, for_onnxruntime(effort="none", calibration=calibration, int8_all=True))
    trtdet.build(model, config, asked.output, asked.options)
    return asked


@pytest.fixture
def asked(done, tmp_path):
    """A copy of the build for one test: the folder counts nowhere."""
    folder = tmp_path / "copy"
    shutil.copytree(done.folder, folder)
    options = changed(done.options, images=folder / "images")
    return Asked(folder, folder / "model.onnx", done.config, options)


def test_the_same_request_finds_its_bundle(asked):
    found = asked.unchanged()
    assert found is not None
    assert found.path == asked.output
    assert trtdet.build(asked.model, asked.config, asked.output, asked.options).up_to_date


def model_changed(asked: Asked) -> None:
    asked.model.write_bytes(asked.model.read_bytes() + b"\x12\x00")


def image_changed(asked: Asked) -> None:
    first, second = sorted((asked.folder / "images").iterdir())[:2]
    first.write_bytes(second.read_bytes())


def image_removed(asked: Asked) -> None:
    min((asked.folder / "images").iterdir()).unlink()


def bundle_spoilt(asked: Asked) -> None:
    (asked.output / "int8.onnx").write_bytes(b"spoilt")


def bundle_gone(asked: Asked) -> None:
    shutil.rmtree(asked.output)


def left_by_a_kill(asked: Asked) -> None:
    (asked.folder / "bundle.reconstruction").touch()


@pytest.mark.parametrize(
    "change", [model_changed, image_changed, image_removed, bundle_spoilt, bundle_gone, left_by_a_kill]
)
def test_a_changed_file_makes_another_request(asked, change: Callable[[Asked], None]):
    change(asked)
    assert asked.unchanged() is None


@pytest.mark.parametrize(
    "options", [{"rule": "mse"}, {"num_images": 3}, {"precision": "fp16"}, {"effort": "quick"}, {"int8_all": False}]
)
def test_other_options_make_another_request(asked, options):
    assert asked.unchanged(options=changed(asked.options, **options)) is None


def test_another_configuration_makes_another_request(asked):
    assert asked.unchanged(config=asked.config.with_nms(score_threshold=0.2)) is None


@pytest.mark.parametrize(
    "name, value",
    [
        ("trtdet.building.request.__version__", "0.0.9"),
        ("trtdet.building.request._distributions", lambda folder: ["numpy-9.dist-info"]),
        ("sys.version", "3.99"),
    ],
)
def test_other_versions_make_another_request(asked, monkeypatch, name, value):
    monkeypatch.setattr(name, value)
    assert asked.unchanged() is None


def test_another_gpu_makes_another_request(asked, monkeypatch):
    monkeypatch.setattr(cuda, "devices", lambda: (cuda.Device("a GPU", 90),))
    assert asked.unchanged() is None


def test_the_content_of_a_named_file_counts(asked, tmp_path):
    cache = tmp_path / "cache"
    cache.write_bytes(b"1")
    options = changed(asked.options, cache=cache)
    before = request.request_of(asked.model, asked.config, options)
    cache.write_bytes(b"2")
    assert before is not None
    assert request.request_of(asked.model, asked.config, options) != before


def test_weights_in_another_file_are_not_hashed_so_that_there_is_no_request(asked):
    asked.model.write_bytes(asked.model.read_bytes() + b"location")
    assert request.request_of(asked.model, asked.config, asked.options) is None


def test_too_few_images_are_warned_of_again(asked):
    options = changed(asked.options, num_images=5)
    assert request.request_of(asked.model, asked.config, options) is None


def test_a_bundle_that_ships_fp16_for_int8_is_found_too(asked):
    guard = GuardPart(shipped="fp16", least=1.02, reason="INT8 gains nothing")
    rewritten(asked.output, Bundle(asked.output), files={}, changes={"guard": guard})
    assert asked.unchanged() is not None


@pytest.mark.parametrize("worth, found", [(True, True), (False, False)])
def test_an_engine_that_was_not_compared_with_fp16_yet_is_looked_at_in_full(asked, worth, found):
    files = {"model.engine": b"engine", **({"worth.json": b"{}"} if worth else {})}
    rewritten(asked.output, Bundle(asked.output), files=files, changes={})
    assert (asked.unchanged() is not None) is found


def test_the_command_line_parses_no_model_for_a_bundle_that_is_up_to_date(asked):
    words = ["build", str(asked.model), "--config", "shapes", "--int8-all", "--images", str(asked.folder / "images")]
    words += [
        "--set",
        "calibration.check_input=false",
        "--effort",
        "none",
        "--backend",
        "onnxruntime",
        "-o",
        str(asked.folder / "b"),
    ]
    code = "import sys; from trtdet.cli import main; code = main(sys.argv[1:]); print('onnx' in sys.modules, code)"
    said = [
        subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert [text.splitlines()[-1] for text in said] == ["True 0", "False 0"]
    assert "up to date" in said[1]
    assert "wrote" in said[0]
