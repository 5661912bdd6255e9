"""Every option of every command: its help, its choices, its old spelling, and what a misspelt word gets."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import trtdet.cli
from trtdet.cli import COMMANDS, main, parsers
from trtdet.cli import options as shared
from trtdet.cli.command import Parser
from trtdet.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [command.name for command in COMMANDS]
FORMATS = ("--int8-attention", "--fp8")
PARSERS: dict[str, Parser] = parsers(*NAMES)[1]
ACTIONS = [
    pytest.param(action, id=f"{name} {' '.join(action.option_strings) or action.dest}")
    for name, parser in PARSERS.items()
    for action in parser._actions
    if action.help != argparse.SUPPRESS
]


def parsed(*words: object) -> argparse.Namespace:
    """The options of a command line, which is not run."""
    return trtdet.cli._parse([str(word) for word in words])


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The line that wrong usage is answered with."""
    with pytest.raises(SystemExit) as stop:
        parsed(*words)
    assert stop.value.code == 2
    done = capsys.readouterr()
    assert done.out == ""
    (line,) = done.err.splitlines()
    return line


# Help


@pytest.mark.parametrize("action", ACTIONS)
def test_every_option_has_a_help_text(action: argparse.Action) -> None:
    assert action.help, action.dest
    assert len(action.help) > 10


@pytest.mark.parametrize("action", ACTIONS)
def test_a_default_that_is_no_switch_is_told(action: argparse.Action) -> None:
    switch = action.default in (None, False, [], argparse.SUPPRESS) or action.nargs == 0
    if action.option_strings and not switch:
        assert "default:" in str(action.help) or "%(default)s" in str(action.help)


@pytest.mark.parametrize("action", ACTIONS)
def test_a_default_that_the_help_states_in_words_is_the_default(action: argparse.Action) -> None:
    """``default: 32`` and ``default: auto`` are literal where the parser itself has the value."""
    stated = re.search(r"\(default: ([\w.-]+)[,)]", str(action.help))
    if stated and action.default not in (None, False, []):
        default = action.default[0] if isinstance(action.default, list) else action.default
        assert stated[1] == str(default)


@pytest.mark.parametrize("command", ["build", "sensitivity", "sweep", "tune"])
def test_what_is_quantised_to_what_is_said_in_the_same_words(command: str) -> None:
    texts = {name: next(a.help for a in PARSERS[command]._actions if name in a.option_strings) for name in FORMATS}
    shared_texts = {
        name: next(a.help for a in PARSERS["build"]._actions if name in a.option_strings) for name in FORMATS
    }
    assert texts == shared_texts


