"""model as exported -> one float32 image (B, 3, H, W) in, outputs with the batch first

Exporters write other inputs: sizes beside the image, FP16, whole pixels (uint8), channels last, no batch dimension, or
a loop over the images of the batch. ``STEPS`` replaces each of these before anything else reads the model. Results stay
the same, except that FP16 arithmetic becomes float32. :func:`changes_of` lists the changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from trtdet.passes.protobuf import attribute, graphs, metadata, opset_of, replace_nodes, sizes_of, subgraphs
from trtdet.passes.provenance import KEY as PROVENANCE
from trtdet.passes.walk import PAIR

KEY = "trtdet.exported"
"""Metadata key; the value is JSON: a list of sentences on what was changed."""

SIZES = {
    "im_shape": ("size", (2, 3)),
    "scale_factor": ("one", ()),
    "orig_target_sizes": ("size", (3, 2)),
    "image_shape": ("size", (2, 3)),
}
"""Inputs of sizes, and what makes boxes come out in pixels of the network's input: its height and width (axes of the
image), or a factor of 1. PaddleDetection has the first two, RT-DETR, D-FINE and DEIM the third as width and height,
Keras' YOLOv3 the last."""

WHOLE_PIXELS = "pixels are read as whole numbers 0..255, and normalised in the graph"
"""Sentence on a model whose configuration has input.scale 1."""

_LONGEST_EXPRESSION = 16  # nodes of a constant expression that is computed
_SMALLEST = 8  # side of an image without a batch dimension, in pixels
_HALF, _FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT
_ANY_TYPE = frozenset(
    ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Slice", "Gather", "Identity", "Split", "Concat", "Flatten")
)
"""Operators that move values of any type."""


def unwrapped(model: onnx.ModelProto) -> onnx.ModelProto:
    """A checked model with the input and outputs above; the same object if nothing changes, or if trtdet wrote it."""
    if PROVENANCE in metadata(model):
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    notes = [note for step in STEPS if (note := step(changed))]
    if not notes:
        return model
    changed.metadata_props.add(key=KEY, value=json.dumps(notes))
    return changed


def changes_of(model: onnx.ModelProto) -> list[str]:
    """The changes by :func:`unwrapped`, a sentence each."""
    notes: list[str] = json.loads(metadata(model).get(KEY, "[]"))
    return notes


