"""Whether a model is valid ONNX, and whether its weights are numbers.

ONNX's checker reads neither the values of weights nor most relations between the shapes of several tensors, its shape
inference assumes valid nodes, and both raise exceptions of many classes. Here each fault is a ModelError that names the
node or the tensor. Its problem begins with a verb: the caller names the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx

from trtdet.errors import ModelError, one_line
from trtdet.passes.provenance import graphs, subgraphs

LARGEST_TENSOR = 2**31 - 1
"""Elements that a tensor may have; TensorRT takes no more, and only a wrong size or attribute gives them."""

LONGEST_SHAPE = 2**16
"""Elements of a vector of integers whose declared length is believed; shapes and axes have a few."""

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_WINDOWED = (*_CONVOLUTIONS, "AveragePool", "MaxPool", "LpPool")

_TAKE_INFINITY = frozenset(
    (
        *("Pad", "Clip", "Where", "Max", "Min", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
        *("Cast", "Concat", "Expand", "Gather", "GatherElements", "Identity", "Reshape", "ScatterElements"),
        *("ScatterND", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Loop", "If", "Scan"),
    )
)
"""Operators that choose or move values: an infinity that they read is a bound or a filling."""

_FLOATS = frozenset(
    (
        *(onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16),
        *(onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT8E4M3FNUZ),
        *(onnx.TensorProto.FLOAT8E5M2, onnx.TensorProto.FLOAT8E5M2FNUZ),
    )
)


def clear_unusable_dims(model: onnx.ModelProto) -> None:
    """Makes dimensions open that ONNX's shape inference fails on without an exception.

    It aborts the process on negative dimensions, and keeps 140 bytes for each element of a vector of integers, which
    may be a shape: a length over ``LONGEST_SHAPE`` is cleared.
    """
    for values in _value_infos(model):
        for value in values:
            _clear(value.type)


def _value_infos(model: onnx.ModelProto) -> Iterator[Iterator[onnx.ValueInfoProto]]:
    for graph in graphs(model.graph):
        yield iter((*graph.input, *graph.output, *graph.value_info))
    for function in model.functions:
        yield iter(function.value_info)


def _clear(kind: onnx.TypeProto) -> None:
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        dims = getattr(kind, which).shape.dim
        integers = getattr(kind, which).elem_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
        most = LONGEST_SHAPE if integers and len(dims) == 1 else None
        for dim in dims:
            if dim.dim_value < 0 or (most is not None and dim.dim_value > most):
                dim.ClearField("dim_value")
    elif which in ("sequence_type", "optional_type"):
        _clear(getattr(kind, which).elem_type)
    elif which == "map_type":
        _clear(kind.map_type.value_type)


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Puts the nodes of a graph that are not in the order of computation into it; others stay where they are.

    Raises:
        ModelError: nodes depend on each other in a circle, or two give the same tensor.
    """
    makers = _makers(graph)
    needed = [_needed(node, makers) - {index} for index, node in enumerate(graph.node)]
    in_order = all(earlier < index for index, before in enumerate(needed) for earlier in before)
    itself = next((node for node in graph.node if not set(node.output).isdisjoint({*node.input} - {""})), None)
    if itself is not None:
        raise ModelError(f"is not valid ONNX: node '{itself.name or itself.op_type}' reads its own output")
    if in_order:
        return
    readers: dict[int, list[int]] = {}
    for index, before in enumerate(needed):
        for earlier in before:
            readers.setdefault(earlier, []).append(index)
    waiting = [len(before) for before in needed]
    ready = [index for index, count in enumerate(waiting) if not count][::-1]
    order: list[int] = []
    while ready:
        order.append(ready.pop())
        for reader in readers.get(order[-1], ()):
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    if len(order) < len(needed):
        stuck = graph.node[next(index for index, count in enumerate(waiting) if count)]
        raise ModelError(f"is not valid ONNX: node '{stuck.name or stuck.op_type}' depends on its own output")
    nodes = [onnx.NodeProto.FromString(graph.node[index].SerializeToString()) for index in order]
    del graph.node[:]
    graph.node.extend(nodes)


