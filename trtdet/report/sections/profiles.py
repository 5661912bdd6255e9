"""Where the time goes: profiles of one target or of two in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtdet.performance.profiles import Profile, Share, share_table, shortened
from trtdet.performance.profiling import Profiling
from trtdet.report.document import Chart, Grid, Part, Section, Text
from trtdet.report.palette import GREY, colour
from trtdet.tables import Column, Table

_MOST = 16
"""Bars of their own; the rest is one."""


def profile_section(plain: Mapping[str, Any]) -> Section:
    """A profile, as :meth:`trtdet.performance.profiles.Profile.as_dict` has it: bars by kind of operator and by part,
    the layers in the order of execution, the tables."""
    types, parts = ([Share(**share) for share in plain[key]] for key in ("types", "parts"))
    latency = plain["latency_ms"]
    said = (
        f"Batch {plain['batch']}, {plain['runs']} runs on {plain['ran_on']}: the layers' sum is {plain['sum_ms']:.3f} "
        f"ms; without the profiler a run takes {latency['mean']:.3f} ms (stddev {latency['stddev']:.3f}): "
        f"{plain['overhead']:+.1%} with it."
    )
    kinds = [share.name for share in types]
    found: list[Part] = [
        Text((said,)),
        _shares("By kind of operator", types, [colour(place) for place in range(len(types))]),
        _columns(plain["layers"], kinds),
    ]
    if parts:
        found.append(_shares("By part of the network", parts, [GREY] * len(parts)))
    found += [Grid(share_table("op type", types))]
    if parts:
        found.append(Grid(share_table("part", parts)))
    found.append(Grid(_layers(plain["layers"]), ("op type", "part")))
    return Section(f"Profile of {plain['name']}", tuple(found))


def profiling_sections(profiling: Profiling) -> tuple[Section, ...]:
    """A profile just measured, or two and their differences, and the circumstances."""
    both = [profile for profile in (profiling.profile, profiling.against) if profile is not None]
    sections = [profile_section(_plain(profile)) for profile in both]
    if profiling.against is not None:
        sections.append(Section("First against second", tuple(map(_part, profiling.compared().parts))))
    warned = [f"Warning: {warning}." for warning in profiling.warnings]
    sections.append(Section("Circumstances", (Text((*profiling.circumstances, *warned)),)))
    return tuple(sections)


def _part(part: Table | str) -> Part:
    match part:
        case str():
            return Text((part,))
        case _:
            return Grid(part)


def _plain(profile: Profile) -> dict[str, Any]:
    """With the model's own nodes of a layer before those that trtdet added."""
    plain = profile.as_dict()
    for row in plain["layers"]:
        row["onnx"] = profile.nodes.own_first(row["onnx"])
    return plain


def _shares(title: str, shares: Sequence[Share], colours: Sequence[str]) -> Chart:
    shown = [*shares[:_MOST]]
    if rest := shares[_MOST:]:
        ms, share = sum(group.ms for group in rest), sum(group.share for group in rest)
        shown.append(Share(f"{len(rest)} more", ms, 0.0, sum(group.count for group in rest), share))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [group.name or "not known" for group in shown],
            "x": [group.ms for group in shown],
            "error_x": {"type": "data", "array": [group.stddev for group in shown], "thickness": 1.2},
            "marker": {"color": [*colours[: len(shown)], GREY][: len(shown)]},
            "text": [f"{group.ms:.3f} ms, {group.share:.1%}, {group.count}x" for group in shown],
            "textposition": "auto",
            "hovertext": [
                f"{group.name or 'not known'}: {group.ms:.4f} ms, stddev {group.stddev:.4f}, {group.count} a run"
                for group in shown
            ],
            "hoverinfo": "text",
        }
    ]
    layout = {
        "yaxis": {"autorange": "reversed", "type": "category"},
        "xaxis": {"title": {"text": "ms, with a standard deviation either side"}},
    }
    return Chart(title, traces, layout, height=90 + 26 * len(shown))


def _columns(layers: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> Chart:
    """A column a layer, in the order of execution, coloured by its kind."""
    traces = []
    for place, kind in enumerate(kinds):
        own = [(number, layer) for number, layer in enumerate(layers, 1) if layer["type"] == kind]
        traces.append(
            {
                "type": "bar",
                "name": kind,
                "x": [number for number, _ in own],
                "y": [layer["ms"] for _, layer in own],
                "hovertext": [
                    f"{number}: {layer['name']} ({kind}), {layer['ms']:.4f} ms<br>{shortened(layer['onnx'])}"
                    for number, layer in own
                ],
                "hoverinfo": "text",
                "marker": {"color": colour(place)},
            }
        )
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "layer"}},
        "yaxis": {"title": {"text": "ms"}},
    }
    return Chart("Layers in the order of execution", traces, layout, height=340)


def _layers(layers: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        *("#", Column("layer", align="left"), Column("op type", align="left")),
        *(Column("mean ms", ".4f"), Column("stddev", ".4f"), Column("share", ".1%")),
        *(Column("ONNX nodes", align="left"), Column("part", align="left")),
    )
    rows = [
        (
            *(number, layer["name"], layer["type"], layer["ms"], layer["stddev"], layer["share"]),
            *(shortened(layer["onnx"]), layer["part"]),
        )
        for number, layer in enumerate(layers, 1)
    ]
    return Table(columns, rows, "Layers; # is the place in the run")
