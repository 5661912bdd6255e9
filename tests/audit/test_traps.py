"""What costs transformers accuracy or speed is told where an engine has it, and nowhere else."""

import warnings

import numpy as np
import onnx
import pytest
from attention import attention_config, attention_detector
from written_networks import parsed

from trtdet.audit import Audit, Layer, Tensor, audit
from trtdet.audit.findings import Finding
from trtdet.building import build
from trtdet.demo import shapes
from trtdet.errors import TrtdetWarning
from trtdet.options import BuildOptions, CalibrationOptions, PlanOptions
from trtdet.passes.provenance import put
from trtdet.quantization import place

NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[1,32,8,8] x, float[1,8,8,2] at) => (float[1,32,8,8] y, float[1,32,8,32] z) {
    c = Conv(x, k) y = GridSample(c, at)
    t = Reshape(x, shape) h = Cast<to = TYPE>(t) p = MatMul(h, w)
    m = ReduceMean<axes = [-1]>(p) d = Sub(p, m) q = Mul(d, d) v = ReduceMean<axes = [-1]>(q)
    s = Sqrt(v) n = Div(d, s) z = Cast<to = 1>(n) }"""


def network(half: bool) -> onnx.ModelProto:
    """A network whose normalisation is in FP16 or in float32."""
    constants = {"k": np.ones((32, 32, 1, 1), np.float32), "shape": np.array([1, 32, 2, 32])}
    weights = np.eye(32, dtype=np.float16 if half else np.float32)
    model = parsed(NET.replace("TYPE", "10" if half else "1"), {**constants, "w": weights}, typed=False)
    for node in model.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    put(model, {})
    return onnx.shape_inference.infer_shapes(model)


def layer(name: str, kind: str, *nodes: str) -> Layer:
    data = Tensor(f"{name}.in", kind, (1, 32, 8, 8)), Tensor(f"{name}.out", kind, (1, 32, 8, 8))
    return Layer(name, "kgen", (data[0],), (), (data[1],), nodes)


def found(model: onnx.ModelProto, *layers: Layer) -> tuple[dict[str, Finding], tuple[str, ...]]:
    done = audit(layers, place(model).plan, model)
    return {finding.kind: finding for finding in done.findings}, done.warnings


def test_a_normalisation_that_is_written_out_says_what_to_export():
    norm = layer("norm", "Float", "ReduceMean_m", "Sub_d", "Mul_q", "ReduceMean_v", "Sqrt_s", "Div_n")
    kinds, said = found(network(half=False), norm, layer("sample", "Float", "GridSample_y"))
    assert kinds["normalisation"].layer == "norm" and kinds["normalisation"].bytes == norm.bytes
    assert "in float32" in kinds["normalisation"].cause and "opset 17 or later" in kinds["normalisation"].cause
    assert "half-coordinates" not in kinds and "half-squares" not in kinds
    assert not any("squares" in warning for warning in said)


def test_in_fp16_it_is_a_warning():
    norm = layer("norm", "Half", "ReduceMean_m", "Sub_d", "Mul_q", "ReduceMean_v", "Sqrt_s", "Div_n")
    kinds, said = found(network(half=True), norm, layer("sample", "Float", "GridSample_y"))
    assert "normalisation" not in kinds and "half-coordinates" not in kinds
    assert any("'ReduceMean_m'" in warning and "no squares over 65504" in warning for warning in said)


def test_a_sample_that_a_library_chose_fp16_for_is_a_warning():
    kinds, said = found(network(half=False), layer("sample", "Half", "GridSample_y"))
    assert kinds["half-coordinates"].nodes == ("GridSample_y",)
    assert any("a fraction of a pixel off: export the model in float32" in warning for warning in said)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [False, True])
def test_rtx_attention_in_one_kernel_is_no_finding_and_in_several_one(tmp_path, asked):
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'trtdet[rtx]'")
    path = tmp_path / "model.onnx"
    onnx.save(attention_detector(), path)
    images = shapes.generate(tmp_path, "calibration", 2).images
    calibration = CalibrationOptions(rule="minmax", images=images, check_input=False)
    options = BuildOptions(
        effort="none",
        backend="tensorrt-rtx",
        sms=(86,),
        guard="off",
        calibration=calibration,
        plan=PlanOptions(int8_attention=asked),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)
        bundle = build(path, attention_config(tmp_path), tmp_path / "b", options).bundle
    findings = [one for one in Audit.load(bundle.file("audit.json")).findings if one.kind == "attention"]
    # The encoder's is one kernel; that over feature maps, whose values stand on the left, is three.
    (split,) = [one for one in findings if "/psa/Softmax" in one.nodes]
    assert ("without plan.int8_attention" in split.cause) == asked
    assert ("no kernel of this form" in split.cause) != asked
    assert asked or len(findings) == 1
