"""The gate: it compares several INT8 forms of the whole network and keeps the one that moves detections least.

The error of one layer does not show its effect on detections. So whole networks run on held-back images and are
compared at the decoded boxes and scores. All forms see the same images, so hard images count equally for each. If the
images cannot tell two forms apart, the simpler form is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import onnx

from trtdet.calibration import Ranges, expose
from trtdet.passes.provenance import Origin, origin_of
from trtdet.quantization.corrections.base import Correction
from trtdet.quantization.corrections.head_ranges import Start
from trtdet.quantization.head_error import HeadError, chooses_rows, confidence, fewest_images, lower_on
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.plugin_fusion import requantize
from trtdet.quantization.qdq import Corrections, insert_qdq
from trtdet.quantization.sources import HELD_BACK, Sources

_SURE = 0.95  # a lower error justifies more nodes from this confidence on; a much lower error always does
_MUCH = 1.1  # a simpler form is rejected if its error is more than this many times the best one
_STANDING = 1.05  # the same limit for the uncorrected form


@dataclass(frozen=True, eq=False)
class Task:
    """The inputs of a correction run."""

    model: onnx.ModelProto
    placement: QdqPlacement
    candidates: Mapping[str, Ranges]  # by rule; the first is the reference for the others and for the corrections
    corrections: tuple[Correction, ...]  # allowed corrections, in the order of the registry
    fit: Sequence[Path]  # images to compute corrections from
    held: Sequence[Path]  # held-back images
    sources: Sources
    start: Start = Start()

    @property
    def plain(self) -> Ranges:
        return self.start.plain or self.first

    @property
    def first(self) -> Ranges:
        return next(iter(self.candidates.values()))


@dataclass(frozen=True, eq=False)
class QuantizedForm:
    """One way to write the whole network in INT8; the name is for people."""

    name: str
    ranges: Ranges
    corrections: Corrections = Corrections()


@dataclass(frozen=True, eq=False)
class Verdict:
    """Result of :func:`compare`: the forms, the uncorrected one first, with each one's error at the decoded boxes and
    scores on the held-back images and the number of its nodes that cost time."""

    forms: tuple[QuantizedForm, ...]
    errors: tuple[HeadError, ...]
    nodes: tuple[int, ...]

    @cached_property
    def least(self) -> int:
        """Position of the least error; on a tie not the uncorrected form, since the others had smaller layer errors."""
        return min(range(len(self.errors)), key=lambda index: (self.errors[index].distance, index == 0))

    @cached_property
    def kept(self) -> int:
        least = self.least
        best = self.errors[least]
        _, detected = lower_on(best, self.errors[0])
        simpler = []
        for index, error in enumerate(self.errors):
            near = error.distance <= (_MUCH if index else _STANDING) * best.distance
            if detected and self.nodes[index] < self.nodes[least] and near and confidence(best, error) < _SURE:
                simpler.append(index)
        return min(simpler, key=lambda index: (self.nodes[index], self.errors[index].distance), default=least)

    def sentences(self) -> tuple[str, ...]:
        """The reason for the choice, then the error before and after it. The agreement is only informative: it ranks
        forms as the error does, see ``docs/results/accuracy.md``."""
        kept, least, before = self.kept, self.least, self.errors[0]
        others = range(1, len(self.forms))
        after = self.errors[kept or min(others, key=lambda index: self.errors[index].distance, default=0)]
        gained = after.distance <= before.distance
        pair = (after, before) if gained else (before, after)
        lower, detected = lower_on(*pair)
        figures = (
            f"error at the head {before.distance:.4f} -> {after.distance:.4f} on {len(before.by_image)} images held "
            f"back, {'lower' if gained else 'higher'} on {lower} of {detected} where anything is detected, "
            f"{int(100 * confidence(*pair))} % sure; detections agree by {100 * before.agreement:.1f} % "
            f"before, {100 * after.agreement:.1f} % after"
        )
        if kept == least:
            return (figures,)
        more, sure = self.nodes[least] - self.nodes[kept], confidence(self.errors[least], self.errors[kept])
        left_out = f"{self.forms[least].name}, error {self.errors[least].distance:.4f} for {more} nodes more"
        return (f"left out: {left_out}, {int(100 * sure)} % sure", figures)

    def doubt(self) -> str:
        """Advice if there are too few images with detections for any certain result; else empty."""
        _, detected = lower_on(self.errors[self.kept], self.errors[0])
        need = fewest_images(_SURE)
        if detected >= need:
            return ""
        return (
            f"anything is detected on {detected} of the {len(self.errors[0].by_image)} images that corrections are "
            f"judged on: too few to tell a gain from chance with; calibrate with {HELD_BACK * need} images or more "
            f"that show objects, one in {HELD_BACK} is held back"
        )


def compare(task: Task, forms: Sequence[QuantizedForm]) -> Verdict:
    """Runs whole networks on the held-back images and keeps the best form.

    The best form has the least error. A form with fewer nodes wins if its error is hardly larger and the difference is
    not certain. The first form loses ties with as few nodes, and loses if no image has a detection. One pass over the
    images, with the float model and all forms in memory.
    """
    models = []
    for form in forms:
        int8 = insert_qdq(task.model, task.placement, form.ranges, corrections=form.corrections)
        # Activations of the plugin library add rounding of their own, which counts as well.
        models.append(requantize(int8, form.ranges.inputs).model)
    errors = head_errors(task, models)
    return Verdict(tuple(forms), errors=tuple(errors), nodes=tuple(map(_costly, models)))


def _costly(model: onnx.ModelProto) -> int:
    """Number of nodes, without the Adds of shifts: these are written only where they take no kernel."""
    origins = origin_of(model)
    shifts = {node.name for node in model.graph.node if node.op_type == "Add" and node.name in origins}
    return len(model.graph.node) - sum(origins[name] is Origin.CHANNEL_MAP for name in shifts)


def head_errors(task: Task, quantized: Sequence[onnx.ModelProto]) -> list[HeadError]:
    head = task.sources.head
    exposed = [expose(model, head.names) for model in (task.model, *quantized)]
    chosen = chooses_rows(task.model, head.names)
    errors = [HeadError(chosen, head.size) for _ in quantized]
    for reference, *others in task.sources.outputs(exposed, task.held, "correcting: detections"):
        expected, parts = head.read(reference), head.parts_of(reference)
        for error, other in zip(errors, others, strict=True):
            error.update(expected, head.read(other), (parts, head.parts_of(other)))
    return errors
