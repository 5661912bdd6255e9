"""What gets in the way of INT8, what it costs, and what the audit advises."""

import json
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import onnx
import pytest
from written_networks import drawn, parsed

from trtdet.audit import Audit, Layer, Tensor, audit, layers_of
from trtdet.audit.fp16 import InFp16
from trtdet.audit.gpus import gpu_named
from trtdet.audit.layers import parse_inspector
from trtdet.audit.roofline import estimate
from trtdet.audit.traffic import Flow
from trtdet.backends import Backend, BuildRequest
from trtdet.calibration import Range, Ranges
from trtdet.errors import ConfigError
from trtdet.passes.opset import HALF_SCALES
from trtdet.passes.provenance import Origin, origin_of, put
from trtdet.quantization import Cause, Entry, PrecisionPlan, WeightScales, insert_qdq, place, to_half
from trtdet.tables import Table

# A stem, a depthwise-separable block with a residual sum, and a head that nothing quantises
NET = """<ir_version: 8, opset_import: ["" : 13]>
net (float[1,3,64,64] x) => (float[1,20,32,32] y) {
    a = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w1, b1) s1 = Sigmoid(a) c = Mul(a, s1)
    d = Conv<pads = [1,1,1,1], group = 16>(c, w2, b2) s2 = Sigmoid(d) e = Mul(d, s2)
    f = Conv(e, w3, b3) s3 = Sigmoid(f) g = Mul(f, s3) h = Add(g, c)
    i = Conv<pads = [1,1,1,1]>(h, w4, b4) s4 = Sigmoid(i) j = Mul(i, s4)
    y = Conv(j, w5, b5) }"""
Glue = Literal["float", "half", "half, a scale a tensor"]
SHAPES = {"w1": (16, 3, 3, 3), "w2": (16, 1, 3, 3), "w3": (16, 16, 1, 1), "w4": (32, 16, 3, 3), "w5": (20, 32, 1, 1)}
STEM, DEPTHWISE, POINTWISE, LAST, HEAD = "Conv_0", "Conv_3", "Conv_6", "Conv_10", "Conv_13"


def float_model(opset: int = 13) -> onnx.ModelProto:
    shapes = {name: size for key, shape in SHAPES.items() for name, size in ((key, shape), (f"b{key[1]}", shape[:1]))}
    return parsed(NET.replace(": 13]", f": {opset}]"), drawn(shapes))


def built(backend: Backend, *kept: str, glue: Glue = "float") -> tuple[Audit, Flow]:
    """The audit of a real engine that keeps some convolutions in FP16; between the kernels, and the scales of weights,
    as ``glue`` says.
    """
    placement = place(float_model())
    entries = {name: Entry("fp16", "test") if name in kept else one for name, one in placement.plan.entries.items()}
    plan = PrecisionPlan(entries)
    ranges = Ranges("minmax", None, {name: Range(4.0, -4.0, 4.0) for name in placement.activations}, "", 1, "")
    weights = WeightScales("tensor" if glue == "half, a scale a tensor" else "channel")
    source = float_model() if glue == "float" else float_model(HALF_SCALES)
    int8 = insert_qdq(source, placement.following(plan), ranges, weights=weights)
    model = to_half(int8, kept if glue == "float" else list(entries))
    layers = layers_of(backend.build(BuildRequest(model, (86,))))
    return audit(layers, plan, model), Flow(layers, plan, model)


@pytest.fixture(scope="module")
def int8(rtx):
    return built(rtx)


@pytest.fixture(scope="module")
def half(rtx):
    glues: tuple[Glue, ...] = ("half", "half, a scale a tensor")
    return {glue: built(rtx, glue=glue) for glue in glues}


@pytest.mark.tensorrt
def test_activations_that_do_not_fuse_are_found_with_their_cause(int8):
    found = {one.nodes: one for one in int8[0].findings if one.kind == "activation"}
    assert {name for nodes in found for name in nodes} == {STEM, DEPTHWISE, POINTWISE, LAST}
    cause = found[(DEPTHWISE,)].cause
    assert cause == f"SiLU after {DEPTHWISE}: the Int8 kernel writes Float; quantised for {POINTWISE}"
    assert found[(DEPTHWISE,)].bytes == pytest.approx(32 * 32 * 16 * 5, rel=0.05)
    (quantise,) = (one for one in int8[0].findings if one.kind == "quantise")
    assert quantise.cause == f"quantises the input 'x' (Float) for {STEM}"


