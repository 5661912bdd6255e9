"""The stages together, on a detector of five convolutions."""

import ast
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from models import judged_by
from nets import net, normal
from tiny_detector import Tiny

import trtdet
from trtdet import sweep
from trtdet.backends import choose
from trtdet.building import build
from trtdet.building.bundle import log_kept
from trtdet.building.comparison import WORTH
from trtdet.building.corrections import prepared, prepared_beside
from trtdet.building.graph import host_graph
from trtdet.building.ranges import Calibrated, calibrated, select_images
from trtdet.bundle import Bundle
from trtdet.calibration import Range
from trtdet.cli import main
from trtdet.errors import BackendError, TrtdetError
from trtdet.options import BuildOptions, CalibrationOptions, SweepOptions, changed
from trtdet.passes import PassResult
from trtdet.plans.scores import Sensitivity
from trtdet.quantization import Cause, Entry, PrecisionPlan
from trtdet.quantization.corrections import gate
from trtdet.quantization.corrections.policies import Corrected
from trtdet.quantization.macs import multiply_adds


def test_python_and_the_command_give_the_same_bundle(tiny, options, tmp_path):
    keep = {"keep_fp16": ("stem",), **tiny.labelled}
    made = build(tiny.model, tiny.config, tmp_path / "python", changed(options, **keep))
    command = ["build", str(tiny.model), "--config", str(tiny.yaml), "--images", str(tiny.images)]
    command += ["--backend", "onnxruntime", "--keep-fp16", "stem", "--int8-all", "-o", str(tmp_path / "command")]
    command += ["--val-images", str(tiny.images), "--annotations", str(tiny.annotations)]
    assert main(command) == 0
    one, other = made.bundle.manifest, Bundle(tmp_path / "command").manifest
    assert WORTH in one.files
    assert set(one.files) == set(other.files)
    assert {key: value for key, value in one.files.items() if key != WORTH} == {
        key: value for key, value in other.files.items() if key != WORTH
    }
    assert one.content_hash == other.content_hash
    answers = [json.loads((tmp_path / name / WORTH).read_text()) for name in ("python", "command")]
    assert [answer["comparison"]["difference"] for answer in answers] == [made.worth.comparison.difference] * 2


def test_what_int8_cost_is_not_measured_where_nobody_wants_it(tiny, options, tmp_path):
    silent = changed(options, **tiny.labelled, guard="off")
    done = build(tiny.model, tiny.config, tmp_path / "b", silent)
    assert (done.worth, WORTH in done.bundle.manifest.files) == (None, False)
    # A bundle without the answer is up to date all the same, and gets it.
    again = build(tiny.model, tiny.config, tmp_path / "b", changed(silent, guard="warn"))
    assert again.up_to_date
    assert again.worth is not None
    kept = build(tiny.model, tiny.config, tmp_path / "b", changed(silent, guard="warn"))
    assert (kept.up_to_date, kept.worth) == (True, None)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_a_list_changes_nothing(tiny, options, tmp_path, seed):
    names = sorted(path.name for path in tiny.images.iterdir())
    random.Random(seed).shuffle(names)
    listed = tmp_path / "list.txt"
    listed.write_text("\n".join(names) + "\n")
    calibration = CalibrationOptions(images=listed, root=tiny.images)
    assert select_images(calibration) == select_images(options.calibration)
    few = [replace(one, num_images=5) for one in (calibration, options.calibration)]
    assert select_images(few[0]) == select_images(few[1])
    first = build(tiny.model, tiny.config, tmp_path / "b", options)
    second = build(tiny.model, tiny.config, tmp_path / "b", changed(options, calibration=calibration))
    assert second.up_to_date
    other = build(tiny.model, tiny.config, tmp_path / "c", changed(options, calibration=calibration))
    assert other.bundle.manifest.files == first.bundle.manifest.files


