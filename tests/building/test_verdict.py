"""The comparison of INT8 with FP16 after a build: estimate, speed limit, and the shipped bundle."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from trtdet.audit import Audit
from trtdet.audit.gpus import GPUS
from trtdet.audit.roofline import KERNEL_CYCLES, RATIO_WITHIN
from trtdet.backends.base import RunInfo
from trtdet.building import BuildResult, build, comparison
from trtdet.building.comparison import GUARD, WORTH, EngineFigures, Estimated, Worth, fp16_options
from trtdet.building.costs import gpu_of
from trtdet.building.job import Job
from trtdet.bundle import Bundle
from trtdet.cli import main
from trtdet.config import load_config
from trtdet.data import CocoDataset
from trtdet.errors import ModelError, TrtdetWarning
from trtdet.evaluation.scoring import evaluate
from trtdet.options import BuildOptions, CalibrationOptions, PlanOptions, changed
from trtdet.performance import Ratio
from trtdet.runtime.detector import Detector

Built = Callable[..., BuildResult]
Times = Callable[[float, float], None]


@pytest.fixture
def options(tiny):
    calibration = CalibrationOptions(images=tiny.images)
    return BuildOptions(
        effort="none", backend="tensorrt-rtx", sms=(86,), calibration=calibration, plan=PlanOptions(int8_all=True)
    )


@pytest.fixture
def built(tiny, options, tmp_path):
    """Builds the tiny detector; progress is told to ``told``."""

    def call(told: list[str] | None = None, **changes: Any) -> BuildResult:
        def progress(stage: str, done: int, total: int) -> None:
            if told is not None:
                told.append(stage)

        return build(tiny.model, tiny.config, tmp_path / "b", changed(options, **changes), progress)

    return call


@pytest.fixture
def times(monkeypatch):
    """Sets the milliseconds that the estimate gives an engine with convolutions in INT8, and one without."""

    def call(int8: float, fp16: float) -> None:
        def estimate(flow: Any, gpu: Any, batch: int, graph: bool) -> Any:
            quantized = any(layer.input == "Int8" for layer in flow.layers)
            ms = int8 if quantized else fp16
            return SimpleNamespace(ms=ms, bytes=int(1e6 * ms), layers=(1, 2), as_dict=lambda: {"bound_ms": {}})

        monkeypatch.setattr(comparison, "estimate", estimate)

    return call


@pytest.mark.tensorrt
def test_int8_is_compared_with_fp16_where_no_engine_runs(tiny, options, built, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = built()
    found = done.worth.estimate
    assert (found.gpu, found.batch, done.worth.latency, done.worth.run_info) == ("A10", 1, None, None)
    assert str(done.worth) == str(found)
    said = [str(warning.message) for warning in caught if warning.category is TrtdetWarning]
    doubted = [text for text in said if "faster than FP16 (estimate for A10, batch 1: " in text]
    assert bool(doubted) == (found.ratio >= 1)
    # The other engine is the one that a build in FP16 makes.
    alone = build(tiny.model, tiny.config, tmp_path / "h", changed(options, precision="fp16", int8_all=False)).bundle
    moved = Audit.load(alone.file("audit.json")).bytes
    assert (found.fp16.bytes, found.fp16.file_bytes) == (moved, alone.file("model.engine").stat().st_size)
    assert found.int8.bytes == Audit.load(done.bundle.file("audit.json")).bytes
    assert sum(found.int8.bound_ms.values()) == pytest.approx(found.int8.ms)
    kept = json.loads(done.bundle.file(WORTH).read_text())
    assert kept["estimate"] == found.as_dict()
    assert kept["speedup"] == pytest.approx(found.fp16.ms / found.int8.ms)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.tensorrt
def test_another_gpu_is_estimated_without_another_int8_build(built, times, tmp_path):
    times(0.5, 1)
    first = built()
    told: list[str] = []
    other = built(told, gpu="t4")
    assert other.up_to_date
    assert other.bundle.manifest.files["model.engine"] == first.bundle.manifest.files["model.engine"]
    assert [worth.estimate.gpu for worth in (first.worth, other.worth) if worth and worth.estimate] == ["A10", "T4"]
    assert any(stage.startswith("FP16 to compare with: building the engine") for stage in told)
    again = built(gpu="T4")
    assert (again.up_to_date, again.worth) == (True, None)


@pytest.mark.tensorrt
def test_an_engine_that_cannot_be_captured_is_estimated_kernel_by_kernel(built):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)
        captured, native = (built(mode=mode, force=True).worth for mode in ("host", "native"))
    assert (captured.estimate.cuda_graph, native.estimate.cuda_graph) == (True, False)
    assert "(estimate for A10, batch 1, without CUDA graphs): " in str(native)
    # In a network this small a kernel costs its fixed time, which hides the host's launch of the next.
    launches = [each.fp16.ms / each.fp16.kernels for each in (captured.estimate, native.estimate)]
    assert launches == pytest.approx([KERNEL_CYCLES / 1.695 / 1e6] * 2, rel=0.3)


@pytest.mark.tensorrt
def test_annotated_images_are_scored_beside_the_estimate(tiny, built, times):
    times(0.5, 1)
    worth = built(val_images=tiny.images, annotations=tiny.annotations).worth
    assert worth.against == "fp32"
    assert str(worth).startswith("INT8 against FP32: mAP ")
    assert "latency not measured, as " in str(worth)
    assert str(worth).endswith(f". {worth.estimate}")


def test_the_gpu_of_an_estimate_is_one_that_the_engine_was_built_for():
    assert gpu_of(None, (86,)).name == "A10"
    assert gpu_of(None, (80, 86, 89, 120)).name == "L4"
    assert gpu_of(None, (75,)).name == "T4"
    unknown = 103
    assert unknown not in {gpu.capability for gpu in GPUS.values()}
    assert gpu_of(None, (unknown,)).name == "L4"


def test_fp16_is_built_in_its_own_best_form(tmp_path):
    int8 = BuildOptions(silu="plugin", quantization="implicit", sms=(86,), batch=(1, 4, 8), guard=1.02)
    plugins = (tmp_path / "lib.so",)
    asked = changed(int8, int8_all=True, embed_plugins=True, workspace=1 << 20, plugins=plugins, gpu="T4")
    twin = fp16_options(Job(tmp_path / "m.onnx", load_config("shapes"), tmp_path / "b", asked), "tensorrt", nms="host")
    assert (twin.precision, twin.silu, twin.engine.plugins, twin.quantization) == ("fp16", "auto", (), "explicit")
    assert (twin.engine.embed_plugins, twin.engine.workspace) == (False, 1 << 20)
    assert (twin.sms, twin.batch, twin.nms.mode, twin.backend) == ((86,), (1, 4, 8), "host", "tensorrt")
    assert (twin.guard, twin.engine.gpu, twin.plan.int8_all) == ("warn", None, False)


@pytest.mark.tensorrt
def test_fp16_is_shipped_where_int8_does_not_reach_the_bound(tiny, built, times, tmp_path, monkeypatch):
    times(1, 1.01)
    done = built(guard=GUARD)
    manifest = Bundle(tmp_path / "b").manifest
    assert set(manifest.files) == {
        *("model.engine", "fp16.onnx", "portable.onnx", "plan.json", "audit.json", "histograms.npz", "worth.json"),
        "build.log",
    }
    guard = manifest.guard
    assert (guard.asked, guard.shipped, manifest.shipped, manifest.command["precision"]) == (
        *("int8", "fp16", "fp16", "int8"),
    )
    assert (guard.least, guard.how, guard.on, guard.batch) == (1.02, "estimated", "A10", 1)
    assert guard.speedup == pytest.approx(1.01)
    reason = "INT8 is 1.01 times (0.84 .. 1.21) as fast as FP16 (estimate for A10, batch 1), and --guard asks for 1.02"
    assert guard.reason == reason
    assert manifest.quantization.mode == "none"
    assert (manifest.precision.int8, manifest.audit.int8 if manifest.audit else None) == (0, 0)
    assert done.audit.int8 == 0
    assert done.worth.guard == guard
    assert json.loads(done.bundle.file(WORTH).read_text())["guard"] == guard.model_dump()
    # What reads bundles reads it as any other.
    dataset = CocoDataset.load(tiny.annotations, tiny.images, tiny.config.classes)
    assert evaluate(Detector.open(tmp_path / "b"), dataset).result.images == 12
    assert main(["audit", str(tmp_path / "b")]) == 0
    # The same again finds it up to date, and without a bound the images are not run again.
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "assemble", lambda *given: pytest.fail("built again"))
        again = built(guard=GUARD)
    assert (again.up_to_date, again.bundle.manifest) == (True, manifest)
    told: list[str] = []
    plain = built(told, guard="off")
    assert not plain.up_to_date and "calibrating" not in told
    assert (plain.bundle.manifest.shipped, plain.bundle.manifest.guard) == ("int8", None)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.tensorrt
def test_int8_is_shipped_where_it_reaches_the_bound(built, times, tmp_path):
    times(1, 1.02)
    done = built(guard=1.02)
    manifest = Bundle(tmp_path / "b").manifest
    assert (manifest.guard.shipped, manifest.shipped) == ("int8", "int8")
    assert {"int8.onnx", "ranges.json", "calibration.cache", "worth.json"} <= set(manifest.files)
    assert manifest.quantization.mode == "explicit"
    assert done.audit.int8 > 0
    assert built(guard=1.02).up_to_date
    # Another bound may ship another engine.
    other = built(guard=1.03)
    assert (other.up_to_date, other.bundle.manifest.shipped) == (False, "fp16")


@pytest.mark.tensorrt
def test_with_a_bound_nothing_is_in_place_before_it_has_decided(built, times, tmp_path, monkeypatch):
    def fail(*given: Any, graph: bool) -> None:
        raise ModelError("no estimate")

    monkeypatch.setattr(comparison, "estimate", fail)
    with pytest.raises(ModelError, match="no estimate"):
        built(guard=1.02)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.tensorrt
def test_the_command_says_what_was_asked_and_what_was_shipped(tiny, times, options, tmp_path, capsys):
    times(1.25, 1)
    command = ["build", str(tiny.model), "--config", str(tiny.yaml), "--images", str(tiny.images), "--effort", "none"]
    command += ["--int8-all", "--backend", "tensorrt-rtx", "--sm", "86", "--set", "engine.gpu=L4", "-o"]
    command += [str(tmp_path / "b")]
    assert main(command) == 0
    said = capsys.readouterr()
    size = (tmp_path / "b" / "model.engine").stat().st_size / 1e6
    line = "INT8 against FP16 (estimate for L4, batch 1): 1.25x the time (1.04 .. 1.50): FP16 is faster; "
    line += "1.2 MB moved against 1.0 MB, "
    assert f"{line}engine {size:.1f} MB against " in said.out
    (warning,) = [text for text in said.err.splitlines() if text.startswith("warning: ")]
    expected = (
        "INT8 is not faster than FP16 (estimate for L4, batch 1: 1.25x the time (1.04 .. 1.50)); --guard 1.02 ships"
    )
    assert expected in warning
    assert main([*command, "--guard", "1.02", "--json"]) == 0
    said = capsys.readouterr()
    assert "warning: " not in said.err
    assert "0 convs INT8" in said.err
    reason = "INT8 is 0.80 times (0.67 .. 0.96) as fast as FP16 (estimate for L4, batch 1), and --guard asks for 1.02"
    summary = dict(line.split("  ", 1) for line in said.err.splitlines()[-5:])
    assert f"shipped FP16: {reason}" in summary["layers"]
    assert "--guard 1.02 " in summary["asked"]
    found = json.loads(said.out)
    assert found["worth"]["estimate"]["ratio"] == pytest.approx(1.25)
    assert found["manifest"]["guard"]["shipped"] == "fp16"
    assert main([*command, "--guard", "1.02", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["up_to_date"], again["worth"]) == (True, found["worth"])


def engine(ms: float) -> EngineFigures:
    return EngineFigures(ms, {"memory": ms}, 2_000_000, 10, 3_000_000)


ESTIMATE = Estimated("L4", 4, engine(0.5), engine(1.0))


def test_a_measurement_decides_before_an_estimate():
    measured = Worth("fp16", RunInfo("GPU", "TensorRT 10"), batch=4, latency=Ratio(1.25, 1.2, 1.3), estimate=ESTIMATE)
    assert measured.speedup == pytest.approx(0.8)
    guard = measured.guarded(1.02).guard
    assert (guard.shipped, guard.how, guard.on, guard.batch) == ("fp16", "measured", "GPU", 4)
    assert guard.reason == "INT8 is 0.80 times as fast as FP16 (measured on GPU, batch 4), and --guard asks for 1.02"
    assert "measured on GPU, batch 4: 1.25x the time" in measured.warning
    assert "2.0 MB moved against 2.0 MB, engine 3.0 MB against 3.0 MB; on TensorRT 10 (GPU)" in str(measured)
    assert "estimate" not in str(measured)
    estimated = replace(measured, latency=None).guarded(1.02).guard
    assert (estimated.shipped, estimated.how, estimated.on) == ("int8", "estimated", "L4")


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        *[(0.8, "INT8 is faster"), (0.9, "cannot tell which is faster"), (1.15, "cannot tell which is faster")],
        *[(1.0, "cannot tell which is faster"), (1.25, "FP16 is faster")],
    ],
)
def test_an_estimate_judges_only_outside_its_interval(ratio, verdict):
    found = Estimated("L4", 1, engine(ratio), engine(1.0))
    low, high = found.interval
    assert low == pytest.approx(ratio / RATIO_WITHIN) and high == pytest.approx(ratio * RATIO_WITHIN)
    assert found.verdict == verdict
    assert f"{ratio:.2f}x the time ({low:.2f} .. {high:.2f}): {verdict}; " in str(found)
    data = found.as_dict()
    assert (data["interval"], data["verdict"]) == ([low, high], verdict)
    worth = Worth("fp16", estimate=found)
    assert ("cannot tell" in worth.warning, bool(worth.warning)) == (ratio in (1.0, 1.15), ratio >= 1)
    assert worth.guarded(0.1).warning == ""
    # The guard decides by the estimate itself, and says how far off it may be.
    guard = worth.guarded(1.02).guard
    assert guard.shipped == ("int8" if 1 / ratio >= 1.02 else "fp16")
    assert f"INT8 is {1 / ratio:.2f} times ({1 / high:.2f} .. {1 / low:.2f}) as fast" in guard.reason


def test_a_bound_that_cannot_be_judged_ships_int8_and_says_why():
    found = Worth("fp16", unmeasured="there is no GPU").guarded(1.02)
    assert (found.guard.shipped, found.guard.speedup, found.guard.how) == ("int8", None, None)
    assert found.guard.reason == "INT8 could not be compared with FP16, as there is no GPU"
    assert str(found) == "INT8 not compared with FP16, as there is no GPU"
