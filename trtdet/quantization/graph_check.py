"""Checks a graph with Q/DQ for nodes that TensorRT would run in float or refuse."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.passes.plugin_ops import PLUGIN_ACTIVATIONS
from trtdet.passes.walk import PAIR, maker
from trtdet.quantization.weighted import LAYERS


@dataclass(frozen=True)
class GraphProblem:
    """One place where INT8 would be lost."""

    node: str
    problem: str

    def __str__(self) -> str:
        return f"{self.node}: {self.problem}"


def lint(model: onnx.ModelProto) -> tuple[GraphProblem, ...]:
    """Checks every Q/DQ node and every convolution and product that has one on an input. In a graph with FP16 scales it
    also checks that INT8 flows through each Concat: between its pairs there is no Cast and no float32."""
    graph = gs.import_onnx(model)
    fp8 = {tensor.name for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT8E4M3FN}
    scales = [node.inputs[1] for node in graph.nodes if node.op == "DequantizeLinear"]
    half = any(isinstance(scale, gs.Constant) and scale.dtype == np.float16 for scale in scales)
    findings: list[GraphProblem] = []
    for node in graph.nodes:
        if node.op in PAIR:
            problems = _pair_problems(node, fp8)
        elif node.op in LAYERS:
            problems = _layer_problems(node)
        elif node.op in PLUGIN_ACTIVATIONS:
            problems = _strangers(node, ("DequantizeLinear",)) if node.outputs[0].dtype == np.int8 else []
            scale = np.array(node.attrs.get("input_scale", [1.0]))
            if not np.all(np.isfinite(scale) & (scale > 0)):
                problems.append("its input_scale must be over 0 and finite in every channel")
            if not all(np.all(np.isfinite(node.attrs.get(key, [0.0]))) for key in ("factor", "offset")):
                problems.append("its factor and offset must be finite in every channel")
        else:
            problems = []
        if half:
            problems += _join_problems(node)
        findings += [GraphProblem(node.name, problem) for problem in problems]
    return tuple(findings)


def _pair_problems(node: gs.Node, fp8: Collection[str]) -> list[str]:
    scale, zero = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    if not isinstance(scale, gs.Constant):
        return ["its scale is not constant: INT8 kernels need scales at build time"]
    problems: list[str] = []
    bad = scale.values[~(np.isfinite(scale.values) & (scale.values > 0))]
    if bad.size:
        problems.append(f"its scale is {float(bad.flat[0])}: it must be over 0 and finite")
    if zero is None and node.op == "QuantizeLinear":
        problems.append("it has no zero point, so it quantises to uint8: give an int8 zero point of 0")
    elif zero is not None and not isinstance(zero, gs.Constant):
        problems.append("its zero point is not constant: only symmetric quantisation is supported")
    elif zero is not None and zero.name not in fp8:  # in FP8 it is always 0, and reading it would change its type
        if zero.values.dtype != np.int8:
            problems.append(f"it quantises to {zero.values.dtype}: only int8 has kernels; an int32 bias stays float")
        if np.any(zero.values != 0):
            problems.append("its zero point is not 0: only symmetric quantisation is supported")
    if node.op == "QuantizeLinear":
        problems += _strangers(node, (*PLUGIN_ACTIVATIONS, "DequantizeLinear"))
    return problems


def _join_problems(node: gs.Node) -> list[str]:
    """Casts that part a Concat or QuantizeLinear from what makes its INT8 values, and a Concat in float32 between FP16
    scales."""
    sources = {"Concat": ("DequantizeLinear",), "QuantizeLinear": ("DequantizeLinear", "Concat")}.get(node.op)
    if sources is None:
        return []
    casts = [cast for tensor in node.inputs if (cast := maker(tensor, "Cast")) is not None]
    parted = [source for cast in casts if (source := maker(cast.inputs[0], *sources)) is not None]
    problems = [f"a Cast parts it from {source.op} '{source.name}': INT8 ends there; use one type" for source in parted]
    dequantizers = [maker(tensor, "DequantizeLinear") for tensor in node.inputs]
    pairs = [(pair and maker(pair.inputs[0], "QuantizeLinear"), pair) for pair in dequantizers]
    types = {(q.inputs[1].dtype, dq.inputs[1].dtype) if q and dq else None for q, dq in pairs}
    between = any(reader.op == "QuantizeLinear" for reader in node.outputs[0].outputs)
    if node.op == "Concat" and between and types == {(np.dtype(np.float16), np.dtype(np.float32))}:
        problems.append("it joins in float32 what was quantised in FP16: INT8 ends there; use one type")
    return problems


def _layer_problems(node: gs.Node) -> list[str]:
    activation, weight, *rest = (maker(tensor, "DequantizeLinear") for tensor in node.inputs[:3])
    if activation is None or weight is None:
        alone = "activation is" if weight is None else "weights are"
        return [] if activation is weight else [f"only its {alone} quantised: it would run in float"]
    outputs = int(node.op == "MatMul" or (node.op == "Gemm" and not node.attrs.get("transB", 0)))
    problems = []
    if isinstance(activation.inputs[1], gs.Constant) and activation.inputs[1].values.size > 1:
        problems.append("its activation has a scale per channel: it would run in float; use one scale")
    if isinstance(weight.inputs[1], gs.Constant) and weight.inputs[1].values.size > 1:
        axis = weight.attrs.get("axis", 1)
        if axis != outputs:
            problems.append(f"its weights are quantised on axis {axis}: it would run in float; use axis {outputs}")
    if any(rest):
        problems.append("its bias is quantised: keep the bias in float")
    return problems


def _strangers(node: gs.Node, allowed: tuple[str, ...]) -> list[str]:
    """Other readers of an INT8 tensor; the parsers of TensorRT 10 and later accept INT8 for few operators."""
    return [
        f"{reader.op} '{reader.name}' reads its INT8 output: only {', '.join(allowed)} may"
        for reader in node.outputs[0].outputs
        if reader.op not in allowed
    ]
