from typing import Any

import numpy as np
import pytest

from trtdet.quantization import Cause, Entry, place

RESIDUAL = """(float[1,4,8,8] x) => (float[1,4,8,8] y) {
    a = Conv(x, w1) b = Relu(a) c = Conv(b, w2) d = Add(b, c) y = Conv(d, w1) }"""


def weights(normal: Any, *names: str) -> dict[str, np.ndarray]:
    return {name: normal(4, 4, 1, 1, seed=index) for index, name in enumerate(names)}


def test_the_input_of_every_convolution_is_quantised(net, normal):
    text = "(float[1,4,8,8] x) => (float[1,4,8,8] y) {a = Conv(x, w1) b = Relu(a) y = Conv(b, w2)}"
    model = net(text, **weights(normal, "w1", "w2"))
    placement = place(model)
    assert placement.activations == ("x", "b")
    assert placement.readers == {"x": (("Conv_0", 0),), "b": (("Conv_2", 0),)}
    assert placement.plan.entries == {
        "Conv_0": Entry("int8", "convolution", Cause.QUANTIZABLE),
        "Conv_2": Entry("int8", "convolution", Cause.QUANTIZABLE),
    }


@pytest.mark.parametrize(
    ("body", "readers"),
    [
        ("y = Conv(x, w1) z = Conv(x, w2)", {"x": (("Conv_0", 0), ("Conv_1", 0))}),  # once for several
        # A residual sum reads the quantised skip input, at either place.
        *(
            (
                f"a = Conv(x, w1) b = Relu(a) c = Conv(b, w2) d = Add({pair}) y = Conv(d, w1)",
                {"x": (("Conv_0", 0),), "b": (("Conv_2", 0), ("Add_3", position)), "d": (("Conv_4", 0),)},
            )
            for position, pair in enumerate(("b, c", "c, b"))
        ),
        ("a = Conv(x, w1) b = Conv(x, w2) y = Add(a, b)", {"x": (("Conv_0", 0), ("Conv_1", 0))}),  # nothing quantised
        (
            # Sums that are not residual.
            "a = Conv(x, w1) b = Add(x, k) c = ReduceMean<axes = [2,3]>(x) d = Add(x, c) e = Add(b, a) y = Mul(d, e)",
            {"x": (("Conv_0", 0),)},
        ),
    ],
)
def test_what_reads_each_quantised_tensor(net, normal, body, readers):
    text = f"(float[1,4,8,8] x) => (float[1,4,8,8] y) {{ {body} }}"
    model = net(text, **weights(normal, "w1", "w2"), k=normal(1, 4, 8, 8))
    placement = place(model)
    assert (placement.activations, placement.readers) == (tuple(readers), readers)


def test_of_two_quantised_inputs_of_a_sum_the_one_that_more_nodes_read_is_the_skip(net, normal):
    text = """(float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z, float[1,4,8,8] v) {
        a = Conv(x, w1) b = Relu(a) c = Conv(b, w2) d = Add(c, b) y = Conv(d, w1) z = Conv(c, w1) v = Conv(b, w1) }"""
    readers = place(net(text, **weights(normal, "w1", "w2"))).readers
    assert readers["b"] == (("Conv_2", 0), ("Conv_6", 0), ("Add_3", 1))
    assert readers["c"] == (("Conv_5", 0),)


def test_a_dynamic_batch_changes_nothing(net, normal):
    dynamic = RESIDUAL.replace("[1,4,8,8]", "[N,4,8,8]")
    assert place(net(dynamic, **weights(normal, "w1", "w2"))) == place(net(RESIDUAL, **weights(normal, "w1", "w2")))


def test_the_expectation_of_a_softmax_stays_in_float_with_the_reason(net, normal):
    model = net(
        """(float[1,32,8,8] x) => (float[1,1,4,64] y) {
            a = Conv(x, w) r = Reshape(a, s) t = Transpose<perm = [0,2,1,3]>(r) m = Softmax<axis = 1>(t)
            y = Conv(m, bins) }""",
        w=normal(32, 32, 1, 1),
        s=np.array([1, 4, 8, 64]),
        bins=np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1),
    )
    placement = place(model)
    entry = placement.plan.entries["Conv_4"]
    assert (entry.precision, entry.cause) == ("fp32", Cause.DECODES_BOXES)
    assert entry.reason.startswith("expectation of a softmax (distribution focal loss)")
    assert placement.plan.entries["Conv_0"].precision == "int8"
    assert placement.activations == ("x",)


def test_a_softmax_is_seen_through_what_only_moves_values(net, normal):
    text = """(float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z) {
            m = Softmax<axis = 1>(x) r = Reshape(m, s) t = Transpose(r) u = Transpose(t) v = Reshape(u, s)
            y = Conv(v, w) n = Relu(m) z = Conv(n, w) }"""
    model = net(text, w=normal(4, 4, 1, 1), s=np.array([1, 4, 8, 8]))
    assert {name: entry.precision for name, entry in place(model).plan.entries.items()} == {
        "Conv_5": "fp32",
        "Conv_7": "int8",
    }


def test_a_transposed_convolution_stays_in_float_with_the_reason(net, normal):
    text = "(float[1,4,8,8] x) => (float[1,4,16,16] y) {y = ConvTranspose<strides = [2,2]>(x, w)}"
    model = net(text, w=normal(4, 4, 2, 2))
    placement = place(model)
    entry = placement.plan.entries["ConvTranspose_0"]
    assert (entry.precision, entry.cause) == ("fp32", Cause.TRANSPOSED)
    assert entry.reason.startswith("transposed convolution: its per-channel weight axis")
    assert placement.activations == ()


def test_weights_or_inputs_that_are_not_what_int8_needs_stay_in_float_with_the_reason(net, normal):
    text = "(float[4,4,1,1] x) => (float[4,4,1,1] y, float[1,4,8,8] z) {y = Conv(w, x) z = Conv(k, w)}"
    model = net(text, w=normal(4, 4, 1, 1), k=normal(1, 4, 8, 8))
    assert place(model).plan.entries == {
        "Conv_0": Entry("fp32", "its weights are not constant", Cause.WEIGHTS_NOT_CONSTANT),
        "Conv_1": Entry("fp32", "its input is constant", Cause.INPUT_CONSTANT),
    }


def test_a_model_without_convolutions_has_an_empty_plan(net):
    assert place(net("(float[4] x) => (float[4] y) {y = Relu(x)}")).plan.entries == {}
