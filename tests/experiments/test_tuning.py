"""The Pareto front of a model: its points, resuming after a kill, and builds of its points."""

import json
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from killing import finish_after_kills
from models import CONVOLUTIONS, own_labels

from trtdet import Detector, build, evaluate, load_config, tune, variant_options
from trtdet.building import plan as plan_step
from trtdet.building import variants
from trtdet.building.costs import weight_bytes
from trtdet.building.variants import tuned_ranges
from trtdet.data import CocoDataset
from trtdet.demo import shapes
from trtdet.errors import ConfigError, DataError, TrtdetWarning
from trtdet.experiments.experiment import Experiment, Variant
from trtdet.experiments.folder import Provenance
from trtdet.options import BuildOptions, CalibrationOptions, TuneOptions, changed
from trtdet.plans.scores import Sensitivity
from trtdet.quantization import Corrections, PrecisionPlan
from trtdet.quantization.encoding import ChannelMap
from trtdet.report import report
from trtdet.report.document import Histograms

CONFIG = load_config("shapes")


@pytest.fixture(scope="module")
def options(once):
    """Six images calibrate, and eight that the detector labelled itself report."""
    calibration = once("tune-calibration", lambda path: shapes.generate(path, "calibration", 6)) / "calibration"
    made = once("tune-val", lambda path: shapes.generate(path, "val", 8))
    split = shapes.generate(made, "val", 8)
    labels = once("tune-labels.json", lambda path: own_labels(split, path))
    built = BuildOptions(
        effort="bias", backend="onnxruntime", calibration=CalibrationOptions(rule="minmax", images=calibration)
    )
    return TuneOptions(build=changed(built, val_images=split.images, annotations=labels, rank_images=2), points=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tuned")


@pytest.fixture(scope="module")
def front(small_model, options, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # of the few images
        return tune(small_model, CONFIG, folder, options)


def again(model: Path, folder: Path, options: TuneOptions) -> tuple[Experiment, list[str]]:
    """The front, and the stages that it took."""
    stages: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)
        return tune(model, CONFIG, folder, options, lambda stage, *_: stages.append(stage)), stages


def titled(front: Experiment, title: str) -> Variant:
    return next(point for point in front.variants if title in point.titles)


# the points


def test_the_plans_that_have_a_title_and_some_between_are_points(front):
    assert [point.number for point in front.variants] == list(range(1, len(front.variants) + 1))
    every = titled(front, "all FP16")
    assert len(every.kept) == every.counts["fp16"] == CONVOLUTIONS
    assert titled(front, "all INT8").kept == ()
    assert titled(front, "depthwise in FP16").kept == ("/depthwise0/Conv", "/depthwise1/Conv")
    # With eight channels all stay in FP16 by default.
    assert titled(front, "default") is every
    between = [point for point in front.variants if point.titles == ("optimiser",)]
    assert between
    assert all(0 < len(point.kept) < CONVOLUTIONS for point in between)
    assert len({point.kept for point in front.variants}) == len(front.variants)
    for point in front.variants:
        assert point.low <= point.difference <= point.high
        assert sum(point.counts.values()) == CONVOLUTIONS


def test_what_a_point_costs_and_what_is_predicted_of_it(front):
    costs = [front.cost(point) for point in front.variants]
    assert (costs, front.unit) == (sorted(costs), "million multiply-adds, FP16 twice")
    half, whole = titled(front, "all FP16"), titled(front, "all INT8")
    assert (half.multiply_adds, half.weights) == (pytest.approx(2 * whole.multiply_adds), 2 * whole.weights)
    assert half.error == 0 < whole.error
    # No program's plan has less error than another at the same or a lower cost.
    chosen = sorted((front.cost(point), point.error) for point in front.variants if point.titles == ("optimiser",))
    assert [error for _, error in chosen] == sorted((error for _, error in chosen), reverse=True)


def test_a_point_that_another_beats_in_both_says_so(front):
    def point(cost: float, difference: float) -> Variant:
        measured = {"map": 0.5, "reference": 0.5, "difference": difference, "low": difference, "high": 0.0}
        return Variant("", ("optimiser",), (), {}, 0, 0.0, **measured, error=-difference, estimated=cost)

    made = [point(1.0, -0.3), point(2.0, -0.1), point(3.0, -0.2), point(3.5, -0.1), point(4.0, 0.0), point(4.0, 0.0)]
    found = replace(front, variants=tuple(made), gpu="L4").numbered()
    assert [one.dominated_by for one in found.variants] == [None, None, 2, 2, None, None]
    # A dearer point that is better by less than its interval, and has the larger error, is none to choose.
    dearer = replace(point(5.0, 0.001), error=0.5, low=-0.01, high=0.01)
    pair = replace(front, variants=(replace(point(4.0, 0.0), error=0.1), dearer), gpu="L4")
    assert [one.dominated_by for one in pair.numbered().variants] == [None, 1]
    sure = replace(pair, variants=(pair.variants[0], replace(dearer, low=0.0005)))
    assert [one.dominated_by for one in sure.numbered().variants] == [None, None]
    smaller = replace(pair, variants=(pair.variants[0], replace(dearer, error=0.05)))
    assert [one.dominated_by for one in smaller.numbered().variants] == [None, None]
    best = [one for one in front.variants if one.dominated_by is None]
    assert [one.difference for one in best] == sorted(one.difference for one in best)


def test_the_files_hold_what_was_given(front, folder):
    found = json.loads((folder / "experiment.json").read_text())
    assert found == json.loads(json.dumps(front.as_dict()))
    assert (found["schema"], found["accuracy"], found["reported"]) == (1, "map", 8)
    assert (folder / "experiment.md").read_text() == front.markdown() + "\n"
    assert len((folder / "rows.jsonl").read_text().splitlines()) == 1 + len(front.variants)
    for point in front.variants:
        plan = PrecisionPlan.load(folder / "plans" / f"{point.number}.json")
        assert plan.names("fp16") == point.kept
    assert "dominated by" in str(front.table()) or all(point.dominated_by is None for point in front.variants)


def test_bytes_of_weights_are_those_of_the_plan(front, small_model, folder):
    """Of the written model: one byte an INT8 weight, two an FP16 weight."""
    model = onnx.load(small_model)
    counts = {node.name: node.input[1] for node in model.graph.node if node.op_type == "Conv"}
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in model.graph.initializer}
    for point in front.variants:
        expected = sum(sizes[weight] * (2 if name in point.kept else 1) for name, weight in counts.items())
        assert point.weights == expected
        plan = PrecisionPlan.load(folder / "plans" / f"{point.number}.json")
        assert weight_bytes(model, plan) == expected


