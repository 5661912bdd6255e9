"""Checks without annotations whether a detector works on a set of images, and which configuration key may be wrong.

A wrong key causes no error in a build, but the detections show it. With a right configuration the mirror image of an
image gives the same objects, mirrored. The figure of an image is a sum over pairs of overlapping detections of a class,
one from each image: the cube of the smaller score times ``2 * IoU - 1``, less a quarter of the cubed scores of
detections without a partner. It is small if scores are low, boxes are decoded wrong, or a wrong input range makes the
network confident everywhere. The configuration is compared with the usual alternatives on the same images, by a paired
t-test. The thresholds were chosen on three published detectors and checked on eight others, see docs/calibration.md.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
from trtdet.passes import Options, load_model, raw_outputs
from trtdet.runtime.detector import Detector

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""torchvision's mean and standard deviation of ImageNet, RGB, for pixels 0..1."""

_GREY = (0.5, 0.5, 0.5)
_ZERO, _ONE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
_UNIT = 1 / 255
NORMALISATIONS: tuple[tuple[float, tuple[float, ...], tuple[float, ...]], ...] = (
    (1.0, _ZERO, _ONE),
    (_UNIT, _ZERO, _ONE),
    (_UNIT, *IMAGENET),
    (_UNIT, _GREY, _GREY),
    (1.0, (123.675, 116.28, 103.53), _ONE),
)
"""Scale, mean and standard deviation (RGB) in common use: 0..255; 0..1; ImageNet's; -1..1; Caffe's ImageNet mean."""

_SAME = 0.05
"""Two normalisations are the same if no pixel differs by more than this share of the range of values."""


@dataclass(frozen=True)
class Reading:
    """A configuration, and the ``given`` one that it is an alternative to."""

    config: Config
    given: Config

    @cached_property
    def changes(self) -> dict[str, Any]:
        """Plain values of the keys that differ, by path such as ``input.color``."""
        changes: dict[str, Any] = {}
        for section in ("input", "head"):
            old, new = (getattr(config, section).model_dump(mode="json") for config in (self.given, self.config))
            changes |= {f"{section}.{key}": value for key, value in new.items() if value != old[key]}
        return changes

    def other(self, section: str, **changes: Any) -> Reading:
        """This reading with some keys of a section replaced."""
        part = getattr(self.config, section).model_copy(update=changes)
        return Reading(self.config.model_copy(update={section: part}), self.given)

    @property
    def text(self) -> str:
        """The changed keys as in a configuration file, such as ``input.color: bgr, input.scale: 1``."""
        return ", ".join(f"{key}: {_plain(value)}" for key, value in self.changes.items())


def input_readings(reading: Reading) -> Iterator[Reading]:
    """Alternatives with the same head: swapped channels, another resize rule, another normalisation."""
    given = reading.config.input
    # Mean and standard deviation are not swapped: in a wrong configuration they are as often in the right order as not.
    yield reading.other("input", color="bgr" if given.color == "rgb" else "rgb")
    for resize in ("letterbox-centre", "letterbox-topleft", "stretch"):
        if resize != given.resize:
            yield reading.other("input", resize=resize)
    for scale, mean, std in NORMALISATIONS:
        order = 1 if given.color == "rgb" else -1
        other = reading.other("input", scale=scale, mean=mean[::order], std=std[::order])
        now, then = _values(given), _values(other.config.input)
        if np.abs(now - then).max() > _SAME * np.abs(now[:, 1] - now[:, 0]).min():
            yield other