@pytest.mark.tensorrt
def test_the_padding_of_depthwise_convolutions_is_found_with_what_it_costs(int8):
    found = {one.nodes: one for one in int8[0].findings if one.kind == "padding"}
    assert "depthwise: 16 channels) reads 64" in found[(DEPTHWISE,)].cause
    # 48 more channels are read, written before that, and read from a constant.
    assert found[(DEPTHWISE,)].bytes == 3 * 48 * 32 * 32
    assert "(3 channels) reads 4" in found[(STEM,)].cause


@pytest.mark.tensorrt
def test_findings_never_count_more_than_a_layer_moves(int8):
    moved: dict[str, int] = {}
    for one in int8[0].findings:
        assert one.bytes == sum(one.parts.values()) > 0 and one.share == one.bytes / int8[0].bytes
        for name, part in one.parts.items():
            moved[name] = moved.get(name, 0) + part
    layers = {layer.name: layer.bytes for layer in int8[0].layers}
    assert all(moved[name] <= layers[name] for name in moved)


@pytest.mark.tensorrt
def test_advice_comes_by_what_it_saves(int8):
    advice = int8[0].advice
    assert [one.bytes for one in advice] == sorted((one.bytes for one in advice), reverse=True)
    assert {one.option for one in advice} == {"--fp16", "--keep-fp16 depthwise", f"--keep-fp16 {HEAD}"}
    assert all(one.share == one.bytes / int8[0].bytes for one in advice)
    lines = str(int8[0].report()).splitlines()
    for one in advice:
        assert any(line.split()[:2] == [f"{one.bytes / 1e6:.1f}", f"{one.share:.0%}"] for line in lines)


@pytest.mark.tensorrt
@pytest.mark.parametrize("kept", [(DEPTHWISE,), (HEAD,), (STEM, DEPTHWISE, POINTWISE, LAST, HEAD)])
def test_the_estimate_of_fp16_is_what_an_engine_with_it_moves(rtx, int8, kept):
    assert InFp16(int8[1], kept).bytes == pytest.approx(built(rtx, *kept)[0].bytes, rel=0.03)
    assert InFp16(int8[1], kept).bytes < int8[1].bytes
    assert InFp16(int8[1], []).bytes == int8[1].bytes


@pytest.mark.tensorrt
@pytest.mark.parametrize("glue", ["half", "half, a scale a tensor"])
@pytest.mark.parametrize("kept", [(DEPTHWISE,), (STEM, DEPTHWISE, HEAD), (STEM, DEPTHWISE, POINTWISE, LAST, HEAD)])
def test_the_estimate_of_fp16_holds_with_fp16_between_the_kernels(rtx, half, glue, kept):
    assert half[glue][1].float_bytes == 2
    done = built(rtx, *kept, glue=glue)[1]
    assert InFp16(half[glue][1], kept).bytes == pytest.approx(done.bytes, rel=0.03)
    slow = replace(gpu_named("Jetson AGX Orin"), bandwidth=2.0)  # so slow that the time is not that of the launches
    assert estimate(half[glue][1], slow, fp16=kept).ms == pytest.approx(estimate(done, slow).ms, rel=0.03)


@pytest.mark.tensorrt
def test_every_convolution_that_writes_float32_is_named_with_its_cause(int8, half):
    def causes(found: tuple[Audit, Flow]) -> dict[str, str]:
        return {one.nodes[0]: one.cause for one in found[0].findings if one.kind == "float-output"}

    assert causes(int8).keys() == causes(half["half"]).keys() == {STEM, DEPTHWISE, POINTWISE, LAST, HEAD}
    scales = f"{LAST} (Int8) writes Float: its kernel leaves the 32 scales of its weights, one a channel, to the next"
    assert causes(int8)[LAST] == f"{scales}, and the model is float32 after it"
    assert causes(half["half"])[LAST] == scales
    assert causes(half["half"])[HEAD].endswith(", and an output of the engine that it gives is float32")
    assert causes(half["half, a scale a tensor"]) == {}


