from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from trtdet.errors import ModelError
from trtdet.passes import load_model, save_model
from trtdet.passes.model import IR_VERSION, to_graph, to_model

TEXT = "(float[1,3,8,8] x) => (float[1,4,8,8] y) {y = Conv(x, w)}"


@pytest.fixture
def model(net, normal):
    return net(TEXT, w=normal(4, 3, 1, 1))


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(path, **options)
    text = str(caught.value)
    assert "\n" not in text and path.name in text
    return text


def test_a_model_survives_saving_and_loading(model, tmp_path):
    path = tmp_path / "new" / "model.onnx"
    save_model(model, path)
    assert load_model(path) == model
    assert [entry.name for entry in path.parent.iterdir()] == ["model.onnx"]


def test_a_path_that_is_no_model_is_an_error(tmp_path):
    assert "does not exist; give the path of an ONNX file" in refused(tmp_path / "absent.onnx")
    assert "is a folder" in refused(tmp_path)
    (tmp_path / "empty.onnx").write_bytes(b"")
    assert "has no nodes or no opset; export it again" in refused(tmp_path / "empty.onnx")


JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(100)


@pytest.mark.parametrize("name", ["a.onnx", "a.json", "a.textproto", "a.onnxtxt", "a.jpg"])
def test_bytes_of_something_else_are_an_error_whatever_the_name(tmp_path, name):
    for data in (JPEG, *(np.random.default_rng(seed).bytes(3000) for seed in range(4))):
        (tmp_path / name).write_bytes(data)
        assert "is not ONNX or is truncated" in refused(tmp_path / name)


def test_every_truncation_of_a_model_is_an_error(model, tmp_path):
    data = model.SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert "is not ONNX or is truncated" in refused(path)
    assert f"({len(data) - 1} bytes)" in refused(path)


def test_the_real_models_load(shared_data):
    for path in sorted((shared_data / "models").glob("*.onnx")):
        assert len(load_model(path).graph.node) > 100


@pytest.fixture
def external(net, normal, tmp_path):
    path = tmp_path / "model.onnx"
    model = net(TEXT, w=normal(4, 3, 32, 32))
    onnx.save(model, str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def test_external_data_is_loaded(external, normal):
    weight = onnx.numpy_helper.to_array(load_model(external).graph.initializer[0])
    np.testing.assert_array_equal(weight, normal(4, 3, 32, 32))


def test_external_data_that_is_cut_or_missing_is_an_error(external):
    weights = external.parent / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:1000])
    told = onnx.defs.onnx_opset_version() > 24  # onnx 1.19, of opset 24, reads what is there
    assert ("one is missing or cut" if told else "does not fit its shape") in refused(external)
    weights.unlink()
    text = refused(external)
    assert "keeps its weights in separate files and one is missing or cut" in text
    assert f"copy them to '{external.parent}'" in text


@pytest.mark.parametrize(
    ("op", "opset", "domain", "words"),
    [
        ("Frobnicate", 13, "", "ONNX opset 13 does not define: ai.onnx::Frobnicate (node 'Frobnicate_0')"),
        ("Mish", 11, "", "ONNX opset 11 does not define: ai.onnx::Mish"),
        ("acme.Relu", 13, "acme", "acme::Relu (node 'Relu_0')"),
    ],
)
def test_an_unknown_operator_is_named_with_its_node(net, tmp_path, op, opset, domain, words):
    path = tmp_path / "odd.onnx"
    save_model(net(f"(float[4] x) => (float[4] y) {{y = {op}(x)}}", opset=opset, domain=domain), path)
    assert words in refused(path)


def test_a_quantised_model_is_refused_unless_it_is_wanted(net, tmp_path):
    model = net(
        "(float[4] x) => (float[4] y) {q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)}",
        s=np.float32(0.1),
        z=np.int8(0),
    )
    path = tmp_path / "int8.onnx"
    save_model(model, path)
    text = refused(path)
    assert "is quantised already: 2 nodes such as QuantizeLinear 'QuantizeLinear_0'; give the float model" in text
    assert load_model(path, allow_quantized=True) == model


def test_a_name_that_two_tensors_have_is_named(net, tmp_path):
    path = tmp_path / "odd.onnx"
    model = net("(float[4] x) => (float[4] y) {y = Relu(x)}")
    model.graph.node.append(onnx.helper.make_node("Relu", ["x"], ["y"], "again"))
    save_model(model, path)
    assert "is not valid ONNX: node 'again' gives a tensor 'y', which another node gives" in refused(path)
    model.graph.node[-1].output[0] = "x"
    save_model(model, path)
    assert "node 'again' gives a tensor 'x'" in refused(path)


def test_a_function_that_the_model_brings_along_is_known(tmp_path):
    text = """
    <ir_version: 8, opset_import: ["" : 13, "acme" : 1]>
    net (float[4] x) => (float[4] y) { y = acme.Twice(x) }
    <domain: "acme", opset_import: ["" : 13]>
    Twice (a) => (b) { b = Add(a, a) }
    """
    path = tmp_path / "function.onnx"
    save_model(onnx.parser.parse_model(text), path)
    assert load_model(path).functions[0].name == "Twice"


def test_what_is_written_has_the_pinned_ir_version_and_inferred_shapes(model):
    model.ir_version = 7
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    written = to_model(to_graph(model))
    # The newest that onnxruntime 1.20 reads, the oldest that trtdet runs with.
    assert written.ir_version == IR_VERSION == 10
    assert written.producer_name == "trtdet"
    assert [dim.dim_value for dim in written.graph.output[0].type.tensor_type.shape.dim] == [1, 4, 8, 8]


def test_an_output_whose_type_is_open_gets_the_inferred_one(model):
    model.graph.output[0].ClearField("type")
    (output,) = to_model(to_graph(model)).graph.output
    assert output.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert [dim.dim_value for dim in output.type.tensor_type.shape.dim] == [1, 4, 8, 8]


def test_a_graph_that_breaks_a_rule_of_onnx_is_an_error(net):
    graph = to_graph(net("(float[4] x) => (float[4] y) {y = Relu(x)}"))
    graph.nodes[0].inputs.append(graph.nodes[0].inputs[0])
    with pytest.raises(ModelError, match="the rewritten graph is not valid ONNX"):
        to_model(graph)