def _makers(graph: onnx.GraphProto) -> dict[str, int]:
    """By tensor, the position of the node that gives it."""
    inputs = {value.name for value in graph.input}
    makers: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        for name in filter(None, node.output):
            if name in makers or name in inputs:
                raise ModelError(
                    f"is not valid ONNX: node '{node.name or node.op_type}' gives a tensor '{name}', which another "
                    "node gives or which is an input",
                    "export it again with a name for each tensor",
                )
            makers[name] = index
    return makers


def _needed(node: onnx.NodeProto, makers: dict[str, int]) -> set[int]:
    found = {makers[name] for name in node.input if name in makers}
    for inner in subgraphs(node):
        for inner_node in inner.node:
            found |= _needed(inner_node, makers)
        found |= {makers[value.name] for value in inner.output if value.name in makers}
    return found


def check(model: onnx.ModelProto) -> None:
    """Checks a model, sorted and without negative dimensions; it is not changed.

    Raises:
        ModelError: a rule of ONNX is broken; the data of a weight does not fit its shape and type, or is not
            finite; tensors that belong together have sizes that do not fit; a tensor is larger than ``LARGEST_TENSOR``.
    """
    _check_tensors(model)
    inferred = onnx.ModelProto()
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        # Forms that do no harm and that exporters write: outputs without a shape, a file format of tomorrow.
        inferred.ir_version = min(inferred.ir_version, onnx.IR_VERSION)
        for value in inferred.graph.output:
            if value.type.WhichOneof("value") in (None, "tensor_type"):
                value.type.tensor_type.shape.SetInParent()
                value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or onnx.TensorProto.FLOAT
        onnx.checker.check_model(inferred)
    except Exception as error:  # the checker, shape inference and protobuf raise classes with no common base
        raise ModelError(f"is not valid ONNX: {one_line(error)}") from None
    known: dict[str, tuple[int | None, ...]] = {}
    for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
        if value.type.tensor_type.HasField("shape"):
            known[value.name] = tuple(
                dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim
            )
    for name, shape in known.items():
        size = math.prod(dim for dim in shape if dim)
        if size > LARGEST_TENSOR or any(dim is not None and dim < 0 for dim in shape):
            raise ModelError(f"has a tensor '{name}' of shape {list(shape)}, allowed are {LARGEST_TENSOR} elements")
    known |= {tensor.name: tuple(tensor.dims) for tensor in inferred.graph.initializer}
    for node in inferred.graph.node:
        _check_sizes(node, known)


def _check_tensors(model: onnx.ModelProto) -> None:
    every = list(graphs(model.graph))
    readers: dict[str, set[str]] = {}
    for graph in every:
        for node in graph.node:
            for name in node.input:
                readers.setdefault(name, set()).add(node.op_type)
        for value in graph.output:
            readers.setdefault(value.name, set()).add("Identity")
    for graph in every:
        for tensor in graph.initializer:
            _check_tensor(tensor, tensor.name, readers.get(tensor.name, set()))
        for node in graph.node:
            for attribute in node.attribute:
                for tensor in (attribute.t, *attribute.tensors):
                    read = readers.get(node.output[0], set()) if node.op_type == "Constant" and node.output else set()
                    _check_tensor(tensor, node.name or next(iter(node.output), node.op_type), read)


def _check_tensor(tensor: onnx.TensorProto, name: str, readers: set[str]) -> None:
    """Raises an error where the data does not fit the shape and the type, or holds NaN or an infinity."""
    if not tensor.data_type and not tensor.dims:
        return  # an attribute that is no tensor
    kind, dims = tensor.data_type, list(tensor.dims)
    if kind not in onnx.TensorProto.DataType.values() or kind == onnx.TensorProto.UNDEFINED:
        raise ModelError(f"is not valid ONNX: weight '{name}' has the unknown data type {kind}")
    if any(dim < 0 for dim in dims) or math.prod(dims) > LARGEST_TENSOR:
        raise ModelError(f"is not valid ONNX: weight '{name}' has shape {dims}, allowed are {LARGEST_TENSOR} elements")
    if kind == onnx.TensorProto.STRING:
        return
    try:
        values = onnx.numpy_helper.to_array(tensor)
    except Exception as error:  # NumPy, ml_dtypes and protobuf each have their own
        raise ModelError(
            f"is not valid ONNX: the data of weight '{name}' does not fit its shape {dims} ({one_line(error)})"
        ) from None
    if values.shape != tuple(dims):
        raise ModelError(f"is not valid ONNX: weight '{name}' has {values.size} values, its shape is {dims}")
    if kind not in _FLOATS or not readers or np.isfinite(values).all():
        return
    nan = int(np.isnan(values).sum())
    # A mask adds minus infinity where a softmax shall ignore a value.
    least = _TAKE_INFINITY | {"Add"} if not np.any(np.isposinf(values.astype(np.float64))) else _TAKE_INFINITY
    if nan or not readers <= least:
        infinite = int((~np.isfinite(values)).sum()) - nan
        raise ModelError(
            f"has a weight that is not finite: '{name}' holds {nan} NaN and {infinite} infinite of {values.size}",
            "train or export it again",
        )


