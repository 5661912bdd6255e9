"""The command that a report gives is read back as the options that the bundle was built with."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from trtdet.backends import EngineOptions
from trtdet.cli import parsers
from trtdet.cli.build_command import _build_options
from trtdet.pipeline import BuildOptions, CalibrationOptions, KeepOptions
from trtdet.report.sections.reproduce import build_command

HERE = Path("a folder")

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
