"""Corrections: what keeps the accuracy of a detector whose convolutions all run in INT8, with no training.

Everything is worked out from the float model over calibration images, layer by layer, in four passes over images that
are decoded anew each time, so that memory does not grow with their number:

1. the extremes of every channel, from all images as the thresholds of the rules are, and the second moments of every
   convolution's windows at random places;
2. the mean of what is left after rounding, for every way a tensor could be quantised;
3. on images held back from moments and means, the error of every way at the output of every convolution: what lowers it
   is kept, everything else is left as the threshold rule has it;
4. on the held-back images, the error at the decoded boxes and scores of the whole, for a few ways to put the layers'
   corrections together: the best is taken, and only if it is better than none.

Every fourth image is held back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.calibration import Range, Ranges, expose
from trtdet.config import InputConfig
from trtdet.data import ImageStream
from trtdet.errors import ConfigError, TrtdetWarning
from trtdet.passes import Decoded
from trtdet.progress import Progress, silent
from trtdet.quantization.corrections.channel_map import QMAX, ChannelMap, Extremes, Reader, choose_scale
from trtdet.quantization.corrections.rounding import MOST_COLUMNS, Rounded, compensated, nearest, weight_scales
from trtdet.quantization.corrections.windows import Window
from trtdet.quantization.head_error import HeadError
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.plugin_fusion import requantize
from trtdet.quantization.precision import PrecisionPlan, Step
from trtdet.quantization.qdq import Corrections, insert_qdq

CORRECTIONS = ("smooth", "shift", "round", "bias")
"""Every correction by the name that ``--correct`` takes."""

_HELD_BACK = 4
_PLACES = 256
"""Windows that are looked at in one image and convolution; up to four times as many where they are wide."""

_PAD_GAIN = 0.9
"""A shift before a padded convolution needs an explicit Pad, so it must lower the noise at least to this share."""

_QUIET = 0.01
"""An output's error counts as a share of its variance, but of at least this share of the outputs' median variance."""

_GRAM_BYTES = 1 << 30
"""Second moments that are held at a time; a model with more of them is read in several passes."""

_COMPENSATED_SHARE = 0.25
"""What is left of the weights' rounding noise when the rounding is compensated, in the choice of scales."""


class Runner(Protocol):
    """A model that is ready to run: float32 (B, 3, H, W) to arrays by name."""

    input: str
    batch: int | None

    def __call__(self, images: NDArray[np.float32]) -> Mapping[str, NDArray[Any]]: ...


@dataclass(frozen=True)
class Sources:
    """Where the numbers come from.

    Attributes:
        images: calibration images.
        preprocess: how they become the network's input.
        load: makes a model ready to run.
        head: where the model holds its decoded boxes and scores.
        progress: told of every image.
    """

    images: Sequence[Path]
    preprocess: InputConfig
    load: Callable[[onnx.ModelProto], Runner]
    head: Decoded
    progress: Progress = silent

    def split(self) -> tuple[list[Path], list[Path]]:
        """The images that corrections are computed from, and those that judge them.

        Raises:
            ConfigError: there are fewer than two.
        """
        if len(self.images) < 2:
            raise ConfigError(
                f"corrections need at least 2 calibration images, one of them to judge by, got {len(self.images)}: "
                "give more with --images, or build with --correct none"
            )
        held = list(self.images[_HELD_BACK - 1 :: _HELD_BACK]) or list(self.images[-1:])
        return [path for path in self.images if path not in set(held)], held

    def outputs(
        self, models: Sequence[onnx.ModelProto], paths: Sequence[Path], stage: str
    ) -> Iterator[list[dict[str, NDArray[Any]]]]:
        """Every image's outputs of each model, without the batch axis, the network's input among them."""
        runners = [self.load(model) for model in models]
        done = 0
        for batch in ImageStream(paths, self.preprocess, batch_size=runners[0].batch or 1):
            found = [{**runner(batch.images), runner.input: batch.images} for runner in runners]
            for row in range(len(batch)):
                yield [{name: value[row] for name, value in one.items()} for one in found]
            done += len(batch)
            self.progress(stage, done, len(paths))


@dataclass(frozen=True, eq=False)
class Corrected:
    """What came of it.

    Attributes:
        ranges: the thresholds of the rule; with ``auto``, of the best rule of each tensor.
        corrections: what is written instead of the plain form; empty where nothing was kept.
        plan: the precision plan with the steps taken for each convolution.
        summary: one sentence for each kind of correction, and one for the error at the head.
    """

    ranges: Ranges
    corrections: Corrections
    plan: PrecisionPlan
    summary: tuple[str, ...]


