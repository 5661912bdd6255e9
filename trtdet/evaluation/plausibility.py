"""Judges without annotations whether a detector works on images, and which configuration keys may be wrong.

A wrong key causes no error in a build, but the detections show it: :mod:`trtdet.evaluation.judging` tells what works. A
configuration is compared with the usual alternatives on the same images, by a paired t-test of the images' figures; an
alternative counts only if it works itself.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.backends import OnnxRunner, Runner, side_by_side
from trtdet.bundle import Bundle
from trtdet.config import Config
from trtdet.data import evenly
from trtdet.data.images import preprocess, read_image
from trtdet.detection.heads import decode
from trtdet.detection.parts import Float
from trtdet.detection.suppression import Detections, non_max_suppression, sigmoid
from trtdet.errors import DataError, ImplausibleDetections, ModelError, TrtdetWarning, one_line
from trtdet.evaluation.judging import (
    FEWEST_IMAGES,
    SUPPRESSION,
    Found,
    Tally,
    agreement_share,
    found_in,
    judged,
    moved_share,
    normal_of,
    other_look,
    student_t,
    tally_of,
)
from trtdet.evaluation.placement import FEWEST_IMAGES as FEWEST_PLACED
from trtdet.evaluation.placement import MOST_IMAGES as MOST_PLACED
from trtdet.evaluation.placement import SURE, Placement
from trtdet.evaluation.readings import QUESTIONS, RESIZE, Reading, head_readings, input_readings
from trtdet.passes import Options, load_model, raw_outputs
from trtdet.progress import Progress, silent
from trtdet.runtime.detector import Detector
from trtdet.tables import counted

MOST_IMAGES = 64
"""Most images of a check, except for how they are placed; ``trtdet init`` may look at more."""

_LOOKS = (4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of images after which readings are compared."""
_ENOUGH_BROKEN, _ENOUGH_EMPTY = 16, 32
"""Numbers of images from which on a thorough contest gives up readings that do not work, or find nothing, if the given
one is no better."""
_BEHIND = {8: 0.0, 16: 0.8, 32: 1.8}
"""A check drops alternatives under this Student's t after this many images."""
_LIKELY = 0.75
"""Least probability at which a working alternative replaces a reading that detects next to nothing."""
_FAR_MORE = 20
"""Ratio of figures from which on a detector counts as not working in comparison, and fewer images suffice."""
_CHANCES = 5
"""Factor on the probability of an error, because readings are compared several times."""
_CLEARLY = 1.04
"""Lowest ratio of two figures that is reported; closer readings are the same for all that images show."""
_AT_ONCE = 1.3
"""Ratio of figures at which an alternative is taken before all images have been looked at."""
_LESS_SOUND = 0.1
"""Drop of the share that is found again, or that goes with the image, from which on a reading that finds more is taken
to find what is not there; measured: under 0.04 of right readings against wrong ones, 0.2 where contrast is raised."""
_FEWEST_SOUND = 8
"""Fewer images do not tell that."""
_ROUNDS = 6
"""Most keys that are changed one after the other."""

Verdict = Literal["working", "not working", "another is better", "cannot tell", "not done"]


