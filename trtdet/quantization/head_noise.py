"""The effect of a Q/DQ pair at each activation on the detections, for every candidate range.

The gradient of a random combination of the decoded scores and boxes shows how an activation's rounding and clipping
reach the detections. Each score and coordinate has a random sign. So the expected square of the combination's change is
the sum of the squared changes, each weighted by what becomes a detection. This is the quadratic form of Dong et al.
2019, "HAWQ" (arXiv:1905.03696) and Li et al. 2021, "BRECQ" (arXiv:2102.05426, section 3.2), for the error of
:mod:`trtdet.quantization.head_error` and with Hutchinson's probes instead of class labels. One backward pass rates all
ranges of all tensors.

Rounding errors count as independent: each adds a twelfth of the squared step, weighted by the squared gradient.
Clipping errors do not: they are summed with their signs before squaring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.calibration import Ranges, expose
from trtdet.detection.parts import KEYPOINTS, MASK_COEFFICIENTS, PROTOTYPES, ROTATED_BOXES
from trtdet.passes import Decoded
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.opset import upgrade
from trtdet.passes.plugin_ops import plain
from trtdet.quantization import backward
from trtdet.quantization.backward.sampling import written_out
from trtdet.quantization.backward.tape import Tape
from trtdet.quantization.encoding import QMAX
from trtdet.quantization.head_error import SEEN
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.sources import Sources

FRACTIONS = 2.0 ** (-np.arange(17) / 4)
"""Candidate ranges, as shares of the largest magnitude: 1 down to 1 / 16 in quarters of an octave."""

CLIPPING = 1.0
"""Weight of clipping relative to rounding. It leaves the least output error on held-back images for YOLOv5 n (of 0.5, 1
and 4) and YOLOX nano (of 1 and 4); NanoDet-M 0.5x would take 2 (of 1, 2 and 4)."""

_MARGIN = 2
"""Of a channel's own range, in steps of :data:`FRACTIONS`: other images have larger values. Of nine
detectors it lowers the error on held-back images of six and raises that of one; with 0 FastestDet's rises, where with 2
no channel is narrowed (docs/results/accuracy.md)."""

_LAST_RANDOM = 21  # onnxruntime 1.32 has no RandomUniformLike of opset 22

_TAPPED, _SLOPE = "tapped/", "slope/"  # prefixes of the outputs: the value that is quantised, and its gradient


@dataclass(eq=False)
class TensorNoise:
    """Contributions to ``HeadError.power`` from rounding and clipping one activation."""

    largest: float  # the largest magnitude on the calibration images
    # float64 (C,): the squared gradients of each channel, summed over places and images.
    squares: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    # float64 (C, ranges): the clipped amounts, summed over places and images, each times its place's squared gradient.
    cut: NDArray[np.float64] = field(default_factory=lambda: np.zeros((1, len(FRACTIONS))))
    # By image, float32 (C, ranges): the change by clipping each channel; float32 (C,): by a step of each channel.
    _changes: list[tuple[NDArray[np.float32], NDArray[np.float32]]] = field(default_factory=list)

    def add(self, value: NDArray[np.float32], slope: NDArray[np.float32]) -> None:
        """Adds an image's value and gradient, float32 (C, ...) both; a gradient that is not finite counts as 0."""
        channels, flat, slopes = len(value), value.reshape(-1), slope.reshape(len(value), -1)
        weights = np.einsum("cp,cp->p", slopes, slopes).astype(np.float64)
        if not np.isfinite(weights.sum()):
            return
        self.squares = self.squares + np.einsum("cp,cp->c", slopes, slopes).astype(np.float64)
        # Only the tail that some range clips is processed: it is a small part of most tensors, and empty for zeros.
        at = np.flatnonzero(np.abs(flat) > np.float32(FRACTIONS[-1] * self.largest))
        tail = flat[at]
        size = np.abs(tail)
        # Ranges j + 1, j + 2, ... clip the values in quarter-octave j below the largest.
        with np.errstate(over="ignore"):  # of a denormal largest value, infinity counts as the largest
            below = np.clip(-4 * np.log2(size / np.float32(self.largest or 1.0)), 0, len(FRACTIONS) - 1)
        octave = np.floor(below).astype(np.int64)
        channel, place = np.divmod(at, slopes.shape[1])
        cells, sign = channel * len(FRACTIONS) + octave, np.copysign(np.float32(1), tail)
        changed = self._clipped(cells, sign * slopes.reshape(-1)[at], size, channels=channels)
        self._changes.append((changed.astype(np.float32), slopes.sum(axis=1)))
        self.cut = self.cut + self._clipped(cells, sign * weights[place], size, channels=channels)

    def _clipped(
        self,
        cells: NDArray[np.int64],
        signed: NDArray[np.floating],
        size: NDArray[np.float32],
        channels: int,
    ) -> NDArray[np.float64]:
        """Clipped amounts for each range, float64 (channels, ranges), from weights with the values' signs, and the
        values' magnitudes."""
        count = channels * len(FRACTIONS)
        sums = np.bincount(cells, signed, count).reshape(channels, -1).cumsum(1)[:, :-1]
        products = np.bincount(cells, signed * size, count).reshape(channels, -1).cumsum(1)[:, :-1]
        return np.concatenate([np.zeros((channels, 1)), products - FRACTIONS[1:] * self.largest * sums], axis=1)

    @cached_property
    def clipped(self) -> NDArray[np.float64]:
        """The squared change of scores and boxes by clipping, for each range, summed over images, float64 (ranges,):
        what remains if biases compensate each channel's mean, as ``bias`` does."""
        squares = sum((np.square(moved.sum(axis=0)) for moved in self._moved()), np.zeros(len(FRACTIONS)))
        # A smaller range never moves the detections less; in the sum of a few images, signs may happen to cancel.
        return np.maximum.accumulate(squares)

    def _moved(self) -> Iterator[NDArray[np.float64]]:
        """By image, the change by clipping each channel for each range, float64 (C, ranges), less that of the mean."""
        mean = self.mean_cut
        for changed, step in self._changes:
            yield changed - mean * step[:, None]

    @property
    def mean_cut(self) -> NDArray[np.float64]:
        """Mean clipped amounts, float64 (C, ranges), places weighted by their squared gradient."""
        return self.cut / (self.squares.sum() or 1.0)

    def narrowest(self) -> NDArray[np.float64]:
        """The range of least noise of each channel, float64 (C,), as shares of the largest magnitude: of one channel's
        rounding and clipping, as if the others were exact. Clipping counts as much as by a range :data:`_MARGIN`
        narrower, as few values of one channel are seen."""
        clipped = sum((np.square(moved) for moved in self._moved()), np.zeros_like(self.cut))
        clipped = np.maximum.accumulate(clipped, axis=1)[:, _MARGIN:]
        seen = len(FRACTIONS) - _MARGIN
        rounded = self.squares[:, None] * np.square(FRACTIONS[:seen] * self.largest / QMAX) / 12
        best: NDArray[np.float64] = FRACTIONS[(rounded + CLIPPING * clipped).argmin(axis=1)]
        return best

    def noise_of(self, limits: NDArray[np.float64]) -> NDArray[np.float64]:
        """Error power that a range of each channel adds to the detections, float64 (C,), for each share of these ranges
        in :data:`FRACTIONS`, float64 (ranges,)."""
        clipped = np.zeros(len(FRACTIONS))
        for moved in self._moved():
            clipped += [np.square(_at(moved, limits * share / self.largest).sum()) for share in FRACTIONS]
        rounded = float(self.squares @ np.square(limits / QMAX)) / 12 * np.square(FRACTIONS)
        noise: NDArray[np.float64] = rounded + CLIPPING * np.maximum.accumulate(clipped)
        return noise


