"""The gate: of several ways to write the whole network in INT8, the way that moves detections least is kept.

An error at one layer does not say what it does to a detection, so whole networks are run on images that nothing was
computed from, and compared at the decoded boxes and scores: the same images for all of them, so that what is hard in an
image counts for each alike. Of two that the images cannot tell apart the simpler is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from trtdet.calibration import Ranges, expose
from trtdet.quantization.corrections.base import Correction
from trtdet.quantization.corrections.head_ranges import Start
from trtdet.quantization.corrections.sources import HELD_BACK, Sources
from trtdet.quantization.head_error import HeadError, chooses_rows, fewest_images, lower_on, sureness
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.plugin_fusion import requantize
from trtdet.quantization.precision import PrecisionPlan
from trtdet.quantization.qdq import Corrections, insert_qdq

_SURE = 0.95
"""How sure it has to be that an error is lower before nodes are spent on it, where it is not lower by much."""

_MUCH = 1.1
"""The simpler form is not taken at the price of an error that is this many times as large, however unsure it is."""

_STANDING = 1.05
"""The same for what stood before, which goes without all that was proposed."""


@dataclass(frozen=True, eq=False)
class Task:
    """What is corrected.

    Attributes:
        model: in float.
        placement: of its Q/DQ pairs.
        candidates: ranges by rule; the first is what the others and the corrections are compared with.
        corrections: that may be used, in the order of the registry.
        fit, held: the images that corrections are computed from, and those that judge them.
        sources: run models on images.
        start: what is known before.
    """

    model: onnx.ModelProto
    placement: QdqPlacement
    candidates: Mapping[str, Ranges]
    corrections: tuple[Correction, ...]
    fit: Sequence[Path]
    held: Sequence[Path]
    sources: Sources
    start: Start = Start()

    @property
    def plain(self) -> Ranges:
        """The ranges of the rule alone."""
        return self.start.plain or self.first

    @property
    def first(self) -> Ranges:
        return next(iter(self.candidates.values()))


@dataclass(frozen=True, eq=False)
class Corrected:
    """The result.

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


@dataclass(frozen=True, eq=False)
class Whole:
    """A way to write the whole network in INT8.

    Attributes:
        name: for people.
        ranges: of its activations.
        corrections: channel maps, integers, scales and biases; empty for the plain form.
    """

    name: str
    ranges: Ranges
    corrections: Corrections = Corrections()


@dataclass(frozen=True, eq=False)
class Verdict:
    """What came of judging.

    Attributes:
        wholes: those judged; the first is what stood before.
        errors: of each at the head, on the images held back.
        nodes: how many nodes each is written with.
        kept: position of the whole that is kept.
    """

    wholes: tuple[Whole, ...]
    errors: tuple[HeadError, ...]
    nodes: tuple[int, ...]
    kept: int

    @property
    def best(self) -> Whole:
        return self.wholes[self.kept]

    @property
    def sure(self) -> float:
        """How sure it is that the kept is better than the first, 0..1; 0 where that is the first itself."""
        return sureness(self.errors[self.kept], self.errors[0])

    def sentences(self) -> tuple[str, ...]:
        """Why the kept was kept, ending with the error at the head before and after.

        The agreement is there to be understood, and decides nothing: it ranks wholes as the error does, see
        ``docs/results/accuracy.md``.
        """
        least = _least(self.errors)
        others = range(1, len(self.wholes))
        told = self.kept or min(others, key=lambda index: self.errors[index].distance, default=0)
        after, before = self.errors[told], self.errors[0]
        gained = after.distance <= before.distance
        first, second = (after, before) if gained else (before, after)
        lower, seen = lower_on(first, second)
        last = (
            f"error at the head {before.distance:.4f} -> {after.distance:.4f} on {len(before.by_image)} images held "
            f"back, {'lower' if gained else 'higher'} on {lower} of {seen} where anything is detected, "
            f"{int(100 * sureness(first, second))} % sure; detections agree by {100 * before.agreement:.1f} % "
            f"before, {100 * after.agreement:.1f} % after"
        )
        if self.kept == least:
            return (last,)
        more, sure = self.nodes[least] - self.nodes[self.kept], sureness(self.errors[least], self.errors[self.kept])
        return (
            f"left out: {self.wholes[least].name}, error {self.errors[least].distance:.4f} for {more} nodes more, "
            f"{int(100 * sure)} % sure",
            last,
        )

    def doubt(self) -> str:
        """What to do where the images can make nothing sure, whatever they show; else empty."""
        _, seen = lower_on(self.errors[self.kept], self.errors[0])
        need, held = fewest_images(_SURE), len(self.errors[0].by_image)
        if seen >= need:
            return ""
        found = f"anything is detected on {seen} of the {held} images that corrections are judged on"
        wanted = HELD_BACK * need
        return (
            f"{found}: too few to tell a gain from chance with; calibrate with {wanted} images or more that show "
            f"objects, one in {HELD_BACK} is held back"
        )


def compare(task: Task, wholes: Sequence[Whole]) -> Verdict:
    """Runs whole networks on the images held back and keeps the best.

    That is the one of the least error, unless another has fewer nodes, an error hardly larger, and the images do not
    make it sure that there is a difference. The first goes where another is as good with as few nodes, and where
    nothing is detected on any image. One pass over the images, with the float model and every whole in memory; an
    image's outputs are let go as soon as they are compared.

    Args:
        task: with the float model, its placement and the images held back.
        wholes: at least one; the first is what stands so far.
    """
    models = []
    for whole in wholes:
        int8 = insert_qdq(task.model, task.placement, whole.ranges, whole.corrections)
        # The plugin library's activations round as well, and more than the pairs alone: they are part of the judging.
        models.append(requantize(int8, whole.ranges.inputs).model)
    errors = head_errors(task, models)
    nodes = [len(model.graph.node) for model in models]
    return Verdict(tuple(wholes), tuple(errors), tuple(nodes), _kept(errors, nodes))


def _kept(errors: Sequence[HeadError], nodes: Sequence[int]) -> int:
    least = _least(errors)
    best = errors[least]
    _, seen = lower_on(best, errors[0])
    simpler = [
        index
        for index, error in enumerate(errors)
        if seen
        and nodes[index] < nodes[least]
        and error.distance <= (_MUCH if index else _STANDING) * best.distance
        and sureness(best, error) < _SURE
    ]
    return min(simpler, key=lambda index: (nodes[index], errors[index].distance), default=least)


def _least(errors: Sequence[HeadError]) -> int:
    """Position of the least error; of equals the first that is not what stood before, since its layers were better."""
    return min(range(len(errors)), key=lambda index: (errors[index].distance, index == 0))


def head_errors(task: Task, quantized: Sequence[onnx.ModelProto]) -> list[HeadError]:
    """The error of each INT8 model at the decoded boxes and scores, on the images held back."""
    head = task.sources.head
    exposed = [expose(model, head.names) for model in (task.model, *quantized)]
    chosen = chooses_rows(task.model, head.names)
    errors = [HeadError(chosen) for _ in quantized]
    for reference, *others in task.sources.outputs(exposed, task.held, "correcting: detections"):
        expected = head.read(reference)
        for error, other in zip(errors, others, strict=True):
            error.update(expected, head.read(other))
    return errors
