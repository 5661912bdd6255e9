"""Draws the engine's layers as a graph from left to right, coloured by precision or time.

The layout is layered (Sugiyama, Tagawa and Toda 1981, IEEE Transactions on Systems, Man and Cybernetics 11(2)). A
node's column is the length of its longest path from the input. Long edges get a place in every column that they cross.
The order within a column follows the mean position of the neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import onnx

from trtdet.audit import Layer
from trtdet.audit.layers import NO_KERNEL
from trtdet.audit.roofline import Estimate
from trtdet.audit.traffic import PRECISIONS as READ_AS
from trtdet.quantization import PrecisionPlan
from trtdet.report.charts import PRECISIONS, markup
from trtdet.report.document import Chart, Section, Text

_PASSED = ("QuantizeLinear", "DequantizeLinear", "Cast", "Constant", "Identity")
_SWEEPS = 4
_LEAST, _MOST = 6.0, 18.0
"""Smallest and largest size of a mark, in pixels."""


@dataclass(frozen=True)
class Node:
    """A layer of the drawing."""

    label: str  # short text beside the node
    tip: str  # hover text; lines are joined by ``<br>``
    precision: str  # of its input, a key of :data:`trtdet.report.charts.PRECISIONS`
    before: tuple[int, ...]  # indices of the nodes whose outputs it reads
    ms: float | None = None  # None where the time is unknown


def engine_nodes(layers: Sequence[Layer], plan: PrecisionPlan, estimate: Estimate) -> list[Node]:
    """The layers of an engine that start a kernel; edges skip views, constants and events."""
    times = {layer.name: layer.ms for layer in estimate.layers}
    steps = []
    for layer in layers:
        node = None
        if layer.type not in NO_KERNEL:
            convs = [name for name in layer.onnx if name in plan.entries]
            ms = times.get(layer.name)
            tip = [layer.name[:100], layer.type, ", ".join(convs[:4]), f"reads {layer.input}, writes {layer.output}"]
            tip += [f"{layer.bytes / 1e6:.3f} MB", "" if ms is None else f"{ms:.4f} ms, estimated"]
            label = convs[0] if convs else layer.type
            node = Node(
                markup(label),
                "<br>".join(map(markup, filter(None, tip))),
                READ_AS.get(layer.input, ""),
                before=(),
                ms=ms,
            )
        steps.append(([tensor.name for tensor in layer.inputs], [tensor.name for tensor in layer.outputs], node))
    return _linked(steps)


def model_nodes(model: onnx.ModelProto, plan: PrecisionPlan) -> list[Node]:
    """The nodes of a model; edges skip nodes that only change the data type."""
    steps = []
    for node in model.graph.node:
        mark, entry = None, plan.entries.get(node.name)
        if node.op_type not in _PASSED:
            tip = (node.name, node.op_type, entry.reason if entry is not None else "")
            label, precision = (node.name, entry.precision) if entry is not None else (node.op_type, "")
            mark = Node(markup(label), "<br>".join(map(markup, filter(None, tip))), precision, before=())
        steps.append((node.input, node.output, mark))
    return _linked(steps)


def _linked(steps: Iterable[tuple[Sequence[str], Sequence[str], Node | None]]) -> list[Node]:
    """Fills ``before`` of the nodes. A step is (tensors read, tensors written, node); edges skip steps without node."""
    makers: dict[str, tuple[int, ...]] = {}
    nodes: list[Node] = []
    for inputs, outputs, node in steps:
        sources = tuple(dict.fromkeys(place for name in inputs for place in makers.get(name, ())))
        if node is not None:
            nodes.append(replace(node, before=sources))
            sources = (len(nodes) - 1,)
        for name in outputs:
            # Several layers can each write a part of the same tensor.
            makers[name] = tuple(dict.fromkeys((*makers.get(name, ()), *sources)))
    return nodes


def graph_section(nodes: Sequence[Node], basis: str) -> Section:
    """The drawing of topologically sorted nodes.

    ``basis`` says where the times of an engine's layers come from; it is empty for a model, whose nodes have no times.
    """
    places, edges = layout(nodes)
    kind = "layers of the engine" if basis else "nodes of the model; no engine lists its layers"
    text = f"{len(nodes)} {kind}. The colour is the precision that is read"
    text += f", the size the time ({basis})." if basis else "."
    # In Plotly, None ends a line.
    x, y = ([value for edge in edges for value in (*(place[axis] for place in edge), None)] for axis in (0, 1))
    line = {"color": PRECISIONS[""], "width": 1, "shape": "linear"}
    traces: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": line, "hoverinfo": "skip", "showlegend": False}
    ]
    longest = max((node.ms or 0.0 for node in nodes), default=0.0) or 1.0
    for precision in sorted({node.precision for node in nodes}):
        group = [(node, place) for node, place in zip(nodes, places, strict=True) if node.precision == precision]
        sizes = [_LEAST + (_MOST - _LEAST) * ((node.ms or 0.0) / longest) ** 0.5 for node, _ in group]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": precision.upper() or "other types",
                "x": [place[0] for _, place in group],
                "y": [place[1] for _, place in group],
                "text": [node.label for node, _ in group],
                "textposition": "top center",
                "hovertext": [node.tip for node, _ in group],
                "hoverinfo": "text",
                "customdata": [node.ms or 0.0 for node, _ in group],
                "marker": {"color": PRECISIONS[precision], "size": sizes, "symbol": "square", "line": {"width": 0}},
            }
        )
    axis = {"showgrid": False, "showline": False, "zeroline": False, "showticklabels": False}
    look: dict[str, Any] = {"xaxis": axis, "yaxis": axis, "dragmode": "pan", "scrollzoom": True, "hovermode": "closest"}
    look["margin"] = {"l": 10, "b": 10}
    if basis:
        look["updatemenus"] = [_buttons(traces[1:])]
    note = "Scroll or pinch to zoom, drag to move; by keyboard + and -, arrows, 0 for all. Names appear as you zoom in."
    drawing = Chart("From the input, left, to the outputs", traces=traces, layout=look, note=note, height=560)
    return Section("Layers as drawn", (Text((text,)), drawing))


def _buttons(marks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Buttons that colour the marks by precision, or by time."""
    by_precision = {"marker.color": [trace["marker"]["color"] for trace in marks], "marker.showscale": False}
    by_time = {
        "marker.color": [trace["customdata"] for trace in marks],
        "marker.colorscale": "RdBu",
        "marker.reversescale": False,
        "marker.cmin": 0.0,
        "marker.cmax": max(max(trace["customdata"]) for trace in marks),
        "marker.showscale": [place == 0 for place in range(len(marks))],
        "marker.colorbar.title.text": "ms",
    }
    which = list(range(1, len(marks) + 1))
    buttons = [
        {"label": label, "method": "restyle", "args": [changes, which]}
        for label, changes in (("by precision", by_precision), ("by time", by_time))
    ]
    place = {"type": "buttons", "direction": "right", "x": 0.5, "xanchor": "center", "y": 1.1}
    # Plotly draws the active button nearly white in both themes, so the text must be dark.
    return {**place, "buttons": buttons, "bgcolor": "#dfe5ec", "font": {"color": "#1c2430"}}


