"""The ways to quantise a tensor and the convolutions that read it, each with its error on held-back images."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.calibration import Ranges
from trtdet.calibration.channel_ranges import SMALLEST, Extremes
from trtdet.passes.walk import maker
from trtdet.quantization.corrections.base import Correction, Reader, RoundedLayer
from trtdet.quantization.encoding import MOST, ChannelMap, Rounded, fp8_map, nearest, snap, weight_scales
from trtdet.quantization.folding import channels_left
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.precision import Format, Step
from trtdet.quantization.shared_scales import MOVES
from trtdet.quantization.weighted import Weighted
from trtdet.quantization.windows import MOST_COLUMNS, Moments, Window

_PLACES = 256  # windows sampled per image and convolution; up to four times as many if they are wide

_QUIET = 0.01
"""Lower limit of the variance to which an output's error is relative, as a share of the outputs' median variance."""

_GRAM_BYTES = 1 << 30  # memory for second moments; a model with more of them is read in several passes

_CHEAP = 0.1
"""A map whose Mul costs less than this share of FP16's bytes counts as free. Then the gate decides about it, since a
layer's error does not show the effect on detections."""


@dataclass(frozen=True, eq=False)
class Rounding:
    """Integers of a convolution, int8 (groups, out / groups, D) or E4M3 in float16, for scales float32 (groups, out /
    groups). ``name`` is the correction that proposed them; empty for rounding to nearest."""

    name: str
    scales: NDArray[np.float32]
    integers: NDArray[np.number]


@dataclass(eq=False)
class Trial:
    """One way to quantise a tensor, with the results for the convolutions that read it."""

    name: str  # correction that proposed the channel map; empty if a threshold rule gives the range
    map: ChannelMap
    rule: str = ""  # rule that gave the range; empty for a channel map
    roundings: dict[str, list[Rounding]] = field(default_factory=dict)  # by convolution, rounding to nearest first
    # By window, the sum of the quantised samples.
    means: dict[Window, NDArray[np.floating]] = field(default_factory=dict)
    # By window, the sum of the samples that are mapped and clipped, but not rounded.
    inside: dict[Window, NDArray[np.floating]] = field(default_factory=dict)
    # By convolution, float64 (roundings, offsets): see :meth:`Site.add_errors`.
    errors: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    offsets: tuple[str, ...] = ("",)  # name of the correction for each column of the errors; empty for the first
    head: float = 0.0  # error power that rounding and clipping the tensor add to the detections; 0 if unknown
    # float64 (C,): mean clipped amount per channel, weighted by its effect on detections; None if unknown.
    cut: NDArray[np.float64] | None = None
    # By convolution, each rounding's weights with its offsets, cached for :meth:`Site.add_errors`.
    written: dict[str, list[tuple[NDArray[np.float32], list[NDArray[np.float32]]]]] = field(default_factory=dict)

    def quantized(self, windows: NDArray[np.float32], window: Window, rounds: bool = True) -> NDArray[np.float32]:
        """The sampled windows as the convolution reads them: mapped, clipped and, with ``rounds``, rounded."""
        step = self.map.step
        factor: np.float32 | NDArray[np.float32] = 1 / step
        if self.map.scale is not None:
            factor = window.spread(self.map.scale).astype(np.float32)[..., None] * factor
        values: NDArray[np.float32] = windows * factor
        if rounds:
            snap(values, self.map.format)
        else:
            np.clip(values, -MOST[self.map.format], MOST[self.map.format], out=values)
        values *= step
        return values

    def loss(self) -> float:
        """Sum of the least errors of all convolutions."""
        return sum(float(errors.min()) for errors in self.errors.values())


class Pick(NamedTuple):
    """A policy's choice for one convolution: positions in the trial's roundings and offsets."""

    rounding: int
    offset: int


@dataclass(frozen=True, eq=False)
class Choice:
    """A policy's choice at a site: the trial of the best threshold rule, the chosen trial and its picks by convolution.
    ``left_out``: a channel map was rejected because its Mul costs more than it gains."""

    rule: Trial
    trial: Trial
    picks: Mapping[str, Pick]
    left_out: bool = False