@dataclass(frozen=True)
class Plausibility:
    """Result of a check of some images.

    Attributes:
        placed: number of images on which ways of placing the image in the input were compared; 0 without such a
            comparison.
        empty: number of images without a confident detection.
        boxes: mean number of confident detections per image.
        agreement: share of the confident scores that is found again in the mirrored and shifted image, 0..1.
        moved: share of the confident detections that go with the image, rather than stay, when it is mirrored and
            shifted, 0..1.
        symptoms: signs of a detector that does not work, each a clause.
        unknown: why there is no verdict, and what to do; empty if there is one.
        better: keys and values that give clearly better detections; ``better_text`` has them as in a configuration.
        gain: figure with ``better`` divided by that of the given configuration; infinite if that is 0 or less.
        obstacle: error that prevented the check; empty without one.
    """

    images: int = 0
    placed: int = 0
    empty: int = 0
    boxes: float = 0.0
    agreement: float = 0.0
    moved: float = 0.0
    symptoms: tuple[str, ...] = ()
    unknown: str = ""
    better: dict[str, Any] = field(default_factory=dict)
    better_text: str = ""
    gain: float = 1.0
    obstacle: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.obstacle:
            return "not done"
        if self.better:
            return "another is better"
        if self.symptoms:
            return "not working"
        return "cannot tell" if self.unknown else "working"

    @property
    def times(self) -> str:
        """How much surer the detections are with ``better``, in words."""
        return "far more sure" if self.gain > _FAR_MORE else f"{self.gain:.2f} times as sure"

    @property
    def warning(self) -> str:
        """One line for people; empty if the detector seems to work."""
        symptoms = "; ".join(self.symptoms)
        if self.obstacle:
            return (
                f"the input check could not be done, so nothing says that the configuration is right: {self.obstacle}"
            )
        if self.better:
            return (
                f"the configuration does not look right for this model: {symptoms + '; ' if symptoms else ''}on "
                f"{counted(self.images)} its detections are {self.times} with {self.better_text}; set that in the "
                "configuration"
            )
        if symptoms:
            return (
                f"this does not look like a working detector: {symptoms}; check input.scale, input.mean, input.std, "
                "input.color, input.resize, head.decode and head.scores"
            )
        if self.unknown:
            return f"the input check cannot tell whether the configuration is right: {self.unknown}"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "verdict": self.verdict,
            "images": self.images,
            "images_placed": self.placed,
            "images_without_detections": self.empty,
            "detections_per_image": round(self.boxes, 3),
            "mirror_agreement": round(self.agreement, 4),
            "moved": round(self.moved, 4),
            "symptoms": list(self.symptoms),
            "unknown": self.unknown,
            "better": self.better,
            "gain": round(self.gain, 4) if math.isfinite(self.gain) else None,
            "obstacle": self.obstacle,
            "warning": self.warning,
        }


@dataclass(frozen=True)
class Answer:
    """The answer of the images to one of :data:`~trtdet.evaluation.readings.QUESTIONS`.

    Attributes:
        sure: probability that the chosen value is better than each other that was tried, 0..1.
        images: on which the nearest rival was compared.
        rival: the nearest other reading, unless it is surely worse; None if all are.
        same: the rival's figure differs by less than 4 %, so that it does not matter which of the two is taken.
    """

    sure: float
    images: int
    rival: Reading | None = None
    same: bool = False

    @property
    def chance(self) -> str:
        """``sure`` in per cent."""
        return "over 99.9 %" if self.sure > 0.999 else f"{100 * max(self.sure, 0.5):.3g} %"

    @property
    def text(self) -> str:
        """One clause, such as ``99.9 % sure on 32 images``."""
        if self.rival is None:
            return f"{self.chance} sure on {counted(self.images)}"
        if self.same:
            return f"on {counted(self.images)} {self.rival.text} makes hardly any difference"
        return f"undecided, {self.chance} sure on {counted(self.images)} against {self.rival.text}"


@dataclass(frozen=True)
class Settled:
    """The configuration that fits the images best.

    Attributes:
        config: the given one, with the values of ``first.better``.
        first: the given one's result.
        looks: the result of ``config``, without further suggestions.
        answers: by question, for those that were tried; empty if nothing could be told.
    """

    config: Config
    first: Plausibility
    looks: Plausibility
    answers: Mapping[str, Answer]


