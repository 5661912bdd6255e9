"""RoiAlign on the levels of a pyramid: each region is aligned on the level that fits its size.

Exporters write the choice as a chain, a scatter for each level: the regions of the level are picked, aligned and
written into their rows. :func:`merge` joins all of them at once; :func:`merge_static` has no shape that depends on the
image, for builders that have no NonZero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.passes.base import PassResult, Writer
from trtdet.passes.provenance import Origin
from trtdet.passes.two_stage.suppressions import Limit, limit_of
from trtdet.passes.two_stage.walk import above, constant, maker, picks, redirect, unpick, upstream

MOST_ROWS = 3840
"""The largest K of TensorRT's TopK, which sorts the rows."""

_SCATTERS = ("ScatterElements", "ScatterND")
_WIDENING = ("Expand", "Reshape", "Unsqueeze", "Cast")


@dataclass(frozen=True)
class _Level:
    """A level of a chain.

    Attributes:
        number: of the level, as ``chosen`` has it.
        chosen: int64 (n,), the number of the level of each region.
        is_mine: bool (n,), the regions of this level.
        rows: int64 (m,), their indices.
        aligned: float32 (m, channels, height, width), their features.
    """

    number: int
    chosen: gs.Variable
    is_mine: gs.Variable
    rows: gs.Variable
    aligned: gs.Variable


def merge(graph: gs.Graph) -> PassResult:
    """Joins the levels of each chain by sorting their rows, in place: Concat, TopK, Gather in the place of scatters."""

    def joined(write: Writer, levels: list[_Level]) -> gs.Variable:
        features = write("Concat", *(level.aligned for level in levels), axis=0)
        rows = write("Concat", *(level.rows for level in levels), axis=0)
        # The TopK of TensorRT 8.6 takes no whole numbers; up to the largest K float32 holds each of them.
        keys = write("Cast", rows, to=int(onnx.TensorProto.FLOAT))
        _, order = write.many("TopK", 2, keys, write("Shape", rows), axis=0, largest=0, sorted=1)
        return write("Gather", features, order, axis=0)

    return _merged(graph, _too_many, joined)


def merge_static(graph: gs.Graph) -> PassResult:
    """Aligns every region on every level of each chain and picks by level, in place; no shape depends on the image.

    It costs an alignment of all regions for each level.
    """

    def joined(write: Writer, levels: list[_Level]) -> gs.Variable:
        for level in levels:
            unpick(graph, _picks(level))
        merged = levels[-1].aligned
        for level in levels[-2::-1]:
            mine = write("Unsqueeze", level.is_mine, write.const([1, 2, 3], np.int64))
            merged = write("Where", mine, level.aligned, merged)
        return merged

    return _merged(graph, _not_picked, joined)


def write_sampling(graph: gs.Graph) -> PassResult:
    """Writes the sampling ratio of each RoiAlign that leaves it to the default, in place.

    ONNX's default, 0, samples as many points as the region has cells. Some importers take 1.
    """
    found = [node for node in graph.nodes if node.op == "RoiAlign" and "sampling_ratio" not in node.attrs]
    for node in found:
        node.attrs["sampling_ratio"] = 0
    return PassResult(len(found))


def _merged(
    graph: gs.Graph, obstacle: Callable[[list[_Level]], str], joined: Callable[[Writer, list[_Level]], gs.Variable]
) -> PassResult:
    """Writes another join of the levels in the place of each chain that has no obstacle."""
    count, skipped = 0, []
    for last, levels in _chains(graph):
        reason = levels if isinstance(levels, str) else obstacle(levels)
        if reason or isinstance(levels, str):
            skipped.append(f"{last.name}: {reason}")
            continue
        write = Writer(graph, f"{last.name}/merged", Origin.LOWERING)
        redirect(graph, last.outputs[0], joined(write, levels))
        last.outputs.clear()
        count += 1
    if count:
        graph.cleanup().toposort()
        for node in graph.nodes:  # what was inferred of the rows does not hold any more
            if node.op == "RoiAlign":
                node.outputs[0].shape = None
    return PassResult(count, tuple(skipped))


