"""The engine's layers as a drawing: from left to right as they depend on each other, coloured by precision and time.

The layout is layered (Sugiyama, Tagawa and Toda 1981, IEEE Transactions on Systems, Man and Cybernetics 11(2)): a
layer's column is its longest path from the input, long edges pass through places of their own, and the order within a
column follows the mean of the neighbours' places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import onnx

from trtdet.audit import Layer
from trtdet.audit.layers import NO_KERNEL
from trtdet.audit.roofline import Estimate
from trtdet.quantization import PrecisionPlan
from trtdet.report.document import Chart, Section, Text
from trtdet.report.palette import PRECISIONS

_READS = {"Int8": "int8", "FP8": "fp8", "Half": "fp16", "BFloat16": "fp16", "Float": "fp32"}
_PASSED = ("QuantizeLinear", "DequantizeLinear", "Cast", "Constant", "Identity")
_SWEEPS = 4
_LEAST, _MOST = 6.0, 18.0
"""Diameters of marks, in pixels."""


@dataclass(frozen=True)
class Node:
    """A layer of the drawing.

    Attributes:
        label: short, beside it.
        tip: what is known of it, lines joined by ``<br>``.
        precision: that it reads, a key of :data:`trtdet.report.palette.PRECISIONS`.
        before: positions of the nodes that it reads.
        ms: its time; None where it is not known.
    """

    label: str
    tip: str
    precision: str
    before: tuple[int, ...]
    ms: float | None = None


def engine_nodes(layers: Sequence[Layer], plan: PrecisionPlan, estimate: Estimate) -> list[Node]:
    """The layers of an engine that start a kernel; views, constants and events are passed through."""
    times = {layer.name: layer.ms for layer in estimate.layers}
    makers: dict[str, tuple[int, ...]] = {}
    nodes: list[Node] = []
    for layer in layers:
        before = tuple(dict.fromkeys(place for tensor in layer.inputs for place in makers.get(tensor.name, ())))
        made = before
        if layer.type not in NO_KERNEL:
            convs = [name for name in layer.onnx if name in plan.entries]
            ms = times.get(layer.name)
            label = convs[0] if convs else layer.type
            tip = [layer.name[:100], layer.type, ", ".join(convs[:4]), f"reads {layer.input}, writes {layer.output}"]
            tip += [f"{layer.bytes / 1e6:.3f} MB"] + ([f"{ms:.4f} ms, estimated"] if ms is not None else [])
            nodes.append(Node(label, "<br>".join(filter(None, tip)), _READS.get(layer.input, ""), before, ms))
            made = (len(nodes) - 1,)
        for tensor in layer.outputs:
            # Several layers may write parts of one tensor.
            makers[tensor.name] = tuple(dict.fromkeys((*makers.get(tensor.name, ()), *made)))
    return nodes


def model_nodes(model: onnx.ModelProto, plan: PrecisionPlan) -> list[Node]:
    """The nodes of a model, what only changes the data type passed through."""
    makers: dict[str, tuple[int, ...]] = {}
    nodes: list[Node] = []
    for node in model.graph.node:
        before = tuple(dict.fromkeys(place for name in node.input for place in makers.get(name, ())))
        made = before
        if node.op_type not in _PASSED:
            entry = plan.entries.get(node.name)
            tip = [node.name, node.op_type, entry.reason if entry is not None else ""]
            precision = entry.precision if entry is not None else ""
            label = node.name if entry is not None else node.op_type
            nodes.append(Node(label, "<br>".join(filter(None, tip)), precision, before))
            made = (len(nodes) - 1,)
        makers.update(dict.fromkeys(node.output, made))
    return nodes


def graph_section(nodes: Sequence[Node], of_engine: bool, basis: str) -> Section:
    """The drawing.

    Args:
        nodes: in an order in which each comes after those that it reads.
        of_engine: layers of an engine, else nodes of a model.
        basis: where the times come from; empty where there are none.
    """
    places, edges = layout(nodes)
    what = "layers of the engine" if of_engine else "nodes of the model; no engine lists its layers"
    said = f"{len(nodes)} {what}. The colour is the precision that is read"
    said += f", the size the time ({basis})." if basis else "."
    note = "Scroll or pinch to zoom, drag to move; by keyboard + and -, arrows, 0 for all. Names appear as you zoom in."
    traces: list[dict[str, Any]] = [_lines(edges)]
    longest = max((node.ms or 0.0 for node in nodes), default=0.0) or 1.0
    for precision in sorted({node.precision for node in nodes}):
        own = [(node, place) for node, place in zip(nodes, places, strict=True) if node.precision == precision]
        traces.append(_marks(precision, own, longest))
    axis = {"showgrid": False, "showline": False, "zeroline": False, "showticklabels": False}
    chart_layout = {
        "xaxis": axis,
        "yaxis": axis,
        "dragmode": "pan",
        "scrollzoom": True,
        "hovermode": "closest",
        "margin": {"l": 10, "b": 10},
    }
    if basis:
        chart_layout["updatemenus"] = [_buttons(traces)]
    drawing = Chart("From the input, left, to the outputs", traces, chart_layout, note, 560)
    return Section("Layers as drawn", (Text((said,)), drawing))


def _lines(edges: Sequence[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    x: list[float | None] = []
    y: list[float | None] = []
    for edge in edges:
        x += [*(place[0] for place in edge), None]
        y += [*(place[1] for place in edge), None]
    line = {"color": PRECISIONS[""], "width": 1, "shape": "linear"}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": line, "hoverinfo": "skip", "showlegend": False}


def _marks(precision: str, own: Sequence[tuple[Node, tuple[float, float]]], longest: float) -> dict[str, Any]:
    sizes = [_LEAST + (_MOST - _LEAST) * ((node.ms or 0.0) / longest) ** 0.5 for node, _ in own]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": precision.upper() or "other types",
        "x": [place[0] for _, place in own],
        "y": [place[1] for _, place in own],
        "text": [node.label for node, _ in own],
        "textposition": "top center",
        "hovertext": [node.tip for node, _ in own],
        "hoverinfo": "text",
        "customdata": [node.ms or 0.0 for node, _ in own],
        "marker": {"color": PRECISIONS[precision], "size": sizes, "symbol": "square", "line": {"width": 0}},
    }


def _buttons(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Coloured by precision, or by time from blue to red."""
    marks = traces[1:]
    which = list(range(1, len(traces)))
    highest = max(max(trace["customdata"]) for trace in marks)
    by_precision = {"marker.color": [trace["marker"]["color"] for trace in marks], "marker.showscale": False}
    by_time = {
        "marker.color": [trace["customdata"] for trace in marks],
        "marker.colorscale": "RdBu",
        "marker.reversescale": False,
        "marker.cmin": 0.0,
        "marker.cmax": highest,
        "marker.showscale": [place == 0 for place in range(len(marks))],
        "marker.colorbar.title.text": "ms",
    }
    buttons = [
        {"label": "by precision", "method": "restyle", "args": [by_precision, which]},
        {"label": "by time", "method": "restyle", "args": [by_time, which]},
    ]
    # The button that is on is nearly white on either ground.
    look = {"bgcolor": "#dfe5ec", "font": {"color": "#1c2430"}}
    return {
        "type": "buttons",
        "direction": "right",
        "x": 0.5,
        "xanchor": "center",
        "y": 1.1,
        "buttons": buttons,
        **look,
    }


