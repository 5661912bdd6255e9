"""Wrong options are an error before an image is decoded, a model is run or a file is written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import for_onnxruntime
from tiny_detector import Tiny

import trtdet.backends
from trtdet import sensitivity, sweep
from trtdet.backends import OnnxRunner, choose
from trtdet.backends.base import Capabilities
from trtdet.building import build
from trtdet.building.job import Job, checked_build
from trtdet.building.validation import check_targets
from trtdet.data import ImageStream
from trtdet.errors import (
    BackendError,
    CalibrationError,
    ConfigError,
    DataError,
    OutputError,
    TrtdetError,
    TrtdetWarning,
)
from trtdet.options import BuildOptions, CalibrationOptions, PlanOptions, SensitivityOptions, SweepOptions, changed


@pytest.fixture
def nothing_runs(monkeypatch):
    def refuse(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("an image was decoded or a model was run")

    monkeypatch.setattr(ImageStream, "__iter__", refuse)
    monkeypatch.setattr(OnnxRunner, "__init__", refuse)


@pytest.fixture
def options(tiny):
    return for_onnxruntime(effort="none", images=tiny.images, int8_all=True)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown node": ({"keep_fp16": ("stem", "nothing")}, "no convolution 'nothing'"),
    "more than there are": ({"keep_fp16": 5}, "--keep-fp16 5: the model has 4 convolutions in INT8"),
    "fewer than none": ({"keep_fp16": -1}, "--keep-fp16 -1"),
    "negative share": ({"fp16_budget": -0.1}, "plan.fp16_budget must be at least 0 and at most 1, got -0.1"),
    "share over 1": ({"fp16_budget": 1.5}, "plan.fp16_budget must be at least 0 and at most 1, got 1.5"),
    "share that is no number": ({"fp16_budget": float("nan")}, "plan.fp16_budget"),
    "negative bound": ({"max_map_drop": -1.0}, "--max-map-drop must be at least 0 and at most 100, got -1"),
    "bound without images": ({"max_map_drop": 1.0}, "--max-map-drop measures mAP"),
    "negative disagreement": ({"max_disagreement": -1.0}, "disagreement must be at least 0 and at most 100"),
    "disagreement without images": (
        {"max_disagreement": 1.0},
        "plan.max_disagreement compares detections on images that ranges and corrections were not made from: give some",
    ),
    "annotations of no images": (
        {"max_disagreement": 1.0, "annotations": "a.json"},
        "--val-images and --annotations belong together",
    ),
    "two bounds": (
        {"max_map_drop": 1.0, "max_disagreement": 1.0},
        "--max-map-drop and --set plan.max_disagreement both say what stays in FP16",
    ),
    "a bound and a time": (
        {"max_map_drop": 1.0, "max_latency": 1.0},
        "--max-map-drop and --set plan.max_latency both",
    ),
    "no time": ({"max_latency": 0.0}, "plan.max_latency must be over 0, got 0"),
    "time that is no number": ({"max_latency": float("nan")}, "plan.max_latency must be over 0, got nan"),
    "size within a time": ({"max_latency": 1.0, "objective": "size"}, "leave --set plan.objective=size out"),
    "time of no layers": ({"max_latency": 1.0}, "onnxruntime lists no layers that a time could be estimated from"),
    "objective without a bound": ({"objective": "size"}, "plan.objective=size says what is cheap within a limit"),
    "implicit within a time": ({"quantization": "implicit", "max_latency": 1.0}, "implicit"),
    "two ways": ({"keep_fp16": 1, "fp16_budget": 0.1}, "--keep-fp16 and --set plan.fp16_budget both"),
    "no image to rank on": ({"keep_fp16": 1, "rank_images": 0}, "plan.rank_images must be at least 1, got 0"),
    "annotations missing": (
        {"max_map_drop": 1.0, "val_images": "images"},
        "--val-images and --annotations belong together",
    ),
    "annotations that do not exist": (
        {"max_map_drop": 1.0, "val_images": "images", "annotations": "no.json"},
        "no.json",
    ),
    "plan that does not exist": ({"keep_fp16": Path("no.json")}, "does not exist"),
    "plan of another model": (
        {"keep_fp16": Path("p.json")},
        "p.json': the plan is of another model: .*; start from the plan.json of a bundle",
    ),
    "nothing in INT8 to keep out of it": (
        {"precision": "fp16", "max_latency": 1.0},
        "is about INT8; leave it out with --fp16",
    ),
    "a number to keep in a float bundle": ({"precision": "fp16", "keep_fp16": 1, "int8_all": False}, "is about INT8"),
    "no images": ({"images": None}, "INT8 needs calibration images"),
    "images that do not exist": ({"images": Path("nowhere")}, "'nowhere' does not exist"),
    "0 images": ({"num_images": 0}, "--num-images must be at least 1, got 0"),
    "unknown rule": ({"rule": "magic"}, "no calibration rule 'magic'; allowed: minmax"),
    "percentile": ({"rule": "percentile:101"}, "over 0 and up to 100, got 101"),
    "histograms": ({"images": None, "histograms": Path("no.npz")}, "'no.npz' does not exist"),
    "unknown correction": ({"effort": "magic"}, "no correction 'magic'"),
    "batch": ({"batch": (4, 2, 8)}, "must be MIN:OPT:MAX"),
    "plugin library": ({"plugins": (Path("no.so"),)}, "no.so' does not exist|loads no plugin libraries"),
    "workspace": ({"workspace": 0}, "engine.workspace must be over 0"),
    "guard of 0": ({"guard": 0.0}, "--guard must be over 0, got 0"),
    "guard that is no number": ({"guard": float("nan")}, "--guard must be over 0, got nan"),
    "guard without INT8": ({"guard": 1.02, "precision": "fp16"}, "leave it out with --fp16"),
    "guard without engines": ({"guard": 1.02}, "compares the speed of engines, and onnxruntime makes none"),
    "unknown GPU": ({"gpu": "Voodoo"}, "no figures are known of GPU 'Voodoo'"),
}
OTHER: dict[type[TrtdetError], set[str]] = {
    BackendError: {"plugin library", "guard without engines", "time of no layers", "implicit within a time"},
    CalibrationError: {"histograms"},
    DataError: {"annotations that do not exist", "images that do not exist"},
}
"""Those that are no ConfigError."""


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_fails_before_anything_is_done(tiny, options, tmp_path, monkeypatch, name):
    changes, message = WRONG[name]
    kind = next((kind for kind, names in OTHER.items() if name in names), ConfigError)
    folder, output = tmp_path / "given", tmp_path / "output"
    folder.mkdir()
    output.mkdir()
    (folder / "images").symlink_to(tiny.images)
    plan = {"schema": 1, "entries": {"other": {"precision": "fp16", "reason": ""}}}
    (folder / "p.json").write_text(json.dumps(plan))
    monkeypatch.chdir(folder)
    with pytest.raises(kind, match=message):
        build(tiny.model, tiny.config, output / "bundle", changed(options, **changes))
    assert list(output.iterdir()) == []


@pytest.mark.usefixtures("nothing_runs")
def test_plugins_inside_an_engine_need_their_libraries(tiny, options, tmp_path):
    with pytest.raises(ConfigError, match="embed_plugins needs the libraries: give them with --set engine.plugins"):
        build(tiny.model, tiny.config, tmp_path / "b", changed(options, embed_plugins=True))


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("sm", [1, 87, 860])
def test_an_impossible_compute_capability_fails_before_anything_is_done(tiny, options, tmp_path, sm):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'trtdet[rtx]'")
    caps = choose("tensorrt-rtx").capabilities
    with pytest.raises(BackendError, match=rf"cannot build for compute capability {sm}; allowed: {caps.sms[0]}"):
        build(tiny.model, tiny.config, tmp_path / "b", changed(options, backend="tensorrt-rtx", sms=(86, sm)))
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_builds_for_the_machine_takes_only_its_compute_capability(monkeypatch):
    caps = Capabilities("test", "1", True, True)
    devices = [trtdet.backends.cuda.Device("a GPU", 90)]
    monkeypatch.setattr(trtdet.backends.cuda, "devices", lambda: tuple(devices))
    check_targets(BuildOptions(sms=(90,)), caps)
    check_targets(BuildOptions(), caps)
    with pytest.raises(BackendError, match="capability 86; allowed: 90; leave --sm out, or use --backend tensorrt-rtx"):
        check_targets(BuildOptions(sms=(86,)), caps)
    check_targets(BuildOptions(sms=(86,)), replace(caps, makes_engine=False))


@pytest.mark.usefixtures("nothing_runs")
def test_a_ranking_and_a_sweep_are_checked_first_as_well(tiny, options, tmp_path):
    asked = SensitivityOptions(calibration=options.calibration, effort="none", plan=PlanOptions(int8_all=True))
    for changes, message in (
        ({"rank_images": 0}, "must be at least 1, got 0"),
        ({"effort": "magic"}, "no correction 'magic'"),
        ({"val_images": tiny.images}, "belong together"),
    ):
        with pytest.raises(ConfigError, match=message):
            sensitivity(tiny.model, tiny.config, changed(asked, **changes), tmp_path / "s.jsonl")  # type: ignore[arg-type]
    axes = SweepOptions(calibration=options.calibration, backend="onnxruntime")
    axes = changed(axes, int8_all=True, **tiny.labelled)
    for changes, message in (
        ({"keeps": (0, 99)}, "--keep-fp16 99: the model has 4"),
        ({"rules": ("mse", "magic")}, "no calibration rule 'magic'"),
        ({"calibration": CalibrationOptions()}, "needs calibration images"),
    ):
        with pytest.raises(ConfigError, match=message):
            sweep(tiny.model, tiny.config, tmp_path / "s", replace(axes, **changes))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_ray_that_is_missing_is_found_before_the_images_are_run(tiny, options, tmp_path, nothing_runs, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BackendError, match=r"Ray is not installed here; pip install 'trtdet\[ray\]'"):
        build(tiny.model, tiny.config, tmp_path / "b", changed(options, keep_fp16=1, ray="local"))


@pytest.mark.usefixtures("nothing_runs")
def test_images_that_calibrate_show_nothing_of_a_bound(tiny, options, tmp_path):
    bounded = changed(options, val_images=tiny.images, max_disagreement=1.0)
    with pytest.warns(TrtdetWarning, match=r"4 of 12 images of .* are calibration images too.* plan.max_disagreement"):
        known = checked_build(Job(tiny.model, tiny.config, tmp_path / "b", changed(bounded, num_images=4)))
    assert known.dataset is not None and len(known.dataset.images) == 8
    assert {image.path for image in known.dataset.images}.isdisjoint(known.selected.paths)
    with pytest.raises(DataError, match="all 12 images of .* are calibration images too"):
        build(tiny.model, tiny.config, tmp_path / "b", bounded)


def other_model(tiny: Tiny, tmp_path: Path) -> Path:
    import onnx
    from tiny_detector import tiny_detector

    onnx.save(tiny_detector(seed=7), tmp_path / "other.onnx")
    return tmp_path / "other.onnx"


def test_a_bundle_of_another_model_is_replaced_only_by_force(tiny, tmp_path):
    other, place = other_model(tiny, tmp_path), tmp_path / "bundle"
    options = BuildOptions(precision="fp32", backend="onnxruntime")
    first = build(tiny.model, tiny.config, place, options).bundle.manifest
    with pytest.raises(OutputError, match=r"is a bundle of another model \('tiny', .*or replace it with --force"):
        build(other, tiny.config, place, options)
    assert json.loads((place / "manifest.json").read_text())["content_hash"] == first.content_hash
    assert build(tiny.model, tiny.config, place, changed(options, precision="fp16")).up_to_date is False
    forced = build(other, tiny.config, place, replace(options, force=True)).bundle.manifest
    assert forced.model.sha256 != first.model.sha256
