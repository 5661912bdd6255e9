"""Corrections of FP8 products: weights and biases are corrected, ranges and channel maps are not."""

import ml_dtypes
import numpy as np
import pytest
from graphs import raised
from onnx import numpy_helper

from trtdet.calibration import Range, Ranges
from trtdet.quantization import correct, insert_qdq, lint, place
from trtdet.quantization.corrections.rounding import compensated
from trtdet.quantization.corrections.trials import find_sites
from trtdet.quantization.encoding import nearest, weight_scales

NET = """(float[1,3,32,32] x) => (float[1,64,4] boxes, float[1,64,2] scores) {
    a = Conv<strides = [4,4]>(x, w1, b1) b = Relu(a) c = Transpose<perm = [0,2,3,1]>(b) d = Reshape(c, to)
    e = MatMul(d, w2) f = Add(e, b2) g = Relu(f) h = MatMul(g, w3) l, m = Split<axis = 2>(h, sizes)
    boxes = Mul(l, wide) scores = Sigmoid(m) }"""


@pytest.fixture
def products(net, normal):
    """A detector of a convolution and two products, the second without a sum that could hold a bias."""
    made = net(
        NET,
        w1=normal(16, 3, 4, 4, seed=1, scale=0.3) / 127,
        b1=normal(16, seed=2, scale=0.1),
        w2=normal(16, 48, seed=3, scale=0.3),
        b2=normal(48, seed=4, scale=0.1),
        w3=normal(48, 6, seed=5, scale=0.2),
        to=np.array([1, 64, 16], np.int64),
        sizes=np.array([4, 2], np.int64),
        wide=np.float32(10),
    )
    return raised(made)


def is_e4m3(values: np.ndarray) -> bool:
    return bool(np.array_equal(values.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(values.dtype), values))


def test_compensated_rounding_to_e4m3_lowers_the_error_of_the_output():
    rng = np.random.default_rng(0)
    mixing = rng.normal(0, 1, (1, 96, 32))
    covariance = mixing @ mixing.transpose(0, 2, 1) + 0.01 * np.eye(96)
    rows = rng.normal(0, 1, (1, 24, 96))
    scales = weight_scales(rows[0], format="fp8")[None]
    assert np.unique(scales).size == 1 and np.abs(rows).max() <= 448 * scales[0, 0] < 1.002 * np.abs(rows).max()
    errors = []
    for numbers in (nearest(rows, scales, "fp8"), compensated(rows, scales, covariance, "fp8")):
        assert numbers.dtype == np.float16 and is_e4m3(numbers)
        rest = rows - numbers.astype(np.float64) * scales[..., None]
        errors.append(np.einsum("goi,gij,goj->go", rest, covariance, rest).sum())
    assert errors[1] < 0.4 * errors[0]


def test_products_in_fp8_are_corrected_and_judged_with_the_rest(products, sources, chosen, distance):
    placement, given = place(products, fp8=True), sources()
    candidates = chosen(products, given, "minmax")
    with pytest.warns(match="too few to tell a gain from chance"):
        found = correct(products, placement, candidates, ("smooth", "round", "bias"), given)
    weights = found.corrections.weights
    assert {"MatMul_4", "MatMul_7"} <= weights.keys() and "d" not in found.corrections.tensors
    for name in ("MatMul_4", "MatMul_7"):
        assert is_e4m3(weights[name].integers) and np.unique(weights[name].scales).size == 1
        steps = {step.name: step for step in found.plan.entries[name].corrections}
        assert steps["round"].error < steps["round"].without
    assert "not for the 2 products in FP8, whose steps grow with the values: smooth" in found.summary
    assert any(said.startswith("smooth: ") and said.endswith(" of 1 tensors") for said in found.summary)
    written = insert_qdq(products, placement, found.ranges, found.corrections)
    assert lint(written) == ()
    plain = insert_qdq(products, placement, candidates["minmax"])
    assert distance(products, written, given) < distance(products, plain, given)
    # The weights are what was chosen, and a product without a sum gets one for its bias.
    wanted = weights["MatMul_7"].integers.astype(np.float32).T * weights["MatMul_7"].scales[0]
    assert any(
        np.array_equal(numpy_helper.to_array(tensor), wanted)
        for tensor in written.graph.initializer
        if tuple(tensor.dims) == wanted.shape
    )
    sums = [node for node in written.graph.node if node.op_type == "Add"]
    assert len(sums) == 2 and sums[-1].output[0] == "h"


def test_weights_that_no_correction_rounds_are_judged_in_their_own_format(net, normal):
    model = net("(float[1,4,16] x) => (float[1,4,16] y) { y = MatMul(x, m) }", m=normal(16, 16))
    (site,) = find_sites(model, place(model, fp8=True), ())
    x = normal(4, 16, seed=1)
    site.add_moments(x, 0)
    site.prepare({"minmax": Ranges("minmax", None, {"x": Range(4.0, -4.0, 4.0)}, "", 1, "")})
    site.add_means(x, 0)
    site.add_errors(x, 0)
    ((rounding,),) = site.trials[0].roundings.values()
    assert np.abs(rounding.integers).max() == 448 and is_e4m3(rounding.integers)


def test_what_both_formats_read_is_a_site_of_each(net, normal):
    text = """(float[1,16,4,16] x) => (float[1,16,4,16] y, float[1,16,4,16] z) {
        a = Relu(x) y = Conv(a, w) z = MatMul(a, m) }"""
    model = net(text, w=normal(16, 16, 1, 1), m=normal(16, 16))
    for node in model.graph.node:
        node.name = node.op_type + node.output[0]
    sites = find_sites(model, place(model, fp8=True), ())
    assert [(site.tensor, site.format, list(site.convs)) for site in sites] == [
        ("a", "int8", ["Convy"]),
        ("a", "fp8", ["MatMulz"]),
    ]
    assert [site.number for site in sites] == [0, 1]
