"""Layers as the builder's log and the engine inspector tell them."""

import json
from typing import Any

import pytest

from trtdet.audit import Layer, Tensor, layers_of, load_times
from trtdet.audit.layers import parse_inspector, parse_layers
from trtdet.backends import Built
from trtdet.errors import BackendError, ConfigError

# As TensorRT-RTX 1.7.1 wrote it for YOLOX-nano.
LINE = (
    "Name: __myl_MulAddSiluMulMinMaxRounCastReshConcResh_myl0_9, LayerType: kgen, "
    "Inputs: [ { Name: arg_3, Dimensions: [1,16,208,208], Strides: [692224,1,3328,16], StrideOrder: [3,0,2,1], "
    "Datatype: Float, Format: (NHWC) Channel major format }], "
    "Constants: [ { Name: const_1, Dimensions: [1,16,3,208,208], Strides: [2076672,3,1,9984,48], "
    "StrideOrder: [4,1,0,3,2], Datatype: Int8, Format: (Arbitrary) Format with stride order = [4,1,0,3,2] }, "
    "{ Name: lit, Dimensions: [1], Strides: [1], StrideOrder: [0], Datatype: Float, Format: (Linear) Row major "
    "linear format }], Outputs: [ { Name: before_bias.1, Dimensions: [1,64,208,208], Strides: [2768896,1,13312,64], "
    "StrideOrder: [3,0,2,1], Datatype: Int8, Format: (NHWC) Channel major format }], TacticName: tactic, StreamId: 0, "
    "Metadata: [ONNX Layer: Conv_41]\x1f[ONNX Layer: Sigmoid_42]\x1f[ONNX Layer: Mul_43]"
)


def entry(**more: Any) -> dict[str, Any]:
    """A layer of a sample engine in NVIDIA/TensorRT, release/10.16, tools/experimental/trt-engine-explorer,
    tests/inputs/mobilenet.qat.onnx.engine.graph.json."""
    data = {
        "Name": "features.1.conv.1.weight + QuantizeLinear_42 + Conv_46",
        "LayerType": "CaskConvolution",
        "Inputs": [described("351", [1, 32, 112, 112])],
        "Outputs": [described("365", [1, 16, 112, 112])],
        "ParameterType": "Convolution",
        "Groups": 1,
        "Weights": {"Type": "Int8", "Count": 512},
        "Bias": {"Type": "Float", "Count": 16},
        "TacticName": "sm75_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32_nchw_vect_c_32",
    }
    return {**data, **more}


def described(
    name: str, dims: list[int], form: str = "Thirty-two wide channel vectorized row major Int8 format"
) -> dict[str, Any]:
    return {"Name": name, "Location": "Device", "Dimensions": dims, "Format/Datatype": form}


def inspected(*layers: Any, **more: Any) -> tuple[Layer, ...]:
    return parse_inspector(json.dumps({"Layers": list(layers), "Bindings": ["input1", "1179"], **more}))


def test_a_line_of_the_log_gives_every_tensor():
    (layer,) = parse_layers(["first\n" + LINE])
    assert layer.inputs == (Tensor("arg_3", "Float", (1, 16, 208, 208), "(NHWC) Channel major format"),)
    assert [(one.type, one.elements) for one in layer.constants] == [("Int8", 3 * 16 * 208 * 208), ("Float", 1)]
    assert layer.outputs[0].dims == (1, 64, 208, 208)
    assert layer.onnx == ("Conv_41", "Sigmoid_42", "Mul_43")
    assert layer.bytes == 208 * 208 * (4 * 16 + 48 + 64) + 4


def test_the_same_part_listed_twice_is_read_once():
    tensor = Tensor("x", "Half", (1, 8, 4, 4))
    assert Layer("a", "kgen", (tensor, tensor), (), (), ()).bytes == tensor.bytes == 256


@pytest.mark.parametrize("kind", ["NoOp", "signal", "wait", "Constant"])
def test_what_starts_no_kernel_moves_nothing(kind):
    assert Layer("a", kind, (Tensor("x", "Half", (1, 8)),), (), (), ()).bytes == 0