@pytest.mark.tensorrt
def test_advice_and_findings_with_fp16_between_the_kernels(half):
    found = half["half, a scale a tensor"][0]
    activations = {one.nodes: one.cause for one in found.findings if one.kind == "activation"}
    cause = f"SiLU after {DEPTHWISE}: the Int8 kernel writes Half; quantised for {POINTWISE}"
    assert activations[(DEPTHWISE,)] == cause
    # The head's kernel writes FP16 already, of which an FP16 convolution would write no less.
    assert {one.option for one in found.advice} == {"--fp16", "--keep-fp16 depthwise"}


@pytest.mark.tensorrt
def test_advice_keeps_what_is_in_fp16_already_until_nothing_is_left_to_gain(rtx):
    options = [one.option for one in built(rtx, DEPTHWISE)[0].advice]
    assert any(option.startswith("--keep-fp16 depthwise,") for option in options)
    assert "--keep-fp16 depthwise" not in options
    found, _ = built(rtx, STEM, DEPTHWISE, POINTWISE, LAST, HEAD)
    assert found.advice == ()
    assert not [one for one in found.findings if one.kind == "activation"]


WIDE = "Thirty-two wide channel vectorized row major Int8 format"
LINEAR = "Row major linear FP32"
HALF = "Channel major FP16 format where channel % 8 == 0"


def tensor(name: str, form: str = WIDE, channels: int = 32) -> dict[str, Any]:
    return {"Name": name, "Location": "Device", "Dimensions": [1, channels, 32, 32], "Format/Datatype": form}


def layer(name: str, kind: str, inputs: list[Any], outputs: list[Any], **more: Any) -> dict[str, Any]:
    return {"Name": name, "LayerType": kind, "Inputs": inputs, "Outputs": outputs, **more}


QDQ = """<ir_version: 8, opset_import: ["" : 13]>
net (float[1,32,32,32] x) => (float[1,32,32,32] y) {
    q = QuantizeLinear(x, s, z) dq = DequantizeLinear(q, s, z)
    wq = QuantizeLinear<axis = 0>(w, s, z) wd = DequantizeLinear<axis = 0>(wq, s, z)
    a = Conv(dq, wd) b = Sigmoid(a) c = Mul(a, b)
    r = QuantizeLinear(c, s, z) dr = DequantizeLinear(r, s, z)
    d = Conv(dr, wd) e = Relu(d) y = Softmax(e) }"""
FIRST, SECOND = "Conv_4", "Conv_9"
PLAN = PrecisionPlan({FIRST: Entry("int8", "test"), SECOND: Entry("int8", "test")})
QUANTISE = layer("QuantizeLinear_0", "Reformat", [tensor("x", LINEAR)], [tensor("q")], Origin="QDQ")
ACTIVATION = "PWN(PWN(Sigmoid_5), Mul_6)"
DEQUANTISE = "Reformatting CopyNode for Input Tensor 0 to Softmax_11"


def qdq_model(weights: tuple[int, ...] = (32, 32, 1, 1)) -> onnx.ModelProto:
    values = {"w": np.ones(weights, np.float32), "s": np.float32(0.1), "z": np.int8(0)}
    return parsed(QDQ, values, typed=False)


def written(*names: str, origin: Origin = Origin.NMS) -> onnx.ModelProto:
    """With further nodes, which trtdet wrote."""
    model = qdq_model()
    for name in names:
        model.graph.node.append(onnx.helper.make_node("Identity", ["y"], [name], name=name))
    put(model, dict.fromkeys(names, origin))
    return model


def seen(
    *layers: dict[str, Any], plan: PrecisionPlan = PLAN, model: onnx.ModelProto | None = None, **more: Any
) -> Audit:
    return audit(parse_inspector(json.dumps({"Layers": list(layers)})), plan, model or qdq_model(), **more)


