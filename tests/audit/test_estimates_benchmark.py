"""The layers that the benchmark of estimates derives from a model, and the rows that it takes and leaves out."""

import numpy as np
import onnx
import pytest
from written_networks import parsed

from trtdet.audit.gpus import gpu_named

NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[1,3,32,32] x) => (float[1,32,16,16] y, float[1,16,32,32] z) {
    a = Conv<pads = [1,1,1,1]>(x, w1) s = Sigmoid(a) b = Mul(a, s)
    c = Conv<pads = [1,1,1,1]>(b, w2) t = Relu(c) d = Add(t, b)
    e = Concat<axis = 1>(b, d)
    p = MaxPool<kernel_shape = [2,2], strides = [2,2]>(e)
    y = Conv(p, w3)
    f = Exp(d) z = Mul(f, d) }"""
SHAPES = {"w1": (16, 3, 3, 3), "w2": (16, 16, 3, 3), "w3": (32, 32, 1, 1)}
FIRST, SECOND, LAST = "Conv_0", "Conv_3", "Conv_8"


@pytest.fixture
def plan(benchmark):
    model = parsed(NET, {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()})
    return benchmark.FusedPlan(model)


def test_activations_and_sums_are_fused_and_views_are_free(plan):
    assert plan.convolutions == [FIRST, SECOND, LAST]
    assert plan.quantised == [FIRST, SECOND], "the last gives an output of the engine"
    flow = plan.flow()
    kernels = {layer.onnx: layer for layer in flow.layers if layer.onnx}
    assert list(kernels) == [
        *((FIRST, "Sigmoid_1", "Mul_2"), (SECOND, "Relu_4", "Add_5"), (LAST,)),
        *(("MaxPool_7",), ("Exp_9", "Mul_10")),
    ]
    assert [tensor.name for tensor in kernels[SECOND, "Relu_4", "Add_5"].inputs] == ["b"], "the skip is its input too"
    converted = [layer.name for layer in flow.layers if not layer.onnx]
    assert converted == ["convert image", "convert y", "convert z"]
    assert {layer.input for layer in kernels.values()} == {"Half"}


def test_a_tensor_that_float_kernels_read_too_is_quantised_by_a_kernel(plan):
    flow = plan.flow([FIRST, SECOND, LAST])
    outputs = {tensor.name: tensor.type for layer in flow.layers for tensor in layer.outputs}
    # What the first convolution makes is read in INT8 only; what the second makes is read by Exp too.
    assert outputs["b Int8"] == "Int8" and "b" not in outputs
    assert outputs["d"] == "Half" and outputs["d Int8"] == "Int8"
    assert [layer.name for layer in flow.layers if layer.name.startswith("convert q")] == ["convert quantised d"]
    pool = next(layer for layer in flow.layers if layer.type == "MaxPool")
    assert {tensor.type for tensor in (*pool.inputs, *pool.outputs)} == {"Int8"}
    only = plan.flow([FIRST])
    assert {layer.input for layer in only.layers if layer.type == "CaskConvolution"} == {"Int8", "Half"}


def test_rows_without_a_gpu_or_of_a_whole_predictor_are_left_out(benchmark, tmp_path, plan):
    model = parsed(NET, {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()})
    onnx.save(model, tmp_path / "yolov8n-640.onnx")
    table = tmp_path / "latencies.csv"
    header = "model,input,batch,gpu,ms_fp16,ms_int8,how\n"
    table.write_text(
        header + "YOLOv8n,640,8,Tesla T4,3.0,2.0,ultralytics' own timing\n"
        "YOLOv8n,640,1,,3.0,2.0,trtexec\nYOLOv8n,640,1,T4,3.0,2.0,times of the whole predictor\n"
        "YOLOv8n,640,1,GTX 1080,3.0,2.0,\nYOLOv8n,640,1,T4,3.0,,\nother,640,1,T4,3.0,2.0,\n"
    )
    row, *left_out = benchmark.detectors([table], tmp_path)
    assert (row.gpu.name, row.batch, row.ms) == ("T4", 8, (3.0, 2.0))
    assert row.extra_ms == pytest.approx(8 * benchmark.PREDICTOR_MS)
    reasons = ["no GPU", "whole predictor", "no figures are known of GPU 'GTX 1080'", "missing", "not at hand"]
    assert len(left_out) == len(reasons)
    assert all(reason in each.reason for each, reason in zip(left_out, reasons, strict=True))
    half, fast = row.estimated(gpu_named("T4"))
    assert half > row.extra_ms and fast > row.extra_ms
    assert benchmark.detector_table([row]).rows[0][:4] == ("YOLOv8n", "T4", 8, 3.0)
