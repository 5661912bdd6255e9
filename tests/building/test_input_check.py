"""calibrate and build warn once of a wrong configuration."""

import warnings

import pytest
from models import for_onnxruntime

from trtdet import build, calibrate, load_config, sensitivity
from trtdet.data import find_images
from trtdet.demo import shapes
from trtdet.errors import ImplausibleDetections, TrtdetWarning
from trtdet.evaluation import judging, plausibility
from trtdet.exporter import SHAPES_MODEL
from trtdet.options import BuildOptions, CalibrationOptions, SensitivityOptions, changed

SHAPES = load_config("shapes")
WRONG = SHAPES.model_copy(update={"head": SHAPES.head.model_copy(update={"decode": "yolov5"})})


@pytest.fixture(scope="module")
def drawn_images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    shapes.generate(folder, "calibration", 9)
    return folder / "calibration"


@pytest.mark.usefixtures("input_check")
def test_build_tells_of_a_wrong_head_and_keeps_it_in_the_manifest(drawn_images, tmp_path):
    options = BuildOptions(precision="fp16", backend="onnxruntime", calibration=CalibrationOptions(images=drawn_images))
    with pytest.warns(ImplausibleDetections, match="head.decode: yolox"):
        done = build(SHAPES_MODEL, WRONG, tmp_path / "bundle", options)
    seen = done.bundle.manifest.input_check
    assert seen["better"] == {"head.decode": "yolox"}
    with pytest.warns(ImplausibleDetections, match="head.decode: yolox"):
        again = build(SHAPES_MODEL, WRONG, tmp_path / "bundle", options)
    assert again.up_to_date
    with warnings.catch_warnings():
        warnings.simplefilter("error", ImplausibleDetections)
        detector = plausibility.Detector.open(tmp_path / "bundle", runtime="onnxruntime")
    with pytest.warns(ImplausibleDetections, match="head.decode: yolox"):
        told = plausibility.examine_target(tmp_path / "bundle", detector, None, find_images(drawn_images))
    assert told == seen


def test_a_build_that_is_asked_not_to_look_does_not(tiny, tmp_path, monkeypatch):
    def fail(*given: object) -> None:
        raise AssertionError("it was not to look")

    monkeypatch.setattr("trtdet.building.ranges.examine_model", fail)
    options = CalibrationOptions(images=tiny.images, check_input=False)
    asked = for_onnxruntime(precision="fp16", calibration=options)
    done = build(tiny.model, tiny.config, tmp_path / "bundle", asked)
    assert done.bundle.manifest.input_check is None
    assert calibrate(tiny.model, tiny.config, options).seen is None


@pytest.mark.usefixtures("input_check")
def test_calibrate_tells_of_a_model_that_has_learnt_nothing(tiny, monkeypatch):
    monkeypatch.setattr(judging, "_CONFIDENT", 1.0)
    with pytest.warns(ImplausibleDetections, match="the input check cannot tell"):
        done = calibrate(tiny.model, tiny.config, CalibrationOptions(images=tiny.images))
    assert done.seen.unknown
    assert done.ranges.tensors


SHARES = [(0.9999, "99.99 is likely meant"), (1.0, "100 is likely meant"), (9.99, "99.99 is likely meant")]


@pytest.mark.parametrize(("percentile", "said"), SHARES)
def test_a_share_in_the_place_of_percent_is_told_of(tiny, percentile, said):
    options = CalibrationOptions(rule=f"percentile:{percentile}", images=tiny.images, num_images=2)
    with pytest.warns(TrtdetWarning, match=said) as caught:
        calibrate(tiny.model, tiny.config, options)
    assert sum("likely meant" in str(one.message) for one in caught) == 1


def test_a_share_is_told_of_where_corrections_follow(tiny, tmp_path):
    options = CalibrationOptions(rule="percentile:0.9999", images=tiny.images)
    ranked = changed(SensitivityOptions(), calibration=options, effort="none", rank_images=1, int8_all=True)
    with pytest.warns(TrtdetWarning, match="likely meant"):
        sensitivity(tiny.model, tiny.config, ranked)
    asked = for_onnxruntime(effort="none", calibration=options, int8_all=True)
    with pytest.warns(TrtdetWarning, match="likely meant"):
        build(tiny.model, tiny.config, tmp_path / "bundle", asked)


def test_percent_and_rules_without_a_percentile_are_not_told_of(tiny):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*likely meant")
        calibrate(tiny.model, tiny.config, CalibrationOptions(rule="percentile:99.0", images=tiny.images, num_images=2))
        calibrate(tiny.model, tiny.config, CalibrationOptions(rule="minmax", images=tiny.images, num_images=2))
