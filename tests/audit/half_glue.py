"""INT8 models with FP16 between the kernels, written here so that the audit is tested alone."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def with_half_glue(model: onnx.ModelProto, per_tensor: bool) -> onnx.ModelProto:
    """A float32 model, with or without Q/DQ pairs, as one in FP16 with a cast behind its input and before its output.

    Args:
        model: from ``x`` to ``y``, both float32.
        per_tensor: give quantised weights one scale a tensor, with a Mul and an Add for each channel after the
            convolution.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    made.opset_import[0].version = 19
    for place, constant in enumerate(graph.initializer):
        if constant.data_type == TensorProto.FLOAT:
            _put(graph, place, numpy_helper.to_array(constant).astype(np.float16))
    for node in graph.node:
        node.input[:] = ["x/half" if name == "x" else name for name in node.input]
        node.output[:] = ["y/half" if name == "y" else name for name in node.output]
    if per_tensor:
        for node in [node for node in graph.node if node.op_type == "Conv"]:
            _one_scale(graph, node)
    graph.node.insert(0, helper.make_node("Cast", ["x"], ["x/half"], "cast in", to=TensorProto.FLOAT16))
    graph.node.append(helper.make_node("Cast", ["y/half"], ["y"], "cast out", to=TensorProto.FLOAT))
    del graph.value_info[:]
    return onnx.shape_inference.infer_shapes(made, strict_mode=True)


def _put(graph: onnx.GraphProto, place: int, value: np.ndarray) -> None:
    graph.initializer[place].CopyFrom(numpy_helper.from_array(value, graph.initializer[place].name))


def _one_scale(graph: onnx.GraphProto, conv: onnx.NodeProto) -> None:
    maker = {name: node for node in graph.node for name in node.output}
    places = {constant.name: place for place, constant in enumerate(graph.initializer)}
    if conv.input[1] not in maker:
        return
    dequantize = maker[conv.input[1]]
    quantize = maker[dequantize.input[0]]
    values, scales = (
        numpy_helper.to_array(graph.initializer[places[name]]).astype(np.float32) for name in quantize.input[:2]
    )
    largest = scales.max()
    integers = np.round(values / scales.reshape(-1, 1, 1, 1))
    _put(graph, places[quantize.input[0]], (integers * largest).astype(np.float16))
    _put(graph, places[quantize.input[1]], np.array(largest, np.float16))
    _put(graph, places[quantize.input[2]], np.array(0, np.int8))
    del quantize.attribute[:], dequantize.attribute[:]
    bias = numpy_helper.to_array(graph.initializer[places[conv.input[2]]])
    last, name = conv.output[0], conv.name
    del conv.input[2]
    conv.output[0] = f"{last}/raw"
    ratio, offset = (value.astype(np.float16).reshape(1, -1, 1, 1) for value in (scales / largest, bias))
    graph.initializer.extend(
        [numpy_helper.from_array(ratio, f"{name}/ratio"), numpy_helper.from_array(offset, f"{name}/bias")]
    )
    after = list(graph.node).index(conv) + 1
    graph.node.insert(after, helper.make_node("Mul", [f"{last}/raw", f"{name}/ratio"], [f"{last}/mul"], f"{name}/Mul"))
    graph.node.insert(after + 1, helper.make_node("Add", [f"{last}/mul", f"{name}/bias"], [last], f"{name}/Add"))