# images


def test_images_that_choose_and_images_that_report_are_disjoint(small_model, options, tmp_path, monkeypatch):
    """Also where the same picture has two names."""
    calibration = options.build.calibration.images
    assert calibration is not None and options.build.plan.val_images is not None
    mixed = tmp_path / "mixed"
    shutil.copytree(options.build.plan.val_images, mixed)
    chosen = sorted(calibration.iterdir())
    for path in chosen[:3]:
        shutil.copy(path, mixed / f"renamed-{path.name}")
    seen: dict[str, set[bytes]] = {"choose": set(), "report": set()}
    ranked, scored = plan_step.rank, plan_step.evaluate

    def rank(subject: Any, *args: Any, **more: Any) -> Any:
        seen["choose"] |= {path.read_bytes() for path in subject.images}
        return ranked(subject, *args, **more)

    def score(detector: Any, dataset: CocoDataset, *args: Any, **more: Any) -> Any:
        seen["report"] |= {image.path.read_bytes() for image in dataset.images}
        return scored(detector, dataset, *args, **more)

    monkeypatch.setattr(plan_step, "rank", rank)
    monkeypatch.setattr(plan_step, "evaluate", score)
    asked = replace(options, build=changed(options.build, val_images=mixed, annotations=None), points=2)
    with pytest.warns(TrtdetWarning, match="3 of the 11 images of --val-images are calibration images too"):
        found = tune(small_model, CONFIG, tmp_path / "t", asked)
    assert (found.reported, found.left_out) == (8, 3)
    assert seen["choose"] and seen["report"]
    # Calibration and corrections choose as well.
    assert seen["report"].isdisjoint(seen["choose"] | {path.read_bytes() for path in chosen})
    # Without annotations it is agreement with the float model, which no INT8 exceeds.
    assert not found.annotated
    assert all(point.map is None and point.difference <= 0 for point in found.variants)
    assert "agreement with FP32" in str(found.table())


def test_without_other_images_those_that_do_not_calibrate_report(small_model, options, tmp_path):
    few = changed(options.build, calibration=changed(options.build.calibration, num_images=4), effort="none")
    asked = replace(options, build=changed(few, val_images=None, annotations=None), points=2)
    found, _ = again(small_model, tmp_path / "t", asked)
    assert (found.calibration, found.reported) == (4, 2)
    every = changed(asked.build, num_images=None)
    with pytest.raises(DataError, match="all 6 images of .* calibrate, so that none can report"):
        tune(small_model, CONFIG, tmp_path / "n", replace(asked, build=every))
    assert not (tmp_path / "n").exists()


# going on


