"""Where the time goes: by kind of operator and by layer, and which layers are slower than in another detector."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.backends.base import LayerTime, RunInfo
from trtdet.bundle import Bundle
from trtdet.config import Config
from trtdet.errors import BackendError, ConfigError
from trtdet.passes import load_model
from trtdet.performance.latency import CONFIDENCE, Machine, Target, circumstances, open_targets, pixels_in_words
from trtdet.progress import Progress, silent
from trtdet.runtime.detector import Detector

_OURS = "trtdet/"
"""Begins the names of all nodes that trtdet writes into a graph."""

_BESIDE = ("trtdet/decode", "trtdet/nms", "trtdet/own")
"""Parts that follow the convolutions and belong to none."""

_TURNS = 5
"""The runs are cut into so many parts, between which profiled and plain runs, and the two targets, take turns."""

Times = NDArray[np.float64]


@dataclass(frozen=True)
class ProfileOptions:
    """What is profiled.

    Attributes:
        batch: images at once; None for the target's fixed batch, else 1.
        runs: how many are measured, 2 or more.
        warm_up: how many run before each part of them, 1 or more.
        images: a folder or list of images to run; None for noise.
        seed: of the noise.

    Raises:
        ConfigError: a value is out of range.
    """

    batch: int | None = None
    runs: int = 50
    warm_up: int = 5
    images: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--batch", self.batch, 1),
            ("--runs", self.runs, 2),
            ("--warm-up", self.warm_up, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True)
class Share:
    """What a group of layers takes of a run.

    Attributes:
        name: of the group: a kind of operator, or a part of the network.
        ms: mean over the runs of the group's sum, in milliseconds.
        stddev: of that sum over the runs (of a sample, n - 1).
        count: kernels a run.
        share: of the sum of all layers, 0..1.
    """

    name: str
    ms: float
    stddev: float
    count: int
    share: float


@dataclass(frozen=True)
class Profile:
    """The layers of one target.

    Attributes:
        name: of the target.
        file: what ran.
        run_info: where it ran.
        batch: images at once.
        layers: in the order of execution, each with the milliseconds of every run.
        convs: names of the ONNX model's convolutions, in its order.
        latency_ms: of every run without the profiler, in between.
    """

    name: str
    file: str
    run_info: RunInfo
    batch: int
    layers: tuple[LayerTime, ...]
    convs: tuple[str, ...]
    latency_ms: tuple[float, ...]

    @property
    def sum_ms(self) -> float:
        """Mean over the runs of the sum of all layers."""
        return float(sum(statistics.fmean(layer.ms) for layer in self.layers))

    @property
    def by_type(self) -> tuple[Share, ...]:
        """What each kind of operator takes, the longest first."""
        return _shares(self.layers, lambda layer: layer.type)

    @property
    def by_part(self) -> tuple[Share, ...]:
        """What each part of the network takes, the longest first; empty where names do not tell parts."""
        found = _shares(self.layers, part)
        return found if any(one.name for one in found) else ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
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
            "types": [asdict(one) for one in self.by_type],
            "parts": [asdict(one) for one in self.by_part],
            "layers": [
                {
                    "name": one.name,
                    "type": one.type,
                    "onnx": list(one.onnx),
                    "part": part(one),
                    "ms": statistics.fmean(one.ms),
                    "stddev": statistics.stdev(one.ms),
                    "count": one.count,
                    "share": statistics.fmean(one.ms) / total,
                }
                for one in self.layers
            ],
        }

    @property
    def overhead(self) -> float:
        """How much longer the sum of the layers is than a run without the profiler, as a fraction; below 0 where the
        layers leave time out that lies between them, or where they overlap no longer."""
        return self.sum_ms / statistics.fmean(self.latency_ms) - 1

    def table(self, top: int) -> str:
        """Markdown: by kind, by part, and the ``top`` longest layers."""
        lines = [f"{self.name}, batch {self.batch}, {len(self.latency_ms)} runs on {self.run_info}", ""]
        lines += _table(("op type", "mean ms", "stddev", "count", "share", "cumulative"), _cells(self.by_type))
        if self.by_part:
            lines += ["", *_table(("part", "mean ms", "stddev", "count", "share", "cumulative"), _cells(self.by_part))]
        total = self.sum_ms or 1.0
        longest = sorted(enumerate(self.layers, 1), key=lambda one: -statistics.fmean(one[1].ms))[:top]
        lines += ["", f"The {len(longest)} longest of {len(self.layers)} layers; # is the place in the run", ""]
        rows = [
            (
                str(place),
                layer.name,
                layer.type,
                f"{statistics.fmean(layer.ms):.4f}",
                f"{statistics.stdev(layer.ms):.4f}",
                f"{statistics.fmean(layer.ms) / total:.1%}",
                _named(_theirs_first(layer.onnx)),
                part(layer),
            )
            for place, layer in longest
        ]
        lines += _table(("#", "layer", "op type", "mean ms", "stddev", "share", "ONNX nodes", "part"), rows)
        return "\n".join([*lines, "", self.summary])

    @property
    def summary(self) -> str:
        """How the layers' sum compares with a run that was not profiled, in one sentence."""
        mean, scatter = statistics.fmean(self.latency_ms), statistics.stdev(self.latency_ms)
        return (
            f"the layers' sum is {self.sum_ms:.3f} ms; without the profiler a run takes {mean:.3f} ms (stddev "
            f"{scatter:.3f}): {self.overhead:+.1%} with it"
        )


