"""Every option of every command: its help, its choices, its old spelling, and what a misspelt word gets."""

import argparse
import dataclasses
import json
import operator
import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest

import trtdet.cli
from trtdet.cli import COMMANDS, main, parsers
from trtdet.cli.command import Parser
from trtdet.cli.options import options_of
from trtdet.cli.reference import reference
from trtdet.errors import ConfigError
from trtdet.options import BuildOptions, SensitivityOptions, SweepOptions, TuneOptions, fields, rows_of, words

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [command.name for command in COMMANDS]
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


def built(*words: object) -> BuildOptions:
    """The options of a build."""
    return options_of(parsed("build", "m.onnx", "--config", "c", "-o", "b", *words), BuildOptions)


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
def test_every_option_has_a_help_text_that_tells_its_default(action):
    help = str(action.help)
    assert action.help and len(help) > 10, action.dest
    if action.default in (None, False, [], argparse.SUPPRESS):
        return
    if action.option_strings and action.nargs != 0:
        assert "default:" in help
    # "default: 32" and "default: auto" are literal where the parser itself has the value.
    if stated := re.search(r"\(default: ([\w.-]+)[,)]", help):
        assert stated[1] == str(action.default[0] if isinstance(action.default, list) else action.default)


@pytest.mark.parametrize("columns", ["80", "100"])
def test_the_help_of_build_is_one_screen(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        main(["build", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 60 and sum(line.startswith("  build ") for line in lines) == 5
    everywhere = {"-h", "--json", "--verbose", "--help-settings"}
    options = [action for action in PARSERS["build"]._actions if action.option_strings]
    assert len([action for action in options if not everywhere & set(action.option_strings)]) <= 25


def test_settings_are_listed_with_their_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["build", "--help-settings"])
    assert stop.value.code == 0
    listed = capsys.readouterr().out
    assert "  engine.tf32=true|false\n" in listed and "(default: 32)" in listed and "unfinished" not in listed


def test_the_page_of_commands_is_current():
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert page == reference(), "run: python -m trtdet.cli.reference > docs/reference/commands.md"


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_every_command_is_printed(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: trtdet {name} ")
    assert "--json" in PARSERS[name].options()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert re.search(rf"^    {name}\s", capsys.readouterr().out, re.MULTILINE)


def test_the_command_line_imports_nothing_that_takes_time():
    """What 0.2 s of ``--help`` rest on, without a clock: the standard library and a few files of trtdet."""
    program = "import pathlib, sys; before = set(sys.modules); import trtdet.cli; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    roots = {name.split(".")[0] for name in done.stdout.split()}
    assert roots - set(sys.stdlib_module_names) == {"trtdet"}
    assert not roots & {"asyncio", "difflib", "email", "http", "multiprocessing", "unittest", "urllib", "xml"}


# Choices come from elsewhere


def test_the_values_of_options_are_those_of_the_rooms_that_own_them():
    from trtdet.backends import LIBRARIES
    from trtdet.calibration.thresholds import RULES
    from trtdet.config import NmsMode, SiluForm
    from trtdet.deploy import Format
    from trtdet.quantization.corrections import CORRECTIONS
    from trtdet.runtime import detector

    assert (set(fields.RULES), tuple(CORRECTIONS)) == (set(RULES), fields.CORRECTIONS)
    assert ("auto", *(library.name for library in LIBRARIES)) == fields.BACKENDS
    values = {row.name: row.values for row in (*rows_of(BuildOptions), *rows_of(TuneOptions))}
    assert set(values["nms.mode"]) == {"auto", *get_args(NmsMode)}
    assert set(values["silu"]) == {"auto", *get_args(SiluForm)}
    assert values["on"] == get_args(detector.Runtime)
    assert PARSERS["package"].options()["--format"].choices == get_args(Format)


@pytest.mark.parametrize(
    ("name", "options"),
    [("build", BuildOptions), ("tune", TuneOptions), ("sweep", SweepOptions), ("sensitivity", SensitivityOptions)],
)
def test_a_command_without_options_has_the_defaults_of_python(name, options):
    assert options_of(parsed(name, "m.onnx", "--config", "shapes", "-o", "o.json"), options) == options()


# One way there and back


GIVEN = (
    *("--fp16", "--keep-fp16", "a,b", "--effort", "range,bias", "--calib", "percentile:99.9", "--batch", "1:4:8"),
    *("--sm", "8.6", "89", "--images", "photos", "--guard", "1.05", "--force", "--set", "engine.workspace=512.5"),
    *("engine.tf32=false", "nms.max_detections=7", "input.size=480x640", "engine.plugins=a.so,b.so"),
)


def test_the_words_of_options_give_the_same_options_again():
    options = built(*GIVEN)
    assert built(*words(options)) == options
    assert words(BuildOptions()) == ["--int8"]
    assert options.batch == (1, 4, 8) and options.engine.workspace == 512.5
    plain = json.loads(json.dumps(asdict(options), default=str))
    assert words(plain, BuildOptions) == words(options)


def test_python_takes_what_the_command_line_takes():
    options = BuildOptions(batch="1:4:8", sms=("8.6",), guard="1.05", calibration=fields.CalibrationOptions(images="p"))
    assert (options.batch, options.sms, options.guard) == ((1, 4, 8), (86,), 1.05)
    assert options.calibration.images == Path("p")
    with pytest.raises(ConfigError, match=r"--silu: 'plugn', did you mean 'plugin'\?; allowed: auto, keep"):
        BuildOptions(silu="plugn")
    with pytest.raises(ConfigError, match="--num-images must be at least 1, got 0"):
        fields.CalibrationOptions(num_images=0)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("nms.max_detection=5", "no setting 'nms.max_detection', did you mean 'nms.max_detections'?"),
        ("nms.max_detections", "must be nms.max_detections=VALUE, such as nms.max_detections=N"),
        ("nms.max_detections=0", "nms.max_detections=0: must be at least 1, got 0"),
        ("engine.tf32=no", "engine.tf32=no: 'no' must be true or false"),
        ("calibration.rule=mse", "'calibration.rule' is given as --calib"),
        ("plan.objective=sped", "allowed: latency, throughput, size"),
    ],
)
def test_a_wrong_setting_is_explained(setting, problem, capsys):
    assert problem in refused(capsys, "build", "m", "--config", "c", "-o", "b", "--set", setting)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--max-detections", "7"), "nms.max_detections is a setting: --set nms.max_detections=VALUE"),
        (("--calibration", "minmax"), "no option '--calibration'"),
    ],
)
def test_a_setting_is_no_option_and_no_option_may_be_abbreviated(words, problem, capsys):
    assert problem in refused(capsys, "build", "m", "--config", "c", "-o", "b", *words)


