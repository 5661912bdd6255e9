"""The commands that a report gives are read back as the options that bundle, tune or sweep were made with."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from trtdet.backends import EngineOptions, choose
from trtdet.cli import parsers
from trtdet.cli.build_command import _build_options
from trtdet.cli.sweep_command import _sweep_options
from trtdet.cli.tune_command import _tune_options
from trtdet.config import load_config
from trtdet.pipeline import BuildOptions, CalibrationOptions, KeepOptions, TuneOptions
from trtdet.pipeline.made_with import making
from trtdet.pipeline.variants import SweepOptions
from trtdet.report.command_lines import build_command, sweep_command, tune_command

HERE = Path("a folder")
ONNXRUNTIME = choose("onnxruntime").capabilities

CASES = (
    BuildOptions(),
    BuildOptions("fp16", backend="tensorrt", sms=(86, 89), batch=(1, 4, 8), nms="onnx", measure=False),
    BuildOptions(
        calibration=CalibrationOptions("entropy", 99.9, HERE, Path("root"), 32, Path("h.npz"), check_input=False),
        correct=(),
        keep=KeepOptions(("a/b", "c d"), num_images=8),
        silu="plugin",
        plugins=(Path("x.so"), Path("y.so")),
        engine=EngineOptions(2**28, True, True, True, ("CUBLAS", "CUDNN"), False),
        timing_cache=Path("t"),
        guard=1.02,
        gpu="RTX 4090",
        force=True,
        accuracy_report=True,
        int8_all=True,
        int8_attention=True,
        fp8=True,
        resize=True,
    ),
    BuildOptions(
        correct=("smooth", "bias"),
        keep=KeepOptions(max_map_drop=0.3, images=HERE, annotations=Path("a.json"), ray="local", objective="size"),
        best=True,
    ),
    BuildOptions(keep=KeepOptions(5)),
    BuildOptions(keep=KeepOptions(Path("plan.json"))),
    BuildOptions(keep=KeepOptions(budget=0.125)),
    BuildOptions(keep=KeepOptions(max_disagreement=2.0, images=HERE)),
    BuildOptions(keep=KeepOptions(max_latency=1.5)),
    BuildOptions(quantization="implicit", calibrator="tensorrt", cache=Path("c"), correct=()),
)


def plain(options: BuildOptions) -> dict[str, object]:
    found: dict[str, object] = json.loads(json.dumps(asdict(options), default=str))
    return {**found, "config": {"input": {"size": [320, 640]}}}


@pytest.mark.parametrize("options", CASES, ids=range(len(CASES)))
def test_the_command_gives_the_same_options(options: BuildOptions) -> None:
    words = shlex.split(build_command(plain(options), "out"))
    assert words[:2] == ["trtdet", "build"]
    parsed = parsers("build")[0].parse_args(words[1:])
    assert (str(parsed.model), parsed.config, str(parsed.output)) == ("MODEL", "config.yaml", "out")
    assert _build_options(parsed) == options
    assert parsed.size == ((320, 640) if options.resize else None)


def test_options_that_an_earlier_version_lacked_are_those_by_default() -> None:
    older = plain(BuildOptions())
    del older["resize"]
    assert shlex.split(build_command(older, "out"))[5:] == ["--int8", "-o", "out"]


def test_every_option_is_in_some_case() -> None:
    default = BuildOptions()
    for part in ("", "calibration", "keep", "engine"):
        base = getattr(default, part) if part else default
        for field in fields(base):
            if (part, field.name) in {("", "tuned"), ("calibration", "unfinished")}:
                continue  # of a tune, see below; and where work is kept
            values = [getattr(getattr(case, part) if part else case, field.name) for case in CASES]
            assert any(value != getattr(base, field.name) for value in values), f"{part}.{field.name}"


def test_a_point_is_built_from_its_tune() -> None:
    options = BuildOptions(keep=KeepOptions(Path("t/plans/3.json")), tuned=Path("t"), int8_all=True, gpu="T4")
    words = shlex.split(build_command(plain(options), "out"))
    assert words[5:] == ["--tuned", "t", "--point", "3", "--gpu", "T4", "-o", "out"]


TUNES = (
    TuneOptions(BuildOptions()),
    TuneOptions(
        BuildOptions(
            calibration=CalibrationOptions("mse", 99.9, HERE, Path("root"), 32, Path("h.npz"), check_input=False),
            correct=("bias",),
            backend="tensorrt-rtx",
            sms=(86,),
            batch=(1, 4, 8),
            keep=KeepOptions(objective="throughput"),
            silu="plugin",
            plugins=(Path("x.so"),),
            gpu="L4",
            int8_attention=True,
            fp8=True,
        ),
        HERE,
        Path("a.json"),
        9,
        16,
        "local",
        "onnxruntime",
    ),
)

CONFIG = load_config("shapes")

SWEEPS = (
    SweepOptions(CalibrationOptions(images=HERE), HERE, Path("a.json"), suppressions=(CONFIG.nms,)),
    SweepOptions(
        CalibrationOptions("entropy", 99.9, HERE, Path("root"), 32),
        HERE,
        Path("a.json"),
        ("entropy", "minmax"),
        ((), ("smooth", "bias")),
        (0, 3, "depthwise"),
        tuple(
            CONFIG.with_nms(iou_threshold=iou, max_detections=most).nms for iou in (0.5, 0.6) for most in (10, 20, 30)
        ),
        "tensorrt",
        (86, 89),
        "local",
        ("keep", "plugin"),
        (Path("x.so"),),
        "onnxruntime",
        True,
        True,
        True,
        (1000,),
        (100, 300),
    ),
)


@pytest.mark.parametrize("options", TUNES, ids=range(len(TUNES)))
def test_the_command_gives_the_same_tune(options: TuneOptions) -> None:
    words = shlex.split(tune_command(making(ONNXRUNTIME, (), options).options, "out"))
    parsed = parsers("tune")[0].parse_args(words[1:])
    assert (words[1], str(parsed.model), str(parsed.output)) == ("tune", "MODEL", "out")
    assert _tune_options(parsed) == options


@pytest.mark.parametrize("options", SWEEPS, ids=range(len(SWEEPS)))
def test_the_command_gives_the_same_sweep(options: SweepOptions) -> None:
    plain = making(ONNXRUNTIME, (), options).options
    words = shlex.split(sweep_command(plain, CONFIG.nms.model_dump(mode="json"), "out"))
    parsed = parsers("sweep")[0].parse_args(words[1:])
    assert (words[1], str(parsed.model), str(parsed.output)) == ("sweep", "MODEL", "out")
    assert _sweep_options(parsed, CONFIG) == options


def test_every_option_of_a_tune_and_a_sweep_is_in_some_case() -> None:
    for default, cases, kinds in (
        (TUNES[0], TUNES, {"build"}),
        (SWEEPS[0], SWEEPS, {"images", "annotations"}),
    ):
        for field in fields(default):
            values = [getattr(case, field.name) for case in cases]
            assert field.name in kinds or any(value != values[0] for value in values[1:]), field.name