def _shares(layers: Sequence[LayerTime], key: Callable[[LayerTime], str]) -> tuple[Share, ...]:
    groups: dict[str, list[LayerTime]] = defaultdict(list)
    for layer in layers:
        groups[key(layer)].append(layer)
    sums = {name: np.sum([one.ms for one in group], axis=0) for name, group in groups.items()}
    total = float(sum(one.mean() for one in sums.values())) or 1.0
    found = [
        Share(
            name,
            float(sums[name].mean()),
            float(sums[name].std(ddof=1)),
            sum(one.count for one in group),
            float(sums[name].mean()) / total,
        )
        for name, group in groups.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.ms))


def part(layer: LayerTime) -> str:
    """The part of the network a layer belongs to, as far as the names of its ONNX nodes hold a path.

    The first two modules of the first node's path, so that ``/backbone/backbone/dark2/conv/Conv`` is ``backbone/dark2``
    and ``model.24.m.0/Conv`` is ``model.24``. What trtdet wrote into the graph, such as ``trtdet/nms``, is told where
    the layer holds nothing else. Empty where no node is known or its name is no path, such as ``Conv_41``.
    """
    theirs = [name for name in layer.onnx if not name.startswith(_OURS)]
    for name in theirs or layer.onnx:
        modules = [piece for module in name.split("/")[:-1] for piece in module.split(".") if piece]
        # Exporters write a module inside another of the same name as the name twice.
        path = [piece for index, piece in enumerate(modules) if index == 0 or piece != modules[index - 1]]
        if path:
            return ("." if "." in name.split("/")[0] else "/").join(path[:2])
    return ""


def _theirs_first(names: Sequence[str]) -> list[str]:
    """The model's own nodes, then those that trtdet wrote."""
    return sorted(names, key=lambda name: name.startswith(_OURS))


# comparing


