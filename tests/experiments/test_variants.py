import json
import os
import re
import shutil
import signal
import sys
import threading
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from killing import finish_after_kills

from trtdet import Experiment, Variant, build, load_config, sweep, variant_options
from trtdet.building.variants import resolved
from trtdet.demo import shapes
from trtdet.errors import ConfigError, TrtdetWarning
from trtdet.experiments.folder import Provenance
from trtdet.exporter import SHAPES_MODEL
from trtdet.options import BuildOptions, CalibrationOptions, PlanOptions, SweepOptions, changed
from trtdet.quantization import PrecisionPlan
from trtdet.report import report
from trtdet.report.document import Histograms

CONFIG = load_config("shapes")


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    images = shapes.generate(folder, "calibration", 4).images
    split = shapes.generate(folder, "val", 4)
    return SweepOptions(
        calibration=CalibrationOptions(images=images),
        rules=("minmax",),
        efforts=("none", "bias"),
        keeps=(0, 2, "depthwise"),
        iou_thresholds=(CONFIG.nms.iou_threshold, 0.5),
        backend="onnxruntime",
        plan=PlanOptions(val_images=split.images, annotations=split.annotations, int8_all=True),
    )


def plain(variants: Any) -> list[dict[str, Any]]:
    """Rows without numbers and how long something took."""
    left = ("seconds", "number", "dominated_by", "build")
    return [{key: value for key, value in variant.row().items() if key not in left} for variant in variants]


def keys(variant: Variant) -> tuple[str, str, str, str]:
    axes = variant.axes
    return axes["calibration"], axes["corrected"], axes["kept in FP16"], axes["NMS"]


@pytest.fixture(scope="module")
def done(options, tmp_path_factory):
    return sweep(SHAPES_MODEL, CONFIG, tmp_path_factory.mktemp("done"), options)


def test_every_variant_has_a_row(done):
    assert len(done.variants) == 2 + 2 * 3 * 2
    assert [variant.number for variant in done.variants] == list(range(1, 15))
    assert [variant.axes["precision"] for variant in done.variants[:3]] == ["FP32", "FP32", "INT8"]
    assert [variant.counts["fp32"] for variant in done.variants[:2]] == [95, 95]
    by = {keys(variant): variant for variant in done.variants}
    assert len(by) == len(done.variants)
    for (rule, _, kept, thresholds), variant in by.items():
        if not rule:
            assert (variant.difference, variant.low) == (0, None)
            continue
        reference = by["", "", "", thresholds]
        assert variant.difference == pytest.approx(variant.map - reference.map, abs=1e-12)
        assert variant.low <= variant.high
        assert variant.counts["fp16"] == len(variant.kept) == {"0": 0, "2": 2, "depthwise": 12}[kept]
        assert variant.counts["int8"] + variant.counts["fp16"] == 95
    usual = "0.001 / 0.65 / 300"
    assert by["minmax", "", "0", usual].map != by["minmax", "bias", "0", usual].map
    assert any(variant.dominated_by for variant in done.variants)


def test_the_files_hold_what_was_given(done):
    assert json.loads((done.folder / "experiment.json").read_text()) == json.loads(json.dumps(done.as_dict()))
    assert Experiment.load(done.folder / "experiment.json") == done
    table = (done.folder / "experiment.md").read_text()
    assert table == done.markdown() + "\n"
    assert len(table.splitlines()) == 2 + len(done.variants)
    assert "| INT8 | keep | minmax | bias | depthwise | --int8-all | 0.001 / 0.5 / 300 |" in table


