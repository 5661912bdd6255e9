"""The ways to quantise a tensor and the convolutions that read it, each with its error on held-back images."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.calibration import Ranges
from trtdet.calibration.channel_ranges import Extremes
from trtdet.quantization.corrections.base import Activation, Correction, Layer, OutputMeans, Proposal, Reader
from trtdet.quantization.corrections.moments import MOST_COLUMNS, Moments
from trtdet.quantization.encoding import MOST, ChannelMap, Rounded, fp8_map, fp8_scales, nearest, snap, weight_scales
from trtdet.quantization.folding import channels_left
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.precision import Format, Step
from trtdet.quantization.weighted import Weighted
from trtdet.quantization.windows import Window

_PLACES = 256
"""Windows that are looked at in one image and convolution; up to four times as many where they are wide."""

_QUIET = 0.01
"""An output's error counts as a share of its variance, but of at least this share of the outputs' median variance."""

_GRAM_BYTES = 1 << 30
"""Second moments that are held at a time; a model with more of them is read in several passes."""


_CHEAP = 0.1
"""A map whose Mul costs a smaller share of the bytes of FP16 is as good as folded: the head decides about it, since the
error of a layer does not say what it does to a detection."""


@dataclass(frozen=True, eq=False)
class Rounding:
    """Integers for a convolution.

    Attributes:
        name: of the correction that proposed them; empty for the nearest.
        scales: float32 (groups, out / groups).
        integers: int8 (groups, out / groups, D); of a product in FP8 numbers of E4M3, float16.
    """

    name: str
    scales: NDArray[np.float32]
    integers: NDArray[np.number]


@dataclass(eq=False)
class Trial:
    """One way to quantise a tensor, and what becomes of the convolutions that read it.

    Attributes:
        names: of the corrections in the channel map; empty where a threshold rule gives the range.
        map: of the tensor.
        rule: that gave the range; empty for a channel map.
        roundings: by convolution, the nearest first.
        means: by window, the sum of the samples as the convolution reads them.
        inside: likewise, mapped and clipped, but not rounded.
        errors: by convolution, float64 (roundings, offsets): see :meth:`Site.add_errors`.
        offsets: name of the correction that each column of the errors is of; the first has none.
        head: what the tensor's rounding and clipping add to the error's power at the head; 0 where it is not known.
        cut: float64 (C,): what clipping takes off each channel as it is mapped, on average with places weighted by how
            far they reach the head; None where that is not known.
    """

    names: tuple[str, ...]
    map: ChannelMap
    rule: str = ""
    roundings: dict[str, list[Rounding]] = field(default_factory=dict)
    means: dict[Window, NDArray[np.floating]] = field(default_factory=dict)
    inside: dict[Window, NDArray[np.floating]] = field(default_factory=dict)
    errors: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    offsets: tuple[str, ...] = ("",)
    head: float = 0.0
    cut: NDArray[np.float64] | None = None
    _written: dict[str, list[_Written]] = field(default_factory=dict)

    def quantized(self, windows: NDArray[np.float32], window: Window, rounds: bool = True) -> NDArray[np.float32]:
        """Sampled windows as the convolution will read them: mapped, clipped and, unless told not to be, rounded."""
        step = self.map.step
        factor: np.float32 | NDArray[np.float32] = 1 / step
        if self.map.scale is not None:
            factor = window.spread(self.map.scale).astype(np.float32)[..., None] * factor
        rounded: NDArray[np.float32]
        if self.map.shift is None:
            rounded = windows * factor
        else:
            rounded = windows - window.spread(self.map.shift).astype(np.float32)[..., None]
            rounded *= factor
        if rounds:
            snap(rounded, self.map.format)
        else:
            np.clip(rounded, -MOST[self.map.format], MOST[self.map.format], out=rounded)
        rounded *= step
        return rounded

    def written(self, site: Site, conv: str) -> list[_Written]:
        """The roundings of a convolution with their offsets, as the judging multiplies them."""
        if conv not in self._written:
            self._written[conv] = []
            for rounding in self.roundings[conv]:
                names, offsets = zip(*site.offsets(self, conv, rounding), strict=True)
                self.offsets = names
                weights = rounding.integers.astype(np.float32) * rounding.scales[..., None]
                self._written[conv].append(
                    _Written(weights, [offset.astype(np.float32)[..., None] for offset in offsets])
                )
        return self._written[conv]

    def forget_written(self) -> None:
        self._written.clear()

    def loss(self) -> float:
        """The sum over the convolutions of the least error of each."""
        return sum(float(errors.min()) for errors in self.errors.values())


@dataclass(frozen=True, eq=False)
class _Written:
    weights: NDArray[np.float32]
    offsets: list[NDArray[np.float32]]


@dataclass(frozen=True)
class Pick:
    """What a policy takes of a trial for one convolution: positions of a rounding and of an offset."""

    rounding: int
    offset: int


@dataclass(frozen=True, eq=False)
class Choice:
    """What a policy takes at a site.

    Attributes:
        rule: the trial of the best threshold rule.
        trial: that is taken.
        picks: by convolution.
        left_out: there was a channel map, but its Mul would have cost more than it brought.
    """

    rule: Trial
    trial: Trial
    picks: Mapping[str, Pick]
    left_out: bool = False


@dataclass(eq=False)
class Site:
    """A tensor that is quantised, with the convolutions that read it.

    Attributes:
        tensor: name of the tensor.
        convs: by name.
        windows: by name of the convolution.
        number: of the site in its model; part of the seed of every sample.
        corrections: in use.
        multiplied: how many channels Muls would scale: those whose scale nothing before takes, see
            :func:`trtdet.quantization.folding.channels_left`, and all of them once more for each sum that reads the
            tensor, to scale them back.
        parted: whether a Mul would part it from the kernel that rounds it as well, or from other readers of its INT8.
        format: of the tensor and of the weights of the layers.
        trials: the ways to quantise it.
        too_dear: a map was not even tried, since its Mul moves more bytes than FP16 convolutions would.
    """

    tensor: str
    convs: dict[str, Weighted]
    windows: dict[str, Window]
    number: int
    corrections: tuple[Correction, ...]
    multiplied: int = 0
    parted: bool = False
    format: Format = "int8"
    trials: list[Trial] = field(default_factory=list)
    too_dear: bool = False
    _shape: tuple[int, int] = (0, 0)
    _extremes: Extremes = field(default_factory=Extremes)
    _moments: dict[Window, Moments] = field(default_factory=dict)
    _importance: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    _means: dict[Window, NDArray[np.floating]] = field(default_factory=dict)
    _seen: dict[Window, int] = field(default_factory=dict)
    _judged: dict[Window, int] = field(default_factory=dict)

    def weight(self, conv: str) -> NDArray[np.float64]:
        weight: NDArray[np.float64] = self.convs[conv].weight.astype(np.float64)
        return weight

    def bias(self, conv: str) -> NDArray[np.float64]:
        bias: NDArray[np.float64] = self.convs[conv].bias.astype(np.float64)
        return bias

    @property
    def rules(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.names]

    @property
    def mapped(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.names]

    @property
    def mul_price(self) -> float:
        """The bytes that a map's Muls cost, for each that the convolutions would cost in FP16.

        A Mul's constants are 4 bytes a channel. Where it parts a convolution from the rounding of its result, that
        result is written and read in FP16 as well. FP16 convolutions read weights, and write and read values, of 2
        bytes instead of 1.
        """
        channels, places = self._shape
        weights: int = sum(conv.weight.size for conv in self.convs.values())
        mul = 4 * self.multiplied * (1 + places * self.parted)
        return mul / (2 * channels * places + weights)

    def worthwhile(self) -> list[Trial]:
        """The channel maps that buy more accuracy for their bytes than keeping the convolutions in FP16 would.

        FP16 takes all of the error away that the best rule leaves; a map takes its share. A shift was asked for by
        name, and costs what it costs.
        """
        least = min(trial.loss() for trial in self.rules)
        price = self.mul_price
        return [
            trial
            for trial in self.mapped
            if price < _CHEAP or trial.map.shift is not None or least - trial.loss() > price * least
        ]

    def moment_bytes(self, covariance: bool) -> int:
        """What the second moments take at most of the windows that the convolutions share."""
        need = 0
        for name, window in self.windows.items():
            width = self._width(name)
            need = max(need, 8 * window.groups * width * (width if covariance and width <= MOST_COLUMNS else 1))
        return need

    def add_moments(self, x: NDArray[np.float32], seed: int | None) -> None:
        """Adds an image's activation, (C, H, W) or (..., C): its extremes and, with a seed, samples of its windows."""
        x = self._laid_out(x)
        self._extremes.update(x)
        self._shape = (len(x), x[0].size)
        if seed is None:
            return
        if not self._moments:
            covariance = any(correction.needs_covariance for correction in self.corrections)
            for name, window in self.windows.items():
                self._moments.setdefault(window, Moments(window.groups, self._width(name), covariance))
        for window, moments in self._moments.items():
            moments.update(self._sample(x, window, seed))

    def prepare(self, candidates: Mapping[str, Ranges], everywhere: bool = False) -> None:
        """Works out every trial from the moments, which are let go.

        Args:
            candidates: ranges by rule.
            everywhere: round the plain form with care also where it hardly can win against a channel map at its layer.
        """
        for name, window in self.windows.items():
            power = self._moments[window].through(window.rows(self.weight(name)))
            floor = max(_QUIET * float(np.median(power)), 1e-6 * float(power.mean()), 1e-30)
            self._importance[name] = 1 / np.maximum(power, floor) / power.size
        if self.format == "int8":
            self.trials = [
                Trial((), ChannelMap(ranges.tensors[self.tensor].amax), rule) for rule, ranges in candidates.items()
            ]
            best = self._best_map()
        else:  # neither a rule nor a map has anything to choose
            whole = next(iter(candidates.values())).tensors[self.tensor]
            self.trials, best = [Trial((), fp8_map(whole.low, whole.high))], None
        if best is not None and best.map.shift is None and self.mul_price >= 1:
            best, self.too_dear = None, True
        if best is not None:
            self.trials.append(Trial(best.names, replace(best.map, axis=self._axis)))
        can_win = everywhere or best is None or (best.map.shift is None and self.mul_price >= _CHEAP)
        for trial in self.trials:
            for name in self.windows:
                trial.roundings[name] = self._roundings(trial, name, bool(trial.names) or can_win)
        self._moments.clear()

    def _width(self, conv: str) -> int:
        return int(np.prod(self.convs[conv].weight.shape[1:]))

    @property
    def _axis(self) -> int:
        return next(iter(self.windows.values())).axis

    def _laid_out(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        return next(iter(self.windows.values())).laid_out(x)

    def _sample(self, x: NDArray[np.float32], window: Window, seed: int) -> NDArray[np.float32]:
        width = len(x) // window.groups * window.taps
        return window.sample(x, min(max(_PLACES, width // 4), 4 * _PLACES), seed * 65537 + self.number)

    def _best_map(self) -> Proposal | None:
        """The channel map of least expected noise, if the tensor varies at all."""
        variance = np.zeros(0)
        for window, moments in self._moments.items():
            found = moments.variance().reshape(-1, window.taps).mean(axis=1)
            variance = np.maximum(variance, found) if len(variance) else found
        if not variance.max() > 0:
            return None
        low, high = self._extremes.ranges()
        padded = any(any(window.pads) for window in self.windows.values())
        if padded:  # the padding's zeros are quantised as well
            low, high = np.minimum(low, 0), np.maximum(high, 0)
        readers = [
            Reader.of(self.weight(name), window.groups, self._importance[name].reshape(-1))
            for name, window in self.windows.items()
        ]
        share = min((correction.weight_share for correction in self.corrections), default=1.0)
        enabled = frozenset(correction.name for correction in self.corrections)
        activation = Activation(low, high, variance, readers, padded, share, enabled)
        proposals = [correction.propose(activation) for correction in self.corrections]
        return min((found for found in proposals if found is not None), key=lambda found: found.noise, default=None)

    def _roundings(self, trial: Trial, name: str, corrected: bool) -> list[Rounding]:
        window = self.windows[name]
        rows = window.rows(self.weight(name))
        if trial.map.scale is not None:
            rows = rows / window.spread(trial.map.scale)[:, None, :]
        scales_of = weight_scales if self.format == "int8" else fp8_scales
        scales = np.stack([scales_of(group, f"'{name}'") for group in rows])
        found = [Rounding("", scales, nearest(rows, scales, self.format))]
        if corrected:
            layer = Layer(name, rows, scales, trial.map, window, self._moments[window], self.format)
            for correction in self.corrections:
                integers = correction.round(layer)
                if integers is not None:
                    found.append(Rounding(correction.name, scales, integers))
        return found

    def add_means(self, x: NDArray[np.float32], seed: int) -> None:
        """Adds an image's activation to the means of the windows, in float and as each trial quantises them."""
        x = self._laid_out(x)
        for window in dict.fromkeys(self.windows.values()):
            windows = self._sample(x, window, seed)
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
        """What may be added to the integer product, float64 (groups, out) each, by the correction that proposes it.

        The first, without a name, makes up for the shift of the channel map alone. With ``seen``, what clipping takes
        off counts as far as the head sees it: most of it may be no part of a detection, and made up for at every place
        it would move those that are.
        """
        window = self.windows[name]
        rows = window.rows(self.weight(name))
        bias = self.bias(name).reshape(window.groups, -1)
        shift = np.zeros(bias.shape)
        if trial.map.shift is not None:
            shift = np.einsum("goi,gi->go", rows, window.spread(trial.map.shift))
        if trial.cut is None or not seen:
            wanted = np.einsum("goi,gi->go", rows, self._means[window] / self._seen[window])
        else:
            mapped = rows if trial.map.scale is None else rows / window.spread(trial.map.scale)[:, None, :]
            whole = trial.inside[window] / self._seen[window] + window.spread(trial.cut)
            wanted = shift + np.einsum("goi,gi->go", mapped, whole)
        mean = trial.means[window] / self._seen[window]
        got = np.einsum("goi,gi->go", rounding.integers.astype(np.float64), mean) * rounding.scales
        means = OutputMeans(bias, wanted, got)
        proposals = [(correction.name, correction.offset(means)) for correction in self.corrections]
        return [("", bias + shift), *((name, offset) for name, offset in proposals if offset is not None)]

    def add_errors(self, x: NDArray[np.float32], seed: int) -> None:
        """Adds the error of every trial, rounding and offset at the output of every layer on one image."""
        x = self._laid_out(x)
        for window in dict.fromkeys(self.windows.values()):
            windows = self._sample(x, window, seed)
            self._judged[window] = self._judged.get(window, 0) + windows.shape[2]
            rounded = [trial.quantized(windows, window) for trial in self.trials]
            for name in [name for name, other in self.windows.items() if other == window]:
                expected = window.rows(self.weight(name)).astype(np.float32) @ windows
                expected += self.bias(name).astype(np.float32).reshape(window.groups, -1)[..., None]
                for trial, read in zip(self.trials, rounded, strict=True):
                    self._add_error(trial, name, read, expected)

    def _add_error(self, trial: Trial, name: str, read: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        weight = self._importance[name].astype(np.float32)[..., None]
        written = trial.written(self, name)
        errors = trial.errors.setdefault(name, np.zeros((len(written), len(written[0].offsets))))
        for row, form in enumerate(written):
            rest = form.weights @ read - expected
            for column, offset in enumerate(form.offsets):
                with np.errstate(over="ignore", invalid="ignore"):  # outputs of 1e15 and more
                    error = rest + offset
                    error *= error
                    error *= weight
                    # The fourth power: what saturates does so where there is an object, rarely and by much.
                    total = float(np.vdot(error, error))
                errors[row, column] += np.inf if np.isnan(total) else total

    def settle(self) -> None:
        """Ends the judging: sums become means, as shares of the outputs' variance."""
        for trial in self.trials:
            trial.forget_written()
            for name, errors in trial.errors.items():
                places = self._judged[self.windows[name]]
                trial.errors[name] = np.sqrt(errors / places * self._importance[name].size)

    def rounded(self, choice: Choice, seen: bool = False) -> dict[str, Rounded]:
        """The weights of the convolutions that are not plain; ``seen`` as of :meth:`offsets`."""
        return {
            name: self.form(choice.trial, name, pick, seen)
            for name, pick in choice.picks.items()
            if choice.trial.names or pick.rounding or pick.offset
        }

    def form(self, trial: Trial, name: str, pick: Pick, seen: bool = False) -> Rounded:
        """The weights of one convolution as they are written; ``seen`` as of :meth:`offsets`."""
        rounding = trial.roundings[name][pick.rounding]
        shape = self.convs[name].weight.shape
        _, offset = self.offsets(trial, name, rounding, seen)[pick.offset]
        bias = offset.reshape(-1).astype(np.float32)
        return Rounded(rounding.integers.reshape(shape), rounding.scales.reshape(-1), bias)

    def steps(self, choice: Choice) -> dict[str, tuple[Step, ...]]:
        """For each convolution what was done, each with the error without it and with it."""
        found = {}
        for name, pick in choice.picks.items():
            errors = choice.trial.errors[name]
            last = float(errors[pick.rounding, pick.offset])
            rounding = choice.trial.roundings[name][pick.rounding]
            steps = []
            if choice.trial.names:
                steps.append(Step(", ".join(choice.trial.names), float(choice.rule.errors[name].min()), last))
            if pick.rounding:
                steps.append(Step(rounding.name, float(errors[0, pick.offset]), last))
            if pick.offset:
                steps.append(Step(choice.trial.offsets[pick.offset], float(errors[pick.rounding, 0]), last))
            found[name] = tuple(steps)
        return found


def find_sites(
    model: onnx.ModelProto,
    placement: QdqPlacement,
    corrections: tuple[Correction, ...],
    parted: Collection[str] = (),
) -> list[Site]:
    """The tensors whose INT8 readers are all understood: 2-D convolutions with known padding, or products with weights.

    A tensor that layers in FP8 read as well is a site of its own for these.

    Args:
        model: in float.
        placement: of its Q/DQ pairs.
        corrections: in use.
        parted: see :func:`trtdet.quantization.corrections.correct`.
    """
    graph = gs.import_onnx(model)
    found: list[Site] = []
    for format, part in _formats(placement):
        used = tuple(each for each in corrections if format == "int8" or not each.equal_steps)
        found += (
            replace(site, number=len(found) + index, corrections=used, format=format)
            for index, site in enumerate(_sites_of(graph, part, parted))
        )
    return found


def _formats(placement: QdqPlacement) -> Iterator[tuple[Format, QdqPlacement]]:
    yield "int8", placement.integers
    if placement.plan.fp8:
        yield "fp8", placement.floats


def _sites_of(graph: gs.Graph, placement: QdqPlacement, parted: Collection[str]) -> Iterator[Site]:
    nodes, tensors = {node.name: node for node in graph.nodes}, graph.tensors()
    chosen = set(placement.plan.names("int8"))
    for tensor in placement.activations:
        readers = placement.readers[tensor]
        given = {name: Weighted.of(nodes[name]) for name, _ in readers if name in chosen}
        convs = {name: conv for name, conv in given.items() if conv is not None}
        windows = {name: Window.of(conv.node) for name, conv in convs.items()}
        known = {name: window for name, window in windows.items() if window is not None}
        # A map must suit all convolutions that read the tensor, so that one unknown window rules the tensor out.
        if known and len(known) == len(given) and len({window.axis for window in known.values()}) == 1:
            name, window = next(iter(known.items()))
            channels = window.groups * convs[name].weight.shape[1]
            left = channels_left(graph, tensors[tensor], channels, [name for name, _ in readers], chosen)
            multiplied = left + channels * (len(readers) - len(convs))
            yield Site(tensor, convs, known, 0, (), multiplied, tensor in parted)


def batches(sites: Sequence[Site]) -> Iterator[list[Site]]:
    """The sites in runs whose moments fit into memory together."""
    batch: list[Site] = []
    used = 0
    for site in sites:
        need = site.moment_bytes(any(correction.needs_covariance for correction in site.corrections))
        if batch and used + need > _GRAM_BYTES:
            yield batch
            batch, used = [], 0
        batch.append(site)
        used += need
    if batch:
        yield batch
