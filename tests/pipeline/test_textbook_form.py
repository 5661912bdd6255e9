"""The INT8 form of a default build: nothing between Q and convolution, and little between convolution and Q."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import onnx
import pytest
from models import CONVOLUTIONS, small_detector

from trtdet import BuildOptions, CalibrationOptions, build, load_config
from trtdet.demo import shapes
from trtdet.passes.provenance import Origin, origin_of
from trtdet.quantization import PrecisionPlan

Activation = Literal["silu", "relu"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes.generate(tmp_path_factory.mktemp("shapes"), "calibration", 12).images


def before_rounding(model: onnx.ModelProto, quantizer: onnx.NodeProto) -> list[str]:
    """What stands between the convolution, or the input, and the rounding: ``map``, operators; no casts."""
    makers = {name: node for node in model.graph.node for name in node.output}
    constants = {tensor.name for tensor in model.graph.initializer}
    origins = origin_of(model)
    found: list[str] = []
    node = makers.get(quantizer.input[0])
    while node is not None and node.op_type != "Conv":
        if node.op_type != "Cast":
            found.append("map" if origins.get(node.name) is Origin.CHANNEL_MAP else node.op_type)
        read = [name for name in node.input if name not in constants]
        if len(read) == 2:  # x * Sigmoid(x)
            gate = makers[read[1]]
            assert (node.op_type, gate.op_type, gate.input[0]) == ("Mul", "Sigmoid", read[0])
        node = makers.get(read[0])
    return found


@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("int8_all", [False, True])
def test_between_int8_convolutions_stand_the_activation_function_and_at_most_one_mul(
    images: Path, tmp_path: Path, activation: Activation, int8_all: bool
) -> None:
    onnx.save(small_detector(width=16, activation=activation), tmp_path / "model.onnx")
    options = BuildOptions(
        calibration=CalibrationOptions("minmax", images=images), backend="onnxruntime", int8_all=int8_all
    )
    bundle = build(tmp_path / "model.onnx", load_config("shapes"), tmp_path / "b", options).bundle
    model = onnx.load(str(bundle.file("int8.onnx")))
    makers = {name: node for node in model.graph.node for name in node.output}
    constants = {tensor.name for tensor in model.graph.initializer}
    assert "Pad" not in {node.op_type for node in model.graph.node}
    plan = PrecisionPlan.load(bundle.file("plan.json"))
    assert len(plan.names("int8")) == (CONVOLUTIONS if int8_all else 2)
    assert any("smooth" in step.name for entry in plan.entries.values() for step in entry.corrections)
    for node in model.graph.node:
        if node.name in plan.names("int8"):
            assert makers[makers[node.input[0]].input[0]].op_type == "QuantizeLinear"
    paths = [
        before_rounding(model, node)
        for node in model.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] not in constants
    ]
    inner = [path for path in paths if path not in ([], ["map"])]  # those may be of the input itself
    assert len(inner) == (5 if int8_all else 2) and len(paths) - len(inner) == int8_all
    for path in inner:
        assert path in ([["Relu"]] if activation == "relu" else [["Mul"], ["map", "Mul"]])
