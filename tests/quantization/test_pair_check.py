"""Each kind of fault in the Q/DQ pairs of a model is found."""

import nets
import numpy as np
import pytest
from graphs import inferred

from trtdet.quantization import take_apart

PARTS = {
    "stem": "p0 = QDQ(x, s) c0 = Conv(p0, w0) a0 = Relu(c0)",
    "skip": "p1 = QDQ(a0, s)",
    "branch": "c1 = Conv(p1, w1) a1 = Relu(c1)",
    "sum": "sum = Add(p1, a1)",
    "joined": "p3 = QDQ(sum, s) j = Concat<axis = 1>(p3, p1) p4 = QDQ(j, s)",
    "last": "y = Conv(p4, w2)",
}
"""A network in which nothing is wrong: a residual block whose skip is quantised, and a Concat of one scale."""


def problems(**changes: str) -> list[tuple[str, tuple[str, ...]]]:
    """Kinds and nodes of what is found; nodes have the names of their outputs."""
    text = " ".join({**PARTS, **changes}.values())
    body = []
    for line in text.replace(") ", ")\n").splitlines():
        output, _, call = line.partition(" = ")
        if call.startswith("QDQ"):
            source, scale = call[4:-1].split(", ")
            line = (
                f"{output}_q = QuantizeLinear({source}, {scale}, z) {output} = DequantizeLinear({output}_q, {scale}, z)"
            )
        body.append(line)
    text = f"(float[1,16,8,8] x) => (float[1,16,8,8] y) {{ {' '.join(body)} }}"
    sizes = {"w0": (16, 16, 3, 3), "w1": (16, 16, 3, 3), "w2": (16, 32, 3, 3), "w3": (16, 16, 3, 3)}
    for name in sizes:
        weight = f"{name}d = DequantizeLinear({name}, s, z)"
        if f", {name})" in text:
            text = text.replace("{", f"{{ {weight}", 1).replace(f", {name})", f", {name}d)")
    text = text.replace("FLOAT", "f3").replace("Conv(", "Conv<pads = [1, 1, 1, 1]>(")
    weights = {name: np.full(shape, 3, np.int8) for name, shape in sizes.items() if f"({name}," in text}
    weights |= {"s": np.float32(0.1), "z": np.int8(0)}
    weights |= {"t": np.float32(0.2)} if ", t" in text else {}
    weights |= {"f3": nets.normal(16, 16, 3, 3)} if "f3" in text else {}
    model = inferred(text, **weights)
    for node in model.graph.node:
        node.name = node.output[0]
    return [(problem.kind, problem.nodes) for problem in take_apart(model).problems]


def test_nothing_is_found_in_a_network_that_builders_fuse():
    assert problems() == []


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"branch": "c1 = Conv(p1, w1) q = QDQ(c1, s) a1 = Relu(q)"}, ("blocks-fusion", ("q_q", "c1", "a1"))),
        (
            {"branch": "c1 = Conv(p1, w1) g = Sigmoid(c1) q = QDQ(g, s) a1 = Mul(c1, q)"},
            ("blocks-fusion", ("q_q", "g", "a1")),
        ),
        (
            {"branch": "a1 = Conv(p1, w1)", "sum": "q = QDQ(a1, s) sum = Add(p1, q)"},
            ("blocks-fusion", ("sum",)),
        ),
        ({"sum": "sum = Add(a0, a1)"}, ("missing-pair", ("sum",))),
        ({"sum": "q = QDQ(a1, s) sum = Add(a0, q)"}, ("missing-pair", ("sum",))),
        ({"branch": "c1 = Conv(a0, w1) a1 = Relu(c1)"}, ("missing-pair", ("c1",))),
        ({"branch": "c1 = Conv(p1, FLOAT) a1 = Relu(c1)"}, ("missing-pair", ("c1",))),
        ({"sum": "q = QDQ(a1, t) sum = Add(p1, q)"}, ("different-scales", ("sum",))),
        (
            {"joined": "p3 = QDQ(sum, t) j = Concat<axis = 1>(p3, p1) p4 = QDQ(j, s)"},
            ("different-scales", ("j", "p4_q")),
        ),
        ({"sum": "p2 = QDQ(a0, t) sum = Add(p2, a1)"}, ("different-scales", ("p1_q", "p2_q"))),
        (
            {"branch": "c1 = Conv(p1, w1) r = Relu(c1) c2 = Conv(r, FLOAT) a1 = Relu(c2)"},
            ("float-island", ("c2",)),
        ),
    ],
)
def test_a_planted_fault_is_found(changes, found):
    assert problems(**changes) == [found]
