"""The command line in a report repeats the options of a bundle, a tune or a sweep."""

import json
import shlex
from dataclasses import asdict, replace
from typing import Any

import pytest
from test_keys import another

from trtdet.backends import EngineTarget, choose
from trtdet.cli import parsers
from trtdet.cli.options import options_of
from trtdet.errors import ConfigError
from trtdet.experiments.folder import CommandRun
from trtdet.options import (
    BuildOptions,
    OptionSet,
    SweepOptions,
    TuneOptions,
    rows_of,
    setting,
    value_of,
    with_values,
    words,
)
from trtdet.report.sections.reproduce import _command

KINDS: dict[str, type[OptionSet]] = {"build": BuildOptions, "tune": TuneOptions, "sweep": SweepOptions}
ROWS = [(verb, row) for verb, kind in KINDS.items() for row in rows_of(kind) if not row.hidden and row.name != "from"]


def given_again(verb: str, options: Any) -> Any:
    """The options that the shown command is parsed to, from the plain values that a file holds."""
    plain = CommandRun.now(choose("onnxruntime").capabilities, EngineTarget(), options).options
    shown = shlex.split(_command(verb, KINDS[verb], plain, "out"))
    assert shown[:2] == ["trtdet", verb] and shown[-2:] == ["-o", "out"]
    parsed = parsers(verb)[0].parse_args(shown[1:])
    assert (str(parsed.model), parsed.config, str(parsed.output)) == ("MODEL", "config.yaml", "out")
    return options_of(parsed, KINDS[verb])


@pytest.mark.parametrize(("verb", "row"), ROWS, ids=[f"{verb} {row.name}" for verb, row in ROWS])
def test_every_option_is_given_again(verb, row):
    options = with_values(KINDS[verb](), {row.path: another(row)})
    assert given_again(verb, options) == options


@pytest.mark.parametrize("verb", KINDS)
def test_all_options_together_are_given_again(verb):
    options = with_values(KINDS[verb](), {row.path: another(row) for kind, row in ROWS if kind == verb})
    assert given_again(verb, options) == options


def test_options_that_an_earlier_version_lacked_are_those_by_default():
    older = json.loads(json.dumps(asdict(BuildOptions()), default=str))
    del older["input"]
    assert words(older, BuildOptions) == ["--int8"]
    assert words({**older, "engine": "fp16", "calibration": -1}, BuildOptions) == ["--int8"]


def test_a_variant_is_built_from_its_folder():
    options = BuildOptions(from_="t:3", force=True)
    assert words(options) == ["--from", "t:3", "--force"]


def test_values_of_another_type_are_refused():
    with pytest.raises(ConfigError, match=r"--set engine\.plugins cannot have the value 7"):
        words({"engine": {"plugins": 7}}, BuildOptions)


@pytest.mark.parametrize("options", [{}, {"build": 3}, {"calibration": {"rule": None}}, {"build": {"calibration": []}}])
def test_a_run_without_a_calibration_rule_is_refused(options):
    run = replace(CommandRun.now(choose("onnxruntime").capabilities, EngineTarget(), TuneOptions()), options=options)
    with pytest.raises(ConfigError, match=r"provenance\.json has no calibration rule"):
        assert run.percentile


@pytest.mark.parametrize("text", ["x" * 300, "a\0b", "folder/" + "é" * 130])
def test_a_path_that_no_file_can_have_is_refused(text):
    with pytest.raises(ValueError, match="is no path that a file can have"):
        setting(BuildOptions, f"calibration.histograms={text}")


BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "calibration.num_images": (1, None),
    "plan.max_map_drop": (0, 100),
    "plan.max_disagreement": (0, 100),
    "plan.fp16_budget": (0, 1),
    "plan.rank_images": (1, None),
    "nms.score_threshold": (0, 1),
    "nms.iou_threshold": (0, 1),
    "nms.max_detections": (1, None),
    "nms.pre_nms_topk": (1, None),
    "engine.dla": (0, 1),
    "head.rpn_pre_nms_topk": (1, None),
    "head.rpn_post_nms_topk": (1, None),
}
"""The least and the most that an option of builds and sweeps may be."""


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_option_is_within_its_bounds(kind):
    for row in rows_of(kind):
        low, high = (2, None) if row.path == ("points",) else BOUNDS.get(row.name, (None, None))
        for bound, beyond in ((low, -1), (high, 1)):
            if bound is not None:
                within, outside = ((bound,), (bound + beyond,)) if row.many else (bound, bound + beyond)
                assert value_of(with_values(kind(), {row.path: within}), row) == within
                with pytest.raises(ConfigError):
                    with_values(kind(), {row.path: outside})
        assert (row.low, row.high) == (low, high), f"bounds of {row.name} that are not in the table"


def test_a_flag_that_is_given_as_a_setting_is_named():
    with pytest.raises(ValueError, match=r"^'sms' is given as --sm$"):
        setting(BuildOptions, "sms=86")
    with pytest.raises(ValueError, match=r"^no setting 'calibration\.rules', did you mean 'calibration\.rescale'\?"):
        setting(BuildOptions, "calibration.rules=mse")