def test_every_field_of_the_options_is_a_row_or_holds_rows():
    for options in (BuildOptions, TuneOptions, SweepOptions, SensitivityOptions):
        rows = {row.path[0] for row in rows_of(options)}
        assert {field.name for field in dataclasses.fields(options)} == rows


# Values


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        *(("sms", text, (sm,)) for text, sm in (("86", 86), ("8.6", 86), ("12.0", 120), ("120", 120), ("10.3", 103))),
        *(("batch", text, sizes) for text, sizes in (("4", (4, 4, 4)), ("1:4:8", (1, 4, 8)), ("2:2:2", (2, 2, 2)))),
        ("corrections", "none", ()),
        ("corrections", "default", ("range", "smooth", "round", "bias", "asymmetric")),
        ("corrections", "bias", ("bias",)),
        ("corrections", "bias,smooth", ("smooth", "bias")),
        ("plan.keep_fp16", "5", 5),
        ("plan.keep_fp16", "p/plan.json", Path("p/plan.json")),
        ("plan.keep_fp16", "a, b", ("a", "b")),
        ("plan.keep_fp16", "depthwise", ("depthwise",)),
        *(("guard", text, value) for text, value in (("off", "off"), ("warn", "warn"), ("1.05", 1.05), ("0.5", 0.5))),
    ],
)
def test_a_value_is_read_from_its_text(flag, text, value):
    flags = {"sms": "--sm", "corrections": "--effort", "plan.keep_fp16": "--keep-fp16", "batch": "--batch"}
    flags["guard"] = "--guard"
    assert operator.attrgetter(flag)(built(flags[flag], text)) == value


