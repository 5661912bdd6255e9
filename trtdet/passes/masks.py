"""masks of all rows -> masks of the rows that are kept

A two-stage detector computes masks from its final boxes: what reads the boxes of all rows reads those that are kept.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.passes.base import Writer
from trtdet.passes.provenance import Origin
from trtdet.passes.walk import downstream, redirect

MASKS = "masks"
"""Output float32 (B, K, M, M) of a detector with masks: row i is of row i of ``boxes``."""

_BOXES, _LABELS = "trtdet/masks/boxes", "trtdet/masks/labels"
"""float32 (n, 4) and int64 (n, 1), which masks are computed from; a label is a column of the probabilities."""
_CELLS = "trtdet/masks/cells"
"""float32 (n, M, M), probabilities of each row's class."""


def write(
    write: Writer, boxes: gs.Variable, labels: gs.Variable, probabilities: gs.Variable, most: int
) -> tuple[gs.Variable, gs.Variable]:
    """Writes the masks of rows.

    Args:
        write: of the nodes.
        boxes: float32 (n, 4).
        labels: int64 (n,), columns of ``probabilities``.
        probabilities: float32 (n, C, M, M), masks of all classes.
        most: n at most.

    Returns:
        The tensor to compute ``probabilities`` from instead of ``boxes``, and float32 (1, most, M, M), zeros past n.
    """
    # Nodes whose outputs follow() finds by name: no rewrite removes a Reshape.
    chosen = write("Reshape", boxes, write.const([-1, 4], np.int64))
    column = write("Reshape", labels, write.const([-1, 1], np.int64))
    cells = write("GatherND", probabilities, column, batch_dims=1)
    chosen.name, column.name, cells.name = _BOXES, _LABELS, _CELLS
    size = int(probabilities.shape[-1])
    return chosen, _named(padded(write, cells, most, sizes=(size, size)), most, size)


def follow(graph: gs.Graph, classes: int) -> None:
    """Makes the last output of a graph of one image the masks of the detections before it, in place.

    Where the number of rows depends on the image, masks are computed for as many boxes as there are.
    """
    count, boxes, _, labels, before = graph.outputs
    room = int(boxes.shape[1])
    tensors = graph.tensors()
    cells = tensors[_CELLS]
    probabilities = cells.inputs[0].inputs[0]
    columns, size = int(probabilities.shape[1]), int(probabilities.shape[3])
    put = Writer(graph, "trtdet/masks", Origin.NMS)
    rows = put("Reshape", boxes, put.const([room, 4], np.int64))
    column = put("Cast", put("Reshape", labels, put.const([room, 1], np.int64)), to=int(onnx.TensorProto.INT64))
    column = put("Add", column, put.const(columns - classes, np.int64))
    fixed = isinstance((tensors[_BOXES].shape or [None])[0], int)
    if not fixed:
        filled = put("Less", put.const(np.arange(room)[None], np.int32), count)
        places = put("NonZero", put("Reshape", filled, put.const([room], np.int64)))
        index = put("Reshape", places, put.const([-1], np.int64))
        rows, column = put("Gather", rows, index, axis=0), put("Gather", column, index, axis=0)
    for name, tensor in ((_BOXES, rows), (_LABELS, column)):
        readers = list(tensors[name].outputs)
        redirect(graph, tensors[name], tensor)
        for node in downstream(readers):  # the number of rows that was inferred does not hold any more
            for output in node.outputs:
                output.shape = None
    if fixed:
        masks = put("Reshape", cells, put.const([1, room, size, size], np.int64))
    else:
        masks = padded(put, cells, room, sizes=(size, size))
    before.name = f"{MASKS}/before"
    graph.outputs[-1] = _named(masks, room, size)


def _named(masks: gs.Variable, room: int, size: int) -> gs.Variable:
    masks.name, masks.dtype, masks.shape = MASKS, np.dtype(np.float32), [1, room, size, size]
    return masks


def padded(write: Writer, rows: gs.Variable, most: int, sizes: tuple[int, ...]) -> gs.Variable:
    """Writes rows float32 (n, ...) as (1, most, ...) with the other ``sizes``, zeros past n."""
    zeros = write.const(np.zeros((most, *sizes)), np.float32)
    longer = write("Concat", rows, zeros, axis=0)
    kept = write("Slice", longer, *(write.const([bound], np.int64) for bound in (0, most, 0)))
    return write("Reshape", kept, write.const([1, most, *sizes], np.int64))