def conv(name: str, given: str | dict[str, Any], taken: dict[str, Any]) -> dict[str, Any]:
    read = tensor(given) if isinstance(given, str) else given
    return layer(f"w + {name}", "CaskConvolution", [read], [taken], Weights={"Type": "Int8", "Count": 1024})


def unfused() -> tuple[dict[str, Any], ...]:
    """An INT8 convolution whose SiLU and quantising are kernels of their own, and whose end is dequantised."""
    return (
        QUANTISE,
        conv(FIRST, "q", tensor("a", HALF)),
        layer(ACTIVATION, "PointWiseV2", [tensor("a", HALF)], [tensor("c", HALF)]),
        layer("QuantizeLinear_7", "Reformat", [tensor("c", HALF)], [tensor("r")], Origin="QDQ"),
        conv(f"{SECOND} + PWN(Relu_10)", "r", tensor("e")),
        layer(DEQUANTISE, "Reformat", [tensor("e")], [tensor("f", LINEAR)]),
        layer("Softmax_11", "CudaSoftMax", [tensor("f", LINEAR)], [tensor("y", LINEAR)]),
    )


def test_kernels_that_only_change_the_type_are_found_with_producer_and_consumer():
    found = {one.layer: (one.kind, one.cause) for one in seen(*unfused()).findings}
    assert found["QuantizeLinear_0"] == ("quantise", f"quantises the input 'x' (Float) for {FIRST}")
    assert found["QuantizeLinear_7"] == ("quantise", f"quantises the output of Sigmoid_5 (Half) for {SECOND}")
    cause = f"dequantises the output of {SECOND} (Int8) for Softmax_11 (Float), "
    assert found[DEQUANTISE] == ("dequantise", f"{cause}which runs in float: the model has no Q/DQ pair before it")
    assert found[ACTIVATION][1] == f"SiLU after {FIRST}: the Int8 kernel writes Half"


def test_a_reader_that_the_model_has_no_node_for_is_named_only_where_there_is_no_other():
    moved = layer("Reformatting CopyNode for Output Tensor 0", "Reformat", [tensor("q")], [tensor("q2")])
    for more, reader in (([conv(FIRST, "q", tensor("a", HALF))], FIRST), ([], moved["Name"])):
        (one,) = (one for one in seen(QUANTISE, moved, *more).findings if one.kind == "quantise")
        assert one.cause == f"quantises the input 'x' (Float) for {reader}"


def test_the_constant_that_fills_channels_up_is_counted_from_the_first_channel_on():
    flow = Flow((), PLAN, qdq_model())
    # 20 of 32 channels are the model's: a constant fills up the other 12.
    constants = tuple(Tensor("fill", "Int8", (1, channels, 32, 32)) for channels in (12, 20))
    writer = Layer("w", "PointWiseV2", (), constants, (), ())
    padded = Tensor("q", "Int8", (1, 32, 32, 32))
    assert flow.filling(writer, padded, 32 / 20) == 12 * 1024
    assert flow.filling(writer, padded, 1.0) == 0


def test_a_fused_engine_has_neither_findings_nor_advice_beyond_its_input():
    fused = f"{FIRST} + PWN(PWN(Sigmoid_5), Mul_6)"
    found = seen(QUANTISE, conv(fused, "q", tensor("r")), conv(f"{SECOND} + PWN(Relu_10)", "r", tensor("e")))
    assert [(one.kind, one.layer) for one in found.findings] == [("quantise", "QuantizeLinear_0")]
    assert found.advice == ()


def test_a_change_of_layout_alone_is_a_reformat():
    plain = tensor("r2", "Row major Int8 format")
    copy = layer("Reformatting CopyNode for Input Tensor 0 to Conv_9", "Reformat", [tensor("r")], [plain])
    (one,) = seen(conv(FIRST, "q", tensor("r")), copy, conv(SECOND, "r2", tensor("e"))).findings
    assert (one.kind, one.bytes) == ("reformat", 2 * 32 * 1024)
    assert one.cause == f"moves the output of {FIRST} (Int8) for {SECOND} ({WIDE} to Row major Int8 format)"