@dataclass(frozen=True)
class Difference:
    """The same convolutions in two profiles, with all that runs between them and the next ones.

    Attributes:
        convs: names in the ONNX model; several where either ran them as one layer; none for what comes before the first
            convolution, and for the decoding and suppression that trtdet wrote.
        part: ``trtdet/decode`` and the like where there are no ``convs``; empty before the first convolution.
        first_ms, second_ms: mean time of a run.
        gain_ms: ``first_ms - second_ms``: what a run would gain if these were as in the second; below 0 it would lose.
        low_ms, high_ms: the 90 % interval of the gain, by the scatter over the runs.
        first_layers, second_layers: names of the layers, in the order of execution.
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

    Layers differ between engines, the ONNX nodes they come from do not. A convolution's kernel is the layer that names
    it and is of a kind of convolution, or else names the fewest. Any other layer belongs to the convolution that ran
    last before it, of those that it names if it names any: the pointwise kernels, the copies between layouts and
    precisions. What trtdet wrote to decode and suppress belongs to none. A layer that names ONNX nodes belongs where
    they did in the second profile, so that another order of execution moves nothing. Convolutions that one kernel of
    either profile computes together stay together.

    Returns:
        What comes before the first convolution, the convolutions in the order of the ONNX model, and the rest.

    Raises:
        ConfigError: the two have no convolution in common.
    """
    order = {name: index for index, name in enumerate(dict.fromkeys((*second.convs, *first.convs)))}
    kernels = [_kernels(one.layers, order) for one in (second, first)]
    if not set(kernels[0]) & set(kernels[1]):
        raise ConfigError(
            f"'{first.name}' and '{second.name}' run no convolution of the same name, so their layers cannot be "
            "compared; give two of the same model, or compare the tables of each alone"
        )
    together = _together(kernels, order)
    owners: dict[str, tuple[str, ...]] = {}
    sums = []
    for profile, own in zip((second, first), kernels, strict=True):
        sums.append(_by_owner(profile.layers, own, together, owners))
    found = []
    normal = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    places = {owner: min((order.get(name, len(order)) for name in owner), default=-1) for one in sums for owner in one}
    for owner in sorted(places, key=lambda one: (places[one], one)):
        (mine, mine_layers), (other, other_layers) = (_summed(one.get(owner, [])) for one in (sums[1], sums[0]))
        beside = places[owner] == len(order)
        gain = float(mine.mean() - other.mean())
        error = normal * float(np.sqrt(mine.var(ddof=1) / len(mine) + other.var(ddof=1) / len(other)))
        found.append(
            Difference(
                () if beside else owner,
                owner[0] if beside else "",
                float(mine.mean()),
                float(other.mean()),
                gain,
                gain - error,
                gain + error,
                mine_layers,
                other_layers,
            )
        )
    return found


def _summed(layers: Sequence[LayerTime]) -> tuple[Times, tuple[str, ...]]:
    """Milliseconds by run of all of them, and their names."""
    if not layers:
        return np.zeros(2), ()
    return np.sum([one.ms for one in layers], axis=0), tuple(one.name for one in layers)


def slower(first: Profile, second: Profile) -> list[Difference]:
    """The convolutions that the first runs slower than the second, beyond the scatter of the runs, the worst first.

    They are those to move to the precision that the second runs them in; ``gain_ms`` adds up what that would save, as
    far as their neighbours stay as they are.

    Raises:
        ConfigError: the two have no convolution in common.
    """
    found = [one for one in differences(first, second) if one.convs and one.low_ms > 0]
    return sorted(found, key=lambda one: -one.gain_ms)


def _kernels(layers: Sequence[LayerTime], convs: Collection[str]) -> dict[str, int]:
    """The index of each convolution's kernel among the layers."""
    ranks: dict[str, tuple[bool, int, int]] = {}
    for index, layer in enumerate(layers):
        named = [name for name in layer.onnx if name in convs]
        # Types are such as Conv, CaskConvolution and CaskGemmConvolution; a pointwise kernel may name its neighbours.
        rank = (re.search("conv", layer.type, re.IGNORECASE) is None, len(named), index)
        for name in named:
            ranks[name] = min(rank, ranks.get(name, rank))
    return {name: rank[-1] for name, rank in ranks.items()}


def _together(kernels: Sequence[dict[str, int]], order: dict[str, int]) -> dict[str, tuple[str, ...]]:
    """For each convolution, all that a kernel of any profile computes together with it, directly or through others."""
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
    layers: Sequence[LayerTime],
    kernels: dict[str, int],
    together: dict[str, tuple[str, ...]],
    owners: dict[str, tuple[str, ...]],
) -> dict[tuple[str, ...], list[LayerTime]]:
    """The layers by the convolutions, or the part beside them, that they belong to; notes in ``owners`` where each ONNX
    node went."""
    found: dict[tuple[str, ...], list[LayerTime]] = defaultdict(list)
    latest: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    for index, layer in enumerate(layers):
        named = [name for name in layer.onnx if name in kernels]
        computed = [name for name in named if kernels[name] == index]
        known = next((owners[name] for name in layer.onnx if name in owners), None)
        if computed:
            owner = latest = together[computed[0]]
        elif named:
            ran = [name for name in named if kernels[name] < index]
            owner = together[max(ran, key=kernels.__getitem__) if ran else min(named, key=kernels.__getitem__)]
        elif known is not None:
            owner = known
        elif part(layer) in _BESIDE:
            owner = (part(layer),)
        else:
            owner = latest if layer.onnx else before
        before = owner
        for name in layer.onnx:
            if name not in kernels:
                owners.setdefault(name, owner)
        found[owner].append(layer)
    return found


