"""Third stage: ranges -> corrections that hold on images held back, and all else that the Q/DQ model is made from."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import onnx

from trtdet.backends import OnnxRunner
from trtdet.calibration import RULES, Ranges
from trtdet.config import Config
from trtdet.data import CocoDataset, content_hash, evenly
from trtdet.errors import ConfigError, ModelError, TrtdetWarning
from trtdet.mixed_precision.subject import Subject
from trtdet.passes import decoded
from trtdet.pipeline.options import AUTO, CalibrationOptions
from trtdet.pipeline.stages.calibrating import Calibrated, Selection
from trtdet.pipeline.stages.half_range import Magnitudes, half_parts
from trtdet.pipeline.stages.rewriting import Graph
from trtdet.progress import Progress, silent
from trtdet.quantization import (
    Corrected,
    Corrections,
    DataFlow,
    HeadRange,
    PrecisionPlan,
    QdqPlacement,
    Requantized,
    Sources,
    Start,
    WeightForm,
    WeightScales,
    correct,
    insert_qdq,
    judged_beside,
    lint,
    quantized_joins,
    requantize,
    sense,
    shared,
    to_half,
)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model with all that INT8 needs to be known of it, before it is decided what each convolution runs in.

    Attributes:
        calibrated: the model, the histograms, and the ranges of the rule that was named.
        ranges: the ranges that are written; with ``auto`` the best of each tensor.
        corrections: the corrections that were kept.
        plan: what each convolution runs in, as long as nothing else is asked for, with the corrections of each.
        summary: one sentence for each kind of correction.
        unruled: what the corrections were found to be, where no threshold rule decides anything of them.
    """

    calibrated: Calibrated
    ranges: Ranges
    corrections: Corrections
    plan: PrecisionPlan
    summary: tuple[str, ...] = ()
    unruled: Corrected | None = None

    @cached_property
    def magnitudes(self) -> Magnitudes:
        """The largest magnitudes of the model's tensors, measured as they are needed."""
        calibrated = self.calibrated
        known = {name: float(histogram.amax) for name, histogram in calibrated.collection.histograms.items()}
        return Magnitudes(self.graph, Selection(calibrated.paths, cache=calibrated.cache), known)

    @property
    def flow(self) -> DataFlow:
        """How INT8 kernels read and write."""
        return self.graph.flow

    @property
    def graph(self) -> Graph:
        """The rewritten float model with its placement."""
        return self.calibrated.graph

    @property
    def model(self) -> onnx.ModelProto:
        """The rewritten float model."""
        return self.graph.model

    @property
    def config(self) -> Config:
        """The model's configuration."""
        return self.graph.config

    @property
    def placement(self) -> QdqPlacement:
        """Where Q/DQ pairs go."""
        return self.graph.placement

    def explicit(self, plan: PrecisionPlan, form: WeightForm | None = None) -> Requantized:
        """The Q/DQ model of a plan, checked for everything that would make INT8 run in float.

        Args:
            plan: a precision for each convolution.
            form: of the weights' scales; None for the first that the backend takes.

        Raises:
            ConfigError: the plan does not fit the model.
            ModelError: INT8 would be lost.
        """
        flow, model = self.flow, self.model
        half = half_parts(model, plan, flow, self.magnitudes)
        explicit = insert_qdq(
            model,
            self.placement.following(plan),
            self.ranges,
            self.corrections,
            weights=WeightScales(form or flow.weights[0], half.outputs),
        )
        made = requantize(to_half(quantized_joins(explicit), half.names, half.left), self.ranges.inputs)
        problems = lint(made.model)
        if problems:
            raise ModelError(f"the INT8 graph would lose INT8 in {len(problems)} places, the first: {problems[0]}")
        return made

    def subject(self, count: int, dataset: CocoDataset | None = None) -> Subject:
        """What is ranked, on so many of the calibration images or on annotated images."""
        if count < 1:
            raise ConfigError(f"a ranking needs at least 1 image, got {count}")
        paths = self.calibrated.paths if dataset is None else tuple(image.path for image in dataset.images)
        if dataset is None:
            paths = evenly(paths, count)
        return Subject(
            self.model,
            self.placement.following(self.plan),
            self.ranges,
            self.corrections,
            decoded(self.graph.nms_mode, self.config),
            paths,
            content_hash(paths),
            self.config.input,
            self.calibrated.cache,
        )


