"""Checks whether a model is valid ONNX, and whether its weights are numbers.

ONNX's checker ignores the values of weights and most relations between tensor shapes. Its shape inference assumes valid
nodes. Both raise many classes of exceptions. Here each fault is a ModelError that names the node or tensor. Its text
begins with a verb: the caller adds the file name.
"""

from __future__ import annotations

import contextlib
import graphlib
import math

import numpy as np
import onnx

from trtdet.errors import ModelError, one_line
from trtdet.passes.protobuf import attribute, graphs, reads, replace_nodes

LARGEST_TENSOR = 2**31 - 1
"""Maximum number of elements of a tensor, as in TensorRT; only a wrong size or attribute exceeds it."""

LONGEST_SHAPE = 2**16  # maximum plausible length of an integer vector; real shapes and axes have a few elements

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_WINDOWED = (*_CONVOLUTIONS, "AveragePool", "MaxPool", "LpPool")

_TAKE_INFINITY = frozenset(
    (
        *("Pad", "Clip", "Where", "Max", "Min", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
        *("Cast", "Concat", "Expand", "Gather", "GatherElements", "Identity", "Reshape", "ScatterElements"),
        *("ScatterND", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Loop", "If", "Scan"),
    )
)
"""Operators that choose or move values; an infinite input is a bound or a fill value."""

_MOVE = frozenset(("Gather", "GatherElements", "GatherND", "Identity", "Reshape", "Slice", "Squeeze", "Transpose"))
_SATURATED = "Add before Sigmoid"
"""Reader of a constant that marks positions by infinity, where a sigmoid is 0 or 1: the anchors of RT-DETR."""

_FLOATS = [
    onnx.TensorProto.DataType.Value(name)
    for name in (
        *("FLOAT", "FLOAT16", "DOUBLE", "BFLOAT16"),
        *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
    )
]


def clear_unusable_dims(model: onnx.ModelProto) -> None:
    """Makes dimensions open that break ONNX's shape inference without an exception.

    It aborts the process on negative dimensions. It uses 140 bytes per element of an integer vector, which may be a
    shape, so lengths over ``LONGEST_SHAPE`` become open too.
    """
    parts = [(*graph.input, *graph.output, *graph.value_info) for graph in graphs(model.graph)]
    for values in (*parts, *(function.value_info for function in model.functions)):
        for value in values:
            _clear(value.type)


def spread_windows(model: onnx.ModelProto) -> None:
    """Repeats strides, dilations and pads of a single number for every axis of a convolution's weights.

    torch writes a single number where a module was given a list of one.
    """
    for graph in graphs(model.graph):
        ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
        for node in graph.node:
            axes = ranks.get(node.input[1], 2) - 2 if node.op_type in _CONVOLUTIONS and len(node.input) > 1 else 0
            for entry in node.attribute:
                if axes > 1 and entry.name in ("strides", "dilations", "pads") and len(entry.ints) == 1:
                    entry.ints.extend([entry.ints[0]] * ((2 if entry.name == "pads" else 1) * axes - 1))


def _clear(kind: onnx.TypeProto) -> None:
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(kind, which)
        vector = len(tensor.shape.dim) == 1 and tensor.elem_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
        for dim in tensor.shape.dim:
            if dim.dim_value < 0 or (vector and dim.dim_value > LONGEST_SHAPE):
                dim.ClearField("dim_value")
    elif which in ("sequence_type", "optional_type"):
        _clear(getattr(kind, which).elem_type)
    elif which == "map_type":
        _clear(kind.map_type.value_type)


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Sorts the nodes of a graph into the order of computation; only few nodes move. Raises ModelError if nodes form a
    cycle, or two nodes give the same tensor."""
    inputs, makers = {value.name for value in graph.input}, dict[str, int]()
    for index, node in enumerate(graph.node):
        for name in filter(None, node.output):
            if name in makers or name in inputs:
                raise ModelError(
                    f"is not valid ONNX: node '{_title(node)}' gives a tensor '{name}', which another node gives or "
                    "which is an input",
                    "export it again with a name for each tensor",
                )
            makers[name] = index
    needed: dict[int, set[int]] = {}
    for index, node in enumerate(graph.node):
        needed[index] = {makers[name] for name in reads(node) if name in makers} - {index}
    itself = next((node for node in graph.node if not set(node.output).isdisjoint({*node.input} - {""})), None)
    if itself is not None:
        raise ModelError(f"is not valid ONNX: node '{_title(itself)}' reads its own output")
    if all(earlier < index for index, before in needed.items() for earlier in before):
        return
    sorter = graphlib.TopologicalSorter(needed)
    with contextlib.suppress(graphlib.CycleError):  # nodes in a cycle, or behind one, never get ready
        sorter.prepare()
    ready = sorted(sorter.get_ready(), reverse=True)
    order: list[int] = []
    while ready:  # new ready nodes come first, so that few nodes move
        order.append(ready.pop())
        sorter.done(order[-1])
        ready += sorter.get_ready()
    if len(order) < len(needed):
        stuck = graph.node[min(needed.keys() - order)]
        raise ModelError(f"is not valid ONNX: node '{_title(stuck)}' depends on its own output")
    replace_nodes(graph, [graph.node[index] for index in order])


def _title(node: onnx.NodeProto) -> str:
    return str(node.name or node.op_type)


def check(model: onnx.ModelProto) -> None:
    """Checks a sorted model without negative dimensions; it is not changed.

    Raises:
        ModelError: the model breaks a rule of ONNX; a weight is not finite, or its data does not fit its shape and
            type; sizes of tensors do not fit each other; a tensor is larger than ``LARGEST_TENSOR``.
    """
    _check_tensors(model)
    bodies = [*(graph.node for graph in graphs(model.graph)), *(function.node for function in model.functions)]
    for nodes in bodies:
        for node in nodes:
            if not node.domain and node.op_type in (*_WINDOWED, "ConvInteger", "QLinearConv"):
                _check_window(node)  # shape inference of ONNX 1.19 divides by the strides, and ends the process at 0
    inferred = onnx.ModelProto()
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        # Accept harmless forms of exporters: outputs without a shape, a newer file format.
        inferred.ir_version = min(inferred.ir_version, onnx.IR_VERSION)
        for value in inferred.graph.output:
            if value.type.WhichOneof("value") in (None, "tensor_type"):
                value.type.tensor_type.shape.SetInParent()
                value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or onnx.TensorProto.FLOAT
        onnx.checker.check_model(inferred)
    except Exception as error:  # errors of ONNX and protobuf have no common base class
        raise ModelError(f"is not valid ONNX: {one_line(error)}") from None
    shapes: dict[str, tuple[int | None, ...]] = {}
    for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
        if value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            shapes[value.name] = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in dims)
    for name, shape in shapes.items():
        size = math.prod(dim for dim in shape if dim)
        if size > LARGEST_TENSOR or any(dim is not None and dim < 0 for dim in shape):
            raise ModelError(f"has a tensor '{name}' of shape {list(shape)}, allowed are {LARGEST_TENSOR} elements")
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in inferred.graph.initializer}
    for node in inferred.graph.node:
        _check_sizes(node, shapes)


def _check_tensors(model: onnx.ModelProto) -> None:
    readers: dict[str, set[str]] = {}
    for graph in graphs(model.graph):
        saturated = set[str]()
        for node in reversed(graph.node):
            if node.op_type == "Sigmoid" or (node.op_type in _MOVE and not saturated.isdisjoint(node.output)):
                saturated.update(node.input[:1])
            added = node.op_type == "Add" and not saturated.isdisjoint(node.output)
            for name in node.input:
                readers.setdefault(name, set()).add(_SATURATED if added else node.op_type)
        for value in graph.output:
            readers.setdefault(value.name, set()).add("Identity")
    for graph in graphs(model.graph):
        for tensor in graph.initializer:
            _check_tensor(tensor, tensor.name, readers.get(tensor.name, set()))
        for node in graph.node:
            read = readers.get(node.output[0], set()) if node.op_type == "Constant" and node.output else set()
            for tensor in (tensor for entry in node.attribute for tensor in (entry.t, *entry.tensors)):
                _check_tensor(tensor, node.name or next(iter(node.output), node.op_type), read)


def _check_tensor(tensor: onnx.TensorProto, name: str, readers: set[str]) -> None:
    """Refuses data that does not fit shape and type, NaN, and infinities that are no bounds."""
    if not tensor.data_type and not tensor.dims:
        return  # the attribute is no tensor
    kind, dims = tensor.data_type, list(tensor.dims)
    if kind not in onnx.TensorProto.DataType.values() or kind == onnx.TensorProto.UNDEFINED:
        raise ModelError(f"is not valid ONNX: weight '{name}' has the unknown data type {kind}")
    if any(dim < 0 for dim in dims) or math.prod(dims) > LARGEST_TENSOR:
        raise ModelError(f"is not valid ONNX: weight '{name}' has shape {dims}, allowed are {LARGEST_TENSOR} elements")
    if kind == onnx.TensorProto.STRING:
        return
    try:
        values = onnx.numpy_helper.to_array(tensor)
    except Exception as error:  # errors of NumPy, ml_dtypes and protobuf have no common base class
        raise ModelError(
            f"is not valid ONNX: the data of weight '{name}' does not fit its shape {dims} ({one_line(error)})"
        ) from None
    if values.shape != tuple(dims):
        raise ModelError(f"is not valid ONNX: weight '{name}' has {values.size} values, its shape is {dims}")
    if kind not in _FLOATS or not readers or np.isfinite(values).all():
        return
    nan = int(np.isnan(values).sum())
    # A mask adds minus infinity to values that a softmax must ignore.
    with np.errstate(invalid="ignore"):  # NumPy warns of a signalling NaN
        mask = {"Add"} if not np.any(np.isposinf(values.astype(np.float64))) else set()
    if nan or not readers <= _TAKE_INFINITY | {_SATURATED} | mask:
        infinite = int((~np.isfinite(values)).sum()) - nan
        raise ModelError(
            f"has a weight that is not finite: '{name}' holds {nan} NaN and {infinite} infinite of {values.size}",
            "train or export it again",
        )


def _check_window(node: onnx.NodeProto, axes: int | None = None) -> None:
    """Raises a ModelError if a window has a wrong size, step or padding; without ``axes``, their number may be any."""
    for entry in node.attribute:
        if not entry.ints or entry.name not in ("kernel_shape", "strides", "dilations", "pads"):
            continue
        values, lowest = list(entry.ints), 0 if entry.name == "pads" else 1
        length = len(values) if axes is None else axes * (2 if entry.name == "pads" else 1)
        if len(values) != length or not all(lowest <= value <= LARGEST_TENSOR for value in values):
            raise ModelError(
                f"is not valid ONNX: node '{_title(node)}' ({node.op_type}) has {entry.name} = {one_line(values)}, "
                f"needed are {length} numbers from {lowest} to {LARGEST_TENSOR}"
            )


def _check_sizes(node: onnx.NodeProto, shapes: dict[str, tuple[int | None, ...]]) -> None:
    """Raises a ModelError if inputs or attributes of an operator do not fit each other."""
    if node.domain or node.op_type not in (*_WINDOWED, "BatchNormalization"):
        return
    title = f"is not valid ONNX: node '{_title(node)}' ({node.op_type})"
    inputs = [shapes.get(name) if name else None for name in node.input]
    channels = inputs[0][1] if inputs and inputs[0] is not None and len(inputs[0]) > 1 else None
    attributes = {entry.name: list(entry.ints) for entry in node.attribute}
    axes = len(attributes.get("kernel_shape", ()))
    needed: list[tuple[str, int | None, int | None]] = []
    if node.op_type == "BatchNormalization":
        lengths = [shape[0] for shape in inputs[1:] if shape is not None and len(shape) == 1]
        expected = next((size for size in (channels, *lengths) if size is not None), None)
        needed = [("a parameter", size, expected) for size in lengths]
    elif node.op_type in _CONVOLUTIONS:
        weight, bias = (*inputs[1:3], None, None)[:2]
        if weight is None or len(weight) < 3 or weight[0] is None or weight[1] is None:
            return
        group = attribute(node, "group", 1)
        if group < 1 or weight[0] % group:
            raise ModelError(f"{title} has {group} groups, its weights have {weight[0]} channels")
        inward, outward = weight[1] * group, weight[0]
        if node.op_type == "ConvTranspose":
            inward, outward = outward, inward
        needed = [("an axis of channels", channels, inward)]
        if bias is not None:
            needed.append(("a bias", bias[0] if len(bias) == 1 else 0, outward))
        kernel = attributes.get("kernel_shape", ())
        needed += [("a kernel", got, size) for got, size in zip(kernel, weight[2:], strict=False)]
        axes = len(weight) - 2
    if node.op_type in _WINDOWED:
        _check_window(node, axes)
    for part, got, size in needed:
        if got is not None and size is not None and got != size:
            raise ModelError(f"{title} has {part} of size {got}, {size} is needed")
