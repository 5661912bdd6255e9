"""Every option is classed, and takes effect in the keys from its stage on."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tiny_detector import Tiny

from trtdet import BuildOptions, CalibrationOptions, KeepOptions
from trtdet.backends import EngineOptions
from trtdet.pipeline.assembly import Job, validated
from trtdet.pipeline.fingerprint import (
    Enters,
    Option,
    Stage,
    StaysOut,
    enters,
    every_option,
    stage_keys,
    stays_out,
    unclassed,
)

OPTIONS = {option.path: option for option in every_option(BuildOptions())}
FACTS = {option.use.fact: "fact" for option in OPTIONS.values() if isinstance(option.use, Enters) and option.use.fact}


def declared(kind: type, prefix: str = "") -> Iterator[str]:
    """Paths of all fields by their types, so that none hides behind a default that is no dataclass."""
    hints = typing.get_type_hints(kind)
    for entry in fields(kind):
        candidates = [hints[entry.name], *typing.get_args(hints[entry.name])]
        nested = next((hint for hint in candidates if is_dataclass(hint)), None)
        if nested is None:
            yield f"{prefix}{entry.name}"
        else:
            assert isinstance(nested, type)
            yield from declared(nested, f"{prefix}{entry.name}.")


def test_every_option_is_classed() -> None:
    assert unclassed(BuildOptions()) == []
    assert list(declared(BuildOptions)) == list(OPTIONS)
    for nested in (CalibrationOptions, KeepOptions, EngineOptions):
        assert {entry.name for entry in fields(nested)} <= {path.rpartition(".")[2] for path in OPTIONS}


def test_what_stays_out_and_what_counts_for_int8_alone() -> None:
    uses = {path: option.use for path, option in OPTIONS.items()}
    assert {path for path, use in uses.items() if isinstance(use, StaysOut)} == {
        *("keep.ray", "timing_cache", "measure", "force", "accuracy_report"),
        *("calibration.check_input", "calibration.unfinished"),
    }
    always = {path for path, use in uses.items() if isinstance(use, Enters) and not use.int8_only and not use.fact}
    assert always == {
        *("precision", "sms", "batch", "silu", "resize"),
        *(f"engine.{name}" for name in ("workspace", "version_compatible", "hardware_compatible", "embed_plugins")),
        *("engine.tactic_sources", "engine.tf32"),
    }


def test_a_new_option_is_an_error_until_it_is_classed() -> None:
    @dataclass(frozen=True)
    class Nested:
        new: int = 0

    @dataclass(frozen=True)
    class More(BuildOptions):
        nested: Nested = Nested()

    assert unclassed(More()) == ["nested.new"]
    with pytest.raises(LookupError, match=r"option 'nested.new' is not classed"):
        stage_keys(More(), FACTS, int8=True)


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return "another"


def with_value(options: Any, path: str, value: Any) -> Any:
    first, _, rest = path.partition(".")
    return replace(options, **{first: with_value(getattr(options, first), rest, value) if rest else value})


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_an_option_changes_the_keys_from_its_stage_on(option: Option) -> None:
    before = stage_keys(BuildOptions(), FACTS, int8=True)
    use = option.use
    options, facts = with_value(BuildOptions(), option.path, changed(option.value)), FACTS
    if isinstance(use, Enters) and use.fact:
        assert stage_keys(options, FACTS, int8=True) == before, "the fact stands for the option"
        facts = {**FACTS, use.fact: "another"}
    after = stage_keys(options, facts, int8=True)
    if isinstance(use, StaysOut):
        assert use.reason
        assert after == before
        return
    assert isinstance(use, Enters)
    first = list(Stage).index(use.stage)
    assert [after[stage] == before[stage] for stage in Stage] == [place < first for place in range(len(Stage))]
    floating = stage_keys(options, facts, int8=False) == stage_keys(BuildOptions(), FACTS, int8=False)
    assert floating == use.int8_only


def test_a_fact_that_nobody_gives_is_an_error() -> None:
    with pytest.raises(KeyError):
        stage_keys(BuildOptions(), {}, int8=True)


def test_facts_of_no_option_count_from_the_first_stage_on() -> None:
    before = stage_keys(BuildOptions(), FACTS, int8=True)
    after = stage_keys(BuildOptions(), {**FACTS, "model": "another"}, int8=True)
    assert not set(before.values()) & set(after.values())


def test_metadata_of_a_field() -> None:
    @dataclass(frozen=True)
    class Two:
        one: int = field(default=1, metadata=enters(Stage.PLAN, "fact", int8_only=True))
        other: Path | None = field(default=None, metadata=stays_out("a place"))

    assert [option.use for option in every_option(Two())] == [
        Enters(Stage.PLAN, "fact", True),
        StaysOut("a place"),
    ]


def test_a_build_gives_every_fact_and_its_key_tells_plans_apart(tiny: Tiny, tmp_path: Path) -> None:
    calibration = CalibrationOptions(images=tiny.images)
    options = BuildOptions(calibration=calibration, backend="onnxruntime", int8_all=True)

    def keys(**changes: Any) -> dict[Stage, str]:
        return dict(validated(Job(tiny.model, tiny.config, tmp_path / "b", replace(options, **changes))).keys)

    plain = keys()
    named = keys(keep=KeepOptions(("stem",)))
    assert plain[Stage.RANGES] == named[Stage.RANGES]
    assert plain[Stage.CORRECTIONS] != named[Stage.CORRECTIONS]
    assert keys(keep=KeepOptions(("stem",), ray="local")) == named
    fewer = keys(calibration=CalibrationOptions(images=tiny.images, num_images=6))
    assert (fewer[Stage.GRAPH], fewer[Stage.RANGES] == plain[Stage.RANGES]) == (plain[Stage.GRAPH], False)
