"""The difference of two detectors' COCO mAP over the same images, and the interval that these images give it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trtdet.bundle import Bundle
from trtdet.config import Config, NmsMode
from trtdet.errors import ConfigError, DataError, TrtdetWarning
from trtdet.evaluation.matching import ClassMatches
from trtdet.evaluation.scoring import Evaluation
from trtdet.runtime.detector import Detector, Runtime

RECALLS = np.linspace(0.0, 1.0, 101)
"""COCO's recall points, to the bit."""

_DRAWN = 100
"""How many resamples are scored at a time, between two reports of progress."""

_HELD = 4_000_000
"""How many detections of a class, over several resamples, are held at a time: 32 MB an array."""


@dataclass(frozen=True)
class Bootstrap:
    """How often the images are drawn anew.

    Attributes:
        resamples: at least 100.
        confidence: the part of the resamples that the interval holds, above 0 and below 1.
        seed: of the draws; the same seed gives the same interval.

    Raises:
        ConfigError: a value is out of range.
    """

    resamples: int = 1000
    confidence: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        if self.resamples < 100:
            raise ConfigError(
                f"--resamples must be at least 100 for an interval to mean something, got {self.resamples}"
            )
        if not 0 < self.confidence < 1:
            raise ConfigError(f"confidence must be above 0 and below 1, got {self.confidence}")