def test_a_layer_is_named_after_the_nodes_of_the_model_before_those_that_were_written_for_int8():
    model = qdq_model()
    put(model, {"Sigmoid_5": Origin.QDQ})
    flow = Flow((), PLAN, model)
    both = Layer("kernel", "kgen", (), (), (), ("Sigmoid_5", "Mul_6"))
    assert flow.named(both) == ("Mul_6",)
    assert flow.named(replace(both, onnx=("Sigmoid_5",))) == ("Sigmoid_5",)
    assert flow.named(replace(both, onnx=())) == ("kernel",)


def float_outputs_of(*layers: Any, **more: Any) -> list[tuple[str, int]]:
    """Causes and bytes of the convolutions that write float32."""
    return [(one.cause, one.bytes) for one in seen(*layers, **more).findings if one.kind == "float-output"]


def test_a_convolution_whose_scales_stay_in_its_kernel_writes_float32_for_what_follows_in_the_model():
    after = layer("Relu_10", "PointWiseV2", [tensor("r", LINEAR)], [tensor("e")])
    typed = onnx.shape_inference.infer_shapes(qdq_model())
    (found,) = float_outputs_of(QUANTISE, conv(FIRST, "q", tensor("r", LINEAR)), after, model=typed)
    assert found == (f"{FIRST} (Int8) writes Float: the model is float32 after it", 2 * 32 * 1024)
    (found,) = float_outputs_of(QUANTISE, conv(FIRST, "q", tensor("r", LINEAR)), after)
    assert found[0] == f"{FIRST} (Int8) writes Float: the builder chose such a kernel"

    overflow = Entry("int8", "convolution", Cause.QUANTIZABLE, float_output="values up to 90000 exceed FP16")
    plan = PrecisionPlan({**PLAN.entries, FIRST: overflow})
    (found,) = float_outputs_of(QUANTISE, conv(FIRST, "q", tensor("r", LINEAR)), after, plan=plan)
    assert found[0].startswith(f"{FIRST} (Int8) writes Float: values up to 90000 exceed FP16")
    (found,) = float_outputs_of(QUANTISE, conv(SECOND, "q", tensor("e", LINEAR)))
    assert found[0] == f"{SECOND} (Int8) writes Float: it is an output of the engine"


def test_a_copy_that_nothing_reads_is_no_cause_of_float32():
    model = qdq_model()
    model.graph.node.append(onnx.helper.make_node("Identity", ["a"], ["unread"], name="copy"))
    (found,) = float_outputs_of(conv(FIRST, "q", tensor("r", LINEAR)), conv(SECOND, "r", tensor("e")), model=model)
    assert found[0] == f"{FIRST} (Int8) writes Float: the builder chose such a kernel"


def test_a_convolution_that_runs_in_float_itself_is_counted_once():
    fallen = conv(FIRST, tensor("q", HALF), tensor("r", LINEAR))
    found = seen(fallen, conv(SECOND, "r", tensor("e"))).findings
    spent = sum(one.parts.get(fallen["Name"], 0) for one in found)
    assert {one.kind for one in found if FIRST in one.nodes} >= {"float", "float-output"}
    assert spent == next(one.bytes for one in found if one.kind == "float")


def test_the_plugin_is_advised_only_where_the_backend_takes_it():
    assert not [one for one in seen(*unfused()).advice if one.option == "--silu plugin"]
    (one,) = (one for one in seen(*unfused(), silu=("plugin", "keep")).advice if one.option == "--silu plugin")
    assert one.bytes == 2 * 32 * 1024  # the input of the activation is written and read in INT8 instead of FP16


def test_a_cast_names_the_convolution_that_the_plan_keeps():
    kept = PrecisionPlan({**PLAN.entries, SECOND: Entry("fp16", "sensitive")})
    after = conv(SECOND, tensor("h", HALF), tensor("e", HALF))
    cast = layer("Cast_1", "Cast", [tensor("r")], [tensor("h", HALF)])
    (one,) = seen(conv(FIRST, "q", tensor("r")), cast, after, plan=kept).findings
    assert one.cause.endswith(f"for {SECOND} (Half), which the plan has in FP16 (sensitive)")


