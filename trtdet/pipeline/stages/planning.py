"""Fourth stage: all that INT8 needs -> what precision each convolution runs in."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx

from trtdet.backends import OnnxRunner
from trtdet.bundle import Bundle
from trtdet.calibration import expose
from trtdet.data import CocoDataset, ImageStream
from trtdet.errors import ConfigError, TrtdetWarning
from trtdet.evaluation.comparison import compare
from trtdet.evaluation.scoring import Evaluation, evaluate
from trtdet.mixed_precision.planning import keeping, most_sensitive, named, reasons, within_budget
from trtdet.mixed_precision.ranking import rank
from trtdet.mixed_precision.scores import Sensitivity
from trtdet.mixed_precision.search import Score, TradeOff, smallest
from trtdet.mixed_precision.subject import Method, subject_key
from trtdet.pipeline.options import KeepOptions
from trtdet.pipeline.stages.correcting import Prepared
from trtdet.pipeline.stages.rewriting import Graph
from trtdet.progress import Progress, silent
from trtdet.quantization import LARGEST, Cause, Entry, Precision, PrecisionPlan, QdqPlacement, region_of
from trtdet.quantization.macs import DEPTHWISE, multiply_adds
from trtdet.runtime.detector import Detector

RANKING = "sensitivity.json"
"""The file of a bundle that keeps the ranking."""


@dataclass(frozen=True)
class Planned:
    """What each convolution runs in, and what that was found by."""

    plan: PrecisionPlan
    ranking: Sensitivity | None = None
    trade_off: TradeOff | None = None


def choose_plan(
    prepared: Prepared,
    keep: KeepOptions,
    ranked: Callable[[], Sensitivity],
    dataset: CocoDataset | None = None,
    progress: Progress = silent,
) -> Planned:
    """The plan that the options ask for.

    Args:
        prepared: the model.
        keep: what stays in FP16.
        ranked: gives the ranking, where one is needed.
        dataset: the annotated images, for a bound on the loss.
        progress: told of every image that is scored.

    Raises:
        ConfigError: the options do not fit the model, or no plan keeps the bound.
    """
    plan = prepared.plan
    if isinstance(keep.keep, Path):
        return Planned(without_overflow(prepared, _edited(prepared, keep.keep)))
    if isinstance(keep.keep, tuple):
        macs = multiply_adds(prepared.model)
        group = [name for name in plan.names("int8") if macs[name].depthwise]
        names = [name for given in keep.keep for name in (group if given == DEPTHWISE else (given,))]
        listed = dict.fromkeys(named(plan, names), "kept: named")
        return Planned(without_overflow(prepared, keeping(plan, listed, Cause.KEPT_NAMED)))
    if not keep.ranked or keep.keep == 0:
        return Planned(without_overflow(prepared, plan))
    ranked = cache(ranked)
    trade_off = None
    if keep.max_map_drop is not None:
        assert dataset is not None, "validation gives the annotated images"
        trade_off = _trade_off(prepared, ranked, keep.max_map_drop, dataset, progress)
        chosen, cause = trade_off.chosen.names, Cause.KEPT_BOUND
        if not chosen:
            return Planned(without_overflow(prepared, plan), trade_off=trade_off)
    elif isinstance(keep.keep, int):
        chosen, cause = most_sensitive(ranked(), keep.keep), Cause.KEPT_SENSITIVE
    else:
        chosen, cause = within_budget(ranked(), keep.budget or 0.0), Cause.KEPT_BUDGET
    kept = keeping(plan, reasons(ranked(), chosen), cause)
    return Planned(without_overflow(prepared, kept), ranked(), trade_off)


def ranking(prepared: Prepared, keep: KeepOptions, previous: Bundle | None, progress: Progress) -> Sensitivity:
    """The ranking of a bundle that was made from the same, or a new measurement."""
    subject = prepared.subject(keep.num_images)
    if previous is not None and RANKING in previous.manifest.files:
        found = Sensitivity.load(previous.file(RANKING))
        if found.key == subject_key(subject, Method()):
            return found
    return rank(subject, ray=keep.ray, progress=progress)


def float_plan(plan: PrecisionPlan, precision: Precision) -> PrecisionPlan:
    """Everything in one precision; what decodes boxes stays in FP32."""
    entries = {}
    for name, entry in plan.entries.items():
        stays = precision == "fp16" and entry.cause is Cause.DECODES_BOXES
        entries[name] = entry if stays else Entry(precision, f"--{precision}", Cause.REQUESTED)
    return PrecisionPlan(entries)


def edited_plan(path: Path, placement: QdqPlacement) -> PrecisionPlan:
    """A plan from a file.

    Raises:
        ConfigError: it cannot be read, is of another model, or asks for INT8 where that is impossible.
    """
    plan = PrecisionPlan.load(path)
    try:
        placement.following(plan)
    except ConfigError as error:
        raise ConfigError(f"plan '{path}': {error.problem}", error.hint) from None
    return plan


def starting_plan(graph: Graph, keep: KeepOptions) -> PrecisionPlan:
    """What corrections are made for: the graph's plan, with INT8 where an edited plan asks for it.

    Raises:
        ConfigError: as of :func:`edited_plan`.
    """
    entries = dict(graph.plan.entries)
    if isinstance(keep.keep, Path):
        for name in edited_plan(keep.keep, graph.placement).names("int8"):
            entries[name] = graph.placement.plan.entries[name]
    return PrecisionPlan(entries)


def _edited(prepared: Prepared, path: Path) -> PrecisionPlan:
    """A plan from a file, with what was done to the convolutions that are in INT8."""
    plan = edited_plan(path, prepared.placement)
    entries = {}
    for name, own in prepared.graph.plan.entries.items():
        known = replace(own, corrections=prepared.plan.entries[name].corrections)
        entries[name] = plan.entries[name].edited_from(known)
    return PrecisionPlan(entries)


def _trade_off(
    prepared: Prepared, ranked: Callable[[], Sensitivity], bound: float, dataset: CocoDataset, progress: Progress
) -> TradeOff:
    count = 0

    def scored(model: onnx.ModelProto) -> Evaluation:
        nonlocal count
        count += 1
        stage = f"mAP, evaluation {count}"
        detector = Detector.running(model, prepared.config, prepared.graph.nms_mode)
        return evaluate(detector, dataset, lambda done, total: progress(stage, done, total), prepared.calibrated.cache)

    reference = scored(prepared.model)

    def measure(names: tuple[str, ...]) -> Score:
        plan = keeping(prepared.plan, dict.fromkeys(names, "tried"), Cause.KEPT_BOUND)
        got = scored(prepared.explicit(plan).model)
        found = compare(got, reference)
        return Score(got.result.map, found.difference, found.low, found.high)

    return smallest(ranked, bound, reference.result.map, measure)


def without_overflow(prepared: Prepared, plan: PrecisionPlan) -> PrecisionPlan:
    """The plan, with FP32 for what would overflow FP16 on the calibration images; a warning names each case."""
    names = plan.names("fp16")
    over = {name: value for name, value in _reached(prepared, names).items() if value > LARGEST}
    weights = {tensor.name: tensor for tensor in prepared.model.graph.initializer}
    nodes = {node.name: node for node in prepared.model.graph.node}
    entries = dict(plan.entries)
    for name in names:
        heaviest = float(np.abs(onnx.numpy_helper.to_array(weights[nodes[name].input[1]])).max(initial=0))
        region = region_of(prepared.model, (name,)) if over else ()
        wrong = [(tensor, over[tensor]) for tensor in region if tensor in over]
        if heaviest > LARGEST:
            wrong.append(("its weights", heaviest))
        if wrong:
            what, value = max(wrong, key=lambda found: found[1])
            reason = f"FP16 would overflow: '{what}' reaches {value:.3g}, over {LARGEST:g}"
            entries[name] = Entry("fp32", reason, Cause.FP16_OVERFLOW)
            warnings.warn(f"'{name}' stays in FP32: {reason}", TrtdetWarning, stacklevel=3)
    return PrecisionPlan(entries)


def _reached(prepared: Prepared, names: tuple[str, ...]) -> dict[str, float]:
    """The largest magnitude of every tensor that would be FP16, from the histograms or from one more pass."""
    calibrated, graph = prepared.calibrated, prepared.graph
    known = {name: histogram.amax for name, histogram in calibrated.collection.histograms.items()}
    tensors = region_of(graph.model, names) if names else ()
    source = graph.model.graph.input[0].name
    unknown = [name for name in tensors if name not in known and name not in prepared.reached and name != source]
    if unknown and calibrated.paths:
        runner = OnnxRunner(expose(graph.model, unknown))
        largest = dict.fromkeys(unknown, 0.0)
        pixels, images = graph.config.input, calibrated.paths
        for batch in ImageStream(images, pixels, batch_size=runner.batch or 1, cache=calibrated.cache):
            for name, value in runner(batch.images).items():
                largest[name] = max(largest.get(name, 0.0), float(np.abs(value).max(initial=0)))
        prepared.reached.update(largest)
    elif unknown:
        warnings.warn(
            f"without images {len(unknown)} tensors that run in FP16 cannot be checked for overflow; give --images",
            TrtdetWarning,
            stacklevel=4,
        )
    known.update(prepared.reached)
    return {name: known[name] for name in tensors if name in known}
