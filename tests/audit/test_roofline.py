"""Estimates of an engine's time from published rates, checked against hand-computed kernels."""

import json
import math
from dataclasses import replace

import numpy as np
import onnx
import pytest
from written_networks import parsed

from trtdet.audit import Layer, Tensor, roofline
from trtdet.audit.gpus import GPUS, Gpu, gpu_named
from trtdet.audit.roofline import (
    ARITHMETIC,
    KERNEL_CYCLES,
    LAUNCH_US,
    MEMORY,
    TIME_WITHIN,
    Estimate,
    estimate,
    estimate_tables,
)
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

GPU = Gpu("made up", 86, 100.0, 10.0, 20.0, 4.0, 1.0, 1 << 20, sms=2)
"""So few multiprocessors that every convolution of NET fills them; the clock is 1.953 GHz."""


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
    assert conv.memory_ms == pytest.approx(conv.bytes / (MEMORY * 100e9) * 1e3)
    assert found.bytes == flow().bytes
    assert found.ms == pytest.approx(math.fsum(layer.ms for layer in found.layers))


@pytest.mark.parametrize(
    ("kind", "tf32", "rate"),
    [
        *[("Half", 4.0, 10e12 * ARITHMETIC[16]), ("Int8", 4.0, 20e12 * ARITHMETIC[8])],
        *[("Float", 4.0, 4e12 * ARITHMETIC[32]), ("Float", None, 1e12 * ARITHMETIC[32])],
    ],
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
    for kind, channels, rate in (("Half", 8, 10e12 * ARITHMETIC[16]), ("Int8", 16, 20e12 * ARITHMETIC[8])):
        found = estimate(Flow(flow(kind).layers, plan, narrow), GPU)
        assert found.layers[0].operations == 2 * PLACES * 32 * 3 * 9
        assert by_name(found)["conv"] == pytest.approx(2 * PLACES * 32 * channels * 9 / rate * 1e3)


def test_a_depthwise_convolution_has_no_use_for_tensor_cores():
    for kind in ("Half", "Int8"):
        found = by_name(estimate(flow(kind), GPU))
        assert found["depthwise"] == pytest.approx(2 * PLACES * 32 * 9 / (roofline.DEPTHWISE * 1e12) * 1e3)


def test_products_and_pointwise_kernels_count_and_what_starts_no_kernel_does_not():
    found = estimate(flow(), GPU)
    assert [layer.name for layer in found.layers] == ["conv", "silu", "depthwise", "gemm"]
    assert found.layers[-1].operations == 2 * PLACES * 32 * 32
    assert by_name(found)["gemm"] == pytest.approx(2 * PLACES * 32 * 32 / (ARITHMETIC[16] * 10e12) * 1e3)
    silu = found.layers[1]
    assert silu.operations == 0, "that of the convolution that it names"
    # A sigmoid: an exponential and a reciprocal of 8 instructions each, and 2 more; and a product.
    assert silu.arithmetic_ms == pytest.approx(PLACES * 32 * (2 * 8 + 2 + 1) * 2 / 1e12 * 1e3)


def test_a_kernel_takes_its_fixed_time_or_the_host_takes_longer_to_launch_the_next():
    tiny = replace(GPU, bandwidth=1e9, fp16=1e9, fp32=1e9)
    # The rate of the ordinary cores gives the clock, so the times of a kernel are looked at alone.
    inside = estimate(flow(), replace(GPU, bandwidth=1e9))
    assert [layer.launch_ms for layer in inside.layers] == pytest.approx([KERNEL_CYCLES / 1.953125 / 1e6] * 4)
    assert inside.layers[2].bound == "launch"
    alone = estimate(flow(), tiny, graph=False)
    assert {layer.bound for layer in alone.layers} == {"launch"}
    assert alone.ms == pytest.approx(4 * LAUNCH_US / 1e3)
    slow = replace(GPU, bandwidth=1.0)
    assert estimate(flow(), slow, graph=False).ms == pytest.approx(estimate(flow(), slow).ms)


def test_convolutions_of_few_tiles_leave_multiprocessors_idle():
    # 32 x 32 places and 32 channels are 16 tiles of 64 x 64.
    times = {sms: by_name(estimate(flow(), replace(GPU, sms=sms)))["conv"] for sms in (2, 16, 17, 32, 12)}
    assert times[2] == times[16] == min(times.values())
    for sms, busy in ((17, 16 / 17), (32, 1 / 2), (12, 16 / 24)):
        assert times[sms] == pytest.approx(times[2] / busy)
    many = estimate(flow(), replace(GPU, sms=32), 2).layers[0].arithmetic_ms
    assert many == pytest.approx(times[32]), "a second image takes the idle half"


def test_quantising_and_converting_an_image_reach_less_of_the_bandwidth():
    image = Layer("image", "Reformat", (tensor("i", "Float", 3),), (), (tensor("x", "Half", 3),), ())
    quantise = Layer("quantise", "Reformat", (tensor("d", "Half", 32),), (), (tensor("q", "Int8", 32),), ())
    copied = Layer("copy", "Reformat", (tensor("d", "Half", 32),), (), (tensor("e", "Half", 32),), ())
    fused = replace(quantise, name="fused", type="kgen")
    layers = {layer.name: layer for layer in estimate(flow("Half", image, quantise, copied, fused), GPU).layers}
    reached = {
        name: layers[name].bytes / layers[name].memory_ms / 1e8 for name in ("image", "quantise", "copy", "fused")
    }
    assert reached == pytest.approx(
        {"image": roofline.IMAGE, "quantise": roofline.QUANTISED, "copy": MEMORY, "fused": MEMORY}
    )


def test_a_gpu_below_its_boost_clock_is_slower_and_a_jetson_has_less_memory_too():
    throttled, jetson = replace(GPU, sustained=0.5), replace(GPU, sustained=0.5, capability=87)
    full, slow, shared = (estimate(flow(), gpu).layers[0] for gpu in (GPU, throttled, jetson))
    assert (slow.arithmetic_ms, slow.launch_ms) == pytest.approx((2 * full.arithmetic_ms, 2 * full.launch_ms))
    assert slow.memory_ms == full.memory_ms
    assert shared.memory_ms == pytest.approx(2 * full.memory_ms)


def test_activations_and_operations_grow_with_the_batch_and_weights_do_not():
    once, often = estimate(flow(), GPU), estimate(flow(), GPU, 32)
    weights = 2 * 32 * 16 * 9
    assert often.layers[0].bytes == 32 * (once.layers[0].bytes - weights) + weights
    assert often.operations == 32 * once.operations
    for one, many in zip(once.layers, often.layers, strict=True):
        assert many.arithmetic_ms == pytest.approx(32 * one.arithmetic_ms)  # as one image fills the GPU
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
    total = estimate(flow(), replace(GPU, bandwidth=120.0), 64)
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
    low, high = int8.interval_ms
    assert (low, high) == pytest.approx((int8.ms / TIME_WITHIN, int8.ms * TIME_WITHIN))
    assert str(int8).startswith(f"{int8.ms:.3f} ms ({low:.3f} .. {high:.3f}) on made up at batch 32, estimated from ")
    assert "not measured" in str(int8)
    data = json.loads(json.dumps(estimate(flow(), GPU).as_dict()))
    assert (data["gpu"], data["batch"], data["measured"], data["kernels"]) == ("made up", 1, False, 4)
    assert {"ms", "interval_ms", "bytes", "operations", "bound_ms", "layers"} <= data.keys()
    assert data["layers"][0]["bound"] in ("memory", "arithmetic", "launch")


def test_the_tables_say_that_they_are_estimates_and_name_the_slowest_layers():
    batches = [estimate(flow(), GPU, batch) for batch in (1, 32)]
    alone = [estimate(flow(), GPU, batch, graph=False) for batch in (1, 32)]
    totals, *layers = estimate_tables(batches, alone).parts
    assert isinstance(totals, Table)
    assert totals.title.startswith("estimated, not measured: made up at its published rates (100 GB/s, FP16 10 TFLOPS")
    assert [row[0] for row in totals.rows] == [1, 32]
    assert totals.rows[1][3] == pytest.approx(32e3 / batches[1].ms)
    assert [row[2] for row in totals.rows] == ["{:.3f} .. {:.3f}".format(*each.interval_ms) for each in batches]
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


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_the_rates_of_a_gpu_fit_one_another(gpu):
    # Tensor cores multiply INT8 twice as fast as FP16 on every GPU here, FP16 at least four times as fast as FP32.
    assert gpu.int8 == pytest.approx(2 * gpu.fp16, rel=0.02)
    assert gpu.fp16 >= 3.9 * gpu.fp32
    assert (gpu.tf32 is None) == (gpu.capability < 80)
    assert gpu.special in (4, 8)
    assert 0.5 < gpu.clock < 3 and gpu.sms % 2 == 0


@pytest.mark.parametrize(
    ("name", "bandwidth", "fp16", "int8", "fp32"),
    [
        # FP16 and INT8 dense, from the data sheets and architecture papers.
        *[("T4", 320, 65, 130, 8.1), ("L4", 300, 121, 242.5, 30.3), ("A10", 600, 125, 250, 31.2)],
        *[("A100", 2039, 312, 624, 19.5), ("L40S", 864, 362.05, 733, 91.6), ("H200", 4800, 989.5, 1979, 67)],
        *[("RTX 2060", 336, 51.6, 103.2, 6.5), ("TITAN RTX", 672, 130.5, 261, 16.3), ("RTX 3090", 936, 142, 284, 35.6)],
        *[("RTX 4090", 1008, 330.3, 660.6, 82.6), ("RTX 5090", 1792, 419, 838, 104.8)],
        *[("Jetson AGX Orin", 204.8, 42.5, 85, 5.3), ("Jetson Orin Nano Super", 102, 16.7, 33.5, 2.1)],
    ],
)
def test_the_rates_are_the_published_peaks(name, bandwidth, fp16, int8, fp32):
    gpu = GPUS[name]
    assert (gpu.bandwidth, gpu.fp16, gpu.int8) == pytest.approx((bandwidth, fp16, int8), rel=0.02)
    assert gpu.fp32 == pytest.approx(fp32, rel=0.08)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *[("T4", "T4"), ("t4", "T4"), ("l40s", "L40S"), ("rtx4090", "RTX 4090"), ("RTX-4090", "RTX 4090")],
        *[("NVIDIA GeForce RTX 3090", "RTX 3090"), ("Tesla T4", "T4"), ("NVIDIA TITAN RTX", "TITAN RTX")],
        *[("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A100 80GB PCIe", "A100 PCIe"), ("NVIDIA H100 80GB HBM3", "H100")],
        *[("NVIDIA A100-PCIE-40GB", "A100 40GB"), ("NVIDIA A100-SXM4-40GB", "A100 40GB"), ("NVIDIA L4", "L4")],
        *[("NVIDIA GeForce RTX 3060 Laptop GPU", "RTX 3060 Laptop"), ("NVIDIA GeForce RTX 3080 Ti", "RTX 3080 Ti")],
        *[("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"), ("NVIDIA Thor", "Jetson AGX Thor")],
        *[
            ("Orin Nano", "Jetson Orin Nano"),
            ("orin-nano super", "Jetson Orin Nano Super"),
            ("Orin NX", "Jetson Orin NX"),
        ],
        *[("4090", "RTX 4090"), ("orin", "Jetson AGX Orin"), ("RTX 4070 SUPER", "RTX 4070 Super")],
        *[("jetson agx orin", "Jetson AGX Orin"), ("H200", "H200")],
    ],
)
def test_a_gpu_is_found_by_its_name(given, name):
    assert gpu_named(given).name == name


@pytest.mark.parametrize("name", ["", "GTX 1080", "agx", "list", "NVIDIA GeForce", "RTX 3090 D"])
def test_an_unknown_gpu_is_an_error_that_lists_the_known(name):
    with pytest.raises(ConfigError, match=f"no figures are known of GPU '{name}'; known are T4, L4, A10") as caught:
        gpu_named(name)
    assert all(known in str(caught.value) for known in GPUS)
