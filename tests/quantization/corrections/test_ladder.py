"""The parts of the corrections: each rung is a network that can be run, and the last is the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trtdet.quantization import CORRECTIONS, DEFAULT_CORRECTIONS, correct, insert_qdq, place
from trtdet.quantization.corrections.gate import Whole
from trtdet.quantization.corrections.ladder import rungs
from trtdet.quantization.corrections.policies import choose


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every policy has every correction in every layer."""
    policies = "trtdet.quantization.corrections.policies"
    monkeypatch.setattr(f"{policies}.choose", lambda site, policy, chosen: choose(site, "all"))


@pytest.mark.parametrize("names", [DEFAULT_CORRECTIONS, CORRECTIONS, ("smooth",), ("bias",), ("round", "bias")])
@pytest.mark.usefixtures("everywhere")
def test_each_rung_adds_a_part(model: Any, sources: Any, chosen: Any, distance: Any, names: tuple[str, ...]) -> None:
    given, placement = sources(), place(model)
    plain = chosen(model, given, "minmax")["minmax"]
    found = correct(model, placement, {"minmax": plain}, names, given)
    written = Whole("written", found.ranges, found.corrections)
    parts = rungs(model, placement, plain, written)
    expected = [("smooth", "channel_maps"), ("round", "weights"), ("bias", "biases")]
    assert [part.name for part in parts] == [part for name, part in expected if name in names]

    def error(whole: Whole) -> float:
        return distance(model, insert_qdq(model, placement, whole.ranges, whole.corrections), given)

    before, whole = error(Whole("plain", plain)), error(written)
    assert error(parts[-1].upto) == pytest.approx(whole, rel=1e-6)
    if "smooth" in names:
        # The outlier is put right by the maps, whatever else is done.
        assert error(parts[0].upto) < before / 2
        assert parts[0].without is None
    for part in parts[1:]:
        assert part.without is not None
        assert error(part.without) < before / 2 if "smooth" in names else np.isfinite(error(part.without))


def test_other_ranges_are_a_part_and_the_plain_rule_has_none(model: Any, sources: Any, chosen: Any) -> None:
    given, placement = sources(2), place(model)
    plain = chosen(model, given, "minmax")["minmax"]
    assert rungs(model, placement, plain, Whole("plain", plain)) == ()
    wider = replace(plain, tensors={name: replace(seen, amax=2 * seen.amax) for name, seen in plain.tensors.items()})
    (part,) = rungs(model, placement, plain, Whole("wider", wider))
    assert part.name == "ranges"
    assert (part.upto.ranges, part.without and part.without.ranges) == (wider, plain)
