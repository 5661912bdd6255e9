"""TRT_SiLU(x) -> standard operators: the operators of trtdet's plugin library, as ONNX schemas and for the CPU.

``TRT_SiLU`` (``x * sigmoid(x)``) and ``TRT_HardSwish`` (``x * clip(x / 6 + 1/2, 0, 1)``) take a tensor (N, C, ...)
and give a tensor of the same shape. TensorRT's parser finds the plugin by the operator's name, ``plugin_version`` and
``plugin_namespace``. The other attributes:

- ``output_type``: -1 the input's, 0 float32, 1 float16, 2 int8 (the values of ``nvinfer1::DataType``);
- ``input_scale`` (1 or C): the real value of a step of an INT8 input; float inputs ignore it;
- ``factor``, ``offset`` (1 or C): ``y = factor * act(x) + offset``. For an INT8 output both are divided by the output's
  step already, ``y`` is rounded half to even and saturated to -128..127, and NaN becomes 0.

All arithmetic is float32, rounded once a step: ``q * input_scale``, the activation, the product, the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.defs import OpSchema

from trtdet.errors import ModelError
from trtdet.passes.base import PLUGIN_DOMAIN

VERSION = 1
NAMESPACE = "trtdet"
SILU, HARD_SWISH = "TRT_SiLU", "TRT_HardSwish"
PLUGIN_ACTIVATIONS = (SILU, HARD_SWISH)
"""The operators of the plugin library."""

SAME, INT8 = -1, 2
"""Values of ``output_type``."""

_FLOAT, _HALF, _BYTE = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.INT8
_TYPES = {0: _FLOAT, 1: _HALF, INT8: _BYTE}


def attributes(**changed: Any) -> dict[str, Any]:
    """All attributes of a plugin node, ``changed`` or at their defaults, in the plugin's order: a plugin
    that is compiled ahead of time takes them by position."""
    found = {"plugin_version": "1", "plugin_namespace": NAMESPACE}
    return {**found, "output_type": SAME, "input_scale": [1.0], "factor": [1.0], "offset": [0.0], **changed}


def plugin_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes that need the plugin library, also in branches and loops."""
    for node in graph.node:
        if node.domain == PLUGIN_DOMAIN and node.op_type in PLUGIN_ACTIVATIONS:
            yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from plugin_nodes(inner)


