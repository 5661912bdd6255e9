"""NonMaxSuppression: the threshold that keeps every score, and a limit in the place of a slice behind it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from trtdet.passes.base import PassResult, Writer
from trtdet.passes.provenance import Origin
from trtdet.passes.two_stage.guards import LOWEST
from trtdet.passes.two_stage.walk import above, constant, maker, redirect

_UNLIMITED = np.iinfo(np.int32).max


def write_thresholds(graph: gs.Graph) -> PassResult:
    """Writes the score threshold of each suppression that has none, in place, so that no score is below it.

    ONNX keeps every box where the threshold is absent. TensorRT takes 0 instead, which loses every proposal whose
    objectness is a negative logit.
    """
    found = [node for node in graph.nodes if node.op == "NonMaxSuppression" and not _given(node, 4)]
    write = Writer(graph, "trtdet/threshold", Origin.LOWERING)
    for node in found:
        most = node.inputs[2] if _given(node, 2) else write.const([_UNLIMITED], np.int64)
        overlap = node.inputs[3] if _given(node, 3) else write.const([0], np.float32)
        node.inputs = [*node.inputs[:2], most, overlap, write.const([LOWEST], np.float32)]
    return PassResult(len(found))


def _given(node: gs.Node, position: int) -> bool:
    return len(node.inputs) > position and not node.inputs[position].is_empty()


@dataclass(frozen=True)
class Limit:
    """The slice behind a suppression.

    Attributes:
        suppression: the NonMaxSuppression.
        indices: int64 (n,), the boxes that it selects, best first.
        slice: the Slice that keeps the first ``count`` of them; None where the suppression itself is limited.
        count: how many are kept at most.
    """

    suppression: gs.Node
    indices: gs.Variable
    slice: gs.Node | None
    count: int

    @property
    def kept(self) -> gs.Variable:
        """The first ``count`` of ``indices``."""
        return self.indices if self.slice is None else self.slice.outputs[0]


def limit_of(node: gs.Node) -> Limit | str:
    """The limit behind a suppression, or the reason that there is none."""
    column = _column(node)
    if column is None:
        return "its selected boxes are read in another form than their indices"
    most = constant(node, 2)
    slices = [reader for reader in column.outputs if reader.op == "Slice" and reader.inputs[0] is column]
    if not slices:
        limited = most is not None and 0 < most < _UNLIMITED
        return Limit(node, column, None, int(most or 0)) if limited else "no slice limits its boxes"
    if len(slices) > 1:
        return f"{len(slices)} slices of its boxes are read"
    (kept,) = slices
    start, stop, step = constant(kept, 1), constant(kept, 2), constant(kept, 4)
    if start != 0 or stop is None or stop <= 0 or stop >= _UNLIMITED or step not in (None, 1):
        return f"the slice behind it is [{start}:{stop}:{step}], not the first of its boxes"
    return Limit(node, column, kept, int(stop))


def fold_limits(graph: gs.Graph) -> PassResult:
    """NonMaxSuppression -> Slice [0:K] becomes NonMaxSuppression of at most K, in place.

    It is the same for one class of one image alone: the limit is one for each class.
    """
    count, skipped = 0, []
    for node in [node for node in graph.nodes if node.op == "NonMaxSuppression"]:
        found = limit_of(node)
        obstacle = found if isinstance(found, str) else _obstacle(found)
        if obstacle or isinstance(found, str):
            skipped.append(f"{node.name}: {obstacle}")
            continue
        if found.slice is None:
            continue
        write = Writer(graph, f"{node.name}/limit", Origin.LOWERING)
        node.inputs[2] = write.const([found.count], np.int64)
        redirect(graph, found.slice.outputs[0], found.indices)
        found.slice.outputs.clear()
        count += 1
    if count:
        graph.cleanup().toposort()
    return PassResult(count, tuple(skipped))


def _obstacle(found: Limit) -> str:
    if found.slice is None:
        return ""
    shape = list(found.suppression.inputs[1].shape or ())
    if len(shape) != 3 or shape[:2] != [1, 1]:
        return f"its scores have shape {shape}, and the limit counts for each class of each image; it takes [1, 1, N]"
    for other in found.indices.outputs:
        if other is not found.slice and minima(other, found.count) is None:
            return f"{other.op} reads its boxes before the slice"
    return ""


def minima(node: gs.Node, limit: int) -> list[tuple[gs.Node, int]] | None:
    """Where a node reads the number of boxes, the Min nodes that limit it before it is used, with the position of the
    limit; None where it is used without."""
    if node.op != "Shape":
        return None
    found: list[tuple[gs.Node, int]] = []
    line = list(node.outputs)
    for tensor in line:
        for reader in tensor.outputs:
            if reader.op in ("Slice", "Squeeze", "Gather", "Reshape", "Identity"):
                line += reader.outputs
                continue
            limits = [at for at in range(len(reader.inputs)) if reader.op == "Min" and constant(reader, at) == limit]
            if not limits:
                return None
            found.append((reader, limits[0]))
    return found


def _column(node: gs.Node) -> gs.Variable | None:
    """Of the rows (image, class, box) that a suppression selects, the boxes: int64 (n,)."""
    readers = node.outputs[0].outputs
    if len(readers) != 1:
        return None
    (taken,) = readers
    if taken.op == "Gather":
        third = taken.attrs.get("axis", 0) == 1 and constant(taken, 1) == 2
    else:
        third = taken.op == "Slice" and [constant(taken, at) for at in (1, 2, 3)] == [2, 3, 1]
    if not third:
        return None
    column = taken.outputs[0]
    while len(column.outputs) == 1 and column.outputs[0].op in ("Squeeze", "Reshape", "Cast"):
        column = column.outputs[0].outputs[0]
    return column if above(column, "Squeeze", "Reshape", "Cast", taken.op) is node.outputs[0] else None


def in_order(graph: gs.Graph) -> list[gs.Node]:
    """The suppressions of a sorted graph: that of the proposals first."""
    return [node for node in graph.nodes if node.op == "NonMaxSuppression" and maker(node.outputs[0]) is node]
