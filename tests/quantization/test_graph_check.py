from typing import Any

import nets
import numpy as np
import onnx
import pytest
from graphs import inferred

from trtdet.quantization import lint

# A correct quantised convolution; each test breaks one thing of it.
GOOD = """(float[1,4,8,8] x) => (float[1,4,8,8] y) {
    xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z)
    wq = QuantizeLinear<axis = 0>(w, ws, wz) wd = DequantizeLinear<axis = 0>(wq, ws, wz)
    y = Conv(xd, wd, b) }"""


def built(text: str = GOOD, **changes: Any) -> onnx.ModelProto:
    weights = {
        "w": nets.normal(4, 4, 1, 1),
        "b": nets.normal(4),
        "s": np.float32(0.1),
        "z": np.int8(0),
        "ws": np.full(4, 0.01, np.float32),
        "wz": np.zeros(4, np.int8),
        **changes,
    }
    return inferred(text, **weights)


build = pytest.fixture(lambda: built, name="build")


def problems(model: onnx.ModelProto) -> dict[str, list[str]]:
    by_node: dict[str, list[str]] = {}
    for finding in lint(model):
        by_node.setdefault(finding.node, []).append(finding.problem)
    return by_node


def test_correct_graphs_and_float_graphs_have_no_findings(build, net, normal):
    assert lint(build()) == ()
    model = net("(float[1,4,8,8] x) => (float[1,4,8,8] y) {y = Conv(x, w)}", w=normal(4, 4, 1, 1))
    assert lint(model) == ()


@pytest.mark.parametrize(
    ("before", "after", "node", "problem"),
    [
        ("Conv(xd, wd, b)", "Conv(xd, w, b)", "Conv_4", "only its activation is quantised: it would run in float"),
        ("Conv(xd, wd, b)", "Conv(x, wd, b)", "Conv_4", "only its weights are quantised: it would run in float"),
        (
            *("Conv(xd, wd, b)", "ConvTranspose(xd, w, b)", "ConvTranspose_4"),
            "only its activation is quantised: it would run in float",
        ),
        *(
            ("<axis = 0>", axis, "Conv_4", "its weights are quantised on axis 1: it would run in float; use axis 0")
            for axis in ("<axis = 1>", "")
        ),
        (
            *("y = Conv(xd, wd, b)", "bd = DequantizeLinear(bq, s) y = Conv(xd, wd, bd)", "Conv_5"),
            "its bias is quantised: keep the bias in float",
        ),
    ],
)
def test_a_layer_that_would_run_in_float(build, before, after, node, problem):
    text = GOOD.replace(before, after)
    weights = {"bq": np.zeros(4, np.int32)} if "bq" in text else {}
    assert problems(build(text, **weights)) == {node: [problem]}


PAIR = ("QuantizeLinear_0", "DequantizeLinear_1")


def scaled(value: float) -> np.ndarray:
    return np.array([0.1, value, 0.1, 0.1], np.float32)


@pytest.mark.parametrize(
    ("changes", "nodes", "problem"),
    [
        (
            {"s": np.full(4, 0.1, np.float32), "z": np.zeros(4, np.int8)},
            *(("Conv_4",), "its activation has a scale per channel: it would run in float; use one scale"),
        ),
        ({"z": np.int8(3)}, PAIR, "its zero point is not 0: only symmetric quantisation is supported"),
        *(
            (
                {"z": dtype(0)},
                PAIR,
                f"it quantises to {np.dtype(dtype)}: only int8 has kernels; an int32 bias stays float",
            )
            for dtype in (np.uint8, np.int16)
        ),
        *(
            ({"s": np.float32(scale)}, PAIR, f"its scale is {scale}: it must be over 0 and finite")
            for scale in (0.0, -0.5, np.inf, np.nan)
        ),
        (
            {"ws": scaled(np.inf)},
            *(("QuantizeLinear_2", "DequantizeLinear_3"), "its scale is inf: it must be over 0 and finite"),
        ),
    ],
)
def test_scales_and_zero_points_that_cannot_be(build, changes, nodes, problem):
    assert problems(build(**changes)) == {node: [problem] for node in nodes}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (
            [("QuantizeLinear(x, s, z) xd", "QuantizeLinear(x, s) xd")],
            {"QuantizeLinear_0": "it has no zero point, so it quantises to uint8: give an int8 zero point of 0"},
        ),
        (
            [("xq = Q", "m = ReduceMax<keepdims = 0>(x) xq = Q"), ("(x, s, z)", "(x, m, z)")],
            {"QuantizeLinear_1": "its scale is not constant: INT8 kernels need scales at build time"},
        ),
        (
            [
                ("xq = Q", "m = ReduceMax<keepdims = 0>(x) mz = Cast<to = 3>(m) xq = Q"),
                *(("(x, s, z)", "(x, s, mz)"), ("(xq, s, z)", "(xq, s, mz)")),
            ],
            dict.fromkeys(
                ("QuantizeLinear_2", "DequantizeLinear_3"),
                "its zero point is not constant: only symmetric quantisation is supported",
            ),
        ),
    ],
)
def test_scales_and_zero_points_that_are_missing_or_computed(build, changes, found):
    text = GOOD
    for old, new in changes:
        text = text.replace(old, new)
    assert problems(build(text)).items() >= {node: [problem] for node, problem in found.items()}.items()


JOIN = """(float16[1,4,8,8] x) => (float16[1,8,8,8] y) {{
    q = QuantizeLinear(x, h, z) d = DequantizeLinear(q, h, z) {0}
    jq = QuantizeLinear({1}, z) y = DequantizeLinear(jq, h, z) }}"""


@pytest.mark.parametrize(
    ("inner", "read", "node", "problem"),
    [
        ("j = Concat<axis = 1>(d, d)", "j, h", "", ""),
        (
            "e = DequantizeLinear(q, s, z) c = Cast<to = 1>(d) j = Concat<axis = 1>(e, c)",
            "j, s",
            "Concat_4",
            "a Cast parts it from DequantizeLinear 'DequantizeLinear_1': INT8 ends there; use one type",
        ),
        (
            "j = Concat<axis = 1>(d, d) c = Cast<to = 1>(j)",
            "c, s",
            "QuantizeLinear_4",
            "a Cast parts it from Concat 'Concat_2': INT8 ends there; use one type",
        ),
        (
            "j = Concat<axis = 1>(d, d) c = Cast<to = 1>(d)",
            "c, s",
            "QuantizeLinear_4",
            "a Cast parts it from DequantizeLinear 'DequantizeLinear_1': INT8 ends there; use one type",
        ),
        (
            "e = DequantizeLinear(q, s, z) j = Concat<axis = 1>(e, e)",
            "j, s",
            "Concat_3",
            "it joins in float32 what was quantised in FP16: INT8 ends there; use one type",
        ),
    ],
)
def test_between_pairs_in_fp16_a_join_has_their_type(net, inner, read, node, problem):
    model = net(JOIN.format(inner, read), h=np.float16(0.1), s=np.float32(0.1), z=np.int8(0))
    assert problems(model) == ({node: [problem]} if node else {})
