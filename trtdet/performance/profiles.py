"""Layer times of one target, by type of operator and by part of the network, and against another's by convolution."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import onnx

from trtdet.backends.base import LayerTime, RunInfo
from trtdet.errors import BackendError, ConfigError
from trtdet.passes.provenance import Origin, origin_of
from trtdet.performance.results import CONFIDENCE
from trtdet.quantization import CONVOLUTIONS
from trtdet.tables import Column, Table, Tables


@dataclass(frozen=True)
class Share:
    """Time of a type of operator, or of a part of the network.

    ``ms`` and ``stddev`` are of the sum of its layers over the runs (of a sample, n - 1), ``share`` is of the sum of
    all layers, 0..1. ``count`` are kernels per run.
    """

    name: str
    ms: float
    stddev: float
    count: int
    share: float


@dataclass(frozen=True)
class OnnxNodes:
    """Nodes of the ONNX model behind the layers: the names of the convolutions, in model order, and the ``origins``, by
    node name, which are the steps of trtdet that wrote the node; other nodes are the model's own.
    """

    convs: tuple[str, ...] = ()
    origins: Mapping[str, Origin] = field(default_factory=dict)

    @staticmethod
    def of(model: onnx.ModelProto) -> OnnxNodes:
        convs = (node.name for node in model.graph.node if node.op_type in CONVOLUTIONS and node.name)
        return OnnxNodes(tuple(convs), origin_of(model))

    def added(self, name: str) -> Origin | None:
        """The step of trtdet that added a node; None for the model's own nodes and their replacements."""
        origin = self.origins.get(name)
        return None if origin is None or origin.replaces else origin

    def written_by(self, layer: LayerTime) -> Origin | None:
        """The step of trtdet that added the first node of a layer; None if the layer has a node of the model."""
        origins = [self.added(name) for name in layer.onnx]
        return None if None in origins else next(iter(origins), None)

    def own_first(self, names: Sequence[str]) -> list[str]:
        """Sorts the model's own nodes before the nodes that trtdet added."""
        return sorted(names, key=lambda name: self.added(name) is not None)