def head_readings(reading: Reading) -> Iterator[Reading]:
    """Alternatives with the same input: other meanings of outputs of the same shape."""
    head = reading.config.head
    same_shape = {"yolox": "yolov5", "yolov5": "yolox"}
    if head.decode in same_shape:
        yield reading.other("head", decode=same_shape[head.decode])
    if head.decode in ("boxes", "detections"):
        yield reading.other("head", units="relative" if head.units == "pixels" else "pixels")
        yield from (reading.other("head", boxes=form) for form in ("xyxy", "yxyx", "cxcywh") if form != head.boxes)
    if head.decode == "dfl":
        yield from (
            reading.other("head", cell_offset=offset) for offset in (0.0, 0.5) if abs(offset - head.cell_offset) > 0.1
        )
    if head.decode != "detections":
        yield reading.other("head", scores="logits" if head.scores == "probabilities" else "probabilities")


def _values(config: InputConfig) -> NDArray[np.float64]:
    """float64 (3, 2): normalised values of 0 and 255 in each channel, RGB."""
    order = 1 if config.color == "rgb" else -1
    mean, std = np.array(config.mean[::order]), np.array(config.std[::order])
    return np.stack([(pixel * config.scale - mean) / std for pixel in (0, 255)], axis=1)


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_plain, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


Float = NDArray[np.float32]

MOST_IMAGES = 64
FEWEST_IMAGES = 4

_LOOKS = {4: None, 8: 0.0, 16: 0.8, 32: 1.8}
"""Alternatives below this Student's t are dropped after this many images (None: below 0.8 times the given figure)."""

_SUPPRESSION = NmsConfig(score_threshold=0.1, iou_threshold=0.5, max_detections=100, pre_nms_topk=1000)
_CONFIDENT = 0.3
_CLEARLY = 1.04
"""Lowest ratio of two figures that is reported."""
_AGREEMENT = 0.35
"""Lowest mirror agreement of a working detector; measured: 0.6 to 0.85, confident everywhere: 0.00 to 0.22."""
_ROUNDS = 4


