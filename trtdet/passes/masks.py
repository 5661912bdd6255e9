"""masks of all rows -> masks of the kept rows

A two-stage detector computes masks from its final boxes. The nodes that read all boxes get only the kept boxes.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.passes.base import Writer
from trtdet.passes.provenance import Origin
from trtdet.passes.walk import downstream, redirect

MASKS = "masks"  # output float32 (B, K, M, M) of a detector with masks; row i belongs to row i of ``boxes``

_BOXES, _LABELS = "trtdet/masks/boxes", "trtdet/masks/labels"
"""Inputs of the masks: boxes float32 (n, 4), and labels int64 (n, 1), columns of the probabilities."""
_CELLS = "trtdet/masks/cells"  # probabilities float32 (n, M, M) of each row's class


def write(
    write: Writer, boxes: gs.Variable, labels: gs.Variable, probabilities: gs.Variable, most: int
) -> tuple[gs.Variable, gs.Variable]:
    """Writes the masks of at most ``most`` rows.

    Takes ``boxes`` float32 (n, 4), ``labels`` int64 (n,), and ``probabilities`` float32 (n, C, M, M) of all classes;
    labels are indices along C. Returns the tensor from which to compute ``probabilities`` instead of ``boxes``, and
    masks float32 (1, most, M, M), zeros past n.
    """
    # follow() finds these tensors by name; no rewrite removes a Reshape.
    chosen = write("Reshape", boxes, write.const([-1, 4], np.int64))
    column = write("Reshape", labels, write.const([-1, 1], np.int64))
    cells = write("GatherND", probabilities, column, batch_dims=1)
    chosen.name, column.name, cells.name = _BOXES, _LABELS, _CELLS
    size = int(probabilities.shape[-1])
    return chosen, padded(write, cells, most, sizes=(size, size), name=MASKS)


def follow(graph: gs.Graph, classes: int) -> None:
    """Makes the last output of a graph of one image the masks of the detections before it, in place.

    If the number of rows depends on the image, only as many masks as detections are computed.
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
        for node in downstream(readers):  # the inferred number of rows is outdated
            for output in node.outputs:
                output.shape = None
    before.name = f"{MASKS}/before"
    graph.outputs[-1] = padded(put, cells, room, sizes=(size, size), name=MASKS, exact=fixed)


def padded(
    write: Writer, rows: gs.Variable, most: int, sizes: tuple[int, ...], name: str = "", exact: bool = False
) -> gs.Variable:
    """Writes rows float32 (n, ...) as (1, most, ...), named ``name``; ``sizes`` are the other dimensions. Zeros stand
    past n, unless n is always ``most`` (``exact``)."""
    if not exact:
        longer = write("Concat", rows, write.const(np.zeros((most, *sizes)), np.float32), axis=0)
        rows = write("Slice", longer, *(write.const([bound], np.int64) for bound in (0, most, 0)))
    result = write("Reshape", rows, write.const([1, most, *sizes], np.int64))
    result.dtype, result.shape = np.dtype(np.float32), [1, most, *sizes]
    result.name = name or result.name
    return result