@dataclass(frozen=True)
class Profile:
    """The layers of one target, in execution order, each with the milliseconds of every run.

    ``file`` is the engine or the model, ``nodes`` are those of the ONNX model behind the layers, and ``batch`` is the
    number of images per run. ``latency_ms`` is of every run without the profiler; these alternate with the profiled
    runs.
    """

    name: str
    file: str
    run_info: RunInfo
    batch: int
    layers: tuple[LayerTime, ...]
    nodes: OnnxNodes
    latency_ms: tuple[float, ...]

    @property
    def sum_ms(self) -> float:
        """Mean over the runs of the sum of all layers."""
        return float(sum(statistics.fmean(layer.ms) for layer in self.layers))

    @property
    def by_type(self) -> tuple[Share, ...]:
        """Time of each type of operator, the longest first."""
        return _shares(self.layers, lambda layer: layer.type)

    @property
    def by_part(self) -> tuple[Share, ...]:
        """Time of each part of the network, the longest first; empty if no name tells a part."""
        shares = _shares(self.layers, lambda layer: part_of(layer, self.nodes))
        return shares if any(share.name for share in shares) else ()

    @property
    def overhead(self) -> float:
        """The layers' sum against a run without the profiler, as a fraction: 0.1 is 10 % longer.

        It is below 0 if the layers omit time between them, or if they no longer overlap.
        """
        return self.sum_ms / statistics.fmean(self.latency_ms) - 1

    @property
    def summary(self) -> str:
        """One sentence: the layers' sum against a run without the profiler."""
        mean, scatter = statistics.fmean(self.latency_ms), statistics.stdev(self.latency_ms)
        return (
            f"the layers' sum is {self.sum_ms:.3f} ms; without the profiler a run takes {mean:.3f} ms (stddev "
            f"{scatter:.3f}): {self.overhead:+.1%} with it"
        )

    def as_dict(self) -> dict[str, Any]:
        total = self.sum_ms or 1.0
        return {
            "name": self.name,
            "file": self.file,
            "ran_on": str(self.run_info),
            "batch": self.batch,
            "runs": len(self.latency_ms),
            "sum_ms": self.sum_ms,
            "latency_ms": {"mean": statistics.fmean(self.latency_ms), "stddev": statistics.stdev(self.latency_ms)},
            "overhead": self.overhead,
            "types": [asdict(share) for share in self.by_type],
            "parts": [asdict(share) for share in self.by_part],
            "layers": [
                {
                    "name": layer.name,
                    "type": layer.type,
                    "onnx": list(layer.onnx),
                    "part": part_of(layer, self.nodes),
                    "ms": statistics.fmean(layer.ms),
                    "stddev": statistics.stdev(layer.ms),
                    "count": layer.count,
                    "share": statistics.fmean(layer.ms) / total,
                }
                for layer in self.layers
            ],
        }

    def table(self, top: int) -> Tables:
        """By type, by part, and the ``top`` longest layers."""
        parts = [share_table("part", self.by_part)] if self.by_part else []
        heading = f"{self.name}, batch {self.batch}, {len(self.latency_ms)} runs on {self.run_info}"
        total = self.sum_ms or 1.0
        longest = sorted(enumerate(self.layers, 1), key=lambda placed: -statistics.fmean(placed[1].ms))[:top]
        rows = [
            (
                *(place, layer.name, layer.type),
                *(statistics.fmean(layer.ms), statistics.stdev(layer.ms), statistics.fmean(layer.ms) / total),
                shortened(self.nodes.own_first(layer.onnx)),
                part_of(layer, self.nodes),
            )
            for place, layer in longest
        ]
        layers = Table(
            (
                *("#", Column("layer", align="left"), Column("op type", align="left")),
                *(Column("mean ms", ".4f"), Column("stddev", ".4f"), Column("share", ".1%")),
                *(Column("ONNX nodes", align="left"), Column("part", align="left")),
            ),
            rows=rows,
            title=f"The {len(longest)} longest of {len(self.layers)} layers; # is the place in the run",
            notes=(self.summary,),
        )
        return Tables((heading, share_table("op type", self.by_type), *parts, layers))


def part_of(layer: LayerTime, nodes: OnnxNodes) -> str:
    """The part of the network that a layer belongs to, from the names of its ONNX nodes.

    It is the first two modules of the first name with a path: ``/backbone/backbone/dark2/conv/Conv`` gives
    ``backbone/dark2``, ``model.24.m.0/Conv`` gives ``model.24``. Nodes that trtdet added give their step:
    ``trtdet/decode``, ``trtdet/nms``. Empty without nodes or without a path, as in ``Conv_41``.
    """
    origin = nodes.written_by(layer)
    if origin is not None:
        return f"trtdet/{origin.value}"
    for name in layer.onnx:
        if nodes.added(name) is not None:
            continue
        modules = [piece for module in name.split("/")[:-1] for piece in module.split(".") if piece]
        # Exporters repeat the name of a module inside another of the same name.
        path = [piece for index, piece in enumerate(modules) if index == 0 or piece != modules[index - 1]]
        if path:
            return ("." if "." in name.split("/")[0] else "/").join(path[:2])
    return ""


def joined(name: str, parts: Iterable[tuple[LayerTime, ...]]) -> tuple[LayerTime, ...]:
    """Joins the runs of several profiles of one target; raises BackendError if their layers differ."""
    first, *others = parts
    kinds = [(layer.name, layer.type) for layer in first]
    if any([(layer.name, layer.type) for layer in other] != kinds for other in others):
        raise BackendError(f"'{name}' ran other layers from one profile to the next", "profile it again")
    return tuple(
        replace(layers[0], ms=tuple(ms for layer in layers for ms in layer.ms))
        for layers in zip(first, *others, strict=True)
    )