def correct(
    model: onnx.ModelProto,
    placement: QdqPlacement,
    candidates: Mapping[str, Ranges],
    names: Sequence[str],
    sources: Sources,
) -> Corrected:
    """Chooses, tensor by tensor and convolution by convolution, what lowers the error on images held back.

    Args:
        model: the float model that ``placement`` was made for.
        placement: where Q/DQ pairs go.
        candidates: ranges by rule; the first is what the others and the corrections are compared with.
        names: of the corrections that may be used, out of :data:`CORRECTIONS`; may be empty.
        sources: images and how to run them.

    Raises:
        ConfigError: an unknown correction, or fewer than two images.
    """
    unknown = [name for name in names if name not in CORRECTIONS]
    if unknown:
        raise ConfigError(f"no correction '{unknown[0]}'; allowed: auto, none, or some of {', '.join(CORRECTIONS)}")
    fit, held = sources.split()
    sites = _sites(model, placement)
    tensors = list(dict.fromkeys(site.tensor for site in sites))
    for batch in _batches(sites, "round" in names):
        _measure(model, batch, fit, held, sources, "round" in names)
        for site in batch:
            site.prepare(candidates, names)
    exposed = expose(model, tensors)
    for seed, (found,) in enumerate(sources.outputs([exposed], fit, "correcting: means")):
        for site in sites:
            site.add_means(found[site.tensor], seed)
    for seed, (found,) in enumerate(sources.outputs([exposed], held, "correcting: held-back images")):
        for site in sites:
            site.add_errors(found[site.tensor], seed)
    for site in sites:
        site.settle()
    return _judged(model, placement, candidates, names, sites, held, sources)


@dataclass(eq=False)
class _Trial:
    """One way to quantise a tensor, and what becomes of the convolutions that read it."""

    name: str
    map: ChannelMap
    weights: dict[str, list[tuple[NDArray[np.float32], NDArray[np.int8]]]] = field(default_factory=dict)
    """By convolution: the scales and the integers of every rounding (nearest first), as (groups, out, D) matrices."""
    means: dict[Window, NDArray[np.float64]] = field(default_factory=dict)
    ready: dict[str, list[tuple[NDArray[np.float32], NDArray[np.float32]]]] = field(default_factory=dict)
    """By convolution and rounding: the weights and the offsets without and with bias correction, for the judging."""
    errors: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """By convolution: (roundings, without and with bias)."""

    @property
    def mapped(self) -> bool:
        return self.map.scale is not None or self.map.shift is not None

    def quantized(self, windows: NDArray[np.float32], window: Window) -> NDArray[np.float32]:
        """Sampled windows as the convolution will read them: mapped and rounded."""
        step = np.float32(self.map.amax / QMAX)
        factor: np.float32 | NDArray[np.float32] = 1 / step
        if self.map.scale is not None:
            factor = window.spread(self.map.scale).astype(np.float32)[..., None] * factor
        rounded: NDArray[np.float32]
        if self.map.shift is None:
            rounded = windows * factor
        else:
            rounded = windows - window.spread(self.map.shift).astype(np.float32)[..., None]
            rounded *= factor
        np.rint(rounded, out=rounded)
        np.clip(rounded, -QMAX, QMAX, out=rounded)
        rounded *= step
        return rounded

    def loss(self, allowed: NDArray[np.bool_]) -> float:
        return sum(float(np.where(allowed[: len(errors)], errors, np.inf).min()) for errors in self.errors.values())