def test_a_vectorised_format_pads_channels_whose_writer_is_counted_once_however_many_read_it():
    few = tensor("q", channels=20)
    quantise = layer("QuantizeLinear_0", "Reformat", [tensor("x", LINEAR, 20)], [few])
    readers = [conv(name, few, tensor(f"{name} out")) for name in (FIRST, SECOND)]
    (one,) = seen(readers[0], model=qdq_model((32, 20, 1, 1))).findings
    assert (one.kind, one.bytes) == ("padding", 12 * 1024)
    assert one.cause == f"{FIRST} (20 channels) reads 32, as its Int8 kernel takes them"
    padding = [
        one for one in seen(quantise, *readers, model=qdq_model((32, 20, 1, 1))).findings if one.kind == "padding"
    ]
    assert sorted(one.nodes for one in padding) == [(FIRST,), (SECOND,)]
    # Each convolution reads 12 channels too many, and they are written once.
    assert sum(one.parts.get("QuantizeLinear_0", 0) for one in padding) == 12 * 1024
    assert sum(one.bytes for one in padding) == 3 * 12 * 1024


@pytest.mark.parametrize(
    ("kind", "weights", "groups", "depthwise"),
    [
        *(("Conv", (32, 1), 32, True), ("Conv", (32, 8), 4, False), ("Conv", (32, 32), 1, False)),
        *(("ConvTranspose", (16, 32), 1, False), ("ConvTranspose", (16, 8), 4, False)),
        ("ConvTranspose", (16, 1), 16, True),
    ],
)
def test_channels_and_groups_are_read_off_the_weights(kind, weights, groups, depthwise):
    model = qdq_model((*weights, 1, 1))
    (node,) = (node for node in model.graph.node if node.name == FIRST)
    node.op_type = kind
    node.attribute.append(onnx.helper.make_attribute("group", groups))
    layers = parse_inspector(json.dumps({"Layers": [conv(FIRST, "q", tensor("r"))]}))
    found = Flow(layers, PLAN, model).convolutions[FIRST]
    assert (found.channels, found.depthwise) == (weights[0], depthwise)


def test_a_convolution_that_fell_back_to_float_is_a_finding_with_its_cost():
    found = seen(conv(FIRST, tensor("x", LINEAR), tensor("a", LINEAR)))
    (one,) = (one for one in found.findings if one.kind == "float")
    assert (one.nodes, one.cause) == ((FIRST,), f"{FIRST} reads Float, not Int8")
    assert one.share == 1.0
    assert "runs in fp32" in found.warnings[0]


def test_a_quadratic_suppression_is_advised_against():
    square = {"Name": "m", "Location": "Device", "Dimensions": [1, 1000, 1000], "Format/Datatype": "Float"}
    step = layer("nms", "kgen", [square], [tensor("k", LINEAR, 1)], Metadata="[ONNX Layer: nms/MatMul_1]")
    found = seen(conv(FIRST, "q", tensor("r")), step, model=written("nms/MatMul_1"))
    assert found.findings[0].kind == "suppression"
    assert [(one.option, one.bytes) for one in found.advice] == [("--set nms.pre_nms_topk=500", 3_000_000)]


@pytest.mark.parametrize(
    ("nodes", "suppresses"),
    [
        (("nms/a", "nms/b", "Softmax_11"), True),
        (("nms/a", "Softmax_11"), False),
        (("nms/a", "Softmax_11", "Relu_10"), False),
        (("nms/a", "QuantizeLinear_0", "DequantizeLinear_1"), True),
        (("trtdet/nms/own",), False),
    ],
)
def test_a_layer_belongs_to_the_suppression_where_most_of_its_nodes_do(nodes, suppresses):
    model = written("nms/a", "nms/b")
    put(model, {**origin_of(model), "QuantizeLinear_0": Origin.QDQ, "DequantizeLinear_1": Origin.CHANNEL_MAP})
    metadata = "\x1f".join(f"[ONNX Layer: {name}]" for name in nodes)
    mixed = layer("mixed", "kgen", [tensor("m", LINEAR)], [tensor("k", LINEAR)], Metadata=metadata)
    found = seen(conv(FIRST, "q", tensor("r")), mixed, model=model)
    assert ("suppression" in {one.kind for one in found.findings}) is suppresses


