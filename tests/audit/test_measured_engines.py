"""Engines that TensorRT 8 built on GPUs, as its inspector wrote them, go through the audit."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from trtdet.audit import Audit, Layer, audit, load_times
from trtdet.audit.fp16 import InFp16
from trtdet.audit.layers import BITS, NO_KERNEL, parse_inspector
from trtdet.audit.traffic import PRECISIONS, Flow
from trtdet.quantization import Entry, PrecisionPlan

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "measured" / "engines"

OPERATORS = {"Conv2D": "Conv", "BiasAdd": "Add", "add": "Add", "Mean": "ReduceMean"}
"""Operators by the last word of a node's name, where they differ."""

TYPE_CHANGES = ("QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class Engine:
    """An engine of NVIDIA/TensorRT, release/10.16, tools/experimental/trt-engine-explorer, and its profile."""

    name: str

    @cached_property
    def text(self) -> str:
        return (FOLDER / f"{self.name}.graph.json").read_text()

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return parse_inspector(self.text)

    @cached_property
    def raw(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = json.loads(self.text)["Layers"]
        return listed

    @cached_property
    def times(self) -> dict[str, float]:
        return load_times(FOLDER / f"{self.name}.profile.json")

    def audited(self) -> Audit:
        return audit(self.layers, *network_of(self))


def operator(name: str) -> str:
    """The operator of a node by its name, such as ``Conv_10`` or ``block/Relu``; empty for names of constants."""
    match = re.search(r"(?:^|/)([A-Za-z][A-Za-z0-9]*?)(?:_\d+|__\d+)?$", name)
    word = OPERATORS.get(match[1], match[1]) if match else ""
    return word if word in {schema.name for schema in onnx.defs.get_all_schemas()} else ""


def network_of(engine: Engine) -> tuple[PrecisionPlan, onnx.ModelProto]:
    """The network that an engine came from, as far as its layers tell, and a plan that says what their weights are in.

    Every node that a layer names is there, in its order; INT8 tensors and weights have Q/DQ nodes.
    """
    nodes: list[onnx.NodeProto] = []
    weights = [onnx.numpy_helper.from_array(np.float32(0.1), "scale")]
    plan, infos = {}, {}

    def add(kind: str, inputs: list[str], output: str, name: str = "", **attributes: Any) -> str:
        inputs = [*inputs, "scale"] if kind in TYPE_CHANGES else inputs
        nodes.append(onnx.helper.make_node(kind, inputs, [output], name or f"unnamed_{len(nodes)}", **attributes))
        return output

    for layer, raw in zip(engine.layers, engine.raw, strict=True):
        for tensor in (*layer.inputs, *layer.outputs):
            infos[tensor.name] = onnx.helper.make_tensor_value_info(tensor.name, 1, tensor.dims)
        value, others = layer.inputs[0].name, [tensor.name for tensor in layer.inputs[1:]]
        named = [(name, kind) for name in layer.onnx if (kind := operator(name))]
        if layer.weights:  # its Q node is of the weights, and its first node with an own name multiplies
            (name, _), *named = [(name, kind) for name, kind in named if kind not in TYPE_CHANGES]
            outputs, kernel = (raw.get(key) or raw[f"Conv{key}"] for key in ("OutMaps", "Kernel"))
            groups = raw.get("Groups") or raw.get("ConvGroups") or 1
            shape = (outputs, layer.inputs[0].dims[1] // groups, *kernel)
            weights.append(onnx.numpy_helper.from_array(np.zeros(shape, np.int8), f"{name}:q"))
            data = add("DequantizeLinear", [value], f"{name}:x") if layer.input == "Int8" else value
            value = add(
                "Conv", [data, add("DequantizeLinear", [f"{name}:q"], f"{name}:w")], f"{name}:y", name, group=groups
            )
            infos[value] = onnx.helper.make_tensor_value_info(value, 1, layer.outputs[0].dims)
            plan[name] = Entry(PRECISIONS[layer.weights], "as built")
        for name, kind in named:
            # A transposition before it or a reshaping after it may bear the name of a convolution or product.
            kind = "Identity" if kind in ("Conv", "MatMul") else kind
            value = add(kind, [value, *(others if kind == "Add" else ())], f"{name}:y", name)
        add(
            "QuantizeLinear" if layer.weights and layer.output == "Int8" else "Identity", [value], layer.outputs[0].name
        )
    ends = (infos.pop(engine.layers[0].inputs[0].name), infos.pop(engine.layers[-1].outputs[0].name))
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], weights, value_info=list(infos.values()))
    return PrecisionPlan(plan), onnx.helper.make_model(graph)


BUILT = {
    "mobilenet_TITAN-RTX_qat": (53, 0, 0, 72, 21.35, {"quantise": 17, "padding": 8, "float-output": 4, "reformat": 1}),
    "resnet18_A100_fp16": (0, 21, 0, 25, 471.66, {"cast": 2, "padding": 1}),
    "resnet18_A100_fp32": (0, 0, 21, 24, 923.67, {"reformat": 1}),
    "resnet18_A100_qat": (
        *(21, 0, 0, 35, 604.41),
        {"quantise": 10, "float-output": 2, "cast": 1, "padding": 1, "reformat": 1},
    ),
    "resnet18_A100_qat-residual": (21, 0, 0, 25, 202.26, {"quantise": 2, "float-output": 2, "dequantise": 1}),
    "resnet50_RTX-3090_fp16": (0, 54, 0, 61, 1982.30, {"cast": 2, "padding": 1}),
    "resnet50_RTX-3090_fp32": (0, 0, 54, 72, 4060.29, {"reformat": 13}),
}
"""By engine: convolutions in INT8, FP16 and FP32; kernels; megabytes; number of findings of each kind."""


@pytest.fixture(params=BUILT)
def engine(request):
    if not FOLDER.is_dir():
        pytest.skip("needs ../shared/measured (engines that NVIDIA built), which is absent here")
    return Engine(request.param)


def test_what_was_built_is_counted(engine, tmp_path):
    found = engine.audited()
    *counts, kernels, megabytes, findings = BUILT[engine.name]
    assert list(found.counts().values()) == counts and (found.departures, found.warnings) == ((), ())
    assert sum(layer.type not in NO_KERNEL for layer in found.layers) == kernels
    assert found.bytes / 1e6 == pytest.approx(megabytes, abs=0.01)
    assert Counter(finding.kind for finding in found.findings) == findings
    (tmp_path / "audit.json").write_text(found.to_json())
    assert Audit.load(tmp_path / "audit.json") == found


def test_types_and_layouts_are_those_in_the_names_of_the_kernels(engine):
    kinds = {"i8": "Int8", "f16": "Half", "f32": "Float"}
    told = 0
    for layer, raw in zip(engine.layers, engine.raw, strict=True):
        for tensor in (*layer.inputs, *layer.outputs):
            assert tensor.type in BITS
            assert (tensor.step > 1) == ("wide" in tensor.format or "%" in tensor.format)
        match = re.search(r"_(i8|f16|f32)(i8|f16|f32)_(?:i8|f16|f32|tf32)(?:i32|f16|f32)_", raw.get("TacticName") or "")
        if match:
            assert (layer.input, layer.output) == (kinds[match[1]], kinds[match[2]])
            told += 1
    assert told > 10
    convolutions = [layer for layer, raw in zip(engine.layers, engine.raw, strict=True) if "Conv" in raw["LayerType"]]
    assert all(layer.weights == layer.input and len(layer.constants) == 2 for layer in convolutions)


def test_a_layer_takes_time_where_it_starts_a_kernel(engine):
    times = engine.times
    assert {layer.name for layer in engine.layers if layer.type in NO_KERNEL} == {
        name for name, ms in times.items() if ms == 0
    }
    timed = engine.audited().timed(times)
    assert timed.ms == pytest.approx(sum(times.values())) and timed.warnings == ()
    shown = str(timed.report(everything=True))
    assert "(unknown)" not in shown and len(shown.splitlines()) > len(timed.findings)


@pytest.mark.parametrize("engine", ["resnet18_A100_qat"], indirect=True)
def test_what_an_engine_would_move_in_fp16_is_what_its_fp16_engine_moves(engine):
    flow = Flow(engine.layers, *network_of(engine))
    predicted, fp16 = InFp16(flow, list(flow.convolutions)), Engine("resnet18_A100_fp16")
    # The prediction leaves the max pooling after the first convolution in float32.
    assert predicted.bytes == pytest.approx(fp16.audited().bytes, rel=0.12)
    kernels = sum(predicted.layer(index).kernels for index in range(len(engine.layers)))
    assert kernels == pytest.approx(BUILT[fp16.name][3], abs=4)


@pytest.mark.parametrize("engine", ["resnet18_A100_qat"], indirect=True)
def test_a_copy_without_a_kernel_is_the_tensor_that_it_copies(engine):
    causes = [finding.cause for finding in engine.audited().findings]
    assert "quantises the output of GlobalAveragePool_246 (Half) for Gemm_257" in causes
    assert "Gemm_257 (Int8) writes Float: it is an output of the engine" in causes
