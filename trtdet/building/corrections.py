"""Third step of a build: ranges -> corrections that reduce the error on images they were not made from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import onnx

from trtdet.building.graph import PlacedGraph
from trtdet.building.half import Magnitudes, half_parts, within_half
from trtdet.building.ranges import Calibrated, Selection, sources_of
from trtdet.calibration import Range, Ranges
from trtdet.data import CocoDataset, content_hash, evenly
from trtdet.errors import ConfigError, ModelError
from trtdet.options import CalibrationOptions
from trtdet.passes import decoded
from trtdet.plans.measuring import RankingSubject
from trtdet.progress import Progress, silent
from trtdet.quantization import (
    Corrected,
    Corrections,
    HeadRange,
    NetworkForm,
    OwnScales,
    PrecisionPlan,
    QdqPlacement,
    Requantized,
    Start,
    WeightForm,
    WeightScales,
    correct,
    insert_qdq,
    judged_beside,
    lint,
    requantize,
    sense,
    shared,
    to_half,
)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model with its ranges and corrections, before the plan is chosen."""

    calibrated: Calibrated  # the model, the histograms, and the ranges of the threshold rule
    ranges: Ranges  # the ranges of the INT8 model
    corrections: Corrections
    plan: PrecisionPlan  # default precisions, with the corrections of each convolution
    summary: tuple[str, ...] = ()  # one sentence for each kind of correction
    rule_independent: Corrected | None = None  # the corrections if they do not depend on the threshold rule, else None

    @cached_property
    def magnitudes(self) -> Magnitudes:
        """Largest magnitudes of the model's tensors, measured at first use."""
        paths, cache, histograms = self.calibrated.paths, self.calibrated.cache, self.calibrated.collection.histograms
        maxima = {name: float(histogram.amax) for name, histogram in histograms.items()}
        return Magnitudes(self.graph, Selection(paths, cache=cache), maxima)

    @property
    def graph(self) -> PlacedGraph:
        return self.calibrated.graph

    @property
    def model(self) -> onnx.ModelProto:
        """The rewritten float model."""
        return self.graph.model

    def explicit(
        self, plan: PrecisionPlan, weights: WeightForm | None = None, form: NetworkForm = NetworkForm()
    ) -> Requantized:
        """The Q/DQ model of a plan; ``weights`` is the form of their scales, the backend's first if None. A tensor that
        only ``form`` quantises takes its largest magnitude on the calibration images as its range. Raises ConfigError:
        the plan does not fit the model; ModelError: the Q/DQ nodes would make a backend run INT8 layers in float."""
        flow, model, able = self.graph.flow, self.model, self.graph.placement
        plan = form.planned(model, plan, able.plan)
        half = half_parts(model, plan, flow, magnitudes=self.magnitudes)
        placement = form.placed(model, able.following(plan))
        mapped, tensors = self.corrections.tensors, self.ranges.tensors
        more = self.magnitudes.of(name for name in placement.activations if name not in tensors)
        ranges = replace(self.ranges, tensors={**tensors, **{name: Range(x, -x, x) for name, x in more.items()}})
        unmapped = tuple(name for name in placement.activations if name not in mapped)
        ranges = form.ranged(model, replace(placement, activations=unmapped), ranges)
        scales = WeightScales(weights or flow.weights[0], half.outputs)
        explicit = insert_qdq(model, placement, ranges, corrections=self.corrections, weights=scales)
        network = requantize(to_half(form.paired(explicit), half.names, half.left), ranges.inputs)
        problems = lint(network.model)
        if problems:
            raise ModelError(f"the INT8 graph would lose INT8 in {len(problems)} places, the first: {problems[0]}")
        return network

    def without_overflow(self, plan: PrecisionPlan, progress: Progress = silent) -> PrecisionPlan:
        """The plan with FP32 where values exceed FP16, see :func:`trtdet.building.half.within_half`."""
        return within_half(self.model, plan, self.graph.flow, magnitudes=self.magnitudes, progress=progress)

    def subject(self, count: int, dataset: CocoDataset | None = None) -> RankingSubject:
        """Input of the ranking, on ``count`` calibration images or on all images of ``dataset``."""
        if count < 1:
            raise ConfigError(f"a ranking needs at least 1 image, got {count}")
        if dataset is None:
            paths = evenly(self.calibrated.paths, count)
        else:
            paths = tuple(image.path for image in dataset.images)
        return RankingSubject(
            model=self.model,
            placement=self.graph.placement.following(self.plan),
            ranges=self.ranges,
            corrections=self.corrections,
            head=decoded(self.graph.nms_mode, self.graph.config),
            images=paths,
            images_sha256=content_hash(paths),
            preprocess=self.graph.config.input,
            cache=self.calibrated.cache,
        )


