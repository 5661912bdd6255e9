"""Layer times of one target: by type of operator and by part of the network."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import onnx

from trtdet.backends.base import LayerTime, RunInfo
from trtdet.errors import BackendError
from trtdet.passes.provenance import Origin, origin_of
from trtdet.quantization import CONVOLUTIONS
from trtdet.tables import Column, Table, Tables


@dataclass(frozen=True)
class Share:
    """Time of a type of operator, or of a part of the network.

    Attributes:
        ms, stddev: of the sum of its layers over the runs (of a sample, n - 1).
        count: kernels per run.
        share: of the sum of all layers, 0..1.
    """

    name: str
    ms: float
    stddev: float
    count: int
    share: float


@dataclass(frozen=True)
class OnnxNodes:
    """Nodes of the ONNX model behind the layers.

    Attributes:
        convs: names of the convolutions, in model order.
        origins: by node name, the step of trtdet that wrote the node; other nodes are the model's own.
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
    """The layers of one target.

    Attributes:
        file: the engine or the model.
        run_info: device and library of the run.
        batch: images per run.
        layers: in execution order, each with the milliseconds of every run.
        nodes: the ONNX model behind them.
        latency_ms: of every run without the profiler; these alternate with the profiled runs.
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
