"""TRT_SiLU(x) -> standard operators: ONNX schemas and CPU form of trtdet's plugin operators

``TRT_SiLU`` (``x * sigmoid(x)``) and ``TRT_HardSwish`` (``x * clip(x / 6 + 1/2, 0, 1)``) take a tensor (N, C, ...) and
give one of the same shape. TensorRT's parser finds the plugin by operator name, ``plugin_version`` and
``plugin_namespace``. Other attributes:

- ``output_type``: -1 as the input, 0 float32, 1 float16, 2 int8 (values of ``nvinfer1::DataType``);
- ``input_scale`` (1 or C): scale of an INT8 input; ignored for float inputs;
- ``factor``, ``offset`` (1 or C): ``y = factor * act(x) + offset``. For an INT8 output both are divided by the output
  scale already; ``y`` is rounded half to even and saturated to -128..127, and NaN becomes 0.

All arithmetic is float32, rounded after each step: ``q * input_scale``, activation, product, sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx.defs import OpSchema

from trtdet.errors import ModelError
from trtdet.passes.base import PLUGIN_DOMAIN, NodeWriter, register
from trtdet.passes.protobuf import graphs, replace_nodes, subgraphs

VERSION = 1
NAMESPACE = "trtdet"
SILU, HARD_SWISH = "TRT_SiLU", "TRT_HardSwish"
PLUGIN_ACTIVATIONS = (SILU, HARD_SWISH)  # operators of the plugin library

SAME, INT8 = -1, 2  # values of ``output_type``

_FLOAT, _HALF, _BYTE = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.INT8
_TYPES = {0: _FLOAT, 1: _HALF, INT8: _BYTE}


def attributes(**changed: Any) -> dict[str, Any]:
    """All attributes of a plugin node, ``changed`` or default, in the plugin's order: a plugin that is compiled ahead
    of time reads them by position."""
    fixed = {"plugin_version": "1", "plugin_namespace": NAMESPACE}
    return {**fixed, "output_type": SAME, "input_scale": [1.0], "factor": [1.0], "offset": [0.0], **changed}


def plugin_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes that need the plugin library, also in branches and loops."""
    nodes = (node for part in graphs(graph) for node in part.node)
    return (node for node in nodes if node.domain == PLUGIN_DOMAIN and node.op_type in PLUGIN_ACTIVATIONS)


def plain(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replaces every plugin node by standard operators that compute the same; output names stay.

    ``model`` does not change; it is returned itself if it has no plugin nodes. Raises ModelError if an attribute does
    not fit the operator or its input.
    """
    if next(plugin_nodes(model.graph), None) is None:
        return model
    written: onnx.ModelProto = onnx.shape_inference.infer_shapes(model)
    _lower(written.graph, {})
    if all(node.domain != PLUGIN_DOMAIN for node in written.graph.node):
        for entry in [entry for entry in written.opset_import if entry.domain == PLUGIN_DOMAIN]:
            written.opset_import.remove(entry)
    return written


def _lower(graph: onnx.GraphProto, outer: Mapping[str, onnx.TypeProto.Tensor]) -> None:
    types = dict(outer)
    for value in (*graph.value_info, *graph.input, *graph.output):
        types[value.name] = value.type.tensor_type
    for tensor in graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims).tensor_type
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for inner in subgraphs(node):
            _lower(inner, types)
        ours = node.domain == PLUGIN_DOMAIN and node.op_type in PLUGIN_ACTIVATIONS
        nodes += _lowered(node, types.get(node.input[0])) if ours else [node]
    replace_nodes(graph, nodes)


def _lowered(node: onnx.NodeProto, source: onnx.TypeProto.Tensor | None) -> list[onnx.NodeProto]:
    """Float32 operators for a plugin node, one per rounding; steps without effect are left out."""
    values = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    title = f"node '{node.name}' ({node.op_type})"
    if source is None or source.elem_type not in _TYPES.values():
        raise ModelError(f"{title}: its input must be float32, float16 or int8")
    if values.get("output_type", SAME) not in (SAME, *_TYPES):
        raise ModelError(
            f"{title}: output_type is {values['output_type']}; allowed: -1 as the input, 0 float32, 1 float16, 2 int8"
        )
    output_type = _TYPES.get(values.get("output_type", SAME), source.elem_type)
    write = NodeWriter(node, "plain")
    value: str = node.input[0]

    def const(number: float) -> str:
        return write.const(number, np.float32)

    def by_channel(op: str, tensor: str, attribute: str, neutral: float) -> str:
        numbers = np.array(values.get(attribute, [neutral]), np.float32)
        if numbers.size == 1:
            return tensor if numbers[0] == neutral else write(op, tensor, const(numbers[0]))
        shape = list(source.shape.dim) if source.HasField("shape") else []
        channels = shape[1].dim_value if len(shape) > 1 else 0
        if len(shape) < 2 or channels not in (0, numbers.size):
            raise ModelError(
                f"{title} has {numbers.size} values in {attribute}, but its input has "
                f"{channels if len(shape) > 1 else 'no'} channels; give one value, or one for each channel"
            )
        return write(op, tensor, write.const(numbers.reshape(-1, *[1] * (len(shape) - 2)), np.float32))

    if source.elem_type != _FLOAT:
        value = write("Cast", value, to=_FLOAT)
    if source.elem_type == _BYTE:
        value = by_channel("Mul", value, "input_scale", 1.0)
    if node.op_type == SILU:
        gate = write("Sigmoid", value)
    else:
        sixth = write("Div", value, const(6.0))
        gate = write("Clip", write("Add", sixth, const(0.5)), const(0.0), const(1.0))
    value = by_channel("Mul", write("Mul", gate, value), "factor", 1.0)
    value = by_channel("Add", value, "offset", 0.0)
    if output_type == _BYTE:
        rounded = write("Round", value)
        number = write("Where", write("IsNaN", rounded), const(0.0), rounded)
        value = write("Clip", number, const(-128.0), const(127.0))
    if output_type != _FLOAT:
        write("Cast", value, to=output_type)
    write.nodes[-1].output[0] = node.output[0]
    return write.nodes


def _infer(context: Any) -> None:
    """The output has the input's shape and the type of ``output_type``."""
    source = context.get_input_type(0)
    if source is None or not source.HasField("tensor_type"):
        return
    output, element = onnx.TypeProto(), context.get_attribute("output_type")
    output.CopyFrom(source)
    output.tensor_type.elem_type = _TYPES.get(SAME if element is None else element.i, source.tensor_type.elem_type)
    context.set_output_type(0, output)


def _register() -> None:
    types = ["tensor(float)", "tensor(float16)", "tensor(int8)"]
    for name in PLUGIN_ACTIVATIONS:
        schema = OpSchema(
            name,
            PLUGIN_DOMAIN,
            VERSION,
            doc=__doc__ or "",
            inputs=[OpSchema.FormalParameter("x", "T", "(N, C, ...)")],
            outputs=[OpSchema.FormalParameter("y", "U", "(N, C, ...)")],
            type_constraints=[("T", types, ""), ("U", types, "")],
            attributes=[
                OpSchema.Attribute(key, onnx.helper.make_attribute(key, value)) for key, value in attributes().items()
            ],
        )
        register(schema, _infer)


_register()
