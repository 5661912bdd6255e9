"""Third step of a build: ranges -> corrections that hold on images held back, and all else that INT8 needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import onnx

from trtdet.building.graph import PlacedGraph
from trtdet.building.half import Magnitudes, half_parts, within_half
from trtdet.building.ranges import Calibrated, Selection, sources_of
from trtdet.calibration import Ranges
from trtdet.config import Config
from trtdet.data import CocoDataset, content_hash, evenly
from trtdet.errors import ConfigError, ModelError
from trtdet.options import CalibrationOptions
from trtdet.passes import decoded
from trtdet.plans.measuring import RankingSubject
from trtdet.progress import Progress, silent
from trtdet.quantization import (
    Corrected,
    Corrections,
    DataFlow,
    HeadRange,
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
        rule_independent: the corrections, where no threshold rule decides anything of them; else None.
    """

    calibrated: Calibrated
    ranges: Ranges
    corrections: Corrections
    plan: PrecisionPlan
    summary: tuple[str, ...] = ()
    rule_independent: Corrected | None = None

    @cached_property
    def magnitudes(self) -> Magnitudes:
        """The largest magnitudes of the model's tensors, measured as they are needed."""
        calibrated = self.calibrated
        maxima = {name: float(histogram.amax) for name, histogram in calibrated.collection.histograms.items()}
        return Magnitudes(self.graph, Selection(calibrated.paths, cache=calibrated.cache), maxima)

    @property
    def graph(self) -> PlacedGraph:
        return self.calibrated.graph

    @property
    def flow(self) -> DataFlow:
        return self.graph.flow

    @property
    def model(self) -> onnx.ModelProto:
        """The rewritten float model."""
        return self.graph.model

    @property
    def config(self) -> Config:
        return self.graph.config

    def explicit(self, plan: PrecisionPlan, form: WeightForm | None = None) -> Requantized:
        """The Q/DQ model of a plan, checked for everything that would make INT8 run in float.

        Args:
            form: of the weights' scales; None for the first that the backend takes.

        Raises:
            ConfigError: the plan does not fit the model.
            ModelError: INT8 would be lost.
        """
        flow, model = self.flow, self.model
        half = half_parts(model, plan, flow, magnitudes=self.magnitudes)
        explicit = insert_qdq(
            model,
            self.graph.placement.following(plan),
            self.ranges,
            corrections=self.corrections,
            weights=WeightScales(form or flow.weights[0], half.outputs),
        )
        network = requantize(to_half(quantized_joins(explicit), half.names, half.left), self.ranges.inputs)
        problems = lint(network.model)
        if problems:
            raise ModelError(f"the INT8 graph would lose INT8 in {len(problems)} places, the first: {problems[0]}")
        return network

    def without_overflow(self, plan: PrecisionPlan, progress: Progress = silent) -> PrecisionPlan:
        """A plan with FP32 for what FP16 does not hold, see :func:`trtdet.building.half.within_half`."""
        return within_half(self.model, plan, self.flow, magnitudes=self.magnitudes, progress=progress)

    def subject(self, count: int, dataset: CocoDataset | None = None) -> RankingSubject:
        """What is ranked, on so many of the calibration images or on annotated images."""
        if count < 1:
            raise ConfigError(f"a ranking needs at least 1 image, got {count}")
        paths = self.calibrated.paths if dataset is None else tuple(image.path for image in dataset.images)
        if dataset is None:
            paths = evenly(paths, count)
        return RankingSubject(
            model=self.model,
            placement=self.graph.placement.following(self.plan),
            ranges=self.ranges,
            corrections=self.corrections,
            head=decoded(self.graph.nms_mode, self.config),
            images=paths,
            images_sha256=content_hash(paths),
            preprocess=self.config.input,
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
    """Works out the corrections; with the rule ``auto`` the rules are among what is compared.

    Args:
        names: the corrections that may be used; empty for the textbook form.
        plan: what each convolution runs in; None for the graph's. Only what it has in INT8 is corrected.
        share: let tensors between which values are only moved share a range, for a model with Q/DQ pairs.

    Raises:
        ConfigError: an unknown correction, or fewer than two images.
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
    parted = frozenset(placement.activations) if graph.flow.fused else frozenset()
    if share:
        plain, _ = shared(graph.model, placement, calibrated.ranges)
        ranges, together = shared(graph.model, placement, ranges)
        calibrated, parted = replace(calibrated, ranges=plain), parted.union(*together)
        start = replace(start, together=together)
    if not correcting:
        return Prepared(calibrated, ranges=calibrated.ranges, corrections=Corrections(), plan=plan)
    start = replace(start, plain=calibrated.ranges, parted=parted)
    result = correct(graph.model, placement, {ranges.rule: ranges}, names=names, sources=sources, start=start)
    chosen = start.noise is not None and result.ranges is not start.plain
    return _with_result(calibrated, placement, result, chosen=chosen)


def prepared_beside(
    earlier: Prepared, calibrated: Calibrated, options: CalibrationOptions, progress: Progress = silent
) -> Prepared | None:
    """The same corrections beside another threshold rule, which they are only compared with.

    Args:
        earlier: of the same graph, plan and images, with a range for every tensor whatever the rule.
        calibrated: model and histograms, with the ranges of the other rule.

    Returns:
        None where the corrections are no better than this rule alone, or a rule decides something of them.
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
    """With how much the threshold rule decides beside the corrections; nothing where every range was ``chosen``."""
    summary, mapped = result.summary, result.corrections.tensors
    if mapped or chosen:
        # The input keeps its whole range under every rule.
        ruled = [name for name in placement.activations if name != calibrated.collection.source]
        count = 0 if chosen else sum(name not in mapped for name in ruled)
        decided = f"{count} of {len(ruled)} ranges, the corrections the others"
        if not count:
            decided = f"none of {len(ruled)} ranges, the corrections all"
        # The last sentence stays that of the error at the head.
        summary = (*summary[:-1], f"--calib {result.ranges.rule} decides {decided}", summary[-1])
    return Prepared(
        calibrated=calibrated,
        ranges=result.ranges,
        corrections=result.corrections,
        plan=result.plan,
        summary=summary,
        rule_independent=result if chosen else None,
    )
