import json
from typing import Any

import numpy as np
import onnx
import pytest
from written_networks import drawn, parsed

from trtdet.audit import Audit, Layer, Tensor, audit, layers_of
from trtdet.audit.findings import Advice, Finding
from trtdet.audit.layers import parse_layers
from trtdet.audit.results import Departure
from trtdet.backends import BuildRequest, Built
from trtdet.calibration import Range, Ranges
from trtdet.errors import BackendError, BundleError
from trtdet.quantization import Entry, PrecisionPlan, QdqPlacement, insert_qdq, place, to_half

NET = """<ir_version: 8, opset_import: ["" : 13]>
net (float[1,16,32,32] x) => (float[1,16,32,32] y) {
    a = Conv<pads = [1,1,1,1]>(x, w1, b1) s = Sigmoid(a) c = Mul(a, s)
    d = Conv<pads = [1,1,1,1]>(c, w2, b2) e = Relu(d) y = Conv(e, w3, b3) }"""
NAMES = ("Conv_0", "Conv_3", "Conv_5")


def float_model() -> onnx.ModelProto:
    shapes = {"w1": (16, 16, 3, 3), "w2": (16, 16, 3, 3), "w3": (16, 16, 1, 1), "b1": (16,), "b2": (16,), "b3": (16,)}
    return parsed(NET, drawn(shapes))


def quantised(model: onnx.ModelProto, placement: QdqPlacement) -> onnx.ModelProto:
    tensors = {name: Range(4.0, -4.0, 4.0) for name in placement.activations}
    return insert_qdq(model, placement, Ranges("minmax", None, tensors, "", 1, ""))


def int8_model() -> tuple[onnx.ModelProto, QdqPlacement]:
    model = float_model()
    placement = place(model)
    return quantised(model, placement), placement


def audited(built: Built, planned: PrecisionPlan, model: onnx.ModelProto | None = None) -> Audit:
    return audit(layers_of(built), planned, model or float_model())


def plan(precision: Any) -> PrecisionPlan:
    return PrecisionPlan({name: Entry(precision, "test") for name in NAMES})


@pytest.fixture(scope="module")
def built_int8(rtx):
    return rtx.build(BuildRequest(int8_model()[0], sms=(86,)))


@pytest.fixture(scope="module")
def built_fp32(rtx):
    return rtx.build(BuildRequest(float_model(), sms=(86,)))


@pytest.mark.tensorrt
def test_every_layer_of_a_built_engine_is_read_with_its_types(built_int8):
    layers = parse_layers(built_int8.log)
    listed = [line for line in "\n".join(built_int8.log).splitlines() if line.lstrip().startswith("Name: ")]
    assert len(layers) == len([line for line in listed if "LayerType: " in line]) > 3
    convolutions = [layer for layer in layers if set(layer.onnx) & set(NAMES) and layer.input == "Int8"]
    assert {layer.weights for layer in convolutions if layer.type != "kgen"} == {"Int8"}
    assert set(NAMES) <= {name for layer in layers for name in layer.onnx}
    assert all(layer.name and layer.type for layer in layers)


@pytest.mark.tensorrt
def test_an_engine_that_keeps_its_plan_has_no_departures(built_int8, built_fp32):
    int8, fp32 = audited(built_int8, int8_model()[1].plan, int8_model()[0]), audited(built_fp32, plan("fp32"))
    assert (int8.int8, int8.fp16, int8.fp32) == (3, 0, 0)
    assert (fp32.int8, fp32.fp16, fp32.fp32) == (0, 0, 3)
    assert int8.departures == int8.warnings == fp32.departures == ()


@pytest.mark.tensorrt
def test_a_plan_that_the_engine_does_not_keep_gives_departures(built_fp32):
    mixed = PrecisionPlan({**plan("int8").entries, "Conv_3": Entry("fp32", "test")})
    found = audited(built_fp32, mixed)
    departures = [(one.name, one.planned, one.got) for one in found.departures]
    assert departures == [("Conv_0", "int8", "fp32"), ("Conv_5", "int8", "fp32")]
    assert all(one.reason.startswith("the builder chose a kernel of type ") for one in found.departures)
    assert all(one.reason.endswith("; the model has no Q/DQ pair on its input") for one in found.departures)
    assert found.warnings[0] == "'Conv_0' was planned as int8 and runs in fp32"


@pytest.mark.tensorrt
def test_compute_capability_75_takes_int8_from_every_convolution(rtx):
    model, placement = int8_model()
    found = audited(rtx.build(BuildRequest(model, sms=(75, 86))), placement.plan, model)
    assert found.int8 == 0
    assert {one.name for one in found.departures} == set(NAMES)
    assert all(one.reason.endswith(", though its input and weights are quantised") for one in found.departures)
    assert {one.nodes[0] for one in found.findings if one.kind == "float"} == set(NAMES)
    assert 75 in rtx.capabilities.sms_without_int8