@dataclass(eq=False)
class _Site:
    """A tensor that is quantised, with the convolutions that read it."""

    tensor: str
    convs: dict[str, gs.Node]
    windows: dict[str, Window]
    number: int
    extremes: Extremes = field(default_factory=Extremes)
    moments: dict[Window, _Moments] = field(default_factory=dict)
    importance: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    trials: list[_Trial] = field(default_factory=list)
    means: dict[Window, NDArray[np.float64]] = field(default_factory=dict)
    seen: dict[Window, int] = field(default_factory=dict)
    judged: dict[Window, int] = field(default_factory=dict)
    chosen: _Trial = field(init=False)
    rule: _Trial = field(init=False)
    picked: dict[str, tuple[int, int]] = field(default_factory=dict)

    def weight(self, conv: str) -> NDArray[np.float64]:
        weight: NDArray[np.float64] = self.convs[conv].inputs[1].values.astype(np.float64)
        return weight

    def bias(self, conv: str) -> NDArray[np.float64]:
        inputs = self.convs[conv].inputs
        bias: NDArray[np.float64] = np.zeros(len(inputs[1].values))
        return bias if len(inputs) < 3 else bias + inputs[2].values

    def unique(self) -> dict[Window, None]:
        return dict.fromkeys(self.windows.values())

    def sample(self, x: NDArray[np.float32], window: Window, seed: int) -> NDArray[np.float32]:
        width = len(x) // window.groups * window.taps
        return window.sample(x, min(max(_PLACES, width // 4), 4 * _PLACES), seed * 65537 + self.number)

    def prepare(self, candidates: Mapping[str, Ranges], names: Sequence[str]) -> None:
        """Works out every trial from the moments, which are let go."""
        variance = np.zeros(0)
        for window, moments in self.moments.items():
            found = moments.variance().reshape(-1, window.taps).mean(axis=1)
            variance = np.maximum(variance, found) if len(variance) else found
        for name, window in self.windows.items():
            rows = window.rows(self.weight(name))
            power = self.moments[window].through(rows)
            floor = max(_QUIET * float(np.median(power)), 1e-6 * float(power.mean()), 1e-30)
            self.importance[name] = 1 / np.maximum(power, floor) / power.size
        self.trials = [
            _Trial(rule, ChannelMap(ranges.tensors[self.tensor].amax)) for rule, ranges in candidates.items()
        ]
        mapped = self._best_map(variance, names) if variance.max() > 0 else None
        if mapped is not None:
            self.trials.append(mapped)
        for trial in self.trials:
            for name, window in self.windows.items():
                # The plain form is there to be compared with, so that its rounding is chosen only where it can win.
                compensate = "round" in names and (trial.mapped or mapped is None)
                trial.weights[name] = self._roundings(trial, name, window, compensate)
        self.moments.clear()

    def _best_map(self, variance: NDArray[np.float64], names: Sequence[str]) -> _Trial | None:
        """The channel map of least expected noise, with a shift or without."""
        low, high = self.extremes.ranges()
        padded = any(any(window.pads) for window in self.windows.values())
        if padded:  # the padding's zeros are quantised as well
            low, high = np.minimum(low, 0), np.maximum(high, 0)
        middle = (low + high) / 2
        readers = [
            Reader.of(self.weight(name), window.groups, self.importance[name].reshape(-1))
            for name, window in self.windows.items()
        ]
        share = _COMPENSATED_SHARE if "round" in names else 1.0
        found: list[tuple[float, _Trial]] = []
        if "smooth" in names:
            reach = np.maximum(np.abs(low), np.abs(high))
            scale, amax, noise = choose_scale(reach, variance, readers, share)
            found.append((noise, _Trial("smooth", ChannelMap(amax, scale))))
        if "shift" in names:
            reach = (high - low) / 2
            if "smooth" in names:
                scale, amax, noise = choose_scale(reach, variance, readers, share)
                both = _Trial("smooth, shift", ChannelMap(amax, scale, middle))
                found.append((noise / (_PAD_GAIN if padded else 1.0), both))
            else:
                found.append((0.0, _Trial("shift", ChannelMap(float(reach.max()), None, middle))))
        return min(found, key=lambda one: one[0])[1] if found else None

    def _roundings(
        self, trial: _Trial, name: str, window: Window, compensate: bool
    ) -> list[tuple[NDArray[np.float32], NDArray[np.int8]]]:
        rows = window.rows(self.weight(name))
        spread = None if trial.map.scale is None else window.spread(trial.map.scale)
        if spread is not None:
            rows = rows / spread[:, None, :]
        scales = np.stack([weight_scales(group) for group in rows])
        found = [(scales, nearest(rows, scales))]
        moments = self.moments[window]
        if compensate and moments.dense:
            covariance = moments.covariance()
            if spread is not None:
                covariance = covariance * spread[:, :, None] * spread[:, None, :]
            noise = np.eye(covariance.shape[1]) * (trial.map.amax / QMAX) ** 2 / 12
            found.append((scales, compensated(rows, scales, covariance + noise)))
        return found

    def add_means(self, x: NDArray[np.float32], seed: int) -> None:
        for window in self.unique():
            windows = self.sample(x, window, seed)
            self.seen[window] = self.seen.get(window, 0) + windows.shape[2]
            self.means[window] = self.means.get(window, 0.0) + windows.sum(axis=2)
            for trial in self.trials:
                total = trial.quantized(windows, window).sum(axis=2)
                trial.means[window] = trial.means.get(window, 0.0) + total

    def offsets(self, trial: _Trial, name: str, rounding: int) -> NDArray[np.float64]:
        """What is added to the integer product without and with bias correction: float64 (2, groups, out)."""
        window = self.windows[name]
        rows = window.rows(self.weight(name))
        bias = self.bias(name).reshape(window.groups, -1)
        shift = np.zeros(bias.shape)
        if trial.map.shift is not None:
            shift = np.einsum("goi,gi->go", rows, window.spread(trial.map.shift))
        scales, integers = trial.weights[name][rounding]
        wanted = np.einsum("goi,gi->go", rows, self.means[window] / self.seen[window])
        got = np.einsum("goi,gi->go", integers.astype(np.float64), trial.means[window] / self.seen[window]) * scales
        return np.stack([bias + shift, bias + wanted - got])

    def add_errors(self, x: NDArray[np.float32], seed: int) -> None:
        for window in self.unique():
            windows = self.sample(x, window, seed)
            self.judged[window] = self.judged.get(window, 0) + windows.shape[2]
            rounded = [trial.quantized(windows, window) for trial in self.trials]
            for name in [name for name, one in self.windows.items() if one == window]:
                expected = window.rows(self.weight(name)).astype(np.float32) @ windows
                expected += self.bias(name).astype(np.float32).reshape(window.groups, -1)[..., None]
                weight = self.importance[name].astype(np.float32)[..., None]
                for trial, read in zip(self.trials, rounded, strict=True):
                    self._add_error(trial, name, read, expected, weight)

    def _add_error(
        self,
        trial: _Trial,
        name: str,
        read: NDArray[np.float32],
        expected: NDArray[np.float32],
        weight: NDArray[np.float32],
    ) -> None:
        if name not in trial.ready:
            trial.ready[name] = [
                (integers * scales[..., None], self.offsets(trial, name, index).astype(np.float32)[..., None])
                for index, (scales, integers) in enumerate(trial.weights[name])
            ]
        errors = trial.errors.setdefault(name, np.zeros((len(trial.ready[name]), 2)))
        for index, (weights, offsets) in enumerate(trial.ready[name]):
            rest = weights @ read - expected
            for which, offset in enumerate(offsets):
                one = rest + offset
                one *= one
                one *= weight
                # The fourth power: what saturates does so where there is an object, rarely and by much.
                errors[index, which] += float(np.vdot(one, one))

    def settle(self) -> None:
        """Ends the judging: sums become means, as shares of the outputs' variance."""
        for trial in self.trials:
            trial.ready.clear()
            for name, errors in trial.errors.items():
                places = self.judged[self.windows[name]]
                trial.errors[name] = np.sqrt(errors / places * self.importance[name].size)

    def choose(self, policy: str, names: Sequence[str]) -> None:
        """Takes one trial and, for each convolution, a rounding and a bias; see :data:`_POLICIES`."""
        allowed = np.array([[True, "bias" in names], ["round" in names, "round" in names and "bias" in names]])
        self.rule = min((trial for trial in self.trials if not trial.mapped), key=lambda trial: trial.loss(allowed))
        mapped = [trial for trial in self.trials if trial.mapped]
        choices = mapped if mapped and policy != "layers" else [self.rule, *mapped]
        self.chosen = min(choices, key=lambda trial: trial.loss(allowed))
        for name, errors in self.chosen.errors.items():
            usable = allowed[: len(errors)]
            best = int(np.where(usable, errors, np.inf).argmin())
            if policy == "all":
                best = int(np.flatnonzero(usable)[-1])
            self.picked[name] = best // 2, best % 2

    def rounded(self) -> dict[str, Rounded]:
        """The weights of the convolutions that are not plain."""
        found = {}
        for name, (rounding, bias) in self.picked.items():
            if not (self.chosen.mapped or rounding or bias):
                continue
            scales, integers = self.chosen.weights[name][rounding]
            shape = self.convs[name].inputs[1].values.shape
            offset = self.offsets(self.chosen, name, rounding)[bias]
            found[name] = Rounded(integers.reshape(shape), scales.reshape(-1), offset.reshape(-1).astype(np.float32))
        return found

    def steps(self) -> dict[str, tuple[Step, ...]]:
        """For each convolution what was done, each with the error without it and with it."""
        found = {}
        for name, (rounding, bias) in self.picked.items():
            errors = self.chosen.errors[name]
            last = float(errors[rounding, bias])
            steps = []
            if self.chosen.mapped:
                steps.append(Step(self.chosen.name, float(self.rule.errors[name].min()), last))
            if rounding:
                steps.append(Step("round", float(errors[0, bias]), last))
            if bias:
                steps.append(Step("bias", float(errors[rounding, 0]), last))
            found[name] = tuple(steps)
        return found


class _Moments:
    """First and second moments of sampled windows; the full second moments only where they are wanted and fit."""

    def __init__(self, groups: int, width: int, dense: bool) -> None:
        self.dense = dense and width <= MOST_COLUMNS
        self._count = 0
        self._sum = np.zeros((groups, width))
        self._products = np.zeros((groups, width, width) if self.dense else (groups, width))

    def update(self, windows: NDArray[np.float32]) -> None:
        self._count += windows.shape[2]
        self._sum += windows.sum(axis=2)
        if self.dense:
            self._products += windows @ windows.transpose(0, 2, 1)
        else:
            self._products += np.einsum("gip,gip->gi", windows, windows)

    def covariance(self) -> NDArray[np.float64]:
        mean = self._sum / self._count
        found: NDArray[np.float64] = self._products / self._count - mean[:, :, None] * mean[:, None, :]
        return found

    def variance(self) -> NDArray[np.float64]:
        products = np.einsum("gii->gi", self._products) if self.dense else self._products
        found: NDArray[np.float64] = np.maximum(products / self._count - np.square(self._sum / self._count), 0)
        return found

    def through(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The variance of ``rows @ windows``: (groups, out). Without full moments, as if columns were independent."""
        if self.dense:
            found: NDArray[np.float64] = np.einsum("goi,goi->go", rows @ self.covariance(), rows)
            return np.maximum(found, 0)
        independent: NDArray[np.float64] = np.einsum("goi,gi->go", np.square(rows), self.variance())
        return independent


def _sites(model: onnx.ModelProto, placement: QdqPlacement) -> list[_Site]:
    nodes = {node.name: node for node in gs.import_onnx(model).nodes}
    chosen = set(placement.plan.names("int8"))
    found: list[_Site] = []
    for tensor in placement.activations:
        convs = {name: nodes[name] for name, _ in placement.readers[tensor] if name in chosen}
        windows = {name: Window.of(conv) for name, conv in convs.items()}
        known = {name: window for name, window in windows.items() if window is not None}
        # A map must suit all convolutions that read the tensor, so that one that is not understood rules it out.
        if known and len(known) == len(convs):
            found.append(_Site(tensor, convs, known, len(found)))
    return found


def _batches(sites: Sequence[_Site], dense: bool) -> Iterator[list[_Site]]:
    """The sites in runs whose moments fit into memory together."""
    batch: list[_Site] = []
    used = 0
    for site in sites:
        need = 0
        for name, window in site.windows.items():
            width = int(np.prod(site.convs[name].inputs[1].values.shape[1:]))
            need = max(need, 8 * window.groups * width * (width if dense and width <= MOST_COLUMNS else 1))
        if batch and used + need > _GRAM_BYTES:
            yield batch
            batch, used = [], 0
        batch.append(site)
        used += need
    if batch:
        yield batch


def _measure(
    model: onnx.ModelProto,
    sites: Sequence[_Site],
    fit: Sequence[Path],
    held: Sequence[Path],
    sources: Sources,
    dense: bool,
) -> None:
    """Moments from the images to fit on; extremes, as the rules' thresholds, from all images."""
    for site in sites:
        for name, window in site.windows.items():
            width = int(np.prod(site.convs[name].inputs[1].values.shape[1:]))
            site.moments.setdefault(window, _Moments(window.groups, width, dense))
    exposed = expose(model, list(dict.fromkeys(site.tensor for site in sites)))
    for seed, (found,) in enumerate(sources.outputs([exposed], [*fit, *held], "correcting: moments")):
        for site in sites:
            x = found[site.tensor]
            site.extremes.update(x)
            if seed < len(fit):
                for window, moments in site.moments.items():
                    moments.update(site.sample(x, window, seed))


def _chosen_ranges(candidates: Mapping[str, Ranges], sites: Sequence[_Site]) -> Ranges:
    """The ranges of the one rule, or each tensor's from its best rule."""
    first = next(iter(candidates.values()))
    if len(candidates) == 1:
        return first
    best = {site.tensor: candidates[site.rule.name].tensors[site.tensor] for site in sites}
    tensors: dict[str, Range] = {**first.tensors, **best}
    return replace(first, rule="auto", percent=None, tensors=tensors)


_POLICIES = {
    "layers": "each kept where it lowers its layer's error",
    "mapped": "channel maps everywhere, the others where they lower their layer's error",
    "all": "every one in every layer",
}
"""Ways to put the layers' corrections together. An error at one layer does not say what it does to a detection, so
that the last word is the head's: the way of the least error there is taken, if it is less than without any."""


def _judged(
    model: onnx.ModelProto,
    placement: QdqPlacement,
    candidates: Mapping[str, Ranges],
    names: Sequence[str],
    sites: Sequence[_Site],
    held: Sequence[Path],
    sources: Sources,
) -> Corrected:
    """The last gate: the whole of it must lower the error of the decoded detections on the held-back images."""
    first = next(iter(candidates.values()))
    # The activations of the plugin library round as well, and more than the pairs alone: they are part of the judging.
    variants = [requantize(insert_qdq(model, placement, first), first.inputs).model]
    policies = list(_POLICIES) if names else ["layers"]
    for policy in policies:
        ranges, found = _together(sites, candidates, policy, names)
        variants.append(requantize(insert_qdq(model, placement, ranges, found), ranges.inputs).model)
    before, *errors = _head_errors(model, variants, held, sources)
    after = min(errors)
    figures = f"error at the head {before:.4f} -> {after:.4f} on {len(held)} images held back"
    if after > before:
        warnings.warn(
            f"corrected, the {figures}: the plain rule '{first.rule}' stands; are the calibration images like those "
            "the detector was trained on?",
            TrtdetWarning,
            stacklevel=4,
        )
        return Corrected(first, Corrections(), placement.plan, (f"none kept: {figures}",))
    policy = policies[errors.index(after)]
    ranges, found = _together(sites, candidates, policy, names)
    steps = {name: taken for site in sites for name, taken in site.steps().items()}
    entries = {name: replace(entry, corrections=steps.get(name, ())) for name, entry in placement.plan.entries.items()}
    summary = (*_summary(sites, names, ranges), *([_POLICIES[policy]] if names else []), figures)
    return Corrected(ranges, found, PrecisionPlan(entries), summary)


def _together(
    sites: Sequence[_Site], candidates: Mapping[str, Ranges], policy: str, names: Sequence[str]
) -> tuple[Ranges, Corrections]:
    for site in sites:
        site.choose(policy, names)
    maps = {site.tensor: site.chosen.map for site in sites if site.chosen.mapped}
    weights = {name: rounded for site in sites for name, rounded in site.rounded().items()}
    return _chosen_ranges(candidates, sites), Corrections(maps, weights)


def _summary(sites: Sequence[_Site], names: Sequence[str], ranges: Ranges) -> tuple[str, ...]:
    convs = sum(len(site.windows) for site in sites)
    kept = {
        "smooth": sum(site.chosen.map.scale is not None for site in sites),
        "shift": sum(site.chosen.map.shift is not None for site in sites),
        "round": sum(bool(rounding) for site in sites for rounding, _ in site.picked.values()),
        "bias": sum(bool(bias) for site in sites for _, bias in site.picked.values()),
    }
    of = {"smooth": f"{len(sites)} tensors", "shift": f"{len(sites)} tensors", "round": f"{convs} convs"}
    said = [f"{name}: {kept[name]} of {of.get(name, f'{convs} convs')}" for name in CORRECTIONS if name in names]
    if ranges.rule == "auto":
        rules = [site.rule.name for site in sites]
        said.append("rules: " + ", ".join(f"{rule} {rules.count(rule)}" for rule in dict.fromkeys(sorted(rules))))
    return tuple(said)


def _head_errors(
    model: onnx.ModelProto, quantized: Sequence[onnx.ModelProto], images: Sequence[Path], sources: Sources
) -> list[float]:
    """The error of each model at the decoded boxes and scores."""
    exposed = [expose(one, sources.head.names) for one in (model, *quantized)]
    errors = [HeadError() for _ in quantized]
    for reference, *others in sources.outputs(exposed, images, "correcting: detections"):
        for error, other in zip(errors, others, strict=True):
            error.update(sources.head.read(reference), sources.head.read(other))
    return [error.distance for error in errors]
