"""input of H x W fixed at export -> another height and width, if no constant in the graph depends on the size

Convolutions, and reshapes with -1 for the positions, work at any size. A graph with constants of its size (cell grids,
resize targets, relative-to-pixel factors, slice bounds) is refused with the reason. Both graphs are run to compare the
output shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.config import Config
from trtdet.detection.heads import match_outputs
from trtdet.errors import ModelError, one_line
from trtdet.passes.clean import network_input
from trtdet.passes.model import cpu_session, to_graph, to_model
from trtdet.passes.plugin_ops import plain
from trtdet.passes.walk import values_of

_ELEMENT_WISE = ("Add", "Sub", "Mul", "Div", "Min", "Max", "Clip", "Pow")
_FEW = 8  # a constant with more values is a table; its shape does not fit another size
_MOST_QUERIES = 1000  # outputs with more rows have a row per cell, so their number of rows depends on the size
_NEAR = 0.02  # relative tolerance of a number of cells, for strides that do not divide the sides


def with_input_size(model: onnx.ModelProto, size: tuple[int, int], config: Config | None = None) -> onnx.ModelProto:
    """Changes the height and width of a model's input; returns the model itself if they fit already.

    ``model`` is float, as loaded, and does not change. ``size`` is (height, width) in pixels. ``config``, of that size,
    gives the expected number of boxes, if it is known. Raises ModelError if the graph depends on its size at export.
    """
    graph = to_graph(model)
    source = network_input(graph, None if config is None else config.input.name)
    shape = list(source.shape or ())
    fixed = len(shape) == 4 and all(isinstance(side, int) and side > 0 for side in shape[2:])
    if not fixed or tuple(shape[2:]) == size:
        return model
    before: tuple[int, int] = (shape[2], shape[3])
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    # Shapes were inferred for the old size.
    del changed.graph.value_info[:]
    for output in changed.graph.output:
        output.type.tensor_type.ClearField("shape")
    image = next(value for value in changed.graph.input if value.name == source.name)
    for dim, side in zip(image.type.tensor_type.shape.dim[2:], size, strict=True):
        dim.dim_value = side
    obstacle = _constant_of_size(graph, before) or _misfit(graph, model, changed, sizes=(before, size), config=config)
    if obstacle:
        raise ModelError(
            f"the model's input is fixed to {before[0]}x{before[1]} (height x width) and cannot be changed to "
            f"{size[0]}x{size[1]}: {obstacle}",
            f"export it again for that size, such as with 'trtdet export SOURCE --size {size[0]}x{size[1]}'",
        )
    return to_model(to_graph(onnx.shape_inference.infer_shapes(changed)))


def _constant_of_size(graph: gs.Graph, sides: tuple[int, int]) -> str:
    """Names a constant that would be wrong at another size, but cause no error; empty if there is none."""
    factors = np.array([*sides, *(1 / side for side in sides)], np.float64)
    for node in graph.nodes:
        target = values_of(node.inputs[3]) if node.op == "Resize" and len(node.inputs) > 3 else None
        if target is not None and len(target):
            return f"Resize '{node.name}' gives the constant size {'x'.join(map(str, target[-2:]))}"
        for tensor in node.inputs if node.op in _ELEMENT_WISE else ():
            values = values_of(tensor)
            if values is None or values.size > _FEW or not np.issubdtype(values.dtype, np.floating):
                continue
            flat = values.astype(np.float64).reshape(-1, 1)
            if np.isclose(flat, factors, rtol=1e-6, atol=0).any():
                return f"{node.op} '{node.name}' reads the constant {float(flat.max()):g}, which is of the size"
    return ""


def _misfit(
    graph: gs.Graph,
    model: onnx.ModelProto,
    changed: onnx.ModelProto,
    sizes: tuple[tuple[int, int], tuple[int, int]],
    config: Config | None,
) -> str:
    """Why the changed model's outputs do not fit the new size; empty if they do."""
    try:
        shapes = _shapes(changed)
    except Exception as error:  # onnxruntime's exceptions have no common base class
        return one_line(error)
    (height, width), (new_height, new_width) = sizes
    ratios = (1.0, new_height * new_width / (height * width), new_height / height, new_width / width)
    moved = False
    for name, old in _shapes(model).items():
        new = shapes[name]
        fits = len(old) == len(new) and all(
            any(abs(changed_side - side * ratio) <= _NEAR * side * ratio for ratio in ratios)
            for side, changed_side in zip(old, new, strict=True)
        )
        if not fits:
            return f"output '{name}' has shape {old} at its own size and {new} at the other"
        moved |= old != new or max(old[1:], default=0) <= _MOST_QUERIES
    if not moved:
        return "its outputs have as many rows as before, and so are of the cells of its own size"
    reason = _fixed_slice(graph, model, changed)
    # Check only raw outputs: neither those of an NMS nor inner tensors named in ``head.outputs``.
    raw = all(len(shape) == 3 for shape in shapes.values())
    if reason or config is None or not raw or not set(config.head.outputs or ()) <= shapes.keys():
        return reason
    try:
        match_outputs(shapes, config)
    except ModelError as error:
        return str(error)
    return ""


def _fixed_slice(graph: gs.Graph, model: onnx.ModelProto, changed: onnx.ModelProto) -> str:
    """Names a Slice with constant bounds on an axis whose length changes; empty if there is none."""
    slices = [node for node in graph.nodes if node.op == "Slice" and node.inputs[0].inputs]
    read = list(dict.fromkeys(node.inputs[0].name for node in slices))
    if not read:
        return ""
    before, after = _shapes(model, read), _shapes(changed, read)
    for node in slices:
        starts, ends = values_of(node.inputs[1]), values_of(node.inputs[2])
        if starts is None or ends is None:
            continue
        old, new = before[node.inputs[0].name], after[node.inputs[0].name]
        listed = values_of(node.inputs[3]) if len(node.inputs) > 3 and not node.inputs[3].is_empty() else None
        axes = range(len(starts)) if listed is None else listed.reshape(-1).tolist()
        for axis, start, end in zip(axes, starts.reshape(-1).tolist(), ends.reshape(-1).tolist(), strict=True):
            to_the_end = end < 0 or end >= max(old[axis], new[axis])
            if old[axis] != new[axis] and not (to_the_end and -2 < start < 2):
                return (
                    f"Slice '{node.name}' cuts {start} to {end} out of {old[axis]}, which are {new[axis]} at that size"
                )
    return ""


def _shapes(model: onnx.ModelProto, names: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
    """Shapes of the outputs, or of the tensors ``names``, on a black image."""
    exposed = plain(model)
    if names:
        exposed = onnx.ModelProto.FromString(exposed.SerializeToString())
        del exposed.graph.output[:]
        exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = cpu_session(exposed)
    source = session.get_inputs()[0]
    image = np.zeros([side if isinstance(side, int) else 1 for side in source.shape], np.float32)
    values = session.run(None, {source.name: image})
    return {output.name: np.shape(value) for output, value in zip(session.get_outputs(), values, strict=True)}