@pytest.mark.tensorrt
def test_a_planned_convolution_that_is_not_in_the_engine_is_a_departure(built_fp32):
    absent = PrecisionPlan({**plan("fp32").entries, "Conv_9": Entry("fp32", "test")})
    found = audited(built_fp32, absent)
    (one,) = found.departures
    assert (one.name, one.planned, one.got) == ("Conv_9", "fp32", "unknown")
    assert "folded away or merged" in one.reason
    assert found.warnings == ("'Conv_9' was planned as fp32 and runs in unknown",)
    assert found.fp32 == len(plan("fp32").entries)


def line(name: str, kind: str, inputs: str, constants: str, outputs: str, *nodes: str, separator: str = "\x1f") -> str:
    def typed(kind: str) -> str:
        shape = "Dimensions: [1,16,32,32], Strides: [16384,1,512,16], StrideOrder: [3,0,2,1]"
        return f" {{ Name: t, {shape}, Datatype: {kind}, Format: (NHWC) Channel major format }}" if kind else ""

    metadata = separator.join(f"[ONNX Layer: {node}]" for node in nodes)
    return (
        f"Name: {name}, LayerType: {kind}, Inputs: [{typed(inputs)}], Constants: [{typed(constants)}], "
        f"Outputs: [{typed(outputs)}], TacticName: tactic, StreamId: 0, Metadata: {metadata}"
    )


def tensor(kind: str, *dims: int, name: str = "t") -> Tensor:
    return Tensor(name, kind, dims or (1, 16, 32, 32), "(NHWC) Channel major format")


def built(*lines: str) -> Built:
    return Built(b"", (86,), lines, 0.0)


@pytest.mark.parametrize("separator", ["\x1f", "\x1e", ""])
def test_a_line_becomes_a_layer_and_other_messages_do_not(separator):
    text = line("conv", "conv", "Int8", "Int8", "Float", "Conv_0", "Q_1", separator=separator)
    log = ["Parsing ONNX", f"Layers:\n{text}", "Name: odd"]
    (layer,) = parse_layers(log)
    assert (layer.name, layer.type, layer.onnx) == ("conv", "conv", ("Conv_0", "Q_1"))
    assert (layer.input, layer.weights, layer.output) == ("Int8", "Int8", "Float")
    assert layer.inputs == (tensor("Int8"),)


def test_a_layer_without_inputs_or_constants_has_empty_types():
    (layer,) = parse_layers([line("a", "constant", "", "", "Half")])
    assert (layer.inputs, layer.constants, layer.onnx) == ((), (), ())
    assert (layer.input, layer.weights, layer.output) == ("", "", "Half")


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("kind", "precision"), [("Int8", "int8"), ("Half", "fp16")])
def test_the_pointwise_kernel_beside_a_convolution_does_not_speak_for_it(order, kind, precision):
    lines = [
        line("pointwise", "kgen", "Float", "Float", "Int8", "Conv_0", "Sigmoid_1"),
        line("conv", "cutlass", kind, kind, "Float", "Conv_0"),
    ]
    found = audited(built(*lines[::order]), PrecisionPlan({"Conv_0": Entry(precision, "")}))
    counts = {"int8": 0, "fp16": 0, "fp32": 0} | {precision: 1}
    assert (found.counts(), found.departures) == (counts, ())


def test_a_log_without_layers_is_an_error():
    with pytest.raises(BackendError, match="the builder listed no layers; is the logger at VERBOSE"):
        audited(built("nothing here"), plan("int8"))


AUDIT = Audit(
    1,
    0,
    1,
    (
        Layer("a", "conv", (tensor("Int8"),), (tensor("Int8", 16, 16, 3, 3),), (tensor("Float"),), ("Conv_0",)),
        Layer("b", "kgen", (tensor("Float"),), (), (tensor("Int8"), tensor("Float")), ()),
    ),
    (Departure("Conv_3", "int8", "fp32", "why"),),
    ("look",),
    (Finding("copy", "b", ("Conv_0",), "because", 65536, 0.3, None, {"b": 65536}),),
    (Advice("--fp16", "do it", 1000, 0.1),),
)


def test_an_audit_survives_its_file(tmp_path):
    path = tmp_path / "audit.json"
    path.write_text(AUDIT.to_json())
    assert Audit.load(path) == AUDIT


