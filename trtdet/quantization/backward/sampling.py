"""GridSample and RoiAlign as gathers and sums, which have derivatives in the values and in the places."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.errors import ModelError
from trtdet.passes.walk import redirect
from trtdet.quantization.backward.tape import Tape, sizes_of


def written_out(graph: gs.Graph) -> None:
    """Replaces every GridSample and RoiAlign, in place. Raises ModelError if a mode has no such form here."""
    forms = {"GridSample": _grid_sample, "RoiAlign": _roi_align}
    nodes = [node for node in graph.nodes if node.op in forms]
    tape = Tape(graph, "sampled/")
    for node in nodes:
        (old,) = node.outputs
        try:
            new = forms[node.op](tape, node)
        except NotImplementedError as missing:
            raise ModelError(f"'{node.name}' has no gradient here: {missing}") from None
        new.shape, new.dtype = old.shape, old.dtype
        node.outputs.clear()
        redirect(graph, old, new)
    if nodes:
        graph.cleanup().toposort()


def _grid_sample(tape: Tape, node: gs.Node) -> gs.Variable:
    x, grid = node.inputs
    mode, border = node.attrs.get("mode", "linear"), node.attrs.get("padding_mode", "zeros")
    size = sizes_of(x)
    if size is None or len(size) != 4 or mode not in ("linear", "bilinear") or border not in ("zeros", "border"):
        raise NotImplementedError(f"GridSample with {mode} and {border}")
    batch, channels, rows, columns = size
    places = []
    for axis, length in ((1, rows), (0, columns)):
        at = tape("Reshape", tape("Gather", grid, np.int64(axis), axis=-1), np.array([batch, -1], np.int64))
        if node.attrs.get("align_corners", 0):
            at = tape("Mul", tape("Add", at, np.float32(1)), np.float32((length - 1) / 2))
        else:
            at = tape("Sub", tape("Mul", tape("Add", at, np.float32(1)), np.float32(length / 2)), np.float32(0.5))
        places.append(tape("Clip", at, np.float32(0), np.float32(length - 1)) if border == "border" else at)
    images = np.arange(batch)[:, None]
    samples = _samples(tape, x, size, images=images, places=places)
    sides = tape("Slice", tape.shape(grid), np.array([1], np.int64), np.array([3], np.int64))
    shape = tape("Concat", np.array([batch], np.int64), sides, np.array([channels], np.int64), axis=0)
    return tape("Transpose", tape("Reshape", samples, shape), perm=[0, 3, 1, 2])


def _roi_align(tape: Tape, node: gs.Node) -> gs.Variable:
    """Samples outside of the features are 0, as ONNX defines."""
    x, regions, images = node.inputs
    ratio, size = int(node.attrs.get("sampling_ratio", 0)), sizes_of(x)
    if ratio < 1 or node.attrs.get("mode", "avg") != "avg" or size is None:
        raise NotImplementedError("RoiAlign of a maximum or without a sampling ratio")
    half = node.attrs.get("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    scale, offset = np.float32(node.attrs.get("spatial_scale", 1.0)), np.float32(0.5 if half else 0.0)
    corners = tape("Sub", tape("Mul", regions, scale), offset)
    cells = [int(node.attrs.get(key, 1)) for key in ("output_height", "output_width")]
    places, inside = [], []
    for axis, (count, length) in enumerate(zip(cells, size[2:], strict=True)):
        start, end = (tape("Gather", corners, np.array([column], np.int64), axis=1) for column in (1 - axis, 3 - axis))
        side = tape("Sub", end, start)
        side = side if half else tape("Max", side, np.float32(1))
        steps = ((np.arange(count * ratio) + 0.5) / (count * ratio)).astype(np.float32)[None]
        at = tape("Add", start, tape("Mul", side, steps))
        there = tape("And", tape("GreaterOrEqual", at, np.float32(-1)), tape("LessOrEqual", at, np.float32(length)))
        inside.append(tape("Cast", there, to=onnx.TensorProto.FLOAT))
        places.append(tape("Clip", at, np.float32(0), np.float32(length - 1)))
    rows, columns = (count * ratio for count in cells)
    every = tape("Concat", tape("Shape", images), np.array([rows, columns], np.int64), axis=0)
    flat = tape("Concat", tape("Shape", images), np.array([-1], np.int64), axis=0)
    down, across = np.array([2], np.int64), np.array([1], np.int64)
    spread = [
        tape("Reshape", tape("Expand", tape("Unsqueeze", each, axes), every), flat)
        for each, axes in zip((*places, *inside), (down, across, down, across), strict=True)
    ]
    samples = _samples(tape, x, size, images=tape("Unsqueeze", images, across), places=spread[:2])
    samples = tape("Mul", samples, tape("Unsqueeze", tape("Mul", *spread[2:]), np.array([2], np.int64)))
    split = tape(
        "Concat", tape("Shape", images), np.array([cells[0], ratio, cells[1], ratio, size[1]], np.int64), axis=0
    )
    means = tape("ReduceMean", tape("Reshape", samples, split), np.array([2, 4], np.int64), keepdims=0)
    return tape("Transpose", means, perm=[0, 3, 1, 2])


def _samples(tape: Tape, x: gs.Tensor, size: tuple[int, ...], images: Any, places: list[gs.Variable]) -> gs.Variable:
    """Bilinear samples float32 (n, P, C) of features (B, C, H, W) at rows and columns (n, P) in the images (n, 1);
    values outside of the features are 0."""
    channels, rows, columns = size[1:]
    values = tape("Reshape", tape("Transpose", x, perm=[0, 2, 3, 1]), np.array([-1, channels], np.int64))
    lows = [tape("Floor", at) for at in places]
    total = None
    for down in (0, 1):
        for across in (0, 1):
            weight, whole = None, []
            for at, low, more, length in zip(places, lows, (down, across), (rows, columns), strict=True):
                corner = tape("Add", low, np.float32(more))
                near = tape("Sub", np.float32(1), tape("Abs", tape("Sub", at, corner)))
                there = tape(
                    "And",
                    tape("GreaterOrEqual", corner, np.float32(0)),
                    tape("LessOrEqual", corner, np.float32(length - 1)),
                )
                near = tape("Mul", near, tape("Cast", there, to=onnx.TensorProto.FLOAT))
                weight = near if weight is None else tape("Mul", weight, near)
                kept = tape("Clip", corner, np.float32(0), np.float32(length - 1))
                whole.append(tape("Cast", kept, to=onnx.TensorProto.INT64))
            row = tape("Add", tape("Mul", images, np.int64(rows)), whole[0])
            place = tape("Add", tape("Mul", row, np.int64(columns)), whole[1])
            part = tape("Mul", tape("Gather", values, place), tape("Unsqueeze", weight, np.array([2], np.int64)))
            total = part if total is None else tape("Add", total, part)
    assert total is not None
    return total