class HeadNoise:
    """:class:`TensorNoise` of each activation, over images.

    Args:
        ranges: the extremes of the activations.
        sources: the images to measure on.
        reach: by tensor, float64 (C,): the largest magnitude of each channel, over 0. Channels of such a tensor are
            measured in shares of it.
        weight: of an earlier measurement on these images; None computes it.

    Raises:
        ModelError: the model cannot be differentiated.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        placement: QdqPlacement,
        ranges: Ranges,
        sources: Sources,
        reach: Mapping[str, NDArray[np.float64]] = {},
        weight: NDArray[np.float64] | None = None,
    ) -> None:
        self._reach, self._last = reach, placement.last
        self.tensors = {
            name: TensorNoise(
                1.0 if name in reach else max(abs(ranges.tensors[name].low), abs(ranges.tensors[name].high))
            )
            for name in placement.activations
        }
        self.weight = _weight(model, sources) if weight is None else weight
        if self.seen:
            differentiated = with_slopes(model, placement, sources.head, weight=self.weight)
            stage = "correcting: gradients of the detections"
            for (outputs,) in sources.outputs([differentiated], sources.images, stage):
                self._add(outputs)

    @property
    def seen(self) -> bool:
        """Whether the images have any detection."""
        return bool(self.weight.min() > 0)

    def _add(self, outputs: Mapping[str, NDArray[np.float32]]) -> None:
        for name, tensor in self.tensors.items():
            if _SLOPE + name not in outputs:
                continue
            value, slope = outputs[_TAPPED + name], outputs[_SLOPE + name]
            if name in self._last:
                value, slope = (np.moveaxis(each, -1, 0) for each in (value, slope))
            if name in self._reach:
                unit = self._reach[name].astype(np.float32).reshape(-1, *(1,) * (value.ndim - 1))
                value, slope = value / unit, slope * unit
            tensor.add(np.ascontiguousarray(value), np.ascontiguousarray(slope))

    def noise(self, name: str, amax: float) -> float:
        """Error power that a tensor's range adds to the detections."""
        tensor = self.tensors[name]
        if not tensor.largest > 0:
            return 0.0
        rounded = float(tensor.squares.sum()) * (amax / QMAX) ** 2 / 12
        return float(rounded + CLIPPING * _at(tensor.clipped, amax / tensor.largest))

    def cut(self, name: str, limits: float | NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Mean clipped amount of each channel for a range, or for that of each channel, float64 (C,), places weighted
        by their squared gradient. None if the tensor does not reach the detections."""
        tensor, unit = self.tensors[name], self._reach.get(name, 1.0)
        if not (tensor.largest > 0 and tensor.squares.sum() > 0):
            return None
        shares = np.broadcast_to(limits / unit / tensor.largest, len(tensor.cut))
        return _at(tensor.mean_cut, shares) * unit

    def narrowest(self, name: str) -> NDArray[np.float64]:
        """The range of least noise of each channel, float64 (C,), of a tensor with ``reach``."""
        return self._reach[name] * self.tensors[name].narrowest()

    def noise_of(self, name: str, limits: NDArray[np.float64]) -> NDArray[np.float64]:
        """:meth:`TensorNoise.noise_of`, of a tensor with ``reach``; ``limits`` in the tensor's unit."""
        return self.tensors[name].noise_of(limits / self._reach[name])

    def best(self, name: str) -> float:
        """The amax of least noise; the widest if the tensor does not reach the detections."""
        largest = self.tensors[name].largest
        return float(min(FRACTIONS * largest, key=lambda amax: self.noise(name, float(amax))))


def _at(clipped: NDArray[np.floating], fractions: float | NDArray[np.float64]) -> NDArray[np.float64]:
    """Interpolates between two ranges, for a fraction or for that of each channel: (..., ranges) and (...) -> (...)."""
    place = np.asarray(-4 * np.log2(np.clip(fractions, FRACTIONS[-1], 1.0)))
    low = np.minimum(place.astype(np.int64), len(FRACTIONS) - 2)
    share = place - low
    wider, narrower = (np.take_along_axis(clipped, each[..., None], -1)[..., 0] for each in (low, low + 1))
    return np.asarray((1 - share) * wider + share * narrower, np.float64)


def _weight(model: onnx.ModelProto, sources: Sources) -> NDArray[np.float64]:
    """Weights of all that is detected on the images, float64 (2,): of the scores, and of the boxes."""
    total, head, stage = np.zeros(2), sources.head, "correcting: detections of the float model"
    for (outputs,) in sources.outputs([expose(model, head.names)], sources.images, stage):
        boxes, scores = head.read(outputs)
        best = np.nan_to_num(scores).max(axis=-1, initial=0.0)
        detected = (best > SEEN) & ((boxes[..., 2:] - boxes[..., :2]).min(axis=-1) > 0)
        total += [float(scores[scores > SEEN].sum(dtype=np.float64)), float(best[detected].sum(dtype=np.float64))]
    return total


def with_slopes(
    model: onnx.ModelProto, placement: QdqPlacement, head: Decoded, weight: NDArray[np.float64]
) -> onnx.ModelProto:
    """A model that computes, by activation of ``placement``, the value that is quantised and the gradient there of the
    random combination; activations that no detection depends on are left out. Raises ModelError if the model cannot be
    differentiated."""
    graph = to_graph(plain(model))
    tensors = graph.tensors()
    graph.outputs = [tensors[name] for name in head.names]
    graph.cleanup().toposort()
    _fix_batch(graph)
    if graph.opset < backward.OPSET:
        upgrade(graph, backward.OPSET)
    written_out(graph)
    graph = to_graph(to_model(graph))
    tapped = _tap(graph, placement)
    seeds = _seeds(Tape(graph, "seed/"), graph.tensors(), head, weight=weight)
    slopes = backward.gradients(graph, tapped.values(), seeds)
    graph.outputs = []
    for name, tensor in tapped.items():
        if tensor.name in slopes:
            slope = slopes[tensor.name]
            tensor.name, slope.name = _TAPPED + name, _SLOPE + name
            slope.dtype, slope.shape = np.float32, tensor.shape
            graph.outputs += [tensor, slope]
    graph.cleanup()
    return to_model(graph)


def _fix_batch(graph: gs.Graph) -> None:
    """An open batch -> 1, in place, so that all sizes are known: images are run one by one then."""
    source = graph.inputs[0]
    if isinstance(source.shape[0], int):
        return
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Variable):
            kept = tensor is source or tensor in graph.outputs
            tensor.shape = [1, *tensor.shape[1:]] if kept else None