def plain(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every plugin node written as standard operators that compute the same; output names stay.

    Args:
        model: it is not changed; without plugin nodes it is returned itself.

    Raises:
        ModelError: an attribute fits neither the operator nor its input.
    """
    if next(plugin_nodes(model.graph), None) is None:
        return model
    written: onnx.ModelProto = onnx.shape_inference.infer_shapes(model)
    _lower(written.graph, {})
    if all(node.domain != PLUGIN_DOMAIN for node in written.graph.node):
        imports = [entry for entry in written.opset_import if entry.domain != PLUGIN_DOMAIN]
        del written.opset_import[:]
        written.opset_import.extend(imports)
    return written


def _lower(graph: onnx.GraphProto, outer: Mapping[str, onnx.TypeProto.Tensor]) -> None:
    types = {**outer}
    values = (*graph.value_info, *graph.input, *graph.output)
    types.update({value.name: value.type.tensor_type for value in values})
    types.update({tensor.name: _type_of(tensor) for tensor in graph.initializer})
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node:
                    _lower(inner, types)
        known = node.domain == PLUGIN_DOMAIN and node.op_type in PLUGIN_ACTIVATIONS
        nodes += _lowered(node, types.get(node.input[0])) if known else [node]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _type_of(tensor: onnx.TensorProto) -> onnx.TypeProto.Tensor:
    return onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims).tensor_type


def _lowered(node: onnx.NodeProto, source: onnx.TypeProto.Tensor | None) -> list[onnx.NodeProto]:
    """Float32 operators, each for a rounding of the contract; steps that change nothing are left out."""
    given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    if source is None or source.elem_type not in _TYPES.values():
        raise ModelError(f"node '{node.name}' ({node.op_type}): its input must be float32, float16 or int8")
    if given.get("output_type", SAME) not in (SAME, *_TYPES):
        raise ModelError(
            f"node '{node.name}' ({node.op_type}): output_type is {given['output_type']}; allowed: -1 as the input, "
            "0 float32, 1 float16, 2 int8"
        )
    wanted = _TYPES.get(given.get("output_type", SAME), source.elem_type)
    write = _Chain(node, source)
    if source.elem_type != _FLOAT:
        write("Cast", to=_FLOAT)
    if source.elem_type == _BYTE:
        write.by_channel("Mul", given.get("input_scale", [1.0]), 1.0)
    value = write.tensor
    if node.op_type == SILU:
        write("Sigmoid")
        write("Mul", value)
    else:
        write("Div", write.const(6.0))
        write("Add", write.const(0.5))
        write("Clip", write.const(0.0), write.const(1.0))
        write("Mul", value)
    write.by_channel("Mul", given.get("factor", [1.0]), 1.0)
    write.by_channel("Add", given.get("offset", [0.0]), 0.0)
    if wanted == _BYTE:
        rounded = write("Round")
        missing = write("IsNaN")
        write.tensor = write.node("Where", missing, write.const(0.0), rounded)
        write("Clip", write.const(-128.0), write.const(127.0))
    if wanted != _FLOAT:
        write("Cast", to=wanted)
    return write.ended()


class _Chain:
    """A row of nodes, named after the plugin node that they replace."""

    def __init__(self, node: onnx.NodeProto, source: onnx.TypeProto.Tensor) -> None:
        self._plugin = node
        self._shape = source.shape if source.HasField("shape") else None
        self._nodes: list[onnx.NodeProto] = []
        self.tensor: str = node.input[0]

    def node(self, op: str, *inputs: str, **attrs: Any) -> str:
        name = f"{self._plugin.output[0]}/plain/{op}_{len(self._nodes)}"
        self._nodes.append(onnx.helper.make_node(op, inputs, [name], name, **attrs))
        return name

    def __call__(self, op: str, *others: str, **attrs: Any) -> str:
        self.tensor = self.node(op, self.tensor, *others, **attrs)
        return self.tensor

    def const(self, value: float | NDArray[np.float32]) -> str:
        return self.node("Constant", value=onnx.numpy_helper.from_array(np.asarray(value, np.float32)))

    def by_channel(self, op: str, values: Sequence[float], neutral: float) -> None:
        array = np.array(values, np.float32)
        if array.size == 1:
            if array[0] != neutral:
                self(op, self.const(array[0]))
            return
        rank = len(self._shape.dim) if self._shape is not None else 0
        channels = self._shape.dim[1].dim_value if self._shape is not None and rank > 1 else 0
        if rank < 2 or channels not in (0, array.size):
            raise ModelError(
                f"node '{self._plugin.name}' ({self._plugin.op_type}) has {array.size} values for a channel each, its "
                f"input has {channels if rank > 1 else 'no'} channels; give 1 or as many as there are channels"
            )
        self(op, self.const(array.reshape(-1, *[1] * (rank - 2))))

    def ended(self) -> list[onnx.NodeProto]:
        self._nodes[-1].output[0] = self._plugin.output[0]
        return self._nodes


def _infer(context: Any) -> None:
    """The output has the input's shape and the type of ``output_type``."""
    source = context.get_input_type(0)
    if source is None or not source.HasField("tensor_type"):
        return
    made = onnx.TypeProto()
    made.CopyFrom(source)
    asked = context.get_attribute("output_type")
    made.tensor_type.elem_type = _TYPES.get(SAME if asked is None else asked.i, source.tensor_type.elem_type)
    context.set_output_type(0, made)


def _register() -> None:
    """Makes the operators known to ONNX's checker and its shape inference, once in a process."""
    default = onnx.helper.make_attribute
    for name in PLUGIN_ACTIVATIONS:
        if onnx.defs.has(name, PLUGIN_DOMAIN):
            continue
        types = ["tensor(float)", "tensor(float16)", "tensor(int8)"]
        schema = OpSchema(
            name,
            PLUGIN_DOMAIN,
            VERSION,
            doc=__doc__ or "",
            inputs=[OpSchema.FormalParameter("x", "T", "(N, C, ...)")],
            outputs=[OpSchema.FormalParameter("y", "U", "(N, C, ...)")],
            type_constraints=[("T", types, ""), ("U", types, "")],
            attributes=[
                OpSchema.Attribute("plugin_version", default("plugin_version", "1")),
                OpSchema.Attribute("plugin_namespace", default("plugin_namespace", NAMESPACE)),
                OpSchema.Attribute("output_type", default("output_type", SAME)),
                OpSchema.Attribute("input_scale", default("input_scale", [1.0])),
                OpSchema.Attribute("factor", default("factor", [1.0])),
                OpSchema.Attribute("offset", default("offset", [0.0])),
            ],
        )
        schema.set_type_and_shape_inference_function(_infer)
        onnx.defs.register_schema(schema)


_register()
