"""The gate: of several ways to write the whole network in INT8, the way that moves detections least is kept.

An error at one layer does not say what it does to a detection, so whole networks are run on images that nothing was
computed from, and compared at the decoded boxes and scores: the same images for all of them, so that what is hard in an
image counts for each alike. Of two that the images cannot tell apart the simpler is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import onnx

from trtdet.calibration import Ranges, expose
from trtdet.quantization.corrections.base import Correction
from trtdet.quantization.corrections.head_ranges import Start
from trtdet.quantization.head_error import HeadError, chooses_rows, fewest_images, lower_on, sureness
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.plugin_fusion import requantize
from trtdet.quantization.qdq import Corrections, insert_qdq
from trtdet.quantization.sources import HELD_BACK, Sources

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
        candidates: ranges by rule; the first is what the others and the corrections are compared with.
        corrections: that may be used, in the order of the registry.
        fit, held: the images that corrections are computed from, and those that judge them.
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
class QuantizedForm:
    """A way to write the whole network in INT8, named for people."""

    name: str
    ranges: Ranges
    corrections: Corrections = Corrections()


@dataclass(frozen=True, eq=False)
class Verdict:
    """Result of :func:`compare`: the forms, the first of which stood before, with the error of each at the head on the
    images held back, and the number of nodes that each is written with."""

    forms: tuple[QuantizedForm, ...]
    errors: tuple[HeadError, ...]
    nodes: tuple[int, ...]

    @cached_property
    def least(self) -> int:
        """Position of the least error; of equals the first that is not what stood before, since its layers were
        better."""
        return min(range(len(self.errors)), key=lambda index: (self.errors[index].distance, index == 0))

    @cached_property
    def kept(self) -> int:
        """Position of the form that is kept."""
        least = self.least
        best = self.errors[least]
        _, seen = lower_on(best, self.errors[0])
        simpler = [
            index
            for index, error in enumerate(self.errors)
            if seen
            and self.nodes[index] < self.nodes[least]
            and error.distance <= (_MUCH if index else _STANDING) * best.distance
            and sureness(best, error) < _SURE
        ]
        return min(simpler, key=lambda index: (self.nodes[index], self.errors[index].distance), default=least)

    def sentences(self) -> tuple[str, ...]:
        """Why the kept was kept, ending with the error at the head before and after.

        The agreement is there to be understood, and decides nothing: it ranks forms as the error does, see
        ``docs/results/accuracy.md``.
        """
        kept, least, before = self.kept, self.least, self.errors[0]
        others = range(1, len(self.forms))
        after = self.errors[kept or min(others, key=lambda index: self.errors[index].distance, default=0)]
        gained = after.distance <= before.distance
        pair = (after, before) if gained else (before, after)
        lower, seen = lower_on(*pair)
        figures = (
            f"error at the head {before.distance:.4f} -> {after.distance:.4f} on {len(before.by_image)} images held "
            f"back, {'lower' if gained else 'higher'} on {lower} of {seen} where anything is detected, "
            f"{int(100 * sureness(*pair))} % sure; detections agree by {100 * before.agreement:.1f} % "
            f"before, {100 * after.agreement:.1f} % after"
        )
        if kept == least:
            return (figures,)
        more, sure = self.nodes[least] - self.nodes[kept], sureness(self.errors[least], self.errors[kept])
        return (
            f"left out: {self.forms[least].name}, error {self.errors[least].distance:.4f} for {more} nodes more, "
            f"{int(100 * sure)} % sure",
            figures,
        )

    def doubt(self) -> str:
        """What to do where the images can make nothing sure, whatever they show; else empty."""
        _, seen = lower_on(self.errors[self.kept], self.errors[0])
        need = fewest_images(_SURE)
        if seen >= need:
            return ""
        return (
            f"anything is detected on {seen} of the {len(self.errors[0].by_image)} images that corrections are judged "
            f"on: too few to tell a gain from chance with; calibrate with {HELD_BACK * need} images or more that show "
            f"objects, one in {HELD_BACK} is held back"
        )


def compare(task: Task, forms: Sequence[QuantizedForm]) -> Verdict:
    """Runs whole networks on the images held back and keeps the best.

    That is the one of the least error, unless another has fewer nodes, an error hardly larger, and the images do not
    make it sure that there is a difference. The first goes where another is as good with as few nodes, and where
    nothing is detected on any image. One pass over the images, with the float model and every form in memory.
    """
    models = []
    for form in forms:
        int8 = insert_qdq(task.model, task.placement, form.ranges, corrections=form.corrections)
        # The plugin library's activations round as well, and more than the pairs alone: they are part of the judging.
        models.append(requantize(int8, form.ranges.inputs).model)
    errors = head_errors(task, models)
    return Verdict(tuple(forms), errors=tuple(errors), nodes=tuple(len(model.graph.node) for model in models))


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
