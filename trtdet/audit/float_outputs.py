"""Convolutions in INT8 or FP16 whose kernels write float32, and why, as far as the model and the plan tell."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import onnx

from trtdet.audit.layers import Tensor
from trtdet.audit.traffic import Convolution, Flow
from trtdet.passes.provenance import Origin
from trtdet.quantization import PrecisionPlan

_FLOAT, _HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
_PASSING = ("Cast", "Identity", "Reshape", "Transpose", "Flatten", "Concat")
"""Operators that hand a value on as it is, perhaps in another type."""

_IN_FLOAT = {Origin.DECODE: "the decoding of boxes", Origin.NMS: "the suppression"}


@dataclass(frozen=True)
class FloatOutput:
    """A convolution whose kernel writes float32.

    Attributes:
        convolution: it.
        tensors: the float32 tensors that its layer writes.
        cause: why they are not FP16.
    """

    convolution: Convolution
    tensors: tuple[Tensor, ...]
    cause: str

    @property
    def bytes(self) -> int:
        """How many fewer would be written in FP16."""
        return sum(tensor.bytes for tensor in self.tensors) // 2


def float_outputs(flow: Flow, plan: PrecisionPlan) -> Iterator[FloatOutput]:
    """Every convolution that reads INT8 or FP16 and writes float32, in the order of the plan."""
    for convolution in flow.convolutions.values():
        layer = flow.layers[convolution.layer]
        tensors = tuple(tensor for tensor in dict.fromkeys(layer.outputs) if tensor.type == "Float")
        if layer.input in ("Int8", "Half") and tensors:
            yield FloatOutput(convolution, tensors, _cause(flow, plan, convolution, tensors[0]))


def _cause(flow: Flow, plan: PrecisionPlan, convolution: Convolution, tensor: Tensor) -> str:
    node, entry = flow.nodes[convolution.name], plan.entries[convolution.name]
    if not flow.readers[tensor.name]:
        return "it is an output of the engine"
    reasons = []
    if entry.float_output:
        reasons.append(entry.float_output)
    scales = _weight_scales(flow, node)
    if scales > 1 and any(convolution.name in flow.layers[reader].onnx for reader in flow.readers[tensor.name]):
        reasons.append(f"its kernel leaves the {scales} scales of its weights, one a channel, to the next")
    reader = _float_reader(flow, plan, node)
    if reader:
        reasons.append(reader)
    elif not entry.float_output and flow.types.get(node.output[0]) == _FLOAT:
        reasons.append("the model is float32 after it")
    known = ", though the model is FP16 after it" if flow.types.get(node.output[0]) == _HALF else ""
    return ", and ".join(reasons) or f"the builder chose such a kernel{known}"


def _weight_scales(flow: Flow, node: onnx.NodeProto) -> int:
    """How many scales the quantised weights of a convolution have; 0 where they are not quantised."""
    maker = flow.maker.get(node.input[1])
    if maker is None or maker.op_type != "DequantizeLinear":
        return 0
    return math.prod(flow.constants.get(maker.input[1], (0,)))


def _float_reader(flow: Flow, plan: PrecisionPlan, node: onnx.NodeProto) -> str:
    """Which reader of a convolution wants float32, after casts; empty where none is known to."""
    waiting, seen = [node.output[0]], set[str]()
    while waiting:
        tensor = waiting.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        if tensor in flow.outputs:
            return "an output of the engine that it gives is float32"
        for reader in flow.takers.get(tensor, ()):
            origin = flow.origins.get(reader.name)
            entry = plan.entries.get(reader.name)
            if origin in _IN_FLOAT:
                return f"{_IN_FLOAT[origin]} reads it, which is float32"
            if entry is not None and entry.precision == "fp32":
                return f"{reader.name} reads it, which the plan has in FP32 ({entry.reason})"
            if reader.op_type in _PASSING:
                waiting.extend(reader.output)
    return ""
