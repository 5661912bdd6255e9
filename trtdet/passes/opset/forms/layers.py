"""Layers: pooling, sampling, activations, normalisation, attention."""

from __future__ import annotations

import numpy as np
import onnx

from trtdet.passes.opset.nodes import NodeWriter, attribute
from trtdet.passes.opset.schemas import text_of
from trtdet.passes.opset.scope import InexpressibleError, Scope


def _pool(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """22: with ``ceil_mode``, windows that start in the padding at the end are left out."""
    node = write.node
    if (
        not scope.crosses(22)
        or not attribute(node, "ceil_mode", 0)
        or attribute(node, "auto_pad", b"").startswith(b"SAME")
    ):
        return write.before()
    kernel = attribute(node, "kernel_shape")
    strides, dilations = (attribute(node, name, [1] * len(kernel)) for name in ("strides", "dilations"))
    pads = np.array(attribute(node, "pads", [0] * 2 * len(kernel))).reshape(2, -1)
    for axis, window in enumerate(kernel):
        size = scope.size(node.input[0], axis + 2)
        reach = dilations[axis] * (window - 1) + 1
        windows = -(-(size + pads[:, axis].sum() - reach) // strides[axis]) + 1
        if (windows - 1) * strides[axis] >= size + pads[0, axis]:
            raise InexpressibleError(
                f"its last window along axis {axis + 2} starts in the padding, which is left out from opset 22 on and "
                "counted before"
            )
    return write.before()


def _roi_align(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """16: the grid of samples may be, and by default is, moved by half a pixel."""
    if scope.crosses(16):
        mode = attribute(write.node, "coordinate_transformation_mode", b"half_pixel")
        if mode != b"output_half_pixel":
            raise InexpressibleError(f"coordinate_transformation_mode = {text_of(mode)} exists from opset 16 on")
        write.drop("coordinate_transformation_mode")
    return write.before()


def _grid_sample(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """20: other names of the modes; any number of axes."""
    node = write.node
    if scope.crosses(20):
        if scope.rank(node.input[0]) != 4:
            raise InexpressibleError("inputs other than (N, C, H, W) exist from opset 20 on")
        mode = attribute(node, "mode", b"linear").decode()
        write.put("mode", {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode))
    return write.before()


def _swish(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """24: the operator. Its definition multiplies by ``alpha`` even where that is 1."""
    node = write.node
    if not scope.crosses(24) or attribute(node, "alpha", 1.0) != 1.0:
        return write.before()
    write("Mul", node.input[0], write("Sigmoid", node.input[0]))
    return write.instead()


def _group_normalization(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """21: scale and bias are those of a channel.

    A group is what InstanceNormalization takes for a channel, as in Wu and He, "Group Normalization" (ECCV 2018),
    section 3.1. ONNX's own definition takes the variance as the difference of two means, which loses digits.
    """
    node = write.node
    if not scope.crosses(21):
        return write.before()
    source, scale, bias = node.input
    groups, rank = attribute(node, "num_groups"), scope.rank(source)
    kind, computed = scope.type(source), attribute(node, "stash_type", onnx.TensorProto.FLOAT)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(computed)
    normal = write("Reshape", source, write.const([0, groups, -1], np.int64))
    if computed != kind:
        normal = write("Cast", normal, to=computed)
    ones, zeros = write.const(np.ones(groups), dtype), write.const(np.zeros(groups), dtype)
    normal = write("InstanceNormalization", normal, ones, zeros, epsilon=attribute(node, "epsilon", 1e-5))
    if computed != kind:
        normal = write("Cast", normal, to=kind)
    trailing = write.const(range(1, rank - 1), np.int64)
    normal = write("Reshape", normal, write("Shape", source))
    scaled = write("Mul", normal, write("Unsqueeze", scale, trailing))
    write("Add", scaled, write("Unsqueeze", bias, trailing))
    return write.instead()


def _attention(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """24: which keys a query sees where there are more keys than queries, or the mask is shorter."""
    if scope.crosses(24):
        raise InexpressibleError("it hides other keys from opset 24 on")
    return write.before()


def _dft(write: NodeWriter, scope: Scope) -> list[onnx.NodeProto]:
    """20: the axis is an input, with another default."""
    if scope.crosses(20):
        raise InexpressibleError("its axis is an input from opset 20 on")
    return write.before()


FORMS = {
    "AveragePool": _pool,
    "MaxPool": _pool,
    "RoiAlign": _roi_align,
    "GridSample": _grid_sample,
    "Swish": _swish,
    "GroupNormalization": _group_normalization,
    "Attention": _attention,
    "DFT": _dft,
}