def examine_model(
    model: onnx.ModelProto, options: Options, paths: Sequence[Path], *, alternatives: bool = True
) -> Plausibility:
    """Checks a float model's detections on at most 64 of the images, evenly spaced, and on up to 1024 how images are
    placed in the input, where another way may be better.

    ``alternatives`` False judges the given configuration alone, which takes a tenth of the time. An error is never
    raised but returned as ``obstacle``, because no other step depends on this check.
    """

    def work() -> Plausibility:
        subject = _of_model(model, options)
        return _checked(subject, paths, alternatives).first

    return _guarded(work)


def settle_model(
    model: onnx.ModelProto, options: Options, paths: Sequence[Path], progress: Progress = silent
) -> Settled:
    """Finds the configuration that fits a float model best, on as many of the images as that takes.

    Images from all over the sequence are looked at until each question is answered. An error is the ``obstacle`` of
    both results.
    """
    found: list[Settled] = []

    def work() -> Plausibility:
        scattered = _scattered(paths)
        subject = replace(_of_model(model, options), progress=progress)
        found.append(_settled(subject, scattered, thorough=True, many=scattered))
        return found[0].first

    first = _guarded(work)
    return found[0] if found else Settled(options.config, first, first, answers={})


def examine_detector(
    detector: Detector, config: Config, paths: Sequence[Path], *, alternatives: bool = True
) -> Plausibility:
    """Checks a detector, which decodes its head already: only its input keys can be varied."""
    subject = _Subject(detector.runner, config, detector.batch, detector=detector)
    return _guarded(lambda: _checked(subject, paths, alternatives).first)


def examine_target(
    target: Path, detector: Detector, config: Config | None, paths: Sequence[Path], *, alternatives: bool = True
) -> dict[str, Any]:
    """Checks a bundle's folder, or an ONNX file with its configuration, and returns plain values.

    For a bundle that was checked when it was built, this is the result in its manifest. Warns with
    ImplausibleDetections if the configuration looks wrong, and if that could not be checked or, with ``alternatives``,
    could not be told.
    """
    if config is None:
        bundle = Bundle(target, verify=False)
        check = bundle.manifest.input_check
        if check is None:
            check = examine_detector(detector, bundle.config, paths, alternatives=alternatives).as_dict()
    else:
        options = Options(config)

        def work() -> Plausibility:
            return examine_model(load_model(target, allow_quantized=True), options, paths, alternatives=alternatives)

        check = _guarded(work).as_dict()
    if alternatives or check.get("verdict") != "cannot tell":
        warn_of(check["warning"])
    return check


def warn_of(text: str) -> None:
    """Warns if the text is not empty."""
    if text:
        warnings.warn(text, ImplausibleDetections, stacklevel=3)


def _of_model(model: onnx.ModelProto, options: Options) -> _Subject:
    cut, config = raw_outputs(model, options)
    runner = OnnxRunner(cut)
    return _Subject(runner, config, runner.batch or 1)


def _checked(subject: _Subject, paths: Sequence[Path], alternatives: bool) -> Settled:
    many = _scattered(evenly(paths, MOST_PLACED)) if alternatives else ()
    return _settled(subject, evenly(paths, MOST_IMAGES), alternatives=alternatives, many=many)