@dataclass(eq=False)
class Site:
    """A quantised tensor, with the convolutions that read it and their windows, by name."""

    tensor: str
    convs: dict[str, Weighted]
    windows: dict[str, Window]
    number: int  # part of the seed of every sample
    corrections: tuple[Correction, ...]
    # Channels that Muls would scale: those that do not fold, see :func:`trtdet.quantization.folding.channels_left`,
    # and all of them again for each sum that reads the tensor, to undo the scale.
    multiplied: int = 0
    # A Mul would separate the tensor from the kernel that rounds it, or from other readers of its INT8.
    parted: bool = False
    moved: bool = False  # its values are moved from other tensors, before which a builder may round them
    padded: bool = False  # a layer reads zeros around the tensor, or a sum reads it
    format: Format = "int8"
    trials: list[Trial] = field(default_factory=list)
    too_dear: bool = False  # no map was tried, since its Mul moves more bytes than FP16 convolutions would
    _shape: tuple[int, int] = (0, 0)
    _extremes: Extremes = field(default_factory=Extremes)
    _moments: dict[Window, Moments] = field(default_factory=dict)
    _importance: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    _means: dict[Window, NDArray[np.floating]] = field(default_factory=dict)
    _seen: dict[Window, int] = field(default_factory=dict)
    _judged: dict[Window, int] = field(default_factory=dict)

    def rows(self, conv: str, map: ChannelMap | None = None) -> NDArray[np.float64]:
        """The weights as matrices for the samples, (groups, out / groups, D), for the input after ``map``."""
        window = self.windows[conv]
        rows = window.rows(self.convs[conv].weight.astype(np.float64))
        return rows if map is None or map.scale is None else rows / window.spread(map.scale)[:, None, :]

    def bias(self, conv: str) -> NDArray[np.float64]:
        """(groups, out / groups)."""
        return self.convs[conv].bias.astype(np.float64).reshape(self.windows[conv].groups, -1)

    @property
    def rules(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.name]

    @property
    def mapped(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.name]

    @property
    def mul_price(self) -> float:
        """Bytes that a map's Muls cost, relative to the additional bytes of FP16 convolutions. A Mul reads constants of
        4 bytes a channel. If it separates a convolution from the rounding of its result, the result is also written and
        read in FP16. FP16 convolutions move 2 bytes instead of 1 for each weight and value."""
        channels, places = self._shape
        weights: int = sum(conv.weight.size for conv in self.convs.values())
        mul = 4 * self.multiplied * (1 + places * self.parted)
        return mul / (2 * channels * places + weights)

    def worthwhile(self) -> list[Trial]:
        """The channel maps that gain more accuracy per byte than FP16 convolutions would. FP16 removes the whole error
        of the best rule; a map removes part of it."""
        least = min(trial.loss() for trial in self.rules)
        price = self.mul_price
        return [trial for trial in self.mapped if price < _CHEAP or least - trial.loss() > price * least]

    def moment_sizes(self) -> dict[Window, tuple[int, bool]]:
        """The width of each window, and whether corrections need its covariance."""
        covariance = any(correction.needs_covariance for correction in self.corrections)
        return {
            window: (int(np.prod(self.convs[name].weight.shape[1:])), covariance)
            for name, window in self.windows.items()
        }

    def _samples(self, x: NDArray[np.float32], seed: int) -> Iterator[tuple[Window, NDArray[np.float32]]]:
        """Windows of an image's activation, (C, H, W) or (..., C), at places that the seed determines."""
        x = next(iter(self.windows.values())).laid_out(x)
        for window in dict.fromkeys(self.windows.values()):
            width = len(x) // window.groups * window.taps
            count = min(max(_PLACES, width // 4), 4 * _PLACES)
            yield window, window.sample(x, count, seed * 65537 + self.number)

    def add_moments(self, x: NDArray[np.float32], seed: int | None) -> None:
        """Adds an image's activation, (C, H, W) or (..., C): its extremes and, with a seed, samples of its windows."""
        laid_out = next(iter(self.windows.values())).laid_out(x)
        self._extremes.update(laid_out)
        self._shape = (len(laid_out), laid_out[0].size)
        if seed is not None:
            self.add_samples(x, seed)

    def add_samples(self, x: NDArray[np.float32], seed: int) -> None:
        """Adds samples of the windows alone, of an image whose extremes were added before."""
        if not self._moments:
            sizes = self.moment_sizes()
            self._moments = {window: Moments(window.groups, *size) for window, size in sizes.items()}
        for window, windows in self._samples(x, seed):
            self._moments[window].update(windows)

    @property
    def mappable(self) -> bool:
        """Whether a channel map may be worth its Mul."""
        proposes = any(correction.maps_channels for correction in self.corrections)
        return proposes and self.format == "int8" and self.mul_price < 1

    def low(self, mapped: bool, fused: bool) -> NDArray[np.float64] | None:
        """The least value of each channel, float64 (C,), where an Add before the rounding costs nothing and changes no
        output: beside a Mul of the tensor's channel map if it is ``mapped``, or in the pointwise kernel that rounds it
        unless the convolution's own kernel does (``fused``)."""
        free = not (fused or self.parted or self.moved) or (mapped and self.multiplied >= self._shape[0])
        if self.padded or self.format != "int8" or not free:
            return None
        return self._extremes.ranges()[0].astype(np.float64)

    def reach(self) -> NDArray[np.float64]:
        """The largest magnitude of each channel, float64 (C,), over 0 unless all are 0."""
        low, high = self._extremes.ranges()
        largest = np.maximum(np.abs(low), np.abs(high)).astype(np.float64)
        reach: NDArray[np.float64] = np.maximum(largest, SMALLEST * largest.max())
        return reach

    def prepare(
        self, candidates: Mapping[str, Ranges], everywhere: bool = False, reach: NDArray[np.float64] | None = None
    ) -> None:
        """Creates all trials from the moments, then frees the moments. With ``everywhere`` corrections round the plain
        form even if it can hardly beat a channel map. ``reach``, float64 (C,), is what a channel map is to represent of
        each channel; by default all."""
        for name, window in self.windows.items():
            power = self._moments[window].through(self.rows(name))
            floor = max(_QUIET * float(np.median(power)), 1e-6 * float(power.mean()), 1e-30)
            self._importance[name] = 1 / np.maximum(power, floor) / power.size
        best = None
        extremes = {rule: ranges.tensors[self.tensor] for rule, ranges in candidates.items()}
        if self.format == "int8":
            self.trials = [Trial("", ChannelMap(extreme.amax), rule) for rule, extreme in extremes.items()]
            best = self._best_map(self.reach() if reach is None else reach)
        else:  # FP8: rules and maps make no difference
            first = next(iter(extremes.values()))
            self.trials = [Trial("", fp8_map(first.low, first.high))]
        self.too_dear = best is not None and self.mul_price >= 1
        if best is not None and not self.too_dear:
            self.trials.append(best)
        can_win = everywhere or best is None or self.mul_price >= _CHEAP
        for trial in self.trials:
            for name in self.windows:
                trial.roundings[name] = self._roundings(trial, name, bool(trial.name) or can_win)
        self._moments.clear()

    def _best_map(self, reach: NDArray[np.float64]) -> Trial | None:
        """The channel map of least expected noise; None for a constant tensor."""
        variance = np.zeros(())
        for window, moments in self._moments.items():
            variance = np.maximum(variance, moments.variance().reshape(-1, window.taps).mean(axis=1))
        if not variance.max() > 0:
            return None
        readers = [
            Reader.of(self.convs[name].weight.astype(np.float64), window.groups, self._importance[name].reshape(-1))
            for name, window in self.windows.items()
        ]
        share = min((correction.weight_share for correction in self.corrections), default=1.0)
        proposals = []
        for correction in self.corrections:
            proposal = correction.propose(reach, variance, readers, weight_share=share)
            if proposal is not None:
                channels, noise = proposal
                map = replace(channels, axis=next(iter(self.windows.values())).axis)
                proposals.append((noise, Trial(correction.name, map)))
        return min(proposals, key=lambda proposal: proposal[0], default=(0.0, None))[1]

    def _roundings(self, trial: Trial, name: str, corrected: bool) -> list[Rounding]:
        window, rows = self.windows[name], self.rows(name, trial.map)
        scales = np.stack([weight_scales(group, f"'{name}'", self.format) for group in rows])
        layer = RoundedLayer(
            name,
            rows=rows,
            scales=scales,
            map=trial.map,
            window=window,
            moments=self._moments[window],
            format=self.format,
        )
        proposals: list[tuple[str, NDArray[np.number] | None]] = [("", nearest(rows, scales, self.format))]
        proposals += [(each.name, each.round(layer)) for each in (self.corrections if corrected else ())]
        return [Rounding(owner, scales, integers) for owner, integers in proposals if integers is not None]

    def add_means(self, x: NDArray[np.float32], seed: int) -> None:
        """Adds an image's activation to the means of the windows, in float and as each trial quantises them."""
        for window, windows in self._samples(x, seed):
            self._seen[window] = self._seen.get(window, 0) + windows.shape[2]
            self._means[window] = self._means.get(window, 0.0) + windows.sum(axis=2)
            for trial in self.trials:
                total = trial.quantized(windows, window).sum(axis=2)
                trial.means[window] = trial.means.get(window, 0.0) + total
                if trial.cut is not None:
                    clipped = trial.quantized(windows, window, rounds=False).sum(axis=2)
                    trial.inside[window] = trial.inside.get(window, 0.0) + clipped

    def offsets(
        self, trial: Trial, name: str, rounding: Rounding, seen: bool = False
    ) -> list[tuple[str, NDArray[np.float64]]]:
        """Possible biases, float64 (groups, out) each, with the correction that proposes each one.

        The first, without a name, is the float model's own bias. With ``seen``, clipping counts only as far as it
        reaches the detections. Most clipped values may lie outside of any detection, and a bias that compensates them
        everywhere would move the detections.
        """
        window = self.windows[name]
        bias = self.bias(name)
        if trial.cut is None or not seen:
            exact = np.einsum("goi,gi->go", self.rows(name), self._means[window] / self._seen[window])
        else:
            clipped = trial.inside[window] / self._seen[window] + window.spread(trial.cut)
            exact = np.einsum("goi,gi->go", self.rows(name, trial.map), clipped)
        mean = trial.means[window] / self._seen[window]
        actual = np.einsum("goi,gi->go", rounding.integers.astype(np.float64), mean) * rounding.scales
        proposals = [(correction.name, correction.offset(bias, exact, actual)) for correction in self.corrections]
        return [("", bias), *((owner, offset) for owner, offset in proposals if offset is not None)]

    def add_errors(self, x: NDArray[np.float32], seed: int) -> None:
        """Adds the output error of every trial, rounding and offset for one image."""
        for window, windows in self._samples(x, seed):
            self._judged[window] = self._judged.get(window, 0) + windows.shape[2]
            quantized = [trial.quantized(windows, window) for trial in self.trials]
            for name in [name for name, other in self.windows.items() if other == window]:
                expected = self.rows(name).astype(np.float32) @ windows
                expected += self.bias(name).astype(np.float32)[..., None]
                for trial, read in zip(self.trials, quantized, strict=True):
                    self._add_error(trial, name, read, expected=expected)

    def _add_error(self, trial: Trial, name: str, read: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        importance = self._importance[name].astype(np.float32)[..., None]
        if name not in trial.written:
            trial.written[name] = []
            for rounding in trial.roundings[name]:
                offsets = self.offsets(trial, name, rounding)
                trial.offsets = tuple(owner for owner, _ in offsets)
                weights = rounding.integers.astype(np.float32) * rounding.scales[..., None]
                trial.written[name].append((weights, [offset.astype(np.float32)[..., None] for _, offset in offsets]))
            trial.errors[name] = np.zeros((len(trial.written[name]), len(trial.offsets)))
        for row, (weights, added) in enumerate(trial.written[name]):
            rest = weights @ read - expected
            for column, offset in enumerate(added):
                with np.errstate(over="ignore", invalid="ignore"):  # outputs of 1e15 and more
                    error = rest + offset
                    error *= error
                    error *= importance
                    # The fourth power: saturation occurs at objects, where it is rare and large.
                    total = float(np.vdot(error, error))
                trial.errors[name][row, column] += np.inf if np.isnan(total) else total

    def settle(self) -> None:
        """Turns the sums into means, as shares of the outputs' variance."""
        for trial in self.trials:
            trial.written.clear()
            for name, errors in trial.errors.items():
                places = self._judged[self.windows[name]]
                trial.errors[name] = np.sqrt(errors / places * self._importance[name].size)

    def rounded(self, choice: Choice, seen: bool = False) -> dict[str, Rounded]:
        """The weights of the convolutions that differ from the plain form; for ``seen`` see :meth:`offsets`."""
        forms = {}
        for name, pick in choice.picks.items():
            if choice.trial.name or any(pick):
                rounding = choice.trial.roundings[name][pick.rounding]
                _, offset = self.offsets(choice.trial, name, rounding, seen=seen)[pick.offset]
                integers = rounding.integers.reshape(self.convs[name].weight.shape)
                forms[name] = Rounded(integers, rounding.scales.reshape(-1), offset.reshape(-1).astype(np.float32))
        return forms

    def steps(self, choice: Choice) -> dict[str, tuple[Step, ...]]:
        """The corrections of each convolution, with the error without and with each."""
        steps, trial = {}, choice.trial
        for name, pick in choice.picks.items():
            errors = trial.errors[name]
            without = []
            if trial.name:
                without.append((trial.name, choice.rule.errors[name].min()))
            if pick.rounding:
                without.append((trial.roundings[name][pick.rounding].name, errors[0, pick.offset]))
            if pick.offset:
                without.append((trial.offsets[pick.offset], errors[pick.rounding, 0]))
            steps[name] = tuple(Step(owner, float(error), float(errors[pick])) for owner, error in without)
        return steps


def find_sites(
    model: onnx.ModelProto, placement: QdqPlacement, corrections: tuple[Correction, ...], parted: Collection[str] = ()
) -> list[Site]:
    """The tensors whose INT8 readers are all supported: 2-D convolutions with known padding, or products with weights.
    A tensor that FP8 layers read as well is a second site for these. For ``parted`` see
    :class:`trtdet.quantization.corrections.head_ranges.Start`."""
    graph = gs.import_onnx(model)
    nodes, tensors = {node.name: node for node in graph.nodes}, graph.tensors()
    sites: list[Site] = []
    formats: tuple[tuple[Format, QdqPlacement], ...] = (("int8", placement.integers), ("fp8", placement.floats))
    for format, part in formats:
        first = len(sites)
        chosen = set(part.plan.names("int8"))
        for tensor in part.activations:
            readers = [name for name, _ in part.readers[tensor]]
            layers = {name: Weighted.of(nodes[name]) for name in readers if name in chosen}
            convs = {name: conv for name, conv in layers.items() if conv is not None}
            windows = {name: window for name, conv in convs.items() if (window := Window.of(conv.node)) is not None}
            # A map must suit all convolutions that read the tensor, so one unknown window excludes the tensor.
            if len(windows) < len(layers) or len({window.axis for window in windows.values()}) != 1:
                continue
            name, window = next(iter(windows.items()))
            channels = window.groups * convs[name].weight.shape[1]
            unfolded = channels_left(graph, tensors[tensor], channels, readers=readers, int8=chosen)
            site = Site(
                tensor=tensor,
                convs=convs,
                windows=windows,
                number=2 * len(sites) - first,  # samples, and so the bytes of engines, depend on it
                corrections=tuple(each for each in corrections if format == "int8" or not each.equal_steps),
                multiplied=unfolded + channels * (len(readers) - len(convs)),
                parted=tensor in parted,
                moved=maker(tensors[tensor], "Transpose", "Reshape", *MOVES) is not None,
                padded=len(convs) < len(readers) or any(any(window.pads) for window in windows.values()),
                format=format,
            )
            sites.append(site)
    return sites


def batches(sites: Sequence[Site]) -> Iterator[list[Site]]:
    """Splits the sites into groups whose moments fit into memory together."""
    batch: list[Site] = []
    used = 0
    for site in sites:
        # Convolutions with the same windows share their moments.
        need = max(
            8 * window.groups * width * (width if covariance and width <= MOST_COLUMNS else 1)
            for window, (width, covariance) in site.moment_sizes().items()
        )
        if batch and used + need > _GRAM_BYTES:
            yield batch
            batch, used = [], 0
        batch.append(site)
        used += need
    if batch:
        yield batch