def share_table(kind: str, shares: Sequence[Share]) -> Table:
    """The shares with their running sum; ``kind`` is the title of the first column."""
    sums = accumulate(share.share for share in shares)
    rows = [
        (share.name or "not known", share.ms, share.stddev, share.count, share.share, so_far)
        for share, so_far in zip(shares, sums, strict=True)
    ]
    figures = (Column("mean ms", ".3f"), Column("stddev", ".3f"), "count", Column("share", ".1%"))
    return Table((Column(kind, align="left"), *figures, Column("cumulative", ".1%")), rows)


def shortened(names: Sequence[str]) -> str:
    """At most three names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shares(layers: Sequence[LayerTime], key: Callable[[LayerTime], str]) -> tuple[Share, ...]:
    groups: dict[str, list[LayerTime]] = defaultdict(list)
    for layer in layers:
        groups[key(layer)].append(layer)
    sums = {name: np.sum([layer.ms for layer in group], axis=0) for name, group in groups.items()}
    total = float(sum(times.mean() for times in sums.values())) or 1.0
    shares = []
    for name, group in groups.items():
        mean, scatter = float(sums[name].mean()), float(sums[name].std(ddof=1))
        shares.append(Share(name, mean, scatter, count=sum(layer.count for layer in group), share=mean / total))
    return tuple(sorted(shares, key=lambda share: -share.ms))


_SEPARATE = (Origin.DECODE, Origin.NMS, Origin.EMBEDDED_NMS)
"""Steps after the convolutions; their layers belong to no convolution."""

Owner = tuple[str, ...]
"""The convolutions that a layer belongs to; or one other part of the network."""


@dataclass(frozen=True)
class Difference:
    """The same convolutions in two profiles, with all layers between them and the next convolutions.

    Attributes:
        convs: names in the ONNX model; several if either profile ran them as one layer; none for layers before the
            first convolution, and for decoding and NMS that trtdet added.
        part: such as ``trtdet/decode`` if there are no ``convs``; empty before the first convolution.
        first_ms, second_ms: mean time per run.
        gain_ms: ``first_ms - second_ms``, the time per run that the layers of the second profile would save.
        low_ms, high_ms: 90 % interval of the gain, from the scatter over the runs.
        first_layers, second_layers: names of the layers, in execution order.
    """

    convs: tuple[str, ...]
    part: str
    first_ms: float
    second_ms: float
    gain_ms: float
    low_ms: float
    high_ms: float
    first_layers: tuple[str, ...]
    second_layers: tuple[str, ...]


def differences(first: Profile, second: Profile) -> list[Difference]:
    """Compares two profiles of the same network, convolution by convolution.

    Engines have different layers, but the same ONNX nodes. The kernel of a convolution is the layer of a convolution
    type that names it, else the layer that names the fewest convolutions. Any other layer (pointwise kernels, copies
    between layouts and precisions) belongs to the last convolution that it names, else to the last that ran before it.
    Decoding and NMS that trtdet added belong to none. A layer that names ONNX nodes belongs where these belong in the
    second profile, so another execution order moves nothing. Convolutions that one kernel of either profile computes
    together stay together.

    Returns the layers before the first convolution, the convolutions in ONNX order, and the rest. Raises ConfigError if
    the two have no convolution in common.
    """
    order = {name: index for index, name in enumerate(dict.fromkeys((*second.nodes.convs, *first.nodes.convs)))}
    kernels = [_kernels(profile.layers, order) for profile in (second, first)]
    if not set(kernels[0]) & set(kernels[1]):
        raise ConfigError(
            f"'{first.name}' and '{second.name}' run no convolution of the same name, so their layers cannot be "
            "compared",
            "give two of the same model, or compare the tables of each alone",
        )
    together = _together(kernels, order)
    homes: dict[str, Owner] = {}
    in_second, in_first = (
        _by_owner(profile, own, together, homes=homes) for profile, own in zip((second, first), kernels, strict=True)
    )
    places = {
        owner: min((order.get(name, len(order)) for name in owner), default=-1) for owner in (*in_second, *in_first)
    }
    normal = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    rows = []
    for owner in sorted(places, key=lambda owner: (places[owner], owner)):
        first_layers, second_layers = in_first.get(owner, []), in_second.get(owner, [])
        first_ms, second_ms = (
            np.sum([layer.ms for layer in layers], axis=0) if layers else np.zeros(2)
            for layers in (first_layers, second_layers)
        )
        gain = float(first_ms.mean() - second_ms.mean())
        variance = first_ms.var(ddof=1) / len(first_ms) + second_ms.var(ddof=1) / len(second_ms)
        error = normal * float(np.sqrt(variance))
        separate = places[owner] == len(order)
        rows.append(
            Difference(
                convs=() if separate else owner,
                part=owner[0] if separate else "",
                first_ms=float(first_ms.mean()),
                second_ms=float(second_ms.mean()),
                gain_ms=gain,
                low_ms=gain - error,
                high_ms=gain + error,
                first_layers=tuple(layer.name for layer in first_layers),
                second_layers=tuple(layer.name for layer in second_layers),
            )
        )
    return rows


def slower(first: Profile, second: Profile) -> list[Difference]:
    """The convolutions that the first runs slower than the second, beyond the scatter of the runs, the worst first.

    Move these to the precision of the second. This saves the sum of ``gain_ms``, if their neighbours stay as they are.
    Raises ConfigError if the two have no convolution in common.
    """
    losses = [difference for difference in differences(first, second) if difference.convs and difference.low_ms > 0]
    return sorted(losses, key=lambda difference: -difference.gain_ms)


def _kernels(layers: Sequence[LayerTime], convs: Collection[str]) -> dict[str, int]:
    """The index of each convolution's kernel among the layers."""
    ranks: dict[str, tuple[bool, int, int]] = {}
    for index, layer in enumerate(layers):
        conv_names = [name for name in layer.onnx if name in convs]
        # Types are named Conv, CaskConvolution, CaskGemmConvolution; a pointwise kernel may name its neighbours.
        rank = (re.search("conv", layer.type, re.IGNORECASE) is None, len(conv_names), index)
        for name in conv_names:
            ranks[name] = min(rank, ranks.get(name, rank))
    return {name: rank[-1] for name, rank in ranks.items()}