def _tap(graph: gs.Graph, placement: QdqPlacement) -> dict[str, gs.Variable]:
    """Puts an Identity before the readers of each quantised copy; returns its results."""
    tensors, nodes = graph.tensors(), {node.name: node for node in graph.nodes}
    tapped = {}
    for name in placement.activations:
        readers = [(nodes[reader], position) for reader, position in placement.readers[name] if reader in nodes]
        if not readers:
            continue
        source = tensors[name]
        copy = gs.Variable(f"{name}/tapped", dtype=np.float32, shape=source.shape)
        graph.nodes.append(gs.Node("Identity", f"tap/{name}", inputs=[source], outputs=[copy]))
        for reader, position in readers:
            reader.inputs[position] = copy
        tapped[name] = copy
    graph.toposort()
    return tapped


def _seeds(
    tape: Tape, tensors: Mapping[str, gs.Tensor], head: Decoded, weight: NDArray[np.float64]
) -> dict[str, gs.Variable]:
    """The factors of boxes and scores in the random combination: what is no detection has 0."""
    boxes, raw = tensors[head.boxes], tensors[head.scores]
    scores = tape("Sigmoid", raw) if head.logits else raw
    seen, zero = np.float32(SEEN), np.float32(0)
    detected = tape("Where", tape("Greater", scores, seen), scores, zero)
    of_scores = tape("Sqrt", tape("Mul", detected, np.float32(1 / weight[0])))
    if head.logits:  # the factor of the logit is that of the score times the sigmoid's slope
        of_scores = tape("Mul", of_scores, tape("Mul", scores, tape("Sub", np.float32(1), scores)))
    # Coordinates are relative to the box size: a small move changes 1 - IoU by about as much.
    best = tape.reduce("ReduceMax", scores, [-1])
    low, high = (
        tape("Slice", boxes, np.array([start], np.int64), np.array([end], np.int64), np.array([-1], np.int64))
        for start, end in ((0, 2), (2, 4))
    )
    sizes = tape("Sub", high, low)
    # An empty box has no IoU to lose.
    there = tape("And", tape("Greater", best, seen), tape("Greater", tape.reduce("ReduceMin", sizes, [-1]), zero))
    share = tape("Sqrt", tape("Mul", tape("Where", there, best, zero), np.float32(1 / weight[1])))
    sizes = tape("Max", sizes, np.float32(1))
    factors = {
        head.boxes: tape("Div", share, tape("Concat", sizes, sizes, axis=-1)),
        head.scores: of_scores,
        **_of_parts(tape, tensors, head, share=share, sizes=sizes),
    }
    return {
        name: tape("Mul", factor, _signs(tape, tensors[name], seed))
        for seed, (name, factor) in enumerate(factors.items(), 1)
    }


