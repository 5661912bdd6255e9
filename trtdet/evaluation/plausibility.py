"""Whether a detector looks as if it worked on a set of images, without annotations; and which key is likely wrong.

A wrong key of the configuration builds like a right one. What tells them apart is that a detector that is read right
finds in the mirror image of a picture the same objects, mirrored: the figure of an image is the sum, over the pairs of
detections of a class that lie on each other once one is mirrored back, of the square of the smaller score times
``2 * IoU - 1``. It is small where scores are low, where boxes are decoded wrong, and where an input out of range makes
a network confident everywhere. The given reading is compared with the usual others on the same images, pair by pair.

The thresholds were chosen on three published detectors and checked on eight others, see docs/calibration.md.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.backends import OnnxRunner
from trtdet.bundle import Bundle
from trtdet.config import Config, InputConfig, NmsConfig
from trtdet.data import evenly
from trtdet.data.images import preprocess, read_image
from trtdet.detection.heads import decode
from trtdet.detection.suppression import Detections, non_max_suppression, sigmoid
from trtdet.errors import DataError, ImplausibleDetections, ModelError, TrtdetWarning, one_line
from trtdet.evaluation.matching import iou
from trtdet.evaluation.readings import Reading, head_readings, input_readings
from trtdet.passes import Options, load_model, raw_outputs
from trtdet.runtime.detector import Detector

Float = NDArray[np.float32]

MOST_IMAGES = 64
FEWEST_IMAGES = 4

_LOOKS = (4, 8, 16, 32)
"""After so many images readings that fall behind are given up."""
_SUPPRESSION = NmsConfig(score_threshold=0.1, iou_threshold=0.5, max_detections=100, pre_nms_topk=1000)
_CONFIDENT = 0.3
_CLEARLY = 1.04
"""The least ratio of two figures that is spoken of."""
_AGREEMENT = 0.35
"""A detector that works finds in mirror images at least this share of its score; those seen have 0.6 to 0.85, and a
network that is confident everywhere 0.00 to 0.22."""
_ROUNDS = 4


@dataclass(frozen=True)
class Plausibility:
    """What the detections on some images look like.

    Attributes:
        images: how many were looked at.
        empty: how many of them have no confident detection.
        boxes: confident detections an image.
        agreement: the share of the score that is found in the mirror image too, 0..1.
        symptoms: what is not as in a detector that works, each a clause.
        better: keys with which the detections are clearly better, with their values; empty where none are.
        better_text: the same as it is written into a configuration.
        gain: how many times the figure with ``better`` is that of the given configuration; infinite where that is 0.
        obstacle: why nothing could be looked at; empty where something was.
    """

    images: int = 0
    empty: int = 0
    boxes: float = 0.0
    agreement: float = 0.0
    symptoms: tuple[str, ...] = ()
    better: dict[str, Any] = field(default_factory=dict)
    better_text: str = ""
    gain: float = 1.0
    obstacle: str = ""

    @property
    def warning(self) -> str:
        """One line for people; empty where the detector looks as if it worked."""
        seen = "; ".join(self.symptoms)
        if self.better:
            times = "far more sure" if self.gain > 20 else f"{self.gain:.2f} times as sure"
            return (
                f"the configuration does not look right for this model: {seen + '; ' if seen else ''}on "
                f"{self.images} images its detections are {times} with {self.better_text}; set that in the "
                "configuration, or leave this check out with --no-input-check"
            )
        if seen:
            return (
                f"this does not look like a working detector: {seen}; check input.scale, input.mean, input.std, "
                "input.color, input.resize, head.decode and head.scores, and that the images show the model's "
                "classes, or leave this check out with --no-input-check"
            )
        return ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "images": self.images,
            "images_without_detections": self.empty,
            "detections_per_image": round(self.boxes, 3),
            "mirror_agreement": round(self.agreement, 4),
            "symptoms": list(self.symptoms),
            "better": self.better,
            "gain": round(self.gain, 4) if math.isfinite(self.gain) else None,
            "obstacle": self.obstacle,
            "warning": self.warning,
        }


class Subject(Protocol):
    """A detector whose pixels, and maybe whose head, can be read in several ways."""

    @property
    def config(self) -> Config: ...

    @property
    def heads(self) -> bool:
        """Whether the raw outputs are at hand, so that another head can be tried."""

    @property
    def batch(self) -> int:
        """How many images are best given at a time."""

    def outputs(self, images: Float) -> Mapping[str, NDArray[Any]]:
        """All outputs of images float32 (B, 3, H, W), each with B rows."""

    def found(self, outputs: Mapping[str, NDArray[Any]], config: Config) -> Detections | None:
        """The detections in outputs; None where the scores cannot be probabilities."""


def examine_model(model: onnx.ModelProto, options: Options, paths: Sequence[Path]) -> Plausibility:
    """Looks at a float model's detections.

    Args:
        model: as it was loaded.
        options: of the rewrite, with the configuration.
        paths: images; at most 64 of them, evenly spaced, are looked at.

    Returns:
        What was seen. A failure is said there and never raised: no work depends on it.
    """
    return _guarded(lambda: _examined(_Raw.of(model, options), paths))


def examine_detector(detector: Detector, config: Config, paths: Sequence[Path]) -> Plausibility:
    """The same for a detector whose head is decoded already: only its input is read in other ways."""
    return _guarded(lambda: _examined(_Decoded(detector, config), paths))


def examine_target(target: Path, detector: Detector, config: Config | None, paths: Sequence[Path]) -> dict[str, Any]:
    """The same for what is evaluated; a bundle that was looked at when it was built says what was seen then.

    Args:
        target: a bundle's folder or an ONNX file.
        detector: opened from it.
        config: of an ONNX file; None for a bundle.
        paths: the images.

    Returns:
        The plain values of :meth:`Plausibility.as_dict`.

    Warns:
        ImplausibleDetections: the configuration looks wrong.
    """
    if config is not None:
        seen = _guarded(
            lambda: examine_model(load_model(target, allow_quantized=True), Options(config), paths)
        ).as_dict()
    else:
        bundle = Bundle(target, verify=False)
        known = bundle.manifest.input_check
        seen = known if known is not None else examine_detector(detector, bundle.config, paths).as_dict()
    warn_of(seen["warning"])
    return seen


def warn_of(said: str) -> None:
    """Says what was seen, where there is something to say."""
    if said:
        warnings.warn(said, ImplausibleDetections, stacklevel=3)


def _guarded(work: Callable[[], Plausibility]) -> Plausibility:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrtdetWarning)  # given where the model itself is rewritten
            return work()
    except Exception as error:
        return Plausibility(obstacle=one_line(f"{type(error).__name__}: {error}"))


@dataclass(frozen=True, eq=False)
class _Raw:
    """A float model up to its raw outputs."""

    runner: OnnxRunner
    config: Config
    heads: bool = True

    @staticmethod
    def of(model: onnx.ModelProto, options: Options) -> _Raw:
        cut, config = raw_outputs(model, options)
        return _Raw(OnnxRunner(cut), config)

    def outputs(self, images: Float) -> Mapping[str, NDArray[Any]]:
        return _in_batches(self.runner, images, self.batch)

    @property
    def batch(self) -> int:
        return self.runner.batch or 1

    def found(self, outputs: Mapping[str, NDArray[Any]], config: Config) -> Detections | None:
        boxes, scores = decode(outputs, config)
        logits = config.suppresses_logits
        return non_max_suppression(boxes, scores, _SUPPRESSION, logits=logits) if _probable(scores, logits) else None


@dataclass(frozen=True, eq=False)
class _Decoded:
    """A detector as it is."""

    detector: Detector
    config: Config
    heads: bool = False

    def outputs(self, images: Float) -> Mapping[str, NDArray[Any]]:
        return _in_batches(self.detector.runner, images, self.batch)

    @property
    def batch(self) -> int:
        return self.detector.batch

    def found(self, outputs: Mapping[str, NDArray[Any]], config: Config) -> Detections | None:
        return self.detector.suppressed(outputs, _SUPPRESSION)


def _in_batches(run: Callable[[Float], Mapping[str, NDArray[Any]]], images: Float, size: int) -> dict[str, Any]:
    parts = [run(images[start : start + size]) for start in range(0, len(images), size)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _probable(scores: Float, logits: bool) -> bool:
    """Whether scores (B, N, C) can be probabilities of objects: 0..1, and low for most boxes."""
    if not scores.size or not np.isfinite(scores).all():
        return bool(scores.size == 0)
    given = sigmoid(scores) if logits else scores
    if given.min() < -1e-3 or given.max() > 1 + 1e-3:
        return False
    # The sigmoid of a probability is at least 0.5, the product of two of them 0.25.
    return given.shape[1] < 100 or float(given.max(axis=2).min()) < 0.2


@dataclass(frozen=True)
class _Tally:
    """What one image shows in one reading."""

    figure: float = 0.0
    score: float = 0.0
    agreed: float = 0.0
    confident: int = 0
    misplaced: int = 0
    classes: frozenset[int] = frozenset()
    improbable: bool = False


def _tally(found: Detections | None, config: InputConfig) -> _Tally:
    """Compares the detections of an image with those of its mirror image, the two rows of ``found``."""
    if found is None:
        return _Tally(improbable=True)
    boxes, scores, classes = _kept(found, 0)
    others, other_scores, other_classes = _kept(found, 1)
    mirrored = np.stack([config.width - others[:, 2], others[:, 1], config.width - others[:, 0], others[:, 3]], axis=1)
    near = iou(_sized(boxes), _sized(mirrored), np.zeros(len(mirrored), bool)) * (classes[:, None] == other_classes)
    figure = agreed = 0.0
    alone = float((other_scores**3).sum())
    for row, score in zip(near, scores, strict=True):
        best = int(row.argmax()) if len(row) else 0
        if not len(row) or row[best] < 0.5:
            alone += float(score**3)
            continue
        less = float(min(score, other_scores[best]))
        figure += less**3 * (2 * float(row[best]) - 1)
        agreed += less
        alone -= float(other_scores[best] ** 3)
        near[:, best] = 0
    sure = scores > _CONFIDENT
    return _Tally(
        figure - alone / 4,
        float(scores.sum() + other_scores.sum()) / 2,
        agreed,
        int(sure.sum()),
        int(_misplaced(boxes[sure], config).sum()),
        frozenset(classes[sure].tolist()),
    )


def _sized(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Boxes x1 y1 x2 y2 as x y width height."""
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)


