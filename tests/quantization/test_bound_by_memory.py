"""Behind FP16 convolutions INT8 begins where its arithmetic saves more time than the bytes of quantising take."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from trtdet.quantization import Cause, DataFlow, PrecisionPlan, default_plan, place

APART = DataFlow(half=True, weights=("tensor",), fused=False)
TEXT = """(float[1,3,SIZE,SIZE] x) => (float[1,CH,SIZE,SIZE] y) {
    a = Conv<pads = [1,1,1,1]>(x, w0) ra = Relu(a)
    b = Conv<pads = [1,1,1,1]>(ra, w1) rb = Relu(b)
    c = Conv<pads = [1,1,1,1]>(rb, w2) rc = Relu(c)
    y = Conv(rc, w3) }"""


def planned(model: onnx.ModelProto, flow: DataFlow) -> PrecisionPlan:
    return default_plan(model, place(model), flow)


def chain(net: Any, normal: Any, channels: int, size: int, batch: str = "1") -> onnx.ModelProto:
    text = TEXT.replace("SIZE", str(size)).replace("CH", str(channels)).replace("float[1,", f"float[{batch},")
    kernels = {"w0": (channels, 3, 3, 3), "w3": (channels, channels, 1, 1)}
    kernels |= dict.fromkeys(("w1", "w2"), (channels, channels, 3, 3))
    return net(text, **{name: normal(*shape) for name, shape in kernels.items()})


def test_few_channels_of_a_large_image_stay_in_fp16_behind_fp16(net, normal):
    model = chain(net, normal, channels=16, size=64)
    plan = planned(model, APART)
    causes = {name: entry.cause for name, entry in plan.entries.items()}
    assert causes == {
        "Conv_0": Cause.FEW_CHANNELS,
        "Conv_2": Cause.BOUND_BY_MEMORY,
        "Conv_4": Cause.BOUND_BY_MEMORY,
        "Conv_6": Cause.HEAD_OUTPUT,
    }
    # 2 bytes for each of 16 x 64 x 64 values, less a byte for each weight.
    saved = (2 * 16 * 64 * 64 - 16 * 16 * 9) / 1e6
    assert f"INT8 moves {saved:.2f} MB more" in plan.entries["Conv_2"].reason
    assert plan.entries["Conv_2"].precision == "fp16"


@pytest.mark.parametrize(
    ("channels", "size", "flow"),
    [
        pytest.param(16, 64, DataFlow(half=True), id="the kernel quantises itself"),
        # 3 x 3 x 128 multiply-adds for each value that is read: 2.9 bytes' worth, and the two bytes are fewer.
        pytest.param(128, 16, APART, id="arithmetic takes longer than the bytes"),
        # 2 bytes for each of 64 x 4 x 4 values are fewer than the 36864 bytes that the weights take more in FP16.
        pytest.param(64, 4, APART, id="weights outweigh a small image"),
    ],
)
def test_what_int8_makes_faster_stays_in_int8(net, normal, channels, size, flow):
    assert planned(chain(net, normal, channels, size), flow).names("int8") == ("Conv_2", "Conv_4")


def test_an_int8_convolution_among_the_makers_keeps_the_rest_in_int8(net, normal):
    text = """(float[1,16,64,64] x) => (float[1,16,64,64] y) {
        a = Conv(x, w) ra = Relu(a) d = Conv<group = 16>(x, one) j = Concat<axis = 1>(ra, d)
        b = Conv(j, wide) rb = Relu(b) y = Conv(rb, w) }"""
    shapes = {"w": (16, 16, 1, 1), "wide": (16, 32, 1, 1), "one": (16, 1, 1, 1)}
    model = net(text, **{name: normal(*shape) for name, shape in shapes.items()})
    plan = planned(model, APART)
    # The network's input is made by no convolution, so that nothing spreads from it.
    assert plan.names("int8") == ("Conv_0", "Conv_4")
    assert plan.entries["Conv_2"].cause is Cause.DEPTHWISE


@pytest.mark.parametrize("batch", ["N", "2"])
def test_an_open_batch_counts_as_one_image(net, normal, batch):
    plan = planned(chain(net, normal, channels=16, size=64, batch=batch), APART)
    assert plan.entries["Conv_2"].cause is Cause.BOUND_BY_MEMORY
    assert np.isclose(float(plan.entries["Conv_2"].reason.split(" MB")[0].split()[-1]), 0.13, atol=0.005)