def _of_parts(
    tape: Tape, tensors: Mapping[str, gs.Tensor], head: Decoded, share: gs.Variable, sizes: gs.Variable
) -> dict[str, gs.Variable]:
    """The factors of masks, keypoints and rotated boxes: a change counts relative to the object's size, or to the
    magnitude of all coefficients or prototypes. ``share`` is (B, N, 1), ``sizes`` (B, N, 2)."""
    factors = {}
    for part, name in head.parts:
        tensor = tensors[name]
        if part == KEYPOINTS:
            moved = tape("Div", share, sizes)
            moved = tape("Concat", moved, tape("Mul", share, np.float32(0)), axis=-1)  # no score decides anything
            factors[name] = tape("Unsqueeze", moved, np.array([2], np.int64))
        elif part == ROTATED_BOXES:
            ends = (np.array([end], np.int64) for end in (2, 4, -1))
            sides = tape("Max", tape("Slice", tensor, *ends), np.float32(1))
            long, short = (tape.reduce(op, sides, [-1]) for op in ("ReduceMax", "ReduceMin"))
            turned = tape("Mul", share, tape("Mul", tape("Div", long, short), np.float32(0.5)))
            moved = tape("Div", share, sides)
            factors[name] = tape("Concat", moved, moved, turned, axis=-1)
        else:
            axes = [-1] if part == MASK_COEFFICIENTS else [1, 2, 3]
            length = tape("Sqrt", tape.reduce("ReduceSum", tape("Mul", tensor, tensor), axes))
            weight = share
            if part == PROTOTYPES:
                weight = tape("Sqrt", tape.reduce("ReduceSum", tape("Mul", share, share), [1]))
                weight = tape("Unsqueeze", weight, np.array([3], np.int64))
            factors[name] = tape("Div", weight, tape("Max", length, np.float32(1e-6)))
    return factors


def _signs(tape: Tape, like: gs.Tensor, seed: int) -> gs.Variable:
    """Random signs of a tensor's shape, the same in each session; up to opset 21 new ones in each run."""
    if tape.opset <= _LAST_RANDOM:
        drawn = tape("RandomUniformLike", like, low=-1.0, high=1.0, seed=float(seed), dtype=onnx.TensorProto.FLOAT)
        return tape("Where", tape("Less", drawn, np.float32(0)), np.float32(-1), np.float32(1))
    # A hash of each element's number: multiplied, squared and multiplied again, modulo the prime 2^31 - 1.
    prime = np.int64(2**31 - 1)
    mixed = tape("Mod", tape("Mul", tape("Add", tape.numbered(like), np.int64(seed)), np.int64(48271)), prime)
    mixed = tape("Mod", tape("Mul", tape("Mod", tape("Mul", mixed, mixed), prime), np.int64(69621)), prime)
    return tape("Where", tape("Less", mixed, prime // 2), np.float32(-1), np.float32(1))