def test_a_finished_tune_measures_nothing_again_and_more_points_only_the_new(
    front, small_model, options, folder, tmp_path
):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    same, stages = again(small_model, copy, options)
    assert same == replace(front, folder=copy)
    assert not [stage for stage in stages if stage.startswith(("measuring", "correcting", "calibrating"))]
    sizes = changed(options, build=changed(options.build, objective="size"))
    smaller, stages = again(small_model, copy, sizes)
    assert smaller.unit == "MB of weights"
    measured = [stage for stage in dict.fromkeys(stages) if stage.startswith("measuring plan ")]
    rows = (copy / "rows.jsonl").read_text().splitlines()
    assert len(rows) - 1 - len(front.variants) >= len(measured)
    by_plan = {point.kept: point for point in front.variants}
    for point in smaller.variants:
        if point.kept in by_plan:
            assert point.difference == by_plan[point.kept].difference
    assert [smaller.cost(point) for point in smaller.variants] == sorted(
        point.weights / 1e6 for point in smaller.variants
    )
    images = changed(options, build=changed(options.build, objective="throughput"))
    assert [point.kept for point in again(small_model, copy, images)[0].variants] == [
        point.kept for point in front.variants
    ]


def test_what_is_damaged_is_made_again(front, small_model, options, folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "corrected.npz").write_bytes(b"cut")
    lines = (copy / "rows.jsonl").read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), "low": "deep"})
    (copy / "rows.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.warns(TrtdetWarning) as caught:
        found = tune(small_model, CONFIG, copy, options)
    said = " ".join(str(warning.message) for warning in caught)
    assert "corrected.npz' is damaged" in said and "it is made again" in said
    assert "a row is damaged ('low'" in said
    assert found == replace(front, folder=copy)


def test_channel_maps_are_kept_with_their_axis_and_shift(front, folder, tmp_path):
    meta, _ = variants._read_corrected(folder / "corrected.npz")
    maps = {"h": ChannelMap(4.5, np.array([1.0, 2.0]), axis=-1), "k": ChannelMap(2.5, shift=1.5)}
    calibrated = SimpleNamespace(collection=SimpleNamespace(save=lambda file: None), ranges=meta.plain)
    prepared: Any = SimpleNamespace(
        calibrated=calibrated,
        ranges=meta.ranges,
        plan=PrecisionPlan(meta.plan),
        summary=meta.summary,
        corrections=Corrections(maps),
    )
    variants.save_prepared(tmp_path, "key", prepared)
    _, found = variants._read_corrected(tmp_path / "corrected.npz")
    for name, map in maps.items():
        got = found.tensors[name]
        assert (got.amax, got.axis, got.shift) == (map.amax, map.axis, map.shift)
        np.testing.assert_array_equal(got.scale, map.scale)


def test_another_model_or_other_images_are_refused_before_anything_is_written(front, small_model, options, folder):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    fewer = changed(options.build, calibration=changed(options.build.calibration, num_images=5))
    with pytest.raises(ConfigError, match="results of another model, other images or other options"):
        tune(small_model, CONFIG, folder, replace(options, build=fewer))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"points": 1}, "--points must be at least 2"),
        ({"rank_images": 0}, "plan.rank_images must be at least 1"),
        ({"val_images": None}, "--annotations are those of --val-images"),
        ({"gpu": "Voodoo 2"}, "Voodoo 2"),
        ({"images": None}, "a tune needs calibration images"),
    ],
)
def test_wrong_options_are_refused(changes, message, small_model, options, tmp_path):
    with pytest.raises(ConfigError, match=message):
        tune(small_model, CONFIG, tmp_path / "t", changed(options, **changes))
    assert not (tmp_path / "t").exists()


def test_a_tune_of_a_float_build_is_refused(small_model, options, tmp_path):
    with pytest.raises(ConfigError, match="a tune is about INT8"):
        tune(small_model, CONFIG, tmp_path / "t", replace(options, build=replace(options.build, precision="fp16")))
    assert not (tmp_path / "t").exists()


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_front(front, small_model, options, tmp_path):
    assert options.build.calibration.images is not None
    command = [sys.executable, "-m", "trtdet", "tune", str(small_model), "--config", "shapes"]
    command += ["-o", str(tmp_path / "t")]
    command += ["--images", str(options.build.calibration.images), "--backend", "onnxruntime", "--calib", "minmax"]
    command += ["--val-images", str(options.build.plan.val_images)]
    command += ["--annotations", str(options.build.plan.annotations), "--effort", "bias"]
    command += ["--points", "4", "--set", "plan.rank_images=2"]
    finish_after_kills(command, tmp_path / "t" / "rows.jsonl", (0, 1, 3))
    found = json.loads((tmp_path / "t" / "experiment.json").read_text())
    assert found == {**json.loads(json.dumps(front.as_dict())), "folder": str(tmp_path / "t")}
    assert "<svg" in (tmp_path / "t" / "experiment.html").read_text()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_workers")