@pytest.mark.parametrize(
    ("flag", "text", "expected"),
    [
        *(
            ("--sm", text, f"'{text}' must be a compute capability, such as 8.6 or 86")
            for text in ("8", "8.", ".6", "8.66", "sm_86", "8,6", "-86", "1200", "٨٦", "")
        ),
        *(("--batch", text, "must be MIN:OPT:MAX") for text in ("0", "4:2:8", "1:2", "a", "1:2:3:4", "-1")),
        *(("--keep-fp16", text, "must be a number, a plan") for text in ("", "a,,b", ",")),
        *(
            (
                "--effort",
                text,
                f"no effort and no correction '{wrong}'; allowed: none, quick, default, thorough, or names",
            )
            for text, wrong in (("foo", "foo"), ("smooth,foo", "foo"), ("auto,foo", "auto"), ("", ""))
        ),
        *(("--guard", text, "must be off, warn or a number over 0") for text in ("0", "-1", "inf", "nan", "on")),
        ("--calib", "average", "no calibration rule 'average'; allowed: minmax, entropy"),
    ],
)
def test_a_value_that_cannot_be_is_refused(flag, text, expected, capsys):
    assert expected in refused(capsys, "build", "m", "--config", "c", "-o", "b", f"{flag}={text}")


# Spelling


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("biuld", "build"), ("evaluate", "eval"), ("calibrat", "calibrate"), ("benhc", "bench"), ("xyzzy", "")],
)
def test_a_misspelt_command_is_answered_with_the_nearest_and_all(typed, meant, capsys):
    guess = f", did you mean '{meant}'?" if meant else ""
    said = refused(capsys, typed, "model.onnx")
    assert said.startswith(f"trtdet: error: no command '{typed}'{guess}; commands: {', '.join(NAMES)}")


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
def test_a_misspelt_option_is_answered_with_the_nearest(words, typed, meant, capsys):
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
        ("predict", "b", "-oo", "--", "--picture.png"),
        ("predict", "b", "--two words.png", "-o", "o"),
        ("eval", "m", "--images=d", "--annotations=--a"),
    ],
)
def test_what_only_looks_like_an_option_is_none(words):
    assert parsed(*words).run


# What the pages show

OTHERS = {"--exportProfile", "--exit-timeout-secs", "--help", "--read-only"} | {
    *("--async", "--grpc-compression-algorithm", "--input-data", "--shape", "--shared-memory", "--streaming"),
}
"""Options of other programs that the pages name."""


def shown(page: Path) -> list[list[str]]:
    """The trtdet commands of a page, without the files that their output goes to."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    joined = [re.sub(r" \\\n *", " ", block) for block in blocks]
    lines = [line for block in joined for line in block.splitlines() if line.startswith("trtdet ")]
    return [shlex.split(line.partition(" > ")[0]) for line in lines]


@pytest.mark.parametrize("page", [page for page in PAGES if shown(page)], ids=lambda page: page.name)
def test_every_command_shown_can_be_parsed(page):
    for command in shown(page):
        parsed(*command[1:])


FOREIGN = {"--build", "--trt-outputs", "--onnx-outputs", "--exportProfile", "--std", "--gpu-architecture"}
"""Options of CMake, Polygraphy, trtexec and NVRTC that sources name."""


def test_every_option_and_setting_that_a_source_names_exists():
    options = {option for parser in PARSERS.values() for option in parser.options()} | {"--version", *FOREIGN}
    settings = {row.name for kind in (BuildOptions, TuneOptions, SweepOptions) for row in rows_of(kind)}
    sections = "|".join({name.partition(".")[0] for name in settings if "." in name} - {"head", "input", "nms"})
    for path in (ROOT / "trtdet").rglob("*.py"):
        if path.name == "readme.py":
            continue  # commands of other programs
        text = path.read_text(encoding="utf-8")
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
        assert not named - options, f"{path.name} names {sorted(named - options)}"
        wrong = set(re.findall(rf"--set ((?:{sections})\.\w+)", text)) - settings
        assert not wrong, f"{path.name} names {sorted(wrong)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_that_a_page_names_exists(page):
    """Of trtdet, or of a program of service/, benchmarks/ or the demo, whose source has its name."""
    known = {option for parser in PARSERS.values() for option in parser.options()} | {"--version", *OTHERS}
    sources = [
        *(ROOT / "service").rglob("*.cpp"),
        *(ROOT / "benchmarks").rglob("*.py"),
        *(ROOT / "trtdet" / "demo").glob("*.py"),
    ]
    programs = "".join(path.read_text(encoding="utf-8") for path in sources)
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    if page.name == "coming-from.md":  # The first column has commands of other tools.
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    named = {
        option for code in re.findall(r"`([^`]+)`", text) for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)
    }
    assert {option for option in named - known if f'"{option}"' not in programs} == set()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_help_has_examples_that_are_understood(command):
    assert command.examples
    for arguments, meaning in command.examples:
        words = shlex.split(arguments.partition(" > ")[0])
        assert parsed(command.name, *words).run is command.run
        assert meaning
