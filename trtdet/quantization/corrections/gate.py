"""The gate: what lowers the error on images that nothing was computed from is kept, everything else is left out.

First at each layer, then at the head. An error at one layer does not say what it does to a detection, so the layers'
corrections are put together in a few ways (:data:`POLICIES`), and the whole of each is run on the held-back images: the
way of the least error at the decoded boxes and scores is taken, if that is less than without any correction.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from trtdet.calibration import Range, Ranges, expose
from trtdet.errors import TrtdetWarning
from trtdet.quantization.corrections.base import Correction
from trtdet.quantization.corrections.sources import Sources
from trtdet.quantization.corrections.trials import Choice, Pick, Site
from trtdet.quantization.head_error import HeadError
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.plugin_fusion import requantize
from trtdet.quantization.precision import PrecisionPlan
from trtdet.quantization.qdq import Corrections, insert_qdq

POLICIES = {
    "layers": "each kept where it lowers its layer's error",
    "mapped": "channel maps everywhere, the others where they lower their layer's error",
    "all": "every correction in every layer",
}
"""Ways to put the layers' corrections together."""


@dataclass(frozen=True, eq=False)
class Task:
    """What is corrected.

    Attributes:
        model: in float.
        placement: of its Q/DQ pairs.
        candidates: ranges by rule; the first is what the others and the corrections are compared with.
        corrections: that may be used, in the order of the registry.
        fit, held: the images that corrections are computed from, and those that judge them.
        sources: run models on images.
    """

    model: onnx.ModelProto
    placement: QdqPlacement
    candidates: Mapping[str, Ranges]
    corrections: tuple[Correction, ...]
    fit: Sequence[Path]
    held: Sequence[Path]
    sources: Sources

    @property
    def first(self) -> Ranges:
        return next(iter(self.candidates.values()))


@dataclass(frozen=True, eq=False)
class Corrected:
    """The result.

    Attributes:
        ranges: the thresholds of the rule; with ``auto``, of the best rule of each tensor.
        corrections: what is written instead of the plain form; empty where nothing was kept.
        plan: the precision plan with the steps taken for each convolution.
        summary: one sentence for each kind of correction, and one for the error at the head.
    """

    ranges: Ranges
    corrections: Corrections
    plan: PrecisionPlan
    summary: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Whole:
    """The layers' corrections put together by a policy: a choice for each site."""

    policy: str
    choices: tuple[Choice, ...]
    ranges: Ranges
    corrections: Corrections


def judge(task: Task, sites: Sequence[Site]) -> Corrected:
    """The last gate: the whole must lower the error of the decoded detections on the held-back images."""
    first = task.first
    policies = list(POLICIES) if task.corrections else ["layers"]
    wholes = [_put_together(task, sites, policy) for policy in policies]
    # The activations of the plugin library round as well, and more than the pairs alone: they are part of the judging.
    variants = [requantize(insert_qdq(task.model, task.placement, first), first.inputs).model]
    for whole in wholes:
        int8 = insert_qdq(task.model, task.placement, whole.ranges, whole.corrections)
        variants.append(requantize(int8, whole.ranges.inputs).model)
    before, *errors = head_errors(task, variants)
    after = min(errors)
    figures = f"error at the head {before:.4f} -> {after:.4f} on {len(task.held)} images held back"
    if after > before:
        warnings.warn(
            f"corrected, the {figures}: the plain rule '{first.rule}' stands; are the calibration images like those "
            "the detector was trained on?",
            TrtdetWarning,
            stacklevel=4,
        )
        return Corrected(first, Corrections(), task.placement.plan, (f"none kept: {figures}",))
    whole = wholes[errors.index(after)]
    steps = {}
    for site, choice in zip(sites, whole.choices, strict=True):
        steps.update(site.steps(choice))
    entries = {
        name: replace(entry, corrections=steps.get(name, ())) for name, entry in task.placement.plan.entries.items()
    }
    how = [POLICIES[whole.policy]] if task.corrections else []
    return Corrected(whole.ranges, whole.corrections, PrecisionPlan(entries), (*_summary(task, whole), *how, figures))


def choose(site: Site, policy: str) -> Choice:
    """What a policy takes: one trial and, for each convolution, a rounding and an offset; see :data:`POLICIES`."""
    rule = min(site.rules, key=lambda trial: trial.loss())
    maps = site.worthwhile()
    options = maps if maps and policy != "layers" else [rule, *maps]
    trial = min(options, key=lambda trial: trial.loss())
    picks = {}
    for name, errors in trial.errors.items():
        best = errors.size - 1 if policy == "all" else int(errors.argmin())
        picks[name] = Pick(*divmod(best, errors.shape[1]))
    return Choice(rule, trial, picks, site.too_dear or len(maps) < len(site.mapped))


def head_errors(task: Task, quantized: Sequence[onnx.ModelProto]) -> list[float]:
    """The error of each INT8 model at the decoded boxes and scores, on the held-back images."""
    head = task.sources.head
    exposed = [expose(model, head.names) for model in (task.model, *quantized)]
    errors = [HeadError() for _ in quantized]
    for reference, *others in task.sources.outputs(exposed, task.held, "correcting: detections"):
        for error, other in zip(errors, others, strict=True):
            error.update(head.read(reference), head.read(other))
    return [error.distance for error in errors]


def _put_together(task: Task, sites: Sequence[Site], policy: str) -> _Whole:
    choices = [choose(site, policy) for site in sites]
    maps, weights, best = {}, {}, {}
    for site, choice in zip(sites, choices, strict=True):
        weights.update(site.rounded(choice))
        best[site.tensor] = task.candidates[choice.rule.rule].tensors[site.tensor]
        if choice.trial.names:
            maps[site.tensor] = choice.trial.map
    return _Whole(policy, tuple(choices), _ranges(task, best), Corrections(maps, weights))


def _ranges(task: Task, best: Mapping[str, Range]) -> Ranges:
    """The ranges of the one rule, or each tensor's from its best rule."""
    if len(task.candidates) == 1:
        return task.first
    return replace(task.first, rule="auto", percent=None, tensors={**task.first.tensors, **best})


def _summary(task: Task, whole: _Whole) -> tuple[str, ...]:
    """How many tensors or convolutions each correction was kept for, and each rule chosen for."""
    convs = [(choice.trial, name, pick) for choice in whole.choices for name, pick in choice.picks.items()]
    used = [trial.roundings[name][pick.rounding].name for trial, name, pick in convs]
    used += [trial.offsets[pick.offset] for trial, _, pick in convs]
    used += [name for choice in whole.choices for name in choice.trial.names]
    total = {"tensors": len(whole.choices), "convs": len(convs)}
    sentences = [
        f"{correction.name}: {used.count(correction.name)} of {total[correction.counts]} {correction.counts}"
        for correction in task.corrections
    ]
    left_out = sum(choice.left_out for choice in whole.choices)
    if left_out:
        sentences.append(
            f"maps left out: {left_out} of {total['tensors']} tensors, where FP16 convolutions would buy more for the "
            "bytes of a Mul"
        )
    if whole.ranges.rule == "auto":
        rules = [choice.rule.rule for choice in whole.choices]
        sentences.append("rules: " + ", ".join(f"{rule} {rules.count(rule)}" for rule in dict.fromkeys(sorted(rules))))
    return tuple(sentences)