def _chains(graph: gs.Graph) -> Iterator[tuple[gs.Node, list[_Level] | str]]:
    """The last scatter of each chain with its levels, or with the reason that it is none."""
    for node in [node for node in graph.nodes if node.op in _SCATTERS]:
        if any(reader.op in _SCATTERS and reader.inputs[0] is node.outputs[0] for reader in node.outputs[0].outputs):
            continue
        scatters = [node]
        while (before := maker(scatters[-1].inputs[0], *_SCATTERS)) is not None:
            scatters.append(before)
        if any(maker(above(scatter.inputs[2], "Cast"), "RoiAlign") is not None for scatter in scatters):
            yield node, _levels(scatters[::-1])


def _levels(scatters: list[gs.Node]) -> list[_Level] | str:
    levels = []
    for scatter in scatters:
        level = _level(scatter)
        if isinstance(level, str):
            return level
        levels.append(level)
    chosen = levels[0].chosen
    if any(level.chosen is not chosen for level in levels):
        return "its levels are chosen by different tensors"
    numbers, possible = sorted(level.number for level in levels), _possible(chosen)
    if possible is None:
        return "the level of a region is not bounded by a Clip, so a region may be of none"
    if numbers != possible:
        return f"a region may be of levels {possible}, and it joins {numbers}"
    return levels


def _level(scatter: gs.Node) -> _Level | str:
    if scatter.attrs.get("reduction", "none") not in ("none", b"none"):
        return f"it scatters with reduction {scatter.attrs['reduction']}"
    if scatter.op == "ScatterElements" and scatter.attrs.get("axis", 0) != 0:
        return f"it scatters along axis {scatter.attrs['axis']}"
    if maker(above(scatter.inputs[2], "Cast"), "RoiAlign") is None:
        return "it scatters something else than aligned regions"
    rows = above(scatter.inputs[1], *_WIDENING)
    column = above(rows, "Squeeze", "Split", "Slice", "Transpose", "Gather")
    equal = maker(above(column, "NonZero"), "Equal") if maker(column, "NonZero") is not None else None
    if equal is None:
        return "its rows are not those of a level"
    number = constant(equal, 1)
    if number is None:
        return "the number of its level is computed"
    return _Level(int(number), equal.inputs[0], equal.outputs[0], rows, scatter.inputs[2])


def _possible(chosen: gs.Variable) -> list[int] | None:
    """The levels that a region may be of: whole numbers between the limits of a Clip, less what is subtracted."""
    tensor, less = chosen, 0
    while (node := maker(tensor, "Cast", "Sub", "Identity")) is not None:
        if node.op == "Sub":
            offset = constant(node, 1)
            if offset is None:
                return None
            less += int(offset)
        tensor = node.inputs[0]
    clip = maker(tensor, "Clip")
    if clip is None or maker(clip.inputs[0], "Floor") is None:
        return None
    low, high = constant(clip, 1), constant(clip, 2)
    if low is None or high is None:
        return None
    return list(range(int(low) - less, int(high) - less + 1))


def _too_many(levels: list[_Level]) -> str:
    most = most_rows(levels[0].chosen)
    if most is None:
        return "the number of regions is not bounded"
    return f"it has up to {most} regions, and TensorRT's TopK sorts {MOST_ROWS}" if most > MOST_ROWS else ""


def most_rows(tensor: gs.Variable) -> int | None:
    """How many regions there are at most: the limit of the nearest suppression above."""
    for node in upstream(tensor):
        if node.op == "NonMaxSuppression":
            found = limit_of(node)
            return found.count if isinstance(found, Limit) else None
    return None


def _picks(level: _Level) -> list[gs.Node]:
    """The nodes that pick the regions of a level out of all. Exporters write the choice anew for each of them."""
    tests = (node for node in level.chosen.outputs if node.op == "Equal")
    return picks(*(node.outputs[0] for node in tests if constant(node, 1) == level.number))


def _not_picked(levels: list[_Level]) -> str:
    for level in levels:
        picks = _picks(level)
        if not picks:
            return f"level {level.number} does not gather its regions"
        if any(pick.attrs.get("axis", 0) != 0 or pick.attrs.get("batch_dims", 0) != 0 for pick in picks):
            return f"level {level.number} gathers along another axis than the regions'"
    return ""
