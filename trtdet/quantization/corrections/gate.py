"""The gate: of several ways to write the whole network in INT8, the way that moves detections least is kept.

An error at one layer does not say what it does to a detection, so whole networks are run on images that nothing was
computed from, and compared at the decoded boxes and scores: the same images for all of them, so that what is hard in an
image counts for each alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from trtdet.calibration import Ranges, expose
from trtdet.quantization.corrections.base import Correction
from trtdet.quantization.corrections.sources import Sources
from trtdet.quantization.head_error import HeadError, sureness
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.plugin_fusion import requantize
from trtdet.quantization.precision import PrecisionPlan
from trtdet.quantization.qdq import Corrections, insert_qdq


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
    """

    model: onnx.ModelProto
    placement: QdqPlacement
    candidates: Mapping[str, Ranges]
    corrections: tuple[Correction, ...]
    fit: Sequence[Path]
    held: Sequence[Path]
    sources: Sources

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
        kept: position of the whole that is kept.
    """

    wholes: tuple[Whole, ...]
    errors: tuple[HeadError, ...]
    kept: int

    @property
    def best(self) -> Whole:
        return self.wholes[self.kept]

    @property
    def other(self) -> int:
        """Position of the whole that is spoken of beside the first: the kept, or the best that was not kept."""
        others = range(1, len(self.wholes))
        return self.kept or min(others, key=lambda index: self.errors[index].distance, default=0)

    @property
    def sure(self) -> float:
        """How sure it is that the kept is better than the first, 0..1; 0 where that is the first itself."""
        return sureness(self.errors[self.kept], self.errors[0])

    def sentence(self) -> str:
        """The error at the head before and after."""
        before, after = self.errors[0], self.errors[self.other]
        images = len(before.by_image)
        return f"error at the head {before.distance:.4f} -> {after.distance:.4f} on {images} images held back"


def compare(task: Task, wholes: Sequence[Whole]) -> Verdict:
    """Runs whole networks on the images held back and keeps the best.

    The first stands unless another is at least as good. One pass over the images, with the float model and every whole
    in memory; an image's outputs are let go as soon as they are compared.

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
    kept = min(range(len(wholes)), key=lambda index: (errors[index].distance, index == 0))
    return Verdict(tuple(wholes), tuple(errors), kept)


def head_errors(task: Task, quantized: Sequence[onnx.ModelProto]) -> list[HeadError]:
    """The error of each INT8 model at the decoded boxes and scores, on the images held back."""
    head = task.sources.head
    exposed = [expose(model, head.names) for model in (task.model, *quantized)]
    errors = [HeadError() for _ in quantized]
    for reference, *others in task.sources.outputs(exposed, task.held, "correcting: detections"):
        expected = head.read(reference)
        for error, other in zip(errors, others, strict=True):
            error.update(expected, head.read(other))
    return errors
