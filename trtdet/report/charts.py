"""What charts share: colours that can be told apart on a light and on a dark ground, by people with any colour vision
too, and bars in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = ("#2f6db5", "#d9822b", "#3a9d5d", "#b5446e", "#7b5ea7", "#a08032", "#2f9aa0", "#c0504d")
"""For kinds, in their order; all after them are grey."""

GREY = "#8d97a3"

PRECISIONS = {"int8": "#2f6db5", "fp8": "#2f9aa0", "fp16": "#d9822b", "fp32": "#b5446e", "": GREY}
"""By precision; of layers without a convolution the colour of the empty text."""


def colour(index: int) -> str:
    """The colour of a kind by its place."""
    return COLOURS[index] if index < len(COLOURS) else GREY


def axes(x: str, y: str, **layout: Any) -> dict[str, Any]:
    """A layout with titles of the axes."""
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}, **layout}


def bars_in_row(bars: Sequence[tuple[str, float, str]], colours: Mapping[str, str]) -> list[dict[str, Any]]:
    """Bars at 1, 2, ..., a trace for each kind.

    Args:
        bars: the kind of each, its height, and what the pointer shows.
        colours: of the kinds, in the order of the legend.
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
