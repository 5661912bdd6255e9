"""The charts of a page, in the coordinates of their drawings: user units, from the upper left corner."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trtdet.performance.profiles import Profile, Share, shortened

COLOURS = ("#2f6db5", "#d9822b", "#3a9d5d", "#b5446e", "#7b5ea7", "#a08032", "#2f9aa0", "#c0504d")
"""For the kinds of operator that take longest; all others are grey."""
GREY = "var(--grey)"
"""Which the page makes darker on a dark ground, where the whiskers are light."""


@dataclass(frozen=True)
class Bar:
    """A horizontal bar.

    Attributes:
        name: on its left.
        figures: on its right, at ``end``.
        tip: shown where the pointer rests on it.
        top: of the bar.
        width: of the bar.
        whisker: from and to, a standard deviation either side of the mean; None where there is none.
        end: of the bar and its whisker.
        colour: of the bar.
    """

    name: str
    figures: str
    tip: str
    top: int
    width: float
    whisker: tuple[float, float] | None
    end: float
    colour: str


@dataclass(frozen=True)
class BarChart:
    """Bars from ``left`` on, one below the other."""

    bars: tuple[Bar, ...]
    left: int = 190
    row: int = 24
    full: int = 620

    @property
    def height(self) -> int:
        return self.row * len(self.bars) + 8

    @staticmethod
    def of(shares: Sequence[Share], colours: Sequence[str] = COLOURS, most: int = 16) -> BarChart:
        """Bars of means with a whisker of one standard deviation either side; the shares after ``most`` in a last bar.

        Args:
            shares: at least one, the longest first.
            colours: of the first bars; the others are grey.
            most: bars of their own.
        """
        shown = [*shares[:most]]
        if rest := shares[most:]:
            ms, share = sum(group.ms for group in rest), sum(group.share for group in rest)
            shown.append(Share(f"{len(rest)} more", ms, 0.0, sum(group.count for group in rest), share))
        chart = BarChart(())
        scale = chart.full / max(max(group.ms + group.stddev for group in shown), 1e-9)
        bars = []
        for index, group in enumerate(shown):
            name = group.name or "not known"
            low, high = max(0.0, group.ms - group.stddev) * scale, (group.ms + group.stddev) * scale
            bars.append(
                Bar(
                    _cut(name, 26),
                    f"{group.ms:.3f} ms, {group.share:.1%}, {group.count}x",
                    f"{name}: {group.ms:.4f} ms, stddev {group.stddev:.4f}, {group.count} a run",
                    chart.row * index + 4,
                    max(group.ms * scale, 0.5),
                    (chart.left + low, chart.left + high) if group.stddev else None,
                    chart.left + max(high, group.ms * scale),
                    _colour(index, colours),
                )
            )
        return BarChart(tuple(bars))


@dataclass(frozen=True)
class Column:
    """A vertical bar: its left edge, its height, its colour, and the text shown where the pointer rests on it."""

    left: float
    height: float
    colour: str
    tip: str


@dataclass(frozen=True)
class Tick:
    """A line across the chart: its height over the base, and its label."""

    height: float
    label: str


@dataclass(frozen=True)
class ColumnChart:
    """Columns from ``left`` on, side by side, each ``wide`` units; ``key`` names the colours."""

    columns: tuple[Column, ...]
    ticks: tuple[Tick, ...]
    key: tuple[tuple[str, str], ...]
    wide: float
    left: int = 60
    full_width: int = 1010
    full_height: int = 190

    @staticmethod
    def of(profile: Profile) -> ColumnChart:
        """A column a layer, in the order of execution, coloured by its kind."""
        empty = ColumnChart((), (), (), 0.0)
        means = [statistics.fmean(layer.ms) for layer in profile.layers]
        kinds = [share.name for share in profile.by_type]
        colours = {kind: _colour(index) for index, kind in enumerate(kinds)}
        step, scale = empty.full_width / len(means), empty.full_height / (max(means) or 1.0)
        columns = []
        for index, (layer, mean) in enumerate(zip(profile.layers, means, strict=True)):
            nodes = f"; {shortened(profile.nodes.own_first(layer.onnx))}" if layer.onnx else ""
            tip = f"{index + 1}: {layer.name} ({layer.type}), {mean:.4f} ms{nodes}"
            columns.append(Column(empty.left + index * step, mean * scale, colours[layer.type], tip))
        key = [(kind, colours[kind]) for kind in kinds[: len(COLOURS)]]
        return ColumnChart(
            tuple(columns),
            tuple(Tick(value * scale, f"{value:.3g}") for value in ticks(max(means))),
            (*key, *([("other", GREY)] if len(kinds) > len(key) else [])),
            max(step * 0.85, 0.6),
        )


def ticks(highest: float) -> list[float]:
    """Up to six round numbers from 0 up to ``highest``, in steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(highest / 5)) if highest > 0 else 1.0
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= highest / 5)
    return [index * step for index in range(int(highest / step + 1e-9) + 1)]


def _colour(index: int, colours: Sequence[str] = COLOURS) -> str:
    return colours[index] if index < len(colours) else GREY


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
