"""The accuracy report in a bundle: made when asked for, and kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from models import CONVOLUTIONS, SMALL_MODEL

from trtdet import BuildOptions, CalibrationOptions, build, load_config
from trtdet.bundle import Bundle
from trtdet.demo import shapes
from trtdet.errors import ConfigError
from trtdet.pipeline.accuracy import ACCURACY

CONFIG = load_config("shapes")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> BuildOptions:
    images = shapes.generate(tmp_path_factory.mktemp("shapes"), "calibration", 8).images
    calibration = CalibrationOptions("minmax", images=images)
    return BuildOptions(calibration=calibration, backend="onnxruntime", int8_all=True, accuracy_report=True)


@pytest.mark.slow
def test_a_report_is_kept_and_can_be_added(options: BuildOptions, tmp_path: Path) -> None:
    place = tmp_path / "b"
    first = build(SMALL_MODEL, CONFIG, place, options)
    assert first.accuracy is not None
    text = Bundle(place).file(ACCURACY).read_text()
    report = json.loads(text)
    assert report == json.loads(first.accuracy.to_json())
    assert sum(len(block["convs"]) for block in report["blocks"]) == CONVOLUTIONS
    assert [part["name"] for part in report["corrections"]] == ["channel_maps", "weights", "biases"]
    assert report["images"] == 2
    # The manifest's last sentence is about the same networks and images.
    said = first.bundle.manifest.quantization.corrections[-1]
    assert f"error at the head {report['before']:.4f} -> {report['after']:.4f} on 2 images held back" in said
    # Building again keeps it, whether it is asked for or not.
    for asked in (options, replace(options, accuracy_report=False)):
        again = build(SMALL_MODEL, CONFIG, place, asked)
        assert again.up_to_date and again.accuracy is None
        assert Bundle(place).file(ACCURACY).read_text() == text
    # A bundle without a report gets the same.
    plain = build(SMALL_MODEL, CONFIG, tmp_path / "c", replace(options, accuracy_report=False))
    assert ACCURACY not in plain.bundle.manifest.files
    added = build(SMALL_MODEL, CONFIG, tmp_path / "c", options)
    assert added.up_to_date and added.accuracy is not None
    assert Bundle(tmp_path / "c").manifest.files == Bundle(place).manifest.files


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "fp16"}, "--accuracy-report measures what INT8 does; leave it out with --fp16"),
        ({"quantization": "implicit"}, "--accuracy-report measures Q/DQ nodes, which --quantization implicit does not"),
        (
            {"calibration": CalibrationOptions(histograms=Path("h.npz")), "correct": ()},
            "--accuracy-report is measured on calibration images: give --images",
        ),
    ],
)
def test_what_cannot_be_reported_is_refused(
    options: BuildOptions, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    if "precision" in changes:
        changes = {**changes, "int8_all": False}
    with pytest.raises(ConfigError, match=said):
        build(SMALL_MODEL, CONFIG, tmp_path / "b", replace(options, **changes))  # type: ignore[arg-type]
    assert not (tmp_path / "b").exists()
