"""Histograms of a report: small, and with every rule's threshold."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from trtdet.calibration import RULES, Collection, Histogram, Ranges
from trtdet.quantization import Entry, PrecisionPlan
from trtdet.report.sections.ranges import compact, cut_off, inputs_of, noise, ranges_section

VALUES = np.abs(np.random.default_rng(0).normal(0, 1, 20000)).astype(np.float32)


def collection(**tensors: Histogram) -> Collection:
    return Collection(tensors, "key", 4, "sha", "images", ())


def test_bars_hold_every_value_up_to_the_largest():
    histogram = Histogram.of(VALUES)
    top, heights = compact(histogram)
    assert len(heights) == 128
    assert histogram.amax <= top < 1.01 * histogram.amax + histogram.width * 128
    counts = [10 ** (height / 20) - 1 for height in heights]
    # A twentieth of a factor of ten is 12 %.
    assert sum(counts) == pytest.approx(len(VALUES), rel=0.06)
    assert heights[0] > max(heights) - 5 and heights[-1] < 30
    top, heights = compact(Histogram.of(np.zeros(10, np.float32)))
    assert top > 0 and heights[0] == round(20 * np.log10(11)), "a tensor of zeros"


def test_noise_is_least_where_little_is_cut_off_and_steps_are_small():
    histogram = Histogram.of(VALUES)
    found = {amax: noise(histogram, amax) for amax in (0.5, 4.0, 30.0)}
    assert found[4.0] == min(found.values()) < 2e-4
    assert found[0.5] > 0.1
    assert noise(histogram, 0.0) == 0.0


def test_the_worst_are_drawn_and_all_can_be_chosen():
    histograms = {f"t{place}": Histogram.of(VALUES * (place + 1)) for place in range(12)}
    found = collection(**histograms)
    ranges = Ranges.choose(found, "minmax")
    inputs = {f"c{place}": f"t{place}" for place in range(12)}
    (_, part) = ranges_section(ranges, found, inputs, ("c7", "gone", "c2")).parts
    assert [entry.name for entry in part.entries] == [*inputs]
    assert part.shown == (7, 2)
    assert part.entries[7].thresholds.keys() == RULES.keys()
    assert part.entries[7].chosen == pytest.approx(histograms["t7"].amax, rel=1e-5)
    assert (part.entries[7].cut_off, part.entries[7].largest) == (0.0, pytest.approx(histograms["t7"].amax, rel=1e-5))
    (_, unranked) = ranges_section(ranges, found, inputs, ()).parts
    assert len(unranked.shown) == 10


def test_a_tensor_that_several_read_is_drawn_once():
    found = collection(shared=Histogram.of(VALUES), own=Histogram.of(VALUES))
    inputs = {"a": "shared", "b": "shared", "c": "own", "d": "not collected"}
    (_, part) = ranges_section(None, found, inputs, ("b", "a", "c")).parts
    assert [(entry.name, entry.tensor) for entry in part.entries] == [("a, b", "shared"), ("c", "own")]
    assert part.shown == (0, 1)


@pytest.mark.parametrize("share", [0.0, 0.04, 0.5])
def test_nothing_is_cut_off_at_the_largest_value_whatever_its_bin_holds(share):
    values = np.minimum(VALUES, np.quantile(VALUES, 1 - share)).astype(np.float32)
    histogram = Histogram.of(values)
    assert cut_off(histogram, histogram.amax) == cut_off(histogram, 2 * histogram.amax) == 0.0
    for amax in (0.25 * histogram.amax, 0.9 * histogram.amax):
        assert cut_off(histogram, amax) == pytest.approx((values > amax).mean(), abs=1e-4)
    assert cut_off(histogram, 0.0) == pytest.approx(1.0)


def test_what_a_convolution_reads_is_found_through_what_quantises_it():
    nodes = [
        helper.make_node("Cast", ["t"], ["half"], "cast", to=TensorProto.FLOAT16),
        helper.make_node("QuantizeLinear", ["half", "s"], ["q"], "q"),
        helper.make_node("DequantizeLinear", ["q", "s"], ["d"], "d"),
        helper.make_node("Conv", ["d", "w"], ["x"], "a"),
        helper.make_node("Conv", ["x", "w"], ["y"], "b"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("t", "y")]
    model = helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:]))
    plan = PrecisionPlan({"b": Entry("fp16", ""), "a": Entry("int8", "")})
    # What FP16 reads is not quantised, although it was collected.
    assert inputs_of(model, plan, collection(t=Histogram.of(VALUES), x=Histogram.of(VALUES))) == {"a": "t"}