@pytest.fixture
def reworded(monkeypatch):
    """Every reason of a plan, every error and everything that a pass says in other words."""
    make_entry, make_error, make_result = Entry.__init__, TrtdetError.__init__, PassResult.__init__

    def entry(self: Entry, precision: Any, reason: str, *rest: Any, **named: Any) -> None:
        make_entry(self, precision, "other words", *rest, **named)

    def error(self: TrtdetError, problem: str, hint: str = "") -> None:
        make_error(self, "other words", "a hint" if hint else "")

    def result(self: PassResult, count: int, skipped: tuple[str, ...] = ()) -> None:
        make_result(self, count, tuple("other words" for _ in skipped))

    monkeypatch.setattr(Entry, "__init__", entry)
    monkeypatch.setattr(TrtdetError, "__init__", error)
    monkeypatch.setattr(PassResult, "__init__", result)
    yield
    monkeypatch.undo()


WAYS: dict[str, dict[str, Any]] = {
    "int8": {},
    "fp16": {"precision": "fp16", "int8_all": False},
    "depthwise": {"keep_fp16": ("depthwise",)},
    "ranked": {"keep_fp16": 2},
    "plugin": {"silu": "plugin"},
}


def networks(tiny: Tiny, options: BuildOptions, folder: Path) -> dict[str, dict[str, str]]:
    """By way, the hashes of what the builder gets and of the engine, and the causes of the plan."""
    found = {}
    for way, changes in WAYS.items():
        bundle = build(tiny.model, tiny.config, folder / way, changed(options, **changes)).bundle
        listed = ("model.engine", "int8.onnx", "fp16.onnx", "ranges.json", "calibration.cache")
        found[way] = {name: digest for name, digest in bundle.manifest.files.items() if name in listed}
        plan = PrecisionPlan.load(bundle.file("plan.json"))
        found[way]["plan"] = str([(name, entry.precision, entry.cause) for name, entry in plan.entries.items()])
    return found


def test_other_words_give_the_same_networks(tiny, options, tmp_path, request):
    before = networks(tiny, options, tmp_path / "before")
    request.getfixturevalue("reworded")
    after = networks(tiny, options, tmp_path / "after")
    assert after == before
    assert "other words" in (tmp_path / "after" / "fp16" / "plan.json").read_text()
    half = PrecisionPlan.load(tmp_path / "after" / "fp16" / "plan.json")
    assert half.entries["expectation"].cause is Cause.DECODES_BOXES
    assert half.counts() == {"int8": 0, "fp16": 4, "fp32": 1}


@pytest.mark.tensorrt
def test_other_words_give_the_same_engines(tiny, options, tmp_path, request):
    asked = changed(options, backend="tensorrt-rtx", sms=(86,), silu="keep", guard="off")
    ways = {"int8": asked, "fp16": changed(asked, precision="fp16", int8_all=False)}
    before = {way: build(tiny.model, tiny.config, tmp_path / way, ask) for way, ask in ways.items()}
    request.getfixturevalue("reworded")
    for way, ask in ways.items():
        after = build(tiny.model, tiny.config, tmp_path / f"{way}2", ask)
        files = [done.bundle.manifest.files["model.engine"] for done in (before[way], after)]
        assert files[0] == files[1]


def test_a_budget_spends_at_most_its_share(tiny, options, tmp_path):
    share = 0.3
    asked = changed(options, effort="none", fp16_budget=share, rank_images=2)
    bundle = build(tiny.model, tiny.config, tmp_path / "b", asked).bundle
    ranking = Sensitivity.load(bundle.file("sensitivity.json"))
    kept = PrecisionPlan.load(bundle.file("plan.json")).names("fp16")
    macs = multiply_adds(host_graph(tiny.model, tiny.config).model)
    assert ranking.macs == sum(conv.count for conv in macs.values())
    assert 0 < sum(macs[name].count for name in kept) <= share * ranking.macs


