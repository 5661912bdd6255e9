"""Checks masks of annotations before a library rasterises them: none of these libraries checks sizes or run lengths."""

from __future__ import annotations

import math
from typing import Any

from trtdet.errors import one_line

MOST_PIXELS = 1 << 28
"""Most pixels of an annotated image, more than Pillow decodes."""


def problem_of(segmentation: Any, width: int, height: int) -> str:
    """Why a segmentation in COCO's format is no mask of an image of this size in pixels; empty if it is one.

    Polygons may reach over the image's edges by its size. Run lengths must be of as many pixels as their ``size``,
    which must be the image's; an image of size 0, as without annotations, leaves that open.
    """
    if width * height > MOST_PIXELS:
        return f"the image has {width} x {height} pixels, allowed are {MOST_PIXELS}"
    if isinstance(segmentation, list):
        return _polygons_problem(segmentation, width, height)
    if not isinstance(segmentation, dict) or not {"size", "counts"} <= segmentation.keys():
        return f"is {one_line(repr(segmentation), 60)}, neither polygons nor run lengths"
    size, counts = segmentation["size"], segmentation["counts"]
    if not (isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size)):
        return f"has the size {one_line(repr(size), 60)}, expected [height, width]"
    if size[0] * size[1] > MOST_PIXELS or (width and height and size != [height, width]):
        return f"has the size {size}, the image has {[height, width]}"
    if isinstance(counts, str):
        counts = _unpacked(counts)
    if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts):
        return f"has the run lengths {one_line(repr(segmentation['counts']), 60)}"
    total = sum(counts)
    return f"has run lengths of {total} pixels, {size[0] * size[1]} are needed" if total != size[0] * size[1] else ""


def _polygons_problem(polygons: list[Any], width: int, height: int) -> str:
    for polygon in polygons:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            return f"has the polygon {one_line(repr(polygon), 60)}, expected x, y of at least three corners"
        for place, value in enumerate(polygon):
            side = height if place % 2 else width
            if type(value) not in (int, float) or not math.isfinite(value) or not -side <= value <= 2 * side:
                return f"has a corner at {one_line(repr(value), 60)}, the image's sides are {width} and {height}"
    return "" if polygons else "is empty"


def _unpacked(text: str) -> list[int]:
    """Run lengths of COCO's compressed form: numbers of 5 bits a character, from the third on as differences."""
    counts: list[int] = []
    value, shift = 0, 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 30:
            return [-1]
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
        value, shift = 0, 0
    return counts if shift == 0 else [-1]
