"""What is wrong with the options is an error before an image is decoded, a model is run or a file is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from tiny_detector import Tiny

import trtdet.backends
from trtdet import BuildOptions, CalibrationOptions, KeepOptions, SensitivityOptions, SweepOptions, sensitivity, sweep
from trtdet.backends import OnnxRunner, choose
from trtdet.backends.base import Capabilities
from trtdet.cli import main
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
from trtdet.pipeline import build, validation
from trtdet.pipeline.assembly import Job, validated
from trtdet.pipeline.validation import check_targets


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("an image was decoded or a model was run")

    monkeypatch.setattr(ImageStream, "__iter__", refuse)
    monkeypatch.setattr(OnnxRunner, "__init__", refuse)


@pytest.fixture
def options(tiny: Tiny) -> BuildOptions:
    calibration = CalibrationOptions(images=tiny.images)
    return BuildOptions(calibration=calibration, correct=(), backend="onnxruntime", int8_all=True)


def plan_of(place: Path, **entries: str) -> Path:
    listed = {name: {"precision": precision, "reason": ""} for name, precision in entries.items()}
    place.write_text(json.dumps({"schema": 1, "entries": listed}))
    return place


def calibration(options: BuildOptions, **changes: Any) -> BuildOptions:
    return replace(options, calibration=replace(options.calibration, **changes))


Change = Callable[[BuildOptions, Tiny, Path], BuildOptions]


def kept(**keep: Any) -> Change:
    return lambda options, tiny, folder: replace(options, keep=KeepOptions(**keep))


def calibrated(**changes: Any) -> Change:
    return lambda options, tiny, folder: calibration(options, **changes)


WRONG: dict[str, tuple[Change, type[TrtdetError], str]] = {
    "unknown node": (kept(keep=("stem", "nothing")), ConfigError, "no convolution 'nothing'"),
    "more than there are": (kept(keep=5), ConfigError, "--keep-fp16 5: the model has 4 convolutions in INT8"),
    "fewer than none": (kept(keep=-1), ConfigError, "--keep-fp16 -1"),
    "negative share": (kept(budget=-0.1), ConfigError, "--fp16-budget must be .* 0 to 1, got -0.1"),
    "share over 1": (kept(budget=1.5), ConfigError, "--fp16-budget must be .* 0 to 1, got 1.5"),
    "share that is no number": (kept(budget=float("nan")), ConfigError, "--fp16-budget"),
    "negative bound": (kept(max_map_drop=-1.0), ConfigError, "--max-map-drop must be at least 0 mAP points, got -1"),
    "bound without images": (kept(max_map_drop=1.0), ConfigError, "--max-map-drop measures mAP"),
    "negative disagreement": (
        kept(max_disagreement=-1.0),
        ConfigError,
        "--max-disagreement must be at least 0 points of agreement, got -1",
    ),
    "disagreement without images": (
        kept(max_disagreement=1.0),
        ConfigError,
        "--max-disagreement compares detections on images that ranges and corrections were not made from: give some",
    ),
    "annotations of no images": (
        lambda options, tiny, folder: replace(options, keep=KeepOptions(max_disagreement=1.0, annotations=folder)),
        ConfigError,
        "--val-images and --annotations belong together",
    ),
    "two bounds": (
        kept(max_map_drop=1.0, max_disagreement=1.0),
        ConfigError,
        "--max-map-drop and --max-disagreement both say what stays in FP16",
    ),
    "two ways": (kept(keep=1, budget=0.1), ConfigError, "--keep-fp16 and --fp16-budget both"),
    "no image to rank on": (kept(keep=1, num_images=0), ConfigError, "a ranking needs at least 1 image, got 0"),
    "annotations missing": (
        lambda options, tiny, folder: replace(options, keep=KeepOptions(max_map_drop=1.0, images=tiny.images)),
        ConfigError,
        "--val-images and --annotations belong together",
    ),
    "annotations that do not exist": (
        lambda options, tiny, folder: replace(
            options, keep=KeepOptions(max_map_drop=1.0, images=tiny.images, annotations=folder / "no.json")
        ),
        DataError,
        "no.json",
    ),
    "plan that does not exist": (
        lambda options, tiny, folder: replace(options, keep=KeepOptions(folder / "no.json")),
        ConfigError,
        "does not exist",
    ),
    "plan of another model": (
        lambda options, tiny, folder: replace(options, keep=KeepOptions(plan_of(folder / "p.json", other="fp16"))),
        ConfigError,
        "p.json': the plan is of another model",
    ),
    "nothing in INT8 to keep out of it": (
        lambda options, tiny, folder: replace(options, precision="fp16", keep=KeepOptions(max_latency=1.0)),
        ConfigError,
        "--fp16 leaves nothing in INT8 to keep out of it; leave --max-latency out",
    ),
    "no images": (calibrated(images=None), ConfigError, "INT8 needs calibration images"),
    "images that do not exist": (calibrated(images=Path("nowhere")), DataError, "'nowhere' does not exist"),
    "0 images": (calibrated(num_images=0), ConfigError, "--num-images must be at least 1, got 0"),
    "unknown rule": (calibrated(rule="magic"), ConfigError, "no calibration rule 'magic'; allowed: minmax"),
    "percentile": (calibrated(percentile=101.0), ConfigError, "over 0 and up to 100, got 101"),
    "histograms": (calibrated(histograms=Path("no.npz")), CalibrationError, "'no.npz' does not exist"),
    "unknown correction": (
        lambda options, tiny, folder: replace(options, correct=("magic",)),
        ConfigError,
        "no correction 'magic'",
    ),
    "batch": (lambda options, tiny, folder: replace(options, batch=(4, 2, 8)), ConfigError, "got 4:2:8"),
    "plugin library": (
        lambda options, tiny, folder: replace(options, plugins=(folder / "no.so",)),
        BackendError,
        "no.so' does not exist|loads no plugin libraries",
    ),
    "workspace": (
        lambda options, tiny, folder: replace(options, engine=trtdet.backends.EngineOptions(workspace=0)),
        ConfigError,
        "--workspace must be over 0",
    ),
}


def test_every_field_that_keeps_convolutions_has_the_name_of_its_option() -> None:
    assert set(validation._KEEPING) == {field.name for field in fields(KeepOptions)}


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("change", "kind", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_option_fails_before_anything_is_done(
    tiny: Tiny, options: BuildOptions, tmp_path: Path, change: Change, kind: type[TrtdetError], message: str
) -> None:
    folder, output = tmp_path / "given", tmp_path / "output"
    folder.mkdir()
    output.mkdir()
    with pytest.raises(kind, match=message):
        build(tiny.model, tiny.config, output / "bundle", change(options, tiny, folder))
    assert list(output.iterdir()) == []


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("sm", [1, 87, 860])
def test_an_impossible_compute_capability_fails_before_anything_is_done(
    tiny: Tiny, options: BuildOptions, tmp_path: Path, sm: int
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'trtdet[rtx]'")
    caps = choose("tensorrt-rtx").capabilities
    with pytest.raises(BackendError, match=rf"cannot build for compute capability {sm}; allowed: {caps.sms[0]}"):
        build(tiny.model, tiny.config, tmp_path / "b", replace(options, backend="tensorrt-rtx", sms=(86, sm)))
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_builds_for_the_machine_takes_only_its_compute_capability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caps = Capabilities("test", "1", True, True)
    devices = [trtdet.backends.cuda.Device("a GPU", 90)]
    monkeypatch.setattr(trtdet.backends.cuda, "devices", lambda: tuple(devices))
    check_targets((90,), caps)
    check_targets((), caps)
    with pytest.raises(BackendError, match="capability 86; allowed: 90; leave --sm out, or use --backend tensorrt-rtx"):
        check_targets((86,), caps)
    check_targets((86,), replace(caps, makes_engine=False))


@pytest.mark.usefixtures("nothing_runs")
def test_a_ranking_and_a_sweep_are_checked_first_as_well(tiny: Tiny, options: BuildOptions, tmp_path: Path) -> None:
    asked = SensitivityOptions(options.calibration, (), int8_all=True)
    for changes, message in (
        ({"num_images": 0}, "at least 1 image"),
        ({"correct": ("magic",)}, "no correction 'magic'"),
        ({"images": tiny.images}, "belong together"),
    ):
        with pytest.raises(ConfigError, match=message):
            sensitivity(tiny.model, tiny.config, replace(asked, **changes), tmp_path / "s.jsonl")  # type: ignore[arg-type]
    axes = SweepOptions(options.calibration, tiny.images, tiny.annotations, backend="onnxruntime", int8_all=True)
    for changes, message in (
        ({"keeps": (0, 99)}, "--keep-fp16 99: the model has 4"),
        ({"rules": ("mse", "magic")}, "no calibration rule 'magic'"),
        ({"calibration": CalibrationOptions()}, "needs calibration images"),
    ):
        with pytest.raises(ConfigError, match=message):
            sweep(tiny.model, tiny.config, tmp_path / "s", replace(axes, **changes))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_ray_that_is_missing_is_found_before_the_images_are_run(
    tiny: Tiny, options: BuildOptions, tmp_path: Path, nothing_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BackendError, match=r"Ray is not installed here; pip install 'trtdet\[ray\]'"):
        build(tiny.model, tiny.config, tmp_path / "b", replace(options, keep=KeepOptions(1, ray="local")))


@pytest.mark.usefixtures("nothing_runs")
def test_images_that_calibrate_show_nothing_of_a_bound(tiny: Tiny, options: BuildOptions, tmp_path: Path) -> None:
    bounded = replace(options, keep=KeepOptions(images=tiny.images, max_disagreement=1.0))
    with pytest.warns(TrtdetWarning, match=r"4 of 12 images of .* are calibration images too.* --max-disagreement"):
        known = validated(Job(tiny.model, tiny.config, tmp_path / "b", calibration(bounded, num_images=4)))
    assert known.dataset is not None and len(known.dataset.images) == 8
    assert {image.path for image in known.dataset.images}.isdisjoint(known.selected.paths)
    with pytest.raises(DataError, match="all 12 images of .* are calibration images too"):
        build(tiny.model, tiny.config, tmp_path / "b", bounded)


# bundles of other models


def other_model(tiny: Tiny, tmp_path: Path) -> Path:
    import onnx
    from tiny_detector import tiny_detector

    onnx.save(tiny_detector(seed=7), tmp_path / "other.onnx")
    return tmp_path / "other.onnx"


def test_a_bundle_of_another_model_is_replaced_only_by_force(tiny: Tiny, tmp_path: Path) -> None:
    other, place = other_model(tiny, tmp_path), tmp_path / "bundle"
    options = BuildOptions("fp32", backend="onnxruntime")
    first = build(tiny.model, tiny.config, place, options).bundle.manifest
    with pytest.raises(OutputError, match=r"is a bundle of another model \('tiny', .*or replace it with --force"):
        build(other, tiny.config, place, options)
    assert json.loads((place / "manifest.json").read_text())["content_hash"] == first.content_hash
    assert build(tiny.model, tiny.config, place, replace(options, precision="fp16")).up_to_date is False
    forced = build(other, tiny.config, place, replace(options, force=True)).bundle.manifest
    assert forced.model.sha256 != first.model.sha256


def test_the_command_refuses_and_forces_likewise(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, place = other_model(tiny, tmp_path), tmp_path / "bundle"
    rest = ["--config", str(tiny.yaml), "--fp32", "--backend", "onnxruntime", "-o", str(place)]
    assert main(["build", str(tiny.model), *rest]) == 0
    assert main(["build", str(other), *rest]) == 1
    assert "replace it with --force" in capsys.readouterr().err
    assert main(["build", str(other), *rest, "--force"]) == 0
