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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

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
from trtdet.evaluation.matching import iou, xywh
from trtdet.evaluation.readings import Reading, head_readings, input_readings
from trtdet.passes import Options, load_model, raw_outputs
from trtdet.runtime.detector import Detector

Float = NDArray[np.float32]

MOST_IMAGES = 64
FEWEST_IMAGES = 4

_LOOKS = {4: None, 8: 0.0, 16: 0.8, 32: 1.8}
"""After so many images readings that fall behind are given up: under this Student's t, at first under 0.8 times the
figure of the given reading."""

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
        symptoms = "; ".join(self.symptoms)
        if self.better:
            times = "far more sure" if self.gain > 20 else f"{self.gain:.2f} times as sure"
            return (
                f"the configuration does not look right for this model: {symptoms + '; ' if symptoms else ''}on "
                f"{self.images} images its detections are {times} with {self.better_text}; set that in the "
                "configuration, or leave this check out with --set calibration.check_input=false"
            )
        if symptoms:
            return (
                f"this does not look like a working detector: {symptoms}; check input.scale, input.mean, input.std, "
                "input.color, input.resize, head.decode and head.scores, and that the images show the model's "
                "classes, or leave this check out with --set calibration.check_input=false"
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


def examine_model(model: onnx.ModelProto, options: Options, paths: Sequence[Path]) -> Plausibility:
    """Looks at a float model's detections on at most 64 of the images, evenly spaced.

    A failure is said in what was seen and never raised: no work depends on it.
    """

    def work() -> Plausibility:
        cut, config = raw_outputs(model, options)
        runner = OnnxRunner(cut)
        return _examined(_Subject(runner, config, runner.batch or 1), paths)

    return _guarded(work)


def examine_detector(detector: Detector, config: Config, paths: Sequence[Path]) -> Plausibility:
    """The same for a detector whose head is decoded already: only its input is read in other ways."""
    subject = _Subject(detector.runner, config, detector.batch, detector=detector)
    return _guarded(lambda: _examined(subject, paths))


def examine_target(target: Path, detector: Detector, config: Config | None, paths: Sequence[Path]) -> dict[str, Any]:
    """The same, as plain values, for what is evaluated: a bundle's folder, or an ONNX file with its configuration.

    A bundle that was looked at when it was built says what was seen then.

    Warns:
        ImplausibleDetections: the configuration looks wrong.
    """
    if config is None:
        bundle = Bundle(target, verify=False)
        check = bundle.manifest.input_check or examine_detector(detector, bundle.config, paths).as_dict()
    else:
        options = Options(config)
        check = _guarded(lambda: examine_model(load_model(target, allow_quantized=True), options, paths)).as_dict()
    warn_of(check["warning"])
    return check


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
class _Subject:
    """A detector whose pixels, and up to its raw outputs whose head, can be read in several ways.

    Attributes:
        run: gives all outputs of images float32 (B, 3, H, W), each with B rows.
        config: the given configuration.
        batch: how many images are best given at a time.
        detector: whose head is decoded already; None where the outputs are raw, so that another head can be tried.
    """

    run: Callable[[Float], Mapping[str, NDArray[Any]]]
    config: Config
    batch: int
    detector: Detector | None = None

    def outputs(self, images: Float) -> dict[str, NDArray[Any]]:
        """All outputs, run in batches."""
        parts = [self.run(images[start : start + self.batch]) for start in range(0, len(images), self.batch)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def found(self, outputs: Mapping[str, NDArray[Any]], config: Config) -> Detections | None:
        """The detections in outputs; None where the scores cannot be probabilities."""
        if self.detector is not None:
            return self.detector.suppressed(outputs, _SUPPRESSION)
        boxes, scores = decode(outputs, config)
        logits = config.suppresses_logits
        if not np.isfinite(scores).all():
            return None
        if scores.size:
            given = sigmoid(scores) if logits else scores
            if given.min() < -1e-3 or given.max() > 1 + 1e-3:
                return None
            # Most boxes have low scores; the sigmoid of a probability is at least 0.5, the product of two 0.25.
            if given.shape[1] >= 100 and given.max(axis=2).min() >= 0.2:
                return None
        return non_max_suppression(boxes, scores, _SUPPRESSION, logits=logits)


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

    def kept(row: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        boxes, scores, classes = found.image(row)
        rows = np.flatnonzero(scores > _SUPPRESSION.score_threshold)[: _SUPPRESSION.max_detections]
        finite = np.nan_to_num(boxes[rows].astype(np.float64), nan=0.0, posinf=1e9, neginf=-1e9)
        return finite, scores[rows].astype(np.float64), classes[rows].astype(np.int64)

    boxes, scores, classes = kept(0)
    others, other_scores, other_classes = kept(1)
    mirrored = np.stack([config.width - others[:, 2], others[:, 1], config.width - others[:, 0], others[:, 3]], axis=1)
    near = iou(xywh(boxes), xywh(mirrored), np.zeros(len(mirrored), bool)) * (classes[:, None] == other_classes)
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
    # Without area, or with a centre outside the network's input.
    size, centre = boxes[sure, 2:] - boxes[sure, :2], (boxes[sure, 2:] + boxes[sure, :2]) / 2
    misplaced = (size < 1) | (centre < 0) | (centre > np.array([config.width, config.height]))
    return _Tally(
        figure=figure - alone / 4,
        score=float(scores.sum() + other_scores.sum()) / 2,
        agreed=agreed,
        confident=int(sure.sum()),
        misplaced=int(misplaced.any(axis=1).sum()),
        classes=frozenset(classes[sure].tolist()),
    )


def _key(reading: Reading) -> str:
    """What an image shows depends on."""
    return reading.config.input.model_dump_json() + reading.config.head.model_dump_json()


class _Contest:
    """A reading against others, image by image; those that fall behind are given up on the way.

    ``known`` is what contests of the same subject have seen, by configuration and image; it is added to.
    """

    def __init__(
        self, subject: _Subject, given: Reading, others: Iterable[Reading], known: dict[tuple[str, Path], _Tally]
    ) -> None:
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
                least = _LOOKS[seen]
                self._live = [
                    other
                    for other in self._live
                    if (self.gain(other) > 0.8 if least is None else self._t(other) > least)
                ]
                winner = self._winner(1.3, 1.0) if seen >= 8 else None
                # Where the given reading finds enough, more images need not be looked at.
                enough = sum(tally.confident > 0 for tally in self.tallies[id(self.given)]) > seen / 2
                if winner is not None or (seen >= 8 and not self._live and enough):
                    return winner
        return self._winner(_CLEARLY, 0.0)

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
            missing.sort(key=lambda reading: reading.config.input.model_dump_json())
            groups = [list(group) for _, group in groupby(missing, key=lambda reading: reading.config.input)]
            # As many pairs of an image and its mirror image at a time as fill a batch, and no more are in memory.
            size = max(1, self._subject.batch // 2)
            for start in range(0, len(groups), size):
                part = groups[start : start + size]
                pixels = [preprocess(image, group[0].config.input)[0] for group in part]
                pairs = [view for array in pixels for view in (array, array[:, :, ::-1])]
                outputs = self._subject.outputs(np.stack(pairs))
                for number, group in enumerate(part):
                    pair = {name: value[2 * number : 2 * number + 2] for name, value in outputs.items()}
                    for reading in group:
                        found = self._subject.found(pair, reading.config)
                        self._known[_key(reading), path] = _tally(found, reading.config.input)
        for reading in readings:
            self.tallies[id(reading)].append(self._known[_key(reading), path])

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


def _examined(subject: _Subject, paths: Sequence[Path]) -> Plausibility:
    chosen = evenly(paths, MOST_IMAGES)
    given = best = Reading(subject.config, subject.config)
    known: dict[tuple[str, Path], _Tally] = {}
    first = contest = _Contest(subject, given=given, others=_singles(subject, given), known=known)
    winner = contest.run(chosen)
    if winner is None and subject.detector is None and contest.figures(given).sum() <= 1e-3:
        # With a head and pixels both wrong neither alone shows anything.
        pairs = (pair for head in _fitting(subject, head_readings(given)) for pair in input_readings(head))
        contest = _Contest(subject, given=given, others=pairs, known=known)
        winner = contest.run(chosen)
    gain = 1.0
    for _ in range(_ROUNDS):
        if winner is None:
            break
        gain, best = gain * contest.gain(winner), winner
        contest = _Contest(subject, given=best, others=_singles(subject, best), known=known)
        winner = contest.run(chosen)
    tallies = first.tallies[id(given)]
    score = sum(tally.score for tally in tallies)
    return Plausibility(
        images=len(tallies),
        empty=sum(tally.confident == 0 for tally in tallies),
        boxes=float(np.mean([tally.confident for tally in tallies])) if tallies else 0.0,
        agreement=sum(tally.agreed for tally in tallies) / score if score else 0.0,
        symptoms=tuple(_symptoms(tallies, subject.config)),
        better=best.changes,
        better_text=best.text,
        gain=gain,
    )


def _singles(subject: _Subject, reading: Reading) -> list[Reading]:
    heads = _fitting(subject, head_readings(reading)) if subject.detector is None else []
    return [*input_readings(reading), *heads]


def _fitting(subject: _Subject, readings: Iterable[Reading]) -> list[Reading]:
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
