"""RoiAlign on pyramid levels: each region is aligned on the level that fits its size.

Exporters write a chain with a scatter per level, which picks the level's regions, aligns them and writes their rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.passes.base import PassResult, Writer, rewrite_nodes
from trtdet.passes.provenance import Origin
from trtdet.passes.two_stage.suppressions import Limit, limit_of
from trtdet.passes.walk import above, constant, maker, picks, redirect, unpick, upstream

MOST_ROWS = 3840  # largest K of TensorRT's TopK, which sorts the rows

_SCATTERS = ("ScatterElements", "ScatterND")
_WIDENING = ("Expand", "Reshape", "Unsqueeze", "Cast")


@dataclass(frozen=True)
class _Level:
    number: int
    chosen: gs.Variable  # int64 (n,), level of each region
    is_mine: gs.Variable  # bool (n,), whether a region is on this level
    rows: gs.Variable  # int64 (m,), their indices
    aligned: gs.Variable  # float32 (m, channels, height, width), their features

    def picks(self) -> list[gs.Node]:
        """The nodes that pick the regions; exporters repeat the level test for each of them."""
        tests = (node for node in self.chosen.outputs if node.op == "Equal")
        return picks(*(node.outputs[0] for node in tests if constant(node, 1) == self.number))


def merge(graph: gs.Graph, static: bool = False) -> PassResult:
    """Joins the levels of each chain without its scatters, in place: Concat, TopK and Gather sort their rows.

    With ``static`` every region is aligned on every level and selected by level, so no shape depends on the image.
    """

    def merge_chain(graph: gs.Graph, last: gs.Node) -> str | None:
        if any(reader.op in _SCATTERS and reader.inputs[0] is last.outputs[0] for reader in last.outputs[0].outputs):
            return None
        scatters = [last]
        while (before := maker(scatters[0].inputs[0], *_SCATTERS)) is not None:
            scatters.insert(0, before)
        if all(maker(above(scatter.inputs[2], "Cast"), "RoiAlign") is None for scatter in scatters):
            return None
        levels = _levels(scatters)
        if isinstance(levels, str):
            return levels
        reason = _obstacle(levels, static)
        if not reason:
            write = Writer(graph, f"{last.name}/merged", Origin.LOWERING)
            redirect(graph, last.outputs[0], _selected(write, levels) if static else _sorted(write, levels))
            last.outputs.clear()
        return reason

    result = rewrite_nodes(graph, merge_chain, *_SCATTERS)
    for node in graph.nodes if result.count else ():  # the inferred number of rows is outdated
        if node.op == "RoiAlign":
            node.outputs[0].shape = None
    return result


def _obstacle(levels: list[_Level], static: bool) -> str:
    """Why levels cannot be joined in another way; empty if they can."""
    for level in levels if static else ():
        nodes = level.picks()
        if not nodes:
            return f"level {level.number} does not gather its regions"
        if any(node.attrs.get("axis", 0) != 0 or node.attrs.get("batch_dims", 0) != 0 for node in nodes):
            return f"level {level.number} gathers along another axis than the regions'"
    most = 0 if static else most_rows(levels[0].chosen)
    if most is None:
        return "the number of regions is not bounded"
    return f"it has up to {most} regions, and TensorRT's TopK sorts {MOST_ROWS}" if most > MOST_ROWS else ""


def _sorted(write: Writer, levels: list[_Level]) -> gs.Variable:
    features = write("Concat", *(level.aligned for level in levels), axis=0)
    rows = write("Concat", *(level.rows for level in levels), axis=0)
    # TensorRT 8.6's TopK takes no integers; float32 is exact up to the largest K.
    keys = write("Cast", rows, to=int(onnx.TensorProto.FLOAT))
    _, order = write.many("TopK", 2, keys, write("Shape", rows), axis=0, largest=0, sorted=1)
    return write("Gather", features, order, axis=0)


def _selected(write: Writer, levels: list[_Level]) -> gs.Variable:
    for level in levels:
        unpick(write.graph, level.picks())
    merged = levels[-1].aligned
    for level in levels[-2::-1]:
        mine = write("Unsqueeze", level.is_mine, write.const([1, 2, 3], np.int64))
        merged = write("Where", mine, level.aligned, merged)
    return merged


def write_sampling(graph: gs.Graph) -> PassResult:
    """Writes the default sampling ratio of each RoiAlign explicitly, in place.

    ONNX's default, 0, takes as many samples as the region has cells. Some importers assume 1.
    """
    nodes = [node for node in graph.nodes if node.op == "RoiAlign" and "sampling_ratio" not in node.attrs]
    for node in nodes:
        node.attrs["sampling_ratio"] = 0
    return PassResult(len(nodes))


def _levels(scatters: list[gs.Node]) -> list[_Level] | str:
    """The levels that scatters join, or the reason why they join none."""
    levels = []
    for scatter in scatters:
        if scatter.attrs.get("reduction", "none") not in ("none", b"none"):
            return f"it scatters with reduction {scatter.attrs['reduction']}"
        if scatter.op == "ScatterElements" and scatter.attrs.get("axis", 0) != 0:
            return f"it scatters along axis {scatter.attrs['axis']}"
        aligned = scatter.inputs[2]
        if maker(above(aligned, "Cast"), "RoiAlign") is None:
            return "it scatters something else than aligned regions"
        rows = above(scatter.inputs[1], *_WIDENING)
        column = above(rows, "Squeeze", "Split", "Slice", "Transpose", "Gather")
        equal = maker(above(column, "NonZero"), "Equal") if maker(column, "NonZero") is not None else None
        if equal is None:
            return "its rows are not those of a level"
        number = constant(equal, 1)
        if number is None:
            return "the number of its level is computed"
        levels.append(_Level(int(number), chosen=equal.inputs[0], is_mine=equal.outputs[0], rows=rows, aligned=aligned))
    if any(level.chosen is not levels[0].chosen for level in levels):
        return "its levels are chosen by different tensors"
    # The level is Clip(Floor(x), low, high) minus constants.
    tensor, less = levels[0].chosen, 0
    while (node := maker(tensor, "Cast", "Sub", "Identity")) is not None:
        offset = constant(node, 1) if node.op == "Sub" else 0
        if offset is None:
            break
        tensor, less = node.inputs[0], less + int(offset)
    clip = maker(tensor, "Clip")
    low, high = (None, None) if clip is None else (constant(clip, 1), constant(clip, 2))
    if clip is None or maker(clip.inputs[0], "Floor") is None or low is None or high is None:
        return "the level of a region is not bounded by a Clip, so a region may be of none"
    possible = list(range(int(low) - less, int(high) - less + 1))
    numbers = sorted(level.number for level in levels)
    return levels if numbers == possible else f"a region may be of levels {possible}, and it joins {numbers}"


def most_rows(tensor: gs.Variable) -> int | None:
    """Maximum number of regions: the limit of the nearest suppression above; None without a limit."""
    node = next((node for node in upstream(tensor) if node.op == "NonMaxSuppression"), None)
    limit = None if node is None else limit_of(node)
    return limit.count if isinstance(limit, Limit) else None
