"""How many calibration images a model needs: its INT8 error against the number of images.

One image in four, at most 64, is held back and judges every point; nothing is computed from it. The other images are
put in random order. The drawings of n images are the first n of them, the next n and so on: drawings of a size have no
image in common, so their spread is honest. Each image is run once. Each part of the order has its own histograms, and a
drawing adds up those of its parts.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from trtdet.backends import OnnxRunner, side_by_side
from trtdet.building.corrections import prepared
from trtdet.building.graph import PlacedGraph, host_graph
from trtdet.building.ranges import Calibrated, calibration_runner, check_detections, select_images, sources_of
from trtdet.building.validation import check_counted, warn_of_percentile
from trtdet.calibration import Collection, CollectionRequest, Ranges, collect, expose
from trtdet.config import Config
from trtdet.data import ImageCache, ImageStream, evenly
from trtdet.detection.suppression import non_max_suppression
from trtdet.errors import ConfigError, DataError, TrtdetWarning
from trtdet.evaluation.coverage import SURE, Coverage, CoverageCounter
from trtdet.options import CalibrationOptions, PlanOptions
from trtdet.options.fields import corrections_of
from trtdet.passes import decoded
from trtdet.progress import Progress, silent, titled
from trtdet.quantization import HeadError
from trtdet.quantization.corrections.gate import QuantizedForm, Task, compare
from trtdet.quantization.sources import held_back
from trtdet.tables import Column, Table, Tables

FEWEST_IMAGES = 8
_FIRST = 4  # images of the first point
_DRAWINGS = 5  # at most, of a size
_MOST_HELD = 64  # images that judge, at most
_NEAR = 0.05  # errors that differ by less than this share count as equal


@dataclass(frozen=True)
class CurvePoint:
    """INT8 models whose ranges come from a number of images, judged on the images held back. An error is that of
    :attr:`trtdet.quantization.HeadError.distance`, an agreement 0..1."""

    images: int
    errors: tuple[float, ...]  # of the threshold rule alone, for each drawing
    agreements: tuple[float, ...]
    corrected: float | None = None  # error with corrections from the first drawing; None if they were not asked for
    corrected_agreement: float | None = None

    @property
    def spread(self) -> tuple[float, float] | None:
        """10 and 90 % of the errors; None of fewer than three drawings."""
        if len(self.errors) < 3:
            return None
        low, high = np.percentile(self.errors, [10, 90]).tolist()
        return low, high


@dataclass(frozen=True)
class ImageCurve:
    """Result of :func:`how_many_images`."""

    rule: str
    effort: str
    points: tuple[CurvePoint, ...]  # by rising number of images
    held: int  # number of images that judged
    coverage: Coverage
    seconds: float

    @property
    def enough(self) -> int | None:
        """Number of images that is enough for the rule's ranges; see :func:`enough_images`."""
        return enough_images({point.images: point.errors for point in self.points})

    @property
    def enough_corrected(self) -> int | None:
        """The same for the corrections; None also if there are none."""
        return enough_images({p.images: [p.corrected] for p in self.points if p.corrected is not None})

    def sentences(self) -> tuple[str, ...]:
        """Advice on the number of images, and what the curve covers."""
        subjects = [(f"ranges of {self.rule}", self.enough)]
        if self.points[0].corrected is not None:
            subjects.append((f"corrections of --effort {self.effort}", self.enough_corrected))
        last = self.points[-1].images
        advice = [
            f"{subject}: more would help, the error still falls at {last} images; give more with --images"
            if enough is None
            else f"{subject}: {enough} images are enough; with more the error is hardly lower"
            for subject, enough in subjects
        ]
        median = [float(np.median(point.errors)) for point in self.points]
        if median[-1] > (1 + 2 * _NEAR) * median[0]:
            advice[0] = (
                f"{subjects[0][0]}: the error rises with the images, as rare values widen the ranges: try another rule "
                "with --calib"
            )
        covered = f"ranges of {self.rule} alone; builds also correct: --effort default measures that too, in minutes"
        if len(subjects) == 2:
            covered = f"ranges of {self.rule}, and corrections from one drawing of each size"
        return (*advice, f"the curve covers {covered}; {self.held} other images judged, {self.seconds:.0f} s in all")

    def table(self) -> Tables:
        columns = (
            "images",
            "drawings",
            Column("error, median", ".4f"),
            Column("10 .. 90 %", align="right"),
            Column("agreement", ".1%"),
            Column("corrected error", ".4f"),
            Column("agreement of it", ".1%"),
        )
        rows = [
            (
                *(point.images, len(point.errors), float(np.median(point.errors))),
                "{:.4f} .. {:.4f}".format(*point.spread) if point.spread else None,
                *(float(np.median(point.agreements)), point.corrected, point.corrected_agreement),
            )
            for point in self.points
        ]
        return Tables([Table(columns, rows, notes=self.sentences()).filled(), self.coverage.table()])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        points = [{**asdict(point), "spread": point.spread} for point in self.points]
        enough = {"enough": self.enough, "enough_corrected": self.enough_corrected, "said": list(self.sentences())}
        return {**asdict(self), "points": points, **enough, "coverage": self.coverage.as_dict()}


