"""Colours and bars of charts; the colours suit any colour vision, on light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = ("#2f6db5", "#d9822b", "#3a9d5d", "#b5446e", "#7b5ea7", "#a08032", "#2f9aa0", "#c0504d")
"""Colours of the first kinds; later kinds are grey."""

GREY = "#8d97a3"

PRECISIONS = {"int8": "#2f6db5", "fp8": "#2f9aa0", "fp16": "#d9822b", "fp32": "#b5446e", "": GREY}
"""Colour by precision; the empty text stands for layers without a convolution."""


def axes(x: str, y: str, **layout: Any) -> dict[str, Any]:
    """A layout with axis titles."""
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}, **layout}


def bars_in_row(bars: Sequence[tuple[str, float, str]], colours: Mapping[str, str]) -> list[dict[str, Any]]:
    """Bars at x = 1, 2, ..., with a trace for each kind.

    A bar is (kind, height, hover text). ``colours`` maps kinds to colours, in the order of the legend.
    """
    traces = []
    for kind, hue in colours.items():
        own = [(place, height, tip) for place, (name, height, tip) in enumerate(bars, 1) if name == kind]
        traces.append(
            {
                "type": "bar",
                "name": kind,
                "x": [place for place, _, _ in own],
                "y": [height for _, height, _ in own],
                "hovertext": [tip for _, _, tip in own],
                "hoverinfo": "text",
                "marker": {"color": hue},
            }
        )
    return traces
