"""TensorRT-RTX's default plan is the fastest by estimates of engines, or FP16 alone if INT8 gains nothing."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import CONVOLUTIONS

from trtdet.audit.traffic import Flow
from trtdet.backends import choose
from trtdet.building import BuildResult, build, comparison, default_plan
from trtdet.building.graph import build_graph
from trtdet.building.job import checked_build, job_of
from trtdet.cli import main
from trtdet.config import load_config
from trtdet.demo import shapes
from trtdet.errors import ConfigError, TrtdetWarning
from trtdet.options import BuildOptions, CalibrationOptions, Stage, changed
from trtdet.quantization import Cause, PrecisionPlan

CONFIG = load_config("shapes")
INNER = ("/down1/Conv", "/down2/Conv")
pytestmark = pytest.mark.tensorrt


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    images = shapes.generate(tmp_path_factory.mktemp("shapes"), "calibration", 6).images
    calibration = CalibrationOptions(rule="minmax", images=images)
    return BuildOptions(effort="none", backend="tensorrt-rtx", sms=(89,), calibration=calibration)


def int8_layers(flow: Flow) -> tuple[str, ...]:
    return tuple(name for name in INNER if flow.layers[flow.convolutions[name].layer].input == "Int8")


@pytest.fixture
def times(monkeypatch):
    """Sets the milliseconds that the estimate gives an engine by its INT8 convolutions."""

    def call(ms: Callable[[tuple[str, ...]], float], built: Callable[[tuple[str, ...]], float] | None = None) -> None:
        def made(own: Callable[[tuple[str, ...]], float], real: Any) -> Any:
            def estimate(flow: Flow, gpu: Any, batch: int, *, graph: bool) -> Any:
                total = real(flow, gpu, batch, graph=graph)
                layer = replace(total.layers[0], memory_ms=own(int8_layers(flow)), arithmetic_ms=0.0, launch_ms=0.0)
                return replace(total, layers=(layer,))

            return estimate

        monkeypatch.setattr(default_plan, "estimate", made(ms, default_plan.estimate))
        monkeypatch.setattr(comparison, "estimate", made(built or ms, comparison.estimate))

    return call


def done(model: Path, place: Path, options: BuildOptions, told: list[str] | None = None) -> BuildResult:
    def progress(stage: str, step: int, total: int) -> None:
        if told is not None:
            told.append(stage)

    return build(model, CONFIG, place, options, progress)


def test_int8_is_where_the_fastest_engine_has_it(wide, options, times, tmp_path, recwarn):
    times(lambda int8: {(): 1.0, INNER: 0.9}.get(int8, 2.0))
    result = done(wide, tmp_path / "b", options)
    plan = PrecisionPlan.load(result.bundle.file("plan.json"))
    assert plan.names("int8") == INNER
    assert (result.bundle.manifest.shipped, result.bundle.manifest.guard) == ("int8", None)
    assert result.worth.speedup == pytest.approx(1 / 0.9)
    assert not [warning for warning in recwarn if "FP16 alone" in str(warning.message)]
    assert done(wide, tmp_path / "b", options).up_to_date


def test_where_nothing_gains_fp16_alone_is_said_first_and_built(wide, options, times, tmp_path):
    times(lambda int8: 1.0 + 0.1 * len(int8))
    told: list[str] = []
    said = "FP16 alone: no plan with INT8 layers is 1.02 times as fast; the best takes 1.[12]00 ms against 1.000 ms in"
    with pytest.warns(TrtdetWarning, match=said):
        result = done(wide, tmp_path / "b", options, told)
    assert not {"calibrating"} & set(told) and not any("compare with" in stage for stage in told)
    manifest = result.bundle.manifest
    guard = manifest.guard
    assert (guard.shipped, guard.how, guard.on, guard.least) == ("fp16", "estimated", "L4", 1.02)
    assert guard.speedup < 1 and manifest.command["precision"] == "int8" and manifest.quantization.mode == "none"
    assert manifest.precision.fp16 == CONVOLUTIONS
    assert result.audit.counts()["int8"] == 0
    entries = PrecisionPlan.load(result.bundle.file("plan.json")).entries
    for name in INNER:
        assert entries[name].cause is Cause.NO_TIME_GAINED
        assert entries[name].reason.startswith("FP16 alone; INT8 here alone changes the estimate by ")
        assert entries[name].reason.endswith(" us (estimate for L4, batch 1)")
    assert entries["/stem/Conv"].cause is Cause.FEW_CHANNELS
    # It is what a build in FP16 makes, and the same build keeps it.
    alone = done(wide, tmp_path / "f", replace(options, precision="fp16"))
    assert alone.bundle.manifest.files["model.engine"] == manifest.files["model.engine"]
    assert done(wide, tmp_path / "b", options).up_to_date


@pytest.mark.slow
def test_the_guard_says_from_which_speed_on_int8_is_worth_it(wide, options, times, tmp_path):
    """At 1.01 times the speed of FP16 it is not by default, and is where one asks for less."""
    times(lambda int8: 1.01 if len(int8) < len(INNER) else 1.0)
    graph = build_graph(wide, CONFIG, options, choose("tensorrt-rtx"))
    by_guard = {}
    for guard in ("warn", 1.0, 1.05):
        found = default_plan.fastest_plan(graph, choose("tensorrt-rtx"), changed(options, guard=guard))
        by_guard[guard] = (found.fp16_alone, found.plan.names("int8"))
    assert by_guard == {"warn": (True, ()), 1.0: (False, INNER), 1.05: (True, ())}
    keys = {
        guard: checked_build(job_of(wide, CONFIG, tmp_path / "b", changed(options, guard=guard))).keys[Stage.PLAN]
        for guard in by_guard
    }
    assert len(set(keys.values())) == 3


def test_an_engine_that_turns_out_slower_is_replaced(wide, options, times, tmp_path):
    times(lambda int8: 0.8 if int8 else 1.0, built=lambda int8: 1.5 if int8 else 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrtdetWarning)
        result = done(wide, tmp_path / "b", options)
    guard = result.bundle.manifest.guard
    assert guard.shipped == "fp16"
    assert guard.reason.startswith("INT8 is 0.67 times (") and guard.reason.endswith("and the default plan asks for 1")
    assert result.audit.counts()["int8"] == 0
    # What was not chosen by estimates stays as asked for, with a warning.
    with pytest.warns(TrtdetWarning, match="INT8 is not faster than FP16"):
        asked = done(wide, tmp_path / "c", changed(options, fastest=False))
    assert asked.bundle.manifest.shipped == "int8"


@pytest.mark.parametrize(
    "changes",
    [
        {"int8_all": True},
        {"fastest": False},
        {"max_latency": 100.0},
        {"precision": "fp16"},
        {"quantization": "explicit"},
    ],
    ids=str,
)
def test_a_plan_that_is_asked_for_is_not_chosen_by_estimates(wide, options, changes, tmp_path):
    checked = checked_build(job_of(wide, CONFIG, tmp_path / "b", changed(options, **changes)))
    assert (checked.default is None) == (changes != {"quantization": "explicit"})


def test_named_layers_stay_in_fp16_and_others_are_chosen(wide, options, times):
    times(lambda int8: 1.0 - 0.2 * len(int8))
    graph, backend = build_graph(wide, CONFIG, options, choose("tensorrt-rtx")), choose("tensorrt-rtx")
    found = default_plan.fastest_plan(graph, backend, changed(options, keep_fp16=("/down1/Conv",)))
    assert found.plan.names("int8") == ("/down2/Conv",)
    assert found.plan.entries["/down1/Conv"].cause is Cause.KEPT_NAMED
    with pytest.raises(ConfigError, match="the model has no convolution 'none'"):
        default_plan.fastest_plan(graph, backend, changed(options, keep_fp16=("none",)))


def test_the_plan_follows_the_gpu(wide, options, times, tmp_path):
    keys = [
        checked_build(job_of(wide, CONFIG, tmp_path / "b", changed(options, gpu=gpu))).keys[Stage.CORRECTIONS]
        for gpu in ("l4", "L4", "T4")
    ]
    assert keys[0] == keys[1] != keys[2]


def test_a_dry_run_says_the_plan(wide, options, times, tmp_path, capsys):
    times(lambda int8: 1.0 + 0.1 * len(int8))
    command = ["build", str(wide), "--config", "shapes", "--images", str(options.calibration.images), "--dry-run"]
    command += ["--backend", "tensorrt-rtx", "--sm", "8.9", "-o", str(tmp_path / "b")]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert f"plan: 0 INT8, {CONVOLUTIONS} FP16, 0 FP32 layers, INT8 has 0.0% of the multiply-adds; FP16 alone: " in text
    assert "calibrating" not in text
    assert main([*command, "--int8-all", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan == f"plan: {CONVOLUTIONS} INT8, 0 FP16, 0 FP32 layers, INT8 has 100.0% of the multiply-adds"
