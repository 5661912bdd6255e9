"""What fills the file of an engine."""

from __future__ import annotations

import json

import pytest
from test_audit_findings import float_model

from trtdet.audit import Layer, Tensor, layers_of
from trtdet.audit.engine_file import parts_of
from trtdet.backends import BuildRequest, choose

SOURCE = b"#include <climits>\n" + b"using x = int;\n" * 40 + b'extern "C" __global__ void kernel() {}\n'
RECORDS = b"header {\n  version = 5\n}\n" * 20
WEIGHTS = bytes(range(128, 256)) * 9


def layer(name: str, *constants: Tensor) -> Layer:
    return Layer(name, "kgen", (), constants, (), ())


def test_a_file_is_taken_apart():
    found = parts_of(WEIGHTS.join((SOURCE, b"\0" * 1000, SOURCE, RECORDS)) + b"\0" * 255, ())
    assert (found.source, found.kernels) == (2 * len(SOURCE), 2)
    assert (found.records, found.zeros) == (len(RECORDS), 1000)
    assert found.rest == 3 * len(WEIGHTS) + 255
    assert found.source + found.records + found.zeros + found.rest == found.bytes


def test_constants_are_listed_once_the_largest_first():
    small, large = Tensor("a", "Half", (4, 4)), Tensor("b", "Int8", (64, 64))
    found = parts_of(b"", (layer("first", small, large), layer("second", large)))
    assert [(one.layer, one.type, one.bytes) for one in found.constants] == [
        ("first", "Int8", 4096),
        ("first", "Half", 32),
    ]


def test_weights_that_the_inspector_only_counts_belong_to_their_layer():
    found = parts_of(b"", [layer(name, Tensor("Weights", "Int8", (512,))) for name in ("first", "second")])
    assert [one.layer for one in found.constants] == ["first", "second"]


def test_the_table_adds_up():
    constants = (Tensor("a", "Half", (400, 400)), Tensor("b", "Int8", (640, 640)))
    table = parts_of(SOURCE + WEIGHTS, (layer("first", *constants),)).table()
    assert [row[2] for row in table.rows] == ["CUDA source of 1 generated kernels", "weights and all else"]
    assert sum(share for row in table.rows if isinstance(share := row[1], float)) == pytest.approx(1.0)
    assert table.notes[0] == "constants that its layers read: 0.41 MB Int8, 0.32 MB Half"
    assert table.notes[1].startswith("the largest: 0.41 MB Int8 [640, 640] of first; ")
    assert parts_of(b"", ()).table().notes == ()


def test_a_file_as_plain_values():
    data = json.loads(json.dumps(parts_of(SOURCE + WEIGHTS, (layer("a", Tensor("b", "Int8", (8,))),)).as_dict()))
    assert data["rest"] == len(WEIGHTS) and data["constants"][0]["bytes"] == 8


@pytest.mark.tensorrt
def test_an_engine_for_more_compute_capabilities_holds_the_same_once():
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'trtdet[rtx]'")
    backend = choose("tensorrt-rtx")
    found = []
    for sms in ((86,), (80, 86, 89, 120)):
        built = backend.build(BuildRequest(float_model(), sms))
        found.append(parts_of(built.engine, layers_of(built)))
    one, four = found
    assert one.kernels == four.kernels > 0
    assert four.bytes == pytest.approx(one.bytes, rel=0.05)
    # Its constants lie in it once, whatever it was built for.
    assert sum(constant.bytes for constant in one.constants) < one.rest