def _kept(found: Detections, row: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    boxes, scores, classes = found.image(row)
    sure = scores > _SUPPRESSION.score_threshold
    limit = _SUPPRESSION.max_detections
    finite = np.nan_to_num(boxes[sure][:limit].astype(np.float64), nan=0.0, posinf=1e9, neginf=-1e9)
    return finite, scores[sure][:limit].astype(np.float64), classes[sure][:limit].astype(np.int64)


def _misplaced(boxes: NDArray[np.float64], config: InputConfig) -> NDArray[np.bool_]:
    """bool (N,): without area, or with a centre outside the network's input."""
    size, centre = boxes[:, 2:] - boxes[:, :2], (boxes[:, 2:] + boxes[:, :2]) / 2
    outside = (centre < 0) | (centre > np.array([config.width, config.height]))
    return np.asarray((size < 1).any(axis=1) | outside.any(axis=1))


_Known = dict[tuple[str, Path], _Tally]


def _key(reading: Reading) -> str:
    """What an image shows depends on."""
    return reading.config.input.model_dump_json() + reading.config.head.model_dump_json()


class _Contest:
    """A reading against others, image by image; those that fall behind are given up on the way.

    Args:
        subject: what is read.
        given: the reading that others have to be better than.
        others: these.
        known: what contests of the same subject have seen, by configuration and image; it is added to.
    """

    def __init__(self, subject: Subject, given: Reading, others: Iterable[Reading], known: _Known) -> None:
        self._subject = subject
        self._known = known
        self.given = given
        self._live = list(others)
        self.tallies: dict[int, list[_Tally]] = {id(given): []}
        self.tallies |= {id(other): [] for other in self._live}

    def run(self, paths: Sequence[Path]) -> Reading | None:
        """The best of those that are clearly better than the given reading; None where none is."""
        for path in paths:
            try:
                self._look_at(path)
            except DataError:
                continue  # whoever runs all images says so
            seen = len(self.tallies[id(self.given)])
            if seen in _LOOKS:
                self._live = [other for other in self._live if self._hopeful(other, seen)]
                winner = self._winner(1.3, 1.0) if seen >= 8 else None
                if winner is not None or (seen >= 8 and not self._live and self._finds_something()):
                    return winner
        return self._winner(_CLEARLY, 0.0)

    def _finds_something(self) -> bool:
        """Whether the given reading finds enough that more images need not be looked at."""
        tallies = self.tallies[id(self.given)]
        return sum(tally.confident > 0 for tally in tallies) > len(tallies) / 2

    def figures(self, reading: Reading) -> NDArray[np.float64]:
        return np.array([tally.figure for tally in self.tallies[id(reading)]])

    def gain(self, reading: Reading) -> float:
        """How many times the figure of the given reading it has, on the same images."""
        ours, theirs = self.figures(self.given).sum(), self.figures(reading).sum()
        return float(theirs / ours) if ours > 1e-9 else (math.inf if theirs > 1e-9 else 1.0)

    def _look_at(self, path: Path) -> None:
        readings = [self.given, *self._live]
        missing = [reading for reading in readings if (_key(reading), path) not in self._known]
        if missing:
            image = read_image(path)
            missing.sort(key=lambda one: one.config.input.model_dump_json())
            groups = [list(group) for _, group in groupby(missing, key=lambda one: one.config.input)]
            pixels = [preprocess(image, group[0].config.input)[0] for group in groups]
            pairs = [np.stack([array, array[:, :, ::-1]]) for array in pixels]
            for group, outputs in zip(groups, self._outputs(pairs), strict=True):
                for reading in group:
                    found = self._subject.found(outputs, reading.config)
                    self._known[_key(reading), path] = _tally(found, reading.config.input)
        for reading in readings:
            self.tallies[id(reading)].append(self._known[_key(reading), path])

    def _outputs(self, pairs: Sequence[Float]) -> Iterator[Mapping[str, NDArray[Any]]]:
        """The outputs of each pair of images; as many pairs at a time as fill a batch, and no more are in memory."""
        size = max(1, self._subject.batch // 2)
        for start in range(0, len(pairs), size):
            part = pairs[start : start + size]
            outputs = self._subject.outputs(np.concatenate(part))
            for number in range(len(part)):
                yield {name: value[2 * number : 2 * number + 2] for name, value in outputs.items()}

    def _hopeful(self, other: Reading, seen: int) -> bool:
        if seen == _LOOKS[0]:
            return self.gain(other) > 0.8
        return self._t(other) > {8: 0.0, 16: 0.8, 32: 1.8}[seen]

    def _winner(self, ratio: float, margin: float) -> Reading | None:
        seen = len(self.figures(self.given))
        if seen < FEWEST_IMAGES:
            return None
        # Few images need more: the bound is about the one-sided 0.2 % of Student's t.
        bound = 3 + 8 / seen + margin
        better = [one for one in self._live if self._t(one) >= bound and self.gain(one) >= ratio]
        return max(better, key=lambda one: float(self.figures(one).sum()), default=None)

    def _t(self, other: Reading) -> float:
        """Student's t of the paired differences."""
        differences = self.figures(other) - self.figures(self.given)
        error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
        return float(differences.mean()) / (error + 1e-9)


def _examined(subject: Subject, paths: Sequence[Path]) -> Plausibility:
    chosen = evenly(paths, MOST_IMAGES)
    given = best = Reading(subject.config, subject.config)
    known: _Known = {}
    first = contest = _Contest(subject, given, _singles(subject, given), known)
    winner = contest.run(chosen)
    if winner is None and subject.heads and contest.figures(given).sum() <= 1e-3:
        # With a head and pixels both wrong neither alone shows anything.
        contest = _Contest(subject, given, _pairs(subject, given), known)
        winner = contest.run(chosen)
    gain = 1.0
    for _ in range(_ROUNDS):
        if winner is None:
            break
        gain, best = gain * contest.gain(winner), winner
        contest = _Contest(subject, best, _singles(subject, best), known)
        winner = contest.run(chosen)
    tallies = first.tallies[id(given)]
    score = sum(tally.score for tally in tallies)
    return Plausibility(
        len(tallies),
        sum(tally.confident == 0 for tally in tallies),
        float(np.mean([tally.confident for tally in tallies])) if tallies else 0.0,
        sum(tally.agreed for tally in tallies) / score if score else 0.0,
        tuple(_symptoms(tallies, subject.config)),
        best.changes,
        best.text,
        gain,
    )


def _singles(subject: Subject, reading: Reading) -> list[Reading]:
    heads = _fitting(subject, head_readings(reading)) if subject.heads else []
    return [*input_readings(reading), *heads]


def _pairs(subject: Subject, reading: Reading) -> list[Reading]:
    return [pair for head in _fitting(subject, head_readings(reading)) for pair in input_readings(head)]


def _fitting(subject: Subject, readings: Iterable[Reading]) -> list[Reading]:
    """Those whose rule the outputs fit."""
    source = subject.config.input
    outputs = subject.outputs(np.zeros((1, 3, source.height, source.width), np.float32))
    fitting = []
    for reading in readings:
        try:
            decode(outputs, reading.config)
        except ModelError:
            continue
        fitting.append(reading)
    return fitting


def _symptoms(tallies: Sequence[_Tally], config: Config) -> Iterable[str]:
    seen, total = len(tallies), sum(tally.confident for tally in tallies)
    if seen < FEWEST_IMAGES:
        return
    if sum(tally.improbable for tally in tallies) > seen / 2:
        yield f"the scores are not 0 to 1 and mostly low, as those of objects are (head.scores is {config.head.scores})"
        return
    empty = sum(tally.confident == 0 for tally in tallies)
    full = sum(tally.confident >= _SUPPRESSION.max_detections for tally in tallies)
    score = sum(tally.score for tally in tallies)
    agreement = sum(tally.agreed for tally in tallies) / score if score else 1.0
    if empty > 0.9 * seen:
        yield f"no box over {_CONFIDENT} in {empty} of {seen} images"
        return
    if sum(tally.misplaced for tally in tallies) > total / 2:
        yield "most boxes over 0.3 have no area or lie outside the image"
    if agreement < _AGREEMENT:
        yield f"in mirror images it finds {agreement:.0%} of the same"
        if full > seen / 2:
            yield f"over {_SUPPRESSION.max_detections} boxes over {_CONFIDENT} in {full} of {seen} images"
    classes = frozenset().union(*(tally.classes for tally in tallies))
    if len(classes) == 1 and len(config.classes) > 1 and total > 20 * seen:
        yield f"every box is '{config.classes[next(iter(classes))]}'"
