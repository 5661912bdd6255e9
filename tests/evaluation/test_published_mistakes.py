"""Mistakes in the configurations of published models: each is named, and the right ones are silent."""

import importlib
import sys
from pathlib import Path

import pytest

from trtdet.config import load_config
from trtdet.data import evenly, find_images
from trtdet.evaluation.plausibility import examine_model
from trtdet.passes import Options, load_model

pytestmark = pytest.mark.usefixtures("input_check")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

CONFIGS = {"yolox_nano": "yolox", "yolov5n": "yolov5", "picodet_s": "dfl"}

PIXELS = ("channels swapped", "-1 to 1", "scores taken for logits")
UNSCALED = ("/255 missing", "channels swapped, /255 missing")
NAMED = {
    "yolox_nano": (
        *(*PIXELS, "needless /255", "channels swapped, needless /255", "needless mean and std"),
        "`decode: yolov5`",
    ),
    "yolov5n": (*PIXELS, *UNSCALED, "needless mean and std", "`stretch`"),
    "picodet_s": (
        *(*PIXELS, *UNSCALED, "mean and std missing", "`letterbox-centre`", "`letterbox-topleft`"),
        "cells' corners for centres",
    ),
}
HARMLESS = {"yolox_nano": ("`letterbox-centre`", "`stretch`"), "yolov5n": ("`letterbox-topleft`",), "picodet_s": ()}
"""What costs no mAP that the images show, see docs/calibration.md: nobody is bothered with it."""


@pytest.fixture
def readings(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("input_check")
    for name in ("input_check", "corrections"):
        sys.modules.pop(name, None)


def test_every_mistake_is_known_of(readings):
    for name, config in CONFIGS.items():
        found = {reading.mistake for reading in readings.readings(load_config(config))}
        assert found == {"", *NAMED[name], *HARMLESS[name]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mistake"), [(name, mistake) for name, mistakes in NAMED.items() for mistake in ("", *mistakes)]
)
def test_a_mistake_is_named_and_the_right_configuration_is_silent(shared_data, readings, name, mistake):
    (reading,) = (one for one in readings.readings(load_config(CONFIGS[name])) if one.mistake == mistake)
    images = evenly(find_images(shared_data / "coco" / "train2017"), 40)
    found = examine_model(load_model(shared_data / "models" / f"{name}.onnx"), Options(reading.config), images)
    assert found.obstacle == ""
    if mistake:
        assert set(reading.keys) <= found.better.keys()
        assert readings.verdict(found, reading).startswith("named")
    else:
        assert found.warning == ""
