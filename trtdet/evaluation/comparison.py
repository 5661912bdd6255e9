"""The difference of two detectors' COCO mAP on the same images, with a bootstrap interval."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from trtdet.bundle import Bundle
from trtdet.config import Config, Finite, NmsMode
from trtdet.errors import ConfigError, DataError, TrtdetWarning
from trtdet.evaluation.metrics import CocoMetric
from trtdet.evaluation.parts import NAMES, Of
from trtdet.evaluation.resampling import Bootstrap, mean_average_precision
from trtdet.evaluation.scoring import Evaluation
from trtdet.runtime.detector import Detector, Runtime

NEGLIGIBLE = 0.001
"""A loss of mAP, as a fraction, that nobody needs to look for: 0.1 points."""


@dataclass(frozen=True)
class Comparison:
    """Result of :func:`compare`; mAP of boxes or a part over IoU 0.50:0.95 as fractions, 0..1.

    ``difference`` is the mAP of the evaluation minus that of the reference, below 0 a loss; ``low`` and ``high`` are
    its interval.
    """

    reference: Evaluation
    difference: float
    low: float
    high: float
    images: int
    bootstrap: Bootstrap
    of: Of = "boxes"

    @property
    def verdict(self) -> str:
        """``a loss`` or ``a gain`` if the interval excludes zero, ``no loss shown`` if under 0.1 points may be lost, or
        what may be lost and about how many images would tell."""
        if self.high < 0:
            return "a loss"
        if self.low > 0:
            return "a gain"
        if self.low > -NEGLIGIBLE:
            return "no loss shown"
        return f"up to {-100 * self.low:.2f} points may be lost; about {self.images_to_tell} images would tell"

    @property
    def images_to_tell(self) -> int:
        """Number of such images, in two digits, on which the interval of a difference like this one would exclude zero;
        of a difference under 0.1 points, on which a loss of 0.1 points would show.

        The width of an interval falls with the square root of the number of images.
        """
        side = self.high - self.difference if self.difference < 0 else self.difference - self.low
        needed = self.images * (side / max(abs(self.difference), NEGLIGIBLE)) ** 2
        needed = max(needed, self.images + 1)
        step = 10 ** max(0, len(str(int(needed))) - 2)
        return int(math.ceil(needed / step) * step)

    def __str__(self) -> str:
        """One sentence, in points of mAP (hundredths)."""
        score, difference, low, high = (
            100 * value for value in (self.reference.score_of(self.of).map, self.difference, self.low, self.high)
        )
        name = NAMES[self.of]
        return (
            f"against {self.reference.file} ({name} {score:.2f}): {name} {difference:+.2f} "
            f"({100 * self.bootstrap.confidence:g} % interval {low:+.2f} .. {high:+.2f}, "
            f"paired bootstrap over {self.images} images, {self.bootstrap.resamples} resamples): {self.verdict}"
        )

    @property
    def score(self) -> PartScore:
        """The difference with its interval; ``map`` is the evaluation's."""
        score = self.reference.score_of(self.of).map + self.difference
        return PartScore(map=score, difference=self.difference, low=self.low, high=self.high)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        scores = self.reference.score_of(self.of)
        return {
            "file": self.reference.file,
            "ran_on": str(self.reference.run_info),
            "nms": self.reference.nms,
            "map": scores.map,
            "scores": scores.as_dict(),
            "difference": self.difference,
            "low": self.low,
            "high": self.high,
            **asdict(self.bootstrap),
            "images": self.images,
            "verdict": self.verdict,
        }


class PartScore(TypedDict):
    """Score of boxes or a part against a reference on the same images, as fractions.

    ``map`` is None and ``difference`` the agreement minus 1 without annotations; the reference itself has no ``low``
    and ``high``.
    """

    map: Finite | None
    difference: Finite
    low: Finite | None
    high: Finite | None


class PartScored(Protocol):
    """What has a score of boxes, as the fields of :class:`PartScore`, and those of the ``parts``."""

    @property
    def difference(self) -> float: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...
    @property
    def parts(self) -> Mapping[Of, PartScore]: ...


def part_scores(evaluation: Evaluation, reference: Evaluation | None) -> dict[Of, PartScore]:
    """The mAP of each part against a reference on the same images; a part without a score is left out.

    Without a reference, the evaluation is the reference. Raises ConfigError, DataError as :func:`compare`.
    """
    scores: dict[Of, PartScore] = {}
    for of in evaluation.scored_parts:
        score = evaluation.score_of(of).map
        if reference is None:
            scores[of] = PartScore(map=score, difference=0.0, low=None, high=None)
        else:
            scores[of] = {**compare(evaluation, reference, of=of).score, "map": score}
    return scores


def each_score(scored: PartScored) -> dict[Of, PartScore]:
    """The differences of boxes and of the parts."""
    boxes = PartScore(map=None, difference=scored.difference, low=scored.low, high=scored.high)
    return {"boxes": boxes, **scored.parts}


def decisive(scored: PartScored) -> tuple[Of, PartScore]:
    """Boxes or the part that may have lost most, with the lowest ``low``, and its score."""

    def worst(pair: tuple[Of, PartScore]) -> float:
        low = pair[1]["low"]
        return pair[1]["difference"] if low is None else low

    return min(each_score(scored).items(), key=worst)