def layout(nodes: Sequence[Node]) -> tuple[list[tuple[float, float]], list[list[tuple[float, float]]]]:
    """Places of the nodes and the bends of the edges between them.

    Returns:
        (x, y) by node, x its column; and for each edge the places that it passes, its ends among them.
    """
    columns: list[int] = []
    for node in nodes:
        columns.append(1 + max((columns[place] for place in node.before), default=-1))
    members: dict[int, list[int]] = defaultdict(list)
    for place, column in enumerate(columns):
        members[column].append(place)
    before: dict[int, list[int]] = defaultdict(list)
    after: dict[int, list[int]] = defaultdict(list)
    chains: list[list[int]] = []
    extra = len(nodes)
    for place, node in enumerate(nodes):
        for source in node.before:
            chain = [source]
            for column in range(columns[source] + 1, columns[place]):
                members[column].append(extra)
                chain.append(extra)
                extra += 1
            chain.append(place)
            chains.append(chain)
            for first, second in pairwise(chain):
                before[second].append(first)
                after[first].append(second)
    rows = _rows([members[column] for column in range(len(members))], before, after)
    column_of = {place: column for column, own in members.items() for place in own}
    at = {place: (float(column_of[place]), rows[place]) for place in column_of}
    return [at[place] for place in range(len(nodes))], [[at[place] for place in chain] for chain in chains]


def _rows(
    columns: list[list[int]], before: Mapping[int, list[int]], after: Mapping[int, list[int]]
) -> dict[int, float]:
    """The height of each place: near the mean of its neighbours, one from the next in its column."""
    rows: dict[int, float] = {}
    for own in columns:
        rows.update({place: float(index) - len(own) / 2 for index, place in enumerate(own)})
    for sweep in range(2 * _SWEEPS):
        neighbours = before if sweep % 2 == 0 else after
        for own in columns if sweep % 2 == 0 else reversed(columns):
            wished = {
                place: sum(rows[other] for other in neighbours[place]) / len(neighbours[place])
                if neighbours.get(place)
                else rows[place]
                for place in own
            }
            own.sort(key=lambda place: wished[place])
            rows.update(_apart(own, wished))
    return rows


def _apart(own: Sequence[int], wished: Mapping[int, float]) -> dict[int, float]:
    """As wished, at least 1 apart, in order; moved together so that the mean stays."""
    placed: list[float] = []
    for place in own:
        placed.append(max(wished[place], placed[-1] + 1) if placed else wished[place])
    shift = sum(wished[place] for place in own) / len(own) - sum(placed) / len(placed) if own else 0.0
    return {place: row + shift for place, row in zip(own, placed, strict=True)}