# profiling


@dataclass(frozen=True)
class Profiling:
    """What :func:`profile` measured.

    Attributes:
        profile: of the target.
        against: of the other; None where there is none.
        images: what was run, in words.
        before, after: the machine.
        warnings: what to know before the figures are believed, one sentence each.
    """

    profile: Profile
    against: Profile | None
    images: str
    before: Machine
    after: Machine
    warnings: tuple[str, ...]

    @property
    def slower(self) -> list[Difference]:
        """What the target runs slower than the other; empty where there is no other."""
        return [] if self.against is None else slower(self.profile, self.against)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        result: dict[str, Any] = {
            **self.profile.as_dict(),
            "images": self.images,
            "machine": {"before": asdict(self.before), "after": asdict(self.after)},
            "warnings": list(self.warnings),
            "against": None,
        }
        if self.against is not None:
            result["against"] = {
                **self.against.as_dict(),
                "differences": [asdict(one) for one in differences(self.profile, self.against)],
                "slower": [asdict(one) for one in self.slower],
            }
        return result

    def table(self, top: int = 20) -> str:
        """Markdown."""
        lines = [self.profile.table(top)]
        if self.against is not None:
            lines += ["", self.against.table(top), "", *self._compared(top)]
        return "\n".join([*lines, "", *self._circumstances])

    @property
    def _circumstances(self) -> list[str]:
        return [f"images: {self.images}", *circumstances(self.before, self.after)]

    def _compared(self, top: int) -> list[str]:
        assert self.against is not None
        first, second = self.profile, self.against
        lines = [f"{first.name} (first) against {second.name} (second)", ""]
        lines += _table(_TYPE_HEAD, self._type_rows())
        found = self.slower
        lines += ["", f"Slower in the first, beyond the scatter of the runs: {_moved(found)}", ""]
        return lines + (_table(_SLOWER_HEAD, _slower_rows(found[:top])) if found else [])

    def _type_rows(self) -> list[tuple[str, ...]]:
        assert self.against is not None
        pair = [{one.name: one for one in profile.by_type} for profile in (self.profile, self.against)]
        nothing = Share("", 0.0, 0.0, 0, 0.0)
        both = [
            (name, pair[0].get(name, nothing), pair[1].get(name, nothing))
            for name in dict.fromkeys((*pair[0], *pair[1]))
        ]
        both.sort(key=lambda row: -abs(row[1].ms - row[2].ms))
        return [
            (name, f"{one.ms:.3f}", f"{other.ms:.3f}", f"{one.ms - other.ms:+.3f}", str(one.count), str(other.count))
            for name, one, other in both
        ]

    def html(self, top: int = 20) -> str:
        """A page of its own, with nothing loaded from elsewhere: bars by kind, the layers in order, the tables."""
        body = [f"<h1>{escape(self.profile.name)}</h1>"]
        for one in (self.profile, self.against):
            if one is None:
                continue
            if one is self.against:
                body.append(f"<h1>{escape(one.name)}</h1>")
            body += [
                f"<p>Batch {one.batch}, {len(one.latency_ms)} runs on {escape(str(one.run_info))}: "
                f"{escape(one.summary)}.</p>",
                "<h2>By kind of operator</h2>",
                _bars(one.by_type),
                "<h2>Layers in the order of execution</h2>",
                _columns(one),
            ]
            if one.by_part:
                body += ["<h2>By part of the network</h2>", _bars(one.by_part, [_GREY])]
            body += ["<h2>Tables</h2>", _html(one.table(top))]
        if self.against is not None:
            body += ["<h1>First against second</h1>", _html("\n".join(self._compared(top)))]
        body += [f"<p>{escape(line)}</p>" for line in self._circumstances]
        body += [f"<p>Warning: {escape(one)}.</p>" for one in self.warnings]
        title = escape(f"Profile of {self.profile.name}")
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>"
        )