def prepared(
    calibrated: Calibrated,
    options: CalibrationOptions,
    names: tuple[str, ...],
    progress: Progress = silent,
    plan: PrecisionPlan | None = None,
    share: bool = True,
) -> Prepared:
    """Works out the corrections; with the rule ``auto`` the rules are among what is compared.

    Args:
        calibrated: model and histograms.
        options: rule and percentile.
        names: the corrections that may be used; empty for the textbook form.
        progress: told of every image.
        plan: what each convolution runs in; None for the graph's. Only what it has in INT8 is corrected.
        share: let tensors between which values are only moved share a range, for a model with Q/DQ pairs.

    Raises:
        ConfigError: an unknown correction, or fewer than two images.
    """
    graph = calibrated.graph
    plan = plan or graph.plan
    placement = graph.placement.following(plan)
    wanted = bool(plan.names("int8")) and (bool(names) or options.rule == AUTO)
    sources = _sources(calibrated, options, progress)
    ranges, start = calibrated.ranges, Start()
    if wanted and HeadRange.name in names:
        ranges, start = sense(graph.model, placement, ranges, sources)
    parted = frozenset(placement.activations) if graph.flow.fused else frozenset()
    if share:
        plain, _ = shared(graph.model, placement, calibrated.ranges)
        ranges, together = shared(graph.model, placement, ranges)
        calibrated, parted = replace(calibrated, ranges=plain), parted.union(*together)
        start = replace(start, together=together)
    if not wanted:
        return Prepared(calibrated, calibrated.ranges, Corrections(), plan)
    start = replace(start, plain=calibrated.ranges, parted=parted)
    candidates = _candidates(calibrated, options, ranges, start)
    done = correct(graph.model, placement, candidates, names, sources, start)
    return _finished(calibrated, placement, done, start.noise is not None and done.ranges is not start.plain)


def prepared_beside(
    known: Prepared, calibrated: Calibrated, options: CalibrationOptions, progress: Progress = silent
) -> Prepared | None:
    """The same corrections beside another threshold rule, which they are only compared with.

    Args:
        known: of the same graph, plan and images, with a range for every tensor whatever the rule.
        calibrated: model and histograms, with the ranges of the other rule.
        options: that rule.
        progress: told of every image.

    Returns:
        None where the corrections are no better than this rule alone, or a rule decides something of them.
    """
    if known.unruled is None or options.rule == AUTO:
        return None
    graph = calibrated.graph
    placement = graph.placement.following(known.plan)
    plain, _ = shared(graph.model, placement, calibrated.ranges)
    found = replace(known.unruled, ranges=replace(known.ranges, rule=plain.rule, percent=plain.percent))
    done = judged_beside(graph.model, placement, plain, found, _sources(calibrated, options, progress))
    return None if done is None else _finished(replace(calibrated, ranges=plain), placement, done, True)


def _finished(calibrated: Calibrated, placement: QdqPlacement, done: Corrected, chosen: bool) -> Prepared:
    """With how much the threshold rule has to say; nothing where every range was ``chosen`` otherwise."""
    # The input keeps its whole range under every rule.
    ruled = [name for name in placement.activations if name != calibrated.collection.source]
    summary = _with_share(done.ranges.rule, ruled, done, chosen)
    return Prepared(calibrated, done.ranges, done.corrections, done.plan, summary, done if chosen else None)


def _sources(calibrated: Calibrated, options: CalibrationOptions, progress: Progress) -> Sources:
    graph = calibrated.graph
    return Sources(
        calibrated.paths,
        graph.config.input,
        OnnxRunner,
        decoded(graph.nms_mode, graph.config),
        progress,
        calibrated.cache,
        options.unfinished,
    )


def _candidates(calibrated: Calibrated, options: CalibrationOptions, ranges: Ranges, start: Start) -> dict[str, Ranges]:
    """Ranges by rule; the first is what the others are compared with."""
    if options.rule == AUTO and start.noise is not None:
        # Ranges by the detections make the rules' thresholds needless.
        ranges = replace(ranges, rule=AUTO, percent=None)
    found = {ranges.rule: ranges}
    if options.rule == AUTO and start.noise is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrtdetWarning)  # given when the first rule was applied
            for rule in RULES:
                if rule not in found:
                    found[rule] = Ranges.choose(calibrated.collection, rule, options.percentile)
    return found


def _with_share(rule: str, ruled: Sequence[str], done: Corrected, chosen: bool) -> tuple[str, ...]:
    """The summary, with how much a threshold rule has to say beside corrections, which choose ranges of their own."""
    mapped = done.corrections.tensors
    if rule == AUTO or not (mapped or chosen):
        return done.summary
    decided = 0 if chosen else sum(name not in mapped for name in ruled)
    if decided:
        said = f"--calib {rule} decides {decided} of {len(ruled)} ranges, the corrections the others"
    else:
        said = f"--calib {rule} decides none of {len(ruled)} ranges, the corrections all"
    # The last sentence stays that of the error at the head.
    return (*done.summary[:-1], said, done.summary[-1])