# With texts of formats that trtdet's source names, tools/experimental/trt-engine-explorer/trex/activations.py
@pytest.mark.parametrize(
    ("form", "kind", "step"),
    [
        ("Row major Int8 format", "Int8", 1),
        ("Row major linear FP32", "Float", 1),
        ("Row major linear FP16 format", "Half", 1),
        ("Row major linear BOOL", "Bool", 1),
        ("Row major linear BFloat16 format", "BFloat16", 1),
        ("Row major linear FP8 format", "FP8", 1),
        ("Channel major FP16 format where channel % 8 == 0", "Half", 8),
        ("Channel major INT8 format where channel % 16 == 0", "Int8", 16),
        ("Thirty-two wide channel vectorized row major Int8 format", "Int8", 32),
        ("Four wide channel vectorized row major FP32 format", "Float", 4),
        ("Two wide channel vectorized row major FP16 format", "Half", 2),
        ("Half", "Half", 1),
        ("FP4E2M1", "FP4", 1),
        ("Unknown format", "Unknown format", 1),
    ],
)
def test_a_text_of_type_and_format_is_read(form, kind, step):
    (layer,) = inspected(entry(Inputs=[described("x", [1, 20, 10, 10], form)]))
    assert (layer.input, layer.inputs[0].step) == (kind, step)
    assert layer.inputs[0].elements == -(-20 // step) * step * 100


def test_an_engine_of_tensorrt_8_6_has_nodes_in_names_and_counted_weights():
    (layer,) = inspected(entry())
    assert layer.onnx == ("features.1.conv.1.weight", "QuantizeLinear_42", "Conv_46")
    assert (layer.type, layer.input, layer.weights, layer.output) == ("CaskConvolution", "Int8", "Int8", "Int8")
    assert layer.bytes == 112 * 112 * (32 + 32) + 512 + 4 * 16


def test_fused_pointwise_nodes_are_found_in_the_name():
    name = "/model.1/conv/Conv + PWN(PWN(/model.1/act/Sigmoid), /model.1/act/Mul)"
    (layer,) = inspected(entry(Name=name))
    assert layer.onnx == ("/model.1/conv/Conv", "/model.1/act/Sigmoid", "/model.1/act/Mul")


def test_metadata_says_the_nodes_where_there_is_some():
    (layer,) = inspected(entry(Metadata="[ONNX Layer: Conv_46]\x1e[ONNX Layer: QuantizeLinear_42]"))
    assert layer.onnx == ("Conv_46", "QuantizeLinear_42")


def test_a_reformatting_copy_is_not_the_layer_it_serves():
    name = "Reformatting CopyNode for Input Tensor 0 to GlobalAveragePool_843"
    (layer,) = inspected(entry(Name=name, LayerType="Reformat", Origin="REFORMAT", Weights=None, Bias=None))
    assert (layer.onnx, layer.constants) == ((), ())


def test_other_profiles_are_left_out():
    assert len(inspected(entry(), entry(Name="Conv_46 [profile 1]"))) == 1


# The keys of NVIDIA/TensorRT, release/11.1, analyze-data.schema.json, and of the documentation's page on the migration
ELEVEN = {
    "Name": "Conv_44_myl0_10",
    "LayerType": "correlation",
    "Inputs": [
        {"Name": "before_bias.1", "Dimensions": [1, 64, 208, 208], "Strides": [2768896, 1, 13312, 64]}
        | {"StrideOrder": [3, 0, 2, 1], "Datatype": "Int8", "Format": "(NHWC) Channel major format"}
    ],
    "Constants": [{"Name": "dconst", "Dimensions": [16, 4, 3, 3], "Datatype": "Int8", "Format": "(NHWC)"}],
    "Outputs": [{"Name": "bb1_5", "Dimensions": [1, 16, 104, 104], "Datatype": "Float", "Format": None}],
    "TacticName": "__myelin_CASK_STUB",
    "StreamId": 0,
    "Metadata": "[ONNX Layer: Conv_44]",
}


@pytest.mark.parametrize("key", ["Datatype", "DataType"])
def test_an_engine_of_tensorrt_11_says_type_and_format_apart(key):
    text = json.dumps({"Layers": [ELEVEN], "I/O Tensors": []}).replace("Datatype", key)
    (layer,) = parse_inspector(text)
    assert (layer.input, layer.weights, layer.output, layer.onnx) == ("Int8", "Int8", "Float", ("Conv_44",))
    assert layer.inputs[0].format == "(NHWC) Channel major format" and layer.outputs[0].format == ""
    assert layer.bytes == 64 * 208 * 208 + 16 * 4 * 9 + 4 * 16 * 104 * 104


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Layers:", "is not JSON .*; ask it for LayerInformationFormat.JSON"),
        ("[]", "has no list 'Layers', but: list"),
        ('{"layers": [], "b": 1}', "has no list 'Layers', but: b, layers"),
        ('{"Layers": ["Conv_0", "Relu_1"]}', "names of layers only; build it with profiling verbosity DETAILED"),
        (
            '{"Layers": [{"name": "a", "kind": "b"}]}',
            "an entry has name, kind; known are the schemas of TensorRT 8.6 and 10",
        ),
        ('{"Layers": [3]}', "an entry has 3;"),
        (
            '{"Layers": [{"Name": "a", "LayerType": "b", "Inputs": [{"Name": "x", "Dimensions": [1], "dtype": 1}], '
            '"Outputs": []}]}',
            "a tensor has Name, Dimensions, dtype; known",
        ),
    ],
)
def test_another_schema_is_an_error_with_the_keys_met(text, message):
    with pytest.raises(BackendError, match=message):
        parse_inspector(text)


def test_the_inspector_is_believed_before_the_log():
    inspected = json.dumps({"Layers": [entry()]})
    assert [one.type for one in layers_of(Built(b"", (90,), (LINE,), 0.0, inspected))] == ["CaskConvolution"]
    assert [one.type for one in layers_of(Built(b"", (86,), (LINE,), 0.0))] == ["kgen"]


# What trtexec --exportProfile writes
def test_times_are_read_from_a_profile_or_an_object(tmp_path):
    profile, plain = tmp_path / "profile.json", tmp_path / "times.json"
    row = {"name": "Conv_46", "timeMs": 12.5, "averageMs": 0.0125, "medianMs": 0.012, "percentage": 3.1}
    profile.write_text(json.dumps([{"count": 1000}, row]))
    plain.write_text('{"Conv_46": 0.0125}')
    assert load_times(profile) == load_times(plain) == {"Conv_46": 0.0125}


@pytest.mark.parametrize(
    "text",
    [None, "", "3", '[{"name": "a"}]', '{"a": "b"}', '{"a": -1}', '{"a": NaN}', "[" * 9999, '{"a":' * 9999],
    ids=lambda text: str(text)[:12],
)
def test_what_has_no_times_is_an_error(tmp_path, text):
    if text is not None:
        (tmp_path / "times.json").write_text(text)
    with pytest.raises(ConfigError, match="has no times of layers .*; give what 'trtexec --exportProfile' writes"):
        load_times(tmp_path / "times.json")