def test_a_ranking_is_kept_for_another_number(tiny, options, tmp_path, monkeypatch):
    asked = changed(options, effort="none", keep_fp16=1, rank_images=2)
    first = build(tiny.model, tiny.config, tmp_path / "b", asked).bundle.manifest
    monkeypatch.setattr("trtdet.building.plan.rank", lambda *given, **named: pytest.fail("ranked again"))
    more = build(tiny.model, tiny.config, tmp_path / "b", changed(asked, keep_fp16=2, rank_images=2))
    assert more.bundle.manifest.precision.fp16 == first.precision.fp16 + 1 == 2
    assert more.bundle.manifest.files["sensitivity.json"] == first.files["sensitivity.json"]


def quantized(model: onnx.ModelProto) -> int:
    """Convolutions that read a quantised tensor."""
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    return sum(node.op_type == "Conv" and makers.get(node.input[0]) == "DequantizeLinear" for node in model.graph.node)


def test_the_smallest_set_within_a_bound_is_built(tiny, options, tmp_path, monkeypatch):
    """Each convolution in INT8 costs a point here: what detections of noise lose would say nothing."""
    here = "trtdet.building.plan"
    monkeypatch.setattr(f"{here}.Detector.running", lambda model, *rest, **named: model)
    monkeypatch.setattr(
        f"{here}.evaluate",
        lambda model, *rest, **named: SimpleNamespace(result=SimpleNamespace(map=0.5 - 0.01 * quantized(model))),
    )

    def compare(got: Any, reference: Any) -> Any:
        difference = got.result.map - reference.result.map
        return SimpleNamespace(difference=difference, low=difference, high=difference, images=1)

    monkeypatch.setattr(f"{here}.compare", compare)
    monkeypatch.setattr(f"{here}.part_scores", lambda *given: {})
    monkeypatch.setattr("trtdet.building.validation.apart_from", lambda dataset, others: dataset)

    def built(bound: float) -> Any:
        asked = changed(options, effort="none", max_map_drop=bound, guard="off", rank_images=2, **tiny.labelled)
        return build(tiny.model, tiny.config, tmp_path / f"{bound:g}", asked)

    wide = built(100.0)
    assert (wide.trade_off.chosen.names, wide.bundle.manifest.precision.fp16) == ((), 0)
    loss = wide.trade_off.chosen.score.loss
    assert loss == pytest.approx(4)
    tight = built(loss * 0.6)
    assert tight.trade_off.chosen.score.loss <= loss * 0.6
    plan = PrecisionPlan.load(tight.bundle.file("plan.json"))
    assert plan.names("fp16") == tuple(name for name in plan.entries if name in tight.trade_off.chosen.names)
    assert len(plan.names("fp16")) == 2
    assert {plan.entries[name].cause for name in plan.names("fp16")} == {Cause.KEPT_BOUND}
    assert "<- chosen" in str(tight.trade_off.table())


def test_the_graph_is_placed_once(tiny, options, tmp_path, monkeypatch):
    from trtdet.building import graph

    places: list[int] = []
    place = graph.place

    def counting(*given: Any) -> Any:
        places.append(1)
        return place(*given)

    monkeypatch.setattr(graph, "place", counting)
    build(tiny.model, tiny.config, tmp_path / "b", changed(options, effort="range,smooth,round,bias", keep_fp16=1))
    assert len(places) == 1


def test_requests_to_builders_are_composed_in_one_place():
    package = Path(trtdet.__file__).parent
    calls = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "BuildRequest"
    }
    assert calls == {"backends/base.py"}


def test_audits_of_builds_and_of_sweeps_know_the_forms_of_silu(tiny, options, tmp_path, monkeypatch):
    from trtdet.building import engine

    forms: list[Any] = []
    counts = {"int8": 4, "fp16": 0, "fp32": 1}

    def noting(*given: Any, silu: Any = None) -> Any:
        forms.append(silu)
        return SimpleNamespace(counts=lambda: counts, fp8=0, **counts, departures=(), warnings=(), to_json=lambda: "{}")

    caps = replace(choose("onnxruntime").capabilities, lists_layers=True)
    monkeypatch.setattr(type(choose("onnxruntime")), "capabilities", caps)
    monkeypatch.setattr(engine, "audit", noting)
    monkeypatch.setattr(engine, "layers_of", lambda built: ())
    build(tiny.model, tiny.config, tmp_path / "b", changed(options, effort="none", guard="off"))
    axes = SweepOptions(calibration=options.calibration, efforts=("none",), backend="onnxruntime")
    axes = changed(axes, int8_all=True, **tiny.labelled)
    sweep(tiny.model, tiny.config, tmp_path / "s", axes)
    assert forms == [caps.silu, caps.silu]