@dataclass(frozen=True)
class Comparison:
    """The difference that :func:`compare` found; mAP over IoU 0.50:0.95 as fractions, 0..1.

    Attributes:
        reference: the evaluation compared with.
        difference: mAP of the evaluation minus that of the reference; below 0 is a loss.
        low, high: the interval of the difference.
        images: how many images were drawn from.
        bootstrap: how they were drawn.
    """

    reference: Evaluation
    difference: float
    low: float
    high: float
    images: int
    bootstrap: Bootstrap

    @property
    def verdict(self) -> str:
        """``a loss`` or ``a gain`` where the interval excludes zero, else ``no loss shown``."""
        if self.high < 0:
            return "a loss"
        return "a gain" if self.low > 0 else "no loss shown"

    def __str__(self) -> str:
        """One sentence, in points of mAP (hundredths)."""
        score, difference, low, high = (
            100 * value for value in (self.reference.result.map, self.difference, self.low, self.high)
        )
        return (
            f"against {self.reference.file} (mAP {score:.2f}): mAP {difference:+.2f} "
            f"({100 * self.bootstrap.confidence:g} % interval {low:+.2f} .. {high:+.2f}, "
            f"paired bootstrap over {self.images} images, {self.bootstrap.resamples} resamples): {self.verdict}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "file": self.reference.file,
            "ran_on": str(self.reference.run_info),
            "nms": self.reference.nms,
            "map": self.reference.result.map,
            "difference": self.difference,
            "low": self.low,
            "high": self.high,
            "confidence": self.bootstrap.confidence,
            "resamples": self.bootstrap.resamples,
            "seed": self.bootstrap.seed,
            "images": self.images,
            "verdict": self.verdict,
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
    _check_classes((str(target), detector.classes), (str(reference), other.classes))
    return detector, other


def compare(
    evaluation: Evaluation,
    reference: Evaluation,
    bootstrap: Bootstrap = Bootstrap(),
    progress: Callable[[int, int], None] = lambda done, total: None,
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

    Raises:
        ConfigError: the classes differ.
        DataError: the images or their boxes differ, there is nothing to find, or the installed evaluator matches
            otherwise than pycocotools.

    Warns:
        TrtdetWarning: the thresholds of the suppression differ, so that more than the models is compared.
    """
    pair = _matches(evaluation, reference)
    _warn_of_thresholds(evaluation, reference)
    images = len(evaluation.metric.image_ids)
    differences: list[NDArray[np.float64]] = []
    done = 0
    for weights in _draws(images, bootstrap):
        ours, theirs = (mean_average_precision(matches, weights) for matches in pair)
        differences.append(ours - theirs)
        done += len(weights)
        progress(done, bootstrap.resamples)
    tail = 50 * (1 - bootstrap.confidence)
    low, high = np.nanpercentile(np.concatenate(differences), [tail, 100 - tail])
    return Comparison(
        reference=reference,
        difference=evaluation.result.map - reference.result.map,
        low=float(low),
        high=float(high),
        images=images,
        bootstrap=bootstrap,
    )


def _matches(
    evaluation: Evaluation, reference: Evaluation
) -> tuple[tuple[ClassMatches, ...], tuple[ClassMatches, ...]]:
    """The matches of both, which are of the same images and boxes and give the scores of both."""
    first, second = evaluation.metric, reference.metric
    _check_classes((evaluation.file, first.dataset.classes), (reference.file, second.dataset.classes))
    if first.image_ids != second.image_ids:
        raise DataError(
            f"'{evaluation.file}' was scored on {len(first.image_ids)} images and '{reference.file}' on others "
            f"({len(second.image_ids)}); a paired comparison needs the same images for both"
        )
    pair = first.matches(), second.matches()
    if [matches.truths.tolist() for matches in pair[0]] != [matches.truths.tolist() for matches in pair[1]]:
        raise DataError(
            f"'{evaluation.file}' and '{reference.file}' were scored on different boxes of the same images; use the "
            "same annotations for both"
        )
    if not pair[0]:
        raise DataError(f"'{first.dataset.annotations}' has no box to find in the images that were scored")
    whole = np.ones((1, len(first.image_ids)), np.int32)
    for scored, matches in zip((evaluation, reference), pair, strict=True):
        _check_score(scored, float(mean_average_precision(matches, whole)[0]))
    return pair


def mean_average_precision(matches: Sequence[ClassMatches], weights: NDArray[np.int32]) -> NDArray[np.float64]:
    """COCO's mAP over choices of images, from the matches.

    Args:
        matches: of every class that has a box to find; C of them.
        weights: (B, I), how often each of B choices holds each of I images.

    Returns:
        (B,), 0..1: the mean over IoU thresholds, recall points and the classes that have a box in the choice; NaN where
        no class has. With every weight 1 it is the evaluators' mAP.
    """
    total, classes = np.zeros(len(weights)), np.zeros(len(weights), np.int64)
    for of_class in matches:
        rows = max(1, _HELD // max(1, len(of_class.images)))
        for start in range(0, len(weights), rows):
            part = slice(start, start + rows)
            truths = weights[part] @ of_class.truths
            present = np.flatnonzero(truths) + start
            total[present] += _average_precision(of_class, weights[present], truths[present - start])
            classes[present] += 1
    mean: NDArray[np.float64] = np.full(len(weights), np.nan)
    return np.divide(total, classes, out=mean, where=classes > 0)


def _average_precision(
    matches: ClassMatches, weights: NDArray[np.int32], truths: NDArray[np.int64]
) -> NDArray[np.float64]:
    """A class's average precision over (B, I) weights that hold (B,) boxes, none of them zero; (B,)."""
    # Precision is highest, and recall rises, only where a detection hits: all sums are needed just there.
    found = _cumulative(matches, weights, slice(None))
    result: NDArray[np.float64] = np.zeros(len(weights))
    for hit, ignored in zip(matches.hits, matches.ignored, strict=True):
        hits, skipped = np.flatnonzero(hit), np.flatnonzero(ignored)
        if not hits.size:
            continue
        right = _cumulative(matches, weights, hits)
        counted = found[:, hits]
        if skipped.size:
            before = np.pad(_cumulative(matches, weights, skipped), ((0, 0), (1, 0)))
            counted = counted - before[:, np.searchsorted(skipped, hits)]
        # The evaluators add this to keep from dividing by zero.
        precision = right / (counted + np.spacing(1))
        envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        # Each hit carries its precision to the recall points that are reached there first.
        reached = np.searchsorted(RECALLS, right / truths[:, None], side="right")
        result += np.einsum("bh,bh->b", np.diff(reached, axis=1, prepend=0), envelope)
    return result / (len(RECALLS) * len(matches.hits))


def _cumulative(matches: ClassMatches, weights: NDArray[np.int32], chosen: Any) -> NDArray[np.int64]:
    """How many of the chosen detections there are up to and with each, in falling order of score."""
    return np.cumsum(np.take(weights, matches.images[chosen], axis=1), axis=1, dtype=np.int64)


def _draws(images: int, bootstrap: Bootstrap) -> Iterator[NDArray[np.int32]]:
    """(B, I) weights a block, all blocks together holding every resample."""
    generator = np.random.default_rng(bootstrap.seed)
    for start in range(0, bootstrap.resamples, _DRAWN):
        size = min(_DRAWN, bootstrap.resamples - start)
        yield generator.multinomial(images, np.full(images, 1 / images), size=size).astype(np.int32)


def _check_classes(target: tuple[str, tuple[str, ...]], reference: tuple[str, tuple[str, ...]]) -> None:
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


def _warn_of_thresholds(evaluation: Evaluation, reference: Evaluation) -> None:
    ours, theirs = evaluation.thresholds.model_dump(), reference.thresholds.model_dump()
    differing = [f"{key} {ours[key]} against {theirs[key]}" for key in ours if ours[key] != theirs[key]]
    if differing:
        warnings.warn(
            f"'{evaluation.file}' and '{reference.file}' suppress with different thresholds, so more than the models "
            f"is compared: {', '.join(differing)}",
            TrtdetWarning,
            stacklevel=3,
        )


def _check_score(evaluation: Evaluation, got: float) -> None:
    """The interval is worth nothing if the matches do not give the score that the evaluator itself gave."""
    if abs(got - evaluation.result.map) > 1e-6:
        raise DataError(
            f"the matches of '{evaluation.file}' give mAP {got:.6f} where {evaluation.metric.engine} computes "
            f"{evaluation.result.map:.6f}; this version of it cannot be used for a comparison, install another"
        )