def _scattered(paths: Sequence[Path]) -> list[Path]:
    """The paths in van der Corput's order, so that the first few are from all over a video."""
    digits = max(1, (len(paths) - 1).bit_length())
    order = (int(f"{number:0{digits}b}"[::-1], 2) for number in range(2**digits))
    return [paths[number] for number in order if number < len(paths)]


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

    ``run`` computes all outputs of images float32 (B, 3, H, W); ``batch`` images at a time are best. ``detector``
    decodes the head; None if the outputs are raw, so that other heads can be tried. ``progress`` gets the images that
    were looked at.
    """

    run: Runner
    config: Config
    batch: int
    detector: Detector | None = None
    progress: Progress = silent

    def outputs(self, pairs: Sequence[tuple[Float, Float]]) -> list[list[dict[str, NDArray[Any]]]]:
        """For each pair of images float32 (3, H, W) its outputs: one of two rows, or, where the network takes one image
        at a time, one for each image, which need not have a batch dimension."""
        if self.batch == 1:
            singles = (image[None] for pair in pairs for image in pair)
            found = list(side_by_side(self.run, lambda run, image: dict(run(image)), singles))
            return [found[start : start + 2] for start in range(0, len(found), 2)]
        images = np.stack([image for pair in pairs for image in pair])
        parts = [self.run(images[start : start + self.batch]) for start in range(0, len(images), self.batch)]
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return [
            [{name: value[2 * number : 2 * number + 2] for name, value in whole.items()}]
            for number in range(len(pairs))
        ]

    def detected(self, images: Sequence[Float], reading: Reading) -> list[Found]:
        """Detections of images float32 (3, H, W) by a reading, in pixels of the input."""
        pairs = [(images[at], images[min(at + 1, len(images) - 1)]) for at in range(0, len(images), 2)]
        results: list[Found] = []
        for pair in self.outputs(pairs):
            for outputs in pair:
                detections = self.found(outputs, reading.config)
                rows = 2 // len(pair)
                results += [_NOTHING if detections is None else found_in(detections, row) for row in range(rows)]
        return results[: len(images)]

    def found(self, outputs: Mapping[str, NDArray[Any]], config: Config) -> Detections | None:
        """Detections of the outputs; None if the scores cannot be probabilities."""
        if self.detector is not None:
            return self.detector.suppressed(outputs, SUPPRESSION)
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
        return non_max_suppression(boxes, scores, SUPPRESSION, logits=logits)


_NOTHING: Found = (np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))


def _key(reading: Reading) -> str:
    """Identifies all settings that a tally depends on."""
    return reading.config.input.model_dump_json() + reading.config.head.model_dump_json()


class _Contest:
    """Compares a reading with others, image by image, and leaves out others that are decided on.

    A check looks for better readings, so it drops those that fall behind. ``thorough`` goes on until each is surely
    worse, or the same. ``cache`` holds tallies by configuration and image; contests of one subject share it.
    """

    def __init__(
        self,
        subject: _Subject,
        given: Reading,
        others: Iterable[Reading],
        cache: dict[tuple[str, Path], Tally],
        thorough: bool = False,
    ) -> None:
        self._subject = subject
        self._cache = cache
        self._thorough = thorough
        self.given = given
        self.others = list(others)
        self._live = list(self.others)
        self.tallies: dict[int, list[Tally]] = {id(given): []}
        self.tallies |= {id(other): [] for other in self._live}

    def run(self, paths: Sequence[Path]) -> Reading | None:
        """The best of the readings that are clearly better than the given one and work; None if none does."""
        stage = f"comparing {counted(1 + len(self.others), 'reading')}"
        for number, path in enumerate(paths):
            self._subject.progress(stage, number, len(paths))
            try:
                self._look_at(path)
            except DataError:
                continue  # code that runs all images reports unreadable ones
            count = len(self.tallies[id(self.given)])
            if count in _LOOKS:
                self._live = [other for other in self._live if not self._decided(other, count)]
                if self._thorough and not self._live and self._hopeless(self.given, count):
                    return None
                winner = self._winner(_AT_ONCE) if count >= 8 else None
                # No more images are needed if the given reading detects enough.
                enough = sum(tally.confident > 0 for tally in self.tallies[id(self.given)]) > count / 2
                if winner is not None or (count >= 8 and not self._live and enough):
                    return winner
        # Where images are used up, the likelier reading is taken, and its answer says how sure that is.
        return self._winner(_CLEARLY, 1e-9 if self._thorough else SURE)

    def figures(self, reading: Reading) -> NDArray[np.float64]:
        return np.array([tally.figure for tally in self.tallies[id(reading)]])

    def gain(self, reading: Reading) -> float:
        """Figure of a reading divided by that of the given one, on the same images."""
        theirs = self.figures(reading)
        ours = self.figures(self.given)[: len(theirs)]
        if ours.sum() > 1e-9:
            return float(theirs.sum() / ours.sum())
        return math.inf if theirs.sum() > 1e-9 else float(theirs.sum() >= ours.sum() - 1e-9)

    def _sure(self, other: Reading, sign: int) -> float:
        """Probability, 0..1, that a reading is better (1) or worse (-1) than the given one, and not by chance; it is
        corrected for repeated looks."""
        t, degrees = sign * self._t(other), len(self.tallies[id(other)]) - 1
        if degrees < 1 or t <= 0:
            return 0.0
        return max(0.0, 1 - _CHANCES * (1 - NormalDist().cdf(normal_of(t, degrees))))

    def works(self, reading: Reading) -> bool:
        """Whether the images show that a reading works."""
        return judged(self.tallies[id(reading)], reading.config) == ((), "")

    def _surely_worse(self, other: Reading) -> float:
        """Probability, 0..1, that a reading is worse than the given one, if that is sure; else 0."""
        sure = self._sure(other, -1)
        if sure >= SURE and self.gain(other) <= 1 / _CLEARLY:
            return sure
        return SURE if self._less_sound(other) else 0.0

    def _less_sound(self, other: Reading) -> bool:
        """Whether the given reading works, and surely more of what it finds is found again or goes with the image."""
        ours, theirs = self.tallies[id(self.given)], self.tallies[id(other)]
        return (
            len(theirs) >= _FEWEST_SOUND
            and self.works(self.given)
            and any(
                share(theirs)[1] < share(ours[: len(theirs)])[0] - _LESS_SOUND
                for share in (agreement_share, moved_share)
            )
        )

    def answer(self, question: str) -> Answer | None:
        """What was found on a question; None if nothing was tried."""
        found: list[Answer] = []
        for other in self.others:
            if other.question != question:
                continue
            images = len(self.tallies[id(other)])
            if worse := self._surely_worse(other):
                found.append(Answer(worse, images))
            else:
                sure = self._sure(other, -1)
                likely = 1 - (1 - sure) / _CHANCES if sure else 0.5
                rival = Reading(other.config, self.given.config, question)
                found.append(Answer(min(likely, SURE - 0.01), images, rival=rival, same=self._same(other)))
        return min(found, key=lambda one: (one.rival is None, one.same, one.sure), default=None)

    def _decided(self, other: Reading, count: int) -> bool:
        if not self._thorough:
            return self.gain(other) <= 0.8 if count == 4 else self._t(other) <= _BEHIND.get(count, -math.inf)
        if self._hopeless(self.given, count) and self._hopeless(other, count):
            return True
        if count >= 32 and self._same(other):
            return True
        return self._surely_worse(other) > 0

    def _hopeless(self, reading: Reading, count: int) -> bool:
        """Whether further images would hardly make a reading work."""
        tallies = self.tallies[id(reading)]
        if count >= _ENOUGH_EMPTY and not any(tally.confident for tally in tallies):
            return True
        return count >= _ENOUGH_BROKEN and bool(judged(tallies, reading.config)[0])

    def _same(self, other: Reading) -> bool:
        """Whether two readings differ by less than 4 %, with a standard error of under 2 %."""
        theirs = self.figures(other)
        ours = self.figures(self.given)[: len(theirs)]
        if len(theirs) < FEWEST_IMAGES or ours.sum() <= 1e-9:
            return False
        error = float((theirs - ours).std(ddof=1)) * math.sqrt(len(theirs)) / float(ours.sum())
        return abs(self.gain(other) - 1) < _CLEARLY - 1 and error < (_CLEARLY - 1) / 2

    def _look_at(self, path: Path) -> None:
        readings = [self.given, *self._live]
        missing = [reading for reading in readings if (_key(reading), path) not in self._cache]
        if missing:
            image = read_image(path)
            missing.sort(key=lambda reading: reading.config.input.model_dump_json())
            groups = [list(group) for _, group in groupby(missing, key=lambda reading: reading.config.input)]
            # As many pairs at a time as fill a batch, to save memory.
            size = max(1, self._subject.batch // 2)
            for start in range(0, len(groups), size):
                part = groups[start : start + size]
                pixels = [preprocess(image, group[0].config.input)[0] for group in part]
                outputs = self._subject.outputs([(array, other_look(array)) for array in pixels])
                for group, pair in zip(part, outputs, strict=True):
                    for reading in group:
                        self._cache[_key(reading), path] = self._tallied(pair, reading)
        for reading in readings:
            self.tallies[id(reading)].append(self._cache[_key(reading), path])

    def _tallied(self, pair: Sequence[Mapping[str, NDArray[Any]]], reading: Reading) -> Tally:
        looks: list[Found] = []
        for outputs in pair:
            detections = self._subject.found(outputs, reading.config)
            if detections is None:
                return tally_of(None, reading.config.input)
            looks += [found_in(detections, row) for row in range(2 // len(pair))]
        return tally_of((looks[0], looks[1]), reading.config.input)

    def _winner(self, ratio: float, least: float = SURE) -> Reading | None:
        count = len(self.figures(self.given))
        if count < FEWEST_IMAGES:
            return None
        better = [
            one
            for one in self._live
            if self.gain(one) >= ratio
            # Against a reading that finds next to nothing, one that works needs fewer images.
            and self._sure(one, 1) >= (least if self.gain(one) < _FAR_MORE else min(least, _LIKELY))
            and self.works(one)
            and not self._less_sound(one)
        ]
        most = max((float(self.figures(one).sum()) for one in better), default=0.0)
        # Of those that are the same, the first is the most usual.
        return next((one for one in better if float(self.figures(one).sum()) >= most / _CLEARLY), None)

    def _t(self, other: Reading) -> float:
        """Student's t of the paired differences."""
        theirs = self.figures(other)
        return student_t(theirs - self.figures(self.given)[: len(theirs)])


