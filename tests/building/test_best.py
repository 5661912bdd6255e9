"""The cheapest plan within a limit: its choices, its costs, and options that are refused before any work."""

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import CONVOLUTIONS, for_onnxruntime, own_labels

from trtdet import build, load_config
from trtdet.audit.neighbours import Costs, Joint
from trtdet.building.costs import batch_of
from trtdet.building.ranges import select_images
from trtdet.demo import shapes
from trtdet.errors import ConfigError, TrtdetWarning
from trtdet.options import BuildOptions, CalibrationOptions, PlanOptions, changed
from trtdet.plans.front import TRIES, check_reachable, most_accurate_within
from trtdet.plans.optimiser import PrecisionChoice, Problem
from trtdet.quantization import PrecisionPlan

CONFIG = load_config("shapes")


@pytest.fixture(scope="module")
def split(once):
    made = shapes.generate(once("tune-val", lambda path: shapes.generate(path, "val", 8)), "val", 8)
    return shapes.ShapesSplit(made.images, once("tune-labels.json", lambda path: own_labels(made, path)))


@pytest.fixture(scope="module")
def options(once, split):
    calibration = once("tune-calibration", lambda path: shapes.generate(path, "calibration", 6)) / "calibration"
    images = CalibrationOptions(rule="minmax", images=calibration)
    keep = PlanOptions(val_images=split.images, annotations=split.annotations, rank_images=2)
    return for_onnxruntime(effort="none", guard="off", calibration=images, plan=replace(keep, int8_all=True))


def done(model: Path, place: Path, options: BuildOptions) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)
        return build(model, CONFIG, place, options)


def test_nothing_stays_in_fp16_by_rule_of_thumb(small_model, options, tmp_path):
    """By default all of this model does, for its eight channels; a bound that anything keeps puts it all into INT8."""
    anything = changed(options, max_map_drop=100.0)
    found = done(small_model, tmp_path / "b", anything)
    assert PrecisionPlan.load(found.bundle.file("plan.json")).counts() == {"int8": CONVOLUTIONS, "fp16": 0, "fp32": 0}
    usual = done(small_model, tmp_path / "d", changed(options, int8_all=False))
    assert PrecisionPlan.load(usual.bundle.file("plan.json")).counts()["int8"] == 0
    assert found.trade_off.unit == "million multiply-adds, FP16 twice"
    assert build(small_model, CONFIG, tmp_path / "b", anything).up_to_date


def test_where_size_is_the_objective_bytes_of_weights_are_the_cost(small_model, options, tmp_path):
    found = done(small_model, tmp_path / "b", changed(options, max_map_drop=100.0, objective="size"))
    assert found.trade_off.unit == "bytes of weights"
    assert found.trade_off.chosen.names == ()
    model = found.bundle.model.stat().st_size
    assert 0 < found.trade_off.chosen.cost < model


def test_the_batch_of_an_objective(small_model, small_dynamic, options):
    """A run at the usual batch, or an image of the largest; a fixed batch is what it is."""
    fixed, dynamic = (onnx.load(path) for path in (small_model, small_dynamic))
    latency, throughput = (
        changed(options, batch=(1, 4, 8), objective=objective) for objective in ("latency", "throughput")
    )
    assert [batch_of(given, model) for given in (latency, throughput) for model in (fixed, dynamic)] == [1, 4, 1, 8]
    costs, _ = problem()
    assert costs.shared_by(4).of({"c0"}) == pytest.approx(costs.of({"c0"}) / 4)


@pytest.mark.tensorrt
def test_an_image_of_the_largest_batch_is_what_throughput_is_estimated_of(small_dynamic, options, tmp_path):
    rtx = changed(options, backend="tensorrt-rtx", sms=(86,), gpu="RTX 3090", batch=(1, 2, 8))
    least: dict[str, float] = {}
    for objective in ("latency", "throughput"):
        with pytest.raises(ConfigError, match="the cheapest plan takes") as said:
            done(small_dynamic, tmp_path / "n", changed(rtx, max_latency=1e-6, objective=objective))
        found = re.search(r"takes ([\d.]+) (ms.*batch \d)\)", str(said.value))
        least[found[2]] = float(found[1])
    run, image = "ms (estimate within 1.3x, RTX 3090, batch 2", "ms an image (estimate within 1.3x, RTX 3090, batch 8"
    assert set(least) == {run, image}
    assert least[image] < least[run] / 2


