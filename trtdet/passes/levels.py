"""selection of the best rows of each level -> all rows

Some exporters select the best rows of each pyramid level and decode boxes of these only, before the suppression. Here
all rows are decoded, in place, so that the selection is cut off together with the suppression.

- MMDeploy's dense heads select rows of each level (``gather_topk`` in mmdeploy/mmcv/ops/nms.py).
- torchvision's RetinaNet and FCOS select pairs of anchor and class, the flattened scores (A * C,) of a level over a
  threshold, and pick the anchors by index // C (``postprocess_detections`` in torchvision/models/detection/retinanet.py
  and fcos.py).

A selection of another form is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtdet.passes.base import Writer
from trtdet.passes.provenance import Origin
from trtdet.passes.walk import above, depends, maker, picks, redirect, unpick, upstream

_FLATTENING = ("Flatten", "Reshape", "Identity")


def read_all_rows(graph: gs.Graph, joined: gs.Tensor) -> None:
    """Flatten(x)[TopK(scores of a level) + image] -> Flatten(x), for all levels that ``joined`` joins."""
    nodes = [node for node in upstream(joined) if node.op == "TopK"]
    picked = {id(node): picks(node.outputs[1], through=("Add",)) for node in nodes}
    for node in nodes:
        readers = [reader for pick in picked[id(node)] for reader in pick.outputs[0].outputs]
        shaped = all(reader.op == "Reshape" for reader in readers)  # by the shape of the indices, then, which stays
        if node.attrs.get("axis", -1) != 1 or node.outputs[0].outputs or not readers or not shaped:
            return
    write = _writer(graph)
    for node in nodes:
        count = write("Gather", write("Shape", node.inputs[0]), write.const(1, np.int64), axis=0)
        every = write("Range", write.const(0, np.int64), count, write.const(1, np.int64))
        redirect(graph, node.outputs[1], write("Reshape", every, write.const([1, -1], np.int64)))
        unpick(graph, picked[id(node)])
    graph.cleanup().toposort()


def read_all_pairs(graph: gs.Graph, suppression: gs.Node, boxes: gs.Tensor, pairs: Sequence[gs.Tensor]) -> bool:
    """Makes a NonMaxSuppression read all boxes (1, N, 4) and their scores (1, C, N), without an offset for each class.

    Args:
        boxes: (n, 4), joins the decoded boxes of the selected pairs of each level.
        pairs: the flattened scores (A * C,) of each level, before their selection, in the same order.

    Returns:
        Whether the selection has torchvision's form; if not, nothing is changed.
    """
    levels = maker(boxes, "Concat")
    tables = [above(flat, *_FLATTENING) for flat in pairs]  # (A, C), as they are flattened
    if (
        levels is None
        or len(levels.inputs) != len(pairs)
        or any(table is flat for table, flat in zip(tables, pairs, strict=True))
    ):
        return False
    selected = list[gs.Node]()
    for decoded, table in zip(levels.inputs, tables, strict=True):
        rows = [node for node in _data(decoded) if _picks_rows(node, table)]
        if not rows or any(node.inputs[1] is not rows[0].inputs[1] for node in rows):
            return False
        selected += rows
    unpick(graph, selected)
    write = _writer(graph)
    scores = write("Concat", *tables, axis=0)
    first = write.const([0], np.int64)
    suppression.inputs[0] = write("Unsqueeze", boxes, first)
    suppression.inputs[1] = write("Unsqueeze", write("Transpose", scores, perm=[1, 0]), first)
    graph.cleanup().toposort()
    return True


def _data(tensor: gs.Tensor) -> list[gs.Node]:
    """The nodes that a tensor is computed from, without the indices by which rows are picked."""
    return list(upstream(tensor, reads=lambda node: node.inputs[:1] if node.op == "Gather" else node.inputs))


def _picks_rows(node: gs.Node, table: gs.Tensor) -> bool:
    """Whether a node picks rows of something by what was selected of a table of scores."""
    if node.op != "Gather" or node.attrs.get("axis", 0) != 0 or isinstance(node.inputs[1], gs.Constant):
        return False
    return depends(node.inputs[1], table) and not depends(node.inputs[0], table)


def _writer(graph: gs.Graph) -> Writer:
    return Writer(graph, "trtdet/levels", Origin.EMBEDDED_NMS)