@dataclass(frozen=True)
class Plausibility:
    """Result of a check of some images.

    Attributes:
        empty: number of images without a confident detection.
        boxes: mean number of confident detections per image.
        agreement: share of the scores that is found in the mirror image too, 0..1.
        symptoms: signs of a detector that does not work, each a clause.
        better: keys and values that give clearly better detections; ``better_text`` has them as in a configuration.
        gain: figure with ``better`` divided by that of the given configuration; infinite if that is 0.
        obstacle: error that prevented the check; empty if none did.
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
        """One line for people; empty if the detector seems to work."""
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
    """Checks a float model's detections on at most 64 of the images, evenly spaced.

    An error is never raised but returned as ``obstacle``, because no other step depends on this check.
    """

    def work() -> Plausibility:
        cut, config = raw_outputs(model, options)
        runner = OnnxRunner(cut)
        return _examined(_Subject(runner, config, runner.batch or 1), paths)

    return _guarded(work)


def examine_detector(detector: Detector, config: Config, paths: Sequence[Path]) -> Plausibility:
    """Checks a detector, which decodes its head already: only its input keys can be varied."""
    subject = _Subject(detector.runner, config, detector.batch, detector=detector)
    return _guarded(lambda: _examined(subject, paths))


def examine_target(target: Path, detector: Detector, config: Config | None, paths: Sequence[Path]) -> dict[str, Any]:
    """Checks a bundle's folder, or an ONNX file with its configuration, and returns plain values.

    For a bundle that was checked when it was built, this is the result in its manifest. Warns with
    ImplausibleDetections if the configuration looks wrong.
    """
    if config is None:
        bundle = Bundle(target, verify=False)
        check = bundle.manifest.input_check or examine_detector(detector, bundle.config, paths).as_dict()
    else:
        options = Options(config)
        check = _guarded(lambda: examine_model(load_model(target, allow_quantized=True), options, paths)).as_dict()
    warn_of(check["warning"])
    return check


def warn_of(text: str) -> None:
    """Warns if the text is not empty."""
    if text:
        warnings.warn(text, ImplausibleDetections, stacklevel=3)


def _guarded(work: Callable[[], Plausibility]) -> Plausibility:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrtdetWarning)  # given where the model itself is rewritten
            return work()
    except Exception as error:
        return Plausibility(obstacle=one_line(f"{type(error).__name__}: {error}"))


@dataclass(frozen=True, eq=False)
class _Subject:
    """The model or detector under test.

    ``run`` computes all outputs of images float32 (B, 3, H, W), each with B rows; ``batch`` images at a time are best.
    ``detector`` decodes the head; None if the outputs are raw, so that other heads can be tried.
    """

    run: Callable[[Float], Mapping[str, NDArray[Any]]]
    config: Config
    batch: int
    detector: Detector | None = None

    def outputs(self, images: Float) -> dict[str, NDArray[Any]]:
        parts = [self.run(images[start : start + self.batch]) for start in range(0, len(images), self.batch)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def found(self, outputs: Mapping[str, NDArray[Any]], config: Config) -> Detections | None:
        """Detections of the outputs; None if the scores cannot be probabilities."""
        if self.detector is not None:
            return self.detector.suppressed(outputs, _SUPPRESSION)
        boxes, scores = decode(outputs, config)
        logits = config.suppresses_logits
        if not np.isfinite(scores).all():
            return None
        if scores.size:
            probabilities = sigmoid(scores) if logits else scores
            if probabilities.min() < -1e-3 or probabilities.max() > 1 + 1e-3:
                return None
            # Most boxes have low scores. The sigmoid of a probability is at least 0.5, the product of two 0.25.
            if probabilities.shape[1] >= 100 and probabilities.max(axis=2).min() >= 0.2:
                return None
        return non_max_suppression(boxes, scores, _SUPPRESSION, logits=logits)


@dataclass(frozen=True)
class _Tally:
    """Measurements of one image with one reading."""

    figure: float = 0.0
    score: float = 0.0
    agreed: float = 0.0
    confident: int = 0
    misplaced: int = 0
    classes: frozenset[int] = frozenset()
    improbable: bool = False


def _tally(detections: Detections | None, config: InputConfig) -> _Tally:
    """Compares the detections of an image (row 0) with those of its mirror image (row 1)."""
    if detections is None:
        return _Tally(improbable=True)

    def kept(row: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        boxes, scores, classes = detections.image(row)
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
    """Identifies all settings that a tally depends on."""
    return reading.config.input.model_dump_json() + reading.config.head.model_dump_json()


class _Contest:
    """Compares a reading with others, image by image, and drops others that fall behind.

    ``cache`` holds tallies by configuration and image; contests of one subject share it and add to it.
    """

    def __init__(
        self, subject: _Subject, given: Reading, others: Iterable[Reading], cache: dict[tuple[str, Path], _Tally]
    ) -> None:
        self._subject = subject
        self._cache = cache
        self.given = given
        self._live = list(others)
        self.tallies: dict[int, list[_Tally]] = {id(given): []}
        self.tallies |= {id(other): [] for other in self._live}

    def run(self, paths: Sequence[Path]) -> Reading | None:
        """The best of the readings that are clearly better than the given one; None if none is."""
        for path in paths:
            try:
                self._look_at(path)
            except DataError:
                continue  # code that runs all images reports unreadable ones
            count = len(self.tallies[id(self.given)])
            if count in _LOOKS:
                least = _LOOKS[count]
                self._live = [
                    other
                    for other in self._live
                    if (self.gain(other) > 0.8 if least is None else self._t(other) > least)
                ]
                winner = self._winner(1.3, 1.0) if count >= 8 else None
                # No more images are needed if the given reading detects enough.
                enough = sum(tally.confident > 0 for tally in self.tallies[id(self.given)]) > count / 2
                if winner is not None or (count >= 8 and not self._live and enough):
                    return winner
        return self._winner(_CLEARLY, 0.0)

    def figures(self, reading: Reading) -> NDArray[np.float64]:
        return np.array([tally.figure for tally in self.tallies[id(reading)]])

    def gain(self, reading: Reading) -> float:
        """Figure of a reading divided by that of the given one, on the same images."""
        ours, theirs = self.figures(self.given).sum(), self.figures(reading).sum()
        return float(theirs / ours) if ours > 1e-9 else (math.inf if theirs > 1e-9 else 1.0)

    def _look_at(self, path: Path) -> None:
        readings = [self.given, *self._live]
        missing = [reading for reading in readings if (_key(reading), path) not in self._cache]
        if missing:
            image = read_image(path)
            missing.sort(key=lambda reading: reading.config.input.model_dump_json())
            groups = [list(group) for _, group in groupby(missing, key=lambda reading: reading.config.input)]
            # As many pairs of image and mirror image at a time as fill a batch, to save memory.
            size = max(1, self._subject.batch // 2)
            for start in range(0, len(groups), size):
                part = groups[start : start + size]
                pixels = [preprocess(image, group[0].config.input)[0] for group in part]
                pairs = [view for array in pixels for view in (array, array[:, :, ::-1])]
                outputs = self._subject.outputs(np.stack(pairs))
                for number, group in enumerate(part):
                    pair = {name: value[2 * number : 2 * number + 2] for name, value in outputs.items()}
                    for reading in group:
                        detections = self._subject.found(pair, reading.config)
                        self._cache[_key(reading), path] = _tally(detections, reading.config.input)
        for reading in readings:
            self.tallies[id(reading)].append(self._cache[_key(reading), path])

    def _winner(self, ratio: float, margin: float) -> Reading | None:
        count = len(self.figures(self.given))
        if count < FEWEST_IMAGES:
            return None
        # The bound is higher for few images: about the one-sided 0.2 % quantile of Student's t.
        bound = 3 + 8 / count + margin
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
    cache: dict[tuple[str, Path], _Tally] = {}
    first = contest = _Contest(subject, given=given, others=_singles(subject, given), cache=cache)
    winner = contest.run(chosen)
    if winner is None and subject.detector is None and contest.figures(given).sum() <= 1e-3:
        # If head and pixels are both wrong, correcting only one detects nothing.
        pairs = (pair for head in _fitting(subject, head_readings(given)) for pair in input_readings(head))
        contest = _Contest(subject, given=given, others=pairs, cache=cache)
        winner = contest.run(chosen)
    gain = 1.0
    for _ in range(_ROUNDS):
        if winner is None:
            break
        gain, best = gain * contest.gain(winner), winner
        contest = _Contest(subject, given=best, others=_singles(subject, best), cache=cache)
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
    """The readings that can decode the outputs."""
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
    images, total = len(tallies), sum(tally.confident for tally in tallies)
    if images < FEWEST_IMAGES:
        return
    if sum(tally.improbable for tally in tallies) > images / 2:
        yield f"the scores are not 0 to 1 and mostly low, as those of objects are (head.scores is {config.head.scores})"
        return
    empty = sum(tally.confident == 0 for tally in tallies)
    full = sum(tally.confident >= _SUPPRESSION.max_detections for tally in tallies)
    score = sum(tally.score for tally in tallies)
    agreement = sum(tally.agreed for tally in tallies) / score if score else 1.0
    if empty > 0.9 * images:
        yield f"no box over {_CONFIDENT} in {empty} of {images} images"
        return
    if sum(tally.misplaced for tally in tallies) > total / 2:
        yield "most boxes over 0.3 have no area or lie outside the image"
    if agreement < _AGREEMENT:
        yield f"in mirror images it finds {agreement:.0%} of the same"
        if full > images / 2:
            yield f"over {_SUPPRESSION.max_detections} boxes over {_CONFIDENT} in {full} of {images} images"
    classes = frozenset().union(*(tally.classes for tally in tallies))
    if len(classes) == 1 and len(config.classes) > 1 and total > 20 * images:
        yield f"every box is '{config.classes[next(iter(classes))]}'"