@pytest.mark.tensorrt
def test_the_least_error_within_a_time(small_model, options, split, tmp_path):
    rtx = changed(options, backend="tensorrt-rtx", sms=(86,), gpu="RTX 3090")
    with pytest.raises(
        ConfigError, match=r"no plan runs in 1e-06 ms: the cheapest plan takes [\d.]+ ms \(estimate within 1.3x, RTX"
    ) as said:
        done(small_model, tmp_path / "n", changed(rtx, max_latency=1e-6))
    assert not (tmp_path / "n").exists()
    least = float(str(said.value).split("takes ")[1].split(" ms")[0])
    found = done(small_model, tmp_path / "b", changed(rtx, max_latency=1.001 * least))
    assert found.within.estimated <= 1.001 * least
    plan = PrecisionPlan.load(found.bundle.file("plan.json"))
    assert plan.names("fp16") == found.within.kept
    assert {plan.entries[name].cause.value for name in found.within.kept} <= {"kept-latency"}
    # With more time nothing is less accurate than all in FP16.
    more = done(small_model, tmp_path / "m", changed(rtx, max_latency=100.0))
    assert len(more.within.kept) == CONVOLUTIONS and more.within.error == 0


def problem(count: int = 6) -> tuple[Costs, Problem]:
    """Each convolution is a millisecond cheaper in INT8, and has an error there."""
    names = [f"c{index}" for index in range(count)]
    joints = tuple(Joint((name,), np.array([1.0, 2.0])) for name in names)
    choices = {
        name: (PrecisionChoice("int8", 2.0**place), PrecisionChoice("fp16", 0.0, True))
        for place, name in enumerate(names)
    }
    return Costs(tuple(names), joints, 1.0, "ms"), Problem(choices, joints, 1.0)


def test_an_estimate_has_to_keep_the_limit():
    costs, asked = problem()
    found = most_accurate_within(costs.unit, asked, 9.5)
    assert found.kept == ("c4", "c5")
    assert (found.estimated, found.error, found.measured) == (pytest.approx(9.0), pytest.approx(15.0), None)
    assert str(found) == "the least error within 9.5 ms: 9 ms, 2 convolutions in FP16"
    with pytest.raises(ConfigError, match="no plan runs in 6.5 ms: the cheapest plan takes 7 ms"):
        most_accurate_within(costs.unit, asked, 6.5)
    check_reachable(costs.unit, asked, 7.0)


@pytest.mark.parametrize("power", [1.0, 1.2, 0.8])
def test_a_measurement_has_to_keep_the_limit(power):
    """Plans take ten times as long as is estimated, and more than that the more, or the less, they have in FP16."""
    costs, asked = problem()
    measured: list[tuple[str, ...]] = []

    def measure(names: tuple[str, ...]) -> float:
        measured.append(names)
        return 10 * 7 * ((7 + len(names)) / 7) ** power

    found = most_accurate_within(costs.unit, asked, 100.0, measure)
    assert found.measured <= 100.0
    assert len(measured) <= 1 + TRIES
    best = max(count for count in range(7) if 70 * ((7 + count) / 7) ** power <= 100.0)
    assert best - 1 <= len(found.kept) <= best
    assert "ms measured" in str(found)
    with pytest.raises(ConfigError, match="the cheapest plan takes 70 ms measured"):
        most_accurate_within(costs.unit, asked, 69.0, measure)


def test_where_no_plan_keeps_what_was_measured_of_it_the_cheapest_does():
    costs, asked = problem()
    found = most_accurate_within(costs.unit, asked, 100.0, lambda names: 90.0 if not names else 1000.0)
    assert (found.kept, found.measured) == ((), 90.0)


def test_what_a_plan_within_a_time_costs_is_told_of_images_that_chose_nothing(small_model, options, split, tmp_path):
    """Where a calibration image is annotated too, it is left out of the comparison."""
    from trtdet.building.comparison import comparison_images
    from trtdet.building.job import Job

    calibration = options.calibration
    mixed, document = tmp_path / "mixed", json.loads(split.annotations.read_text())
    mixed.mkdir()
    for path in (*split.images.iterdir(), *list(calibration.images.iterdir())[:1]):
        (mixed / (path.name if path.parent == split.images else "calibrated.png")).write_bytes(path.read_bytes())
    document["images"].append({"id": 999, "file_name": "calibrated.png", "width": 256, "height": 256})
    labels = tmp_path / "labels.json"
    labels.write_text(json.dumps(document))
    asked = changed(options, val_images=mixed, annotations=labels, max_latency=1.0)
    reported = comparison_images(Job(small_model, CONFIG, tmp_path / "b", asked))
    assert len(reported.images) == 8
    chosen = {path.read_bytes() for path in select_images(calibration).paths}
    assert chosen.isdisjoint(image.path.read_bytes() for image in reported.images)
    usual = comparison_images(Job(small_model, CONFIG, tmp_path / "b", changed(asked, max_latency=None)))
    assert len(usual.images) == 9