def profile(
    path: Path,
    config: Config | None = None,
    options: ProfileOptions = ProfileOptions(),
    against: Path | None = None,
    progress: Progress = silent,
) -> Profiling:
    """Profiles a bundle or a model, and another in turns with it.

    Args:
        path: a bundle or an ONNX file.
        config: of the ONNX files; bundles carry their own.
        options: what is run.
        against: another of the same network.
        progress: called with a stage, steps done and steps in all.

    Raises:
        ConfigError: a target does not take the batch, or the two have no convolution in common.
        BundleError, ModelError, BackendError, DataError: a target cannot be opened or run, or an image not read.
    """
    paths = [path] if against is None else [path, against]
    targets = open_targets(paths, config)
    convs = [_convolutions(Bundle(one, verify=False).model if one.is_dir() else one) for one in paths]
    done = profile_targets(targets, convs, options, progress)
    if done.against is not None:
        differences(done.profile, done.against)  # two that cannot be compared are said to be so at once
    return done


def profile_targets(
    targets: Sequence[Target],
    convs: Sequence[tuple[str, ...]],
    options: ProfileOptions = ProfileOptions(),
    progress: Progress = silent,
) -> Profiling:
    """Profiles one or two targets that are open.

    The runs are cut into parts. In each part every target is profiled and then run as often without the profiler, so
    that all four series see the same machine.

    Args:
        targets: one, or two to compare.
        convs: of each, names of its convolutions in the order of its ONNX model.
        options: what is run.
        progress: called with a stage, steps done and steps in all.

    Raises:
        ConfigError: a target does not take the batch.
        BackendError: a target fails, or its layers change from one part to the next.
        DataError: an image cannot be read.
    """
    batch = options.batch or targets[0].runner.batch or 1
    for target in targets:
        target.check_batch(batch)
    before = Machine.now(targets)
    images = [target.pixels(batch, options.images, options.seed) for target in targets]
    contexts = [target.runner.new_context(one) for target, one in zip(targets, images, strict=True)]
    parts = [len(one) for one in np.array_split(range(options.runs), min(_TURNS, options.runs))]
    layers: list[list[tuple[LayerTime, ...]]] = [[] for _ in targets]
    latencies: list[list[float]] = [[] for _ in targets]
    for number, runs in enumerate(parts):
        for index, target in enumerate(targets):
            progress("profiling", number * len(targets) + index, len(parts) * len(targets))
            layers[index].append(target.runner.profile(images[index], runs, options.warm_up))
            for _ in range(options.warm_up):
                contexts[index].run()
            # Without the transfers, which are in no layer.
            latencies[index].extend(contexts[index].run(False) for _ in range(runs))
    progress("profiling", len(parts) * len(targets), len(parts) * len(targets))
    profiles = [
        Profile(target.name, target.file, target.runner.run_info, batch, joined(target.name, own), names, tuple(plain))
        for target, own, names, plain in zip(targets, layers, convs, latencies, strict=True)
    ]
    what = pixels_in_words(options.images, options.seed)
    other = profiles[1] if len(profiles) > 1 else None
    return Profiling(profiles[0], other, what, before, Machine.now(targets), before.warnings)


def layer_means(path: Path, progress: Progress = silent) -> dict[str, float]:
    """Mean milliseconds of each layer of a bundle's engine, by its name.

    Raises:
        BackendError: the bundle has no engine, or it cannot be run here.
    """
    detector = Detector.open(path, on="engine")
    target = Target(str(path), detector.runner, detector.input, str(detector.file), detector.where)
    options = ProfileOptions()
    images = target.pixels(detector.batch, None, options.seed)
    progress("profiling", 0, 1)
    layers = target.runner.profile(images, options.runs, options.warm_up)
    progress("profiling", 1, 1)
    return {layer.name: float(np.mean(layer.ms)) for layer in layers}


def joined(name: str, parts: Iterable[tuple[LayerTime, ...]]) -> tuple[LayerTime, ...]:
    """Several profiles of one target as one of all their runs.

    Raises:
        BackendError: they do not have the same layers.
    """
    first, *others = parts
    if any([(one.name, one.type) for one in other] != [(one.name, one.type) for one in first] for other in others):
        raise BackendError(f"'{name}' ran other layers from one profile to the next; profile it again")
    return tuple(
        LayerTime(
            layers[0].name,
            layers[0].type,
            layers[0].onnx,
            tuple(ms for one in layers for ms in one.ms),
            layers[0].count,
        )
        for layers in zip(first, *others, strict=True)
    )