def test_the_error_of_a_builder_names_the_file_of_its_messages(tmp_path):
    place = tmp_path / "b.failed-build.log"
    with pytest.raises(BackendError) as failed, log_kept(place):
        raise BackendError("no engine", "free memory", ("[W] half way", "no memory"))
    assert str(failed.value) == f"no engine; free memory; the builder's messages are in '{place}'"
    assert place.read_text() == "[W] half way\nno memory\n"
    with pytest.raises(BackendError, match="^not installed$"), log_kept(place):
        raise BackendError("not installed")
    assert place.exists()
    with log_kept(place):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(BackendError, match="^no engine$"), log_kept(tmp_path / "file" / "b.failed-build.log"):
        raise BackendError("no engine", messages=("no memory",))


@pytest.fixture
def moved(tiny, tmp_path):
    """Ranges, by a rule and the largest value, of a network that only moves values from the input of one INT8 layer to
    that of another, near enough for one range."""
    text = """(float[1,3,16,16] image) => (float[1,64,4] boxes, float[1,64,3] scores) {
        stem = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(image, w0) relu = Relu(stem)
        pooled = MaxPool<kernel_shape = [1, 1]>(relu) one = Conv(relu, w1) other = Conv(pooled, w1)
        both = Add(one, other) rows = Reshape(both, flat) last = Transpose<perm = [0, 2, 1]>(rows)
        boxes, classes = Split<axis = 2>(last, parts) scores = Sigmoid(classes) }"""
    weights = {"w0": normal(8, 3, 3, 3), "w1": normal(7, 8, 1, 1)}
    onnx.save(net(text, **weights, flat=np.array([1, 7, 64]), parts=np.array([4, 3])), tmp_path / "moved.onnx")
    graph = replace(host_graph(tmp_path / "moved.onnx", tiny.config), int8_all=True)

    def moved(rule: str, amax: float) -> Calibrated:
        options = CalibrationOptions(images=tiny.images, num_images=4, rule=rule)
        ranged = calibrated(graph, options, select_images(options))
        tensors = {"relu": Range(amax, 0, amax), "pooled": Range(1.2 * amax, 0, 1.2 * amax)}
        return replace(ranged, ranges=replace(ranged.ranges, tensors={**ranged.ranges.tensors, **tensors}))

    return moved


@pytest.mark.parametrize("errors", [(0.5, 0.4), (0.4, 0.5)])
def test_corrections_are_kept_beside_another_rule_than_theirs_where_they_are_better(moved, monkeypatch, errors):
    options = CalibrationOptions()
    first, second = moved("minmax", 4.0), moved("percentile", 3.0)
    plain = prepared(first, options, ())
    assert prepared_beside(plain, second, options) is None
    corrected = Corrected(plain.ranges, plain.corrections, plain.plan, ("ranges for the head", "error of minmax"))
    monkeypatch.setattr(gate, "head_errors", judged_by(*errors))
    beside = prepared_beside(replace(plain, rule_independent=corrected), second, options)
    if errors[0] < errors[1]:
        assert beside is None
        return
    assert beside is not None
    assert (beside.ranges.rule, beside.ranges.tensors) == ("percentile", plain.ranges.tensors)
    assert beside.summary[0] == "ranges for the head" and "--calib percentile decides none" in beside.summary[1]
    # As without corrections, the rule gives one range to both.
    assert beside.calibrated.ranges == prepared(second, options, ()).calibrated.ranges
    assert [beside.calibrated.ranges.tensors[name].amax for name in ("relu", "pooled")] == pytest.approx([3.6, 3.6])
