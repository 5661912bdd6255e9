"""How far the score of one model depends on the order in which the CPU adds up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trtdet.data import ImageCache
from trtdet.errors import ConfigError
from trtdet.evaluation.agreement import Agreement, AgreementOptions, agreement_of
from trtdet.evaluation.scoring import Evaluation, evaluate
from trtdet.runtime.detector import Detector


@dataclass(frozen=True)
class EvaluatorSpread:
    """What :func:`evaluator_spread` found.

    Attributes:
        difference: mAP with onnxruntime's optimisations minus mAP without, 0..1; None without annotations.
        agreement: of the detections with them, with those without.
    """

    difference: float | None
    agreement: Agreement

    def __str__(self) -> str:
        moved = "" if self.difference is None else f"mAP {100 * self.difference:+.2f}, "
        return (
            f"evaluator's spread: the same model with onnxruntime's optimisations: {moved}{self.agreement}; rounding "
            "alone does that"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"difference": self.difference, "agreement": self.agreement.as_dict()}


def evaluator_spread(
    detector: Detector,
    evaluation: Evaluation,
    options: AgreementOptions = AgreementOptions(),
    progress: Callable[[int, int], None] = lambda done, total: None,
    cache: ImageCache | None = None,
) -> EvaluatorSpread:
    """Runs a model once more, as onnxruntime optimises it, and compares it with itself.

    The two differ by the order of sums in float32 alone. Of two models that are compared, a difference of that size may
    be of the evaluator.

    Args:
        detector: the one that was evaluated.
        evaluation: its score; the same images are run.
        options: of the agreement.
        progress: called with images done and in all.
        cache: shared with the passes before.

    Raises:
        ConfigError: the detector runs an engine, which adds up in one order only.
        DataError: an image cannot be read.
    """
    check_spread(detector)
    dataset, found = evaluation.metric.dataset, evaluation.metric.detections
    read = tuple(image for image in dataset.images if image.id in found)
    other = evaluate(detector, replace(dataset, images=read), progress, cache, optimised=True)
    difference = other.result.map - evaluation.result.map if dataset.annotated else None
    return EvaluatorSpread(difference, agreement_of(other.metric, evaluation.metric, options))


def check_spread(detector: Detector) -> None:
    """Before anything is run.

    Raises:
        ConfigError: the detector runs an engine, which adds up in one order only.
    """
    if detector.runner.model is None:
        raise ConfigError(
            f"the evaluator's spread is that of models on the CPU, and '{detector.file}' is an engine; leave it out or "
            "add --runtime onnxruntime"
        )
