"""Types and constants around a node to be lowered, and the error if it cannot be lowered."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.passes.protobuf import ONNX_DOMAINS


class InexpressibleError(Exception):
    """Reason why a node cannot be expressed in the older opset."""


@dataclass(frozen=True, eq=False)
class Scope:
    """Types and constants by tensor name, including those of outer graphs."""

    source: int  # opset of the node
    target: int  # opset to lower it to
    missing: frozenset[str]  # operators to replace by their definition in any opset
    types: MutableMapping[str, onnx.TypeProto.Tensor]
    constants: MutableMapping[str, onnx.TensorProto]

    def inner(self, graph: onnx.GraphProto) -> Scope:
        types, constants = types_and_constants(graph)
        return replace(self, types=ChainMap(types, self.types), constants=ChainMap(constants, self.constants))

    def type(self, name: str) -> int:
        """Element type; 0 if unknown."""
        return self.types[name].elem_type if name in self.types else 0

    def shape(self, name: str) -> list[int | None] | None:
        """Sizes, None for an open dimension; None instead of a list for an unknown rank."""
        if name not in self.types or not self.types[name].HasField("shape"):
            return None
        return [dim.dim_value if dim.HasField("dim_value") else None for dim in self.types[name].shape.dim]

    def rank(self, name: str) -> int:
        shape = self.shape(name)
        if shape is None:
            raise InexpressibleError(f"the rank of its input '{name}' is not known")
        return len(shape)

    def size(self, name: str, axis: int) -> int:
        shape = self.shape(name)
        size = shape[axis] if shape is not None else None
        if size is None:
            raise InexpressibleError(f"the size of axis {axis} of its input '{name}' is not fixed")
        return size

    def constant(self, name: str, called: str) -> NDArray[Any]:
        if name not in self.constants:
            raise InexpressibleError(f"its {called} are computed in the graph, an older opset needs them as constants")
        return onnx.numpy_helper.to_array(self.constants[name])


def types_and_constants(graph: onnx.GraphProto) -> tuple[dict[str, onnx.TypeProto.Tensor], dict[str, onnx.TensorProto]]:
    """Types and constant values of a graph's tensors, by name."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        for entry in node.attribute if node.op_type == "Constant" and node.domain in ONNX_DOMAINS else ():
            value = onnx.helper.get_attribute_value(entry)
            if not isinstance(value, onnx.TensorProto):
                dtype = np.float32 if entry.name in ("value_float", "value_floats") else np.int64
                value = onnx.numpy_helper.from_array(np.array(value, dtype))
            constants[node.output[0]] = value
    types = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.input, *graph.output)}
    for name, tensor in constants.items():
        types[name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims).tensor_type
    return {name: kind for name, kind in types.items() if kind.elem_type}, constants


def text_of(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else f"{value}"