def _convolutions(model: Path) -> tuple[str, ...]:
    nodes = load_model(model, allow_quantized=True).graph.node
    return tuple(node.name for node in nodes if node.op_type in ("Conv", "ConvTranspose") and node.name)


# tables and pictures


_TYPE_HEAD = ("op type", "first ms", "second ms", "difference", "first count", "second count")
_SLOWER_HEAD = ("convolutions", "first ms", "second ms", "gain ms", "90% interval", "layers in the first")


def _moved(found: Sequence[Difference]) -> str:
    gain = sum(one.gain_ms for one in found)
    return f"{len(found)} groups, {gain:.3f} ms in all if they were as in the second" if found else "none"


def _slower_rows(found: Sequence[Difference]) -> list[tuple[str, ...]]:
    return [
        (
            _named(one.convs),
            f"{one.first_ms:.4f}",
            f"{one.second_ms:.4f}",
            f"{one.gain_ms:.4f}",
            f"{one.low_ms:.4f} .. {one.high_ms:.4f}",
            _named(one.first_layers),
        )
        for one in found
    ]


def _named(names: Sequence[str]) -> str:
    """At most three of them."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _cells(shares: Sequence[Share]) -> list[tuple[str, ...]]:
    sums = np.cumsum([one.share for one in shares])
    return [
        (
            one.name or "not known",
            f"{one.ms:.3f}",
            f"{one.stddev:.3f}",
            str(one.count),
            f"{one.share:.1%}",
            f"{so_far:.1%}",
        )
        for one, so_far in zip(shares, sums, strict=True)
    ]


_TEXT_COLUMNS = ("op type", "part", "layer", "ONNX nodes", "convolutions", "layers in the first")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    marks = ["---" if name in _TEXT_COLUMNS else "---:" for name in head]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in (head, tuple(marks), *rows)]


def _html(table: str) -> str:
    """The Markdown of a profile as HTML: its tables as tables, its other lines as paragraphs."""
    parts: list[str] = []
    head: list[str] = []
    for line in table.splitlines():
        cells = _split(line) if line.startswith("|") else []
        if head and not cells:
            parts.append("</tbody></table>")
            head = []
        if cells and not head:
            head = cells
            parts.append(f"<table><thead><tr>{_row('th', cells, head)}</tr></thead><tbody>")
        elif cells and not set("".join(cells)) <= set("-:"):
            parts.append(f"<tr>{_row('td', cells, head)}</tr>")
        elif line and not cells:
            parts.append(f"<p>{escape(line)}</p>")
    return "\n".join([*parts, "</tbody></table>"] if head else parts)


def _row(tag: str, cells: Sequence[str], head: Sequence[str]) -> str:
    marks = ("" if name in _TEXT_COLUMNS else ' class="n"' for name in head)
    return "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, cells, strict=True))


def _split(line: str) -> list[str]:
    return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]


_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;color:#1c2430;max-width:1120px;margin:2em auto;padding:0 1em}"
    "h1{font-size:1.5em;margin-top:1.6em;overflow-wrap:anywhere}h2{font-size:1.1em;margin:1.6em 0 .4em}"
    "table{border-collapse:collapse;font-size:13px;margin:.6em 0 1.4em}"
    "th,td{padding:3px 10px;border-bottom:1px solid #dde2e8;text-align:left;vertical-align:top}"
    "th{border-bottom:2px solid #9aa5b1}td{overflow-wrap:anywhere}"
    ".n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}"
    "svg{max-width:100%;height:auto;display:block}svg text{font:12px system-ui,sans-serif;fill:#1c2430}"
    ".key{display:flex;flex-wrap:wrap;gap:.2em 1.2em;font-size:13px;margin:.4em 0}"
    ".key i{display:inline-block;width:.8em;height:.8em;margin-right:.4em}"
)
_COLOURS = ("#2f6db5", "#d9822b", "#3a9d5d", "#b5446e", "#7b5ea7", "#a08032", "#2f9aa0", "#c0504d")
"""For the kinds that take longest; all others are grey."""
_GREY = "#a9b2bc"


def _bars(shares: Sequence[Share], colours: Sequence[str] = _COLOURS, most: int = 16) -> str:
    """Horizontal bars of means with a whisker of one standard deviation either side; the rest in a last one."""
    shown = [*shares[:most]]
    if rest := shares[most:]:
        ms, share, count = (sum(getattr(one, key) for one in rest) for key in ("ms", "share", "count"))
        shown.append(Share(f"{len(rest)} more", ms, 0.0, count, share))
    left, width, row = 190, 620, 24
    scale = width / max(max(one.ms + one.stddev for one in shown), 1e-9)
    parts = [f'<svg viewBox="0 0 1080 {row * len(shown) + 8}" width="1080" role="img">']
    for index, one in enumerate(shown):
        top, middle = row * index + 4, row * index + 4 + row // 2 - 2
        low, high = left + max(0.0, one.ms - one.stddev) * scale, left + (one.ms + one.stddev) * scale
        name = one.name or "not known"
        bar = f'width="{max(one.ms * scale, 0.5):.1f}" height="{row - 8}" fill="{_colour(index, colours)}"'
        parts.append(
            f"<g><title>{escape(name)}: {one.ms:.4f} ms, stddev {one.stddev:.4f}, {one.count} a run</title>"
            f'<text x="{left - 8}" y="{middle + 4}" text-anchor="end">{escape(_cut(name, 26))}</text>'
            f'<rect x="{left}" y="{top}" {bar}/>'
        )
        if one.stddev:
            parts.append(
                f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8" '
                'stroke="#1c2430" fill="none"/>'
            )
        figures = f"{one.ms:.3f} ms, {one.share:.1%}, {one.count}x"
        parts.append(f'<text x="{max(high, left + one.ms * scale) + 8:.1f}" y="{middle + 4}">{figures}</text></g>')
    return "".join([*parts, "</svg>"])


def _columns(profile: Profile) -> str:
    """A column a layer, in the order of execution, coloured by its kind."""
    means = [statistics.fmean(layer.ms) for layer in profile.layers]
    colours = {one.name: _colour(index) for index, one in enumerate(profile.by_type)}
    left, width, height = 60, 1010, 190
    step, scale = width / len(means), height / (max(means) or 1.0)
    parts = [f'<svg viewBox="0 0 1080 {height + 40}" width="1080" role="img">']
    for value in _ticks(max(means)):
        y = 10 + height - value * scale
        parts.append(
            f'<path d="M{left} {y:.1f}h{width}" stroke="#dde2e8"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
    for index, (layer, mean) in enumerate(zip(profile.layers, means, strict=True)):
        tall = mean * scale
        parts.append(
            f"<g><title>{index + 1}: {escape(layer.name)} ({escape(layer.type)}), {mean:.4f} ms"
            f"{escape('; ' + _named(_theirs_first(layer.onnx)) if layer.onnx else '')}</title>"
            f'<rect x="{left + index * step:.2f}" y="{10 + height - tall:.2f}" width="{max(step * 0.85, 0.6):.2f}" '
            f'height="{tall:.2f}" fill="{colours[layer.type]}"/></g>'
        )
    below = height + 30
    parts.append(
        f'<text x="{left}" y="{below}">layer 1</text><text x="8" y="{below}">ms</text>'
        f'<text x="{left + width}" y="{below}" text-anchor="end">layer {len(means)}</text></svg>'
    )
    known = [one.name for one in profile.by_type[: len(_COLOURS)]]
    key = [f'<span><i style="background:{colours[name]}"></i>{escape(name)}</span>' for name in known]
    if len(profile.by_type) > len(known):
        key.append(f'<span><i style="background:{_GREY}"></i>other</span>')
    return "".join([*parts, '<div class="key">', *key, "</div>"])


def _colour(index: int, colours: Sequence[str] = _COLOURS) -> str:
    return colours[index] if index < len(colours) else _GREY


def _ticks(highest: float) -> list[float]:
    """Up to six round numbers from 0 up to ``highest``, in steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** np.floor(np.log10(highest / 5)) if highest > 0 else 1.0
    step = next(one * power for one in (1, 2, 5, 10) if one * power >= highest / 5)
    return [index * step for index in range(int(highest / step + 1e-9) + 1)]


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