def enough_images(errors: Mapping[int, Sequence[float]]) -> int | None:
    """The smallest number of images from which on no error is clearly above that of the largest number.

    ``errors`` has those of each drawing by number of images, rising. A median is clearly above by over 5 %, or by over
    half the 10 .. 90 % spread of the largest number with three drawings or more, if that is wider; the 90 % value of
    three drawings or more is by over twice as much. Returns None if only the largest number itself qualifies, as the
    error still falls there, or if there are no errors.
    """
    if not errors:
        return None
    medians = {images: float(np.median(each)) for images, each in errors.items()}
    spread = {images: np.percentile(each, [10, 90]) for images, each in errors.items() if len(each) >= 3}
    last = medians[max(medians)]
    margin = max([_NEAR * last, *(float(np.ptp(each)) / 2 for each in list(spread.values())[-1:])])
    enough = None
    for images in sorted(medians, reverse=True)[1:]:
        unlucky = images in spread and spread[images][1] > last + 2 * margin
        if medians[images] > last + margin or unlucky:
            break
        enough = images
    return enough


def how_many_images(
    model: Path | str,
    config: Config,
    options: CalibrationOptions,
    effort: str = "none",
    attention: bool = False,
    progress: Progress = silent,
) -> ImageCurve:
    """Measures the error of INT8 against the number of calibration images, and what the images show.

    The layers that are in INT8 by default get the ranges of n = 4, 8, 16, ... images and of all that are not held
    back, up to five drawings of each n. Nothing is written.

    Args:
        options: the images and the threshold rule.
        effort: corrections to measure as well, one drawing of each n; with ``none`` only ranges are measured.
        attention: quantise products of two activations too, as ``int8_attention``.

    Raises:
        ConfigError: fewer than 8 images, histograms in place of images, or no layer in INT8.
        DataError: images cannot be read, or the model detects nothing on those that judge.
        ModelError, CalibrationError: as of :func:`trtdet.building.calibrate`.
    """
    started = time.perf_counter()
    names = corrections_of(effort)
    check_counted(options)
    warn_of_percentile(options.rule)
    graph = host_graph(Path(model), config, plan=PlanOptions(int8_attention=attention))
    if not graph.plan.names("int8"):
        raise ConfigError("no layer of the model is in INT8 by default, so its number of images does not matter")
    selected = select_images(options)
    check_detections(graph, options, selected, progress=progress)
    measurement = _Measurement(graph, options, cache=selected.cache, progress=progress)
    coverage, showing, readable = measurement.coverage(selected.paths)
    if len(readable) < FEWEST_IMAGES:
        raise ConfigError(
            f"{len(readable)} images are too few to compare numbers of images: give {FEWEST_IMAGES} or more with "
            "--images, of which one in four judges"
        )
    fit, judging = held_back(readable)
    held = evenly(judging, _MOST_HELD)
    if not showing & set(held):
        raise DataError(
            f"the model detects nothing over {SURE} on the {len(held)} images that judge, and something on "
            f"{len(showing)} of all {coverage.images}: give images that show its classes"
        )
    random.Random(0).shuffle(fit)
    points = tuple(measurement.points(fit, held, names))
    seconds = round(time.perf_counter() - started, 1)
    return ImageCurve(options.rule, effort, points=points, held=len(held), coverage=coverage, seconds=seconds)


def drawings_of(total: int) -> dict[int, list[range]]:
    """The drawings of each number of images, as positions in the order of ``total`` images: 4, 8, 16, ..., and all."""
    sizes = [_FIRST]
    while 2 * sizes[-1] <= 0.75 * total:
        sizes.append(2 * sizes[-1])
    drawings = {size: [range(at, at + size) for at in range(0, total - size + 1, size)][:_DRAWINGS] for size in sizes}
    return {**drawings, total: [range(total)]}


