"""Q/DQ pairs in the form that TensorRT accepts: symmetric INT8, zero point 0, float bias.

Activations have one scale a tensor; weights one scale an output channel, on axis 0. A tensor is quantised once and
all its readers share the pair.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.calibration import Ranges
from trtdet.errors import CalibrationError
from trtdet.passes.base import Writer
from trtdet.passes.model import to_graph, to_model
from trtdet.quantize.placement import Placement

QMAX = 127.0


def insert_qdq(model: onnx.ModelProto, placement: Placement, ranges: Ranges) -> onnx.ModelProto:
    """Writes the explicit INT8 model: the float model is not changed.

    Args:
        model: float model, opset 13 or newer.
        placement: where the pairs go.
        ranges: amax of each tensor in ``placement.activations``.

    Raises:
        CalibrationError: ``ranges`` lacks a tensor, so it was made from another model.
    """
    missing = [name for name in placement.activations if name not in ranges.tensors]
    if missing:
        raise CalibrationError(
            f"the ranges lack {len(missing)} of the model's {len(placement.activations)} activations, the first is "
            f"'{missing[0]}': they were made from another model; calibrate this one"
        )
    graph = to_graph(model)
    nodes = {node.name: node for node in graph.nodes}
    tensors = graph.tensors()
    write = Writer(graph, "trtdet/qdq")
    for name in placement.activations:
        pair = _activation_pair(write, tensors[name], ranges.tensors[name].scale)
        for reader, position in placement.readers[name]:
            nodes[reader].inputs[position] = pair
    shared: dict[str, gs.Variable] = {}
    for name in placement.plan.names("int8"):
        weight = nodes[name].inputs[1]
        if weight.name not in shared:
            shared[weight.name] = _weight_pair(write, weight)
        nodes[name].inputs[1] = shared[weight.name]
    return to_model(graph)


def weight_scales(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """The scale of each output channel, float32 (out,): ``max |w| / 127``, and 1 / 127 for a channel of zeros."""
    amax = np.abs(weight.reshape(len(weight), -1)).max(axis=1)
    return np.where(amax > 0, amax, 1.0).astype(np.float32) / np.float32(QMAX)


def _activation_pair(write: Writer, tensor: gs.Tensor, scale: float) -> gs.Variable:
    step, zero = write.const(scale, np.float32), write.const(0, np.int8)
    return write("DequantizeLinear", write("QuantizeLinear", tensor, step, zero), step, zero)


def _weight_pair(write: Writer, weight: gs.Constant) -> gs.Variable:
    scales = weight_scales(weight.values)
    step, zero = write.const(scales, np.float32), write.const(np.zeros(len(scales)), np.int8)
    return write("DequantizeLinear", write("QuantizeLinear", weight, step, zero, axis=0), step, zero, axis=0)
