"""Sections of a profile: time by kind of operator, by part of the network and by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtdet.performance.profiles import Share, share_table, shortened
from trtdet.performance.profiling import Profiling
from trtdet.report.charts import COLOURS, GREY, axes, bars_in_row, markup
from trtdet.report.document import Chart, Grid, Part, Section, Text
from trtdet.tables import Cell, Column, Table

_MOST = 16
"""Number of single bars; the remaining groups share one bar."""

_GAP, _ROOM, _ROOM_NARROW = 0.01, 1.3, 2.4
"""Between a whisker and its text, and the length of the axis on wide and narrow screens, in longest bars."""


def profile_section(plain: Mapping[str, Any]) -> Section:
    """Charts and tables of one profile, given as :meth:`trtdet.performance.profiles.Profile.as_dict`."""
    types, parts = ([Share(**share) for share in plain[key]] for key in ("types", "parts"))
    latency, layers = plain["latency_ms"], plain["layers"]
    text = (
        f"Batch {plain['batch']}, {plain['runs']} runs on {plain['ran_on']}: the layers' sum is {plain['sum_ms']:.3f} "
        f"ms; without the profiler a run takes {latency['mean']:.3f} ms (stddev {latency['stddev']:.3f}): "
        f"{plain['overhead']:+.1%} with it."
    )
    colours = {share.name: COLOURS[place] if place < len(COLOURS) else GREY for place, share in enumerate(types)}
    bars = [
        (
            layer["type"],
            layer["ms"],
            markup(f"{number}: {layer['name']} ({layer['type']}), {layer['ms']:.4f} ms")
            + f"<br>{markup(shortened(layer['onnx']))}",
        )
        for number, layer in enumerate(layers, 1)
    ]
    traces = [{**trace, "showlegend": trace["marker"]["color"] != GREY} for trace in bars_in_row(bars, colours)]
    note = "Grey: the other kinds." if GREY in colours.values() else ""
    layout = axes("layer", "ms", barmode="stack")
    in_order = Chart("Layers in the order of execution", traces, layout, note=note, height=340)
    columns = (
        *("#", Column("layer", align="left"), Column("op type", align="left"), Column("mean ms", ".4f")),
        *(Column("stddev", ".4f"), Column("share", ".1%"), Column("ONNX nodes", align="left")),
        Column("part", align="left"),
    )
    rows = [
        (
            *(number, layer["name"], layer["type"], layer["ms"], layer["stddev"], layer["share"]),
            *(shortened(layer["onnx"]), layer["part"]),
        )
        for number, layer in enumerate(layers, 1)
    ]
    contents: list[Part] = [Text((text,)), _shares("By kind of operator", types, [*colours.values()]), in_order]
    contents += [_shares("By part of the network", parts, [GREY] * len(parts))] if parts else []
    contents += [Grid(share_table(title, shares)) for title, shares in (("op type", types), ("part", parts)) if shares]
    contents.append(Grid(Table(columns, rows, "Layers; # is the place in the run"), ("op type", "part")))
    return Section(f"Profile of {plain['name']}", tuple(contents), folded=False)


def benchmark_section(plain: Mapping[str, Any]) -> Section:
    """Latency and throughput of each target of a benchmark, given as ``bench.json`` has them."""
    rows: list[tuple[Cell, ...]] = []
    for target in plain["targets"]:
        for point in target["points"]:
            latency, ratio, single = point["latency_ms"], point["ratio"] or {}, point["throughput"][0]
            against = f"{ratio['value']:.2f} ({ratio['low']:.2f} .. {ratio['high']:.2f})" if ratio else ""
            times = (latency[key] for key in ("mean", "stddev", "p50", "p95"))
            rate = single["images_per_second"]
            rows.append((target["name"], point["batch"], *times, against, rate, target["ran_on"]))
    columns = (
        *(Column("target", align="left"), "batch", Column("mean ms", ".3f"), Column("stddev", ".3f")),
        *(Column("median", ".3f"), Column("p95", ".3f"), Column("times the baseline", align="right")),
        *(Column("images/s", ".1f"), "ran on"),
    )
    warnings = [f"Warning: {warning}." for warning in plain["warnings"]]
    text = f"Measured side by side in {plain['rounds']} rounds; the baseline is {plain['baseline']}."
    return Section("Benchmark", (Text((text, *warnings)), Grid(Table(columns, rows).filled())), folded=False)


def profiling_sections(profiling: Profiling) -> tuple[Section, ...]:
    """Sections of one profile, or of two and their differences, and the measuring conditions."""
    sections = []
    for profile in (profiling.profile, profiling.against):
        if profile is not None:
            plain = profile.as_dict()
            for layer in plain["layers"]:
                layer["onnx"] = profile.nodes.own_first(layer["onnx"])
            sections.append(profile_section(plain))
    if profiling.against is not None:
        parts = (Text((part,)) if isinstance(part, str) else Grid(part) for part in profiling.compared().parts)
        sections.append(Section("First against second", tuple(parts), folded=False))
    warned = [f"Warning: {warning}." for warning in profiling.warnings]
    return (*sections, Section("Circumstances", (Text((*profiling.circumstances, *warned)),), folded=False))


def _shares(title: str, shares: Sequence[Share], colours: Sequence[str]) -> Chart:
    groups = [*shares[:_MOST]]
    if others := shares[_MOST:]:
        ms, share = sum(group.ms for group in others), sum(group.share for group in others)
        groups.append(
            Share(f"{len(others)} more", ms=ms, stddev=0.0, count=sum(group.count for group in others), share=share)
        )
    names = [group.name or "not known" for group in groups]
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [markup(name) for name in names],
        "x": [group.ms for group in groups],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [group.stddev for group in groups],
            "arrayminus": [min(group.stddev, group.ms) for group in groups],
            "thickness": 1.2,
        },
        "marker": {"color": [*colours[: len(groups)], GREY][: len(groups)]},
        "hovertext": [
            markup(f"{name}: {group.ms:.4f} ms, stddev {group.stddev:.4f}, {group.count} a run")
            for name, group in zip(names, groups, strict=True)
        ],
        "hoverinfo": "text",
        "showlegend": False,
    }
    # Right of the whisker's end, so that no line strikes through the text.
    longest = max((group.ms + group.stddev for group in groups), default=0.0) or 1.0
    labels = {
        "type": "scatter",
        "mode": "text",
        "y": bars["y"],
        "x": [group.ms + group.stddev + _GAP * longest for group in groups],
        "text": [f"{group.ms:.3f} ms, {group.share:.1%}, {group.count}x" for group in groups],
        "textposition": "middle right",
        "hoverinfo": "skip",
        "showlegend": False,
    }
    layout = {
        "xaxis": {"title": {"text": "ms, with a standard deviation either side"}, "range": [0, _ROOM * longest]},
        "yaxis": {"autorange": "reversed", "type": "category"},
        "narrow": {"xaxis": {"range": [0, _ROOM_NARROW * longest]}},
    }
    return Chart(title, [bars, labels], layout, height=90 + 26 * len(groups))
