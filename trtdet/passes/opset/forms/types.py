"""Operators that decide on a type: casts, quantisation, Mod."""

from __future__ import annotations

import numpy as np
import onnx

from trtdet.passes.opset.nodes import NodeWriter, attribute
from trtdet.passes.opset.scope import InexpressibleError, Scope


def _cast(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """24: infinity as float8."""
    kinds = (onnx.TensorProto.FLOAT8E4M3FNUZ, onnx.TensorProto.FLOAT8E5M2FNUZ)
    if scope.crosses(24) and scope.type(write.node.output[0]) in kinds:
        raise InexpressibleError("infinity becomes another value of that type from opset 24 on")
    return write.before()


def _cast_like(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """15: the operator; 24: as Cast."""
    kind = scope.type(write.node.input[1])
    if scope.crosses(15) and kind:
        write("Cast", write.node.input[0], to=kind)
        return write.instead()
    return _cast(write, scope)


def _mod(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """28: floats with the sign of the divisor."""
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16)
    if scope.crosses(28) and not attribute(write.node, "fmod", 0) and scope.type(write.node.input[0]) in floats:
        raise InexpressibleError("of floats it takes the sign of the divisor from opset 28 on only")
    return write.before()


def _quantize(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """21: ``output_dtype`` sets the type that otherwise the zero point has."""
    node = write.node
    kind = attribute(node, "output_dtype", 0)
    if not scope.crosses(21) or not kind:
        return write.before()
    shape = scope.shape(node.input[1])
    if not write.input(2) and (shape is None or None in shape):
        raise InexpressibleError(f"its attribute output_dtype = {kind} exists from opset 21 on")
    write.drop("output_dtype")
    if not write.input(2) and shape is not None:
        write.feed(2, write.const(np.zeros(shape), onnx.helper.tensor_dtype_to_np_dtype(kind)))
    return write.before()


def _dequantize(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """23: ``output_dtype`` sets the type that otherwise the scale has."""
    if scope.crosses(23) and attribute(write.node, "output_dtype", 0) == scope.type(write.node.input[1]):
        write.drop("output_dtype")
    return write.before()


FORMS = {
    "Cast": _cast,
    "CastLike": _cast_like,
    "Mod": _mod,
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
}