def _settled(
    subject: _Subject,
    paths: Sequence[Path],
    *,
    thorough: bool = False,
    alternatives: bool = True,
    cache: dict[tuple[str, Path], Tally] | None = None,
    many: Sequence[Path] = (),
) -> Settled:
    """``cache`` holds the tallies of the subject by configuration and image, also those of earlier calls. How images
    are placed is compared on ``many`` images, if there are enough; else with the other questions."""
    given = best = Reading(subject.config, subject.config)
    tallies = {} if cache is None else cache
    apart = len(many) >= FEWEST_PLACED

    def contest_of(reading: Reading, others: Iterable[Reading]) -> _Contest:
        asked = (other for other in others if not (apart and other.question == RESIZE))
        return _Contest(subject, given=reading, others=asked, cache=tallies, thorough=thorough)

    singles = _singles(subject, given) if alternatives else []
    first = contest = contest_of(given, singles)
    winner = contest.run(paths)
    if winner is None and not first.works(given) and alternatives:
        # If two keys are wrong, correcting only one may detect nothing.
        contest = contest_of(given, _pairs(subject, given))
        winner = contest.run(paths)
    gain = 1.0
    for _ in range(_ROUNDS):
        if winner is None:
            break
        gain, best = gain * contest.gain(winner), winner
        contest = contest_of(best, _singles(subject, best))
        winner = contest.run(paths)
    works = contest.works(best)
    placement, placed, decisive = None, 0, 0
    if works and apart:
        placement, ratio, placed = _placed(subject, best, many, thorough=thorough)
        decisive = placed if placement.given is not best else 0
        gain, best = gain * ratio, placement.given
    if thorough and works:
        # What changes little is asked last, of a detector that works.
        contest = contest_of(best, _singles(subject, best, fine=True))
        winner = contest.run(paths)
        if winner is not None:
            gain, best = gain * contest.gain(winner), winner
            contest = contest_of(best, _singles(subject, best, fine=True))
            contest.run(paths)
    looks = _plausibility(contest.tallies[id(contest.given)], best.config)
    result = _plausibility(first.tallies[id(given)], subject.config, best=best, gain=gain, images=decisive)
    result = replace(result, placed=placed)
    answers: dict[str, Answer] = {}
    if thorough and looks.verdict == "working":
        said = {question: contest.answer(question) for question in QUESTIONS}
        if placement is not None:
            said[RESIZE] = _placed_answer(placement)
        answers = {question: one for question, one in said.items() if one is not None}
    return Settled(best.config, first=result, looks=looks, answers=answers)