def test_the_help_of_build_says_that_int8_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert PARSERS["build"].get_default("precision") == "int8"
    with pytest.raises(SystemExit):
        main(["build", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "convolutions in INT8, with calibration images (the default)" in text


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_every_command_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: trtdet {name} ")


@pytest.mark.parametrize("name", NAMES)
def test_every_command_takes_json(name: str) -> None:
    assert "--json" in PARSERS[name].options()


def test_the_help_of_trtdet_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^    {command.name}\s", said, re.MULTILINE)


def test_the_command_line_imports_nothing_that_takes_time() -> None:
    """What 0.2 s of ``--help`` rest on, without a clock: the standard library and a few files of trtdet."""
    program = "import pathlib, sys; before = set(sys.modules); import trtdet.cli; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    roots = {name.split(".")[0] for name in done.stdout.split()}
    assert roots - set(sys.stdlib_module_names) == {"trtdet"}
    assert not roots & {"asyncio", "difflib", "email", "http", "multiprocessing", "unittest", "urllib", "xml"}


# Choices come from elsewhere


def test_the_rules_are_those_of_calibration() -> None:
    from trtdet.calibration.thresholds import RULES

    assert set(shared.RULES) == {*RULES, "auto"}


def test_the_corrections_are_those_that_exist_in_their_order() -> None:
    from trtdet.quantization.corrections import CORRECTIONS, EFFORTS

    assert tuple(CORRECTIONS) == shared.CORRECTIONS
    assert EFFORTS == shared.EFFORTS


def test_an_effort_says_what_auto_stands_for() -> None:
    assert shared.chosen_corrections([None], None) == (shared.EFFORTS["default"],)
    assert shared.chosen_corrections([None, ()], "quick") == (("smooth", "round", "bias"), ())
    assert shared.chosen_corrections([("bias",)], None) == (("bias",),)
    with pytest.raises(ConfigError, match="--effort thorough says what --correct auto stands for"):
        shared.chosen_corrections([("bias",)], "thorough")


@pytest.mark.parametrize("name", ["build", "sweep", "tune"])
def test_the_backends_are_the_rows_of_the_library_table(name: str) -> None:
    from trtdet.backends import LIBRARIES

    assert PARSERS[name].options()["--backend"].choices == ("auto", *(library.name for library in LIBRARIES))


def test_the_nms_modes_and_forms_of_silu_are_those_of_the_configuration() -> None:
    from trtdet.config import NmsMode, SiluForm

    assert set(shared.NMS) == {"auto", *get_args(NmsMode)}
    assert set(shared.SILU) == {"auto", *get_args(SiluForm)}


def test_the_objectives_are_those_of_the_options() -> None:
    from trtdet.pipeline.options import Objective

    assert get_args(Objective) == shared.OBJECTIVES


def test_the_runtimes_are_those_of_the_detector() -> None:
    from trtdet.runtime import detector

    assert get_args(detector.Runtime) == shared.RUNTIMES


def test_the_package_formats_are_those_of_deploy() -> None:
    from trtdet.deploy import Format

    assert PARSERS["package"].options()["--format"].choices == get_args(Format)


@pytest.mark.parametrize("name", ["build", "sensitivity"])
def test_the_defaults_of_the_command_line_are_those_of_python(name: str) -> None:
    from trtdet.pipeline import BuildOptions, CalibrationOptions, KeepOptions, SensitivityOptions

    given = parsed(name, "m.onnx", "--config", "shapes", "-o", "o.json")
    assert shared.calibration_of(given) == CalibrationOptions()
    (correct,) = shared.chosen_corrections([given.correct], given.effort)
    assert correct == (BuildOptions().correct if name == "build" else SensitivityOptions().correct)
    assert given.rank_images == (KeepOptions().num_images if name == "build" else SensitivityOptions().num_images)


def test_a_build_without_options_is_buildoptions_without_options() -> None:
    from trtdet.cli.build_command import _build_options
    from trtdet.pipeline import BuildOptions

    assert _build_options(parsed("build", "m.onnx", "--config", "shapes", "-o", "b")) == BuildOptions()


def test_a_tune_without_options_is_tuneoptions_without_options() -> None:
    from trtdet.cli.tune_command import _tune_options
    from trtdet.pipeline import BuildOptions, TuneOptions

    assert _tune_options(parsed("tune", "m.onnx", "--config", "shapes", "-o", "t")) == TuneOptions(BuildOptions())


# Values


@pytest.mark.parametrize(("text", "sm"), [("86", 86), ("8.6", 86), ("12.0", 120), ("120", 120), ("10.3", 103)])
def test_a_compute_capability_is_written_with_or_without_a_point(text: str, sm: int) -> None:
    assert parsed("build", "m", "--config", "c", "-o", "b", "--sm", text).sm == [sm]


@pytest.mark.parametrize("text", ["8", "8.", ".6", "8.66", "sm_86", "8,6", "-86", "1200", "٨٦", ""])
def test_what_is_no_compute_capability_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "build", "m", "--config", "c", "-o", "b", f"--sm={text}")
    assert f"'{text}' must be a compute capability, such as 8.6 or 86" in said


@pytest.mark.parametrize(("text", "batch"), [("4", (4, 4, 4)), ("1:4:8", (1, 4, 8)), ("2:2:2", (2, 2, 2))])
def test_a_batch_is_a_number_or_a_range(text: str, batch: tuple[int, int, int]) -> None:
    assert parsed("build", "m", "--config", "c", "-o", "b", "--batch", text).batch == batch


@pytest.mark.parametrize("text", ["0", "4:2:8", "1:2", "a", "1:2:3:4", "-1"])
def test_a_batch_that_cannot_be_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "must be MIN:OPT:MAX" in refused(capsys, "build", "m", "--config", "c", "-o", "b", f"--batch={text}")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("auto", None),
        ("none", ()),
        ("bias", ("bias",)),
        ("bias,smooth", ("smooth", "bias")),
        ("shift,bias", ("shift", "bias")),
    ],
)
def test_corrections_come_in_the_order_in_which_they_are_applied(text: str, names: tuple[str, ...] | None) -> None:
    assert parsed("build", "m", "--config", "c", "-o", "b", "--correct", text).correct == names


@pytest.mark.parametrize(
    ("text", "kept"),
    [("5", 5), ("p/plan.json", Path("p/plan.json")), ("a, b", ("a", "b")), ("depthwise", ("depthwise",))],
)
def test_what_stays_in_fp16_is_a_number_a_plan_or_names(text: str, kept: Any) -> None:
    assert parsed("build", "m", "--config", "c", "-o", "b", "--keep-fp16", text).keep_fp16 == kept