def images(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs of a model that are no initialisers."""
    constants = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in constants]


def resized_to(model: onnx.ModelProto) -> tuple[int, int] | None:
    """The height and width to which a graph resizes its image before the first convolution; None if it does not, or
    not to a constant size."""
    image = _image(model)
    depending = set() if image is None else {image.name}
    for node in model.graph.node:
        if depending.isdisjoint(node.input):
            continue
        if node.op_type == "Conv":
            return None
        if node.op_type == "Resize" and len(node.input) > 3:
            constants = _constants(model)
            joined = next((before for before in model.graph.node if node.input[3] in before.output), None)
            parts = [constants.get(name) for name in (joined.input if joined is not None else ())]
            sides = next((part.tolist() for part in parts if part is not None and part.shape == (2,)), None)
            return None if sides is None else (int(sides[0]), int(sides[1]))
        depending.update(node.output)
    return None


def _image(model: onnx.ModelProto) -> onnx.ValueInfoProto | None:
    inputs = images(model)
    return inputs[0] if len(inputs) == 1 and inputs[0].type.HasField("tensor_type") else None


def _fold_sizes(model: onnx.ModelProto) -> str:
    """Extra inputs of sizes -> constants, or the image's own size where it is open."""
    inputs = images(model)
    extra = [value for value in inputs if value.name in SIZES and len(sizes_of(value)) in (1, 2)]
    rest = [value for value in inputs if value not in extra]
    if not extra or len(rest) != 1:
        return ""
    (image,) = rest
    nodes = list[onnx.NodeProto]()
    for value in extra:
        kind, axes = SIZES[value.name]
        element, shape = value.type.tensor_type.elem_type, [1, 2][2 - len(sizes_of(value)) :]
        sides = sizes_of(image)
        if kind == "one" or all(sides[axis] for axis in axes):
            numbers = [1, 1] if kind == "one" else [sides[axis] for axis in axes]
            array = np.array(numbers, helper.tensor_dtype_to_np_dtype(element)).reshape(shape)
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
        else:
            prefix = f"{value.name}/size"
            model.graph.initializer.append(numpy_helper.from_array(np.array(axes), f"{prefix}/axes"))
            model.graph.initializer.append(numpy_helper.from_array(np.array(shape), f"{prefix}/shape"))
            nodes += [
                helper.make_node("Shape", [image.name], [f"{prefix}/whole"], f"{prefix}/whole"),
                helper.make_node("Gather", [f"{prefix}/whole", f"{prefix}/axes"], [f"{prefix}/two"], f"{prefix}/two"),
                helper.make_node("Cast", [f"{prefix}/two"], [f"{prefix}/cast"], f"{prefix}/cast", to=element),
                helper.make_node("Reshape", [f"{prefix}/cast", f"{prefix}/shape"], [value.name], f"{prefix}/reshape"),
            ]
        model.graph.input.remove(value)
    _put_first(model, nodes)
    names = " and ".join(f"'{value.name}'" for value in extra)
    subject = f"inputs {names} are" if len(extra) > 1 else f"input {names} is"
    return f"{subject} folded: boxes come in pixels of the network's input"


def _write_out_loops(model: onnx.ModelProto) -> str:
    """Loops that run once -> their nodes. TensorFlow's ``map_fn`` over a batch of 1 is such a loop."""
    nodes, count = list[onnx.NodeProto](), 0
    for node in model.graph.node:
        once = node.op_type == "Loop" and [_scalar(model, name) for name in node.input[:2]] in ([1, 1], [1, ""])
        nodes += _iteration(model, node, attribute(node, "body")) if once else [node]
        count += once
    if not count:
        return ""
    replace_nodes(model.graph, nodes)
    del model.graph.value_info[:]
    return "the loop over the images of the batch, which has one image, is written out"


def _scalar(model: onnx.ModelProto, name: str) -> float | str | None:
    """The value of a constant expression of one element; None for other tensors, an empty text for an input that is
    left out."""
    if not name:
        return ""
    makers = {result: (place, node) for place, node in enumerate(model.graph.node) for result in node.output}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes, used, queue = dict[int, onnx.NodeProto](), dict[str, onnx.TensorProto](), [name]
    for source in queue:
        if source in constants:
            used[source] = constants[source]
        elif source in makers and len(nodes) < _LONGEST_EXPRESSION:
            place, node = makers[source]
            nodes[place] = node
            queue += [before for before in node.input if before and before not in queue]
        else:
            return None
    result = helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None)
    ordered = [nodes[place] for place in sorted(nodes)]
    graph = helper.make_graph(ordered, "expression", [], [result], initializer=list(used.values()))
    expression = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    results: Any = ReferenceEvaluator(expression).run(None, {})
    value = results[0]
    return float(value.reshape(-1)[0]) if value.size == 1 else None


