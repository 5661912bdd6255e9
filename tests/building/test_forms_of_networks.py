"""The graph for strongly typed builders, of a real detector, in each form."""

from collections import Counter

import numpy as np
import onnx
import pytest

import trtdet
from trtdet.backends import Capabilities, OnnxRunner
from trtdet.building.corrections import prepared
from trtdet.building.engine import explicit_network
from trtdet.building.graph import host_graph
from trtdet.building.ranges import calibrated, select_images
from trtdet.data import ImageStream
from trtdet.quantization import CANDIDATES, DataFlow, NetworkForm, lint, shared

CAPS = Capabilities("half", "1", True, True, data_flow=DataFlow(half=True, weights=("channel", "tensor"), fused=True))
DEFAULT = NetworkForm()


@pytest.fixture(scope="module")
def yolo(shared_data):
    """YOLOv5n with ranges of four images."""
    graph = host_graph(shared_data / "models" / "yolov5n.onnx", trtdet.load_config("yolov5"), caps=CAPS)
    options = trtdet.CalibrationOptions(images=shared_data / "coco" / "train2017", num_images=4)
    return prepared(calibrated(graph, options, select_images(options)), options, ())


@pytest.fixture(scope="module")
def networks(yolo):
    forms = {"default": DEFAULT, **CANDIDATES}
    return {name: yolo.explicit(yolo.plan, form=form).model for name, form in forms.items()}


def inputs(model: onnx.ModelProto, op: str) -> list[list[str]]:
    """The operators that make the inputs of each node of an operator before the decoding."""
    made_by = {name: node.op_type for node in model.graph.node for name in node.output}
    nodes = [node for node in model.graph.node if node.op_type == op and node.name.startswith("model.")]
    return [[made_by.get(name, "") for name in node.input] for node in nodes]


def test_joins_of_int8_are_in_fp16(yolo, networks):
    _, together = shared(yolo.model, yolo.graph.placement.following(yolo.plan), yolo.ranges)
    counted = Counter(tuple(set(made)) for made in inputs(networks["default"], "Concat"))
    assert counted[("DequantizeLinear",)] == len(together) == 2
    types = {value.name: value.type.tensor_type.elem_type for value in networks["default"].graph.value_info}
    joins = [node for node in networks["default"].graph.node if node.op_type == "Concat" and "model." in node.name]
    assert {types[node.output[0]] for node in joins} == {onnx.TensorProto.FLOAT16}
    assert lint(networks["default"]) == ()


def test_in_one_scale_every_input_of_a_join_is_int8(networks):
    assert {name for made in inputs(networks["joins-in-int8"], "Concat") for name in made} == {"DequantizeLinear"}
    assert {name for made in inputs(networks["joins-in-int8"], "MaxPool") for name in made} == {"DequantizeLinear"}


@pytest.mark.parametrize(("name", "pairs"), [("default", 1), ("sums-of-two-int8", 2), ("sums-in-fp16", 0)])
def test_the_sums_of_a_form(networks, name, pairs):
    sums = inputs(networks[name], "Add")
    assert len(sums) == 7
    # One sum is between convolutions of 16 channels, which stay in FP16.
    assert Counter(made.count("DequantizeLinear") for made in sums) == Counter([0] + 6 * [pairs])


def test_forms_that_only_place_pairs_compute_the_same(yolo, networks, shared_data):
    paths = sorted((shared_data / "coco" / "val2017").glob("*.jpg"))[:2]
    runners = {name: OnnxRunner(networks[name]) for name in ("default", "own-pairs", "first-in-fp16")}
    for batch in ImageStream(paths, yolo.graph.config.input, batch_size=1):
        want, *others = (runner(batch.images) for runner in runners.values())
        for other in others:
            for name, values in want.items():
                np.testing.assert_array_equal(other[name], values)


def test_a_form_is_written_with_each_form_of_weight_scales(yolo):
    plain, first = (
        [explicit_network(yolo, yolo.plan, CAPS, form=form, weights=weights) for weights in yolo.graph.flow.weights]
        for form in (DEFAULT, CANDIDATES["first-in-int8"])
    )
    assert [network.form for network in (*plain, *first)] == ["channel", "tensor"] * 2
    added = set(first[0].plan.names("int8")) - set(plain[0].plan.names("int8"))
    assert len(added) == 1
    for network in first:
        makers = {name: node.op_type for node in network.model.graph.node for name in node.output}
        (conv,) = (node for node in network.model.graph.node if node.name in added)
        assert makers[conv.input[0]] == "DequantizeLinear"