@pytest.mark.parametrize("text", ["", "a,,b", ","])
def test_empty_names_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "must be a number, a plan" in refused(
        capsys, "build", "m", "--config", "c", "-o", "b", f"--keep-fp16={text}"
    )


# Spelling


@pytest.mark.parametrize(
    ("typed", "meant"), [("biuld", "build"), ("evaluate", "eval"), ("calibrat", "calibrate"), ("benhc", "bench")]
)
def test_a_misspelt_command_is_answered_with_the_nearest(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, typed, "model.onnx")
    assert said.startswith(f"trtdet: error: no command '{typed}', did you mean '{meant}'?; commands: ")


def test_a_command_that_is_like_none_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "xyzzy")
    assert "did you mean" not in said
    assert ", ".join(NAMES) in said


@pytest.mark.parametrize(
    ("words", "typed", "meant"),
    [
        (("build", "m", "--confg", "yolox"), "--confg", "--config"),
        (("build", "m", "-config", "yolox", "-o", "b"), "-config", "--config"),
        (("eval", "m", "--anotations=a.json"), "--anotations", "--annotations"),
        (("doctor", "--jsn"), "--jsn", "--json"),
        (("eval", "m", "--run-time", "engine"), "--run-time", "--runtime"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest(
    words: tuple[str, ...], typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with the required option that is missing because of it."""
    said = refused(capsys, *words)
    assert said == (
        f"trtdet {words[0]}: error: no option '{typed}', did you mean '{meant}'?; see 'trtdet {words[0]} --help'"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("audit", "b", "--limit", "-5"),
        ("audit", "b", "--limit", "-.5"),
        ("build", "m", "--conf", "c", "-ob"),
        ("infer", "b", "-oo", "--", "--picture.png"),
        ("infer", "b", "--two words.png", "-o", "o"),
        ("eval", "m", "--images=d", "--annotations=--a"),
    ],
)
def test_what_only_looks_like_an_option_is_none(words: tuple[str, ...]) -> None:
    assert parsed(*words).run


def test_an_old_spelling_works_with_a_note_and_stands_in_no_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("eval", "infer", "record", "sweep"):
        assert "--on" not in PARSERS[name].options()
        assert "--on " not in PARSERS[name].format_help()
        assert "--runtime" in PARSERS[name].options()
    given = parsed("infer", "b", "x.png", "-o", "o", "--on", "engine")
    assert given.runtime == "engine"
    assert parsed("infer", "b", "x.png", "-o", "o").runtime == "auto"
    assert parsed("infer", "b", "x.png", "-o", "o").notes == []
    assert main(["infer", str(tmp_path / "b"), "x.png", "-o", str(tmp_path / "o"), "--on", "engine"]) == 1
    assert capsys.readouterr().err.splitlines()[0] == "note: --on is now called --runtime"


def test_an_old_spelling_takes_the_choices_of_the_new(capsys: pytest.CaptureFixture[str]) -> None:
    assert "invalid choice: 'gpu'" in refused(capsys, "infer", "b", "x.png", "-o", "o", "--on", "gpu")


# What the pages show

OTHERS = {"--exportProfile", "--exit-timeout-secs", "--help", "--read-only"}
"""Options of other programs that the pages name."""


def shown(page: Path) -> list[list[str]]:
    """The trtdet commands of a page, without the files that their output goes to."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("trtdet ")]
    return [shlex.split(line.partition(" > ")[0]) for line in lines]


@pytest.mark.parametrize("page", [page for page in PAGES if shown(page)], ids=lambda page: page.name)
def test_every_command_shown_can_be_parsed(page: Path) -> None:
    for words in shown(page):
        given = parsed(*words[1:])
        assert not getattr(given, "notes", []), f"{page.name} shows an old spelling: {' '.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    """Of trtdet, or of a program of service/, benchmarks/ or the demo, whose source has its name."""
    known = {option for parser in PARSERS.values() for option in parser.options(hidden=True)} | {"--version", *OTHERS}
    sources = [
        *(ROOT / "service").rglob("*.cpp"),
        *(ROOT / "benchmarks").rglob("*.py"),
        *(ROOT / "trtdet" / "demo").glob("*.py"),
    ]
    programs = "".join(path.read_text(encoding="utf-8") for path in sources)
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    named = {
        option for code in re.findall(r"`([^`]+)`", text) for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)
    }
    assert {option for option in named - known if f'"{option}"' not in programs} == set()