def _together(kernels: Sequence[dict[str, int]], order: dict[str, int]) -> dict[str, Owner]:
    """For each convolution, all that share kernels with it in any profile, directly or through others."""
    groups = {name: {name} for own in kernels for name in own}
    for own in kernels:
        sharing: dict[int, list[str]] = defaultdict(list)
        for name, index in own.items():
            sharing[index].append(name)
        for names in sharing.values():
            joined = set().union(*(groups[name] for name in names))
            for name in joined:
                groups[name] = joined
    return {name: tuple(sorted(group, key=order.__getitem__)) for name, group in groups.items()}


def _by_owner(
    profile: Profile, kernels: Mapping[str, int], together: Mapping[str, Owner], homes: dict[str, Owner]
) -> dict[Owner, list[LayerTime]]:
    """The layers by owner; stores the owner of each ONNX node in ``homes``."""
    layers_by_owner: dict[Owner, list[LayerTime]] = defaultdict(list)
    latest: Owner = ()
    before: Owner = ()
    for index, layer in enumerate(profile.layers):
        conv_names = [name for name in layer.onnx if name in kernels]
        computed = [name for name in conv_names if kernels[name] == index]
        home = next((homes[name] for name in layer.onnx if name in homes), None)
        if computed:
            owner = latest = together[computed[0]]
        elif conv_names:
            ran = [name for name in conv_names if kernels[name] < index]
            owner = together[max(ran, key=kernels.__getitem__) if ran else min(conv_names, key=kernels.__getitem__)]
        elif home is not None:
            owner = home
        elif profile.nodes.written_by(layer) in _SEPARATE:
            owner = (part_of(layer, profile.nodes),)
        else:
            owner = latest if layer.onnx else before
        before = owner
        for name in layer.onnx:
            if name not in kernels:
                homes.setdefault(name, owner)
        layers_by_owner[owner].append(layer)
    return layers_by_owner