def test_an_audit_as_plain_values_has_the_keys_of_the_contract():
    data = AUDIT.as_dict()
    assert {"int8", "fp16", "fp32", "layers", "departures", "warnings", "findings", "advice"} <= set(data)
    assert {"name", "type", "input", "weights", "output", "onnx"} <= set(data["layers"][0])
    assert [data["layers"][0][side] for side in ("input", "weights", "output")] == ["Int8", "Int8", "Float"]
    assert json.loads(json.dumps(data))["cost"] == "estimated memory traffic"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"schema": 2}', '{"schema": 2, "layers": [3]}', '{"schema": "2"}'),
        *("[" * 9999, '{"schema": 2, "layers": ' + "[" * 9999, AUDIT.to_json().replace('"int8": 1', '"int8": "1"')),
    ],
    ids=lambda text: text[:24],
)
def test_what_is_not_an_audit_is_an_error(tmp_path, text):
    path = tmp_path / "audit.json"
    path.write_text(text)
    with pytest.raises(BundleError, match="cannot be read .*; build the bundle again") as caught:
        Audit.load(path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_finding_of_an_unknown_kind_is_an_error(tmp_path):
    (kind, *_) = [finding.kind for finding in AUDIT.findings]
    path = tmp_path / "audit.json"
    path.write_text(AUDIT.to_json().replace(f'"kind": "{kind}"', '"kind": "odd"'))
    with pytest.raises(BundleError, match="'findings.0.kind': input should be 'float'"):
        Audit.load(path)


def test_an_audit_of_another_schema_or_none_at_all_is_an_error(tmp_path):
    path = tmp_path / "audit.json"
    path.write_text(AUDIT.to_json().replace('"schema": 2', '"schema": 1'))
    with pytest.raises(BundleError, match="was written by another version of trtdet"):
        Audit.load(path)
    with pytest.raises(BundleError, match="cannot be read"):
        Audit.load(tmp_path / "absent.json")


def test_fp8_is_counted_by_itself_and_is_no_departure_where_it_was_planned():
    layers = [
        Layer(name, "gemm", (Tensor("i", "FP8"),), (Tensor("w", "FP8"),), (Tensor("o", "Half"),), (name,))
        for name in NAMES
    ]
    planned = PrecisionPlan({name: Entry("int8", "test", format="fp8") for name in NAMES})
    found = audit(layers, planned, float_model())
    assert (found.fp8, found.int8, found.departures) == (3, 0, ())
    assert found.counts()["int8"] == 3, "of what a plan counts as INT8"
    assert found.summary.startswith("as built: 0 convs in INT8, 3 in FP8, 0 in FP16, 0 in FP32; 0 not as planned")
    (first, *_) = audit(layers, plan("int8"), float_model()).departures
    assert (first.planned, first.got) == ("int8", "fp8")


def test_a_product_inside_of_a_generated_kernel_runs_in_the_type_that_is_written():
    text = """<ir_version: 8, opset_import: ["" : 17]>
    net (int64[1,4] i, float16[1,4] x) => (float16[1,32] y) { y = MatMul(x, w) }"""
    model = parsed(text, {"w": np.ones((4, 32), np.float16)})
    planned = PrecisionPlan({"MatMul_0": Entry("fp16", "test")})
    first, second = Tensor("i", "Int64"), Tensor("x", "Half")
    for kind, inputs, got in (
        ("kgen", (first,), "fp16"),
        ("runtime_fusion", (first, second), "fp16"),
        ("gemm", (first,), "int64"),
    ):
        layers = [Layer("kernel", kind, inputs, (), (Tensor("y", "Half"),), ("MatMul_0",))]
        found = audit(layers, planned, model)
        assert [departure.got for departure in found.departures] == ([] if got == "fp16" else [got])


@pytest.mark.parametrize(("type", "got"), [("float16", "fp16"), ("float", "fp32")])
def test_a_convolution_runs_in_the_type_that_is_written_where_its_kernel_adds_a_sum(type, got):
    text = """<ir_version: 8, opset_import: ["" : 17]>
    net (TYPE[1,4,8,8] x) => (TYPE[1,4,8,8] y) { y = Conv(x, w) }"""
    values = np.ones((4, 4, 1, 1), np.float16 if type == "float16" else np.float32)
    added, read = Tensor("skip", "Float"), Tensor("x", "Half")
    layers = [Layer("kernel", "runtime_fusion", (added, read), (), (Tensor("y", "Float"),), ("Conv_0",))]
    planned = PrecisionPlan({"Conv_0": Entry("fp16", "test")})
    found = audit(layers, planned, parsed(text.replace("TYPE", type), {"w": values}))
    assert [departure.got for departure in found.departures] == ([] if got == "fp16" else [got])


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True])
def test_rtx_runs_products_in_the_eight_bits_that_were_planned(rtx, fp8):
    text = """<ir_version: 9, opset_import: ["" : 19]>
    net (float[1,64,64] x) => (float[1,64,64] y) {
        a = MatMul(x, w1) b = Add(a, b1) c = Relu(b) y = MatMul(c, w2) }"""
    model = parsed(text, drawn({"w1": (64, 128), "b1": (128,), "w2": (128, 64)}))
    placement = place(model, fp8=fp8)
    written = to_half(quantised(model, placement), placement.plan.names("int8"))
    found = audit(layers_of(rtx.build(BuildRequest(written, sms=(89,)))), placement.plan, written)
    assert (found.int8, found.fp8, found.departures) == ((0, 2, ()) if fp8 else (2, 0, ()))
