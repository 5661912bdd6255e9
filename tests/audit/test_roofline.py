"""Estimates of an engine's time from published rates, checked against hand-computed kernels."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import onnx
import pytest
from written_networks import parsed

from trtdet.audit import Layer, Tensor
from trtdet.audit.gpus import GPUS, Gpu, gpu_named
from trtdet.audit.roofline import GRAPH_LAUNCH_US, LAUNCH_US, Estimate, estimate, estimate_tables
from trtdet.audit.traffic import Flow
from trtdet.errors import ConfigError
from trtdet.quantization import Entry, PrecisionPlan
from trtdet.tables import Table

NET = """<ir_version: 8, opset_import: ["" : 13]>
net (float[1,16,32,32] x) => (float[1,32,32,32] y) {
    a = Conv<pads = [1,1,1,1]>(x, w1) s = Sigmoid(a) c = Mul(a, s) d = Conv<pads = [1,1,1,1], group = 32>(c, w2)
    t = Transpose<perm = [0,2,3,1]>(d) m = MatMul(t, w3) y = Transpose<perm = [0,3,1,2]>(m) }"""
SHAPES = {"w1": (32, 16, 3, 3), "w2": (32, 1, 3, 3), "w3": (32, 32)}
PLACES = 32 * 32
DENSE, DEPTHWISE, PRODUCT = "Conv_0", "Conv_3", "MatMul_5"
PLAN = PrecisionPlan({name: Entry("fp16", "test") for name in (DENSE, DEPTHWISE)})

GPU = Gpu("made up", 86, 100.0, 10.0, 20.0, 4.0, 1.0, 1 << 20)


def model() -> onnx.ModelProto:
    return parsed(NET, {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()})


def tensor(name: str, kind: str, channels: int) -> Tensor:
    return Tensor(name, kind, (1, channels, 32, 32))


def flow(kind: str = "Half", *more: Layer) -> Flow:
    layers = (
        Layer(
            "conv", "conv", (tensor("x", kind, 16),), (Tensor("w1", kind, SHAPES["w1"]),), (tensor("a", "Half", 32),),
            (DENSE,),
        ),
        Layer("silu", "kgen", (tensor("a", "Half", 32),), (), (tensor("c", kind, 32),), ("Sigmoid_1", "Mul_2", DENSE)),
        Layer("view", "NoOp", (tensor("c", kind, 32),), (), (tensor("c2", kind, 32),), ()),
        Layer(
            "depthwise", "conv", (tensor("c2", kind, 32),), (Tensor("w2", kind, SHAPES["w2"]),),
            (tensor("d", "Half", 32),), (DEPTHWISE,),
        ),
        Layer("gemm", "gemm", (tensor("d", kind, 32),), (), (tensor("y", "Half", 32),), (PRODUCT,)),
    )  # fmt: skip
    return Flow((*layers, *more), PLAN, model())


def by_name(found: Estimate) -> dict[str, float]:
    return {layer.name: layer.arithmetic_ms for layer in found.layers}


def test_a_kernel_moves_its_bytes_at_the_bandwidth():
    found = estimate(flow(), GPU)
    conv = found.layers[0]
    assert conv.bytes == 2 * (16 * PLACES + 32 * 16 * 9 + 32 * PLACES)
    assert conv.memory_ms == pytest.approx(conv.bytes / 100e9 * 1e3)
    assert found.bytes == flow().bytes
    assert found.ms == pytest.approx(math.fsum(layer.ms for layer in found.layers))


@pytest.mark.parametrize(
    ("kind", "tf32", "rate"),
    [("Half", 4.0, 10e12), ("Int8", 4.0, 20e12), ("Float", 4.0, 4e12), ("Float", None, 1e12)],
)
def test_a_convolution_runs_at_the_rate_of_the_type_that_it_reads(kind, tf32, rate):
    found = estimate(flow(kind), replace(GPU, tf32=tf32))
    operations = 2 * PLACES * 32 * 16 * 9
    assert found.layers[0].operations == operations
    assert by_name(found)["conv"] == pytest.approx(operations / rate * 1e3)


def test_tensor_cores_multiply_channels_in_whole_vectors():
    # The types are those of 16 channels, which the weights alone decide here.
    narrow, plan = model(), PrecisionPlan({DENSE: Entry("int8", "test")})
    narrow.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones((32, 3, 3, 3), np.float32), "w1"))
    for kind, channels, rate in (("Half", 8, 10e12), ("Int8", 16, 20e12)):
        found = estimate(Flow(flow(kind).layers, plan, narrow), GPU)
        assert found.layers[0].operations == 2 * PLACES * 32 * 3 * 9
        assert by_name(found)["conv"] == pytest.approx(2 * PLACES * 32 * channels * 9 / rate * 1e3)


def test_a_depthwise_convolution_has_no_use_for_tensor_cores():
    for kind in ("Half", "Int8"):
        found = by_name(estimate(flow(kind), GPU))
        assert found["depthwise"] == pytest.approx(2 * PLACES * 32 * 9 / 1e12 * 1e3)


def test_products_and_pointwise_kernels_count_and_what_starts_no_kernel_does_not():
    found = estimate(flow(), GPU)
    assert [layer.name for layer in found.layers] == ["conv", "silu", "depthwise", "gemm"]
    assert found.layers[-1].operations == 2 * PLACES * 32 * 32
    assert by_name(found)["gemm"] == pytest.approx(2 * PLACES * 32 * 32 / 10e12 * 1e3)
    silu = found.layers[1]
    assert silu.operations == 0, "that of the convolution that it names"
    # A sigmoid: an exponential and a reciprocal of 8 instructions each, and 2 more; and a product.
    assert silu.arithmetic_ms == pytest.approx(PLACES * 32 * (2 * 8 + 2 + 1) * 2 / 1e12 * 1e3)


def test_a_short_kernel_waits_for_its_launch_and_a_long_one_hides_the_launch_of_the_next():
    tiny = replace(GPU, bandwidth=1e9, fp16=1e9, fp32=1e9)
    inside, alone = estimate(flow(), tiny), estimate(flow(), tiny, graph=False)
    assert {layer.bound for layer in (*inside.layers, *alone.layers)} == {"launch"}
    assert inside.ms == pytest.approx(4 * GRAPH_LAUNCH_US / 1e3)
    assert alone.ms == pytest.approx(4 * LAUNCH_US / 1e3)
    slow = replace(GPU, bandwidth=1.0)
    assert estimate(flow(), slow, graph=False).ms == pytest.approx(estimate(flow(), slow).ms)


def test_activations_and_operations_grow_with_the_batch_and_weights_do_not():
    once, often = estimate(flow(), GPU), estimate(flow(), GPU, 32)
    weights = 2 * 32 * 16 * 9
    assert often.layers[0].bytes == 32 * (once.layers[0].bytes - weights) + weights
    assert often.operations == 32 * once.operations
    for one, many in zip(once.layers, often.layers, strict=True):
        assert many.arithmetic_ms == pytest.approx(32 * one.arithmetic_ms)
        assert many.launch_ms == one.launch_ms


def test_an_engine_of_a_larger_batch_stands_for_one_image():
    ours = flow()
    layers = [
        replace(
            layer,
            inputs=tuple(replace(one, dims=(8, *one.dims[1:])) for one in layer.inputs),
            outputs=tuple(replace(one, dims=(8, *one.dims[1:])) for one in layer.outputs),
        )
        for layer in ours.layers
    ]
    eight = Flow(layers, PLAN, model())
    assert eight.batch == 8
    assert estimate(eight, GPU, 8).layers[0].bytes == layers[0].bytes
    assert estimate(eight, GPU).layers[0].bytes == ours.layers[0].bytes


def test_a_batch_below_one_is_an_error():
    with pytest.raises(ConfigError, match="the batch of an estimate is 0; give 1 or more"):
        estimate(flow(), GPU, 0)


def test_which_bound_holds():
    total = estimate(flow(), replace(GPU, bandwidth=200.0), 64)
    found = {layer.name: layer.bound for layer in total.layers}
    assert found == {"conv": "arithmetic", "silu": "arithmetic", "depthwise": "memory", "gemm": "memory"}
    assert sum(total.bound_ms(bound) for bound in ("memory", "arithmetic", "launch")) == pytest.approx(total.ms)


def test_tensors_that_fit_the_cache_are_counted():
    # Those of 64 KiB are a, c (which a view hands on) and d, each written and read; x and y are the engine's own.
    assert estimate(flow(), GPU).cached == 6 * 64 * 1024
    assert estimate(flow(), replace(GPU, l2=64 * 1024)).cached == 0
    assert estimate(flow(), GPU, 64).cached == 0


def test_an_estimate_as_words_and_as_plain_values():
    int8, half = (estimate(flow(kind), GPU, 32) for kind in ("Int8", "Half"))
    assert half.ms / int8.ms > 1
    assert "estimated from published rates, not measured" in str(int8)
    data = json.loads(json.dumps(estimate(flow(), GPU).as_dict()))
    assert (data["gpu"], data["batch"], data["measured"], data["kernels"]) == ("made up", 1, False, 4)
    assert {"ms", "bytes", "operations", "bound_ms", "layers"} <= data.keys()
    assert data["layers"][0]["bound"] in ("memory", "arithmetic", "launch")


def test_the_tables_say_that_they_are_estimates_and_name_the_slowest_layers():
    batches = [estimate(flow(), GPU, batch) for batch in (1, 32)]
    alone = [estimate(flow(), GPU, batch, graph=False) for batch in (1, 32)]
    totals, *layers = estimate_tables(batches, alone).parts
    assert isinstance(totals, Table)
    assert totals.title.startswith("estimated, not measured: made up at its published rates (100 GB/s, FP16 10 TFLOPS")
    assert [row[0] for row in totals.rows] == [1, 32]
    assert totals.rows[1][2] == pytest.approx(32e3 / batches[1].ms)
    for row in totals.rows:
        assert math.fsum(share for share in row[-3:] if isinstance(share, float)) == pytest.approx(1.0)
    for table, found in zip(layers, batches, strict=True):
        assert isinstance(table, Table) and table.title.startswith("estimated, ")
        assert [row[0] for row in table.rows] == sorted((layer.ms for layer in found.layers), reverse=True)
        assert {row[-1] for row in table.rows} == {DENSE, DEPTHWISE, PRODUCT, "Sigmoid_1, Mul_2"}


def test_without_all_eight_layers_are_shown():
    more = [Layer(f"copy{index}", "kgen", (tensor("x", "Half", 1),), (), (), ()) for index in range(8)]
    found = [estimate(flow("Half", *more), GPU)]
    short, whole = (estimate_tables(found, found, everything).parts[1] for everything in (False, True))
    assert isinstance(short, Table) and isinstance(whole, Table)
    assert (len(short.rows), len(whole.rows)) == (8, 12)
    assert (tuple(short.notes), tuple(whole.notes)) == (("4 more; --all shows them",), ())


# The table of GPUs


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_the_rates_of_a_gpu_fit_one_another(gpu):
    # Tensor cores multiply INT8 twice as fast as FP16 on every GPU here, FP16 at least four times as fast as FP32.
    assert gpu.int8 == pytest.approx(2 * gpu.fp16, rel=0.02)
    assert gpu.fp16 >= 3.9 * gpu.fp32
    assert (gpu.tf32 is None) == (gpu.capability < 80)
    assert gpu.special in (4, 8)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *[("T4", "T4"), ("t4", "T4"), ("l40s", "L40S"), ("rtx4090", "RTX 4090"), ("RTX-4090", "RTX 4090")],
        *[("4090", "RTX 4090"), ("orin", "Jetson AGX Orin"), ("jetson agx orin", "Jetson AGX Orin"), ("H200", "H200")],
    ],
)
def test_a_gpu_is_found_by_its_name(given, name):
    assert gpu_named(given).name == name


@pytest.mark.parametrize("name", ["", "GTX 1080", "agx", "list"])
def test_an_unknown_gpu_is_an_error_that_lists_the_known(name):
    with pytest.raises(ConfigError, match=f"no figures are known of GPU '{name}'; known are T4, L4, A10") as caught:
        gpu_named(name)
    assert all(known in str(caught.value) for known in GPUS)