@dataclass(frozen=True, eq=False)
class _Measurement:
    """Runs the images; an image is decoded once if the cache has room."""

    graph: PlacedGraph
    options: CalibrationOptions
    cache: ImageCache
    progress: Progress

    def coverage(self, paths: Sequence[Path]) -> tuple[Coverage, set[Path], list[Path]]:
        """The coverage, the images with a detection, and those that are readable and not of a single colour."""
        config, head = self.graph.config, decoded(self.graph.nms_mode, self.graph.config)
        runner = OnnxRunner(expose(self.graph.model, head.names))
        stream = ImageStream(paths, config.input, batch_size=runner.batch or 1, cache=self.cache)
        nms = config.with_nms(score_threshold=SURE).nms
        counter, showing, readable = CoverageCounter(config.classes), set(), []
        for batch, outputs in side_by_side(runner, lambda run, batch: (batch, run(batch.images)), iter(stream)):
            detections = non_max_suppression(*head.read(outputs), nms)
            for row, (path, transform) in enumerate(zip(batch.paths, batch.transforms, strict=True)):
                boxes, _, classes = detections.image(row)
                pixels = self.cache.read(path, config.input).pixels
                counter.update(pixels, transform.to_image(boxes), classes)
                showing.update([path] if len(classes) else [])
                readable.append(path)
            self.progress("what the images show", len(readable), len(paths))
        stream.check_pixels()
        return counter.compute(), showing, [path for path in readable if path not in stream.constant]

    def points(self, fit: Sequence[Path], held: Sequence[Path], names: tuple[str, ...]) -> Iterator[CurvePoint]:
        """The points of the curve for the images ``fit`` in their order, judged on ``held``."""
        drawings = drawings_of(len(fit))
        cuts = sorted({place for each in drawings.values() for drawn in each for place in (drawn.start, drawn.stop)})
        parts = dict(zip(cuts, self._collected([fit[a:b] for a, b in pairwise(cuts)]), strict=False))
        for size, drawn in drawings.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TrtdetWarning)  # of small drawings, such as a tensor that stays zero
                sums = [reduce(add, (part for place, part in parts.items() if place in each)) for each in drawn]
                forms = [self._form(histograms, ()) for histograms in sums]
                forms += [self._form(sums[0], names, tuple(fit[:size]))] if names else []
                errors = self._judged(forms, held, f"judging {size} images")
            rule, corrected = errors[: len(drawn)], errors[len(drawn) :]
            yield CurvePoint(
                size,
                errors=tuple(error.distance for error in rule),
                agreements=tuple(error.agreement for error in rule),
                corrected=corrected[0].distance if corrected else None,
                corrected_agreement=corrected[0].agreement if corrected else None,
            )

    def _collected(self, parts: Sequence[Sequence[Path]]) -> Iterator[Collection]:
        """The histograms of each part."""
        config, tensors = self.graph.config.input, self.graph.placement.following(self.graph.plan).activations
        runner, done, total = calibration_runner(self.graph, tensors), 0, sum(map(len, parts))
        for paths in parts:
            stream = ImageStream(paths, config, batch_size=runner.batch or 1, cache=self.cache)
            yield collect(runner, CollectionRequest(runner.input, tensors=tensors), stream)
            done += len(paths)
            self.progress("calibrating", done, total)

    def _form(self, histograms: Collection, names: tuple[str, ...], images: tuple[Path, ...] = ()) -> QuantizedForm:
        """The INT8 model of a drawing, with the corrections ``names`` from its ``images``."""
        ranges = Ranges.choose(histograms, self.options.rule_name, self.options.percentile)
        ranged = Calibrated(self.graph, histograms, ranges, paths=images, cache=self.cache, reused=False)
        shown = titled(self.progress, f"{len(images)} images")
        made = prepared(ranged, self.options, names, progress=shown)
        return QuantizedForm("", made.ranges, made.corrections)

    def _judged(self, forms: Sequence[QuantizedForm], held: Sequence[Path], stage: str) -> tuple[HeadError, ...]:
        def shown(_: str, done: int, total: int) -> None:
            self.progress(stage, done, total)

        sources = sources_of(self.graph, tuple(held), cache=self.cache, progress=shown)
        task = Task(
            self.graph.model,
            placement=self.graph.placement.following(self.graph.plan),
            candidates={form.ranges.rule: form.ranges for form in forms},
            corrections=(),
            fit=(),
            held=held,
            sources=sources,
        )
        return compare(task, forms).errors
