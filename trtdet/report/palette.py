"""Colours that can be told apart on a light and on a dark ground, by people with any colour vision too."""

from __future__ import annotations

COLOURS = ("#2f6db5", "#d9822b", "#3a9d5d", "#b5446e", "#7b5ea7", "#a08032", "#2f9aa0", "#c0504d")
"""For kinds, in their order; all after them are grey."""

GREY = "#8d97a3"

PRECISIONS = {"int8": "#2f6db5", "fp8": "#2f9aa0", "fp16": "#d9822b", "fp32": "#b5446e", "": GREY}
"""By precision; of layers without a convolution the colour of the empty text."""


def colour(index: int) -> str:
    """The colour of a kind by its place."""
    return COLOURS[index] if index < len(COLOURS) else GREY