def _placed(subject: _Subject, best: Reading, paths: Sequence[Path], thorough: bool) -> tuple[Placement, float, int]:
    """The last contest on how images are placed, the gain of what it is given, and the number of images that the first
    one compared."""
    cache: dict[tuple[str, Path], float] = {}

    def contest_of(reading: Reading) -> Placement:
        others = [other for other in input_readings(reading) if other.question == RESIZE]
        return Placement(reading, others, subject.detected, thorough=thorough, cache=cache, progress=subject.progress)

    contest = contest_of(best)
    winner = contest.run(paths)
    if winner is None:
        return contest, 1.0, contest.images
    second = contest_of(winner)
    if thorough:
        second.run(paths)
    return second, contest.gain(winner), contest.images


def _placed_answer(placement: Placement) -> Answer:
    """What the images say of the way of placing them."""
    nearest = max(placement.others, key=placement.sure)
    better, images = placement.sure(nearest), placement.compared(nearest)
    if better <= -SURE:
        return Answer(-better, images)
    rival = Reading(nearest.config, placement.given.config, RESIZE)
    return Answer(min(1 - better if better > 0 else -better, SURE - 0.01), images, rival=rival)


def _plausibility(
    tallies: Sequence[Tally], config: Config, best: Reading | None = None, gain: float = 1.0, images: int = 0
) -> Plausibility:
    """``images`` is the number that spoke for ``best``, where more were looked at for that."""
    symptoms, unknown = judged(tallies, config)
    return Plausibility(
        images=max(images, len(tallies)),
        empty=sum(tally.confident == 0 for tally in tallies),
        boxes=float(np.mean([tally.confident for tally in tallies])) if tallies else 0.0,
        agreement=agreement_share(tallies)[0],
        moved=moved_share(tallies)[0],
        symptoms=symptoms,
        unknown=unknown,
        better=best.changes if best is not None else {},
        better_text=best.text if best is not None else "",
        gain=gain,
    )


def _singles(subject: _Subject, reading: Reading, *, fine: bool = False) -> list[Reading]:
    heads = _fitting(subject, head_readings(reading)) if subject.detector is None else []
    return [*input_readings(reading, fine=fine), *heads]


def _pairs(subject: _Subject, given: Reading) -> list[Reading]:
    """Readings with two keys changed: head and pixels, or colour and normalisation."""
    heads = _fitting(subject, head_readings(given)) if subject.detector is None else []
    pairs = [pair for head in heads for pair in input_readings(head)]
    swapped = next(input_readings(given))
    return [*pairs, *(pair for pair in input_readings(swapped) if pair.config.input != given.config.input)]


def _fitting(subject: _Subject, readings: Iterable[Reading]) -> list[Reading]:
    """The readings that can decode the outputs."""
    source = subject.config.input
    blank = np.zeros((3, source.height, source.width), np.float32)
    outputs = subject.outputs([(blank, blank)])[0][0]
    fitting = []
    for reading in readings:
        try:
            decode(outputs, reading.config)
        except ModelError:
            continue
        fitting.append(reading)
    return fitting
