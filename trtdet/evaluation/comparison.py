"""The difference of two detectors' COCO mAP over the same images, and the interval that these images give it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from trtdet.bundle import Bundle
from trtdet.config import Config, NmsMode
from trtdet.errors import ConfigError, DataError, TrtdetWarning
from trtdet.evaluation.matching import ClassMatches
from trtdet.evaluation.metrics import CocoResult
from trtdet.evaluation.resampling import Bootstrap, draws, mean_average_precision
from trtdet.evaluation.scoring import Evaluation
from trtdet.runtime.detector import Detector, Runtime


@dataclass(frozen=True)
class Comparison:
    """The difference that :func:`compare` found; mAP over IoU 0.50:0.95 as fractions, 0..1.

    Attributes:
        reference: the evaluation compared with.
        difference: mAP of the evaluation minus that of the reference; below 0 is a loss.
        low, high: the interval of the difference.
        images: how many images were drawn from.
        bootstrap: how they were drawn.
        of: what overlaps are of.
    """

    reference: Evaluation
    difference: float
    low: float
    high: float
    images: int
    bootstrap: Bootstrap
    of: Literal["boxes", "masks"] = "boxes"

    @property
    def verdict(self) -> str:
        """``a loss`` or ``a gain`` where the interval excludes zero, else ``no loss shown``."""
        if self.high < 0:
            return "a loss"
        return "a gain" if self.low > 0 else "no loss shown"

    def __str__(self) -> str:
        """One sentence, in points of mAP (hundredths)."""
        score, difference, low, high = (
            100 * value for value in (_result(self.reference, self.of).map, self.difference, self.low, self.high)
        )
        name = "mask mAP" if self.of == "masks" else "mAP"
        return (
            f"against {self.reference.file} ({name} {score:.2f}): {name} {difference:+.2f} "
            f"({100 * self.bootstrap.confidence:g} % interval {low:+.2f} .. {high:+.2f}, "
            f"paired bootstrap over {self.images} images, {self.bootstrap.resamples} resamples): {self.verdict}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "file": self.reference.file,
            "ran_on": str(self.reference.run_info),
            "nms": self.reference.nms,
            "map": _result(self.reference, self.of).map,
            "scores": _result(self.reference, self.of).as_dict(),
            "difference": self.difference,
            "low": self.low,
            "high": self.high,
            "confidence": self.bootstrap.confidence,
            "resamples": self.bootstrap.resamples,
            "seed": self.bootstrap.seed,
            "images": self.images,
            "verdict": self.verdict,
        }


Finite = Annotated[float, Field(allow_inf_nan=False)]


class MaskScore(TypedDict):
    """A score of masks, as a row of variants holds it; mAP and differences as fractions, 0..1.

    ``low`` and ``high`` are None of what others are compared with.
    """

    map: Finite
    difference: Finite
    low: Finite | None
    high: Finite | None


def mask_score(evaluation: Evaluation, reference: Evaluation | None) -> MaskScore | None:
    """The score of masks beside a reference's; None where the detector or the annotations have none.

    Args:
        evaluation: the score.
        reference: of the same images, with masks too; None for the reference itself.

    Raises:
        ConfigError, DataError: as of :func:`compare`.
    """
    if evaluation.masks is None:
        return None
    found = compare(evaluation, reference, of="masks") if reference is not None else None
    return {
        "map": evaluation.masks.map,
        "difference": found.difference if found else 0.0,
        "low": found.low if found else None,
        "high": found.high if found else None,
    }


def open_pair(
    target: Path,
    reference: Path,
    config: Config | None = None,
    nms: NmsMode | Literal["auto"] = "auto",
    runtime: Runtime = "auto",
) -> tuple[Detector, Detector]:
    """Opens two detectors for a comparison.

    Args:
        target: a bundle's folder or an ONNX file.
        reference: likewise. An ONNX file is read and suppressed as ``target`` is: by ``config``, or by the
            configuration in the target's bundle.
        config: needed where ``target`` is an ONNX file.
        nms: as in :meth:`Detector.open`, for ``target``.
        runtime: likewise; the engine of a reference bundle is run where that is possible, unless this is
            ``onnxruntime``.

    Raises:
        ConfigError: the two do not have the same classes, or a configuration is missing or too many.
        BundleError, ModelError, BackendError: a detector cannot be opened or run.
    """
    detector = Detector.open(target, config, nms, runtime)
    if reference.is_dir():
        other = Detector.open(reference, runtime="auto" if runtime == "engine" else runtime)
    else:
        other = Detector.open(reference, config or Bundle(target, verify=False).config, detector.nms_mode)
    check_classes((str(target), detector.classes), (str(reference), other.classes))
    return detector, other


def compare(
    evaluation: Evaluation,
    reference: Evaluation,
    bootstrap: Bootstrap = Bootstrap(),
    progress: Callable[[int, int], None] = lambda done, total: None,
    of: Literal["boxes", "masks"] = "boxes",
) -> Comparison:
    """The difference of two scores over the same images, with an interval.

    A paired bootstrap: the images are drawn anew with replacement, both detectors are scored on the same draw, and the
    interval holds the middle part of the differences (the percentile interval of Efron and Tibshirani 1993, An
    Introduction to the Bootstrap, chapter 13). An image that is drawn twice counts as two images. A class of which a
    draw has no box is left out of its mean, as everywhere in COCO; a draw that has no box at all is left out itself.
    The interval speaks of the choice of images alone, not of the choice of calibration images.

    Args:
        evaluation: the score to be judged.
        reference: the score it is compared with.
        bootstrap: how the images are drawn.
        progress: called with resamples done and in all.
        of: what overlaps are of; masks where both evaluations have them.

    Raises:
        ConfigError: the classes differ.
        DataError: the images or their boxes differ, there is nothing to find, the installed evaluator matches
            otherwise than pycocotools, or there are no masks.

    Warns:
        TrtdetWarning: the thresholds of the suppression differ, so that more than the models is compared.
    """
    pair = _matches(evaluation, reference, of)
    warn_of_thresholds(evaluation, reference)
    images = len(evaluation.metric.image_ids)
    differences: list[NDArray[np.float64]] = []
    done = 0
    for weights in draws(images, bootstrap):
        ours, theirs = (mean_average_precision(matches, weights) for matches in pair)
        differences.append(ours - theirs)
        done += len(weights)
        progress(done, bootstrap.resamples)
    low, high = bootstrap.interval(np.concatenate(differences))
    return Comparison(
        reference=reference,
        difference=_result(evaluation, of).map - _result(reference, of).map,
        low=low,
        high=high,
        images=images,
        bootstrap=bootstrap,
        of=of,
    )


def _result(evaluation: Evaluation, of: Literal["boxes", "masks"]) -> CocoResult:
    if of == "boxes":
        return evaluation.result
    if evaluation.masks is None:
        raise DataError(f"'{evaluation.file}' was scored without masks")
    return evaluation.masks


def _matches(
    evaluation: Evaluation, reference: Evaluation, of: Literal["boxes", "masks"]
) -> tuple[tuple[ClassMatches, ...], tuple[ClassMatches, ...]]:
    """The matches of both, which are of the same images and boxes and give the scores of both."""
    first, second = evaluation.metric, reference.metric
    check_classes((evaluation.file, first.dataset.classes), (reference.file, second.dataset.classes))
    if first.image_ids != second.image_ids:
        raise DataError(
            f"'{evaluation.file}' was scored on {len(first.image_ids)} images and '{reference.file}' on others "
            f"({len(second.image_ids)}); a paired comparison needs the same images for both"
        )
    pair = (first.matches(), second.matches()) if of == "boxes" else (first.mask_matches(), second.mask_matches())
    if [matches.truths.tolist() for matches in pair[0]] != [matches.truths.tolist() for matches in pair[1]]:
        raise DataError(
            f"'{evaluation.file}' and '{reference.file}' were scored on different boxes of the same images; use the "
            "same annotations for both"
        )
    if not pair[0]:
        raise DataError(f"'{first.dataset.annotations}' has no box to find in the images that were scored")
    whole = np.ones((1, len(first.image_ids)), np.int32)
    for scored, matches in zip((evaluation, reference), pair, strict=True):
        check_score(scored.file, scored.metric.engine, _result(scored, of).map, mean_average_precision(matches, whole))
    return pair


def check_classes(target: tuple[str, tuple[str, ...]], reference: tuple[str, tuple[str, ...]]) -> None:
    """Both are a file's name and its classes, which may be in another order.

    Raises:
        ConfigError: the classes differ.
    """
    (name, classes), (other_name, others) = target, reference
    if set(classes) == set(others):
        return
    problems = [
        f"'{file}' has {len(extra)} that the other lacks ({', '.join(extra[:3])}{', ...' if len(extra) > 3 else ''})"
        for file, extra in (
            (name, [label for label in classes if label not in others]),
            (other_name, [label for label in others if label not in classes]),
        )
        if extra
    ]
    raise ConfigError(
        f"the classes of '{name}' ({len(classes)}) and '{other_name}' ({len(others)}) differ: {'; '.join(problems)}; "
        "only detectors of the same classes can be compared"
    )


def warn_of_thresholds(evaluation: Evaluation, reference: Evaluation) -> None:
    ours, theirs = evaluation.thresholds.model_dump(), reference.thresholds.model_dump()
    differing = [f"{key} {ours[key]} against {theirs[key]}" for key in ours if ours[key] != theirs[key]]
    if differing:
        warnings.warn(
            f"'{evaluation.file}' and '{reference.file}' suppress with different thresholds, so more than the models "
            f"is compared: {', '.join(differing)}",
            TrtdetWarning,
            stacklevel=3,
        )


def check_score(file: str, engine: str, score: float, got: NDArray[np.float64]) -> None:
    """The interval is worth nothing if the matches do not give the score that the evaluator itself gave.

    Args:
        file: whose detections were matched.
        engine: the evaluator.
        score: its mAP, 0..1.
        got: (1,), the mAP of the matches.

    Raises:
        DataError: they differ.
    """
    if abs(got[0] - score) > 1e-6:
        raise DataError(
            f"the matches of '{file}' give mAP {got[0]:.6f} where {engine} computes {score:.6f}; this version of it "
            "cannot be used for a comparison, install another"
        )
