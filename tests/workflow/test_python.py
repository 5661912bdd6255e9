"""The package from Python: a ``str`` is taken wherever a ``Path`` is."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import trtdet
from trtdet.options import OptionSet

RESULTS = {"Experiment", "CocoDataset", "Detector", "Prediction"}
"""Classes whose fields are results; the functions that make them are looked at."""


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function, method and constructor; the constructors of options convert by their rows."""
    for name in trtdet.__all__:
        value = getattr(trtdet, name)
        if inspect.isclass(value):
            if not issubclass(value, (OptionSet, Exception)) and name not in RESULTS:
                yield name, value
            members = ((key, getattr(value, key)) for key in vars(value) if not key.startswith("_"))
            yield from ((f"{name}.{key}", member) for key, member in members if callable(member))
        elif inspect.isfunction(value):
            yield name, value


def parameters() -> Iterator[tuple[str, str]]:
    for name, function in callables():
        for parameter in inspect.signature(function).parameters.values():
            if "Path" in str(parameter.annotation):
                yield f"{name}({parameter.name})", str(parameter.annotation)


def test_every_public_parameter_that_takes_a_path_takes_a_string():
    annotations = dict(parameters())
    assert {"build(model)", "Bundle(path)", "Detector.open(target)", "bench(paths)"} <= annotations.keys()
    assert [name for name, annotation in annotations.items() if "str" not in annotation] == []


@pytest.fixture(scope="module")
def config():
    return trtdet.load_config("shapes")


@pytest.fixture(scope="module")
def calibration(calibration_images):
    return trtdet.CalibrationOptions(images=str(calibration_images), num_images=8, rule="minmax", check_input=False)


def test_a_bundle_is_built_read_measured_and_packaged_by_strings(config, model, calibration, tmp_path):
    plan, nms = trtdet.PlanOptions(int8_all=True), trtdet.NmsOptions("host")
    options = trtdet.BuildOptions(calibration=calibration, plan=plan, nms=nms, backend="onnxruntime", effort="none")
    target = str(tmp_path / "bundle")
    trtdet.build(str(model), config, target, options)
    bundle = trtdet.Bundle(target)
    assert bundle.path == tmp_path / "bundle" and trtdet.Detector.open(target).classes == config.classes
    images = str(calibration.images)
    bench = trtdet.BenchOptions(seconds=0.01, warm_up=0, min_runs=2, images=images)
    measured = trtdet.bench([target, str(model)], config, bench, baseline=str(model)).targets
    assert len(measured) == 2
    trtdet.profile(target, config, trtdet.ProfileOptions(runs=2, images=images), against=str(model))
    package = trtdet.package(target, str(tmp_path / "triton"), trtdet.PackageOptions("triton"))
    assert package.folder == tmp_path / "triton"


def test_a_model_is_calibrated_ranked_and_guessed_by_strings(config, model, calibration, tmp_path):
    assert trtdet.calibrate(str(model), config, calibration).ranges.images == 8
    plan = trtdet.PlanOptions(rank_images=2, int8_all=True)
    rows = tmp_path / "rows.jsonl"
    options = trtdet.SensitivityOptions(calibration=calibration, plan=plan, effort="none")
    assert trtdet.sensitivity(str(model), config, options, rows=str(rows)).layers and rows.exists()
    assert trtdet.guess_config(str(model), [str(path) for path in calibration.images.iterdir()][:4]).config.classes


def test_experiments_are_made_and_read_by_strings(config, model, calibration, validation, tmp_path):
    measured = trtdet.PlanOptions(
        val_images=str(validation.images), annotations=str(validation.annotations), int8_all=True
    )
    options = {"calibration": calibration, "plan": measured, "backend": "onnxruntime", "on": "onnxruntime"}
    sweep = trtdet.SweepOptions(rules=("minmax",), efforts=("none",), **options)
    trtdet.sweep(str(model), config, str(tmp_path / "sweep"), sweep)
    experiment = trtdet.Experiment.load(str(tmp_path / "sweep" / "experiment.json"))
    number = next(row.number for row in experiment.variants if row.build is not None)
    assert trtdet.variant_options(str(tmp_path / "sweep"), number, config)[0].effort == "none"
    build = trtdet.BuildOptions(calibration=calibration, backend="onnxruntime", effort="none", plan=measured)
    tune = trtdet.TuneOptions(build=build, points=2, on="onnxruntime")
    assert trtdet.tune(str(model), config, str(tmp_path / "tune"), tune).variants
