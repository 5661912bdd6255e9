from __future__ import annotations

import json
from dataclasses import replace

import pytest
from models import CONVOLUTIONS, SMALL_MODEL

from trtdet import CalibrationOptions, load_config
from trtdet.demo import shapes
from trtdet.mixed_precision.breakdown import Breakdown, break_down
from trtdet.mixed_precision.ranking import rank
from trtdet.mixed_precision.subject import Subject
from trtdet.pipeline import Prepared, calibrated, host_graph, select_images
from trtdet.pipeline import prepared as prepare

HARD = "/depthwise1/Conv"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    images = shapes.generate(tmp_path_factory.mktemp("shapes"), "calibration", 4).images
    options = CalibrationOptions("minmax", images=images)
    graph = replace(host_graph(SMALL_MODEL, load_config("shapes")), int8_all=True)
    return prepare(calibrated(graph, options, select_images(options)), options, ())


@pytest.fixture(scope="module")
def subject(prepared: Prepared) -> Subject:
    return prepared.subject(3)


@pytest.fixture(scope="module")
def found(prepared: Prepared, subject: Subject) -> Breakdown:
    """The rule of the baseline has the range of the input of one convolution far too wide."""
    readers = subject.placement.readers.items()
    (tensor,) = [name for name, readers in readers if any(reader == HARD for reader, _ in readers)]
    wide = replace(prepared.ranges.tensors[tensor], amax=300 * prepared.ranges.tensors[tensor].amax)
    return break_down(subject, replace(prepared.ranges, tensors={**prepared.ranges.tensors, tensor: wide}))


def test_the_block_that_is_hard_to_quantise_carries_the_error(found: Breakdown) -> None:
    assert [block.convs for block in found.blocks if HARD in block.convs] == [(HARD,)]
    hard = next(block for block in found.blocks if HARD in block.convs)
    assert hard.name == "depthwise1"
    others = [block for block in found.blocks if block is not hard]
    assert len(others) == CONVOLUTIONS - 1
    assert hard.before.power > 10 * max(block.before.power for block in others)
    assert hard.before.distance > 10 * hard.after.distance
    for block in others:
        assert block.before == block.after
    assert found.before > 3 * found.after
    assert found.agreement_before < found.agreement_after < 1


def test_a_block_costs_what_the_ranking_says(found: Breakdown, subject: Subject) -> None:
    ranked = {layer.name: layer for layer in rank(subject).layers}
    for block in found.blocks:
        (conv,) = block.convs
        assert block.after.power == pytest.approx(ranked[conv].score, rel=1e-5, abs=1e-12)
        assert block.after.distance == pytest.approx(ranked[conv].distance, rel=1e-5, abs=1e-9)
        assert block.macs == ranked[conv].macs


def test_the_whole_is_told_part_by_part(found: Breakdown) -> None:
    (part,) = found.corrections
    assert part.name == "ranges"
    assert part.error == pytest.approx(found.after)
    assert part.without == pytest.approx(found.before)
    assert (found.images, found.seen, found.lower_on) == (3, 3, 3)
    assert found.sure == pytest.approx(7 / 8)


def test_the_plain_rule_has_no_parts(prepared: Prepared, subject: Subject) -> None:
    plain = break_down(subject, prepared.ranges)
    assert plain.corrections == ()
    assert plain.before == plain.after
    assert all(block.before == block.after for block in plain.blocks)
    assert (plain.lower_on, plain.sure) == (0, 0)


def test_the_keys_of_the_file(found: Breakdown) -> None:
    plain = json.loads(found.to_json())
    assert list(plain) == [
        *("schema", "images", "block_images", "before", "after", "agreement_before", "agreement_after"),
        *("lower_on", "seen", "sure", "blocks", "corrections"),
    ]
    assert plain["schema"] == 1
    assert list(plain["blocks"][0]) == ["name", "convs", "macs", "before", "after"]
    assert list(plain["blocks"][0]["before"]) == ["distance", "power"]
    assert list(plain["corrections"][0]) == ["name", "error", "without"]


def test_the_table_has_a_line_for_each_block_and_one_for_all(found: Breakdown) -> None:
    lines = str(found.table()).splitlines()
    rows = [line for line in lines if any(line.startswith(block.name) for block in found.blocks)]
    assert len(rows) == len(found.blocks)
    assert lines[-1].split()[-3:] == [str(CONVOLUTIONS), f"{found.before:.4f}", f"{found.after:.4f}"]
