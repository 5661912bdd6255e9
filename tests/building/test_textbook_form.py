"""The INT8 graph of a default build: nothing between Q/DQ and a convolution, and little before the next Q."""

import importlib
from dataclasses import replace
from typing import Literal

import numpy as np
import onnx
import pytest
from models import CONVOLUTIONS, judged_by, small_detector

from trtdet import load_config
from trtdet.building.corrections import prepared
from trtdet.building.graph import host_graph
from trtdet.building.ranges import calibrated, select_images
from trtdet.options import CalibrationOptions
from trtdet.passes.provenance import Origin, origin_of
from trtdet.quantization import DEFAULT_CORRECTIONS, DataFlow, PrecisionPlan

corrections = importlib.import_module("trtdet.quantization.corrections")
gate = importlib.import_module("trtdet.quantization.corrections.gate")
head_ranges = importlib.import_module("trtdet.quantization.corrections.head_ranges")
policies = importlib.import_module("trtdet.quantization.corrections.policies")

Activation = Literal["silu", "relu"]


def before_rounding(model: onnx.ModelProto, quantizer: onnx.NodeProto) -> list[str]:
    """What stands between the convolution, or the input, and the rounding: ``shift``, ``map``, operators; no casts."""
    makers = {name: node for node in model.graph.node for name in node.output}
    constants = {tensor.name for tensor in model.graph.initializer}
    origins = origin_of(model)
    found: list[str] = []
    node = makers.get(quantizer.input[0])
    while node is not None and node.op_type != "Conv":
        if node.op_type != "Cast":
            mapped = origins.get(node.name) is Origin.CHANNEL_MAP
            found.append({"Mul": "map", "Add": "shift"}[node.op_type] if mapped else node.op_type)
        read = [name for name in node.input if name not in constants]
        if len(read) == 2:  # x * Sigmoid(x)
            gate = makers[read[1]]
            assert (node.op_type, gate.op_type, gate.input[0]) == ("Mul", "Sigmoid", read[0])
        node = makers.get(read[0])
    return found


@pytest.fixture
def int8(images, tmp_path, monkeypatch):
    """The Q/DQ model of default corrections, put together with channel maps wherever they may be, its plan, and the
    convolutions that INT8 makes faster."""
    monkeypatch.setattr(gate, "head_errors", judged_by(0.5, 0.4, 0.3, 0.4, 0.2))
    monkeypatch.setattr(policies, "_with_seen_biases", lambda *_: None)  # which nodes there are they do not change

    def int8(activation: Activation, int8_all: bool, fused: bool) -> tuple[onnx.ModelProto, PrecisionPlan, set[str]]:
        onnx.save(small_detector(width=32, activation=activation), tmp_path / "model.onnx")
        options = CalibrationOptions(rule="minmax", images=images)
        graph = host_graph(tmp_path / "model.onnx", load_config("shapes"))
        plan = replace(graph, int8_all=int8_all).plan
        # Where kernels are not fused, no convolution of a model this small is worth INT8 by itself.
        ranged = calibrated(replace(graph, flow=DataFlow(fused=fused)), options, select_images(options))
        ready = prepared(ranged, options, DEFAULT_CORRECTIONS, plan=plan)
        return ready.explicit(ready.plan).model, ready.plan, set(graph.plan.names("int8"))

    return int8


@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("int8_all", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_between_int8_convolutions_stand_the_activation_function_and_at_most_one_mul_and_add(
    int8, monkeypatch, activation, int8_all, fused
):
    monkeypatch.setattr(head_ranges, "_FAR", np.inf)
    model, plan, faster = int8(activation, int8_all, fused)
    makers = {name: node for node in model.graph.node for name in node.output}
    constants = {tensor.name for tensor in model.graph.initializer}
    assert "Pad" not in {node.op_type for node in model.graph.node}
    assert len(plan.names("int8")) == (CONVOLUTIONS if int8_all else 2)
    for node in model.graph.node:
        if node.name in plan.names("int8"):
            assert makers[makers[node.input[0]].input[0]].op_type == "QuantizeLinear"
    paths = [
        before_rounding(model, node)
        for node in model.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] not in constants
    ]
    inner = [path for path in paths if not {*path} <= {"shift", "map"}]  # the others are of the input itself
    assert len(inner) == (5 if int8_all else 2) and len(paths) - len(inner) == int8_all
    mapped = {name for name, entry in plan.entries.items() if "smooth" in {step.name for step in entry.corrections}}
    shifted = [path for path in inner if path[0] == "shift"]
    scaled = [path[path[0] == "shift" :] for path in inner]
    if activation == "relu":
        assert scaled == [["Relu"]] * len(inner) and mapped <= set(plan.names("int8"))
    else:
        assert all(path in (["Mul"], ["map", "Mul"]) for path in scaled)
    if fused:
        # An Add alone would part the convolution from the rounding of its result.
        assert all(path[1] == "map" for path in shifted)
    elif int8_all:
        assert shifted
    if activation == "silu" and fused:
        # Only for convolutions that are in INT8 by request.
        assert not mapped & faster and bool(mapped) == int8_all == (["map", "Mul"] in scaled)
    elif activation == "silu":
        assert mapped


def test_a_tensor_that_moves_the_detections_far_has_a_map_whatever_its_mul_costs(int8, monkeypatch):
    monkeypatch.setattr(head_ranges, "_FAR", -1.0)  # also where no detection is reached
    monkeypatch.setattr(corrections, "_LITTLE", np.inf)
    _, plan, faster = int8("silu", int8_all=False, fused=True)
    mapped = {name for name, entry in plan.entries.items() if "smooth" in {step.name for step in entry.corrections}}
    assert mapped == faster