def layout(nodes: Sequence[Node]) -> tuple[list[tuple[float, float]], list[list[tuple[float, float]]]]:
    """(x, y) of each node, with x the column; and for each edge all its points, both ends included."""
    column_of: list[int] = []
    for node in nodes:
        column_of.append(1 + max((column_of[place] for place in node.before), default=-1))
    before: dict[int, list[int]] = defaultdict(list)
    after: dict[int, list[int]] = defaultdict(list)
    chains: list[list[int]] = []
    for place, node in enumerate(nodes):
        for source in node.before:
            crossed = range(column_of[source] + 1, column_of[place])
            chain = [source, *range(len(column_of), len(column_of) + len(crossed)), place]
            column_of += crossed
            chains.append(chain)
            for first, second in pairwise(chain):
                before[second].append(first)
                after[first].append(second)
    columns: dict[int, list[int]] = defaultdict(list)
    for place, column in enumerate(column_of):
        columns[column].append(place)
    rows = _rows([columns[column] for column in range(len(columns))], before, after)
    at = [(float(column), rows[place]) for place, column in enumerate(column_of)]
    return at[: len(nodes)], [[at[place] for place in chain] for chain in chains]


def _rows(
    columns: list[list[int]], before: Mapping[int, list[int]], after: Mapping[int, list[int]]
) -> dict[int, float]:
    """y of each place: near the mean of its neighbours, and at least 1 from the next place in its column."""
    rows = {place: float(index) - len(column) / 2 for column in columns for index, place in enumerate(column)}
    for sweep in range(2 * _SWEEPS):
        neighbours = before if sweep % 2 == 0 else after
        for column in columns if sweep % 2 == 0 else reversed(columns):
            targets = {
                place: fmean(rows[other] for other in neighbours[place]) if neighbours.get(place) else rows[place]
                for place in column
            }
            column.sort(key=lambda place: targets[place])
            # Enforce a distance of 1, then shift the whole column so that its mean stays.
            spaced: list[float] = []
            for place in column:
                spaced.append(max(targets[place], spaced[-1] + 1) if spaced else targets[place])
            shift = fmean(targets.values()) - fmean(spaced)
            rows.update({place: row + shift for place, row in zip(column, spaced, strict=True)})
    return rows
