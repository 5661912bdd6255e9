"""The cost of a plan as a sum over neighbouring choices: equal to the estimate of the whole engine for every plan."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
import onnx.helper as oh
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtdet.audit import Layer, Tensor
from trtdet.audit.fp16 import InFp16
from trtdet.audit.gpus import gpu_named
from trtdet.audit.neighbours import MeasuredPart, measured_costs, split_costs, time_costs
from trtdet.audit.roofline import Roofline, estimate
from trtdet.audit.traffic import Flow
from trtdet.errors import BackendError
from trtdet.quantization import Entry, PrecisionPlan

GPU = gpu_named("L4")
SIDE, CHANNELS = 32, 16


def tensor(name: str, kind: str) -> Tensor:
    return Tensor(name, kind, (1, CHANNELS, SIDE, SIDE))


def engine(reads: Sequence[int], skips: Sequence[int | None]) -> Flow:
    """Convolution i reads the INT8 tensor ``reads[i]`` and writes FP16; a kernel adds tensor ``skips[i]`` to that,
    activates and quantises the sum as tensor i + 1. Tensor 0 is the quantised image; nothing reads the last."""
    layers = [Layer("image", "kgen", (tensor("x", "Float"),), (), (tensor("t0", "Int8"),), ())]
    nodes, weights = [], []
    for index, (read, skip) in enumerate(zip(reads, skips, strict=True)):
        nodes += [
            oh.make_node("Conv", ["x", f"w{index}"], [f"a{index}"], f"conv{index}"),
            oh.make_node("Sigmoid", [f"a{index}"], [f"s{index}"], f"silu{index}"),
        ]
        weights.append(onnx.numpy_helper.from_array(np.ones((CHANNELS, CHANNELS, 1, 1), np.float32), f"w{index}"))
        constant = Tensor(f"w{index}", "Int8", (CHANNELS, CHANNELS, 1, 1))
        out = tensor(f"a{index}", "Half")
        layers.append(Layer(f"c{index}", "conv", (tensor(f"t{read}", "Int8"),), (constant,), (out,), (f"conv{index}",)))
        added = () if skip is None else (tensor(f"t{skip}", "Int8"),)
        taken = (tensor(f"a{index}", "Half"), *added)
        layers.append(Layer(f"k{index}", "kgen", taken, (), (tensor(f"t{index + 1}", "Int8"),), (f"silu{index}",)))
    shapes = [oh.make_tensor_value_info(f"a{index}", 1, (1, CHANNELS, SIDE, SIDE)) for index in range(len(reads))]
    given_ = oh.make_tensor_value_info("x", 1, (1, CHANNELS, SIDE, SIDE))
    graph = oh.make_graph(nodes, "engine", [given_], [], weights, value_info=shapes)
    plan = PrecisionPlan({f"conv{index}": Entry("int8", "test") for index in range(len(reads))})
    return Flow(layers, plan, oh.make_model(graph))


def subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [chosen for count in range(len(names) + 1) for chosen in itertools.combinations(names, count)]


@st.composite
def engines(draw: st.DrawFn) -> Flow:
    count = draw(st.integers(1, 5))
    reads = [draw(st.integers(0, index)) for index in range(count)]
    skips = [draw(st.none() | st.integers(0, index)) for index in range(count)]
    return engine(reads, skips)


@given(engines(), st.sampled_from((1, 8)), st.booleans())
@settings(max_examples=20, deadline=None)
def test_the_parts_add_up_to_the_estimate_of_every_plan(flow, batch, graph):
    costs = time_costs(flow, Roofline(flow, GPU, batch, graph))
    for fp16 in subsets(costs.convs):
        assert costs.of(fp16) == pytest.approx(estimate(flow, GPU, batch, graph=graph, fp16=fp16).ms, rel=1e-9)


@given(engines(), st.data())
@settings(max_examples=20, deadline=None)
def test_both_engines_that_were_measured_cost_what_they_took(flow, data):
    """Each convolution with the kernel after it; the first kernel belongs to none."""
    roofline = Roofline(flow, GPU)
    took = st.floats(0.001, 10)
    names = [f"conv{index}" for index in range(len(flow.convolutions))]
    first = MeasuredPart((), ("image",), data.draw(took), data.draw(took))
    parts = [
        MeasuredPart((name,), (f"c{i}", f"k{i}"), data.draw(took), data.draw(took)) for i, name in enumerate(names)
    ]
    costs = measured_costs(flow, roofline, [first, *parts])
    assert costs.of(()) == pytest.approx(sum(part.int8 for part in (first, *parts)))
    before = time_costs(flow, roofline)
    alone = math.isclose(_first_ms(roofline, ()), _first_ms(roofline, names))
    assert costs.of(names) == pytest.approx(sum(part.fp16 for part in parts) + (first.int8 if alone else first.fp16))
    # Where every layer takes as long as estimated, the estimate is what plans cost.
    exact = [MeasuredPart((), (layer.name,), layer.ms, layer.ms) for layer in roofline.layers(range(len(flow.layers)))]
    assert measured_costs(flow, roofline, exact).of(()) == pytest.approx(before.of(()))


def _first_ms(roofline: Roofline, fp16: Sequence[str]) -> float:
    return sum(layer.ms for layer in roofline.layers([0], fp16))


def test_a_layer_is_priced_as_its_own_convolution_runs():
    flow = engine([0, 1, 2], [None] * 3)
    roofline = Roofline(flow, GPU)
    parts = [MeasuredPart((), ("image",), 1.0, 1.0)]
    parts += [MeasuredPart((f"conv{i}",), (f"c{i}", f"k{i}"), 1.0, 10.0) for i in range(3)]
    costs = measured_costs(flow, roofline, parts)
    # conv1 alone reads an FP16 copy, which the kernel before it writes beside the INT8 that nothing else reads.
    assert costs.of(("conv1",)) > costs.of(()) + 5
    assert costs.of(("conv0", "conv1", "conv2")) == pytest.approx(31, rel=0.01)


def test_layers_that_were_not_estimated_are_shared_out_and_strangers_refused():
    flow = engine([0], [None])
    roofline = Roofline(flow, GPU)
    known = MeasuredPart(("conv0",), ("c0", "k0", "image"), 3.0, 2.0)
    costs = measured_costs(flow, roofline, [known, MeasuredPart((), ("copy",), 1.0, 0.5)])
    assert [costs.of(names) for names in ((), ("conv0",))] == pytest.approx([4.0, 2.5])
    with pytest.raises(BackendError, match="none of those that the engine lists"):
        measured_costs(flow, roofline, [MeasuredPart((), ("copy",), 1.0, 0.5)])


def test_a_tensor_that_both_precisions_read_is_written_twice():
    flow = engine([0, 1, 1], [None, None, None])
    values = CHANNELS * SIDE * SIDE
    both, one, none = (InFp16(flow, names).bytes for names in (("conv1", "conv2"), ("conv1",), ()))
    weights = CHANNELS * CHANNELS
    assert none == flow.bytes
    residual = engine([0, 1, 1], [None, None, 2])
    assert InFp16(residual, ()).bytes == residual.bytes
    # With one reader in FP16 the kernel after conv0 writes an FP16 copy, which that reader reads.
    # Its own output is FP16 as before.
    copy, read = 2 * values, values
    assert one == none + copy + read + weights
    # With both, the INT8 copy is not written, and the other reader reads the FP16 copy.
    assert both == one - values + read + weights


@pytest.mark.parametrize("also", [False, True], ids=["pooled for FP16 alone", "pooled for both"])
def test_what_pools_int8_for_an_fp16_convolution_pools_a_float_copy(also):
    """conv1 reads what a kernel pools of the tensor that conv2 reads in INT8."""
    flow = engine([0, 1, 1, 1], [None] * 4)
    pooled, values = tensor("p", "Int8"), CHANNELS * SIDE * SIDE
    pool = Layer("pool", "kgen", (tensor("t1", "Int8"),), (), (pooled,), ("pool",))
    readers = {"c1", "c3"} if also else {"c1"}
    layers = [replace(layer, inputs=(pooled,)) if layer.name in readers else layer for layer in flow.layers]
    flow.model.graph.node.append(oh.make_node("MaxPool", ["s0"], ["p0"], "pool", kernel_shape=[1, 1]))
    place = next(index for index, layer in enumerate(layers) if layer.name == "c1")
    mixed = Flow([*layers[:place], pool, *layers[place:]], flow.plan, flow.model)
    assert InFp16(mixed, ()).layer(place).bytes == 2 * values
    # The float32 copy is read, pooled, written and read again to be cast; it was also made by the kernel before.
    copy, cast = 4 * (2 * values) + 4 * values, (4 + 2) * values
    assert InFp16(mixed, ("conv1",)).layer(place).bytes == copy + cast + (2 * values if also else 0)


def test_an_activation_goes_into_an_fp16_kernel_where_nothing_behind_it_reads_int8():
    flow = engine([0, 1], [None, None])
    kernels = {names: len(estimate(flow, GPU, fp16=names).layers) for names in subsets(("conv0", "conv1"))}
    assert kernels[()] == 5
    assert kernels[("conv0",)] == 5  # conv1 reads INT8, which a kernel of its own makes
    assert kernels[("conv1",)] == 5
    assert kernels[("conv0", "conv1")] == 4


def test_an_activation_takes_as_long_inside_of_a_kernel():
    slow = replace(GPU, fp32=GPU.fp32 / 1e4)
    flow = engine([0, 1], [None, None])
    alone, inside = (
        {layer.name: layer.arithmetic_ms for layer in estimate(flow, slow, fp16=names).layers}
        for names in ((), ("conv0", "conv1"))
    )
    assert "k0" not in inside and alone["k0"] > alone["c0"]
    assert inside["c0"] == pytest.approx(alone["k0"])


def test_neighbours_are_tables_of_their_own():
    """In a chain of eight no convolution knows those that are far away."""
    costs = time_costs(flow := engine(range(8), [None] * 8), Roofline(flow, GPU))
    assert costs.convs == tuple(f"conv{index}" for index in range(8))
    places = [[int(name[4:]) for name in joint.convs] for joint in costs.joints]
    assert all(max(found) - min(found) <= 2 for found in places)


def test_of_many_around_a_kernel_pairs_are_worked_out():
    flow = engine([0] * 9, [None] * 9)  # one tensor, nine readers

    def price(layers: Sequence[int], fp16: object) -> float:
        chosen = set(fp16) if isinstance(fp16, (list, tuple)) else set()
        count = sum(f"conv{index}" in chosen for index in range(9))
        return count + 0.5 * count * (count - 1) if 0 in layers else 0.0

    costs = split_costs(flow, price)
    assert max(len(joint.convs) for joint in costs.joints) == 2
    for fp16 in ((), ("conv0",), ("conv3", "conv7"), costs.convs):
        assert costs.of(fp16) == pytest.approx(len(fp16) ** 2 / 2 + len(fp16) / 2)