def _iteration(model: onnx.ModelProto, loop: onnx.NodeProto, body: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes of the only iteration of a loop (https://onnx.ai/onnx/operators/onnx__Loop.html)."""
    place = loop.name or next(name for name in loop.output if name)
    known = [*(value.name for value in body.input), *(tensor.name for tensor in body.initializer)]
    known += [name for node in body.node for name in node.output if name]
    names = {name: f"{place}/{name}" for name in known}
    starts = [value.name for value in body.input]
    for name, start in zip(starts[:2], (np.array(0), np.array(True)), strict=True):
        model.graph.initializer.append(numpy_helper.from_array(start, names[name]))
    names |= dict(zip(starts[2:], loop.input[2:], strict=True))
    for tensor in body.initializer:
        model.graph.initializer.add().CopyFrom(tensor)
        model.graph.initializer[-1].name = names[tensor.name]
    nodes = list[onnx.NodeProto]()
    for part in graphs(body):
        for node in part.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            if part is body:
                node.output[:] = [names.get(name, name) for name in node.output]
                node.name = node.name and f"{place}/{node.name}"
                nodes.append(node)
        if part is not body:
            for value in part.output:
                value.name = names.get(value.name, value.name)
    ends, carried = [names.get(value.name, value.name) for value in body.output[1:]], len(loop.input) - 2
    for position, (end, result) in enumerate(zip(ends, loop.output, strict=True)):
        if not result:
            continue
        if position < carried:
            nodes.append(helper.make_node("Identity", [end], [result], result))
        else:  # the results of all iterations, one behind the other
            nodes.append(_axis(model, "Unsqueeze", end, result=result))
    return nodes


def _constants(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    """The values of initialisers and Constant nodes with a tensor, by name."""
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return values | {
        node.output[0]: numpy_helper.to_array(node.attribute[0].t)
        for node in model.graph.node
        if node.op_type == "Constant" and node.attribute[0].type == onnx.AttributeProto.TENSOR
    }


def _to_float(model: onnx.ModelProto) -> str:
    """FP16 weights, inputs and outputs -> float32."""
    parts = list(graphs(model.graph))
    if any(node.op_type in PAIR for part in parts for node in part.node):
        return ""
    values = [value for part in parts for value in (*part.input, *part.output)]
    halves = [value for value in values if value.type.tensor_type.elem_type == _HALF]
    count = len(halves)
    for part in parts:
        for tensor in part.initializer:
            count += _single(tensor)
        for node in part.node:
            for entry in node.attribute:
                if entry.type == onnx.AttributeProto.TENSOR:
                    count += _single(entry.t)
    if not count:
        return ""
    for value in halves:
        value.type.tensor_type.elem_type = _FLOAT
    for part in parts:
        del part.value_info[:]
        for node in part.node:
            for entry in node.attribute:
                if entry.name in ("to", "dtype") and entry.i == _HALF:
                    entry.i = _FLOAT
    return "FP16 is read as float32, from which a build makes FP16 and INT8"


def _single(tensor: onnx.TensorProto) -> bool:
    if tensor.data_type != _HALF:
        return False
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    return True


def _whole_pixels(model: onnx.ModelProto) -> str:
    """An input of whole pixels -> float32, with a cast only where an operator needs the type."""
    image = _image(model)
    if image is None or image.type.tensor_type.elem_type not in (TensorProto.UINT8, TensorProto.INT32):
        return ""
    element = image.type.tensor_type.elem_type
    image.type.tensor_type.elem_type = _FLOAT
    names, casts, nodes = {image.name}, set[str](), list[onnx.NodeProto]()
    for node in model.graph.node:
        if node.op_type in _ANY_TYPE and node.input[0] in names:
            names.update(node.output)
        elif node.op_type != "Cast":
            inner = [other for graph in subgraphs(node) for part in graphs(graph) for other in part.node]
            for reader in (node, *inner):
                for name in dict.fromkeys(name for name in reader.input if name in names and name not in casts):
                    casts.add(name)
                    nodes.append(helper.make_node("Cast", [name], [f"{name}/whole"], f"{name}/whole", to=element))
                reader.input[:] = [f"{name}/whole" if name in names else name for name in reader.input]
        nodes.append(node)
    replace_nodes(model.graph, nodes)
    del model.graph.value_info[:]
    return WHOLE_PIXELS


def _channels_first(model: onnx.ModelProto) -> str:
    """An input (B, H, W, 3) or without a batch -> (B, 3, H, W)."""
    image = _image(model)
    sides = [] if image is None else sizes_of(image)
    if image is None or len(sides) not in (3, 4):
        return ""
    batched, last = len(sides) == 4, sides[-1] == 3 and sides[-3] != 3
    if batched and not last:
        return ""
    lengths = sides[1:] if sides[0] == 3 else sides[:-1]
    if not batched and (3 not in (sides[0], sides[-1]) or any(side in range(1, _SMALLEST) for side in lengths)):
        return ""
    dims = [helper.make_tensor_value_info("", _FLOAT, [1]).type.tensor_type.shape.dim[0]] if not batched else []
    dims += list(image.type.tensor_type.shape.dim)
    order = (0, 3, 1, 2) if last else (0, 1, 2, 3)
    wanted = [dims[axis] for axis in order]
    kept = [onnx.TensorShapeProto.Dimension.FromString(dim.SerializeToString()) for dim in wanted]
    del image.type.tensor_type.shape.dim[:]
    image.type.tensor_type.shape.dim.extend(kept)
    inner, nodes = image.name, list[onnx.NodeProto]()
    if last:
        # A transpose of the exporter's own is undone rather than done twice.
        own = [node for node in model.graph.node if node.op_type == "Transpose" and node.input[0] == image.name]
        for node in own if batched else ():
            if attribute(node, "perm") == [0, 3, 1, 2]:
                node.op_type = "Identity"
                del node.attribute[:]
                node.input[0] = f"{image.name}/first"
        nodes.append(helper.make_node("Transpose", [inner], [f"{inner}/last"], f"{inner}/last", perm=[0, 2, 3, 1]))
        inner = f"{inner}/last"
    if not batched:
        nodes.append(_axis(model, "Squeeze", inner, result=f"{image.name}/image"))
        inner = f"{image.name}/image"
    for node in (node for part in graphs(model.graph) for node in part.node):
        for position, name in enumerate(node.input):
            if name == image.name:
                node.input[position] = inner
            elif name == f"{image.name}/first":
                node.input[position] = image.name
    _put_first(model, nodes)
    if not batched:
        for output in model.graph.output:
            _with_batch(model, output)
        return "a batch dimension is put before the image and the outputs"
    return "channels come first: the transpose from (B, H, W, 3) is part of the graph"


def _batch_first(model: onnx.ModelProto) -> str:
    """Outputs (N, C) of one image -> (1, N, C)."""
    image = _image(model)
    sides = [] if image is None else sizes_of(image)
    operators = {node.op_type for node in model.graph.node}
    if len(sides) != 4 or sides[0] != 1 or operators & {"NonMaxSuppression", "RoiAlign", "NonZero"}:
        return ""
    inferred = onnx.shape_inference.infer_shapes(model)
    shapes = {output.name: sizes_of(output) for output in inferred.graph.output}
    lacking = [name for name, sizes in shapes.items() if len(sizes) == 2 and sizes[0] > 1]
    if not lacking:
        return ""
    for output in model.graph.output:
        if output.name in lacking:
            _with_batch(model, output)
    return "a batch dimension is put before the outputs"


def _with_batch(model: onnx.ModelProto, output: onnx.ValueInfoProto) -> None:
    """Puts a batch of 1 before an output: in the Reshape that makes it, so that other batches are possible, or with an
    Unsqueeze."""
    makers = {name: node for node in model.graph.node for name in node.output}
    values = _constants(model)
    output.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    node = makers.get(output.name)
    while node is not None and node.op_type in ("Sigmoid", "Identity", "Cast"):
        node = makers.get(node.input[0])
    shape = values.get(node.input[1]) if node is not None and node.op_type == "Reshape" else None
    if node is not None and shape is not None and len(shape) == 2 and int(shape[1]) > 0:
        name = f"{node.output[0]}/batched"
        model.graph.initializer.append(numpy_helper.from_array(np.array([1, -1, int(shape[1])]), name))
        node.input[1] = name
        before = makers.get(node.input[0])
        if before is not None and before.op_type == "Transpose":
            for entry in before.attribute:
                if list(entry.ints) == [2, 3, 0, 1]:  # the same numbers, as there is one image
                    entry.ints[:] = [0, 2, 3, 1]
        return
    inner = f"{output.name}/image"
    for other in model.graph.node:
        for names in (other.input, other.output):
            for position, name in enumerate(names):
                if name == output.name:
                    names[position] = inner
    model.graph.node.append(_axis(model, "Unsqueeze", inner, result=output.name))


def _axis(model: onnx.ModelProto, op: str, source: str, result: str) -> onnx.NodeProto:
    """A node that adds or removes the first axis, as the model's opset writes it."""
    if opset_of(model) < 13:
        return helper.make_node(op, [source], [result], result, axes=[0])
    axes = f"{result}/axes"
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), axes))
    return helper.make_node(op, [source, axes], [result], result)


def _put_first(model: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> None:
    if nodes:
        replace_nodes(model.graph, [*nodes, *model.graph.node])
        del model.graph.value_info[:]


STEPS: tuple[Callable[[onnx.ModelProto], str], ...] = (
    _fold_sizes,
    _write_out_loops,
    _to_float,
    _whole_pixels,
    _channels_first,
    _batch_first,
)
"""All changes, in order, in place; each returns a sentence if it changed something, else an empty text."""