def least_difference(scored: PartScored) -> float:
    """Difference of boxes or of a part, whichever lost most."""
    return min(score["difference"] for score in each_score(scored).values())


def spread_text(score: PartScore) -> str:
    """The difference with its interval in points (hundredths); empty for the reference itself."""
    if score["low"] is None or score["high"] is None:
        return ""
    return f"{100 * score['difference']:+.2f} ({interval_text(score['low'], score['high'])})"


def interval_text(low: float, high: float) -> str:
    """An interval of differences in points (hundredths)."""
    return f"{100 * low:+.2f} .. {100 * high:+.2f}"


def open_pair(
    target: Path,
    reference: Path,
    config: Config | None = None,
    nms: NmsMode | Literal["auto"] = "auto",
    runtime: Runtime = "auto",
) -> tuple[Detector, Detector]:
    """Opens two detectors, each a bundle's folder or an ONNX file, for a comparison.

    ``config``, ``nms`` and ``runtime`` open ``target`` as in :meth:`Detector.open`. A reference that is an ONNX file
    uses the configuration and NMS mode of the target. A reference bundle runs its engine if possible, unless the
    runtime is ``onnxruntime``. Raises ConfigError if the classes differ, or a configuration is missing or superfluous;
    BundleError, ModelError, BackendError if a detector cannot be opened or run.
    """
    detector = Detector.open(target, config, nms, runtime=runtime)
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
    of: Of = "boxes",
) -> Comparison:
    """Computes the mAP difference of two evaluations on the same images, with an interval.

    The interval is a paired bootstrap: each resample draws images with replacement and scores both detectors on them
    (percentile interval of Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13). An image drawn
    twice counts as two images. As in COCO, the mean leaves out classes without a box; a resample without any box is
    left out too. The interval covers the choice of evaluation images, not that of calibration images. ``progress`` gets
    the number of resamples scored and their total.

    Raises:
        ConfigError: the classes differ.
        DataError: the images or their boxes differ, there is no box to find, the installed evaluator matches
            differently from pycocotools, or there is no such part.

    Warns:
        TrtdetWarning: the NMS thresholds differ, so that more than the models is compared.
    """
    first, second = evaluation.metric, reference.metric
    check_pair((evaluation.file, first), (reference.file, second), "a paired comparison")
    pair = first.matches(of), second.matches(of)
    if [matches.truths.tolist() for matches in pair[0]] != [matches.truths.tolist() for matches in pair[1]]:
        raise DataError(
            f"'{evaluation.file}' and '{reference.file}' were scored on different boxes of the same images; use the "
            "same annotations for both"
        )
    if not pair[0]:
        raise DataError(
            f"'{first.dataset.annotations}' has no box to find in the images that were scored; score images with boxes"
        )
    images = len(first.image_ids)
    whole = np.ones((1, images), np.int32)
    for scored, matches in zip((evaluation, reference), pair, strict=True):
        score = mean_average_precision(matches, whole)
        check_score(scored.file, scored.metric.engine, scored.score_of(of).map, got=score)
    warn_of_thresholds(evaluation, reference)

    low, high = bootstrap.interval_of(
        lambda weights: mean_average_precision(pair[0], weights) - mean_average_precision(pair[1], weights),
        images,
        progress,
    )
    return Comparison(
        reference=reference,
        difference=evaluation.score_of(of).map - reference.score_of(of).map,
        low=low,
        high=high,
        images=images,
        bootstrap=bootstrap,
        of=of,
    )


def check_pair(first: tuple[str, CocoMetric], second: tuple[str, CocoMetric], purpose: str) -> None:
    """Raises ConfigError if two metrics, each with its file's name, differ in classes, DataError if in images."""
    check_classes(*((file, metric.dataset.classes) for file, metric in (first, second)))
    ours, theirs = first[1].image_ids, second[1].image_ids
    if ours != theirs:
        raise DataError(
            f"'{first[0]}' ran on {len(ours)} images and '{second[0]}' on others ({len(theirs)}); {purpose} needs the "
            "same images for both"
        )


def check_classes(target: tuple[str, tuple[str, ...]], reference: tuple[str, tuple[str, ...]]) -> None:
    """Raises ConfigError if two files, each a name and its classes, differ in classes; the order may differ."""
    problems = []
    for (file, classes), (_, others) in ((target, reference), (reference, target)):
        extra = [label for label in classes if label not in others]
        if extra:
            listed = f"{', '.join(extra[:3])}{', ...' if len(extra) > 3 else ''}"
            problems.append(f"'{file}' has {len(extra)} that the other lacks ({listed})")
    if problems:
        names = " and ".join(f"'{file}' ({len(classes)})" for file, classes in (target, reference))
        raise ConfigError(
            f"the classes of {names} differ: {'; '.join(problems)}; only detectors of the same classes can be compared"
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
    """Raises DataError if the mAP of the matches, ``got`` (1,), differs from the evaluator's, ``score``."""
    if abs(got[0] - score) > 1e-6:
        raise DataError(
            f"the matches of '{file}' give mAP {got[0]:.6f} where {engine} computes {score:.6f}; this version of it "
            "cannot be used for a comparison, install another"
        )