def _check_sizes(node: onnx.NodeProto, shapes: dict[str, tuple[int | None, ...]]) -> None:
    """Raises an error where the inputs or attributes of an operator do not fit each other."""
    if node.domain or node.op_type not in (*_WINDOWED, "BatchNormalization"):
        return
    given = [shapes.get(name) if name else None for name in node.input]
    channels = given[0][1] if given and given[0] is not None and len(given[0]) > 1 else None
    wanted: list[tuple[str, int | None, int]] = []
    if node.op_type == "BatchNormalization":
        lengths = [shape[0] for shape in given[1:] if shape is not None and len(shape) == 1]
        known = next((size for size in (channels, *lengths) if size is not None), None)
        wanted = [("a parameter", size, known) for size in lengths if known is not None]
    elif node.op_type in _CONVOLUTIONS:
        wanted = _convolution_sizes(node, given, channels)
    else:
        kernel = _ints(node, "kernel_shape") or []
        _check_window(node, len(kernel))
    for part, got, needed in wanted:
        if got is not None and got != needed:
            raise ModelError(
                f"is not valid ONNX: node '{node.name or node.op_type}' ({node.op_type}) has {part} of size {got}, "
                f"{needed} is needed"
            )


def _convolution_sizes(
    node: onnx.NodeProto, given: list[tuple[int | None, ...] | None], channels: int | None
) -> list[tuple[str, int | None, int]]:
    """What has a size, the size, and the size that it must have."""
    weight = given[1] if len(given) > 1 else None
    if weight is None or len(weight) < 3 or weight[0] is None or weight[1] is None:
        return []
    group = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
    if group < 1 or weight[0] % group:
        raise ModelError(
            f"is not valid ONNX: node '{node.name or node.op_type}' ({node.op_type}) has {group} groups, its weights "
            f"have {weight[0]} channels"
        )
    inward, outward = weight[1] * group, weight[0]
    if node.op_type == "ConvTranspose":
        inward, outward = outward, inward
    found: list[tuple[str, int | None, int]] = [("an axis of channels", channels, inward)]
    if len(given) > 2 and given[2] is not None:
        bias = given[2]
        found.append(("a bias", bias[0] if len(bias) == 1 else 0, outward))
    for got, needed in zip(_ints(node, "kernel_shape") or (), weight[2:], strict=False):
        if needed is not None:
            found.append(("a kernel", got, needed))
    _check_window(node, len(weight) - 2)
    return found


def _check_window(node: onnx.NodeProto, axes: int) -> None:
    """Raises an error where the attributes of a convolution or a pooling are none of so many axes."""
    for name, length, lowest in (("kernel_shape", axes, 1), ("strides", axes, 1), ("dilations", axes, 1)):
        _check_ints(node, name, length, lowest)
    _check_ints(node, "pads", 2 * axes, 0)


def _check_ints(node: onnx.NodeProto, name: str, length: int, lowest: int) -> None:
    values = _ints(node, name)
    if values and (len(values) != length or not all(lowest <= value <= LARGEST_TENSOR for value in values)):
        raise ModelError(
            f"is not valid ONNX: node '{node.name or node.op_type}' ({node.op_type}) has {name} = {one_line(values)}, "
            f"needed are {length} numbers from {lowest} to {LARGEST_TENSOR}"
        )


def _ints(node: onnx.NodeProto, name: str) -> list[int] | None:
    return next((list(attribute.ints) for attribute in node.attribute if attribute.name == name), None)
