import numpy as np
import onnx
import pytest

from trtdet.calibration import expose
from trtdet.passes import Options, rewrite
from trtdet.passes.base import Writer
from trtdet.passes.loading import load_model
from trtdet.passes.model import save_model, to_graph, to_model
from trtdet.passes.protobuf import node_names
from trtdet.passes.provenance import KEY, Origin, origin_of, registry

NET = "(float[1,3,8,8] x) => (float[1,9,8,8] y) {a = Conv(x, w) s = Sigmoid(a) y = Mul(a, s)}"


def names(model: onnx.ModelProto, origin: Origin) -> set[str]:
    return {name for name, found in origin_of(model).items() if found is origin}


@pytest.fixture
def detector(net, normal):
    text = "(float[1,3,8,8] x) => (float[1,64,8] y) {c = Conv(x, w) r = Reshape(c, s) y = Transpose<perm=[0,2,1]>(r)}"
    return net(text, w=normal(8, 3, 1, 1), s=np.array([1, 8, 64], np.int64))


def test_every_node_that_a_pass_adds_has_its_origin(detector, configure):
    config = configure(nms={"pre_nms_topk": 8, "max_detections": 4, "score_threshold": 0.1, "iou_threshold": 0.5})
    made = rewrite(detector, Options(config, nms="native")).model
    own = {"Conv_0", "Reshape_1", "Transpose_2"}
    written = set(node_names(made.graph)) - own
    assert set(origin_of(made)) == written
    assert names(made, Origin.DECODE) == {name for name in written if name.startswith("trtdet/decode/")}
    suppression = names(made, Origin.NMS)
    assert suppression == {name for name in written if name.startswith("trtdet/nms/")}
    assert any(name.startswith("trtdet/nms/step/") for name in suppression), "the body of the loop is registered too"


def test_a_name_that_the_model_brings_along_says_nothing(detector, configure):
    detector.graph.node[0].name = "trtdet/decode/Conv_1"
    made = rewrite(detector, Options(configure())).model
    assert "trtdet/decode/Conv_1" in set(node_names(made.graph))
    assert "trtdet/decode/Conv_1" not in origin_of(made)
    assert names(made, Origin.DECODE) == set(node_names(made.graph)) - {n.name for n in detector.graph.node}


def test_activations_are_registered_under_the_name_they_get(net, normal):
    from trtdet.passes import silu

    graph = to_graph(net(NET, w=normal(9, 3, 1, 1)))
    assert silu.apply(graph, Options(None, silu="plugin")).count == 1  # type: ignore[arg-type]
    assert origin_of(to_model(graph)) == {"Mul_2/TRT_SiLU": Origin.ACTIVATION}


def test_nodes_of_an_older_opset_are_registered_and_the_rest_keeps_its_origin(net, configure):
    from trtdet.passes import opset

    graph = to_graph(net("(float[2,4] x) => (float[2,4] y) {a = Relu(x) b = Neg(a) y = Swish(b)}", opset=24))
    registry(graph)["Neg_1"] = Origin.NMS
    opset.apply(graph, Options(configure(), max_opset=17))
    lowered = to_model(graph)
    origins = origin_of(lowered)
    assert origins.keys() == {node.name for node in lowered.graph.node} - {"Relu_0", "Swish_2"}
    assert origins.pop("Neg_1") is Origin.NMS
    assert set(origins.values()) == {Origin.LOWERING}
    assert all(origin.replaces for origin in origins.values())


def test_the_registry_survives_what_makes_a_model_anew(detector, configure, tmp_path):
    made = rewrite(detector, Options(configure())).model
    expected = origin_of(made)
    assert expected
    save_model(made, tmp_path / "m.onnx")
    assert origin_of(load_model(tmp_path / "m.onnx")) == expected
    assert origin_of(to_model(to_graph(made))) == expected
    tensors = [node.output[0] for node in made.graph.node]
    assert origin_of(expose(made, tensors)) == expected
    upgraded = rewrite(made, Options(configure("boxes", outputs=["boxes", "scores"]), silu="keep", max_opset=13)).model
    assert expected.items() <= origin_of(upgraded).items()


def test_nodes_that_are_gone_leave_the_registry(net):
    graph = to_graph(net("(float[4] x) => (float[4] y) {y = Relu(x)}"))
    registry(graph).update(Relu_0=Origin.NMS, gone=Origin.QDQ)
    assert origin_of(to_model(graph)) == {"Relu_0": Origin.NMS}


def test_a_writer_of_another_origin_shares_the_numbers(net):
    graph = to_graph(net("(float[4] x) => (float[4] y) {y = Relu(x)}"))
    write = Writer(graph, "trtdet/qdq", Origin.QDQ)
    first = write("Neg", graph.outputs[0])
    second = write.of(Origin.CHANNEL_MAP)("Neg", first)
    third = write("Neg", second)
    assert [tensor.name for tensor in (first, second, third)] == [f"trtdet/qdq/Neg_{at}" for at in (1, 2, 3)]
    assert [registry(graph)[tensor.name] for tensor in (first, second, third)] == [
        Origin.QDQ,
        Origin.CHANNEL_MAP,
        Origin.QDQ,
    ]


@pytest.mark.parametrize("text", ["", "no JSON", "[1]", '{"nms": 3}', '{"nms": [3, "a"], "x": ["b"]}', "[" * 100_000])
def test_a_registry_of_somebody_else_does_no_harm(net, text):
    model = net("(float[4] x) => (float[4] y) {y = Relu(x)}")
    model.metadata_props.add(key=KEY, value=text)
    assert origin_of(model) == ({"a": Origin.NMS} if '"a"' in text else {})
    assert origin_of(to_model(to_graph(model))) == {}
    model.metadata_props[0].key = "names"
    assert origin_of(model) == {}
