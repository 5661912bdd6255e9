"""Colours and bars of charts; the colours suit any colour vision, on light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from trtdet.report.document import LayerBars

COLOURS = ("#2f6db5", "#d9822b", "#3a9d5d", "#b5446e", "#7b5ea7", "#a08032", "#2f9aa0", "#c0504d")
"""Colours of the first kinds; later kinds are grey."""

GREY = "#8d97a3"

PRECISIONS = {"int8": "#2f6db5", "fp8": "#2f9aa0", "fp16": "#d9822b", "fp32": "#b5446e", "": GREY}
"""Colour by precision; the empty text stands for layers without a convolution."""


def markup(text: str) -> str:
    """Text for Plotly's labels and tips, which read HTML; a name may hold some."""
    return escape(text, quote=False)


def axes(x: str, y: str, **layout: Any) -> dict[str, Any]:
    """A layout with axis titles."""
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}, **layout}


def bars_in_row(bars: Sequence[tuple[str, float, str]], colours: Mapping[str, str]) -> list[dict[str, Any]]:
    """Bars at x = 1, 2, ..., with a trace for each kind.

    A bar is (kind, height, hover text), the latter as :func:`markup`. ``colours`` maps kinds to colours, in the order
    of the legend.
    """
    traces = []
    for kind, hue in colours.items():
        own = [(place, height, tip) for place, (name, height, tip) in enumerate(bars, 1) if name == kind]
        traces.append(
            {
                "type": "bar",
                "name": markup(kind),
                "x": [place for place, _, _ in own],
                "y": [height for _, height, _ in own],
                "hovertext": [tip for _, _, tip in own],
                "hoverinfo": "text",
                "marker": {"color": hue},
            }
        )
    return traces


@dataclass(frozen=True)
class Rectangle:
    """A layer in a drawing of 1000 by 100 units."""

    x: float
    y: float
    width: float
    height: float
    precision: str
    tip: str


_MANY = 250
"""Columns so many leave no gaps: they would be thinner than a pixel."""

_WIDE = 3.0
"""From this width on, a layer in a strip ends in a gap."""


def rectangles(chart: LayerBars, top: float) -> list[Rectangle]:
    """The layers of a chart: widths by size, or columns of equal width whose height 100 means ``top``."""
    drawn, x = [], 0.0
    total = sum(bar.size for bar in chart.bars) or 1.0
    for bar in chart.bars:
        if chart.columns:
            width, height = 1000 / len(chart.bars), 100 * bar.size / (top or 1.0)
            shown = 0.85 * width if len(chart.bars) < _MANY else width
        else:
            width, height = 1000 * bar.size / total, 100.0
            shown = width - 0.8 if width > _WIDE else width
        place = [round(value, 2) for value in (x, 100 - height, shown, height)]
        drawn.append(
            Rectangle(place[0], y=place[1], width=place[2], height=place[3], precision=bar.precision, tip=bar.tip)
        )
        x += width
    return drawn
