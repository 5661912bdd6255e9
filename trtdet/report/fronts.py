"""The drawing of a front: accuracy with its interval against cost, in the user units of its SVG from the upper left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trtdet.pipeline.points import Front, Point

_TITLED = ("all INT8", "default", "depthwise in FP16", "all FP16")
_CHARACTER = 6.6
"""Width of a character of a label, on average."""

_NEAR = 26.0
"""Points as near as this in height have no room for a label between them."""


@dataclass(frozen=True)
class Mark:
    """A point of the front as it is drawn.

    Attributes:
        number: in its middle.
        x, y: of its middle.
        whisker: from and to, the interval of the difference; cut at the edges of the drawing.
        label: beside it; empty for a plan without a title of its own.
        anchor: ``start`` where the label is on its right, ``end`` where it is on its left.
        tip: shown where the pointer rests on it.
        beaten: whether another point is as good in both and better in one.
    """

    number: int
    x: float
    y: float
    whisker: tuple[float, float]
    label: str
    anchor: str
    tip: str
    beaten: bool

    @property
    def label_x(self) -> float:
        return self.x + (14 if self.anchor == "start" else -14)


@dataclass(frozen=True)
class Line:
    """A line across the drawing at a round value: its place and its label."""

    place: float
    label: str


@dataclass(frozen=True)
class FrontChart:
    """Points in a frame, with the line that joins those that no other beats."""

    marks: tuple[Mark, ...]
    columns: tuple[Line, ...]
    rows: tuple[Line, ...]
    path: str
    across: str
    up: str
    left: int = 76
    top: int = 16
    right: int = 1060
    bottom: int = 420

    @staticmethod
    def of(front: Front) -> FrontChart:
        """The points of a front."""
        chart = FrontChart((), (), (), "", front.unit, front.accuracy)
        costs = [front.cost(point) for point in front.points]
        values = [100 * point.difference for point in front.points]
        x = _Scale(*_room(costs, 0.12), chart.left, chart.right)
        # A long interval of a bad point would press the others together.
        ends = [*values, 0.0, *(100 * point.high for point in front.points)]
        y = _Scale(*_room([*ends, *_whiskers(front.points)], 0.08), chart.bottom, chart.top)
        places = [(x(cost), y(value)) for cost, value in zip(costs, values, strict=True)]
        marks = tuple(_mark(front, index, places, y, chart) for index in range(len(places)))
        path = " ".join(f"{mark.x:.1f},{mark.y:.1f}" for mark in marks if not mark.beaten)
        return FrontChart(
            marks,
            tuple(Line(x(value), f"{value:.4g}") for value in _round(x.low, x.high)),
            tuple(Line(y(value), f"{value:+.4g}" if value else "0") for value in _round(y.low, y.high)),
            path,
            front.unit,
            front.accuracy,
        )


@dataclass(frozen=True)
class _Scale:
    """From values between ``low`` and ``high`` to places between ``start`` and ``end``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def _mark(front: Front, index: int, places: Sequence[tuple[float, float]], y: _Scale, chart: FrontChart) -> Mark:
    point, (place, height) = front.points[index], places[index]
    label = ", ".join(title for title in point.titles if title in _TITLED)
    end = place + 14 + _CHARACTER * len(label)
    taken = any(place < other < end and abs(at - height) < _NEAR for other, at in places)
    fits = end < chart.right and not (taken and place - (end - place) > chart.left)
    low, high = (min(max(y(100 * value), chart.top), chart.bottom) for value in (point.low, point.high))
    return Mark(
        point.number,
        place,
        height,
        (low, high),
        label,
        "start" if fits else "end",
        _tip(front, point),
        point.beaten_by is not None,
    )


def _tip(front: Front, point: Point) -> str:
    """What is known of a point, a line for each fact."""
    counts = point.counts
    what = "mAP against FP32" if front.annotated else "agreement against 100"
    known = [
        f"point {point.number}: {point.title}",
        f"{counts['int8']} convolutions INT8, {counts['fp16']} FP16, {counts['fp32']} FP32",
        f"{front.cost(point):.4g} {front.unit}",
        f"{what} {100 * point.difference:+.2f} ({point.interval})",
        f"mAP {100 * point.map:.2f}" if point.map is not None else "",
        f"{point.weights / 1e6:.3f} MB of weights",
        f"engine {point.engine / 1e6:.2f} MB" if point.engine is not None else "",
        f"error at the head {point.error:.3g}, predicted",
        f"beaten by point {point.beaten_by}" if point.beaten_by is not None else "",
    ]
    return "\n".join(line for line in known if line)


def _whiskers(points: Sequence[Point]) -> list[float]:
    """Lower ends of intervals, of the points that no other beats and at most as far below as these are wide."""
    known = [100 * point.low for point in points if point.beaten_by is None]
    return known or [100 * point.low for point in points]


def _room(values: Sequence[float], share: float) -> tuple[float, float]:
    """The ends of an axis that has some room on both sides of all values."""
    low, high = min(values), max(values)
    more = share * (high - low) or 0.1 * abs(high) or 1.0
    return low - more, high + more


def _round(low: float, high: float) -> list[float]:
    """Up to ten round values between two."""
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= (high - low) / 9)
    first = math.ceil(low / step - 1e-9)
    # A zero that is the last digits of a sum would have a sign.
    return [round(place * step, 12) + 0.0 for place in range(first, math.floor(high / step + 1e-9) + 1)]