def prepared(
    calibrated: Calibrated,
    options: CalibrationOptions,
    names: tuple[str, ...],
    progress: Progress = silent,
    plan: PrecisionPlan | None = None,
    share: bool = True,
) -> Prepared:
    """Computes the corrections.

    ``names`` are the allowed corrections, none for plain INT8. The INT8 convolutions of ``plan`` are corrected; None
    takes the graph's default. ``share`` gives one range to tensors between which values are only moved, for a model
    with Q/DQ pairs. Raises ConfigError: an unknown correction, or fewer than two images.
    """
    graph = calibrated.graph
    plan = plan or graph.plan
    placement = graph.placement.following(plan)
    correcting = bool(plan.names("int8")) and bool(names)
    paths, cache = calibrated.paths, calibrated.cache
    sources = sources_of(graph, paths, cache=cache, progress=progress, unfinished=options.unfinished)
    ranges, start = calibrated.ranges, Start()
    if correcting and HeadRange.name in names:
        ranges, start = sense(graph.model, placement, ranges, sources=sources)
    parted = _parted(graph, placement) - start.ruling(ranges)
    if share:
        plain, _ = shared(graph.model, placement, calibrated.ranges)
        ranges, together = shared(graph.model, placement, ranges)
        calibrated, parted = replace(calibrated, ranges=plain), parted.union(*together)
        start = replace(start, together=together)
    if not correcting:
        return Prepared(calibrated, ranges=calibrated.ranges, corrections=Corrections(), plan=plan)
    start = replace(start, plain=calibrated.ranges, parted=parted, fused=bool(graph.flow.fused))
    result = correct(graph.model, placement, {ranges.rule: ranges}, names=names, sources=sources, start=start)
    chosen = start.noise is not None and result.ranges is not start.plain
    return _with_result(calibrated, placement, result, chosen=chosen)


def _parted(graph: PlacedGraph, placement: QdqPlacement) -> frozenset[str]:
    """Tensors for which a channel map's Mul has a price where kernels round what they write: those that a layer reads
    which INT8 makes faster. For a layer that is in INT8 by request alone, FP16 was no choice, whatever a Mul costs."""
    if not graph.flow.fused:
        return frozenset()
    faster = set(graph.faster.names("int8"))
    return frozenset(
        tensor for tensor, readers in placement.readers.items() if any(reader in faster for reader, _ in readers)
    )


def prepared_as_given(calibrated: Calibrated, own: OwnScales, plan: PrecisionPlan, rescaled: bool) -> Prepared:
    """The weights of a quantised model with its scales of activations, or ``rescaled`` with the calibrated ranges."""
    graph = calibrated.graph
    corrections = own.corrections(graph.flow.half, rescaled)
    ranges = calibrated.ranges
    if rescaled:
        ranges, _ = shared(graph.model, graph.placement.following(plan), ranges)
    return Prepared(replace(calibrated, ranges=ranges), ranges=ranges, corrections=corrections, plan=plan)


def prepared_beside(
    earlier: Prepared, calibrated: Calibrated, options: CalibrationOptions, progress: Progress = silent
) -> Prepared | None:
    """Compares existing corrections with another threshold rule.

    ``earlier`` has the same graph, plan and images; ``calibrated`` has the ranges of the other rule. Returns None if
    the corrections depend on the rule, or are not better than the rule alone.
    """
    if earlier.rule_independent is None:
        return None
    graph, paths, cache = calibrated.graph, calibrated.paths, calibrated.cache
    sources = sources_of(graph, paths, cache=cache, progress=progress, unfinished=options.unfinished)
    placement = graph.placement.following(earlier.plan)
    plain, _ = shared(graph.model, placement, calibrated.ranges)
    ranges = replace(earlier.ranges, rule=plain.rule, percent=plain.percent)
    corrected = replace(earlier.rule_independent, ranges=ranges)
    result = judged_beside(graph.model, placement, plain, corrected=corrected, sources=sources)
    return None if result is None else _with_result(replace(calibrated, ranges=plain), placement, result, chosen=True)


def _with_result(calibrated: Calibrated, placement: QdqPlacement, result: Corrected, chosen: bool) -> Prepared:
    """Adds to the summary how many ranges the threshold rule decides: none if the corrections have ``chosen`` all."""
    summary, mapped = result.summary, result.corrections.tensors
    if mapped or chosen:
        # Every rule keeps the full range of the input.
        ruled = [name for name in placement.activations if name != calibrated.collection.source]
        count = 0 if chosen else sum(name not in mapped for name in ruled)
        decided = f"{count} of {len(ruled)} ranges, the corrections the others"
        if not count:
            decided = f"none of {len(ruled)} ranges, the corrections all"
        # The output error stays the last sentence.
        summary = (*summary[:-1], f"--calib {result.ranges.rule} decides {decided}", summary[-1])
    return Prepared(
        calibrated=calibrated,
        ranges=result.ranges,
        corrections=result.corrections,
        plan=result.plan,
        summary=summary,
        rule_independent=result if chosen else None,
    )