def test_ray_gives_the_same_front(front, small_model, options, tmp_path):
    found, _ = again(small_model, tmp_path / "t", changed(options, ray="local"))
    assert found == replace(front, folder=tmp_path / "t")


# building a point


def test_a_point_is_built_with_what_it_was_measured_with(front, small_model, options, folder, tmp_path):
    point = next(point for point in front.variants if point.titles == ("optimiser",))
    asked = changed(variant_options(folder, point.number, CONFIG)[0], guard="off")
    stages: list[str] = []
    done = build(small_model, CONFIG, tmp_path / "b", asked, lambda stage, *_: stages.append(stage))
    assert not [stage for stage in stages if stage.startswith(("correcting", "calibrating", "ranking"))]
    plan = PrecisionPlan.load(done.bundle.file("plan.json"))
    assert (plan.names("fp16"), plan.counts()) == (point.kept, point.counts)
    assert {plan.entries[name].cause.value for name in point.kept} <= {
        *("kept-tuned", "depthwise", "few-channels", "head-output")
    }
    assert build(small_model, CONFIG, tmp_path / "b", asked).up_to_date
    other = build(small_model, CONFIG, tmp_path / "b", changed(variant_options(folder, 1, CONFIG)[0], guard="off"))
    assert other.up_to_date is (front.variants[0] is point)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()[1:]]
    (row,) = [row for row in rows if tuple(row["kept"]) == front.variants[0].kept]
    assert options.build.plan.val_images is not None and options.build.plan.annotations is not None
    dataset = CocoDataset.load(options.build.plan.annotations, options.build.plan.val_images, CONFIG.classes)
    assert evaluate(Detector.open(tmp_path / "b"), dataset).result.map == pytest.approx(row["map"], abs=1e-9)


def test_a_point_of_another_model_or_configuration_is_refused(front, small_model, folder, options, tmp_path):
    asked, _ = variant_options(folder, 1, CONFIG)
    other = tmp_path / "other.onnx"
    model = onnx.load(small_model)
    model.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(
            onnx.numpy_helper.to_array(model.graph.initializer[0]) + 1, model.graph.initializer[0].name
        )
    )
    onnx.save(model, other)
    with pytest.raises(ConfigError, match="is of another model"):
        build(other, CONFIG, tmp_path / "b", asked)
    with pytest.raises(ConfigError, match="was tuned with another configuration"):
        build(small_model, CONFIG.with_nms(score_threshold=0.2), tmp_path / "b", asked)
    with pytest.raises(ConfigError, match=r"--from .*:99: there is no such variant; allowed are 1 to \d"):
        variant_options(folder, 99, CONFIG)
    with pytest.raises(ConfigError, match="has no finished experiment"):
        variant_options(tmp_path, 1, CONFIG)
    assert not (tmp_path / "b").exists()


# what a report tells of the folder


def test_a_report_has_the_histograms_and_what_gives_the_tune_again(front, folder, options, tmp_path):
    found = report([folder])
    titles = [section.title for section in found.sections]
    assert titles == ["Accuracy-speed trade-offs", "Sensitivity by layer", "Histograms and thresholds", "Reproduce"]
    histograms = next(part for section in found.sections for part in section.parts if isinstance(part, Histograms))
    names = [entry.name for entry in histograms.entries]
    plan = PrecisionPlan.load(folder / "plans" / "1.json")
    readers = [name.split(", ") for name in names]  # of one tensor
    assert sorted(name for each in readers for name in each) == sorted(plan.entries)
    places = [min(list(plan.entries).index(name) for name in each) for each in readers]
    assert places == sorted(places)
    ranges = tuned_ranges(folder)
    assert all(entry.chosen == pytest.approx(ranges.tensors[entry.tensor].amax, 1e-5) for entry in histograms.entries)
    worst = [layer.name for layer in Sensitivity.load(folder / "sensitivity.json").layers[:10]]
    shown = [readers[place] for place in histograms.shown]
    assert all(any(name in each for each in shown) for name in worst)
    assert all(set(each) & set(worst) for each in shown)
    text = json.dumps(found.as_dict())
    start = "trtdet tune MODEL --config config.yaml "
    assert start in text and f" --images {options.build.calibration.images} " in text
    assert f"--points 4 --set plan.rank_images=2 -o {folder}" in text
    made = Provenance.load(folder)
    assert made is not None and made.config == CONFIG.model_dump(mode="json") and made.runs[0].trtdet in text
    older = shutil.copytree(folder, tmp_path / "older")
    (older / "provenance.json").unlink()
    assert "repeat the tune into its folder" in [one.how for one in report([older]).missing]