def test_a_variant_is_built_by_its_number(done, tmp_path):
    """With its thresholds and the convolutions that it kept; the float model as it is."""
    variant = next(each for each in done.variants if keys(each) == ("minmax", "bias", "2", "0.001 / 0.5 / 300"))
    asked, config = variant_options(done.folder, variant.number, CONFIG)
    assert (config.nms.iou_threshold, asked.calibration.rule, asked.corrections) == (0.5, "minmax", ("bias",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # of the few images
        bundle = build(SHAPES_MODEL, config, tmp_path / "b", changed(asked, guard="off")).bundle
    assert PrecisionPlan.load(bundle.file("plan.json")).names("fp16") == variant.kept
    assert bundle.manifest.nms.iou_threshold == 0.5
    assert variant_options(done.folder, 1, CONFIG)[0].precision == "fp32"
    with pytest.raises(ConfigError, match="there is no such variant; allowed are 1 to 14"):
        variant_options(done.folder, 15, CONFIG)


@pytest.mark.parametrize("text", ["3", ":3", "tuned:", "tuned:x", "tuned:-1"])
def test_a_variant_is_named_by_its_folder_and_number(text):
    with pytest.raises(ConfigError, match=f"--from {text} must be DIR:N, such as tuned:3"):
        resolved(BuildOptions(from_=text), CONFIG)


def test_a_folder_without_an_experiment_has_no_variants(tmp_path):
    with pytest.raises(ConfigError, match="has no finished experiment"):
        resolved(BuildOptions(from_=f"{tmp_path}:3"), CONFIG)


def test_more_values_on_an_axis_do_only_what_is_new(done, options, tmp_path):
    folder = Path(shutil.copytree(done.folder, tmp_path / "copy"))
    stages: list[str] = []
    again = sweep(SHAPES_MODEL, CONFIG, folder, options, lambda stage, *_: stages.append(stage))
    assert again == replace(done, folder=folder)
    assert set(stages) == {"sweep"}
    more = replace(options, keeps=(0, 1), rules=("minmax",), efforts=("none",), iou_thresholds=())
    wider = sweep(SHAPES_MODEL, CONFIG, folder, more, lambda stage, *_: stages.append(stage))
    new = wider.variants[: -wider.older]
    assert [variant.axes["kept in FP16"] for variant in new] == ["", "0", "1"]
    names = {variant.name for variant in new if variant.axes["kept in FP16"] != "1"}
    assert plain(each for each in new if each.name in names) == plain(
        each for each in done.variants if each.name in names
    )
    # The experiment keeps the older rows, behind the new.
    assert len(wider.variants) == len(done.variants) + 1
    assert Experiment.load(folder / "experiment.json") == wider
    table = (folder / "experiment.md").read_text()
    assert len(table.splitlines()) == 2 + len(done.variants) + 1
    assert "| INT8 | keep | minmax | bias | depthwise | --int8-all | 0.001 / 0.5 / 300 |" in table
    assert "calibrating" not in stages
    assert "scoring minmax, 0 in FP16" not in stages
    assert "scoring minmax, 1 in FP16" in stages
    made = Provenance.load(folder)
    assert made is not None
    assert [run.options["keeps"] for run in made.runs] == [[0, 2, "depthwise"], [0, 1]]
    told = report([folder])
    titles = ["Accuracy-speed trade-offs", "Histograms and thresholds", "Reproduce"]
    assert [section.title for section in told.sections] == titles
    histograms = next(part for section in told.sections for part in section.parts if isinstance(part, Histograms))
    tensors = [entry.tensor for entry in histograms.entries]  # each once, whoever reads it
    assert len(histograms.shown) == 10 and len(tensors) == len(set(tensors)) == 79
    assert sum(len(entry.name.split(", ")) for entry in histograms.entries) == 95
    assert all(entry.chosen is None and entry.thresholds for entry in histograms.entries)
    first, second = (line for line in told.sections[-1].parts[1].lines)
    assert "--effort none bias --keep-fp16 0 2 depthwise --int8-all" in first and "nms.iou_threshold=0.65,0.5" in first
    assert "--effort none --keep-fp16 0 1 --int8-all" in second


def test_a_damaged_row_is_made_again(done, options, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(done.folder, folder)
    lines = (folder / "rows.jsonl").read_text().splitlines()
    damaged = json.loads(lines[3])
    lines[3] = json.dumps({**damaged, "map": "high"})
    lines[4] = json.dumps({**json.loads(lines[4]), "counts": {"int8": "many"}})
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    few = replace(options, efforts=("none",), keeps=(0,), iou_thresholds=(CONFIG.nms.iou_threshold, 0.5))
    (folder / "histograms.npz").write_bytes(b"cut")
    with pytest.warns(TrtdetWarning) as caught:
        again = sweep(SHAPES_MODEL, CONFIG, folder, few)
    messages = [str(warning.message) for warning in caught if warning.category is TrtdetWarning]
    for message in messages[:2]:
        assert re.search(r"a row is damaged \('(map|counts.*)': .* measured again", message)
    assert any("they are collected again" in message for message in messages[2:])
    assert plain(again.variants[: -again.older]) == plain(
        each for each in done.variants if each.axes["kept in FP16"] in ("", "0") and not each.axes["corrected"]
    )


def test_another_model_or_other_images_are_refused(done, options):
    before = (done.folder / "rows.jsonl").read_bytes()
    fewer = changed(options, calibration=changed(options.calibration, num_images=3))
    with pytest.raises(ConfigError, match="another model, other images or other options"):
        sweep(SHAPES_MODEL, CONFIG, done.folder, fewer)
    assert (done.folder / "rows.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match="needs calibration images"):
        sweep(SHAPES_MODEL, CONFIG, done.folder, changed(options, calibration=CalibrationOptions()))


@pytest.fixture(scope="module")
def few(options):
    """Fewer variants, for what takes them one more time."""
    return replace(options, efforts=("none",), keeps=(0, 2))


def of_few(done: Any) -> list[dict[str, Any]]:
    """The rows that they have in the whole sweep."""
    return plain(
        each for each in done.variants if each.axes["kept in FP16"] in ("", "0", "2") and not each.axes["corrected"]
    )


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_rows(few, done, tmp_path):
    command = [sys.executable, "-m", "trtdet", "sweep", str(SHAPES_MODEL), "--config", "shapes", "-o", str(tmp_path)]
    command += ["--images", str(few.calibration.images), "--backend", "onnxruntime"]
    command += ["--val-images", str(few.plan.val_images), "--annotations", str(few.plan.annotations)]
    command += ["--calib", "minmax", "--effort", "none", "--keep-fp16", "0", "2", "--int8-all"]
    command += ["--set", "nms.iou_threshold=0.65,0.5"]
    finish_after_kills(command, tmp_path / "rows.jsonl", (0, 3))
    assert plain(Experiment.load(tmp_path / "experiment.json").variants) == of_few(done)


def workers_at(function: str) -> list[int]:
    """The processes of this process's own Ray that are at a task with this function."""
    found, parents = [], {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if (entry / "cmdline").read_bytes().startswith(f"ray::{function}".encode()):
                    found.append(int(entry.name))
    # A worker is a child of the raylet, which is a child of what has started Ray.
    return [worker for worker in found if parents.get(parents[worker]) == os.getpid()]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_workers")
def test_ray_gives_the_same_rows_though_a_worker_is_killed(few, done, tmp_path):
    killed: list[int] = []
    over = threading.Event()

    def kill_one() -> None:
        """The first worker that is seen at a group: one that waits for a row may find no worker left."""
        while not killed and not over.wait(0.02):
            for worker in workers_at("rows_of_group"):
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
                    killed.append(worker)
                    break

    killing = threading.Thread(target=kill_one)
    killing.start()
    try:
        remote = sweep(SHAPES_MODEL, CONFIG, tmp_path, changed(few, ray="local"))
    finally:
        over.set()
        killing.join()
    assert killed
    assert plain(remote.variants) == of_few(done)


@pytest.mark.slow
def test_corrections_that_need_no_rule_are_worked_out_once(options, tmp_path):
    rules = ("minmax", "percentile", "entropy")
    # Of the few images of other tests one alone judges, and may prefer the rule.
    given = CalibrationOptions(images=shapes.generate(tmp_path, "more", 12).images)
    grid = replace(options, calibration=given, rules=rules, efforts=("range,bias",), keeps=(0,), iou_thresholds=())
    stages: list[tuple[str, int]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # of the few images
        found = sweep(
            SHAPES_MODEL, CONFIG, tmp_path / "sweep", grid, lambda stage, done, total: stages.append((stage, done))
        )
    gradients = [done for stage, done in stages if stage == "correcting: gradients of the detections"]
    assert gradients.count(1) == 1
    # Each rule is compared with, all the same, and corrections are judged with the biases of their ranges once more.
    assert [done for stage, done in stages if stage == "correcting: detections"].count(1) == 4
    first, *others = found.variants[1:]
    assert [variant.same_as for variant in others] == ["minmax, range, bias, 0 in FP16, SiLU keep"] * 2
    assert {variant.axes["calibration"] for variant in found.variants[1:]} == {"minmax", "percentile", "entropy"}
    assert not first.same_as


def test_variants_with_one_network_are_scored_once(options, tmp_path):
    """A percentile of 100 is the largest magnitude."""
    rules = ("minmax", "percentile:100")
    grid = replace(options, rules=rules, efforts=("none",), keeps=(0,), iou_thresholds=())
    stages: list[str] = []
    found = sweep(SHAPES_MODEL, CONFIG, tmp_path, grid, lambda stage, *_: stages.append(stage))
    minmax, percentile = found.variants[1:]
    assert not minmax.same_as
    assert percentile.same_as == "minmax, 0 in FP16, SiLU keep"
    assert (percentile.map, percentile.difference) == (minmax.map, minmax.difference)
    assert "scoring minmax, 0 in FP16" in stages
    assert "scoring percentile, 0 in FP16" not in stages
    again = sweep(SHAPES_MODEL, CONFIG, tmp_path, grid)
    assert again.variants == found.variants
