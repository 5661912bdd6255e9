"""Decomposed normalisations and attentions are found, also with type changes in between."""

import nets
import numpy as np
import onnx
import pytest
from attention import attention_detector
from graphs import inferred

from trtdet.quantization import place, quantizable
from trtdet.quantization.written_out import attentions, normalisations

NORM = """(float[1,8,32] x) => (float[1,8,32] y) <float e = {0.00001}, float two = {2}> {
    p = MatMul(x, w) m = ReduceMean<axes = [-1]>(p) d = Sub(p, m) SQUARE v = ReduceMean<axes = [-1]>(q)
    a = Add(e, v) s = Sqrt(a) n = Div(d, s) y = MatMul(n, w) }"""


def written_out(square: str = "q = Pow(d, two)") -> onnx.ModelProto:
    model = inferred(NORM.replace("SQUARE", square), w=np.eye(32, dtype=np.float32))
    for node in model.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    return model


@pytest.mark.parametrize(
    "square", ["q = Pow(d, two)", "q = Mul(d, d)", "h = Cast<to = 10>(d) g = Cast<to = 1>(h) q = Pow(g, two)"]
)
def test_a_normalisation_that_is_written_out_is_found(square):
    (names,) = normalisations(written_out(square))
    kinds = ["ReduceMean_m", "Sub_d", "Pow_q", "ReduceMean_v", "Add_a", "Sqrt_s", "Div_n"]
    assert [name.replace("Mul_q", "Pow_q") for name in names] == kinds


@pytest.mark.parametrize("square", ["q = Pow(p, two)", "q = Abs(d)"])
def test_other_roots_of_means_are_none(square):
    assert normalisations(written_out(square)) == ()


def test_a_library_that_quantises_by_itself_is_told_to_compute_it_in_float32():
    model = written_out()
    plan = place(model).plan
    found = quantizable(model, plan)
    told = found.precisions(plan)
    (names,) = normalisations(model)
    assert {told.get(name) for name in names} == {"fp32"}
    assert not set(found.floating) & set(names)


def test_attentions_are_found_in_the_ways_that_exporters_write_them():
    found = {attention.softmax: attention for attention in attentions(attention_detector())}
    area, encoder = found["/psa/Softmax"], next(one for name, one in found.items() if name != "/psa/Softmax")
    assert area.nodes == ("/psa/scores/MatMul", "/psa/Mul", "/psa/Softmax", "/psa/values/MatMul")
    assert (encoder.scores, encoder.values) == ("/encoder/scores/MatMul", "/encoder/values/MatMul")


def test_the_expectation_that_decodes_boxes_is_no_attention():
    text = """(float[1,4,8,16] x, float[1,4,16,8] z) => (float[1,4,8,1] y) {
        a = MatMul(x, z) b = Softmax<axis = -1>(a) y = MatMul(b, steps) }"""
    assert attentions(nets.net(text, steps=np.ones((8, 1), np.float32))) == ()