def test_weights_that_are_not_constant_are_no_obstacle():
    model = qdq_model()
    del model.graph.initializer[:]
    found = audit(parse_inspector(json.dumps({"Layers": list(unfused())})), PLAN, model)
    assert (found.int8, found.departures) == (2, ())


def test_an_unknown_data_type_is_a_warning_and_not_counted():
    odd = Layer("a", "kgen", (Tensor("x", "Posit8", (1, 8, 4, 4)),), (), (Tensor("y", "Half", (1, 8, 4, 4)),), ())
    found = audit([odd], PrecisionPlan({}), qdq_model())
    assert found.warnings == ("the size of data type Posit8 is not known, so its bytes are not counted",)
    assert found.bytes == 2 * 128


def test_measured_times_replace_the_estimated_shares():
    times = {one["Name"]: 0.0 for one in unfused()[:-1]}
    times |= {"QuantizeLinear_0": 0.3, f"w + {FIRST}": 0.1, ACTIVATION: 0.5, "of another thing": 9.0}
    found = seen(*unfused(), times=times)
    assert (found.cost, found.ms) == ("measured time", pytest.approx(0.9))
    assert [(one.layer, one.ms) for one in found.findings[:2]] == [(ACTIVATION, 0.5), ("QuantizeLinear_0", 0.3)]
    assert found.findings[0].share == pytest.approx(5 / 9)
    assert found.warnings == ("1 layers have no measured time, such as 'Softmax_11'",)
    assert "by measured time (0.900 ms in all)" in found.report().text() and found.warnings[0] in found.report().text()


def test_the_time_of_a_layer_is_shared_out_among_its_findings():
    outputs = [tensor("c", HALF), tensor("c8")]
    both = layer(ACTIVATION, "PointWiseV2", [tensor("a", HALF)], outputs)
    times = {f"w + {FIRST}": 1.0, ACTIVATION: 5.0}
    found = seen(conv(FIRST, "q", tensor("a", HALF)), both, times=times)
    parts = {one.kind: (one.bytes, one.ms) for one in found.findings}
    # It reads and writes 2 bytes of each value, and writes 1 more: 2 of these 5 are the copy.
    assert parts == {"copy": (2 * 32 * 1024, pytest.approx(2.0)), "activation": (3 * 32 * 1024, pytest.approx(3.0))}
    assert sum(one.share for one in found.findings) == pytest.approx(5 / 6)


@pytest.mark.parametrize("times", [{}, {"elsewhere": 1.0}, {"QuantizeLinear_0": 1.0, "elsewhere": 1.0}])
def test_times_of_another_engine_are_an_error(times):
    with pytest.raises(ConfigError, match=r"of another engine: [67] of this one's 7 layers have none, such as"):
        seen(*unfused(), times=times)


def test_a_report_shows_three_of_each_kind_unless_all_are_asked_for():
    copies = [
        layer(f"Reformatting CopyNode for Input Tensor {index} to {FIRST}", "Reformat", [tensor("a")], [tensor("b")])
        for index in range(5)
    ]
    found = seen(*copies, plan=PrecisionPlan({}))
    (short,), (full,) = (found.report(everything).parts for everything in (False, True))
    assert isinstance(short, Table) and isinstance(full, Table)
    assert short.title == "what gets in the way, by estimated memory traffic (0.3 MB in all):"
    said = [row[-1] for row in short.rows]
    assert said[0] == "kernels that only move data or change its layout (5)"
    assert len(said) == 5 and said[-1] == "  2 more; --all shows them"
    assert len(full.rows) == 6 and not any("--all" in str(row[-1]) for row in full.rows)
    assert short.rows[0][:2] == full.rows[0][:2] == pytest.approx((5 * 65536 / 1e6, 1.0))


def test_a_report_of_nothing_says_so():
    text = seen(conv(FIRST, "q", tensor("r")), plan=PrecisionPlan({})).report().text()
    assert text.startswith("nothing gets in the way")
