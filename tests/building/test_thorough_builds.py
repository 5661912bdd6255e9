"""A build with --effort thorough that is stopped and resumed gives the same bundle."""

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'trtdet[correct]'")

from models import SMALL_MODEL, for_onnxruntime

from trtdet import build, load_config
from trtdet.demo import shapes
from trtdet.options import CalibrationOptions, changed
from trtdet.options.fields import EFFORTS
from trtdet.quantization.gradients import reconstruction
from trtdet.quantization.gradients.reconstruction import Schedule

CONFIG = load_config("shapes")
PASSES = 3


class Stopped(Exception):
    pass


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(reconstruction, "Schedule", lambda: Schedule(passes=PASSES))
    images = shapes.generate(tmp_path / "shapes", "calibration", 8).images
    calibration = CalibrationOptions(rule="minmax", images=images)
    return for_onnxruntime(
        effort=",".join(EFFORTS["thorough"]) or "none", guard="off", calibration=calibration, int8_all=True
    )


@pytest.fixture
def told():
    """The images that the reconstruction was told of."""
    return []


@pytest.fixture
def progress(told):
    """Stops a build once, in the second pass over six images."""

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "correcting: reconstruction":
            told.append(done)
            if len(told) == 6 + 2:
                raise Stopped

    return progress


def test_a_stopped_build_goes_on_and_leaves_nothing_beside_the_bundle(options, tmp_path, told, progress):
    place = tmp_path / "b"
    with pytest.raises(Stopped):
        build(SMALL_MODEL, CONFIG, place, options, progress)
    kept = tmp_path / "b.reconstruction"
    assert kept.is_file() and not place.exists()
    made = build(SMALL_MODEL, CONFIG, place, options, progress)
    assert told[8] == 7  # after the first pass, which was not repeated
    assert not kept.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "shapes"]
    whole = build(SMALL_MODEL, CONFIG, tmp_path / "c", options)
    assert made.bundle.model.read_bytes() == whole.bundle.model.read_bytes()
    assert any(said.startswith("reconstruct: ") for said in made.bundle.manifest.quantization.corrections)


def test_a_reconstruction_of_other_ranges_starts_anew(options, tmp_path, told, progress):
    with pytest.raises(Stopped):
        build(SMALL_MODEL, CONFIG, tmp_path / "b", options, progress)
    other = changed(options, calibration=changed(options.calibration, rule="percentile"))
    build(SMALL_MODEL, CONFIG, tmp_path / "b", other, progress)
    assert told[8] == 1
